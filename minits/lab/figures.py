"""Figures as PNG files, where matplotlib is installed."""
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """matplotlib's drawing functions, without a screen. Raises ValueError where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"a figure needs matplotlib ({error}): pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


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
