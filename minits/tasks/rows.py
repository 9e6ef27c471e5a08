"""Rows of one's own, from files of JSON lines: a question, its steps, its answer.

    {"question": "Tom has 3 pens. He buys 2.", "steps": [{"at": 26, "text": "5"}], "answer": "5"}
    {"question": "Tom has 3 pens. He buys 2.<T>", "steps": ["5"], "answer": "5"}

Both say that "5" can be inferred from the first 26 characters on. `at` counts characters of the
question; markers are taken out of it, and each is the place of one step, in their order.
"""
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from minits.checkpoint.download import dataset_file
from minits.checkpoint.files import Json, around, parted
from minits.settings import flag, setting
from minits.supervision import MARKER, Example, Step, parse_marked
from minits.tasks.answers import COMPARED, SCORINGS, number_behind
from minits.tasks.task import USUAL, Task

FILES = ("train", "valid", "test")
HUB = "hf://datasets/"  # what names of files there begin with
ROW = {"question": str, "steps": list, "answer": str}
STEP = {"at": int, "text": str}
WORDS = {str: "a text", list: "a list", int: "a whole number"}


class SplitRows(NamedTuple):
    """What the files of a split hold."""

    examples: list[Any]
    about: Json  # for records: file, rows, skipped, sha256, without_steps (where there are such)


@dataclass(frozen=True)
class Rows(Task):
    """Finite splits, each of a file or more. Nothing is read before an example is asked for."""

    train: str | None = setting(
        None,
        "file to train on, perhaps .gz, or hf://datasets/OWNER/NAME/FILE; of the three flags each "
        "takes several with commas between. A line is, for rows: JSON of question, steps, answer, "
        "each step a text whose place a <T> in the question marks, or with its place: "
        '{"at": 26, "text": "5"}; gsm: one of GSM8K, question||<<1+2=3>> #### 3 (iCoT), or JSON of '
        "question, answer, cot or steps; two-hop: JSON of question, e1, r1, r2, bridge, answer, "
        "two steps",
    )
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
    scoring: str = setting("text", COMPARED, choices=tuple(SCORINGS))
    suffix: str = setting(
        "",
        "text after every question, a part of the prompt: with some tokens between, the last "
        "thoughts are read before the answer begins. infer adds it, too",
        empty=True,
    )
    skip_bad: bool = setting(False, "pass over lines that are no rows, and count them")

    name: ClassVar = "rows"
    kept: ClassVar = ("opening", "scoring", "suffix")
    paths: ClassVar = FILES
    recipes: ClassVar = USUAL | {
        ("*", "tiny"): USUAL["*", "tiny"] | {"chunk_size": 4, "steps": 300},
    }

    def __post_init__(self) -> None:
        for name in self.paths:  # a run can be resumed and evaluated from any folder
            if names := getattr(self, name):
                object.__setattr__(self, name, ",".join(files_in(name, names)))

    @property
    def splits(self) -> tuple[str, ...]:
        return "train", *filter(self.has, FILES[1:])

    def has(self, split: str) -> bool:
        return bool(getattr(self, split))

    @cached_property
    def splits_read(self) -> dict[str, SplitRows]:
        """The splits that were read so far."""
        return {}

    def loaded(self, split: str) -> SplitRows:
        """The rows of a split, read once. Raises as `read_split`."""
        if split not in self.splits_read:
            self.splits_read[split] = self.read_split(split)
        return self.splits_read[split]

    def read_split(self, split: str) -> SplitRows:
        """The rows of a split, read now. Raises ValueError, naming the line, or OSError.

        Rows without steps are counted: some methods need none, but a text may lack its << >>.
        """
        names = getattr(self, split)
        if not names:
            raise ValueError(f"{self.name} has no {flag(split)} FILE: name one.")
        read = [
            read_rows(split, name, self.parse, self.skip_bad) for name in files_in(split, names)
        ]
        rows, about = read[0] if len(read) == 1 else joined(names, read)
        bare = sum(not row.steps for row in rows)
        return SplitRows(rows, about | ({"without_steps": bare} if bare else {}))

    def parse(self, line: str) -> Any:
        """The example in a line of a file, or what `example` makes one of.

        Raises ValueError saying what is wrong with it.
        """
        return self.with_words(parse_row(line))

    def with_words(self, example: Example) -> Example:
        """`example` with suffix and opening. Raises ValueError if the answer has to be a number."""
        answer, opening = example.answer, self.opening.strip()
        if not answer.startswith(opening):
            answer = f"{opening} {answer}"
        if self.scoring == "number" and number_behind(opening, answer) is None:
            raise ValueError(f"--scoring number: the answer {answer!r:.100} has no number")
        return replace(example, prompt=self.asked(example.prompt), answer=answer)

    def asked(self, question: str) -> str:
        return f"{question} {self.suffix}" if self.suffix else question

    def demo(self) -> Example:
        try:
            return super().demo()
        except (ValueError, OSError) as error:
            raise ValueError(f"there is no row to show: {error} Or give a PROMPT.") from error

    def steps_and_answer(self, text: str, thoughts: Sequence[str] | None) -> tuple[str, str]:
        """(steps that were thought, or written before any answer; the last answer) of `text`."""
        opening = self.opening.strip()
        *before, answer = text.split(opening) if opening else [text]
        return "".join(before[:1]) if thoughts is None else " ".join(thoughts), answer

    def size(self, split: str) -> int:
        return len(self.loaded(split).examples) if self.has(split) else 0

    def example(self, split: str, index: int, seed: int | str) -> Example:
        return self.loaded(split).examples[index]

    def sources(self) -> dict[str, Json]:
        return {split: self.loaded(split).about for split in filter(self.has, FILES)}

    def texts(self) -> Iterator[str]:
        for index in range(self.size("train")):
            example = self.example("train", index, 0)
            yield example.prompt
            yield from (" " + step.text for step in example.steps)
            yield " " + example.answer

    def evaluated(self, given: Json) -> tuple[Task, str]:
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
                f"the run has no file of the task {self.name} to evaluate on. Name one with --test "
                "FILE; with --train FILE, what it was trained on."
            )
        # A file of the hub is there, too, though it may have to be fetched.
        there = chosen.train and all(
            name.startswith(HUB) or Path(name).exists() for name in files_in("train", chosen.train)
        )
        kept = {split, "train"} if there else {split}
        return replace(chosen, **dict.fromkeys(set(FILES) - kept)), split


def files_in(option: str, names: str) -> list[str]:
    """The files that an option names, as `parted`; paths made absolute."""
    each = parted(flag(option), names, "file")
    return [name if name.startswith(HUB) else str(Path(name).absolute()) for name in each]


def content_of(option: str, name: str) -> bytes:
    """What a file holds, unpacked. Raises ValueError or FileNotFoundError."""
    path = dataset_file(name.removeprefix(HUB)) if name.startswith(HUB) else Path(name)
    if not path.is_file():
        raise FileNotFoundError(
            f"{flag(option)} {path} is no file ({around(path)}). Put it back, or name another."
        )
    content = path.read_bytes()
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file: {error}. Fetch it anew.") from error


def joined(names: str, read: list[SplitRows]) -> SplitRows:
    """Several files as one."""
    abouts = [about for _, about in read]
    found = {name: sum(about[name] for about in abouts) for name in ("rows", "skipped")}
    skipped = [about for about in abouts if about["skipped"]]
    found |= {"first_skipped": skipped[0]["first_skipped"]} if skipped else {}
    digest = sha256("".join(about["sha256"] for about in abouts).encode()).hexdigest()
    examples = [example for rows, _ in read for example in rows]
    return SplitRows(examples, {"file": names} | found | {"sha256": digest})


def question_first(example: Example, suffix: str) -> Example:
    """`example` with the last sentence of its question copied before it, and without gold steps.

    A probe of what a model misses that reads the story before it knows what is asked.
    """
    question = example.prompt.removesuffix(suffix).rstrip()
    last = re.split(r"(?<=[.!?])\s+", question)[-1]
    return replace(example, prompt=f"{last} {example.prompt}", steps=(), values=())


def read_rows(option: str, name: str, parse: Callable[[str], Any], skip_bad: bool) -> SplitRows:
    """The rows of a file. Raises ValueError naming file and line, or FileNotFoundError."""
    content, examples, bad = content_of(option, name), [], []
    # Split as bytes, for in a text U+2028 would end a line, too.
    for number, line in enumerate(content.splitlines(), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                examples.append(replace(parse(text), name=f"{Path(name).name}, line {number}"))
        except (ValueError, RecursionError) as error:  # the latter: lists in lists in lists
            bad.append(f"line {number}: {str(error).rstrip('.')}")
            if not skip_bad:
                raise ValueError(
                    f"{name}, {bad[0]}. Mend the line, or pass over such lines with --skip-bad."
                ) from error
    if not examples:
        first = f", the first: {bad[0]}" if bad else ""
        raise ValueError(
            f"{flag(option)} {name} holds no row ({len(bad)} bad lines{first}); a row is one line. "
            "Fill it, or name another file."
        )
    about = {"file": name, "rows": len(examples), "skipped": len(bad)}
    about |= {"first_skipped": bad[0]} if bad else {}
    return SplitRows(examples, about | {"sha256": sha256(content).hexdigest()})


def parse_row(line: str) -> Example:
    """The row in a line of JSON. Raises ValueError saying what is wrong with it."""
    question, steps, answer = members(parse_json(line), ROW, "the row", absent={"steps": []})
    if MARKER in question or any(isinstance(step, str) for step in steps):
        question, placed = parse_marked(question, steps)
    else:
        named = ((f"step {i}", step) for i, step in enumerate(steps, 1))
        placed = tuple(Step(*members(step, STEP, what)) for what, step in named)
        places = [0, *(step.position for step in placed), len(question)]
        if places != sorted(places):
            raise ValueError(
                f"the steps stand at the characters {places[1:-1]}; they must follow the order of "
                f"the question, which has {len(question)}"
            )
    check_texts((question, answer, *(step.text for step in placed)))
    return Example(question, placed, answer, size=len(placed))


def parse_json(line: str) -> Any:
    """What a line of JSON holds. Raises ValueError saying what is wrong with it."""
    try:
        return json.loads(line, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        # Some of Python's words for it end in "at", too.
        what = error.msg.removesuffix(" at")
        raise ValueError(
            f"no JSON: {what} at character {error.colno} (a row is one line)"
        ) from error


def check_texts(texts: Iterable[Any]) -> None:
    """Raises ValueError for what is no text of a row."""
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"beside markers each step is a text, not {json.dumps(text):.100}")
        if not text.strip():
            raise ValueError("question, answer or a step is empty")
        if wrong := re.search("[\0\ud800-\udfff]", text):
            raise ValueError(f"{wrong[0]!r} is no character of a text")


def check_unmarked(question: str) -> None:
    """Raises ValueError for a marker where nothing would take it out of the question."""
    if MARKER in question:
        raise ValueError(
            f"the question {question!r:.100} holds {MARKER}, which marks steps for the task rows, "
            "and for gsm with --align given"
        )


def row_line(question: str, steps: Sequence[Step], answer: str) -> str:
    """The line that `parse_row` reads so. Raises as `check_unmarked`."""
    check_unmarked(question)
    placed = [{"at": step.position, "text": step.text} for step in steps]
    row = {"question": question, "steps": placed, "answer": answer}
    return json.dumps(row, ensure_ascii=False) + "\n"


def members(
    value: Any,
    kinds: dict[str, type],
    what: str,
    *,
    absent: Json | None = None,  # the values of those keys that may be missing
    others: bool = False,  # whether there may be more keys
) -> list[Any]:
    """The values of a JSON object that has these keys. Raises ValueError for any other thing."""
    absent = absent or {}
    known = isinstance(value, dict) and (others or value.keys() <= kinds.keys())
    if not known or not kinds.keys() <= absent.keys() | value.keys():
        found = ", ".join(value) or "none" if isinstance(value, dict) else json.dumps(value)
        needed = ", ".join(key for key in kinds if key not in absent)
        perhaps = f", perhaps {', '.join(absent)}" if absent else ""
        alone = "" if others else ", and nothing else"
        raise ValueError(
            f"{what} holds {found:.200}; it must be an object that holds {needed}{perhaps}{alone}"
        )
    value = absent | value
    for key, kind in kinds.items():
        if type(value[key]) is not kind:
            found = json.dumps(value[key])
            raise ValueError(f"{key!r} of {what} is {found:.100}, not {WORDS[kind]}")
    return [value[key] for key in kinds]


def without_repeats(pairs: list[tuple[str, Any]]) -> Json:
    """A JSON object. Raises ValueError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is there twice: {', '.join(key for key, _ in pairs):.100}")
    return found
