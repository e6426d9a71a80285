"""Visible devices: the grammar equals torch's, ids of both kinds map without guessing (case C34)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import equipoise
from equipoise.accelerator import CPUAccelerator, CUDAAccelerator, VisibleDevices
from equipoise.errors import ConfigError

UUID_A = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
UUID_B = "GPU-8932f0aa-0000-4106-c12f-20bd9faed9f6"
MIG = "MIG-377e0049-554c-540b-93c6-d0976f8426cb"
OLD_MIG = f"MIG-{UUID_A}/1/0"

LISTS = [
    ("0", (0,)),
    ("1,2,3", (1, 2, 3)),
    ("3, 1", (3, 1)),
    ("", ()),
    ("  ", ()),
    ("-1", ()),
    ("NoDevFiles", ()),
    ("0,-1,1", (0,)),
    ("0,x,1", (0,)),
    ("0,,1", (0,)),
    ("1,1", ()),
    ("1gpu2,2ampere", (1, 2)),
    ("+2,1", (2, 1)),
    (UUID_A, (UUID_A,)),
    ("GPU-8932f9", ("GPU-8932f9",)),
    (f"{UUID_A},{UUID_B}", (UUID_A, UUID_B)),
    (f"{UUID_A},{UUID_A}", ()),
    (f"{UUID_A},0", (UUID_A,)),
    (f"{UUID_A},{MIG}", (UUID_A,)),
    (f"0,{UUID_A}", (0,)),
    (MIG, (MIG,)),
    (OLD_MIG, (OLD_MIG,)),
]


@pytest.mark.parametrize(("text", "ids"), LISTS)
def test_a_list_is_read_as_torch_reads_it(text: str, ids: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert CUDAAccelerator().visible_devices().ids == ids
    assert tuple(torch.cuda._parse_visible_devices()) == ids


@pytest.mark.parametrize("text", ["-", "3.7", "0b1", "GPU-", "auto,", ",", "\u00b2"])
def test_malformed_lists_never_raise(text: str) -> None:
    assert VisibleDevices.parse(text).ids is not None


def test_unset_is_all_and_local_equals_physical() -> None:
    everything = VisibleDevices.from_environment(("CUDA_VISIBLE_DEVICES",), {})
    assert everything.ids is None
    assert everything.to_local(5) == 5
    assert everything.to_physical(5) == 5


def test_the_first_variable_that_is_set_wins_on_rocm() -> None:
    environ = {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    accelerator = CUDAAccelerator()
    accelerator.rocm, accelerator.visible_devices_variables = (
        True,
        ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    )
    assert accelerator.visible_devices(environ).ids == (2,)
    assert accelerator.visible_devices({"CUDA_VISIBLE_DEVICES": "1"}).ids == (1,)
    assert accelerator.visible_devices({"HIP_VISIBLE_DEVICES": ""}).ids == ()


def test_rocm_applies_its_two_variables_one_within_the_other() -> None:
    accelerator = CUDAAccelerator()
    accelerator.rocm, accelerator.visible_devices_variables = (
        True,
        ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    )
    both = {"ROCR_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "1"}
    assert accelerator.visible_devices(both).ids == (6,)
    assert accelerator.visible_devices({"ROCR_VISIBLE_DEVICES": "4,6"}).ids == (4, 6)
    by_id = {"ROCR_VISIBLE_DEVICES": "GPU-aa01,GPU-bb02,GPU-cc03", "HIP_VISIBLE_DEVICES": "GPU-cc,GPU-aa01"}
    assert accelerator.visible_devices(by_id).ids == ("GPU-cc03", "GPU-aa01")
    with pytest.raises(ConfigError, match="asks for device 2 of the 2"):
        accelerator.visible_devices({"ROCR_VISIBLE_DEVICES": "4,6", "HIP_VISIBLE_DEVICES": "2"})


def test_physical_and_local_ids_are_never_mixed() -> None:
    """With 1,2,3 visible, physical 1 is local 0; physical 0 is hidden and no second name of local 0."""
    visible = VisibleDevices.parse("1,2,3", "CUDA_VISIBLE_DEVICES")
    assert visible.to_local(1) == 0
    assert visible.to_physical(0) == 1
    with pytest.raises(ConfigError, match="hidden from this process by CUDA_VISIBLE_DEVICES="):
        visible.to_local(0)
    with pytest.raises(ConfigError, match="local device 3 does not exist"):
        visible.to_physical(3)


@pytest.mark.parametrize("text", ["", "-1", "NoDevFiles"])
def test_nothing_visible_maps_nothing(text: str) -> None:
    visible = VisibleDevices.parse(text, "CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match="hidden"):
        visible.to_local(0)
    with pytest.raises(ConfigError, match="does not exist"):
        visible.to_physical(0)


@pytest.mark.parametrize(
    ("entry", "asked"), [(UUID_A, UUID_A), (UUID_A, "GPU-8932f9"), ("GPU-8932f9", UUID_A), (MIG, MIG)]
)
def test_uuids_and_unique_prefixes_map_both_ways(entry: str, asked: str) -> None:
    visible = VisibleDevices.parse(entry, "CUDA_VISIBLE_DEVICES")
    assert visible.to_local(asked) == 0
    assert visible.to_physical(0) == entry


def test_a_prefix_of_two_devices_is_refused() -> None:
    visible = VisibleDevices.parse(f"{UUID_A},{UUID_B}", "CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match="ambiguous"):
        visible.to_local("GPU-8932f")
    assert visible.to_local("GPU-8932f0") == 1


@pytest.mark.parametrize("wrong", [3.7, "3.7", -1, "-1", True, None, "", "cuda:0", "GPU"])
def test_a_malformed_id_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="is not a device id"):
        VisibleDevices.parse("0,1,2,3").to_local(wrong)  # type: ignore[arg-type]


def test_ordinals_and_uuids_compare_only_through_the_machines_uuids() -> None:
    uuids = [UUID_A, UUID_B]
    by_uuid = VisibleDevices.parse(UUID_B, "CUDA_VISIBLE_DEVICES")
    by_ordinal = VisibleDevices.parse("1", "CUDA_VISIBLE_DEVICES")
    unset = VisibleDevices()
    assert by_uuid.to_local(1, uuids) == by_ordinal.to_local(UUID_B, uuids) == 0
    assert unset.to_local(UUID_B, uuids) == 1
    for visible, physical in [(by_uuid, 1), (by_ordinal, UUID_B), (unset, UUID_B)]:
        with pytest.raises(ConfigError, match="UUID"):
            visible.to_local(physical)


@pytest.mark.parametrize(
    ("text", "ray_ids", "local"),
    [
        (None, ["0", "3"], [0, 3]),
        ("4,5", ["5"], [1]),
        ("4,5", [4, 5], [0, 1]),
        (f"{UUID_A},{UUID_B}", [UUID_B], [1]),
    ],
)
def test_rays_accelerator_ids_map_to_local_ordinals(text: str | None, ray_ids: list, local: list[int]) -> None:
    assert VisibleDevices.parse(text, "CUDA_VISIBLE_DEVICES").locals_of(ray_ids) == local


def test_uuids_in_the_environment_of_a_fresh_process() -> None:
    """Our count is torch's; on a host without GPU selection falls to the CPU without a traceback."""
    code = (
        "import os, sys, torch\n"
        "from equipoise.accelerator import CUDAAccelerator, get_accelerator, reset\n"
        "for text in sys.argv[1:]:\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = text\n"
        "    reset()\n"
        "    count = CUDAAccelerator().device_count()\n"
        "    assert count == torch.cuda.device_count()\n"
        "    assert count > 0 or get_accelerator().name == 'cpu'\n"
    )
    environ = {k: v for k, v in os.environ.items() if k != "EQUIPOISE_ACCELERATOR"}
    environ["PYTHONPATH"] = str(Path(equipoise.__file__).resolve().parents[1])
    command = [sys.executable, "-c", code, MIG, UUID_A, "GPU-8932f9"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_no_variable_hides_the_cpu() -> None:
    assert CPUAccelerator().visible_devices({"CUDA_VISIBLE_DEVICES": ""}).ids is None
