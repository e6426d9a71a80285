"""SGLang's routes for weight-update groups, which the reference engine has as well."""

from equipoise.serve.clients.http import JsonClient


class GroupRoutes:
    """Of an engine that `_http` reaches."""

    _http: JsonClient

    def join_group(self, address: str, port: int, rank_offset: int, size: int, name: str, backend: str) -> None:
        """See `EngineClient`."""
        self._http.post(
            "/init_weights_update_group",
            {
                "master_address": address,
                "master_port": port,
                "rank_offset": rank_offset,
                "world_size": size,
                "group_name": name,
                "backend": backend,
            },
        )

    def leave_group(self, name: str) -> None:
        """See `EngineClient`."""
        self._http.post("/destroy_weights_update_group", {"group_name": name})
