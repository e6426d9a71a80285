"""Memory that ranks share among processes of this host, for tests in Triton's interpreter."""

import torch

from distributed.balance_rig import few_candidates
from equipoise.distributed.mesh import Meshes
from equipoise.symmetric.space import SymmetricSpace

CPU = torch.device("cpu")  # its interpreter rounds to BF16 in a way of its own, so FP16 stands for it


def make_space(meshes: Meshes, timeout_s: float = 60.0) -> SymmetricSpace:
    few_candidates()
    return SymmetricSpace(meshes.ep_group, CPU, timeout_s)
