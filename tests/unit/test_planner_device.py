"""Plans on an accelerator: the same as on the host, and made without a host synchronization."""

import pytest
import torch

from equipoise.accelerator import get_accelerator
from equipoise.balance import PlannerSettings, check_plan, complete_plan, plan_loads, reroute
from equipoise.balance.planner_host import plan_load


@pytest.mark.gpu
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(2, 8), (5, 15), (8, 128)])
@pytest.mark.parametrize("chosen", [PlannerSettings(1, 0.0), PlannerSettings(2, 0.01, copy_tokens=50)])
def test_device_and_host_agree(num_ranks: int, num_experts: int, chosen: PlannerSettings) -> None:
    device = get_accelerator().device()
    if device.type == "cpu":
        pytest.skip("needs an accelerator")
    generator = torch.Generator().manual_seed(0)
    ids_TK = (torch.rand(512, 2, generator=generator) ** 3 * num_experts).int()
    source = torch.randint(0, num_ranks, (512,), generator=generator)
    load_PE = torch.zeros(num_ranks, num_experts, dtype=torch.int32)
    load_PE.index_put_((source.repeat_interleave(2), ids_TK.flatten().long()), torch.tensor(1).int(), accumulate=True)
    mine_TK = ids_TK[source == 1]

    def on(where: torch.device):
        load = load_PE.to(where)
        placement = plan_loads(load.sum(0, keepdim=True), num_ranks, chosen, reads_values=False)[0]
        plan = complete_plan(placement, load, 1)
        return plan, reroute(mine_TK.to(where), plan)

    plan, physical_TK = on(device)
    if device.type == "cuda":  # once more, now that constants are on the device
        load, ids = load_PE.to(device), mine_TK.to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            placement = plan_loads(load.sum(0, keepdim=True), num_ranks, chosen)[0]
            reroute(ids, complete_plan(placement, load, 1))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    expected = plan_load(load_PE.sum(0), num_ranks, chosen)
    assert torch.equal(plan.quota.cpu(), expected.quota)
    assert torch.equal(plan.slot_expert.cpu(), expected.slot_expert)
    check_plan(complete_plan(expected, load_PE, 1), load_PE)
    on_host, host_TK = on(torch.device("cpu"))
    assert torch.equal(plan.send.cpu(), on_host.send)
    assert torch.equal(plan.recv.cpu(), on_host.recv)
    assert torch.equal(physical_TK.cpu(), host_TK)
