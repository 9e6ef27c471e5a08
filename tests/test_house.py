"""The house: who may import whom, how large things may be, and words that stay in their folder."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minits"
FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [*FILES, ROOT / "run.py"]

# Arrows point one way: each folder may import what stands to its left, and itself; "" is the root.
# Tasks and fast do not know each other.
ORDER = ["", "checkpoint", ("tasks", "fast"), "methods", "training", "lab", "cli"]
LIMITS = {"root": 11_000, "package": 100_000}
TOKENS_A_LINE = {"root": 10.0, "package": 10.5}
LINES_OF_THE_ROOT = 1_800


def folder_of(path: Path) -> str:
    """The folder of the package that a file stands in; "" for the root."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def allowed(folder: str) -> set[str]:
    """The folders that files of `folder` may import from."""
    found = {folder}
    for level in ORDER:
        names = {level} if isinstance(level, str) else set(level)
        if folder in names:
            return found
        found |= names
    raise AssertionError(f"minits/{folder} has no place in ORDER")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, folder) of everything of this package that a file imports, wherever it does so."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the arrow"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "minits" or name.startswith("minits."):
                parts = name.split(".")[1:]
                inside = parts and (PACKAGE / parts[0]).is_dir()
                yield node.lineno, parts[0] if inside else ""


def code(path: Path) -> tuple[int, set[int]]:
    """(tokens, numbers of the lines of code): no comments, docstrings, line ends; f-strings are one."""
    text = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    ignored = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    start, end = getattr(tokenize, "FSTRING_START", -1), getattr(tokenize, "FSTRING_END", -1)
    count, depth, lines = 0, 0, set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in ignored or token.start[0] in docstrings:
            continue
        lines |= set(range(token.start[0], token.end[0] + 1))
        depth -= token.type == end
        count += depth == 0 and token.type != end
        depth += token.type == start
    return count, lines


def total(paths: list[Path]) -> tuple[int, int]:
    """(tokens, lines of code) of these files."""
    found = [code(path) for path in paths]
    return sum(tokens for tokens, _ in found), sum(len(lines) for _, lines in found)


def test_arrows_point_one_way():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports from minits/{target}"
        for path in FILES
        # __init__ hands out `load` and `save` and, lazily, `accelerate`: the one file that may.
        if path != PACKAGE / "__init__.py"
        for line, target in imports(path)
        if target not in allowed(folder_of(path))
    ]
    assert wrong == []


def test_the_root_hands_out_what_it_does_not_hold_and_nothing_more():
    targets = {target for _, target in imports(PACKAGE / "__init__.py")}
    assert targets == {"", "checkpoint", "fast"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_no_wide_lines_and_neither_file_nor_function_is_long(path):
    text = path.read_text(encoding="utf-8")
    wide = [n for n, line in enumerate(text.splitlines(), 1) if len(line) > 100]
    assert wide == []
    _, lines = code(path)
    assert len(lines) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            own = sum(node.lineno <= line <= node.end_lineno for line in lines)
            assert own <= 60, f"{node.name}: {own} lines of code"


@pytest.mark.parametrize("part", ["root", "package"])
def test_the_code_is_small_and_has_air(part):
    paths = [path for path in FILES if not folder_of(path)] if part == "root" else SOURCES
    tokens, lines = total(paths)
    assert tokens <= LIMITS[part]
    assert tokens / lines <= TOKENS_A_LINE[part]


def test_the_root_is_an_afternoons_reading():
    paths = [path for path in FILES if not folder_of(path)]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in paths)
    assert lines <= LINES_OF_THE_ROOT


def compared(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of comparisons in which a method's name or `.get("method")` takes part."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            text = ast.unparse(node)
            sides = [node.left, *node.comparators]
            if any(ast.unparse(side).endswith((".method", "get('method')")) for side in sides):
                yield node.lineno, text


def test_only_methods_know_which_method_it_is():
    """Membership in a table is no question of the kind."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        if folder_of(path) != "methods"
        for line, text in compared(path)
        if " in METHODS" not in text
    ]
    assert wrong == []


def test_only_tasks_speak_of_operations():
    """In the sense of an example's length; the word for arithmetic work is meant nowhere here."""
    wrong = [
        f"{path.relative_to(ROOT)}: {node.id if isinstance(node, ast.Name) else node.attr}"
        for path in FILES
        if folder_of(path) != "tasks"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Name, ast.Attribute))
        and (node.id if isinstance(node, ast.Name) else node.attr) == "operations"
        and path.name not in ("bench.py", "bench_train.py")
    ]
    assert wrong == []


def test_top_level_is_the_cards():
    ours = {"minits", "tests", "run.py", "requirements.txt", "README.md", "LICENSE"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found - ours <= {"runs", "wheels"}
