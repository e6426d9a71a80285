"""Whether a model can be trained in the memory that there is at all: refused before anything is allocated.

Only what is certain counts, so that no run is refused that would fit, against all memory that the ranks have, used or
not: weights, gradients and moments of the matrices; of one microbatch what every layer takes in, which its backward
needs whatever `train.recompute` says, and the logits that the loss holds at once; with `optimizer.offload` the moments
against the hosts' memory. Not what lies between a layer's input and its output, gathered weights, buffers, the process.
"""

from collections.abc import Iterator, Sequence

from equipoise.accelerator import Accelerator, host_memory
from equipoise.checkpoint.sizes import in_words
from equipoise.distributed.agree import gather_json, raised_by_all
from equipoise.distributed.mesh import AxisSizes
from equipoise.distributed.world import World
from equipoise.errors import ConfigError
from equipoise.models.cross_entropy import tokens_at_once
from equipoise.train.config import RunPlan, TrainConfig

WEIGHT = GRADIENT = 4
"""Bytes on the device for each parameter: both in FP32; or with 16-bit copies both in 16 bits besides the master."""
MOMENTS = 8
"""Bytes for each parameter, on the host with `optimizer.offload`."""

_UNCOUNTABLE = 10**30  # parameters: too many for any memory, and few enough for floating point


def device_memory(accelerator: Accelerator, local_size: int) -> int:
    """Bytes that a rank can have at most, with `local_size` ranks on this host; 0 where the platform does not tell.

    On CPU this is the rank's part of the host's memory, with swap.
    """
    total = accelerator.memory().total
    if accelerator.device_type != "cpu" or not total:
        return total
    return (total + host_memory.swap()) // local_size


def host_share(local_size: int) -> int:
    """Bytes of the host that a rank can pin at most, with `local_size` ranks on it; 0 where the platform does not
    tell."""
    return host_memory.available_and_total()[1] // local_size


def kept_of_microbatch(config: TrainConfig, micro_batch_size: int, device: str) -> int:
    """Bytes that a rank holds at least when the loss of a microbatch is computed: see the top of this file."""
    loop, model = config.train, config.model
    is_wide = loop.precision == "float32" or (loop.precision == "auto" and device == "cpu")
    tokens = micro_batch_size * loop.sequence_length
    logits = tokens_at_once(tokens, model.vocab_size, device) * model.vocab_size
    return (tokens * model.hidden_size * model.num_hidden_layers + logits) * (4 if is_wide else 2)


def refuse_too_large(
    config: TrainConfig, plan: RunPlan, memory: Sequence[int], device: str, hosts: Sequence[int] = (0,)
) -> None:
    """Raises ConfigError if training cannot fit into what the ranks have together.

    Args:
        memory: bytes of each rank, by `device_memory`; nothing is refused if one is 0.
        device: type of the device.
        hosts: bytes of each rank's host, by `host_share`; likewise.
    """
    axes = plan.axes
    on_host = config.optimizer.offload and device != "cpu"
    parameters = min(config.model.matrix_parameters, _UNCOUNTABLE)
    of_parameters = parameters * axes.replicate
    if on_host and min(hosts) and of_parameters * MOMENTS > sum(hosts):
        raise ConfigError(
            f"the optimizer's state is too large for the hosts' memory: with optimizer.offload it needs about "
            f"{in_words(of_parameters * MOMENTS / axes.world)} of it for each rank ({parameters / 1e9:,.1f} billion "
            f"parameters of {MOMENTS} bytes, over {_ranks(axes.shard)}), and there are "
            f"{in_words(sum(hosts) / len(hosts))} for each. Choose a smaller model, or more machines, or leave "
            "optimizer.offload out if the devices have the memory"
        )
    bytes_each = WEIGHT + GRADIENT + (0 if on_host else MOMENTS)
    kept = min(kept_of_microbatch(config, plan.micro_batch_size, device), _UNCOUNTABLE)
    # Gradients take their place after it, unless an earlier microbatch of the step has left some.
    more = kept if plan.accumulation_steps > 1 else max(0, kept - of_parameters * GRADIENT // axes.world)
    have, lacks_parameters = sum(memory), of_parameters * bytes_each > sum(memory)
    if min(memory) == 0 or of_parameters * bytes_each + more * axes.world <= have:
        return
    each = have // len(memory)
    what = "parameters and gradients" if on_host else "parameters, gradients and optimizer"
    needs = (
        f"{in_words(of_parameters * bytes_each / axes.world)} on each rank for {what} ({parameters / 1e9:,.1f} billion "
        f"parameters of {bytes_each} bytes, over {_ranks(axes.shard)})"
    )
    remedies = list(
        _remedies(axes, parameters * bytes_each, each if lacks_parameters else each - more, device, on_host)
    )
    if not lacks_parameters:
        tokens = plan.micro_batch_size * config.train.sequence_length
        needs += f", and at least {in_words(kept)} for what layers and loss keep of a microbatch of {tokens:,} tokens"
        remedies.insert(0, "a smaller train.micro_batch_size or train.sequence_length")
    raise ConfigError(
        f"the model is too large for the memory: it needs about {needs}, and a rank has {in_words(each)} ({device}). "
        f"Choose {', or '.join(remedies)}"
    )


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def _remedies(axes: AxisSizes, of_parameters: int, have: int, device: str, on_host: bool) -> Iterator[str]:
    """`have`: bytes of a rank for its share of the bytes `of_parameters`."""
    yield "a smaller model (model.num_hidden_layers, model.hidden_size, model.num_experts, ...)"
    if have > 0:
        ranks = -(-of_parameters // have) * axes.replicate
        yield f"at least {ranks:,} ranks{' on more machines' if device == 'cpu' else ''}"
    if axes.replicate > 1:
        yield "parallel.replicate_size 1, which spreads one copy over all ranks"
    if device != "cpu" and not on_host:
        yield f"optimizer.offload, which moves {MOMENTS} of the bytes to the host"


@raised_by_all()
def refuse_too_large_together(config: TrainConfig, plan: RunPlan, world: World) -> None:
    """As `refuse_too_large`, with the memory of all ranks, on all ranks. Collective."""
    own = device_memory(world.accelerator, world.local_size), host_share(world.local_size)
    memory, hosts = zip(*gather_json(own, world), strict=True)
    refuse_too_large(config, plan, memory, world.accelerator.device_type, hosts)
