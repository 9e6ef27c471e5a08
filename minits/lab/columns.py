"""How the cells of a table are told: its columns, each a function of a cell."""
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from minits.lab.records import Cell, Record

NOT_RUN, NONE = "not run", "–"
Column = Callable[[Cell], str]
Columns = dict[str, Column]


def draw(cells: Sequence[Cell], heads: Columns, figures: Columns) -> str:
    """A line a cell. heads: columns of what is known without a run; figures: of what runs tell."""
    nothing = [NOT_RUN, *[NONE] * (len(figures) - 1)]
    lines = [
        [column(cell) for column in heads.values()]
        + ([column(cell) for column in figures.values()] if cell.runs else nothing)
        for cell in cells
    ]
    return markdown([*heads, *figures], lines)


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with these columns."""
    rule = ["---"] * len(columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, rule, *lines])


def apart(cell: Cell) -> list[Cell]:
    """A cell for each run; the cell itself where there is none."""
    return [replace(cell, runs=[run]) for run in cell.runs] or [cell]


def title(cell: Cell) -> str:
    """The preset's title and name."""
    return f"{cell.preset.title} (`{cell.name}`)" if cell.name else cell.preset.title


def in_paper(cell: Cell) -> str:
    """The paper's figure."""
    return NONE if cell.preset.paper is None else f"{cell.preset.paper:.2f}"


def distinct(tell: Callable[[Record], str]) -> Column:
    """What the runs of a cell say, each thing once."""
    return lambda cell: ", ".join(dict.fromkeys(map(tell, cell.runs)))


def mean_of(split: str, *keys: str) -> Column:
    """A share of an evaluation in percent, the mean over runs; of several keys with / between."""

    def tell(cell: Cell) -> str:
        found = [run[split] | run[split].get("counts", {}) for run in cell.runs]
        values = [[each.get(key) for each in found] for key in keys]
        return " / ".join(NONE if None in each else f"{100 * fmean(each):.1f}" for each in values)

    return tell


def trained_from(run: Record) -> str:
    """The machine, and the weights that the training began with."""
    base = run["settings"]["model"]
    return run["machine"] + ("" if base == "tiny" else f", {base}")


MADE: Columns = {  # the end of every line: what a figure takes to be trusted
    "seed": distinct(lambda run: str(run["seed"])),
    "training": distinct(lambda run: f"{run['steps']} steps, {run['train_seconds']:.0f} s"),
    "machine": distinct(trained_from),
    "revision": distinct(lambda run: run["revision"]),
}


def share(evaluation: Record) -> str:
    """Accuracy and its 95 % interval, in percent."""
    low, high = evaluation["interval"]
    return f"{100 * evaluation['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def times_over(speed: float | None) -> str:
    """A speed-up."""
    return NONE if speed is None else f"{speed:.2f}×"


def interval(found: tuple[float, float, float] | None, sign: str = "") -> str:
    """(mean, low, high) in percent, or in points where there is a sign."""
    if found is None:
        return NONE
    mean, low, high = (100 * each for each in found)
    return f"{mean:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"
