"""Builds a model spread over the ranks: experts over `ep`, everything sharded by FSDP2, in the reversed nesting.

Nesting: the dense parts of an MoE layer are the inner FSDP unit (over the whole shard axis); the layer itself is the
outer unit and owns only its experts (over `efsdp`). So the experts are gathered when the layer starts, and their
gradients are reduced after attention's backward, where gradients of expert replicas can still join them.

A unit over one rank has nothing to gather or to reduce. FSDP would copy its weights and gradients for nothing, so there
is none: on a world of one rank parameters are plain, on others experts are DTensors over `ep`, as they are under FSDP.
Where it computes in 16 bits, copies of the weights are kept for it (`distributed/compute_copies.py`). They are memory
that FSDP would free after a layer's forward, if it is told to (`reshard_after_forward`); then it stays with FSDP.

Scale: the trainer divides the loss by the number of valid tokens over all ranks, so every reduction is a plain sum.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from equipoise.accelerator import accelerator_for
from equipoise.balance_config import BalanceConfig
from equipoise.dispatch import DispatcherName, LocalDispatcher, build_dispatcher
from equipoise.dispatch.config import DispatchConfig
from equipoise.distributed.compute_copies import ComputeCopies
from equipoise.distributed.mesh import Meshes
from equipoise.errors import ConfigError
from equipoise.kernels.grouped_linear import choose_grouped_linear
from equipoise.models.config import ModelConfig
from equipoise.models.initialize import initialize_module
from equipoise.models.layer import DecoderLayer
from equipoise.models.model import MoEForCausalLM
from equipoise.models.mtp import MTPLayer
from equipoise.models.recompute import Recompute
from equipoise.moe.beside import SideStream
from equipoise.moe.experts import ExpertKernel, Experts
from equipoise.moe.layer import MoELayer
from equipoise.symmetric.space import SymmetricSpace, agreed_problem

if TYPE_CHECKING:
    from equipoise.moe.balancing import ExpertBalancing

logger = logging.getLogger(__name__)


def _keep_local_experts(experts: Experts, meshes: Meshes) -> None:
    """Shrinks the (meta) expert weights of a layer to this EP rank's; they become DTensors over `ep` later."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        shape = (parameter.shape[0] // meshes.sizes.ep, *parameter.shape[1:])
        setattr(experts, name, nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta")))


def _distribute_experts(experts: Experts, meshes: Meshes) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        shards = DTensor.from_local(parameter.data, meshes.ep, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(shards))


def _expert_shard_placement(num_local_experts: int, efsdp: int) -> Callable[[nn.Parameter], Shard | None]:
    """FSDP shards experts by expert, or by their features when there are more ranks than experts here."""

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if efsdp > num_local_experts and parameter.shape[1] % efsdp == 0 else None

    return placement


def build_parallel_model(
    config: ModelConfig,
    meshes: Meshes,
    device: torch.device,
    seed: int,
    *,
    compute_dtype: torch.dtype = torch.float32,
    dispatcher: DispatcherName = "auto",
    expert_kernel: ExpertKernel = "auto",
    recompute: Recompute = "none",
    compile: bool = False,
    reshard_after_forward: bool = True,
    balance: BalanceConfig | None = None,
    initialize: bool = True,
    dispatch: DispatchConfig | None = None,
    timeout_s: float = 600.0,
    overlap_shared_experts: bool = False,
) -> MoEForCausalLM:
    """A model with FP32 master weights sharded over the meshes and initialised from `seed`.

    Layers are materialised, initialised and sharded one at a time, so the peak is the sharded model plus one layer.
    Parameters are computed in `compute_dtype`; gradients are reduced in FP32. Collective over the world.
    `balance` evens out the load of the ranks of each EP group; None imports nothing of it. `dispatch` sizes the
    symmetric dispatcher; a kernel that waits for a peer gives up after `timeout_s`.
    `overlap_shared_experts`: shared experts run beside dispatch and combine, on a stream of their own.
    `initialize`: False leaves the weights as the memory was, for a caller who fills them all.

    Raises:
        ConfigError: the expert kernel asked for does not run here, or balancing cannot serve this model.
    """
    kernel = choose_grouped_linear(device, compute_dtype, expert_kernel)  # probed before any layer needs it
    with torch.device("meta"):
        model = MoEForCausalLM(config, expert_kernel)
    sizes, std = meshes.sizes, config.initializer_range
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )

    needs_no_unit = precision.param_dtype is None or not reshard_after_forward
    """Whether weights of one rank can do without FSDP: computed with as they are, or as copies that stay."""
    copies = ComputeCopies(compute_dtype) if precision.param_dtype is not None and needs_no_unit else None

    def shard(module, mesh, *, reshard: bool, **options) -> None:
        if mesh.size() == 1 and needs_no_unit:
            return
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, **options)
        if mesh.size() > 1:  # over one rank the gradient is copied as it is; a factor would cost a division
            unit = module[0] if isinstance(module, list) else module
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    whole: set[nn.Parameter] = set()
    """Experts without an FSDP unit of their own; none of the units around them may take them."""
    num_local_experts = config.num_experts // sizes.ep
    first_expert = meshes.ep.get_local_rank() * num_local_experts
    placement = _expert_shard_placement(num_local_experts, sizes.efsdp)
    num_physical_experts = config.num_experts
    balance_experts: Callable[[int, Experts], ExpertBalancing] | None = None
    space = symmetric_space(meshes, device, dispatcher, balance, timeout_s)
    if balance is not None:
        shared = space if balance.uses_space(dispatcher, sizes.ep, sizes.domain) else None
        num_physical_experts, balance_experts = _balancing(config, meshes, compute_dtype, balance, shared)
    model.symmetric_space = space
    options: dict[str, float] = {}
    if space is not None and dispatcher in ("auto", "symmetric"):
        dispatcher, chosen = "symmetric", dispatch or DispatchConfig()
        kept = len(config.moe_layers) if recompute == "none" else 1
        options = {
            "capacity_factor": chosen.factor(balance is not None),
            "num_buffers": chosen.num_buffers or kept + 1,  # and the exchange under way
            "weighs_rows": chosen.weighs(sizes.domain == sizes.ep),
        }
    elif dispatch is not None and dispatch.weighs_rows:
        logger.warning("dispatch.weighs_rows has no effect: rows do not go through the symmetric dispatcher")
    shared_dispatcher = build_dispatcher(dispatcher, num_physical_experts, meshes.ep, space, **options)
    if isinstance(shared_dispatcher, LocalDispatcher) and kernel.name == "triton" and balance is None:
        shared_dispatcher = LocalDispatcher(num_physical_experts, weighs_rows=True)
    side = _side_stream(config, sizes.ep, device) if overlap_shared_experts else SideStream()
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        layer.recompute = recompute
        mlp = layer.mlp
        if isinstance(mlp, MoELayer):
            mlp.dispatcher = shared_dispatcher
            mlp.gate.balance_group = meshes.everyone
            if balance_experts is not None:
                mlp.balancing = balance_experts(index, mlp.experts)
            _keep_local_experts(mlp.experts, meshes)
        layer.to_empty(device=device)
        if initialize:
            initialize_module(layer, f"model.layers.{index}.", std, seed, first_expert)
        if compile:
            compile_layer(layer, has_units=meshes.dense.size() > 1 or not needs_no_unit)
        if isinstance(mlp, MoELayer):
            mlp.overlap_shared_experts(side)
            if meshes.everyone.size() > 1 or not needs_no_unit:
                _distribute_experts(mlp.experts, meshes)
            dense = [layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, mlp.gate]
            if mlp.shared_experts is not None and mlp.beside is not None:
                dense += [mlp.shared_experts, mlp.beside]
            if isinstance(layer, MTPLayer):  # modules that are called: a unit waits for each of its list
                dense += [layer.hnorm, layer.enorm, layer.eh_proj, layer.shared_head.norm]
            shard(dense, meshes.dense, reshard=reshard_after_forward)
            shard(layer, meshes.expert_fsdp, reshard=reshard_after_forward, shard_placement_fn=placement)
            if not isinstance(layer, FSDPModule):
                whole.update(mlp.experts.parameters())
                if copies is not None:
                    copies.add(mlp.experts)
        else:
            shard(layer, meshes.dense, reshard=reshard_after_forward)

    outer = [model.model.embed_tokens, model.model.norm, model.lm_head]
    for name, module in zip(("model.embed_tokens.", "model.norm.", "lm_head."), outer):
        module.to_empty(device=device)
        if initialize:
            initialize_module(module, name, std, seed)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        shard(model.model.embed_tokens, meshes.dense, reshard=reshard_after_forward)
        shard([model.model.norm, model.lm_head], meshes.dense, reshard=False)
    shard(model, meshes.dense, reshard=False, ignored_params=whole)
    if copies is not None and not isinstance(model, FSDPModule):
        copies.add(model)
    if copies is not None:
        model.use_copies(copies)
    return model


def _side_stream(config: ModelConfig, ep_size: int, device: torch.device) -> SideStream:
    """For the shared experts, where they can run beside something."""
    problem = (
        "the model has no shared experts"
        if not (config.n_shared_experts and config.moe_layers)
        else "parallel.ep_size is 1, so nothing is exchanged"
        if ep_size == 1
        else "a CPU has no streams"
        if device.type == "cpu"
        else None
    )
    if problem is None:
        return SideStream(accelerator_for(device))
    logger.warning("parallel.overlap_shared_experts has no effect: %s", problem)
    return SideStream()


def symmetric_space(
    meshes: Meshes, device: torch.device, dispatcher: DispatcherName, balance: BalanceConfig | None, timeout_s: float
) -> SymmetricSpace | None:
    """The symmetric memory of this rank's EP group, if it was asked for. Says so in the log.

    Raises:
        ConfigError: it cannot be had.
    """
    sizes, transport = meshes.sizes, None if balance is None else balance.transport
    asked = [
        f"{name} is 'symmetric'"
        for name, value in (("parallel.dispatcher", dispatcher), ("balance.transport", transport))
        if value == "symmetric"
    ]
    if sizes.ep == 1 or not asked:
        if sizes.domain < sizes.ep:
            logger.warning("parallel.domain_size has no effect: neither dispatcher nor balance.transport is symmetric")
        if transport == "auto" and dispatcher == "auto" and sizes.ep > 1 and device.type != "cpu":
            logger.info(
                "balancing over messages: the host waits for the load in every layer. Where the GPUs of an EP group "
                "reach each other, --parallel.dispatcher symmetric does without"
            )
        return None
    problem = agreed_problem(meshes.domain, device, timeout_s)
    if problem is not None:
        raise ConfigError(
            f"{asked[0]}, which cannot be used here: {problem}. Choose auto, or all_to_all and collective"
        )
    where = "" if sizes.domain == sizes.ep else f" within domains of {sizes.domain}"
    logger.info("EP group of %d ranks: symmetric memory%s, as %s", sizes.ep, where, " and ".join(asked))
    return SymmetricSpace(meshes.domain, device, timeout_s)


def _balancing(
    config: ModelConfig, meshes: Meshes, dtype: torch.dtype, balance: BalanceConfig, space: SymmetricSpace | None
) -> tuple[int, "Callable[[int, Experts], ExpertBalancing]"]:
    """The number of physical experts, and what joins a layer to the one balancer of this rank's EP group."""
    from equipoise.balance import Balancer
    from equipoise.moe.balancing import ExpertBalancing, expert_shapes

    shapes = expert_shapes(config.hidden_size, config.moe_intermediate_size)
    balancer = Balancer(meshes.ep, config.num_experts, shapes, dtype, balance, space=space)
    return balancer.num_physical_experts, partial(ExpertBalancing, balancer)


def compile_layer(layer: DecoderLayer, has_units: bool = True) -> None:
    """Compiles what lies between FSDP's hooks, if the layer has units, and the dispatcher's data-dependent shapes."""
    parts: list[nn.Module] = [layer.self_attn] if has_units else []
    if not has_units:  # norms and the residual addition too
        layer.attend = torch.compile(layer.attend)  # type: ignore[method-assign]
    if isinstance(layer.mlp, MoELayer):
        if layer.mlp.shared_experts is not None:
            parts.append(layer.mlp.shared_experts)
    else:
        parts.append(layer.mlp)
    for part in parts:
        part.forward = torch.compile(part.forward)  # type: ignore[method-assign]
