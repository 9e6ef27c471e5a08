"""Table 1: state tracking, every run of a preset."""
from collections.abc import Iterator, Sequence

from minits.lab.columns import (
    NONE,
    NOT_RUN,
    Columns,
    accuracy_of,
    apart,
    distinct,
    in_paper,
    markdown,
    mean_of,
    table_of,
    title,
)
from minits.lab.presets import PRESETS, TABLES, Preset
from minits.lab.records import Cell, Record


def state_tracking(records: Sequence[Record]) -> str:
    """A line for each run of a preset of Table 1, and for each that was never run."""
    heads: Columns = {"run": title, "paper": in_paper}
    figures: Columns = {
        "longer [N, 100], %": distinct(lambda run: accuracy_of(run["ood"])),
        "in distribution, %": distinct(lambda run: accuracy_of(run["id"])),
        "thoughts right (longer), %": mean_of("ood", "thought_accuracy"),
        "n": distinct(lambda run: str(run["ood"]["n"])),
    }
    parts = []
    for heading, beginnings in TABLES.items():
        cells = apart(cells_of(beginnings, records))
        parts += [f"**{heading}**", table_of(cells, heads, figures)]
    return "\n\n".join(parts)


def cells_of(beginnings: tuple[str, ...], records: Sequence[Record]) -> Iterator[Cell]:
    """The cells of presets whose names begin so.

    A preset that was removed is made from its runs, which may carry its title.
    """
    named = [run for run in records if run.get("preset")]
    presets = PRESETS | {
        run["preset"]: Preset(run.get("title", ""), run["settings"])
        for run in named
        if run["preset"] not in PRESETS
    }
    for name, preset in presets.items():
        if name.startswith(beginnings):
            yield Cell(name, preset, [run for run in named if run["preset"] == name])


def overview(records: Sequence[Record]) -> str:
    """Real weights, percent right on longer inputs: a line a task and method, a column an N."""
    found: dict[str, dict[int, str]] = {}
    models: set[str] = set()
    for cell in cells_of(("table1/", "beyond/"), records):
        settings, method = cell.preset.settings, cell.preset.title.split(", N =")[0]
        line = found.setdefault(f"{settings['task'].capitalize()}: {method}", {})
        line[settings["max_ops"]] = seeds(cell)
        models |= {run["settings"]["model"] for run in cell.runs}
    columns = sorted({N for line in found.values() for N in line})
    words = "longer [N, 100], % (paper); † below 99 % in distribution"
    heads = [", ".join([words, *sorted(models)]), *(f"N = {N}" for N in columns)]
    lines = [[name, *(line.get(N, NONE) for N in columns)] for name, line in found.items()]
    return markdown(heads, lines)


def seeds(cell: Cell) -> str:
    """The runs of a cell in a few characters, and the paper's figure."""
    accuracies = [
        f"{100 * run['ood']['accuracy']:.1f}" + ("" if run["id"]["accuracy"] >= 0.99 else "†")
        for run in cell.runs
    ]
    beside = "" if cell.preset.paper is None else f" ({in_paper(cell)})"
    return (", ".join(accuracies) or NOT_RUN) + beside
