"""Random state of one rank as tensors, and seeds for ranks that have none."""

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch

from equipoise.accelerator import Accelerator

TORCH, HOST, DEVICE = "torch", "host", "device"


def capture_rng(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """This rank's random state, each part a CPU uint8 tensor [bytes].

    "torch" is the CPU generator of torch, "host" those of `random` and NumPy, "device" the accelerator's
    (none on CPU).
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    host = {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }
    states = {
        TORCH: torch.get_rng_state().clone(),
        HOST: torch.frombuffer(bytearray(json.dumps(host).encode()), dtype=torch.uint8),
    }
    if accelerator.device_type != "cpu":
        states[DEVICE] = accelerator.rng_state().cpu().clone()
    return states


def restore_rng(states: dict[str, torch.Tensor], accelerator: Accelerator) -> None:
    """Puts back what `capture_rng` gave. A "device" part is used only where the accelerator has one."""
    host: dict[str, Any] = json.loads(bytes(states[HOST].tolist()))
    version, internal, gauss = host["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = host["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if DEVICE in states and accelerator.device_type != "cpu":
        accelerator.set_rng_state(states[DEVICE])
    torch.set_rng_state(states[TORCH])


def seed_rng(seed: int, accelerator: Accelerator) -> None:
    """Seeds every generator that `capture_rng` covers. `seed` is in [0, 2**63)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    accelerator.manual_seed(seed)
    torch.manual_seed(seed)


def derived_seed(seed: int, *parts: int) -> int:
    """A seed in [0, 2**63) that depends on `seed` and all `parts`; the same on every machine."""
    text = ":".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
