"""The documents are true: links lead somewhere, commands and recipes load, keys exist, quoted messages are raised."""

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer.main
from safetensors.torch import save_file
from trace_rows import INFO, rows

from equipoise import cli
from equipoise.checkpoint.hf import HFMapping, hf_config
from equipoise.models.config import ModelConfig
from equipoise.observe.writer import TraceWriter
from equipoise.posttrain.run import check_settings
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config, parse_config, split_recipe
from equipoise.train.resolved import to_toml
from equipoise.train.schema import read_schema

ROOT = Path(__file__).resolve().parents[2]
PAGES = {str(path.relative_to(ROOT)): path for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])}
TEXTS = {name: path.read_text() for name, path in PAGES.items()}
SCHEMA = read_schema(TrainConfig)
FILE_SUFFIXES = ("jsonl", "md", "py", "toml")


def blocks(text: str, *languages: str) -> list[str]:
    """Contents of the fenced blocks in one of the languages ("" for none)."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in found if language in languages]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


# Links


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, by the rule of the usual renderers."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links() -> list[tuple[str, str]]:
    found = [(name, target) for name, text in TEXTS.items() for target in re.findall(r"\]\(([^)\s]+)\)", prose(text))]
    return [(name, target) for name, target in found if not re.match(r"\w+:", target)]


@pytest.mark.parametrize(("page", "target"), links())
def test_relative_links_resolve(page: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    goal = (PAGES[page].parent / path).resolve() if path else PAGES[page]
    assert goal.exists()
    if anchor:
        assert anchor in anchors(goal.read_text())


def test_every_page_is_in_the_index() -> None:
    linked = {target.partition("#")[0] for page, target in links() if page == "docs/index.md"}
    assert {path.name for path in PAGES.values() if path.parent.name == "docs"} - {"index.md"} <= linked


def test_the_readme_is_short_and_starts_with_the_two_commands() -> None:
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) <= 200
    first = blocks(TEXTS["README.md"], "bash")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


# Commands and recipes


def command_lines(text: str) -> Iterator[str]:
    for block in blocks(text, "", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"\s*equipoise [a-z]", line) or " -m equipoise " in line:
                yield line.strip().rstrip("'")


def commands() -> list[tuple[str, str]]:
    found = [(page, line) for page, text in TEXTS.items() for line in command_lines(text)]
    examples = cli._train_help().split("Examples:")[1].split("\n\n")[0]
    found += [("train --help", re.split(r"\s+\(", line)[0].strip()) for line in examples.strip().splitlines()]
    return found


def toml_files(page: str) -> dict[str, str]:
    """The recipes that a page shows under a name (`# my.toml`)."""
    text = TEXTS.get(page, TEXTS["docs/quickstart.md"])
    found = [(re.match(r"# (\S+\.toml)\n", block), block) for block in blocks(text, "toml")]
    return {match[1]: block for match, block in found if match}


@pytest.fixture
def shown_files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the page's commands take: its recipes, and the run folders it speaks of."""
    monkeypatch.chdir(tmp_path)
    page = request.getfixturevalue("page")
    for name, text in toml_files(page).items():
        Path(name).write_text(text)
    for run in ("first", "mine"):
        folder = tmp_path / "runs" / run
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(to_toml(load_config(TrainConfig, "demo")))
    if "--model.load_from" in TEXTS.get(page, ""):
        write_toy_model(tmp_path / "models" / "mine")


def write_toy_model(folder: Path) -> None:
    """A Hugging Face folder to start from."""
    mapping = HFMapping(ModelConfig(hidden_size=8, intermediate_size=8, moe_intermediate_size=8))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(mapping)))
    save_file({k: torch.zeros(p.shape) for k, (_, p) in mapping.sources.items()}, folder / "model.safetensors")


def number_of(words: list[str], option: str) -> int:
    """The option's number; 1 where it is missing or a variable of the shell."""
    text = words[words.index(option) + 1] if option in words else "1"
    return int(text) if text.isdecimal() else 1


@pytest.mark.usefixtures("shown_files")
@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_parse_and_their_settings_load(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    start = words.index("equipoise")
    name, *arguments = words[start + 1 :]
    program = typer.main.get_command(cli.main)
    if name.startswith("--"):
        assert name in ("--help", "--version")
        return
    if "--help" in arguments:
        assert name in program.commands  # type: ignore[attr-defined]
        return
    commands = program.commands  # type: ignore[attr-defined]
    if name == "bench":
        name, *arguments = arguments
        commands = commands["bench"].commands
    context = commands[name].make_context(name, arguments)
    if name not in ("train", "posttrain", "balance"):
        return
    if name == "balance":
        recipe, overrides = split_recipe(TrainConfig, context.args)
        known = ROOT / recipe if recipe and recipe.startswith("benchmarks/") else recipe
        load_config(TrainConfig, "demo" if recipe and recipe.startswith("runs/") else known, overrides)
        return
    if context.params["help_config"]:
        cli.describe_settings(SCHEMA, context.args)
        return
    recipe, overrides = split_recipe(TrainConfig, context.args)
    placeholder = recipe in ("RECIPE", "NAME")
    config = load_config(TrainConfig, "demo" if placeholder else recipe, overrides)
    if not placeholder:
        workers = number_of(words[:start], "--nproc-per-node") * number_of(words[:start], "--nnodes")
        count = context.params["nproc_per_node"] or workers
        config.check_world(count)
        if name == "posttrain":
            check_settings(config, count)
        else:
            assert config.posttrain is None


@pytest.mark.usefixtures("shown_files")
@pytest.mark.parametrize("page", TEXTS)
def test_toml_blocks_are_recipes(page: str) -> None:
    for block in blocks(TEXTS[page], "toml"):
        if re.search(r"^\[project", block, re.MULTILINE):
            continue
        if re.search(r"^extends", block, re.MULTILINE):
            Path("shown.toml").write_text(block)
            load_config(TrainConfig, "shown.toml")
        else:
            parse_config(TrainConfig, block)


def test_make_targets_exist() -> None:
    known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for text in TEXTS.values():
        code = "\n".join([*blocks(text, "bash"), *re.findall(r"`(make [^`\n]+)`", prose(text))])
        for targets in re.findall(r"^make ([a-z][a-z -]*)", code, re.MULTILINE):
            assert set(targets.split()) <= set(known), targets


@pytest.mark.parametrize(
    ("page", "block"),
    [
        (page, block)
        for page in TEXTS
        if page != "docs/accelerators.md"
        for block in blocks(TEXTS[page], "python")
        if "init_process_group" not in block  # these need ranks: distributed/test_transformers.py
    ],
)
def test_python_examples_run(page: str, block: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("A text of some length for a small example.\n" * 2000)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "metrics.jsonl").write_text('{"step": 1}\n')
    with TraceWriter(tmp_path / "runs" / "demo" / "trace", INFO) as trace:
        trace.write_layers(rows(20))
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# Keys


def named_keys(text: str) -> Iterator[str]:
    """Dotted keys in inline code and in commands, with underscores and without the no- form."""
    code = re.findall(r"`([^`\n]+)`", prose(text)) + blocks(text, "bash")
    sections = "|".join(section for section in SCHEMA.sections if section)
    for span in code:
        for dashes, key in re.findall(rf"(?<![\w./\-])(--)?((?:{sections})\.[a-zA-Z_\-.]*\w)", span):
            if not key.endswith(tuple(f".{suffix}" for suffix in FILE_SUFFIXES)):
                yield key.replace("-", "_").replace(".no_", ".") if dashes else key


@pytest.mark.parametrize("page", TEXTS)
def test_named_keys_exist(page: str) -> None:
    examples_of_mistakes = {"train.step"}
    known = {*SCHEMA.settings, *SCHEMA.sections} | examples_of_mistakes
    assert set(named_keys(TEXTS[page])) - known == set()


def test_keys_are_found_where_they_are_named() -> None:
    assert set(named_keys("`train.steps` and `docs/data.md`\n```bash\nx --train.no-compile\n```\n")) == {
        "train.steps",
        "train.compile",
    }


# Messages


def source_strings() -> list[str]:
    """Every string of the source; the variable parts of formatted ones become a zero character."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


SOURCE = source_strings()
QUOTED = re.findall(r"^\*\*`([^`]+)`\*\*", TEXTS["docs/troubleshooting.md"], re.MULTILINE)


def is_raised(message: str) -> bool:
    """Whether one string of the source has the constant parts of a message (between `...`) in order."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")), re.DOTALL)
    return any(pattern.search(text) for text in SOURCE)


@pytest.mark.parametrize("message", QUOTED)
def test_quoted_messages_occur_in_the_source(message: str) -> None:
    assert len(message.replace("...", "").strip()) >= 8, "too little to search for"
    assert is_raised(message)


def test_messages_that_do_not_exist_are_noticed() -> None:
    assert len(QUOTED) > 50
    assert not is_raised("parallel.ep_size is ..., which is a nice number")
