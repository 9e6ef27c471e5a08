"""The README tells the truth about names, files and commands."""

import re
import shlex
from pathlib import Path

import minits.training.recipe
import minits.prefill
import minits.supervision
import minits.thinking
import minits.training.loop
from minits import GenerationResult, ThinkingStates
from minits.cli.main import make_parser

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_command_parses():
    commands = re.findall(r"python run\.py ([^`#\n]*)", TEXT)
    assert len(commands) >= 5
    for command in commands:
        if "…" not in command and "COMMAND" not in command:
            make_parser().parse_args(shlex.split(command))


def test_every_name_of_the_symbol_table_exists():
    table = TEXT[TEXT.index("## Paper symbol") : TEXT.index("## Results")]
    code = [
        name
        for line in table.splitlines()[4:]
        if line.startswith("|")
        for name in re.findall(r"`([\w.]+)`", line.replace(r"\|", "").split("|")[2])
    ]
    holders = [
        ThinkingStates,
        GenerationResult,
        minits.thinking,
        minits.supervision,
        minits.training.loop,
        minits.thinking.ThinkingConfig,
    ]
    fields = {
        *minits.thinking.ThinkingConfig.__annotations__,
        *GenerationResult.__annotations__,
        *minits.thinking.Thought.__annotations__,
        "backbone",
        "thinking_block",
        "compression_block",
    }
    assert len(code) >= 9
    for name in code:
        last = name.split(".")[-1]
        assert last in fields or any(hasattr(holder, last) for holder in holders), name


def test_every_source_file_is_on_the_map():
    table = TEXT[TEXT.index("## Files") : TEXT.index("## Paper symbol")]
    for path in (ROOT / "minits").glob("*.py"):
        if path.name != "__init__.py":
            assert path.name in table, path.name


def test_the_drafts_named_are_the_drafts_there_are():
    for draft in minits.prefill.DRAFTS:
        assert f"`{draft}`" in TEXT or f'`draft="{draft}"`' in TEXT, draft
