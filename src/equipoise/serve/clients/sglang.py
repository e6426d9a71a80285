"""Client of SGLang servers (request bodies as in its package 0.5.23), over the distributed path.

A bucket is one request and one broadcast, in SGLang's flattened layout. The version is set at the end, by a request of
its own. SGLang does not compare checksums and does not mark itself: after a failed update its weights are a mixture
until the next update succeeds, and `abandon` can only leave it paused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.distributed.weight_update import EngineInfo, Layout, Manifest
from equipoise.errors import WeightUpdateError
from equipoise.serve.clients.groups import GroupRoutes
from equipoise.serve.clients.http import EngineError, JsonClient

NOT_FOUND = (404, 405)


class SGLangClient(GroupRoutes):
    """`EngineClient` of an SGLang server. num_ranks: its processes (tensor x data parallel ranks that hold weights), if
    `/server_info` does not say. pause_mode: `abort`, `retract` or `in_place`."""

    layout = Layout(alignment=1, split=False, checks=False, one_sender=True)
    group_maker = None

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        num_ranks: int | None = None,
        pause_mode: str = "retract",
        timeout_s: float = 300.0,
    ) -> None:
        self._http = JsonClient(url, token, timeout_s)
        self.address, self._pause_mode, self._num_ranks = self._http.url, pause_mode, num_ranks
        self._failed = False

    def describe(self) -> EngineInfo:
        info = self._http.get("/server_info")
        num_ranks = self._num_ranks or int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)
        return EngineInfo(num_ranks, str(info.get("weight_version", "default")))

    def pause(self) -> None:
        self._http.post("/pause_generation", {"mode": self._pause_mode})
        if self._pause_mode != "in_place":
            self._http.post("/flush_cache")

    def resume(self) -> None:
        if self._failed:
            raise WeightUpdateError(f"{self.address} stays paused: its weights are of a failed update")
        self._http.post("/continue_generation")

    def leave_group(self, name: str) -> None:
        try:
            super().leave_group(name)
        except EngineError as error:
            if error.status is None:
                raise

    def begin(self, manifest: Manifest) -> None:
        """Servers before the session routes go without them."""
        self._optional("/begin_weight_update", {})

    def receive(self, manifest: Manifest, group: str, indices: Sequence[int]) -> None:
        self._failed = True
        for index in indices:
            names = [piece.name for piece in manifest.buckets[index].pieces]
            specs = [manifest.tensors[name] for name in names]
            self._http.post(
                "/update_weights_from_distributed",
                {
                    "names": names,
                    "dtypes": [spec.dtype for spec in specs],
                    "shapes": [list(spec.shape) for spec in specs],
                    "group_name": group,
                    "flush_cache": False,
                    "load_format": "flattened_bucket",
                },
            )

    def load(self, manifest: Manifest, offers: Sequence[dict[str, Any]]) -> None:
        raise WeightUpdateError(
            f"{self.address}: memory of this machine is offered as plain JSON, and SGLang takes pickled handles only: "
            "use the distributed path"
        )

    def commit(self, manifest: Manifest, checksums: Mapping[int, int]) -> None:
        self._optional("/end_weight_update", {})
        self._http.post("/flush_cache")
        self._http.post("/update_weight_version", {"new_version": manifest.version, "abort_all_requests": False})
        self._failed = False

    def abandon(self, reason: str) -> None:
        if self._failed:
            self._optional("/end_weight_update", {})

    def _optional(self, path: str, body: dict[str, Any]) -> None:
        try:
            self._http.post(path, body)
        except EngineError as error:
            if error.status not in NOT_FOUND:
                raise


def register_worker(router_url: str, worker_url: str, token: str | None = None, timeout_s: float = 30.0) -> None:
    """Makes an engine known to SGLang's router, without health checks that would drop it while it is paused. Routers
    that do not know the field get the request without it."""
    router, body = JsonClient(router_url, token, timeout_s), {"url": worker_url, "worker_type": "regular"}
    try:
        router.post("/workers", body | {"disable_health_check": True})
    except EngineError as error:
        if error.status not in (400, 422):
            raise
        router.post("/workers", body)
