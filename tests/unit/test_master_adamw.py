"""AdamW that also clips and refreshes 16-bit copies, against torch's own AdamW."""

import pytest
import torch
from torch import nn

from equipoise.distributed.compute_copies import ComputeCopies
from equipoise.train.optimizer import OptimizerConfig, build_optimizer

pytest.importorskip("triton")
from equipoise.train.master_adamw import MasterAdamW

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter has no BF16
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "fused": True}
SHAPES = {"matrix": (7, 33), "long": (3, 1500), "vector": (5,), "one": (1,)}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE)))


def groups(model: nn.Module) -> list[dict]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator).to(DEVICE, NARROW) for name, shape in SHAPES.items()}


def give(model: nn.Module, found: dict[str, torch.Tensor]) -> None:
    """A backward of the copies with these gradients."""
    torch.autograd.backward([getattr(model, name) for name in found], list(found.values()))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("scale", [None, 0.37])
def test_steps_equal_torch(scale: float | None, microbatches: int) -> None:
    ours, theirs = Weights(), Weights()
    copies = ComputeCopies(NARROW)
    copies.add(ours)
    optimizer = MasterAdamW(groups(ours), copies, **OPTIONS)
    reference = torch.optim.AdamW(groups(theirs), **OPTIONS)
    factor = None if scale is None else torch.tensor(scale, device=DEVICE)
    copies.refresh()
    for step in range(4):
        parts = [gradients(10 * step + part) for part in range(microbatches)]
        for part in parts:
            give(ours, part)
        for name, parameter in theirs.named_parameters():
            parameter.grad = sum(part[name].float() for part in parts) * (1.0 if scale is None else scale)
        expected = NARROW if microbatches == 1 else torch.float32
        assert {p.grad.dtype for p in ours.parameters()} == {expected}
        optimizer.step(gradient_scale=factor)
        optimizer.zero_grad()
        reference.step()
    for (name, got), want in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)
        assert torch.equal(getattr(ours, name), got.to(NARROW)), "the copy is not that of the new weight"
        for slot, value in reference.state[want].items():
            torch.testing.assert_close(optimizer.state[got][slot], value, rtol=1e-5, atol=2e-6)


def test_a_scale_of_nan_leaves_everything_as_it_is() -> None:
    """As if the step had not been: also where the gradients are no numbers."""
    made = []
    for left_out in (None, 0, 2):
        model = Weights()
        copies = ComputeCopies(NARROW)
        copies.add(model)
        optimizer = MasterAdamW(groups(model), copies, **OPTIONS)
        copies.refresh()
        for step in range(3):
            if step == left_out:
                give(model, {name: torch.full_like(g, torch.nan) for name, g in gradients(7).items()})
                optimizer.step(gradient_scale=torch.tensor(torch.nan, device=DEVICE))
                optimizer.zero_grad()
                copies.refresh()
            give(model, gradients(step))
            optimizer.step(gradient_scale=torch.tensor(0.5, device=DEVICE))
            optimizer.zero_grad()
        made.append((model, optimizer))
    want, reference = made[0]
    for model, optimizer in made[1:]:
        for (name, got), parameter in zip(model.named_parameters(), want.parameters()):
            assert torch.equal(got, parameter)
            assert torch.equal(getattr(model, name), got.to(NARROW))
            for slot, value in reference.state[parameter].items():
                assert torch.equal(optimizer.state[got][slot], value), slot


def test_copies_are_not_made_again(monkeypatch) -> None:
    model = Weights()
    copies = ComputeCopies(NARROW)
    copies.add(model)
    optimizer = MasterAdamW(groups(model), copies, **OPTIONS)
    copies.refresh()
    give(model, gradients(0))
    before = model.matrix.detach().clone()
    optimizer.step()
    assert not torch.equal(model.matrix, before)
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a: pytest.fail("the step had refreshed them"))
    copies.refresh()


def test_a_backward_across_a_step_is_refused() -> None:
    """The copies that its forward used are gone."""
    model = Weights()
    copies = ComputeCopies(NARROW)
    copies.add(model)
    optimizer = MasterAdamW(groups(model), copies, **OPTIONS)
    copies.refresh()
    late = (model.matrix * model.matrix).sum()
    give(model, gradients(0))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()


@pytest.mark.parametrize("to_torch", [True, False])
def test_state_goes_to_and_from_torch(to_torch: bool) -> None:
    made = []
    for is_torch in (not to_torch, to_torch, to_torch):
        model = Weights()
        copies = ComputeCopies(NARROW)
        if not is_torch:
            copies.add(model)
            copies.refresh()
        optimizer = (
            torch.optim.AdamW(groups(model), **OPTIONS) if is_torch else MasterAdamW(groups(model), copies, **OPTIONS)
        )
        made.append((model, optimizer, is_torch))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, is_torch: bool, number: int) -> None:
        if is_torch:
            for name, gradient in gradients(number).items():
                getattr(model, name).grad = gradient.float()
        else:
            give(model, gradients(number))
        optimizer.step()
        optimizer.zero_grad()

    first, second, straight = made
    step(*first, 0)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    if not second[2]:
        second[1].copies.refresh()
    for number in range(2):
        step(*straight, number)
    step(*second, 1)
    for got, want in zip(second[0].parameters(), straight[0].parameters()):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)


def test_parameters_without_a_gradient_stay() -> None:
    model = Weights()
    copies = ComputeCopies(NARROW)
    copies.add(model)
    optimizer = MasterAdamW(groups(model), copies, **OPTIONS)
    copies.refresh()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = gradients(0)
    del found["matrix"]
    give(model, found)
    optimizer.step()
    assert {name for name, p in model.named_parameters() if torch.equal(p, before[name])} == {"matrix"}


def test_others_get_torchs_adamw() -> None:
    """Without copies, and with them where Triton does not run."""
    model = Weights()
    assert type(build_optimizer(model, OptimizerConfig())) is torch.optim.AdamW
    model.copies = ComputeCopies(NARROW)
    model.copies.add(model)
    expected = MasterAdamW if DEVICE.type == "cuda" else torch.optim.AdamW
    assert type(build_optimizer(model, OptimizerConfig())) is expected
