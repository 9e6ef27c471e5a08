"""Figures as PNG files, where matplotlib is installed."""
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from minits.lab.bench_answers import WAYS
from minits.lab.columns import way_of_reading
from minits.lab.paper import STATE_TRACKING
from minits.lab.presets import CHUNKS, LAYERS, WIDTHS
from minits.lab.records import BROKEN, RECORDS, Book, Cell, Record
from minits.methods import METHODS


def pyplot() -> Any:
    """matplotlib's drawing functions, without a screen. Raises ValueError where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"a figure needs matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw_all(book: Book, folder: Path) -> dict[str, bool]:
    """Draws every figure that has records into an existing folder; by name, whether it was drawn.

    Raises ValueError where matplotlib is missing, or for a value that cannot be drawn.
    """
    try:
        return {name: draw(book, folder / f"{name}.png") for name, draw in FIGURES.items()}
    except BROKEN as error:
        raise ValueError(f"{RECORDS}: a value cannot be drawn ({error!r}). Mend it.") from error


@contextmanager
def drawing(path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7, 4.5)):
    """Panels [rows, columns] to draw on, or the only one; what was drawn is saved at the end."""
    plt = pyplot()
    figure, panels = plt.subplots(
        rows, columns, figsize=size, layout="constrained", sharey="row"
    )
    yield panels
    figure.savefig(path, format="png", dpi=150)
    plt.close(figure)


MARKERS = "osD^vPX*"


def lengths(book: Book, path: Path) -> bool:
    """Table 1 by the length of an example: a panel for each task and N, a line for each method."""
    if not any(run.get("preset", "").startswith("table1/") for run in book.runs):
        return False
    lengths_of = {task: Ns for (task, _), Ns in STATE_TRACKING.items()}
    with drawing(path, len(lengths_of), 3, (11, 6)) as panels:
        for row, (task, Ns) in zip(panels, lengths_of.items()):
            for panel, N in zip(row, Ns):
                for marker, method in zip(MARKERS, ("thinking", "cot", "no-cot")):
                    name = f"table1/{task}-{N}-{method}"
                    runs = [run["ood"]["buckets"] for run in book.runs if run.get("preset") == name]
                    if points := by_length(runs, N):
                        panel.plot(*zip(*points), marker=marker, label=METHODS[method].title)
                panel.axvspan(0, N, color="0.93")
                panel.set(title=f"{task.capitalize()}, trained on 1 … {N}", xlim=(0, 100))
                panel.set(ylim=(-3, 103), xlabel="length of the example")
            row[0].set_ylabel("answers right, %")
        panels[0, 0].legend(fontsize="small")
    return True


def by_length(runs: Sequence[Record], least: int) -> list[tuple[float, float]]:
    """(middle of a bucket, percent right) over the examples of all runs, where there are 20.

    runs: of each, the buckets of its evaluation. least: the length of the shortest example.
    """
    right, count = Counter(), Counter()
    for buckets in runs:
        for name, bucket in buckets.items():
            right[name] += bucket["n"] * bucket["accuracy"]
            count[name] += bucket["n"]
    points = []
    for name, n in count.items():
        low, high = map(int, name.split("-"))
        if n >= 20:
            points.append(((max(low, least) + high) / 2, 100 * right[name] / n))
    return sorted(points)


SERIES = {  # of an ablation: the beginning and the end of its presets' names
    "word problems": ("ablation/gsm-", ""),
    "word problems, one step a chunk": ("ablation/gsm-", "-one"),
    "2-hop questions, full knowledge": ("ablation/two-hop-", ""),
}


def ablation(
    book: Book, path: Path, names: dict[int, str], label: str, of_chunks: bool = False
) -> bool:
    """Test rows right against a setting, the speed-up over CoT written above.

    names: of each value of the setting, the middle of its presets' names. of_chunks: it is the
    chunk size, the one ablation that was made with one step a chunk, too.
    """
    found: dict[str, dict[int, Cell]] = {}
    for title, (beginning, end) in SERIES.items():
        if end and not of_chunks:
            continue
        for value, name in names.items():
            for cell in book.cells(f"{beginning}{name}", end):
                if cell.runs:
                    found.setdefault(title, {})[value] = cell
    if not found:
        return False
    with drawing(path) as panel:
        for number, (title, cells) in enumerate(found.items()):
            # Each line a little beside those before, or their intervals would hide each other.
            places = [value * 1.02**number for value in cells]
            intervals(panel, places, list(cells.values()), marker=MARKERS[number], label=title)
            for place, cell in zip(places, cells.values()):
                if speed_up := cell.speed_up():
                    panel.annotate(
                        f"{speed_up:.2f}×",
                        (place, 100 * cell.accuracy()[2]),  # above the interval
                        textcoords="offset points",
                        xytext=(0, 4),
                        ha="center",
                        fontsize="small",
                    )
        ticks = list(max(found.values(), key=len))
        if of_chunks:
            panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, list(map(str, ticks)))
        panel.set(xlabel=label, ylabel="test rows right, 0.5B, % (above: times CoT's speed)")
        panel.legend(fontsize="small")
        panel.margins(x=0.1)
        panel.set_ylim(0, 1.08 * panel.get_ylim()[1])  # room for what stands above the highest
    return True


def intervals(panel: Any, places: Sequence[float], cells: Sequence[Cell], **how: Any) -> None:
    """Accuracies of cells in percent, with their intervals."""
    mean, low, high = 100 * np.array([cell.accuracy() for cell in cells]).T
    panel.errorbar(places, mean, [mean - low, high - mean], capsize=3, **how)


def rounds(book: Book, path: Path) -> bool:
    """Rounds of reading a prompt, a bar for each way of reading: means over measurements of a task.

    Those of `trivial` are the non-trivial thoughts and one.
    """
    found: dict[str, dict[str, list[float]]] = {}  # of each task's prompts, by way of reading
    for record, lines in book.measured("draft"):
        settings = record.get("settings", {"task": "parity"})  # the oldest records have none
        prompts = " ".join(filter(None, (settings["task"], settings.get("knowledge"))))
        for line in lines:
            of_way = found.setdefault(prompts, {}).setdefault(way_of_reading(line), [])
            of_way.append(line["rounds"])
    if not found:
        return False
    width = 1 / (len(WAYS) + 1)  # a gap of one bar
    with drawing(path) as panel:
        for number, way in enumerate(map(way_of_reading, WAYS)):
            places = np.arange(len(found)) + number * width
            means = [fmean(ways.get(way, [0])) for ways in found.values()]
            panel.bar(places, means, width, label=way)
        panel.set_xticks(np.arange(len(found)) + (len(WAYS) - 1) * width / 2, list(found))
        panel.set_ylabel("rounds a prompt")
        panel.legend(fontsize="small")
    return True


def speed(book: Book, path: Path) -> bool:
    """Word problems: rows right against milliseconds an answer, all methods."""
    beginnings = [f"gsm/{size.lower()}-" for size in WIDTHS]
    cells = [cell for each in beginnings for cell in book.cells(each) if cell.runs and cell.ms()]
    if not cells:
        return False
    with drawing(path) as panel:
        for number, cell in enumerate(cells):
            marker = MARKERS[list(METHODS).index(cell.preset.settings["method"])]
            colour, title = f"C{number}", cell.preset.title
            intervals(panel, [cell.ms()], [cell], fmt=marker, color=colour, label=title)
        panel.set(xlabel="milliseconds an answer, one at a time", ylabel="test rows right, %")
        panel.set(xlim=(0, None), ylim=(0, None))
        panel.legend(fontsize="small")
    return True


def cost(lines: Sequence[Record], path: Path) -> None:
    """Time of forward and backward pass against recurrent steps, by the lines of `bench cost`.

    Dashed: in CUDA graphs. What has no steps is drawn as a level line.
    """
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for line in lines:
        if "both" in line:
            name = line["side"], line["path"]
            series.setdefault(name, []).append((line["steps"] or 1, line["both"]["ms"]))
    most = max(steps for points in series.values() for steps, _ in points)
    sides = list(dict.fromkeys(side for side, _ in series))
    with drawing(path) as panel:
        for (side, way), points in series.items():
            if len(points) == 1:
                points.append((most, points[0][1]))
            style, colour = "--" if way == "graphs" else "-", f"C{sides.index(side)}"
            panel.plot(*zip(*points), style, marker=".", color=colour, label=f"{side}, {way}")
        panel.set(yscale="log", xlabel="recurrent steps", ylabel="forward and backward pass, ms")
        panel.set_title("128 tokens, one row")
        panel.figure.legend(fontsize="small", loc="outside right upper")


def training_cost(book: Book, path: Path) -> bool:
    """`cost` of the newest record that has such lines."""
    measured = book.measured("both")
    if measured:
        cost(measured[-1][1], path)
    return bool(measured)


FIGURES: dict[str, Callable[[Book, Path], bool]] = {
    "lengths": lengths,
    # Accuracy by the layer that H is read after, and by chunk size.
    "layers": partial(
        ablation,
        names={n: f"extract-{n}" for n in LAYERS} | {23: "chunk-8"},
        label="L_out: the layer that H is read after, of 24",
    ),
    "chunks": partial(
        ablation,
        names={c: f"chunk-{c}" for c in CHUNKS},
        label="c: tokens a chunk",
        of_chunks=True,
    ),
    "rounds": rounds,
    "speed": speed,
    "cost": training_cost,
}
