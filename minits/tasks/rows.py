"""Rows of one's own, from files of JSON lines: a question, its steps, its answer.

    {"question": "Tom has 3 pens. He buys 2.", "steps": [{"at": 26, "text": "5"}], "answer": "5"}
    {"question": "Tom has 3 pens. He buys 2.<T>", "steps": ["5"], "answer": "5"}

Both say that "5" can be inferred from the first 26 characters on. `at` counts characters of the
question; markers are taken out of it, and each is the place of one step, in their order.
"""
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from minits.checkpoint.files import listing
from minits.settings import flag, setting
from minits.supervision import MARKER, Example, Step, parse_marked
from minits.tasks.answers import SCORINGS, number_behind
from minits.tasks.task import USUAL, Task

FILES = ("train", "valid", "test")
LINE_ENDS = re.compile(rb"\r\n|\r|\n")  # and nothing else: U+2028 may stand in a text
ROW = {"question": str, "steps": list, "answer": str}
STEP = {"at": int, "text": str}
WORDS = {str: "a text", list: "a list", int: "a whole number"}


class RowsFile(NamedTuple):
    """What a file of rows holds."""

    examples: list[Example]
    about: dict[str, Any]  # for records: file, rows, skipped, sha256


@dataclass(frozen=True)
class Rows(Task):
    """Finite splits, one a file. Nothing is read before an example is asked for."""

    train: str | None = setting(None, "file of JSON lines to train on")
    valid: str | None = setting(None, "file to evaluate on, in training too (--eval-every)")
    test: str | None = setting(
        None,
        "file to evaluate on at the end: its first rows, as many as --eval-samples (eval: "
        "--samples). Without --valid and --test nothing is evaluated",
    )
    opening: str = setting(
        "The answer is",
        "words put before an answer that does not begin with them; may be ''",
        empty=True,
    )
    scoring: str = setting(
        "text", "what is compared: the answer's text, or its last number", choices=tuple(SCORINGS)
    )
    skip_bad: bool = setting(False, "pass over lines that are no rows, and count them")

    name: ClassVar = "rows"
    kept: ClassVar = ("opening", "scoring")
    recipes: ClassVar = USUAL | {
        ("*", "tiny"): USUAL["*", "tiny"] | {"chunk_size": 4, "steps": 300},
    }

    def __post_init__(self) -> None:
        for split in FILES:  # a run can be resumed and evaluated from any folder
            if path := getattr(self, split):
                object.__setattr__(self, split, str(Path(path).absolute()))

    @property
    def splits(self) -> tuple[str, ...]:
        return "train", *(split for split in FILES[1:] if getattr(self, split))

    @cached_property
    def files(self) -> dict[str, RowsFile]:
        """The files that were read so far, by split."""
        return {}

    def file(self, split: str) -> RowsFile:
        """The file of a split, read once. Raises ValueError, naming the line, or OSError."""
        if split not in self.files:
            path = getattr(self, split)
            if not path:
                raise ValueError(f"rows has no {flag(split)} FILE: name one, of JSON lines.")
            self.files[split] = read_rows(split, Path(path), self.row, self.skip_bad)
        return self.files[split]

    def row(self, line: str) -> Example:
        """The example in a line. Raises ValueError saying what is wrong with it."""
        example = parse_row(line)
        answer, opening = example.answer, self.opening.strip()
        if not answer.startswith(opening):
            answer = f"{opening} {answer}"
        if self.scoring == "number" and number_behind(opening, answer) is None:
            raise ValueError(f"--scoring number: the answer {answer!r:.100} has no number")
        return replace(example, answer=answer)

    def demo(self) -> Example:
        try:
            return super().demo()
        except (ValueError, OSError) as error:
            raise ValueError(f"there is no row to show: {error} Or give a PROMPT.") from error

    def title(self, split: str) -> str:
        return {"train": "training"}.get(split, split)

    def size(self, split: str) -> int:
        return len(self.file(split).examples) if getattr(self, split) else 0

    def example(self, split: str, index: int, seed: int) -> Example:
        return self.file(split).examples[index]

    def sources(self) -> dict[str, dict[str, Any]]:
        return {split: self.file(split).about for split in FILES if getattr(self, split)}

    def texts(self) -> Iterator[str]:
        for example in self.file("train").examples:
            yield example.prompt
            yield from (" " + step.text for step in example.steps)
            yield " " + example.answer

    def evaluated(self, given: dict[str, Any]) -> tuple[Task, str]:
        """The file among the flags, else the last one of the run.

        Beside it only that of the training matters, where it still is: the two must not overlap.
        """
        named = [split for split in FILES if split in given]
        if len(named) > 1:
            raise ValueError(
                f"{' and '.join(map(flag, named))}: eval looks at one file; name one of them."
            )
        chosen = replace(self, **given)
        split = named[0] if named else chosen.splits[-1]
        if split == "train" and not named:
            raise ValueError(
                "the run has no file to evaluate on. Name one with --test FILE; with --train FILE, "
                "what it was trained on."
            )
        there = split == "train" or (chosen.train and Path(chosen.train).exists())
        others = {other: None for other in FILES if other != split}
        return replace(chosen, **others | ({"train": chosen.train} if there else {})), split


def read_rows(
    split: str, path: Path, parse: Callable[[str], Example], skip_bad: bool
) -> RowsFile:
    """The rows of a file. Raises ValueError naming file and line, or FileNotFoundError."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{flag(split)} {path} is no file ({path.parent} holds {listing(path.parent)}). Put it "
            "back, or name another."
        )
    content = path.read_bytes()
    examples, bad = [], []
    for number, line in enumerate(LINE_ENDS.split(content), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                examples.append(replace(parse(text), name=f"{path.name}, line {number}"))
        except (ValueError, RecursionError) as error:  # the latter: lists in lists in lists
            bad.append(f"line {number}: {error}")
            if not skip_bad:
                raise ValueError(
                    f"{path}, {bad[0]}. Mend the line, or pass over such lines with --skip-bad."
                ) from error
    if not examples:
        first = f", the first: {bad[0]}" if bad else ""
        raise ValueError(
            f"{flag(split)} {path} holds no row ({len(bad)} bad lines{first}); a row is one line: "
            '{"question": "…", "steps": [{"at": 3, "text": "…"}], "answer": "…"}.'
        )
    about = {"file": str(path), "rows": len(examples), "skipped": len(bad)}
    about |= {"first_skipped": bad[0]} if bad else {}
    return RowsFile(examples, about | {"sha256": sha256(content).hexdigest()})


def parse_row(line: str) -> Example:
    """The row in a line of JSON. Raises ValueError saying what is wrong with it."""
    try:
        row = json.loads(line, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.colno}") from error
    if isinstance(row, dict):
        row = {"steps": []} | row
    question, steps, answer = members(row, ROW, "the row")
    if MARKER in question or any(isinstance(step, str) for step in steps):
        question, placed = parse_marked(question, steps)
    else:
        named = ((f"step {i}", step) for i, step in enumerate(steps, 1))
        placed = tuple(Step(*members(step, STEP, what)) for what, step in named)
        places = [step.position for step in placed]
        if sorted([0, *places, len(question)]) != [0, *places, len(question)]:
            raise ValueError(
                f"the steps stand at the characters {places}; they must follow the order of the "
                f"question, which has {len(question)}"
            )
    for text in (question, answer, *(step.text for step in placed)):
        if not isinstance(text, str):
            raise ValueError(f"beside markers each step is a text, not {json.dumps(text):.100}")
        if not text.strip():
            raise ValueError("question, answer or a step is empty")
        if wrong := re.search("[\0\ud800-\udfff]", text):
            raise ValueError(f"{wrong[0]!r} is no character of a text")
    return Example(question, placed, answer, size=len(placed))


def members(value: Any, kinds: dict[str, type], what: str) -> list[Any]:
    """The values of a JSON object that has these keys. Raises ValueError for any other thing."""
    if not isinstance(value, dict) or set(value) != set(kinds):
        found = ", ".join(value) if isinstance(value, dict) else json.dumps(value)
        raise ValueError(
            f"{what} holds {found:.200}; it must be an object that holds {', '.join(kinds)}"
        )
    for key, kind in kinds.items():
        if type(value[key]) is not kind:
            found = json.dumps(value[key])
            raise ValueError(f"{key!r} of {what} is {found:.100}, not {WORDS[kind]}")
    return [value[key] for key in kinds]


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is there twice: {', '.join(key for key, _ in pairs):.100}")
    return found
