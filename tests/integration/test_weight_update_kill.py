"""Engines in processes of their own, one of which is killed in the middle of an update (C32)."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from equipoise.accelerator import CPUAccelerator
from equipoise.errors import WeightUpdateError
from equipoise.models.initialize import initialize_model
from equipoise.serve.clients.http import EngineError
from equipoise.serve.clients.reference import ReferenceClient
from equipoise.serve.regions import weight_source
from unit.engine_rig import trainer_model
from unit.serve_rig import PATHS, TOKEN, trainer_checksums

TESTS = Path(__file__).resolve().parents[1]
DEADLINE_S = 8.0
GREEDY = {"sampling_params": {"temperature": 0.0, "max_new_tokens": 3}}
PROGRAM = f"""
import sys
from unit.serve_rig import serving
with serving(deadline_s={DEADLINE_S}) as served:
    print(served.url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def engine_processes(number: int):
    """Processes that serve until their standard input ends, and clients of them."""
    variables = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}", "EQUIPOISE_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=variables, **pipes) for _ in range(number)]
    killers = [threading.Timer(150, process.kill) for process in processes]
    for killer in killers:
        killer.start()
    try:
        urls = [process.stdout.readline().strip() for process in processes]
        yield processes, [ReferenceClient(url, TOKEN, timeout_s=30) for url in urls]
    finally:
        for process, killer in zip(processes, killers):
            killer.cancel()
            process.stdin.close()
            process.stdout.close()
            process.wait(60)


@pytest.mark.parametrize("path", ["distributed", pytest.param("colocated", marks=pytest.mark.slow)])
def test_a_receiver_killed_in_an_update_is_named_in_time_and_the_other_heals(path: str, monkeypatch) -> None:
    model = trainer_model()
    options = {"bucket_bytes": 8000, "deadline_s": DEADLINE_S}
    with engine_processes(2) as (processes, clients):
        update = PATHS[path](weight_source(model), clients, CPUAccelerator(), **options)
        update.update("good")
        initialize_model(model, 1)
        fill = type(update)._fill

        def kill_at_two(self, index, out, phases, **more):
            if index == 2:
                processes[1].kill()
                processes[1].wait()
            return fill(self, index, out, phases, **more)

        monkeypatch.setattr(type(update), "_fill", kill_at_two)
        started = time.monotonic()
        with pytest.raises(WeightUpdateError) as error:
            update.update("bad")
        assert time.monotonic() - started < 3 * DEADLINE_S
        assert clients[1].address in str(error.value) or "engine" in str(error.value)
        monkeypatch.undo()
        update.close()
        survivor = clients[0]
        assert survivor.weight_version() == "good"
        with pytest.raises(EngineError, match="the weights are not usable") as refused:
            survivor.generate([1, 2], **GREEDY)
        assert refused.value.status == 503
        with PATHS[path](weight_source(model), [survivor], CPUAccelerator(), **options) as again:
            again.update("healed")
        assert survivor.checksums() == trainer_checksums(model)
        assert survivor.generate([1, 2], **GREEDY)["meta_info"]["weight_version"] == "healed"
