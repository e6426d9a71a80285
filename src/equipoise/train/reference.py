"""The configuration reference, written from the configuration classes.

`python -m equipoise.train.reference > docs/configuration.md` renews the committed page.
"""

from pydantic import BaseModel

from equipoise.train.schema import Section, Setting, read_schema

_INTRODUCTION = """\
# Configuration reference

This page is generated from the configuration classes:
`python -m equipoise.train.reference > docs/configuration.md`.

Every key below can stand in a recipe (a TOML file, one table per section) and on the command line:

```
equipoise train demo --nproc-per-node 2 --train.steps 200 --optimizer.lr=1e-3 --model.num-experts 16
```

* Layers, the last one wins: the defaults below, the recipes named by `extends = "NAME"`, the recipe, the
  command line.
* Dashes and underscores in names are the same on the command line. True-or-false settings take
  true/false, yes/no, on/off or 1/0; `--section.key` alone means true, `--section.no-key` false.
* Lists are written `[1, 2]` or `1,2`. `none` clears a setting that can be none (`"none"` in a recipe).
* Types are strict: `4.5` is no int, and text is no number. All problems are reported at once.
"""


def render_reference(root: type[BaseModel]) -> str:
    """The reference page of `root` in Markdown: one table for each section."""
    schema = read_schema(root)
    parts = [_INTRODUCTION]
    for section in schema.sections.values():
        settings = schema.settings_of(section.key)
        if settings or section.key:
            parts.append(_section(section, settings))
    return "\n".join(parts)


def _section(section: Section, settings: list[Setting]) -> str:
    lines = [f"## {section.key or 'General'}", ""]
    if section.key and section.help:
        lines += [section.help, ""]
    if section.optional:
        lines += [f"Off unless set: `--{section.key}` alone switches it on, `none` off.", ""]
    if settings:
        lines += ["| key | type and range | default | meaning |", "|---|---|---|---|"]
        lines += [_row(setting) for setting in settings]
        lines.append("")
    return "\n".join(lines)


def _row(setting: Setting) -> str:
    cells = [f"`{setting.key}`", setting.expected, f"`{setting.default}`", setting.help]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    from equipoise.train.config import TrainConfig

    print(render_reference(TrainConfig), end="")
