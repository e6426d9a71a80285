"""Training checkpoints across ranks: experts keep their numbers, all state comes back, half is ignored."""

import logging
import os
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distributed.harness import observe_ranks, run_ranks
from distributed.parity import whole
from equipoise.accelerator import CPUAccelerator
from equipoise.checkpoint.training import (
    TrainingState,
    find_latest,
    load_checkpoint,
    save_checkpoint,
)
from equipoise.distributed.world import World, join_world
from equipoise.errors import CheckpointError

H = 6  # hidden size; over 4 ranks its shards are [2, 2, 2, 0]


@contextmanager
def joined(timeout_s: float = 40) -> Iterator[World]:
    with join_world(CPUAccelerator(), timeout_s=timeout_s) as world:
        yield world


class OneRank:
    """A world of this process alone."""

    rank, size, accelerator = 0, 1, CPUAccelerator()

    def operation(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


class Toy(nn.Module):
    """Dense part, experts [E, H, H] and a selection bias [E] that training replaces."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.dense = nn.Linear(H, H)
        self.experts = nn.Parameter(torch.randn(num_experts, H, H, generator=generator))
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        with torch.no_grad():
            for p in self.dense.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        experts = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        h_TH = x_TH + torch.tanh(self.dense(x_TH))
        return h_TH + torch.einsum("th,ehk->tk", h_TH, torch.tanh(experts)) * torch.rand(())


def sharded_toy(world_size: int, ep_size: int, num_experts: int) -> Toy:
    """Experts over "ep", then dense parts over the world and the rest over the axis beside "ep"."""
    model = Toy(num_experts)
    mesh = init_device_mesh("cpu", (world_size // ep_size, ep_size), mesh_dim_names=("inner", "ep"))
    everyone = init_device_mesh("cpu", (world_size,), mesh_dim_names=("everyone",))
    model.experts = nn.Parameter(distribute_tensor(model.experts.data, mesh["ep"], [Shard(0)]))
    fully_shard([model.dense], mesh=everyone)
    fully_shard(model, mesh=mesh["inner"])
    for unit in (model, model.dense):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def made_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(model: Toy, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Losses of steps first..last on batches that depend on the step and the rank; draws random numbers."""
    losses = []
    for step in range(first, last + 1):
        x_TH = torch.randn(3, H, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = model(x_TH).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.bias = model.bias + 0.001 * step  # replaced, as careless code does
        losses.append(loss.item())
    return losses


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that a resumed run must have, in full."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            found[f"{name}.{slot}"] = value
    return whole(found)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


# --- Scenarios: each runs on every rank, in one start of the ranks, and returns what its tests look at


def numbered_toy(world_size: int, ep_size: int, num_experts: int) -> tuple[Toy, torch.optim.AdamW]:
    """A trained toy in which expert i is i everywhere, and its first moment 10 i."""
    model = sharded_toy(world_size, ep_size, num_experts)
    optimizer = made_optimizer(model)
    train(model, optimizer, 1, 1)
    start = torch.arange(num_experts, dtype=torch.float32)[:, None, None].expand(-1, H, H)
    numbers = Toy(num_experts)
    numbers.experts = nn.Parameter(start.contiguous())
    mesh = init_device_mesh("cpu", (world_size // ep_size, ep_size), mesh_dim_names=("inner", "ep"))
    numbers.experts = nn.Parameter(distribute_tensor(numbers.experts.data, mesh["ep"], [Shard(0)]))
    fully_shard(numbers, mesh=mesh["inner"])
    with torch.no_grad():
        model.experts.to_local().copy_(numbers.experts.to_local())
        optimizer.state[model.experts]["exp_avg"].to_local().copy_(10 * numbers.experts.to_local())
    return model, optimizer


def numbers_in(model: Toy, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
    """The number of each expert and of its first moment; fails if one is not constant."""
    tensors = whole({"experts": model.experts, "exp_avg": optimizer.state[model.experts]["exp_avg"]})
    for tensor in tensors.values():
        assert torch.equal(tensor, tensor[:, :1, :1].expand_as(tensor))
    return tensors["experts"][:, 0, 0].tolist(), tensors["exp_avg"][:, 0, 0].tolist()


def save_numbered(world: World, folder: Path) -> None:
    for ep_size, num_experts in SAVED_AT:
        model, optimizer = numbered_toy(world.size, ep_size, num_experts)
        save_checkpoint(folder / f"ep{ep_size}-e{num_experts}", TrainingState(model, optimizer, step=1, seed=5), world)


def load_numbered(world: World, folder: Path) -> dict[tuple[int, int, int], Any]:
    """By (EP at the save, EP now, experts)."""
    found = {}
    for save_ep, num_experts in SAVED_AT:
        for ep_size in (1, 2, 4):
            if ep_size > world.size or num_experts % ep_size:
                continue
            model = sharded_toy(world.size, ep_size, num_experts)
            optimizer = made_optimizer(model)
            path = folder / f"ep{save_ep}-e{num_experts}" / "step-00000001"
            load_checkpoint(path, TrainingState(model, optimizer), world)
            found[save_ep, ep_size, num_experts] = numbers_in(model, optimizer)
    return found


def four_experts(world: World, folder: Path) -> list[tuple[list[float], list[float]]]:
    """4 experts saved at EP 2 and loaded at EP 1, 2, 4; on 8 ranks a group at EP 2 has [1, 1, 0, 0]."""
    model, optimizer = numbered_toy(world.size, 2, 4)
    path = save_checkpoint(folder, TrainingState(model, optimizer, step=1), world)
    found = []
    for ep_size in (1, 2, 4):
        model = sharded_toy(world.size, ep_size, 4)
        optimizer = made_optimizer(model)
        load_checkpoint(path, TrainingState(model, optimizer), world)
        found.append(numbers_in(model, optimizer))
    return found


def resume(world: World, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of steps 11-13 without a stop and after a resume; 6 experts over EP 2 x 2 are [2, 1]."""
    model = sharded_toy(world.size, 2, 6)
    optimizer = made_optimizer(model)
    torch.manual_seed(world.rank)
    train(model, optimizer, 1, 10)
    with torch.no_grad():
        model(torch.ones(1, H))  # an evaluation leaves FSDP's root unsharded
    path = save_checkpoint(folder, TrainingState(model, optimizer, step=10, loader={"epoch": 1, "position": 40}), world)
    saved = contents(model, optimizer)
    without_stop = train(model, optimizer, 11, 13)
    end = contents(model, optimizer)

    model = sharded_toy(world.size, 2, 6)
    optimizer = made_optimizer(model)
    meta = load_checkpoint(path, TrainingState(model, optimizer), world)
    assert (meta.step, meta.loader, meta.rng_restored) == (10, {"epoch": 1, "position": 40}, True)
    assert_same(contents(model, optimizer), saved)
    resumed = train(model, optimizer, 11, 13)
    assert_same(contents(model, optimizer), end)
    return without_stop, resumed


def draw() -> list[float]:
    return [*torch.rand(3).tolist(), random.random(), random.gauss(0, 1), float(np.random.rand())]


def random_state(world: World, folder: Path) -> tuple[list[float], list[float]]:
    """What each rank draws after a save, and after a resume from it."""
    torch.manual_seed(1234 + world.rank)
    random.seed(1234 + world.rank)
    np.random.seed(1234 + world.rank)
    draw()
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    state = TrainingState(model, made_optimizer(model), step=3)
    path = save_checkpoint(folder, state, world)
    without_stop = draw()
    load_checkpoint(path, state, world)
    return without_stop, draw()


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def ranks_disagree(world: World, folder: Path) -> dict[str, str]:
    """What saving says when something that is saved once differs between ranks."""
    found = {}
    for what in ("nothing", "bias", "loader", "names"):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        state = TrainingState(model, made_optimizer(model), step=1)
        if world.rank == 2 and what == "bias":
            model.bias.data[1] += 1e-7
        if world.rank == 2 and what == "loader":
            state.loader["position"] = 1
        if world.rank == 2 and what == "names":
            model.register_buffer("local", torch.ones(1))
        found[what] = message_of(lambda: save_checkpoint(folder / what, state, world))  # noqa: B023
        dist.barrier()
        found[what] += "".join(f" {p.name}" for p in (folder / what).iterdir())
    return found


def disk_full(world: World, folder: Path) -> tuple[str, list[str], list[str]]:
    """One rank's disk is full in the second save: the message, the folders left, those after another try."""
    model = sharded_toy(world.size, 2, 4)
    state = TrainingState(model, made_optimizer(model), step=10)
    save_checkpoint(folder, state, world)
    state.step = 20
    writer = torch.distributed.checkpoint.FileSystemWriter
    write_data = writer.write_data

    def fails(*args: Any) -> Any:
        write_data(*args).wait()
        raise OSError(28, "No space left on device")

    if world.rank == 2:
        writer.write_data = fails
    try:
        message = message_of(lambda: save_checkpoint(folder, state, world, keep_last=1))
    finally:
        writer.write_data = write_data
    dist.barrier()
    left = sorted(p.name for p in folder.iterdir())
    dist.barrier()
    save_checkpoint(folder, state, world, keep_last=1)
    dist.barrier()  # rank 0 deletes old ones while the others go on
    return message, left, sorted(p.name for p in folder.iterdir())


def not_shared(world: World, folder: Path) -> str:
    """What saving says when a rank writes to another place than rank 0, as without shared storage."""
    model = sharded_toy(world.size, 2, 4)
    state = TrainingState(model, made_optimizer(model), step=1)
    return message_of(lambda: save_checkpoint(folder / ("a" if world.rank < 2 else "b"), state, world))


def killed_in_save(folder: Path) -> None:
    """Saves step 10; rank 1 is killed in the save of step 20, after its first file."""
    with joined(timeout_s=10) as world:
        model = sharded_toy(world.size, 2, 4)
        optimizer = made_optimizer(model)
        train(model, optimizer, 1, 1)
        save_checkpoint(folder, TrainingState(model, optimizer, step=10), world, keep_last=1)
        writer = torch.distributed.checkpoint.FileSystemWriter
        write_data = writer.write_data

        def dies(*args: Any) -> Any:
            write_data(*args).wait()
            os.kill(os.getpid(), signal.SIGKILL)

        if world.rank == 1:
            writer.write_data = dies
        save_checkpoint(folder, TrainingState(model, optimizer, step=20), world, keep_last=1)


def after_the_kill(world: World, folder: Path) -> tuple[str, list[str], str, list[str]]:
    """The checkpoint that is found, what was logged, and what is found once step 20 is saved again."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("equipoise").addHandler(handler)
    path = find_latest(folder, world)
    model = sharded_toy(world.size, 2, 4)
    optimizer = made_optimizer(model)
    meta = load_checkpoint(path, TrainingState(model, optimizer), world)
    assert meta.step == 10
    save_checkpoint(folder, TrainingState(model, optimizer, step=20), world, keep_last=1)
    again = find_latest(folder, world)
    dist.barrier()
    return path.name, logged, again.name, sorted(p.name for p in folder.iterdir())


def fresh_random_state(world: World, folder: Path) -> tuple[bool, list[float], list[float]]:
    """Whether a checkpoint of 4 ranks restored the random state of 2, and the draws after two loads of it."""
    model = sharded_toy(world.size, 2, 4)
    state = TrainingState(model, made_optimizer(model))
    path = folder / "ep2-e4" / "step-00000001"
    meta = load_checkpoint(path, state, world)
    first = draw()
    load_checkpoint(path, state, world)
    return meta.rng_restored, first, draw()


SAVED_AT = [
    (1, 4),
    (2, 4),
    (4, 4),
    (2, 2),
    (2, 6),
]  # EP size, experts; on 4 ranks (2, 2) leaves two without any
FOUR = [save_numbered, load_numbered, resume, random_state, ranks_disagree, disk_full, not_shared]
TWO = [load_numbered, fresh_random_state, after_the_kill]


def run_scenarios(names: list[str], folders: dict[str, Path]) -> dict[str, Any]:
    """What each scenario returned on this rank, or its traceback; it ends at the first that fails."""
    found: dict[str, Any] = {}
    with joined() as world:
        for name in names:
            try:
                found[name] = globals()[name](world, folders[name])
            except Exception:
                found[name] = traceback.format_exc()
                break
    return found


class Outcomes:
    """Results of scenarios by rank."""

    def __init__(self, scenarios: list[Callable[..., Any]], world_size: int, folders: dict[str, Path]) -> None:
        names = [scenario.__name__ for scenario in scenarios]
        self.ranks = run_ranks(run_scenarios, world_size, names, folders, deadline_s=180)

    def of(self, scenario: Callable[..., Any]) -> list[Any]:
        found = [rank.get(scenario.__name__, "not reached") for rank in self.ranks]
        for value in found:
            assert not (isinstance(value, str) and "Traceback" in value), value
        return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four(root: Path) -> Outcomes:
    folders = {scenario.__name__: root / scenario.__name__ for scenario in FOUR}
    return Outcomes(FOUR, 4, folders | {"load_numbered": root / "save_numbered"})


@pytest.fixture(scope="module")
def two(root: Path, four: Outcomes) -> Outcomes:
    """Two ranks, after four saved and after one of two was killed in a save."""
    outcomes = observe_ranks(killed_in_save, 2, root / "killed", deadline_s=60)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].exit_code not in (0, None), outcomes[0].output  # it noticed, and did not hang
    numbered = root / "save_numbered"
    folders = {"load_numbered": numbered, "fresh_random_state": numbered, "after_the_kill": root / "killed"}
    return Outcomes(TWO, 2, folders)


def test_every_expert_is_itself_at_every_ep_size(four: Outcomes) -> None:
    for found in four.of(load_numbered):
        assert len(found) == 3 * 3 + 2 + 2
        for (_, _, num_experts), (weights, moments) in found.items():
            assert weights == list(range(num_experts))
            assert moments == [10 * i for i in range(num_experts)]


@pytest.mark.slow
def test_every_expert_is_itself_where_most_ranks_have_none(tmp_path: Path) -> None:
    eight = Outcomes([four_experts], 8, {"four_experts": tmp_path})
    assert eight.of(four_experts) == [[([0, 1, 2, 3], [0, 10, 20, 30])] * 3] * 8


def test_every_expert_is_itself_on_another_number_of_ranks(two: Outcomes) -> None:
    for found in two.of(load_numbered):
        assert len(found) == 3 * 2 + 2 + 2
        for (_, _, num_experts), (weights, moments) in found.items():
            assert weights == list(range(num_experts))
            assert moments == [10 * i for i in range(num_experts)]


def test_a_model_that_is_not_sharded_loads_what_ranks_saved(root: Path, four: Outcomes) -> None:
    model = Toy(6)
    optimizer = made_optimizer(model)
    path = root / "save_numbered" / "ep2-e6" / "step-00000001"
    load_checkpoint(path, TrainingState(model, optimizer), cast(World, OneRank()))
    assert numbers_in(model, optimizer) == (list(range(6)), [10 * i for i in range(6)])
    assert optimizer.state[model.dense.weight]["step"] == 1


def test_losses_after_a_resume_equal_those_without_a_stop(four: Outcomes) -> None:
    for without_stop, resumed in four.of(resume):
        assert len(resumed) == 3
        assert resumed == without_stop


def test_each_rank_gets_its_own_random_state_back(four: Outcomes) -> None:
    found = four.of(random_state)
    for without_stop, resumed in found:
        assert resumed == without_stop
    assert len({tuple(resumed) for _, resumed in found}) == 4


def test_another_number_of_ranks_gets_fresh_seeds_that_differ_by_rank_and_repeat(two: Outcomes) -> None:
    found = two.of(fresh_random_state)
    for restored, first, second in found:
        assert not restored
        assert first == second
    assert found[0][1] != found[1][1]


def test_what_differs_between_ranks_is_refused_by_name_on_every_rank(four: Outcomes) -> None:
    for found in four.of(ranks_disagree):
        assert found["nothing"] == " step-00000001"
        assert "'model.bias'" in found["bias"]
        assert "'loader'" in found["loader"]
        assert "different parameters, buffers" in found["names"]
        assert not any("step-" in found[what] for what in ("bias", "loader", "names"))


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_keeps_the_previous_checkpoint(
    root: Path, four: Outcomes
) -> None:
    for message, left, after in four.of(disk_full):
        assert str(root / "disk_full" / "step-00000020") in message
        assert "rank 2" in message
        assert "No space left on device" in message
        assert left == ["step-00000010"]
        assert after == ["step-00000020"]


def test_storage_that_ranks_do_not_share_is_refused(four: Outcomes) -> None:
    assert all(four.of(not_shared))
    assert "all nodes share" in four.of(not_shared)[2]


def test_a_rank_killed_in_a_save_leaves_the_older_checkpoint_for_all(two: Outcomes) -> None:
    found = two.of(after_the_kill)
    for rank, (name, logged, again, left) in enumerate(found):
        assert name == "step-00000010"
        assert any("step 20 is incomplete" in line for line in logged) == (rank == 0)
        assert again == "step-00000020"
        assert left == ["step-00000020"]
