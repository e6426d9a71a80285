"""Batched generation on one rank: requests in, tokens, log-probabilities and recorded routes out.

Every rank of an EP group has requests of its own and calls `step` together with the others, also without any. A step
computes, for each running sequence, the tokens whose keys and values are not kept yet: one while it generates, a chunk
of the prompt before. Throughput is not the goal; being right is.

Shapes: T new tokens of a step, D features, L MoE layers, K experts per token, V vocabulary.
"""

from collections import OrderedDict, deque

import numpy as np
import torch
from pydantic import Field, PositiveInt

from equipoise.config import Config
from equipoise.errors import ConfigError
from equipoise.models.model import MoEForCausalLM
from equipoise.models.rotary import rotary_tables
from equipoise.serve.kv_cache import KVCache, Span
from equipoise.serve.request import Finished, Prompt
from equipoise.serve.sampling import draw, log_probabilities
from equipoise.serve.sequence import Sequence

NO_VERSION = "default"
"""Weight version of an engine that was never updated, as in SGLang."""


class EngineConfig(Config):
    """Sizes of one engine process."""

    max_running_requests: PositiveInt = 16
    """Sequences that a process works on at a time; each has a slot for keys and values."""
    context_length: PositiveInt = 2048
    """Tokens of a slot: prompt and output of one request."""
    chunked_prefill_size: PositiveInt = 512
    """Tokens that one step computes at most, of all sequences together."""
    prefix_reuse: bool = True
    """Whether keys and values of an equal beginning, computed under the same weights, are copied."""
    logits_rows: int = Field(256, ge=1)
    """Rows of logits that are held at a time."""


def routes_dtype(num_experts: int) -> np.dtype:
    """The smallest integer dtype that holds every expert id."""
    return np.dtype(np.uint8 if num_experts <= 2**8 else np.int16 if num_experts <= 2**15 else np.int32)


class Engine:
    """See the module docstring. `model` is from `build_engine_model`; its weights may change between steps, together
    with `set_version`."""

    def __init__(self, model: MoEForCausalLM, config: EngineConfig) -> None:
        self.model, self.config = model, config
        self.version = NO_VERSION
        weight = model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.cache = KVCache(model.config, config.max_running_requests, config.context_length, self.dtype, self.device)
        self._routes_dtype = routes_dtype(model.config.num_experts)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._kept: OrderedDict[int, Sequence | None] = OrderedDict.fromkeys(range(config.max_running_requests))
        """Slots that nobody works on, the one to be taken first at the front, with the sequence whose keys and values
        they still hold."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, prompt: Prompt) -> None:
        """Queues a request.

        Raises:
            ConfigError: it does not fit into a slot, or names tokens that the model does not have.
        """
        check_prompt(prompt, self.model.config.vocab_size, self.config.context_length)
        self._waiting.append(Sequence(prompt))

    def abort(self, rids: set[str] | None = None) -> list[Finished]:
        """Ends requests (None: all) where they are, with what they have."""
        gone: list[Sequence] = []
        kept: list[Sequence] = []
        for sequence in (*self._running, *self._waiting):
            (gone if rids is None or sequence.prompt.rid in rids else kept).append(sequence)
        for sequence in gone:
            if sequence.slot is not None:
                self._free(sequence)
        self._running = [s for s in kept if s.slot is not None]
        self._waiting = deque(s for s in kept if s.slot is None)
        return [sequence.result(self.version) for sequence in gone]

    def retract(self) -> None:
        """Puts every running sequence back in the queue, in order; its tokens stay, its keys and values go."""
        for sequence in reversed(self._running):
            sequence.computed = 0
            self._free(sequence)
            sequence.slot = None
            self._waiting.appendleft(sequence)
        self._running = []

    def flush(self) -> None:
        """Forgets the keys and values of finished sequences."""
        for slot in self._kept:
            self._kept[slot] = None

    def set_version(self, version: str) -> None:
        """The weights are others now: nothing that was computed with the old ones is used again."""
        self.version = version
        self.forget()

    def forget(self) -> None:
        """Drops all keys and values; running sequences compute theirs again."""
        self.flush()
        for sequence in (*self._running, *self._waiting):
            sequence.computed = 0
            sequence.has_old_routes |= sequence.num_routed > 0

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Computes the next tokens; returns the requests that are finished. Collective over the EP group."""
        self._admit()
        batch, spans = self._plan()
        hidden_TD, routes_LTK = self._forward(batch, spans)
        rows = routes_LTK.transpose(0, 1).to(getattr(torch, self._routes_dtype.name)).cpu().numpy()
        first = 0
        for sequence, span in zip(batch, spans):
            sequence.record_routes(span.start, rows[first : first + span.length])
            first += span.length
        self._prompt_logprobs(batch, spans, hidden_TD)
        self._draw(batch, spans, hidden_TD)
        done = [s for s in batch if s.finish is not None]
        for sequence in done:
            self._free(sequence)
            self._running.remove(sequence)
        return [sequence.result(self.version) for sequence in done]

    def _admit(self) -> None:
        while self._waiting and self._kept:
            sequence = self._waiting.popleft()
            source, count = self._longest_prefix(sequence)
            slot = next(iter(self._kept))
            if source is not None and source != slot:
                self.cache.copy_prefix(source, slot, count)
            del self._kept[slot]
            sequence.slot, sequence.computed = slot, count
            if not sequence.num_output:
                sequence.cached = count
            self._running.append(sequence)

    def _longest_prefix(self, sequence: Sequence) -> tuple[int | None, int]:
        """The slot with the longest equal beginning that may be used, and its length; records its routes."""
        limit = len(sequence.ids) - 1
        if sequence.prompt.logprobs and not sequence.num_output:
            limit = min(limit, max(0, sequence.prompt.logprob_start - 1))
        best: tuple[Sequence | None, int] = (None, 0)
        holders = [*self._running, *(s for s in self._kept.values() if s is not None)]
        holders = [s for s in holders if not s.has_old_routes]
        for holder in holders if self.config.prefix_reuse else ():
            most = min(limit, holder.computed, holder.num_routed)
            if most > best[1]:
                a, b = np.array(holder.ids[:most]), np.array(sequence.ids[:most])
                same = most if (a == b).all() else int((a != b).argmax())
                if same > best[1]:
                    best = (holder, same)
        source, count = best
        if source is None:
            return None, 0
        sequence.record_routes(0, source.routed(count))
        return source.slot, count

    def _plan(self) -> tuple[list[Sequence], list[Span]]:
        """Which tokens this step computes: generating sequences first, then prompts, up to the limit."""
        left, batch, spans = self.config.chunked_prefill_size, [], []
        for sequence in sorted(self._running, key=lambda s: len(s.ids) - s.computed > 1):
            count = min(len(sequence.ids) - sequence.computed, left)
            if count:
                assert sequence.slot is not None
                batch.append(sequence)
                spans.append(Span(sequence.slot, sequence.computed, count))
                sequence.computed += count
                left -= count
        return batch, spans

    def _forward(self, batch: list[Sequence], spans: list[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states behind the last norm, and the experts of each token.

        Without any token a padding token takes part in the collectives; no expert sees it.
        """
        decoder, config = self.model.model, self.model.config
        ids = [id_ for s, span in zip(batch, spans) for id_ in s.ids[span.start : span.start + span.length]]
        positions = [p for span in spans for p in range(span.start, span.start + span.length)]
        valid_1T = None if ids else torch.zeros(1, 1, dtype=torch.bool, device=self.device)
        ids, positions = ids or [0], positions or [0]
        ids_1T = torch.tensor([ids], dtype=torch.int64, device=self.device)
        positions_1T = torch.tensor([positions], dtype=torch.int64, device=self.device)
        x_1TD = decoder.embed_tokens(ids_1T)
        rotary = rotary_tables(positions_1T, config.head_dim, config.rope_theta, x_1TD.dtype, config.rope_scaling)
        routes = []
        for layer, attention in zip(decoder.layers[: config.num_hidden_layers], self.cache.step(spans)):
            x_1TD, routing = layer(x_1TD, rotary, attention, valid_1T)
            if routing is not None:
                routes.append(routing.ids_TK)
        empty = torch.empty(0, len(ids), config.num_experts_per_tok, dtype=torch.int32, device=self.device)
        return decoder.norm(x_1TD)[0], torch.stack(routes) if routes else empty

    def _prompt_logprobs(self, batch: list[Sequence], spans: list[Span], hidden_TD: torch.Tensor) -> None:
        """Log-probabilities of prompt tokens, for requests that want them: the token at p from the hidden state at
        p - 1."""
        rows, wanted, first = [], [], 0
        for sequence, span in zip(batch, spans):
            prompt = sequence.prompt
            if prompt.logprobs and prompt.logprob_start < len(prompt.ids):
                for position in range(span.start + 1, span.start + span.length + 1):
                    if max(1, prompt.logprob_start) <= position < len(prompt.ids):
                        rows.append(first + position - 1 - span.start)
                        wanted.append((sequence, position))
            first += span.length
        limit = self.config.logits_rows
        for begin in range(0, len(rows), limit):
            some = wanted[begin : begin + limit]
            logits = self.model.lm_head(hidden_TD[rows[begin : begin + limit]])
            log_probs = log_probabilities(logits, [s.prompt.temperature for s, _ in some])
            ids = torch.tensor([s.prompt.ids[p] for s, p in some], device=self.device)
            values = log_probs.gather(1, ids[:, None])[:, 0].tolist()
            for (sequence, position), value in zip(some, values):
                sequence.input_logprobs.setdefault(position, value)

    def _draw(self, batch: list[Sequence], spans: list[Span], hidden_TD: torch.Tensor) -> None:
        """The next token of each sequence whose tokens have all been computed."""
        rows, ready, first = [], [], 0
        for sequence, span in zip(batch, spans):
            first += span.length
            if sequence.computed == len(sequence.ids):
                if sequence.prompt.max_new_tokens == 0:
                    sequence.finish = {"type": "length", "length": 0}
                    continue
                rows.append(first - 1)
                ready.append(sequence)
        limit = self.config.logits_rows
        for begin in range(0, len(rows), limit):
            some = ready[begin : begin + limit]
            logits = self.model.lm_head(hidden_TD[rows[begin : begin + limit]])
            log_probs = log_probabilities(logits, [s.prompt.temperature for s in some])
            drawn = draw(log_probs, [s.prompt for s in some], [s.num_output for s in some])
            values = log_probs.gather(1, drawn[:, None])[:, 0].tolist()
            for sequence, id_, value in zip(some, drawn.tolist(), values):
                sequence.append(id_, value, self.version)

    def _free(self, sequence: Sequence) -> None:
        """The slot may be taken; until it is, others may use what it holds."""
        assert sequence.slot is not None
        self._kept[sequence.slot] = sequence if sequence.computed else None
        self._kept.move_to_end(sequence.slot, last=bool(sequence.computed))


def check_prompt(prompt: Prompt, vocab_size: int, context_length: int) -> None:
    """Raises ConfigError for what the engine cannot compute."""
    bad = [id_ for id_ in prompt.ids if not 0 <= id_ < vocab_size]
    if bad:
        raise ConfigError(f"input_ids has {bad[0]}: expected token ids from 0 to {vocab_size - 1}")
    total = len(prompt.ids) + prompt.max_new_tokens
    if total > context_length:
        raise ConfigError(
            f"{len(prompt.ids)} prompt tokens and max_new_tokens {prompt.max_new_tokens} are {total}, more than the "
            f"context of {context_length} tokens: shorten one, or start the engine with a larger --context-length"
        )
    if prompt.routes_start >= len(prompt.ids):
        raise ConfigError(
            f"routed_experts_start_len is {prompt.routes_start}, not below the prompt's {len(prompt.ids)} tokens"
        )
