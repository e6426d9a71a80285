"""Whether a model can be trained in the memory of the devices at all: refused before anything is allocated.

Only what is certain counts, so that no run is refused that would fit: weights, gradients and moments of the matrices,
held at the end of each step, against all memory that the ranks have, used or not.
"""

from collections.abc import Iterator, Sequence

from equipoise.accelerator import Accelerator, host_memory
from equipoise.checkpoint.sizes import in_words
from equipoise.distributed.agree import gather_json
from equipoise.distributed.mesh import AxisSizes
from equipoise.distributed.world import World
from equipoise.errors import ConfigError
from equipoise.train.config import TrainConfig

WEIGHT_AND_GRADIENT = 8
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


def refuse_too_large(config: TrainConfig, axes: AxisSizes, memory: Sequence[int], device: str) -> None:
    """Raises ConfigError if training cannot fit into what the ranks have together.

    Args:
        memory: bytes of each rank, by `device_memory`; nothing is refused if one is 0.
        device: type of the device.
    """
    on_host = config.optimizer.offload and device != "cpu"
    bytes_each = WEIGHT_AND_GRADIENT + (0 if on_host else MOMENTS)
    parameters = min(config.model.matrix_parameters, _UNCOUNTABLE)
    needed = parameters * bytes_each * axes.replicate
    if min(memory) == 0 or needed <= sum(memory):
        return
    have = sum(memory) // len(memory)
    what = "parameters and gradients" if on_host else "parameters, gradients and optimizer"
    ranks = -(-parameters * bytes_each // have) * axes.replicate
    raise ConfigError(
        f"the model is too large for the memory: it needs about {in_words(needed / axes.world)} on each rank for "
        f"{what} ({parameters / 1e9:,.1f} billion parameters of {bytes_each} bytes, over {axes.shard} "
        f"rank{'' if axes.shard == 1 else 's'}), and a rank has {in_words(have)} ({device}). Choose "
        f"{', or '.join(_remedies(axes, ranks, device, on_host))}"
    )


def _remedies(axes: AxisSizes, ranks: int, device: str, on_host: bool) -> Iterator[str]:
    yield "a smaller model (model.num_hidden_layers, model.hidden_size, model.num_experts, ...)"
    yield f"at least {ranks:,} ranks{' on more machines' if device == 'cpu' else ''}"
    if axes.replicate > 1:
        yield "parallel.replicate_size 1, which spreads one copy over all ranks"
    if device != "cpu" and not on_host:
        yield f"optimizer.offload, which moves {MOMENTS} of the bytes to the host"


def refuse_too_large_together(config: TrainConfig, axes: AxisSizes, world: World) -> None:
    """As `refuse_too_large`, with the memory of all ranks, on all ranks. Collective."""
    memory = gather_json(device_memory(world.accelerator, world.local_size), world)
    refuse_too_large(config, axes, memory, world.accelerator.device_type)
