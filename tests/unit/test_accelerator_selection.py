"""Which backend is chosen, why, and what the trace and the errors say."""

import json
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import torch

from equipoise import accelerator as acc
from equipoise.accelerator import Capability, CPUAccelerator, Registration, selection
from equipoise.errors import ConfigError

VARIABLES = (
    "EQUIPOISE_ACCELERATOR",
    "CUDA_VISIBLE_DEVICES",
    "MUSA_VISIBLE_DEVICES",
    "MUSA_PATCH_PATH",
    "TESTA_DEVICES",
)


class FakeAccelerator(CPUAccelerator):
    """A device of an invented vendor, computed on the CPU."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def fake(name: str, available: object = True, priority: int = 0, **more: object) -> Registration:
    """A registration whose probe returns, or raises, `available`."""

    def probe() -> Capability | bool:
        if isinstance(available, Exception):
            raise available
        return available  # type: ignore[return-value]

    return Registration(name, lambda: FakeAccelerator(name), probe, priority, **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_gpu_and_a_clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No device, no variable, no third-party package, nothing chosen: a machine that the test then
    changes."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(selection, "entry_points", lambda group: [])
    acc.reset()
    yield
    acc.reset()


def line(name: str) -> dict:
    """The trace's line about one backend."""
    return next(c for c in acc.selection_report()["considered"] if c["name"] == name)


def test_nothing_requested_and_nothing_present_gives_none_then_the_cpu() -> None:
    assert acc.initialize_accelerator() is None
    assert acc.get_accelerator().name == "cpu"
    assert acc.initialize_accelerator() is None
    report = acc.selection_report()
    assert report["winner"] == "cpu"
    assert report["reason"] == "nothing was requested and no accelerator is present"
    assert line("cuda")["available"] is False
    assert "CUDA" in line("cuda")["reason"]


def test_the_cpu_can_be_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    chosen = acc.initialize_accelerator()
    assert chosen is not None
    assert chosen is acc.get_accelerator()
    report = acc.selection_report()
    assert (report["winner"], report["requested_by"]) == ("cpu", "EQUIPOISE_ACCELERATOR")
    assert line("cuda")["available"] is None
    assert "not asked" in line("cuda")["reason"]


@pytest.mark.parametrize("text", ["", "  ", "auto", "AUTO"])
def test_blank_and_auto_request_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", text)
    assert acc.initialize_accelerator() is None


@pytest.mark.parametrize("text", ["testb", " TestB "])
def test_a_request_wins_over_priority_and_is_not_case_sensitive(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    acc.register(fake("testa", priority=999))
    acc.register(fake("testb"))
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", text)
    assert acc.get_accelerator().name == "testb"
    assert acc.selection_report()["reason"] == f"requested by EQUIPOISE_ACCELERATOR={text!r}"


def test_the_highest_priority_wins_and_ties_go_to_the_name() -> None:
    for registration in (
        fake("testc", priority=300),
        fake("testb", priority=300),
        fake("testa", priority=200),
    ):
        acc.register(registration)
    assert acc.get_accelerator().name == "testb"
    assert [c["name"] for c in acc.selection_report()["considered"]] == [
        "testb",
        "testc",
        "musa",
        "testa",
        "cuda",
        "cpu",
    ]
    assert acc.selection_report()["reason"] == "the available backend of highest priority (300)"


def test_an_unavailable_backend_loses_with_its_reason() -> None:
    acc.register(fake("testa", Capability(False, "the cable is out"), priority=300))
    acc.register(fake("testb", priority=200))
    assert acc.get_accelerator().name == "testb"
    assert line("testa") == {
        "name": "testa",
        "priority": 300,
        "available": False,
        "reason": "the cable is out",
    }


def test_a_probe_that_raises_is_reported_and_does_not_reach_the_others() -> None:
    acc.register(fake("testa", OSError("libvendor.so not found"), priority=300))
    acc.register(fake("testb", priority=200))
    with pytest.warns(RuntimeWarning, match=r"'testa' is left out.*libvendor\.so not found"):
        assert acc.get_accelerator().name == "testb"
    assert line("testa")["available"] is False
    assert "OSError: libvendor.so not found" in line("testa")["reason"]


def test_a_requested_backend_that_is_unavailable_says_who_asked_and_how_to_override(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cuda")
    with pytest.raises(ConfigError) as raised:
        acc.get_accelerator()
    text = str(raised.value)
    assert "EQUIPOISE_ACCELERATOR='cuda'" in text
    assert "unavailable: torch" in text
    assert "unset EQUIPOISE_ACCELERATOR" in text
    report = acc.selection_report()
    assert (report["winner"], report["error"]) == (None, text)


def test_an_unknown_name_lists_the_registered_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    acc.register(fake("testa"))
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cudda")
    with pytest.raises(ConfigError, match=r"'cudda' names an unknown .* registered are .*cpu, cuda.*testa"):
        acc.initialize_accelerator()


def test_a_variable_of_a_vendor_is_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    acc.register(fake("testa", request_variables=("TESTA_DEVICES",)))
    acc.register(fake("testb", priority=999))
    monkeypatch.setenv("TESTA_DEVICES", "0")
    assert acc.get_accelerator().name == "testa"
    report = acc.selection_report()
    assert (report["requested_by"], report["variables"]) == ("TESTA_DEVICES", {"TESTA_DEVICES": "0"})


@pytest.mark.parametrize("text", ["", " ", "auto"])
def test_a_blank_variable_of_a_vendor_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    acc.register(fake("testa", request_variables=("TESTA_DEVICES",)))
    acc.register(fake("testb", priority=999))
    monkeypatch.setenv("TESTA_DEVICES", text)
    assert acc.get_accelerator().name == "testb"


def test_a_vendor_variable_without_its_device_is_an_error_that_names_the_override(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acc.register(fake("testa", False, request_variables=("TESTA_DEVICES",)))
    monkeypatch.setenv("TESTA_DEVICES", "0")
    with pytest.raises(ConfigError, match=r"TESTA_DEVICES='0' asks for the testa backend.*set EQUIPOISE_ACCELERATOR"):
        acc.get_accelerator()
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    assert acc.get_accelerator().name == "cpu"


@pytest.mark.parametrize("requested", [False, True])
def test_bootstrap_runs_once_after_the_choice_and_before_validation(
    requested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    ready = [not requested]

    def probe() -> bool:
        order.append("probe")
        return ready[0]

    def bootstrap(environ: object) -> None:
        order.append("bootstrap")
        ready[0] = True

    def make() -> FakeAccelerator:
        order.append("make")
        return FakeAccelerator("testa")

    acc.register_accelerator("testa", make, probe, 500, ("xccl",), bootstrap=bootstrap)
    if requested:
        monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "testa")
    assert acc.get_accelerator().name == "testa"
    assert acc.initialize_accelerator() is acc.get_accelerator()
    assert order == ([] if requested else ["probe"]) + ["bootstrap", "probe", "make"]


def test_a_bootstrap_that_fails_is_an_error_of_the_chosen_backend_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bootstrap(environ: object) -> None:
        raise ModuleNotFoundError("No module named 'vendor_math'")

    acc.register(fake("testa", priority=500, bootstrap=bootstrap))
    with pytest.raises(ConfigError, match=r"testa backend .*vendor_math.* set EQUIPOISE_ACCELERATOR"):
        acc.get_accelerator()
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    assert acc.get_accelerator().name == "cpu"


def test_a_backend_that_is_not_automatic_is_chosen_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    acc.register(fake("testa", priority=500, automatic=False))
    assert acc.initialize_accelerator() is None
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "testa")
    chosen = acc.initialize_accelerator()
    assert chosen is not None
    assert chosen.name == "testa"


def test_falling_to_the_cpu_warns_when_a_vendors_runtime_is_there() -> None:
    acc.register(fake("testa", False, hint=lambda: "the testa driver is loaded"))
    acc.register(fake("testb", False, hint=lambda: 1 / 0))  # type: ignore[arg-type, return-value]
    with pytest.warns(RuntimeWarning, match="training on the CPU, though the testa driver is loaded"):
        acc.get_accelerator()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acc.get_accelerator()


def test_an_accelerator_that_appears_later_is_found_by_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts without devices and is given one is not stuck with the CPU."""
    there = [False]
    acc.register_accelerator("testa", lambda: FakeAccelerator("testa"), lambda: there[0])
    assert acc.get_accelerator().name == "cpu"
    there[0] = True
    chosen = acc.initialize_accelerator()
    assert chosen is not None
    assert chosen is acc.get_accelerator()


def test_set_accelerator_injects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cuda")
    mine = FakeAccelerator("mine")
    acc.set_accelerator(mine)
    assert acc.get_accelerator() is mine
    assert acc.initialize_accelerator() is mine
    assert acc.selection_report()["requested_by"] == "set_accelerator()"


@pytest.mark.parametrize("name", ["", "auto", "CUDA", " cuda"])
def test_a_name_that_no_one_could_ask_for_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a backend"):
        acc.register(fake(name))


def test_registering_after_the_choice_is_refused() -> None:
    acc.get_accelerator()
    with pytest.raises(ConfigError, match="registered after 'cpu' had been chosen"):
        acc.register(fake("testa"))


def test_the_report_is_plain_data_and_keeps_no_decision() -> None:
    before = acc.selection_report()
    assert json.loads(json.dumps(before)) == {**before, "considered": list(before["considered"]), "hints": []}
    acc.register(fake("testa", priority=500))
    assert acc.selection_report()["winner"] == "testa"


def test_the_backend_of_a_tensor_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cuda")
    assert acc.accelerator_for("cpu").name == "cpu"
    assert acc.accelerator_for("cpu") is acc.accelerator_for(torch.zeros(1).device)
    assert acc.accelerator_for(torch.device("cuda", 1)).name == "cuda"
    with pytest.raises(ConfigError, match="no backend handles 'meta' tensors; registered are cpu, cuda"):
        acc.accelerator_for("meta")


def entry_point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, acc.ENTRY_POINT_GROUP)


THIRD_PARTY = fake("testa", priority=500)


@pytest.mark.parametrize("value", ["THIRD_PARTY", "make_third_party"])
def test_a_package_registers_through_an_entry_point(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "entry_points", lambda group: [entry_point("testa", f"{__name__}:{value}")])
    assert acc.get_accelerator().name == "testa"


def make_third_party() -> Registration:
    return THIRD_PARTY


def test_a_broken_package_warns_and_is_an_error_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [entry_point("testz", "no_such_vendor_package:REGISTRATION")]
    monkeypatch.setattr(selection, "entry_points", lambda group: broken)
    with pytest.warns(RuntimeWarning, match=r"'testz' .*failed to load: ModuleNotFoundError"):
        assert acc.get_accelerator().name == "cpu"
    assert line("testz")["reason"].startswith("failed to load")
    acc.reset()
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "testz")
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(ConfigError, match="'testz' asks for a backend that failed to load"),
    ):
        acc.get_accelerator()


def test_an_explicit_choice_loads_no_other_vendors_package(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [entry_point("testz", "no_such_vendor_package:REGISTRATION")]
    monkeypatch.setattr(selection, "entry_points", lambda group: broken)
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert acc.get_accelerator().name == "cpu"
