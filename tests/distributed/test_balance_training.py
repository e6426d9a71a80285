"""Balancing in whole training steps on two ranks: nothing of it in the state, nothing decided again by a recompute,
microbatches in flight, and what is equal bit for bit."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint import FileSystemReader

from distributed.parity import toy_model
from distributed.rig import Outcomes, Rig, Scenario, differing, random_batch, run_scenarios, whole
from equipoise.balance_config import BalanceConfig
from equipoise.checkpoint.training import TrainingState, load_checkpoint, save_checkpoint
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.world import World
from equipoise.moe import router
from equipoise.train.step import StepResult, moe_layers, run_model

K, S = 3, 6  # experts per token, tokens of a microbatch
BALANCE = BalanceConfig(num_redundant_experts_per_rank=2, tolerance=0.0)


def heat(rig: Rig, hot_rank: int) -> None:
    """A selection bias that sends most tokens to the experts of one rank."""
    for layer in moe_layers(rig.model):
        bias_E = layer.gate.e_score_correction_bias
        assert bias_E is not None
        bias_E.view(2, -1).copy_(torch.tensor([[2.0], [0.0]]).roll(hot_rank, 0))


def make_rig(world: World, meshes: Meshes, balance: BalanceConfig | None = BALANCE, **options: Any) -> Rig:
    rig = Rig(toy_model(num_experts_per_tok=K, selection_bias=True), world, meshes, balance=balance, **options)
    heat(rig, 0)
    return rig


def take_step(rig: Rig, world: World, number: int) -> StepResult:
    """A step of two microbatches on each rank, of tokens that depend on the step."""
    batches = [random_batch(100 * number + 10 * world.rank + i, 1, S) for i in range(2)]
    result = rig.step(batches, world.size * 2 * S)
    assert result is not None
    return result


def on_device(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is: whole shape, dtype, bytes on this rank."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tuple(tensor.shape), str(tensor.dtype), local.nbytes


def contents(value: Any) -> Any:
    """A state dict with every tensor replaced by what it is."""
    if isinstance(value, dict):
        return {key: contents(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [contents(v) for v in value]
    return on_device(value) if isinstance(value, torch.Tensor) else type(value).__name__


def on_storage(path: Path) -> dict[str, Any]:
    """What a checkpoint holds: names, shapes and dtypes of its tensors, keys beside them, bytes of its files."""
    index = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        "tensors": {name: (tuple(entry.size), str(entry.properties.dtype)) for name, entry in index.items()},
        "beside them": sorted(json.loads((path / "train_state.json").read_text())),
        "files": {file.name: file.stat().st_size for file in path.glob("*.distcp")},
    }


@contextmanager
def shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = [name]
        dist.broadcast_object_list(folder)
        yield Path(folder[0])
        dist.barrier()


def state(world: World, meshes: Meshes) -> dict[str, Any]:
    """Two steps on and off, saved; each loaded on and off; two more steps of all."""
    kinds = {"on": BALANCE, "off": None}
    found: dict[str, Any] = {"copies": 0}
    rigs, paths = {}, {}
    with shared_folder() as folder:
        for kind, balance in kinds.items():
            rig = rigs[kind] = make_rig(world, meshes, balance)
            results = [take_step(rig, world, number) for number in range(2)]
            if kind == "on":
                found["copies"] = min(r.balance.copies for r in results if r.balance is not None)
            saved = TrainingState(rig.model, rig.optimizer, step=2)
            paths[kind] = save_checkpoint(folder / kind, saved, world)
            found[kind] = {
                "model": contents(rig.model.state_dict()),
                "optimizer": contents(rig.optimizer.state_dict()),
                "buffers": sorted(name for name, _ in rig.model.named_buffers()),
                "modules": sorted(name for name, _ in rig.model.named_modules()),
                "checkpoint": on_storage(paths[kind]),
            }
        for saved_by in kinds:
            for loaded_by in kinds:
                rigs[f"{saved_by}, then {loaded_by}"] = rig = make_rig(world, meshes, kinds[loaded_by], seed=99)
                load_checkpoint(paths[saved_by], TrainingState(rig.model, rig.optimizer), world)
    found["losses"] = {kind: [take_step(rig, world, n).loss for n in (2, 3)] for kind, rig in rigs.items()}
    want = rigs["off"].parameters()
    found["differing"] = {kind: differing(rig.parameters(), want) for kind, rig in rigs.items()}
    return found


def nothing_to_move(world: World, meshes: Meshes) -> dict[str, Any]:
    """On, with a tolerance that leaves every token at home, against off: what is not equal bit for bit."""
    on = make_rig(world, meshes, BalanceConfig(tolerance=1000))
    off = make_rig(world, meshes, None)
    copies, unequal = 0.0, []
    for number in range(2):
        got, want = take_step(on, world, number), take_step(off, world, number)
        assert got.balance is not None
        copies += got.balance.copies
        unequal += [field for field in ("loss", "grad_norm") if getattr(got, field) != getattr(want, field)]
    return {"copies": copies, "unequal": unequal, "differing": differing(on.parameters(), off.parameters(), 0.0)}


@contextmanager
def logits_that_tip_over() -> Iterator[None]:
    """Adds to the router's logits what is 0 in a forward and, in a recompute, prefers high experts by very little."""
    plain = F.linear

    def linear(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        step = 1e-6 if torch._C._current_graph_task_id() != -1 else 0.0
        return plain(x_TD, weight_ED) + torch.arange(weight_ED.shape[0]) * torch.full((), step)

    router.F = SimpleNamespace(linear=linear)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        router.F = F  # type: ignore[attr-defined]


def near_ties(world: World, meshes: Meshes) -> dict[str, Any]:
    """All logits equal, so that any rounding of a recompute would choose other experts. Row 1."""
    found: dict[str, Any] = {}
    gradients = {}
    batch = random_batch(world.rank, 1, S)
    for recompute in ("none", "full", "selective"):
        rig = Rig(toy_model(num_experts_per_tok=K), world, meshes, balance=BALANCE, recompute=recompute)
        with torch.no_grad():
            for layer in moe_layers(rig.model):
                layer.gate.weight.zero_()
        balancer = rig.runner.balancer
        assert balancer is not None
        calls: list[tuple[Any, torch.Tensor]] = []

        def route(ids_TK, key, counts_E, decide=balancer.route, calls=calls):
            calls.append((decide(ids_TK, key, counts_E), ids_TK.clone()))
            return calls[-1][0]

        balancer.route = route  # type: ignore[method-assign]
        with logits_that_tip_over():
            gradients[recompute] = rig.gradients([batch], world.size * S)
        found[recompute] = {
            "calls": len(calls),
            "steps": len({id(step) for step, _ in calls}),
            "experts": sorted({expert for _, ids in calls for expert in ids.flatten().tolist()}),
            "copies": sum(record.copies for record in balancer.take_records()),
        }
    for recompute in ("full", "selective"):
        found[recompute]["differing"] = differing(gradients[recompute], gradients["none"], 1e-4)
    return found


def counted_under_recompute(world: World, meshes: Meshes) -> dict[str, Any]:
    """Row 3: tokens, copies and bytes that a step counts, by kind of recompute."""
    found = {}
    for recompute in ("none", "full", "selective"):
        result = take_step(make_rig(world, meshes, recompute=recompute), world, 0)
        assert result.balance is not None
        found[recompute] = (
            result.counts_LE.sum(-1).tolist(),
            result.balance.copies,
            result.balance.num_bytes,
            result.balance.after_L.tolist(),
        )
    return found


def in_flight(world: World, meshes: Meshes) -> dict[str, Any]:
    """Row 4: two forwards with the heat on another rank each, then their backwards; what differs from one by one."""

    def gradients(balance: BalanceConfig | None, backwards: Callable[[list], list] | None, recompute: str = "none"):
        rig = make_rig(world, meshes, balance, recompute=recompute)
        losses = []
        for microbatch in range(2):
            heat(rig, microbatch)
            output = run_model(rig.model, random_batch(10 * world.rank + microbatch, 1, S), world.device, microbatch)
            assert output.loss_sum is not None
            losses.append(output.loss_sum)
            if backwards is None:
                output.loss_sum.backward()
        for loss in backwards(losses) if backwards is not None else []:
            loss.backward()
        found = whole({name: p.grad for name, p in rig.model.named_parameters()})
        copies = 0 if rig.runner.balancer is None else sum(r.copies for r in rig.runner.balancer.take_records())
        return found, copies

    want, _ = gradients(None, None)
    found = {}
    for recompute in ("none", "full"):
        for name, order in {"first first": list, "last first": lambda losses: losses[::-1]}.items():
            got, copies = gradients(BALANCE, order, recompute)
            found[f"{name}, recompute {recompute}"] = (differing(got, want), copies)
    return found


SCENARIOS: list[Scenario] = [state, nothing_to_move, near_ties, counted_under_recompute, in_flight]


@pytest.fixture(scope="module")
def two() -> Outcomes:
    return Outcomes(run_scenarios, 2, SCENARIOS, ParallelConfig(ep_size=2), 8)


def test_nothing_of_the_runtime_is_in_model_optimizer_or_checkpoint(two: Outcomes) -> None:
    for found in two.of(state):
        assert found["copies"] > 0
        for part, off in found["off"].items():
            assert found["on"][part] == off, part
        assert len(found["off"]["checkpoint"]["tensors"]) > 50
        assert len(found["off"]["checkpoint"]["files"]) == 2


def test_a_checkpoint_does_not_know_whether_balancing_was_on(two: Outcomes) -> None:
    for found in two.of(state):
        losses = found["losses"]
        assert losses["on, then on"] == losses["on"]
        assert losses["off, then off"] == losses["off"]
        for kind in ("on", "on, then off", "off, then on"):
            assert losses[kind] == pytest.approx(losses["off"], rel=1e-6), kind
        assert found["differing"] == {kind: {} for kind in losses}


def test_without_a_replica_training_is_that_without_balancing_bit_for_bit(two: Outcomes) -> None:
    assert two.of(nothing_to_move) == [{"copies": 0, "unequal": [], "differing": {}}] * 2


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recompute_of_near_ties_keeps_the_first_choice_and_its_plan(two: Outcomes, recompute: str) -> None:
    for found in two.of(near_ties):
        layers = found["none"]["calls"]
        assert found[recompute]["calls"] == 2 * layers
        assert found[recompute]["steps"] == layers
        assert found[recompute]["experts"] == list(range(K)), "of equal scores the lower ids, both times"
        assert found[recompute]["copies"] == found["none"]["copies"] > 0
        assert found[recompute]["differing"] == {}


def test_recompute_counts_no_load_twice(two: Outcomes) -> None:
    for found in two.of(counted_under_recompute):
        tokens, copies, num_bytes, after = found["none"]
        assert tokens == [2 * 2 * S * K] * 2
        assert copies > 0
        assert num_bytes > 0
        assert len(after) == 2
        assert found["full"] == found["selective"] == found["none"]


def test_microbatches_in_flight_with_other_hot_ranks_get_their_own_replicas_back(two: Outcomes) -> None:
    for found in two.of(in_flight):
        assert len(found) == 4
        for name, (differences, copies) in found.items():
            assert differences == {}, name
            assert copies >= 4, name
