"""Numbers of bytes as people read them."""

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def in_words(num_bytes: float) -> str:
    """A number of bytes to three digits or more, in the unit that suits it (powers of 1000)."""
    for size, unit in _UNITS:
        scaled = num_bytes / size
        if scaled >= 0.9995:
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return f"{num_bytes:.0f} byte{'' if num_bytes == 1 else 's'}"
