"""The columns of tables: each writes what it shows of a cell."""
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from minits.lab.records import Cell, Interval, Record

NOT_RUN, NONE = "not run", "–"
Column = Callable[[Cell], str]
Columns = dict[str, Column]


def table_of(cells: Iterable[Cell], heads: Columns, figures: Columns) -> str:
    """A line a cell. heads: columns of what is known without a run; figures: of what runs gave."""
    lines, figures = [], figures | MADE
    for cell in cells:
        known = [write(cell) for write in heads.values()]
        found = [write(cell) for write in figures.values()] if cell.runs else not_run(len(figures))
        lines.append(known + found)
    return markdown([*heads, *figures], lines)


def not_run(columns: int) -> list[str]:
    """The line of what was never run."""
    return [NOT_RUN, *[NONE] * (columns - 1)]


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with these columns."""
    rule = ["---"] * len(columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, rule, *lines])


def apart(cells: Iterable[Cell]) -> Iterator[Cell]:
    """A cell for each run; the cell itself where there is none."""
    for cell in cells:
        yield from [replace(cell, runs=[run]) for run in cell.runs] or [cell]


def title(cell: Cell) -> str:
    """The preset's title and name."""
    name = f"(`{cell.name}`)" if cell.name else ""
    return f"{cell.preset.title} {name}".strip()


def in_paper(cell: Cell) -> str:
    """The paper's figure."""
    return NONE if cell.preset.paper is None else f"{cell.preset.paper:.2f}"


def distinct(write: Callable[[Record], str]) -> Column:
    """What the runs of a cell give, each thing once."""
    return lambda cell: ", ".join(dict.fromkeys(map(write, cell.runs)))


def mean_of(split: str, *keys: str) -> Column:
    """A share of an evaluation in percent, the mean over runs; of several keys with / between."""

    def write(cell: Cell) -> str:
        found = [run[split] | run[split].get("counts", {}) for run in cell.runs]
        values = [[each.get(key) for each in found] for key in keys]
        return " / ".join(NONE if None in each else f"{100 * fmean(each):.1f}" for each in values)

    return write


def trained_from(run: Record) -> str:
    """The machine, and the weights that the training began with."""
    base = run["settings"]["model"]
    return run["machine"] + ("" if base == "tiny" else f", {base}")


MADE: Columns = {  # the last columns of every table: what it takes to trust a figure
    "seed": distinct(lambda run: str(run["seed"])),
    "training": distinct(lambda run: f"{run['steps']} steps, {run['train_seconds']:.0f} s"),
    "machine": distinct(trained_from),
    "revision": distinct(lambda run: run["revision"]),
}


def accuracy_of(evaluation: Record) -> str:
    """Accuracy and its 95 % interval, in percent."""
    return interval((evaluation["accuracy"], *evaluation["interval"]))


def times_over(speed: float | None) -> str:
    """A speed-up."""
    return NONE if speed is None else f"{speed:.2f}×"


def interval(found: Interval | None, sign: str = "") -> str:
    """In percent, or in points where there is a sign."""
    if found is None:
        return NONE
    mean, low, high = (100 * each for each in found)
    return f"{mean:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def way_of_reading(line: Record) -> str:
    """How a thinking model read prompts in a measurement."""
    if line["prefill"] != "speculative":
        return line["prefill"]
    ahead = line.get("lookahead") or line.get("window")  # its name in older records
    return line["draft"] + (f", lookahead {ahead}" if ahead else "")
