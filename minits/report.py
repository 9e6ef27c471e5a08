"""`run.py report`: the tables of results, made of the records of real runs and nothing else."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from minits.files import require, write_text
from minits.presets import PRESETS, TABLES

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
    """The tables, in Markdown: a line for each run of a preset, and one for each preset that was never run."""
    parts = []
    for title, beginnings in TABLES.items():
        lines = [f"**{title}**", "", "| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
        for name, preset in PRESETS.items():
            if name.startswith(beginnings):
                runs = [record for record in records if record.get("preset") == name] or [None]
                lines += ["| " + " | ".join(cells(name, run)) + " |" for run in runs]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def cells(name: str, record: dict | None) -> list[str]:
    """One line of a table."""
    preset = PRESETS[name]
    head = [f"{preset.title} (`{name}`)", "–" if preset.paper is None else f"{preset.paper:.2f}"]
    if record is None:
        return head + ["not run"] + ["–"] * (len(COLUMNS) - 3)
    longer, known = record["ood"], record["id"]
    thoughts = longer["thought_accuracy"]
    base = record["settings"]["model"]
    return head + [
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
