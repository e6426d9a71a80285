"""Training with multi-token prediction is the same training however it is spread over ranks."""

import pytest

from distributed.harness import run_ranks
from distributed.parity import Case, compare_on_this_rank, toy_model
from equipoise.balance_config import BalanceConfig

BALANCED = BalanceConfig(num_redundant_experts_per_rank=2, tolerance=0.0)
SHORT = (1, 2, 7, 12)  # microbatches in which one depth, or both, has nothing to predict
ONE = toy_model(num_nextn_predict_layers=1)
TWO = toy_model(num_nextn_predict_layers=2, selection_bias=True, bias_update_speed=0.05)
TIED = toy_model(num_nextn_predict_layers=1, tie_word_embeddings=True, mlp_only_layers=(2,))
CASES = {
    2: [
        Case(ONE, 2, dispatcher="all_to_all", recompute="full"),
        Case(TWO, 2, dispatcher="all_to_all", recompute="full", balance=BALANCED, selection_bias=0.3, lengths=SHORT),
    ],
    1: [Case(TWO, lengths=SHORT, recompute="selective"), Case(TIED)],
}


# Each layout in fresh processes: DTensor caches meshes by equality, and a mesh of an earlier world has other groups.
@pytest.mark.parametrize("ep", CASES)
def test_two_ranks(ep: int) -> None:
    on_cpu = {"EQUIPOISE_ACCELERATOR": "cpu"}
    for results in run_ranks(compare_on_this_rank, 2, CASES[ep], deadline_s=240, env=on_cpu):
        for case, differing in results:
            assert not differing, f"{case} differs: {differing}"
