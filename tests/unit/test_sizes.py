import pytest

from equipoise.checkpoint.sizes import in_words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (54_321, "54.3 kB"),
        (999_400, "999 kB"),
        (999_960, "1.00 MB"),
        (9_996_000, "10.0 MB"),
        (123_456_789, "123 MB"),
        (5_000_000_000, "5.00 GB"),
        (61_066_575_104, "61.1 GB"),
        (1.5e12, "1.50 TB"),
    ],
)
def test_bytes_in_words(num_bytes: float, words: str) -> None:
    assert in_words(num_bytes) == words
