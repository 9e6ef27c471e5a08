"""The tables of results, made of the records of real runs and nothing else."""
import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from minits.checkpoint.files import require, write_text
from minits.lab.paired import difference
from minits.lab.presets import PRESETS, TABLES, Preset
from minits.methods import METHODS

RECORDS = Path(__file__).parent / "records"
# Where the tables stand: each between two lines that name it.
PAGES = (Path(__file__).parents[2] / "README.md", Path(__file__).parent / "RESULTS.md")
MARK = "<!-- run.py report {}: {} -->"
COLUMNS = (
    "run",
    "paper",
    "longer [N, 100], %",
    "in distribution, %",
    "thoughts right (longer), %",
    "n",
    "seed",
    "training",
    "machine",
    "revision",
)
Record = dict[str, Any]


def read_records(path: Path = RECORDS / "train.jsonl") -> list[Record]:
    """The records of training runs, oldest first. Raises ValueError naming a line that is none."""
    records = []
    lines = require(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not a record ({error}); every line is one JSON object."
            ) from error
    return records


def tables(records: Sequence[Record]) -> dict[str, str]:
    """All tables by name, in Markdown.

    "summary": a line a task and method; "runs": a line for each run of a preset, and for each
    preset never run. "gsm": a line a run on word problems.
    """
    parts = []
    for title in TABLES:
        lines = [
            cells(name, preset, run)
            for name, preset, runs in table(title, records)
            for run in runs or [None]
        ]
        parts += [f"**{title}**", markdown(COLUMNS, lines)]
    return {"summary": overview(records), "runs": "\n\n".join(parts), "gsm": word_problems(records)}


def table(title: str, records: Sequence[Record]) -> Iterator[tuple[str, Preset, list[Record]]]:
    """The presets of a table by name, each with its runs.

    A preset that is no more is known by its runs, which carry their title.
    """
    gone = {
        run["preset"]: Preset(run["title"], run["settings"])
        for run in records
        if run.get("preset") and run["preset"] not in PRESETS
    }
    for name, preset in (PRESETS | gone).items():
        if name.startswith(TABLES[title]):
            yield name, preset, [run for run in records if run.get("preset") == name]


def overview(records: Sequence[Record]) -> str:
    """Real weights, percent right on longer inputs: a line a task and method, a column an N."""
    found: dict[str, dict[int, str]] = {}
    models: set[str] = set()
    for title in TABLES:
        for name, preset, runs in table(title, records):
            if name.startswith("tiny/"):
                continue
            task, method = preset.settings["task"], preset.title.split(", N =")[0]
            line = found.setdefault(f"{task.capitalize()}: {method}", {})
            line[preset.settings["max_ops"]] = seeds(preset, runs)
            models |= {run["settings"]["model"] for run in runs}
    columns = sorted({N for line in found.values() for N in line})
    heads = [", ".join(sorted(models)), *(f"N = {N}" for N in columns)]
    lines = [[name, *(line.get(N, "–") for N in columns)] for name, line in found.items()]
    words = "**Longer [N, 100], %: every run of a preset (paper); † below 99 % in distribution**"
    return f"{words}\n\n{markdown(heads, lines)}"


def seeds(preset: Preset, runs: Sequence[Record]) -> str:
    """The runs of a preset in a few characters, and the paper's figure."""
    accuracies = [
        f"{100 * run['ood']['accuracy']:.1f}" + ("" if run["id"]["accuracy"] >= 0.99 else "†")
        for run in runs
    ]
    paper = "" if preset.paper is None else f" ({preset.paper:.2f})"
    return (", ".join(accuracies) or "not run") + paper


GSM_COLUMNS = (
    "method, start",
    "test, %",
    "valid, %",
    "first result, %",
    "last result, %",
    "answer right if it is, %",
    "thoughts that say something, right, %",
    "c, text after",
    "seed",
    "training",
    "machine",
    "revision",
)


def word_problems(records: Sequence[Record]) -> str:
    """The runs on GSM that were evaluated on valid and test, by method."""
    runs = [run for run in records if run.get("settings", {}).get("task") == "gsm"]
    runs = sorted(runs, key=lambda run: (run["settings"]["model"], run["settings"]["method"]))
    lines = []
    for run in runs:
        settings, test = run["settings"], run["test"]
        said = [test["counts"].get(name) for name in ("first_result", "last_result")]
        said += [test["counts"].get("right_if_last_is"), test["nontrivial_right"]]
        suffix = "none" if not settings["suffix"] else f"{len(settings['suffix'].split())} words"
        lines.append([
            f"{METHODS[settings['method']].title}, {settings['model']}",
            share(test),
            share(run["valid"]),
            *("–" if each is None else f"{100 * each:.1f}" for each in said),
            f"{settings['chunk_size']}, {suffix}",
            str(run["seed"]),
            f"{run['steps']} steps, {run['train_seconds']:.0f} s",
            run["machine"],
            run["revision"],
        ])
    return "\n\n".join([markdown(GSM_COLUMNS, lines), *differences(runs)])


def differences(runs: Sequence[Record]) -> Iterator[str]:
    """A line for each two methods on the same model: how far they lie apart on the test rows."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        if right := run["test"].get("right"):
            methods = found.setdefault(run["settings"]["model"], {})
            methods.setdefault(METHODS[run["settings"]["method"]].title, []).append(right)
    for model, methods in found.items():
        for one, other in combinations(methods, 2):
            mean, low, high = (100 * x for x in difference(methods[one], methods[other]))
            yield f"{model}: {one} less {other} {mean:+.1f} points [{low:+.1f}, {high:+.1f}]"


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with these columns."""
    rule = ["---"] * len(columns)
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, rule, *lines])


def cells(name: str, preset: Preset, run: Record | None) -> list[str]:
    """One line of a table."""
    paper = "–" if preset.paper is None else f"{preset.paper:.2f}"
    first = [f"{preset.title} (`{name}`)", paper]
    if run is None:
        return first + ["not run"] + ["–"] * (len(COLUMNS) - 3)
    longer, known = run["ood"], run["id"]
    thoughts, base = longer["thought_accuracy"], run["settings"]["model"]
    return first + [
        share(longer),
        share(known),
        "–" if thoughts is None else f"{100 * thoughts:.1f}",
        str(longer["n"]),
        str(run["seed"]),
        f"{run['steps']} steps, {run['train_seconds']:.0f} s",
        run["machine"] + ("" if base == "tiny" else f", {base}"),
        run["revision"],
    ]


def share(evaluation: Record) -> str:
    """Accuracy and its 95 % interval, in percent."""
    low, high = evaluation["interval"]
    return f"{100 * evaluation['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def put_into(path: Path, found: dict[str, str]) -> list[str]:
    """Replaces what stands between the marks of these tables in a file; the names of those there.

    Raises ValueError if the marks of one do not stand there once each, in order, or if none do.
    """
    text, names = require(path).read_text(encoding="utf-8"), []
    for name, table in found.items():
        begin, end = (MARK.format(name, word) for word in ("begin", "end"))
        if begin not in text and end not in text:
            continue
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(
                f"{path}: a table goes between the lines {begin} and {end}, which must stand there "
                "once, in this order."
            )
        before, rest = text.split(begin)
        text = before + begin + "\n" + table + "\n" + end + rest.split(end)[1]
        names.append(name)
    if not names:
        raise ValueError(
            f"{path}: it has no place for a table. Put the lines {MARK.format('summary', 'begin')} "
            f"and {MARK.format('summary', 'end')} where it shall stand (or runs for summary)."
        )
    write_text(path, text)
    return names
