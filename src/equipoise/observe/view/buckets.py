"""Long series in as many points as a screen can show."""

from collections.abc import Sequence

import numpy as np


def bucket_starts(length: int, limit: int) -> np.ndarray:
    """Starts of at most `limit` runs of equal length (the last may be shorter); one item each where they all fit."""
    size = max(1, -(-length // limit))
    return np.arange(0, length, size)


def bucket_mean(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Mean of each bucket along axis 0, without NaN; NaN where there is nothing else."""
    if not len(starts):
        return np.empty((0, *values.shape[1:]))
    values = values.astype(np.float64)
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def bucket_max(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Largest of each bucket along axis 0; NaN loses against numbers."""
    if not len(starts):
        return np.empty((0, *values.shape[1:]))
    return np.fmax.reduceat(values.astype(np.float64), starts)


def plain(values: Sequence[float] | np.ndarray, digits: int = 6) -> list:
    """Nested lists for JSON: NaN and infinity as None, numbers to some significant digits, to keep pages small."""
    array = np.asarray(values, np.float64)
    known = np.isfinite(array)
    size = np.floor(np.log10(np.abs(array, where=known & (array != 0), out=np.ones_like(array))))
    power = 10.0 ** np.clip(digits - 1 - size, -300, 300)
    rounded = np.where(known, np.round(np.where(known, array, 0.0) * power) / power, array)
    if known.all():
        return rounded.tolist()
    objects = rounded.astype(object)
    objects[~known] = None
    return objects.tolist()
