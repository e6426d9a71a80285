"""Balancing that is off costs nothing: a build without its package is the same program."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from integration.command import SOURCES, Command, losses, read_metrics, stored, train_arguments
from integration.conftest import Base


@pytest.mark.slow
def test_a_build_without_the_package_trains_to_the_same_bits(base: Base, tmp_path: Path) -> None:
    """Ten steps on two ranks with EP 2 against those of the whole build: losses, norms, every stored tensor."""
    left_out = shutil.ignore_patterns("balance", "__pycache__")
    shutil.copytree(Path(SOURCES) / "equipoise", tmp_path / "equipoise", ignore=left_out)
    probe = Command(base.folder, [sys.executable, "-c", "import equipoise.balance"], str(tmp_path))
    assert probe.wait() == 1
    assert "No module named 'equipoise.balance'" in probe.output()
    settings = ["--parallel.ep-size", "2", "--train.steps", "10"]
    command = Command(base.folder, train_arguments("without", *settings, nproc=2), sources=str(tmp_path))
    assert command.wait() == 0, command.output()
    run = base.folder / "without"
    whole = read_metrics(base.run)[:10]
    assert losses(run) == {record["step"]: record["loss"] for record in whole}
    assert [record["grad_norm"] for record in read_metrics(run)] == [record["grad_norm"] for record in whole]
    got, want = stored(run, 10), stored(base.run, 10)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
