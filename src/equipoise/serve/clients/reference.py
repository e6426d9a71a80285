"""Client of this project's own engine: begin, buckets, commit, with checksums and JSON handles."""

import base64
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equipoise.distributed.weight_update import EngineInfo, EngineSeconds, Layout, Manifest, TensorSpec
from equipoise.errors import WeightUpdateError
from equipoise.serve.clients.groups import GroupRoutes
from equipoise.serve.clients.http import EngineError, JsonClient
from equipoise.serve.worker import UNKNOWN_LAYOUT


class ReferenceClient(GroupRoutes):
    """`EngineClient` of `equipoise serve`. `pause_mode`: what becomes of running requests, see `EngineLoop.pause`."""

    layout = Layout()
    group_maker = None

    def __init__(
        self, url: str, token: str | None = None, *, pause_mode: str = "retract", timeout_s: float = 300.0
    ) -> None:
        self._http = JsonClient(url, token, timeout_s)
        self.address, self._pause_mode = self._http.url, pause_mode
        self._update_id: str | None = None
        self._known: str | None = None  # digest of the layout that the engine has

    def describe(self) -> EngineInfo:
        info = self._http.get("/get_weights_info")
        tensors = {name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in info["tensors"].items()}
        experts = [(first, count) for first, count in info["experts"]]
        return EngineInfo(info["num_ranks"], info["weight_version"], tensors, experts)

    def pause(self) -> None:
        self._http.post("/pause_generation", {"mode": self._pause_mode})

    def resume(self) -> None:
        self._http.post("/continue_generation")

    def begin(self, manifest: Manifest) -> None:
        """Takes over from an update that a trainer before this one has left open."""
        self._update_id = secrets.token_hex(16)
        body: dict[str, Any] = {"update_id": self._update_id, "take_over": True}
        if self._known == manifest.digest:
            try:
                short = {"version": manifest.version, "digest": manifest.digest}
                self._http.post("/begin_weight_update", body | short)
                return
            except EngineError as error:
                if UNKNOWN_LAYOUT not in str(error):
                    raise
        self._http.post("/begin_weight_update", body | {"manifest": manifest.model_dump(mode="json")})
        self._known = manifest.digest

    def receive(self, manifest: Manifest, group: str, indices: Sequence[int]) -> EngineSeconds:
        body = {"update_id": self._open(), "group_name": group, "buckets": list(indices)}
        return self._http.post("/update_weights_from_distributed", body).get("seconds")

    def load(self, manifest: Manifest, offers: Sequence[dict[str, Any]]) -> EngineSeconds:
        body = {"update_id": self._open(), "handles": list(offers)}
        return self._http.post("/update_weights_from_tensor", body).get("seconds")

    def commit(self, manifest: Manifest, checksums: Mapping[int, int]) -> None:
        body = {"update_id": self._open(), "checksums": [list(pair) for pair in checksums.items()]}
        self._http.post("/commit_weight_update", body)
        self._update_id = None

    def abandon(self, reason: str) -> None:
        if self._update_id is not None:
            update_id, self._update_id = self._update_id, None
            self._http.post("/abandon_weight_update", {"update_id": update_id, "reason": reason})

    def _open(self) -> str:
        if self._update_id is None:
            raise WeightUpdateError(f"no update of {self.address} is open: begin one first")
        return self._update_id

    # Beyond the protocol

    def generate(self, input_ids: Sequence[int], **options: Any) -> dict[str, Any]:
        """`POST /generate`; see `GenerateRequest`."""
        return self._http.post("/generate", {"input_ids": list(input_ids), **options})

    def weight_version(self) -> str:
        """Of the weights that the engine shows."""
        return self._http.get("/get_weight_version")["weight_version"]

    def server_info(self) -> dict[str, Any]:
        """`GET /server_info`."""
        return self._http.get("/server_info")

    def checksums(self) -> dict[str, int]:
        """Of every tensor, to be compared with `checkpoint.tensors.checksums` of the trainer's."""
        return self._http.post("/weights_checker", {"action": "checksum"})["checksums"]

    def release_memory(self, *tags: str) -> None:
        """Gives memory of `weights` and `kv_cache` back; without tags of both."""
        self._http.post("/release_memory_occupation", {"tags": list(tags)} if tags else {})

    def resume_memory(self, *tags: str) -> None:
        """Takes it back."""
        self._http.post("/resume_memory_occupation", {"tags": list(tags)} if tags else {})

    def is_healthy(self) -> bool:
        """Whether the engine answers and can do anything."""
        with contextlib.suppress(EngineError):
            self._http.get("/health")
            return True
        return False


def routes_of(answer: Mapping[str, Any], num_tokens: int) -> np.ndarray:
    """Recorded experts [tokens - 1, MoE layers, top-k] of an answer whose prompt and output are `num_tokens`.

    Also reads SGLang's form, int32 without a dtype (the shape is then not known here: rows, -1). Raises EngineError if
    they are missing or of another number of rows: at the first sample, not in training.
    """
    meta = answer["meta_info"]
    text = meta.get("routed_experts")
    if text is None:
        raise EngineError(
            "the answer has no routed_experts: ask with return_routed_experts, start the server with its option for "
            "it, and check that no proxy between drops the field",
            None,
        )
    flat = np.frombuffer(base64.b64decode(text), dtype=meta.get("routed_experts_dtype", "int32"))
    shape = meta.get("routed_experts_shape") or [num_tokens - 1, -1]
    if shape[0] != num_tokens - 1 or flat.size % max(1, num_tokens - 1):
        raise EngineError(f"routed_experts has {shape[0]} rows for {num_tokens} tokens: expected one less", None)
    return flat.reshape(shape)
