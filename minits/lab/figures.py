"""Figures as PNG files, where matplotlib is installed."""
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minits.lab.paper import STATE_TRACKING
from minits.lab.presets import CHUNKS, LAYERS, PRESETS, WIDTHS
from minits.lab.records import Book, Cell
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
    """Draws every figure that has records into a folder; of each name, whether it has.

    Raises ValueError where matplotlib is missing, or for a file.
    """
    pyplot()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--figures {folder} is a file; name a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    return {name: draw(book, folder / f"{name}.png") for name, draw in FIGURES.items()}


@contextmanager
def drawing(path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (7, 4.5)):
    """Axes [rows, columns] to draw on; what was drawn is saved at the end."""
    plt = pyplot()
    how = {"figsize": size, "layout": "constrained", "squeeze": False, "sharey": "row"}
    figure, axes = plt.subplots(rows, columns, **how)
    yield axes
    figure.savefig(path, format="png", dpi=150)
    plt.close(figure)


MARKERS = "osD^vPX*"


def lengths(book: Book, path: Path) -> bool:
    """Table 1 by the length of an example: a panel for each task and N, a line for each method."""
    panels = {task: Ns for (task, _), Ns in STATE_TRACKING.items()}
    found = {}
    for (task, method), Ns in STATE_TRACKING.items():
        for N in Ns:
            name = f"table1/{task}-{N}-{method}"
            runs = [run for run in book.runs if run.get("preset") == name and "ood" in run]
            found[task, N, method] = by_length([run["ood"]["buckets"] for run in runs], N)
    if not any(found.values()):
        return False
    with drawing(path, len(panels), 3, (11, 6)) as axes:
        for row, (task, Ns) in zip(axes, panels.items()):
            for panel, N in zip(row, Ns):
                for marker, method in zip(MARKERS, ("thinking", "cot", "no-cot")):
                    if points := found[task, N, method]:
                        how = {"marker": marker, "label": METHODS[method].title}
                        panel.plot(*zip(*points), **how)
                panel.axvspan(0, N, color="0.93")
                panel.set(title=f"{task.capitalize()}, trained on 1 … {N}", xlim=(0, 100))
                panel.set(ylim=(-3, 103), xlabel="length of the example")
            row[0].set_ylabel("answers right, %")
        axes[0, 0].legend(fontsize="small")
    return True


def by_length(runs: Sequence[dict[str, Any]], least: int) -> list[tuple[float, float]]:
    """(middle of a bucket, percent right) over the examples of all runs, where there are 20.

    least: the length of the shortest example.
    """
    right: dict[str, float] = {}
    count: dict[str, int] = {}
    for buckets in runs:
        for name, bucket in buckets.items():
            right[name] = right.get(name, 0) + bucket["n"] * bucket["accuracy"]
            count[name] = count.get(name, 0) + bucket["n"]
    points = []
    for name, n in count.items():
        low, high = map(int, name.split("-"))
        if n >= 20:
            points.append(((max(low, least) + high) / 2, 100 * right[name] / n))
    return sorted(points)


def cells_of(book: Book, task: str, kind: str, values: Sequence[int], end: str = "") -> list:
    """(value, cell) of the cells of an ablation that were run."""
    names = {value: f"ablation/{task}-{kind}-{value}{end}" for value in values}
    names |= {23: f"ablation/{task}-chunk-8"} if kind == "extract" else {}
    found = [(value, book.cell(name)) for value, name in names.items() if name in PRESETS]
    return [(value, cell) for value, cell in found if cell.runs]


def ablation(kind: str, values: Sequence[int], label: str) -> Callable[[Book, Path], bool]:
    """A figure: test rows right against a setting, the speed-up over CoT written above."""
    series = {"word problems": ("gsm", ""), "word problems, one step a chunk": ("gsm", "-one")}
    series |= {"2-hop questions, facts taught": ("two-hop", "")}

    def draw(book: Book, path: Path) -> bool:
        found = {}
        for name, (task, end) in series.items():
            if end == "" or kind == "chunk":
                found[name] = cells_of(book, task, kind, values, end)
        if not any(found.values()):
            return False
        with drawing(path) as axes:
            panel = axes[0, 0]
            for number, (name, points) in enumerate(found.items()):
                if points:
                    line(panel, points, number, name)
            panel.set(xlabel=label, ylabel="test rows right, % (above: times CoT's speed)")
            if kind == "chunk":
                panel.set_xscale("log", base=2)
            ticks = [value for value, _ in max(found.values(), key=len)]
            panel.set_xticks(ticks, list(map(str, ticks)))
            panel.legend(fontsize="small")
            panel.margins(x=0.1, y=0.15)
            panel.set_ylim(bottom=0)
        return True

    return draw


def line(panel: Any, points: Sequence[tuple[int, Cell]], number: int, name: str) -> None:
    """Cells with their intervals and speed-ups; each line a little beside those before."""
    places, marker = [value * 1.02**number for value, _ in points], MARKERS[number]
    shares = [[100 * each for each in cell.accuracy()] for _, cell in points]
    means = [mean for mean, _, _ in shares]
    panel.errorbar(places, means, around(shares), marker=marker, capsize=3, label=name)
    for place, mean, (_, cell) in zip(places, means, points):
        if speed := cell.speed_up():
            how = {"textcoords": "offset points", "xytext": (4, 8), "fontsize": "small"}
            panel.annotate(f"{speed:.2f}×", (place, mean), **how)


def around(shares: Sequence[Sequence[float]]) -> list[list[float]]:
    """How far intervals reach below and above."""
    below = [mean - low for mean, low, _ in shares]
    return [below, [high - mean for mean, _, high in shares]]


def rounds(book: Book, path: Path) -> bool:
    """Rounds of reading a prompt, by way of reading: a group of bars for each measurement."""
    groups: dict[str, dict[str, float]] = {}
    least: dict[str, float] = {}
    for record, each in book.lines("draft"):
        ahead = each.get("lookahead") or each.get("window")
        way = each["draft"] + (f", {ahead} ahead" if ahead else "")
        way = "one by one" if each["prefill"] == "sequential" else way
        group = each.get("run") or f"{each['prompts']} prompts"
        name = f"{group} ({record['machine']}, {record['revision']})"
        groups.setdefault(name, {})[way] = each["rounds"]
        if "entered_and_one" in each:
            least[name] = each["entered_and_one"]
    if not groups:
        return False
    ways = list(dict.fromkeys(way for group in groups.values() for way in group))
    width = 0.8 / len(groups)
    with drawing(path, size=(9, 4.5)) as axes:
        panel = axes[0, 0]
        for number, (name, group) in enumerate(groups.items()):
            places = [ways.index(way) + number * width for way in group]
            panel.bar(places, list(group.values()), width, label=name, color=f"C{number}")
            if name in least:
                panel.axhline(least[name], color=f"C{number}", linestyle="--")
        middle = (len(groups) - 1) * width / 2
        places = [place + middle for place in range(len(ways))]
        panel.set_xticks(places, ways, rotation=30, ha="right")
        panel.set_ylabel("rounds a prompt (dashed: non-trivial thoughts + 1)")
        panel.figure.legend(fontsize="small", loc="outside upper center")
    return True


def speed(book: Book, path: Path) -> bool:
    """Word problems: rows right against milliseconds an answer, all methods."""
    beginnings = [f"gsm/{size.lower()}-" for size in WIDTHS]
    cells = [cell for each in beginnings for cell in book.cells(each) if cell.runs and cell.ms()]
    if not cells:
        return False
    with drawing(path) as axes:
        panel = axes[0, 0]
        for number, cell in enumerate(cells):
            share = [100 * each for each in cell.accuracy()]
            marker = MARKERS[list(METHODS).index(cell.label[0])]
            how = {"fmt": marker, "capsize": 3, "color": f"C{number}"}
            panel.errorbar([cell.ms()], share[:1], around([share]), label=cell.preset.title, **how)
        panel.set(xlabel="milliseconds an answer, one at a time", ylabel="test rows right, %")
        panel.set(xlim=(0, None), ylim=(0, None))
        panel.legend(fontsize="small")
    return True


def cost(lines: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Time of forward and backward pass against recurrent steps, by the lines of `bench cost`.

    Dashed: in CUDA graphs. What has no steps is drawn as a level line.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    measured = [line for line in lines if "both" in line]
    most = max(line["steps"] for line in measured)
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(l["side"] for l in measured))}
    for side, path_of in dict.fromkeys((line["side"], line["path"]) for line in measured):
        mine = [each for each in measured if (each["side"], each["path"]) == (side, path_of)]
        points = [(each["steps"] or 1, each["both"]["ms"]) for each in mine]
        points += [(most, points[0][1])] if len(points) == 1 else []
        style = "--" if path_of == "graphs" else "-"
        axes.plot(*zip(*points), style, marker=".", color=colours[side], label=f"{side}, {path_of}")
    axes.set(yscale="log", xlabel="recurrent steps", ylabel="forward and backward pass, ms")
    axes.set_title("128 tokens, one row")
    axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=150)
    plt.close(figure)


def training_cost(book: Book, path: Path) -> bool:
    """`cost` of the newest record that has such lines."""
    found = {id(record): record for record, _ in book.lines("both")}
    if found:
        cost([*found.values()][-1]["lines"], path)
    return bool(found)


FIGURES: dict[str, Callable[[Book, Path], bool]] = {
    "lengths": lengths,
    "layers": ablation("extract", LAYERS, "L_out: the layer that H is read after, of 24"),
    "chunks": ablation("chunk", CHUNKS, "c: tokens a chunk"),
    "rounds": rounds,
    "speed": speed,
    "cost": training_cost,
}
