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
KEYS = ("question", "steps", "answer")
KINDS = {"a text": str, "a list": list, "an object": dict, "a whole number": int}


class RowsFile(NamedTuple):
    """What a file of rows holds."""

    examples: list[Example]
    about: dict[str, Any]  # for records: file, rows, skipped, sha256


@dataclass(frozen=True)
class Rows(Task):
    """Finite splits, one a file. Nothing is read before an example is asked for."""

    train: str | None = setting(None, "file of JSON lines to train on")
    valid: str | None = setting(None, "file to evaluate on, in training too (--eval-every)")
    test: str | None = setting(None, "file to evaluate on at the end; without both: no evaluation")
    opening: str = setting(
        "The answer is", "words put before an answer that does not begin with them; may be ''"
    )
    scoring: str = setting(
        "text", "what is compared: the answer's text, or its last number", choices=tuple(SCORINGS)
    )
    skip_bad: bool = setting(False, "pass over lines that are no rows, and count them")

    name: ClassVar = "rows"
    kept: ClassVar = ("opening", "scoring")
    recipes: ClassVar = USUAL

    def __post_init__(self) -> None:
        for split in FILES:  # a run can be resumed and evaluated from any folder
            if path := getattr(self, split):
                object.__setattr__(self, split, str(Path(path).absolute()))
        object.__setattr__(self, "opening", self.opening.strip())

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
        answer = example.answer
        if not answer.startswith(self.opening):
            answer = f"{self.opening} {answer}"
        if self.scoring == "number" and number_behind(self.opening, answer) is None:
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
        return len(self.file(split).examples)

    def example(self, split: str, index: int, seed: int) -> Example:
        return self.file(split).examples[index]

    def sources(self) -> dict[str, dict[str, Any]]:
        return {split: self.file(split).about for split in self.splits}

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
    if not path.exists():
        raise FileNotFoundError(
            f"{flag(split)} {path}: no such file ({path.parent} holds {listing(path.parent)}). Put "
            "it back, or name another."
        )
    if path.is_dir():
        raise ValueError(f"{flag(split)} {path} is a folder ({listing(path)}); name a file in it.")
    content = path.read_bytes()
    examples, bad = [], []
    for number, line in enumerate(LINE_ENDS.split(content), 1):
        place = f"{path.name}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                examples.append(replace(parse(text), name=place))
        except UnicodeDecodeError as error:
            bad.append(f"{place}: it is not UTF-8 text ({error.reason})")
        except (ValueError, RecursionError) as error:  # the latter: lists in lists in lists
            bad.append(f"{place}: {error}")
        if bad and not skip_bad:
            raise ValueError(
                f"{path.parent / bad[0]}. Mend the line, or pass over such lines with --skip-bad."
            )
    if not examples:
        first = f", the first: {bad[0]}" if bad else ""
        raise ValueError(
            f"{flag(split)} {path} holds no row ({len(bad)} bad lines{first}); a row is one line: "
            '{"question": "…", "steps": [{"at": 3, "text": "…"}], "answer": "…"}.'
        )
    about = {"file": str(path), "rows": len(examples), "skipped": len(bad)}
    about |= {"sha256": sha256(content).hexdigest()}
    return RowsFile(examples, about | ({"first_skipped": bad[0]} if bad else {}))


def parse_row(line: str) -> Example:
    """The row in a line of JSON. Raises ValueError saying what is wrong with it."""
    try:
        found = json.loads(line, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg} at character {error.colno})") from error
    row = {"steps": []} | typed(found, "an object", "the line")
    if wrong := sorted(set(row) ^ set(KEYS)):
        words = "is not known" if wrong[0] in row else "is missing"
        raise ValueError(f"the key {wrong[0]!r:.100} {words}; a row has {', '.join(KEYS)}")
    question, answer = (worded(row[key], repr(key)) for key in ("question", "answer"))
    steps = typed(row["steps"], "a list", "'steps'")
    if all(isinstance(step, dict) for step in steps) and MARKER not in question:
        placed = tuple(place(step, f"step {i}") for i, step in enumerate(steps, 1))
        late = [step for step in placed if step.position > len(question)]
        early = [b for a, b in zip(placed, placed[1:]) if b.position < a.position]
        if late:
            raise ValueError(
                f"step {late[0].text!r:.100} stands at character {late[0].position}, the question "
                f"has {len(question)}"
            )
        if early:
            raise ValueError(
                f"step {early[0].text!r:.100} stands at character {early[0].position}, before its "
                "predecessor; steps follow the order of the question"
            )
        return Example(question, placed, answer, size=len(placed))
    texts = [worded(step, f"step {i}") for i, step in enumerate(steps, 1)]
    question, placed = parse_marked(question, texts)
    return Example(worded(question, "'question'"), placed, answer, size=len(placed))


def place(step: dict[str, Any], what: str) -> Step:
    """A step of the form {"at", "text"}. Raises ValueError if it is none."""
    if set(step) != {"at", "text"}:
        raise ValueError(f"{what} has the keys {', '.join(step) or 'none'}; it must have at, text")
    at = typed(step["at"], "a whole number", f"'at' of {what}")
    if at < 0:
        raise ValueError(f"'at' of {what} is {at}; characters are counted from 0 on")
    return Step(at, worded(step["text"], f"'text' of {what}"))


def typed(value: Any, kind: str, what: str) -> Any:
    """`value`; raises ValueError if it is not of that kind."""
    if type(value) is not KINDS[kind]:
        raise ValueError(f"{what} is {json.dumps(value):.100}, not {kind}")
    return value


def worded(value: Any, what: str) -> str:
    """`value`; raises ValueError if it is no text, or one that says nothing or is damaged."""
    text = typed(value, "a text", what)
    if not text.strip():
        raise ValueError(f"{what} is empty")
    if wrong := re.search("[\0\ud800-\udfff]", text):
        raise ValueError(f"{what} holds {wrong[0]!r}, which is no character of a text")
    return text


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is there twice, among {', '.join(key for key, _ in pairs)!r:.100}")
    return found
