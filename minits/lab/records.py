"""Records of real runs, and the cells of tables that they fill.

A cell is a preset. A training belongs to the preset it names; one that names none belongs to the
cell of Table 2 that trains the same method on the same task in the same way.
"""
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from minits.checkpoint.files import Json, require
from minits.lab.paired import difference
from minits.lab.presets import PRESETS, WIDTHS, Preset
from minits.lab.provenance import Record

RECORDS = Path(__file__).parent / "records"
FILES = ("train", "bench", "eval")  # one for each field of a book
# Settings that make a training one of a cell of Table 2, whose presets' names begin so.
IDENTITY = (
    "task method knowledge fact_thoughts steps_shown step_after suffix resample chunk_size "
    "one_per_chunk removal latents"
).split()
TABLE2 = ("gsm/", "two-hop/")
Label = tuple[Any, ...]
Interval = tuple[float, float, float]  # mean, low, high


def read_records(path: Path) -> list[Record]:
    """The records of a file, oldest first. Raises ValueError naming a line that is no JSON.

    What a record lacks is told by `made_of`, where it is wanted.
    """
    records = []
    lines = require(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not a record ({error}); every line is one JSON object. "
                "Mend that line, or take it out."
            ) from error
    return records


def weights_of(record: Record) -> str:
    """The size of the model, else its name."""
    for size, width in WIDTHS.items():
        if record.get("hidden_size") == width:
            return size
    name = record["settings"]["model"]
    found = re.search(r"\d\.\db", name.lower())  # older records hold the name alone
    return found[0].upper() if found else name


def preset_of(record: Record) -> str | None:
    """The preset that a record names."""
    return record.get("preset") or record.get("settings", {}).get("preset")


def belongs(record: Record, name: str) -> bool:
    """Whether a record of a training, or of its weights, is one of this preset's cell."""
    settings, preset, named = record.get("settings", {}), PRESETS[name], preset_of(record)
    if not settings or named:
        return named == name
    if not name.startswith(TABLE2) or weights_of(record) != preset.size:
        return False
    # No value is as good as one that does nothing: False, or an empty text.
    return all(
        (settings.get(key) or None) == (preset.settings.get(key) or None) for key in IDENTITY
    )


def label_of(method: str, options: Json) -> Label:
    """What sets the answers of one method apart from those of another."""
    return method, options.get("latents"), options.get("removal")


COT, THINKING = label_of("cot", {}), label_of("thinking", {})
# Of the ways in which a thinking model reads prompts, the default.
USUAL = {"prefill": "speculative", "draft": "trivial", "lookahead": None}


def times(bench: Record) -> dict[Label, float]:
    """Milliseconds an answer on the fast path, by what answers: Thinking States as is usual.

    Of several runs of one method their mean, but of those that think the measured one alone.
    """
    found: dict[Label, list[float]] = {}
    for line in bench.get("lines", ()):
        usual = all(line.get(key, value) == value for key, value in USUAL.items())
        if line["what"] == "answers, one at a time" and bench.get("path") != "plain" and usual:
            label = label_of(line["method"], line.get("options", {}))
            found.setdefault(label, []).append(line["ms"])
    # The measured run comes last.
    return {label: ms[-1] if label == THINKING else fmean(ms) for label, ms in found.items()}


@dataclass(frozen=True)
class Cell:
    """A preset and what records there are of it."""

    name: str
    preset: Preset
    runs: list[Record]  # trainings that were evaluated on test
    benches: Sequence[Record] = ()  # answers in turn with a thinking run

    @property
    def label(self) -> Label:
        return label_of(self.preset.settings["method"], self.preset.settings)

    def rights(self) -> list[str]:
        """Of each seed, which test rows were right; none where a record does not hold it."""
        found = [run["test"].get("right") for run in self.runs]
        return found if all(found) else []

    def clusters(self) -> list[int] | None:
        return self.runs[0]["test"].get("clusters")

    def accuracy(self) -> Interval:
        """Mean over seeds; its interval is a bootstrap over rows or clusters, else Wilson's."""
        rights = self.rights()
        if alike(rights) and (len(rights) > 1 or self.clusters()):
            return difference(rights, ["0" * len(rights[0])], self.clusters())
        tests = [run["test"] for run in self.runs]
        lows, highs = zip(*(test["interval"] for test in tests))
        return fmean(test["accuracy"] for test in tests), min(lows), max(highs)

    def less(self, other: "Cell") -> Interval | None:
        """Its accuracy less another's on the same rows; None: not known."""
        ours, theirs = self.rights(), other.rights()
        if not (ours and theirs and alike(ours + theirs)):
            return None
        return difference(ours, theirs, self.clusters())

    def right_alone(self, other: "Cell") -> float:
        """Share of the rows right here that another has wrong, over pairs of seeds."""
        found = [
            theirs == "0"
            for pair in zip(self.rights(), other.rights())
            for ours, theirs in zip(*pair)
            if ours == "1"
        ]
        return fmean(found) if found else 0.0

    def ms(self) -> float | None:
        """Milliseconds an answer."""
        found = [each[self.label] for each in map(times, self.benches) if self.label in each]
        return fmean(found) if found else None

    def speed_up(self) -> float | None:
        """CoT's time over its own, both beside the same thinking run; None: not measured."""
        found = [
            taken[COT] / taken[self.label]
            for taken in beside_one_run(self.benches)
            if {COT, self.label} <= taken.keys()
        ]
        return fmean(found) if found else None


def beside_one_run(benches: Sequence[Record]) -> Iterator[dict[Label, float]]:
    """For each thinking run, times by what answered beside it, in times of its own."""
    runs: dict[str, list[dict[Label, float]]] = {}
    for bench in benches:
        runs.setdefault(json.dumps(bench["settings"]), []).append(times(bench))
    for taken in runs.values():
        yield {
            label: fmean(each[label] / each[THINKING] for each in taken if label in each)
            for label in set().union(*taken)
        }


def alike(rights: Sequence[str]) -> bool:
    """Whether evaluations have the same number of rows."""
    return len(set(map(len, rights))) == 1


class Book(NamedTuple):
    """All records."""

    runs: Sequence[Record]  # trainings
    benches: Sequence[Record] = ()  # measurements of speed
    probes: Sequence[Record] = ()  # evaluations of trained runs, with something changed

    def cell(self, name: str) -> Cell:
        """What there is of a preset."""
        preset = PRESETS[name]
        runs, beside = self.trained(name), preset.beside or name
        if beside == name:  # a thinking run is timed with the weights of its accuracy
            own = [run["settings"] for run in runs]
            benches = [each for each in self.benches if each.get("settings") in own]
        else:
            benches = [each for each in self.benches if belongs(each, beside)]
        return Cell(name, preset, runs, benches)

    def trained(self, name: str) -> list[Record]:
        """A run for each seed, in their order: the best on valid, and of equals the last."""
        runs = [run for run in self.runs if "test" in run and belongs(run, name)]
        runs.sort(key=lambda run: run.get("accuracy_valid", 0.0))
        best = {run["seed"]: run for run in runs}
        return [best[seed] for seed in sorted(best)]

    def cells(self, beginning: str, *endings: str) -> list[Cell]:
        """Those of all presets whose names begin so; given endings, of the names put together."""
        names = [f"{beginning}{ending}" for ending in endings]
        names = names or [name for name in PRESETS if name.startswith(beginning)]
        return [self.cell(name) for name in names if name in PRESETS]

    def measured(self, key: str) -> list[tuple[Record, list[Record]]]:
        """Each measurement that has lines with a `key`, and those lines."""
        found = (
            (record, [line for line in record.get("lines", ()) if key in line])
            for record in self.benches
        )
        return [(record, lines) for record, lines in found if lines]


def read_book() -> Book:
    """The records that ship. Raises as `read_records`."""
    return Book(*(read_records(RECORDS / f"{name}.jsonl") for name in FILES))


# What is raised where a value is of another kind than expected.
BROKEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def made_of(book: Book, make: Callable[[Book], Any]) -> Any:
    """What `make` makes of all records.

    Raises ValueError where it cannot, naming the first line that alone is enough for that.
    """
    with suppress(*BROKEN):
        return make(book)
    alone = [
        (f"{RECORDS / name}.jsonl, line {number}", Book([])._replace(**{field: [record]}))
        for name, field in zip(FILES, Book._fields)
        for number, record in enumerate(getattr(book, field), 1)
    ]
    for place, part in [*alone, (f"{RECORDS}: lines that do not go together", book)]:
        try:
            make(part)
        except BROKEN as error:
            raise ValueError(
                f"{place}: a value cannot be shown ({error!r}). Mend it, or take the line out."
            ) from error
