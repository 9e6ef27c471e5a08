"""`run.py report`: the tables of results, made of the records of real runs."""
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minits.checkpoint.files import listing
from minits.cli.flags import Output, add_flags, note, take
from minits.lab.figures import draw_all
from minits.lab.records import read_book
from minits.lab.tables import PAGES, put_into, tables
from minits.settings import setting

WORDS = "print the tables of results, made of the records of real runs"
OPTIONS = ()
OURS = "both"  # what --write alone stands for


@dataclass(frozen=True)
class ReportFlags(Output):
    """What `run.py report` takes."""

    write: str | None = setting(
        None,
        "put the tables where their marks stand in a file; without one: README.md and RESULTS.md",
        bare=OURS,
    )
    figures: str | None = setting(
        None, "draw the figures into this folder, as PNG files (needs matplotlib)"
    )


add_arguments = partial(add_flags, config=ReportFlags)


def run(given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Prints the tables of results, or puts them into a file."""
    flags, book = take(given, ReportFlags), read_book()
    found = tables(book)
    if flags.figures:
        for name, drawn in draw_all(book, Path(flags.figures)).items():
            there = f"{Path(flags.figures) / name}.png"
            note(there if drawn else f"{name}: not drawn, for there are no records of it yet")
    elif flags.write is None:
        for name, table in found.items():
            print(f"## {name}\n\n{table}\n", flush=True)
    named = [Path(flags.write)] if flags.write else []
    for path in PAGES if flags.write == OURS else named:
        if not path.is_file():
            near = listing(path.parent)
            raise FileNotFoundError(f"--write {path}: no such file ({path.parent} holds {near}).")
        names = " and ".join(put_into(path, found))
        note(f"{path}: the table {names} is now that of {len(book.runs)} runs")
    return {"records": [record for record in book.runs if "preset" in record]}, 0
