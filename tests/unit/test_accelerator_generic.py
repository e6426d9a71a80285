"""A device type without a backend of its own works through torch's neutral interface, with its limits
named."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import Backend

from equipoise import accelerator as acc
from equipoise.accelerator import GenericAccelerator, selection
from equipoise.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("EQUIPOISE_ACCELERATOR", "MUSA_VISIBLE_DEVICES", "MUSA_PATCH_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(selection, "entry_points", lambda group: [])
    acc.reset()
    yield
    acc.reset()


def torch_has(device_type: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch built for `device_type`, with `count` devices present."""

    def current(check_available: bool = False) -> torch.device | None:
        return None if device_type is None or (check_available and count == 0) else torch.device(device_type)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


def test_torchs_own_accelerator_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_has("xpu", 2, monkeypatch)
    with pytest.warns(RuntimeWarning, match="limits of xpu: .*its memory is not reported"):
        chosen = acc.initialize_accelerator()
    assert isinstance(chosen, GenericAccelerator)
    assert (chosen.name, chosen.device_type, chosen.device_count()) == ("xpu", "xpu", 2)
    assert chosen.device(1) == torch.device("xpu", 1)
    assert chosen.world_backend() == "cpu:gloo,xpu:xccl"
    assert acc.selection_report()["winner"] == "xpu"


def test_without_a_device_it_is_a_line_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_has("xpu", 0, monkeypatch)
    assert acc.get_accelerator().name == "cpu"
    reasons = {c["name"]: c["reason"] for c in acc.selection_report()["considered"]}
    assert reasons["xpu"] == "torch was built for xpu but sees no device"


def test_a_type_with_its_own_backend_gets_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_has("cuda", 1, monkeypatch)
    names = [c["name"] for c in acc.selection_report()["considered"]]
    assert names.count("cuda") == 1


def test_a_type_that_is_only_used_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_has("mps", 1, monkeypatch)
    assert acc.initialize_accelerator() is None
    reasons = {c["name"]: c["reason"] for c in acc.selection_report()["considered"]}
    assert "used only on request: collectives" in reasons["mps"]
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "mps")
    with pytest.warns(RuntimeWarning, match="limits of mps"):
        chosen = acc.initialize_accelerator()
    assert chosen is not None
    assert chosen.name == "mps"


def test_what_torch_lacks_for_a_type_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_has("hpu", 1, monkeypatch)
    monkeypatch.delitem(Backend.default_device_backend_map, "hpu", raising=False)
    accelerator = GenericAccelerator("hpu")
    assert accelerator.limits() == (
        "no transport between processes is registered for it",
        "the state of its generator cannot be saved",
        "its memory is not reported",
    )
    assert accelerator.memory().total == 0
    assert accelerator.device_name() == "hpu"
    with pytest.raises(ConfigError, match=r"register_backend\(..., devices=\['hpu'\]\)"):
        accelerator.communication_backend()
    with pytest.raises(ConfigError, match=r"torch\.hpu has no get_rng_state"):
        accelerator.rng_state()
    with pytest.raises(ConfigError, match="device 1 was asked for, but this process sees 1"):
        accelerator.set_device(1)
    for capability in acc.CAPABILITIES:
        assert accelerator.supports(capability).reason


def test_a_named_device_type_without_a_runtime_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(check_available: bool = False) -> None:
        raise RuntimeError("Please register PrivateUse1HooksInterface first")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)
    assert acc.get_accelerator().name == "cpu"
