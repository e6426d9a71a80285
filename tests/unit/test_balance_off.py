"""Balancing that is off does not exist: the package is not imported, and need not be there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import hashlib, sys
if "{block}" == "blocked":
    sys.modules["equipoise.balance"] = None  # importing it raises ImportError
import torch
torch.set_num_threads(1)
from distributed.parity import OPTIMIZER, SEED, make_batch, toy_model
from equipoise.models.initialize import initialize_model
from equipoise.models.model import MoEForCausalLM
from equipoise.train.config import TrainConfig
from equipoise.train.optimizer import build_optimizer
import equipoise.cli, equipoise.train.run, equipoise.train.trainer

def nodes(node):
    seen, todo, names = set(), [node], []
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            todo += [next_node for next_node, _ in node.next_functions]
    return sorted(names)

model = MoEForCausalLM(toy_model())
initialize_model(model, SEED)
batch = make_batch(0, 12)
loss = model(batch.input_ids, batch.labels).loss_sum
graph = nodes(loss.grad_fn)
loss.backward()
digest = hashlib.sha256(loss.detach().numpy().tobytes())
for p in model.parameters():
    digest.update(p.grad.numpy().tobytes())
build_optimizer(model, OPTIMIZER).step()
for p in model.parameters():
    digest.update(p.detach().numpy().tobytes())
assert TrainConfig().balance is None
loaded = [name for name, module in sys.modules.items() if (name + ".").startswith("equipoise.balance.") and module]
print(digest.hexdigest(), hashlib.sha256(str(graph).encode()).hexdigest(), loaded)
assert not any("Join" in name or "Leave" in name or "Fused" in name for name in graph)
"""


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    found = {}
    for block in ("present", "blocked"):
        program = [sys.executable, "-c", TRAIN.replace("{block}", block)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("src", "tests"))}
        run = subprocess.run(program, capture_output=True, text=True, env=env)
        assert run.returncode == 0, run.stderr
        found[block] = run.stdout.split(maxsplit=2)
    return found


def test_the_package_is_not_imported(results: dict[str, list[str]]) -> None:
    assert results["present"][2].strip() == "[]"


def test_without_the_package_everything_is_the_same_bit_for_bit_and_so_is_the_graph(results) -> None:
    assert results["present"][:2] == results["blocked"][:2]
