"""One request while the engine works on it."""

import base64

import numpy as np

from equipoise.serve.request import Finished, Prompt


class Sequence:
    """Tokens, where their keys and values are, and what has been recorded about them.

    ids: prompt and output. slot: None while waiting. computed: how many of the ids have keys and values in the slot.
    routes: recorded expert ids [rows, MoE layers, top-k] of the first `num_routed` tokens, in pieces. They stay when
    keys and values are computed again under other weights: they are the routes under which the tokens were drawn.
    has_old_routes: some are of other weights than the keys and values.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.ids = list(prompt.ids)
        self.slot: int | None = None
        self.computed = 0
        self.cached = 0
        self.output_logprobs: list[float] = []
        self.input_logprobs: dict[int, float] = {}
        self.routes: list[np.ndarray] = []
        self.num_routed = 0
        self.has_old_routes = False
        self.versions: list[tuple[str, int]] = []
        self.finish: dict | None = None

    @property
    def num_output(self) -> int:
        """Tokens drawn so far."""
        return len(self.ids) - len(self.prompt.ids)

    def record_routes(self, start: int, rows: np.ndarray) -> None:
        """Routes of the tokens at positions `start`, ...; of those, the ones that are new are kept."""
        new = rows[max(0, self.num_routed - start) :]
        if len(new):
            self.routes.append(new)
            self.num_routed += len(new)

    def routed(self, count: int) -> np.ndarray:
        """Routes of the first `count` tokens."""
        return np.concatenate(self.routes)[:count]

    def append(self, id_: int, logprob: float, version: str) -> None:
        """A drawn token; ends the sequence when it is a stop token or the last one allowed."""
        self.ids.append(id_)
        self.output_logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))
        if logprob != logprob:
            self.finish = {"type": "abort", "message": "the model's output is not a number"}
        elif id_ in self.prompt.stop_ids:
            self.finish = {"type": "stop", "matched": id_}
        elif self.num_output >= self.prompt.max_new_tokens:
            self.finish = {"type": "length", "length": self.prompt.max_new_tokens}

    def result(self, version: str) -> Finished:
        """The answer; `version` stands for a sequence that has drawn nothing."""
        prompt, num_prompt = self.prompt, len(self.prompt.ids)
        wanted = range(max(1, prompt.logprob_start), num_prompt) if prompt.logprobs else range(0)
        routes: dict = {}
        if prompt.routes and self.routes:
            rows = self.routed(min(self.num_routed, len(self.ids) - 1))[prompt.routes_start :]
            routes = {
                "routes": base64.b64encode(np.ascontiguousarray(rows).tobytes()).decode(),
                "routes_dtype": str(rows.dtype),
                "routes_shape": list(rows.shape),
            }
        return Finished(
            rid=prompt.rid,
            output_ids=self.ids[num_prompt:],
            finish=self.finish or {"type": "abort", "message": "aborted"},
            output_logprobs=[_finite(x) for x in self.output_logprobs] if prompt.logprobs else [],
            input_logprobs=[_finite(self.input_logprobs[p]) for p in wanted if p in self.input_logprobs],
            prompt_tokens=num_prompt,
            cached_tokens=self.cached,
            version=self.versions[-1][0] if self.versions else version,
            versions=self.versions,
            **routes,
        )


def _finite(value: float) -> float:
    """JSON has neither infinity nor NaN."""
    return value if abs(value) < 1e30 else -1e30
