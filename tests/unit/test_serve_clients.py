"""Clients of SGLang and vLLM against stand-ins that take requests as those servers' packages define them."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.accelerator import CPUAccelerator
from equipoise.distributed.weight_update import DistributedUpdate, UpdateGroup
from equipoise.distributed.weight_update.group import reach_store
from equipoise.errors import WeightUpdateError
from equipoise.serve.clients import connect
from equipoise.serve.clients.http import EngineError, JsonClient
from equipoise.serve.clients.sglang import SGLangClient, register_worker
from equipoise.serve.clients.vllm import VLLMClient
from equipoise.serve.regions import hf_regions, weight_source
from unit.engine_rig import trainer_model

FIELDS = json.loads((Path(__file__).parent / "server_fields.json").read_text())
SRC = Path(__file__).resolve().parents[2] / "src"


class StandIn:
    """An HTTP server that records requests and answers by a method of the subclass, else {"success": true}."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.missing: set[str] = set()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                path = self.path.partition("?")[0]
                stand_in.seen.append((self.path, body))
                status, value = 404, {"detail": "Not Found"}
                if path not in stand_in.missing:
                    status, value = stand_in.respond(path, body)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"success": True, "message": ""}

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]


class SGLangStandIn(StandIn):
    """Receives buckets as SGLang does: bytes of all tensors one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.version = "default"
        self.fail_at = -1

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/server_info":
            return 200, {"tp_size": 1, "weight_version": self.version}
        if path == "/init_weights_update_group":
            address, port = body["master_address"], body["master_port"]
            store = reach_store(address, port, 20)
            rank, size = body["rank_offset"], body["world_size"]
            self.group = UpdateGroup(CPUAccelerator(), body["group_name"], store, rank, size, 20, body["backend"])
        if path == "/update_weights_from_distributed":
            if self.paths().count(path) - 1 == self.fail_at:
                return 400, {"success": False, "message": "shape mismatch"}
            assert body["load_format"] == "flattened_bucket"
            offset, places = 0, []
            for dtype, shape in zip(body["dtypes"], body["shapes"]):
                itemsize = getattr(torch, dtype).itemsize
                assert offset % itemsize == 0
                places.append(offset)
                offset += itemsize * torch.Size(shape).numel()
            data = torch.empty(offset, dtype=torch.uint8)
            self.group.broadcast(data).wait()
            for name, dtype, shape, place in zip(body["names"], body["dtypes"], body["shapes"], places):
                count = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
                self.tensors[name] = data[place : place + count].view(getattr(torch, dtype)).view(shape).clone()
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return 200, {"success": True, "message": ""}


def check_fields(server: str, seen: list[tuple[str, dict[str, Any]]]) -> set[str]:
    """Every recorded body has the fields that its class requires, and no others than it has."""
    checked = set()
    for path, body in seen:
        known = FIELDS[server]["requests"].get(path.partition("?")[0])
        if known is not None:
            assert set(known["required"]) <= set(body) <= {*known["required"], *known["optional"]}, path
            checked.add(path)
    return checked


@pytest.mark.parametrize("has_sessions", [True, False])
def test_sglang_gets_every_tensor_and_requests_of_its_own_shape(has_sessions: bool) -> None:
    model = trainer_model()
    with SGLangStandIn() as server:
        if not has_sessions:
            server.missing = {"/begin_weight_update", "/end_weight_update"}
        client = SGLangClient(server.url, timeout_s=20)
        source = weight_source(model, torch.bfloat16)
        with DistributedUpdate(source, [client], CPUAccelerator(), bucket_bytes=9000, deadline_s=20) as update:
            update.update("7")
        tensors = model.state_dict()
        regions = hf_regions({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        assert server.tensors.keys() == regions.keys()
        for name, region in regions.items():
            part = tensors[region.tensor][tuple(slice(a, a + n) for a, n in zip(region.start, region.size))]
            assert torch.equal(server.tensors[name], part.reshape(region.shape).bfloat16()), name
        assert server.version == "7"
        checked = check_fields("sglang", server.seen)
        assert {"/pause_generation", "/init_weights_update_group", "/update_weights_from_distributed"} <= checked
        order = [
            path
            for path in server.paths()
            if path in ("/flush_cache", "/update_weight_version", "/continue_generation")
        ]
        assert order == ["/flush_cache", "/flush_cache", "/update_weight_version", "/continue_generation"]


def test_sglang_that_refuses_a_bucket_stays_paused_with_its_old_version() -> None:
    model = trainer_model()
    with SGLangStandIn() as server:
        server.fail_at = 1
        client = SGLangClient(server.url, timeout_s=20)
        source = weight_source(model)
        with DistributedUpdate(source, [client], CPUAccelerator(), bucket_bytes=9000, deadline_s=10) as update:
            with pytest.raises(WeightUpdateError, match="shape mismatch"):
                update.update("7")
            assert "/continue_generation" not in server.paths()
            assert server.version == "default"
            server.fail_at = -1
            update.update("8")
        assert server.paths()[-1] == "/continue_generation"
        assert server.version == "8"


class VLLMStandIn(StandIn):
    """Receives tensors one by one through a group that a test made."""

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/get_world_size":
            return 200, {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            store = reach_store(info["master_address"], info["master_port"], 20)
            self.group = UpdateGroup(CPUAccelerator(), "test", store, info["rank_offset"], info["world_size"], 20)
        if path == "/update_weights":
            info = body["update_info"]
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"]):
                self.tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast(self.tensors[name]).wait()
        return 200, {}


def test_vllm_gets_every_tensor_and_requests_of_its_own_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's group in the place of vLLM's communicator."""
    from torch.distributed import TCPStore

    def make(address: str, port: int, size: int, device: torch.device) -> UpdateGroup:
        store = TCPStore(address, port, None, True, wait_for_workers=False)
        return UpdateGroup(CPUAccelerator(), "test", store, 0, size, 20)

    monkeypatch.setattr(VLLMClient, "group_maker", staticmethod(make))
    model = trainer_model()
    with VLLMStandIn() as server:
        server.tensors = {}
        client = VLLMClient(server.url, timeout_s=20)
        with DistributedUpdate(
            weight_source(model), [client], CPUAccelerator(), bucket_bytes=9000, deadline_s=20
        ) as update:
            update.update("3")
        assert torch.equal(server.tensors["lm_head.weight"], model.lm_head.weight)
        expert = model.model.layers[2].mlp.experts.down_proj[4]
        assert torch.equal(server.tensors["model.layers.2.mlp.experts.4.down_proj.weight"], expert)
        check_fields("vllm", server.seen)
        check_fields("vllm", [("init_info", b["init_info"]) for p, b in server.seen if "init_info" in b])
        check_fields("vllm", [("update_info", b["update_info"]) for p, b in server.seen if "update_info" in b])
        others = [path for path in server.paths() if path != "/update_weights"]
        assert others == [
            *("/get_world_size", "/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"),
            *("/pause?mode=keep", "/start_weight_update", "/finish_weight_update", "/resume"),
        ]


def test_routers_without_the_health_check_field_get_the_request_without_it() -> None:
    class Router(StandIn):
        knows = True

        def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            if "disable_health_check" in body and not self.knows:
                return 422, {"error": "unknown field `disable_health_check`"}
            return 200, {}

    with Router() as router:
        register_worker(router.url, "http://127.0.0.1:30000")
        assert router.seen == [
            ("/workers", {"url": "http://127.0.0.1:30000", "worker_type": "regular", "disable_health_check": True})
        ]
        router.knows = False
        register_worker(router.url, "http://127.0.0.1:30001")
        assert router.seen[-1] == ("/workers", {"url": "http://127.0.0.1:30001", "worker_type": "regular"})
        router.missing = {"/workers"}
        with pytest.raises(EngineError, match="404"):
            register_worker(router.url, "http://127.0.0.1:30002")


def test_colocated_updates_of_engines_that_unpickle_are_refused() -> None:
    for kind in ("sglang", "vllm"):
        client = connect(kind, "http://127.0.0.1:1")
        with pytest.raises(WeightUpdateError, match="pickled handles only"):
            client.load(None, [])
    with pytest.raises(ValueError, match="choose equipoise, sglang or vllm"):
        connect("other", "http://127.0.0.1:1")


@pytest.mark.parametrize("url", ["ftp://a", "", "http://"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(EngineError, match="is no address of an engine"):
        JsonClient(url)


def test_selection_is_final_before_anything_of_a_server_is_imported() -> None:
    program = (
        "import sys, importlib.abc\n"
        "class Watch(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('vllm', 'sglang'):\n"
        "            from equipoise.accelerator import selection_report\n"
        "            print('selected', selection_report()['winner'])\n"
        "            raise ImportError('stand-in for ' + name)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import torch\n"
        "from equipoise.serve.clients import connect\n"
        "assert not {'vllm', 'sglang'} & set(sys.modules)\n"
        "client = connect('vllm', 'http://127.0.0.1:1')\n"
        "try:\n"
        "    client.group_maker('127.0.0.1', 1, 2, torch.device('cpu'))\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    environment = {"PYTHONPATH": str(SRC), "EQUIPOISE_ACCELERATOR": "nonsense", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "nonsense" in done.stderr  # refused by selection, before a server's package is looked for
    assert "selected" not in done.stdout
    environment["EQUIPOISE_ACCELERATOR"] = "cpu"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("selected cpu\nupdates of vLLM need its package beside the trainer")
