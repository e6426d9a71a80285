"""Runs whose checkpoints lie on a file system that is full or read-only: a real one, in a mount namespace."""

import shlex
import subprocess
from pathlib import Path

import pytest

from equipoise.checkpoint.manifest import damage
from integration.command import Command, read_metrics, train_arguments

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
SETTINGS = ("--checkpoint.every", "2", "--checkpoint.keep-last", "0")


def namespaces_work() -> bool:
    try:
        return (
            subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not namespaces_work(), reason="needs unprivileged mount namespaces (unshare)"),
]


def with_mount(workplace: Path, out: str, lines: list[str]) -> str:
    """Runs shell lines in a namespace of their own, in the tests' folder; `TRAIN` stands for training into `out`."""
    (workplace / out / "checkpoints").mkdir(parents=True)
    train = shlex.join(train_arguments(out, *SETTINGS, nproc=1))
    script = "\n".join(["set -x", *lines]).replace("TRAIN", train)
    command = Command(workplace, [*NAMESPACE, "sh", "-c", script])
    command.wait(240)
    return command.output()


def test_a_full_disk_keeps_the_previous_checkpoint_and_the_run_goes_on_once_there_is_room(workplace: Path) -> None:
    output = with_mount(
        workplace,
        "full",
        [
            "mount -t tmpfs -o size=1m tmpfs full/checkpoints",
            "TRAIN; echo ended with $?",
            "cp -a full/checkpoints full/kept",
            "mount -o remount,size=100m full/checkpoints",
            "TRAIN; echo ended with $?",
        ],
    )
    first, _, second = output.partition("ended with 1")
    assert second.rstrip().endswith("ended with 0"), output
    (message,) = [line for line in first.splitlines() if line.startswith("Error: ")]
    assert message.startswith("Error: cannot write checkpoint full/checkpoints/step-")
    assert "No space left on device" in message
    assert "Traceback" not in output
    kept = sorted((workplace / "full" / "kept").iterdir())
    assert [path.name for path in kept] == [f"step-{step:08}" for step in range(2, 2 * len(kept) + 1, 2)]
    assert kept, "no checkpoint fits: make the disk larger"
    assert [damage(path) for path in kept] == [None] * len(kept)
    assert f"resuming after step {2 * len(kept)}" in second
    assert [record["step"] for record in read_metrics(workplace / "full")] == list(range(1, 31))


def test_a_read_only_folder_is_refused_before_the_first_step(workplace: Path) -> None:
    output = with_mount(
        workplace, "readonly", ["mount -t tmpfs -o ro tmpfs readonly/checkpoints", "TRAIN; echo ended with $?"]
    )
    assert "ended with 1" in output
    assert "Error: cannot write checkpoints into readonly/checkpoints: Read-only file system." in output
    assert "step 1/" not in output
    assert not (workplace / "readonly" / "metrics.jsonl").exists()
