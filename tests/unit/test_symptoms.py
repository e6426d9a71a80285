"""The table in SYMPTOMS.md names only tests that exist, and every group and case."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TEXT = (TESTS / "SYMPTOMS.md").read_text()
BALANCE = list(range(1, 28))  # reports about load balancers
CASES = "03 04 05 06 07 09 11 13 15 18 19 22 23 24 26 28 29 30 32 34 36 37 39 41 42 43 44 46 48 50"  # of the reports


def test_every_test_that_the_table_names_exists() -> None:
    for line in TEXT.splitlines():
        file = ""
        for path, function in re.findall(r"`([\w/]*\.py)?(?:::(\w+))?`", line):
            file = path or file
            if not file:
                continue
            source = (TESTS / file).read_text()
            assert not function or f"def {function}(" in source, f"{file}::{function}"


def test_every_group_and_case_has_a_row() -> None:
    groups = [int(n) for n in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)]
    assert groups == list(range(1, 21))
    rows = [row for row in re.findall(r"^\| (C.*?) \|", TEXT, re.MULTILINE) if row[1].isdigit()]
    assert re.findall(r"C(\d\d)", " ".join(rows)) == CASES.split()
    assert [int(n) for n in re.findall(r"^\| B(\d\d) ", TEXT, re.MULTILINE)] == BALANCE
    assert [int(n) for n in re.findall(r"^\| W(\d) ", TEXT, re.MULTILINE)] == list(range(1, 10))
    kernels = [row for row in re.findall(r"^\| (K.*?) \|", TEXT, re.MULTILINE) if row[1].isdigit()]
    assert sorted(int(n) for n in re.findall(r"K(\d\d)", " ".join(kernels))) == list(range(1, 18))
