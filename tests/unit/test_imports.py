"""Imports go one way: a package may import only those listed before it (ARCHITECTURE.md)."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src" / "equipoise"
# Lower layers first. Packages in one tuple are neighbours and may not import each other.
LAYERS: list[tuple[str, ...]] = [
    ("config", "errors", "files"),
    ("balance_config", "posttrain_config", "outputs", "run_files"),
    ("accelerator", "kernels"),
    ("distributed",),
    ("symmetric",),
    ("balance", "dispatch"),
    ("moe",),
    ("models",),
    ("checkpoint", "data"),
    ("observe",),
    ("simulate",),
    ("train", "serve"),
    ("posttrain",),
    ("integrations",),
    ("recipes",),
    ("launch", "options"),
    ("exit_codes",),
    ("bench",),
    ("doctor", "convert", "serve_command", "trace"),
    ("cli",),
    ("__main__",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported_packages(path: Path) -> set[str]:
    """Top-level packages of equipoise that a file imports, at any nesting depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            names = [node.module or ""]
            if node.module == "equipoise":
                names = [f"equipoise.{alias.name}" for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("equipoise.")}
    return found - {"__version__"}


FILES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(SRC).parts[0].removesuffix(".py")
    if package == "__init__":
        return
    assert package in LEVEL, f"{package} has no place in LAYERS; add it where it belongs"
    for other in imported_packages(path) - {package}:
        assert LEVEL[other] < LEVEL[package], f"{path.relative_to(SRC)} must not import equipoise.{other}"
        assert other != "integrations", "only users import an integration"


def test_integrations_use_the_library_alone() -> None:
    """What they import is what a framework's user would write."""
    library = {"config", "errors", "balance_config", "accelerator", "distributed", "balance", "dispatch"}
    files = [path for path in FILES if path.relative_to(SRC).parts[0] == "integrations"]
    assert len(files) > 1
    for path in files:
        assert imported_packages(path) - {"integrations"} <= library, path
