"""`run.py report`: the tables of results, made of the records of real runs and nothing else."""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from minits.checkpoint.files import require, write_text
from minits.lab.presets import PRESETS, TABLES, Preset

RECORDS = Path(__file__).parent / "records"
BEGIN, END = "<!-- run.py report: begin -->", "<!-- run.py report: end -->"
COLUMNS = ("run", "paper", "longer [N, 100], %", "in distribution, %", "thoughts right (longer), %", "n", "seed",
           "training", "machine", "revision")


def read_records(path: Path = RECORDS / "train.jsonl") -> list[dict]:
    """The records of training runs, oldest first. Raises ValueError naming the line that is no record."""
    records = []
    for number, line in enumerate(require(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not a record ({error}); every line is one JSON object.") from error
    return records


def report(records: Sequence[dict]) -> str:
    """All tables, in Markdown: an overview and, folded, a line for each run of a preset and for each preset never run."""
    parts = [overview(records), "<details><summary>Every run</summary>"]
    for title in TABLES:
        lines = [cells(name, preset, run) for name, preset, runs in table(title, records) for run in runs or [None]]
        parts += [f"**{title}**", markdown(COLUMNS, lines)]
    return "\n\n".join([*parts, "</details>"]) + "\n"


def table(title: str, records: Sequence[dict]) -> Iterator[tuple[str, Preset, list[dict]]]:
    """The presets of a table by name, each with its runs."""
    for name, preset in PRESETS.items():
        if name.startswith(TABLES[title]):
            yield name, preset, [record for record in records if record.get("preset") == name]


def overview(records: Sequence[dict]) -> str:
    """Real weights, percent right on longer inputs: a line for each task and method, a column for each N."""
    found: dict[str, dict[int, str]] = {}
    models: set[str] = set()
    for title in TABLES:
        for name, preset, runs in table(title, records):
            if name.startswith("tiny/"):
                continue
            line = f"{preset.settings['task'].capitalize()}: {preset.title.split(', N =')[0]}"
            found.setdefault(line, {})[preset.settings["max_ops"]] = seeds(preset, runs)
            models |= {run["settings"]["model"] for run in runs}
    columns = sorted({N for line in found.values() for N in line})
    return ("**Longer [N, 100], %: every run of a preset (paper); † below 99 % in distribution**\n\n" + markdown(
        [", ".join(sorted(models)), *(f"N = {N}" for N in columns)],
        [[name, *(line.get(N, "–") for N in columns)] for name, line in found.items()]))


def seeds(preset: Preset, runs: Sequence[dict]) -> str:
    """The runs of a preset in a few characters, and the paper's figure."""
    accuracies = [f"{100 * run['ood']['accuracy']:.1f}" + ("" if run["id"]["accuracy"] >= 0.99 else "†") for run in runs]
    return (", ".join(accuracies) or "not run") + ("" if preset.paper is None else f" ({preset.paper:.2f})")


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table with these columns."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, ["---"] * len(columns), *lines])


def cells(name: str, preset: Preset, record: dict | None) -> list[str]:
    """One line of a table."""
    first = [f"{preset.title} (`{name}`)", "–" if preset.paper is None else f"{preset.paper:.2f}"]
    if record is None:
        return first + ["not run"] + ["–"] * (len(COLUMNS) - 3)
    longer, known = record["ood"], record["id"]
    thoughts = longer["thought_accuracy"]
    base = record["settings"]["model"]
    return first + [
        share(longer), share(known), "–" if thoughts is None else f"{100 * thoughts:.1f}",
        str(longer["n"]), str(record["seed"]), f"{record['steps']} steps, {record['train_seconds']:.0f} s",
        record["machine"] + ("" if base == "tiny" else f", {base}"), record["revision"]]


def share(evaluation: dict) -> str:
    """Accuracy and its 95 % interval, in percent."""
    low, high = evaluation["interval"]
    return f"{100 * evaluation['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def put_into(path: Path, text: str) -> None:
    """Replaces what stands between the two marks in a file. Raises ValueError if they are not there, once each."""
    old = require(path).read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise ValueError(f"{path}: the tables go between the lines {BEGIN} and {END}, which must stand there once, in "
                         "this order.")
    before, rest = old.split(BEGIN)
    write_text(path, before + BEGIN + "\n" + text + END + rest.split(END)[1])
