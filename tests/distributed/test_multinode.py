"""Two nodes, simulated by two torchrun agents on localhost with one process each."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.harness import free_port

JOB = """
import json, os, sys
from equipoise.accelerator import CPUAccelerator
from equipoise.distributed import all_reduce_sum, gather_json, join_world

with join_world(CPUAccelerator(), 30) as world:
    ep = world.groups.create_partition("ep", [[0], [1]])
    (total,) = all_reduce_sum([world.rank + 1], world.group)
    node = int(os.environ["GROUP_RANK"])
    places = gather_json([world.rank, world.local_rank, world.local_size, node], world)
    if world.rank == 1 and "fail" in sys.argv:
        with world.operation("step 1: data"):
            raise ValueError("shard-9 is unreadable")
    with world.operation("step 1: forward"):
        all_reduce_sum([1], world.group)
    if world.rank == 0:
        print(json.dumps({"total": total.item(), "places": places}))
"""


def run_agents(script: Path, rendezvous: list[list[str]], *args: str) -> list[tuple[int, str]]:
    """Exit code and output of two agents, one for each list of options."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    agents = [
        subprocess.Popen(
            [*torchrun, *options, str(script), *args],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for options in rendezvous
    ]
    try:
        outputs = [agent.communicate(timeout=90)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    return [(agent.returncode, output) for agent, output in zip(agents, outputs)]


def static(port: int) -> list[list[str]]:
    return [[f"--node-rank={n}", "--master-addr=127.0.0.1", f"--master-port={port}"] for n in range(2)]


def c10d(port: int) -> list[list[str]]:
    return [["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test"]] * 2


@pytest.mark.slow
def test_two_agents_with_static_rendezvous_make_one_world(tmp_path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    agents = run_agents(script, static(free_port()))
    assert [code for code, _ in agents] == [0, 0], agents
    result = json.loads(next(line for line in agents[0][1].splitlines() if line.startswith("{")))
    # rank, local rank, local size, node
    assert result == {"total": 3, "places": [[0, 0, 1, 0], [1, 0, 1, 1]]}


def test_a_failure_on_one_node_is_told_on_the_other_and_fails_both_agents(tmp_path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    agents = run_agents(script, c10d(free_port()), "fail")
    assert all(code != 0 for code, _ in agents), agents
    told = [output for _, output in agents if "RankFailure" in output]
    assert len(told) == 1, agents
    assert "rank 1 (host " in told[0]
    assert "ValueError: shard-9 is unreadable" in told[0]
