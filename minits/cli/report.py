"""`run.py report`: the tables of results, made of the records of real runs."""
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minits.checkpoint.files import require, write_text
from minits.cli.flags import Given, Output, add_flags, check_new_file, note, take
from minits.lab.figures import FIGURES, draw_all, pyplot
from minits.lab.provenance import Record
from minits.lab.records import made_of, read_book
from minits.lab.tables import tables
from minits.settings import setting

DESCRIPTION = "print the tables of results, made of the records of real runs"
# Where the tables stand: each between two lines that name it.
PACKAGE = Path(__file__).parents[1]
PAGES = (PACKAGE.parent / "README.md", PACKAGE / "lab" / "RESULTS.md")
MARK = "<!-- run.py report {}: {} -->"


@dataclass(frozen=True)
class ReportFlags(Output):
    """What `run.py report` takes."""

    write: bool = setting(
        False, "put the tables where their marks stand in README.md and lab/RESULTS.md"
    )
    figures: str | None = setting(
        None, "draw the figures into this folder, as PNG files (needs matplotlib)"
    )


add_arguments = partial(add_flags, config=ReportFlags)


def run(given: Given) -> tuple[Record, int]:
    """Prints the tables of results, draws the figures, or puts the tables into our pages."""
    flags, book = take(given, ReportFlags), read_book()
    found = made_of(book, tables)
    if flags.figures:
        pyplot()
        folder = Path(flags.figures)
        with suppress(OSError):  # `check_new_file` says why it cannot be made
            folder.mkdir(parents=True, exist_ok=True)
        for name in FIGURES:
            check_new_file(f"{folder / name}.png", name="--figures", kind="folder")
        for name, drawn in draw_all(book, folder).items():
            missing = f"{name}: not drawn, for there are no records of it yet"
            note(f"{folder / name}.png" if drawn else missing)
    if flags.write:
        for path in PAGES:
            names = " and ".join(put_into(path, found))
            note(f"{path}: the table {names} is now that of {len(book.runs)} runs")
    if not (flags.figures or flags.write):
        for name, table in found.items():
            print(f"## {name}\n\n{table}\n")
    return {"records": [record for record in book.runs if "preset" in record]}, 0


def put_into(path: Path, found: dict[str, str]) -> list[str]:
    """Replaces what stands between the marks of these tables in a page; the names of those there.

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
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
        names.append(name)
    if not names:
        marks = " and ".join(MARK.format("summary", word) for word in ("begin", "end"))
        raise ValueError(f"{path}: it has no place for a table. Put back its marks, as {marks}.")
    write_text(path, text)
    return names
