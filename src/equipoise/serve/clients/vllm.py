"""Client of vLLM servers (request bodies as in its package 0.33.0), over the distributed path.

The server has to run with VLLM_SERVER_DEV_MODE=1 and a weight-transfer configuration of backend nccl. The group is
vLLM's own: its Python package has to be installed on the trainer's side, and is imported when the group is made.
Tensors are broadcast one by one. vLLM compares no checksums; a failed update leaves it paused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from equipoise.accelerator import get_accelerator, initialize_accelerator
from equipoise.distributed.weight_update import EngineInfo, Layout, Manifest
from equipoise.errors import WeightUpdateError
from equipoise.serve.clients.http import EngineError, JsonClient


class _Work:
    """A broadcast on the current stream."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return bool(self._event.query()) if hasattr(self._event, "query") else True

    def wait(self) -> None:
        self._event.wait()


class _PyNcclGroup:
    """vLLM's communicator as the trainer's side of a group."""

    def __init__(self, address: str, port: int, size: int, device: torch.device) -> None:
        initialize_accelerator()  # before vLLM looks for devices
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            raise WeightUpdateError(f"updates of vLLM need its package beside the trainer: {error}") from error
        group = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=size)
        self._communicator: Any = PyNcclCommunicator(group, device=device)

    def broadcast(self, tensor: torch.Tensor) -> _Work:
        accelerator = get_accelerator()
        self._communicator.broadcast(tensor, src=0, stream=accelerator.current_stream())
        event = accelerator.event()
        event.record()
        return _Work(event)

    def close(self, *, abort: bool = False) -> None:
        self._communicator = None


class VLLMClient:
    """`EngineClient` of a vLLM server. pause_mode: `abort`, `wait` or `keep`."""

    layout = Layout(alignment=16, split=False, flattened=False, checks=False, one_sender=True)
    group_maker = _PyNcclGroup

    def __init__(
        self, url: str, token: str | None = None, *, pause_mode: str = "keep", timeout_s: float = 300.0
    ) -> None:
        self._http = JsonClient(url, token, timeout_s)
        self.address, self._pause_mode = self._http.url, pause_mode
        self._failed = False

    def describe(self) -> EngineInfo:
        return EngineInfo(int(self._http.get("/get_world_size")["world_size"]), "default")

    def pause(self) -> None:
        self._http.post("/pause", query={"mode": self._pause_mode})

    def resume(self) -> None:
        if self._failed:
            raise WeightUpdateError(f"{self.address} stays paused: its weights are of a failed update")
        self._http.post("/resume")

    def join_group(self, address: str, port: int, rank_offset: int, size: int, name: str, backend: str) -> None:
        info = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": size}
        self._http.post("/init_weight_transfer_engine", {"init_info": info | {"packed": False}})

    def leave_group(self, name: str) -> None:
        try:
            self._http.post("/shutdown_weight_transfer_engine")
        except EngineError as error:
            if error.status is None:
                raise

    def begin(self, manifest: Manifest) -> None:
        self._http.post("/start_weight_update")
        self._failed = True

    def receive(self, manifest: Manifest, group: str, indices: Sequence[int]) -> None:
        for index in indices:
            names = [piece.name for piece in manifest.buckets[index].pieces]
            specs = [manifest.tensors[name] for name in names]
            info = {
                "names": names,
                "dtype_names": [spec.dtype for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
            }
            self._http.post("/update_weights", {"update_info": info})

    def load(self, manifest: Manifest, offers: Sequence[dict[str, Any]]) -> None:
        raise WeightUpdateError(
            f"{self.address}: memory of this machine is offered as plain JSON, and vLLM takes pickled handles only: "
            "use the distributed path"
        )

    def commit(self, manifest: Manifest, checksums: Mapping[int, int]) -> None:
        self._http.post("/finish_weight_update", {"weight_version": manifest.version})
        self._failed = False

    def abandon(self, reason: str) -> None:
        """There is no request for it: the server stays paused."""
