"""`run.py report`: the tables of results, made of the records of real runs."""
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minits.checkpoint.files import around, require, write_text
from minits.cli.flags import Given, Output, add_flags, check_new_file, note, take
from minits.lab.figures import FIGURES, draw_all, pyplot
from minits.lab.provenance import Record
from minits.lab.records import made_of, read_book
from minits.lab.tables import tables
from minits.settings import setting

DESCRIPTION = "print the tables of results, made of the records of real runs"
OPTIONS = ()
# Where the tables stand: each between two lines that name it.
PACKAGE = Path(__file__).parents[1]
PAGES = (PACKAGE.parent / "README.md", PACKAGE / "lab" / "RESULTS.md")
MARK = "<!-- run.py report {}: {} -->"
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


def run(given: Given) -> tuple[Record, int]:
    """Prints the tables of results, or puts them into a file."""
    flags, book = take(given, ReportFlags), read_book()
    found = made_of(book, tables)
    if flags.figures:
        pyplot()
        folder = Path(flags.figures)
        with suppress(OSError):  # `check_new_file` says why it cannot be made
            folder.mkdir(parents=True, exist_ok=True)
        for name in FIGURES:
            check_new_file(f"{folder / name}.png", name="--figures")
        for name, drawn in draw_all(book, folder).items():
            note(
                f"{folder / name}.png"
                if drawn
                else f"{name}: not drawn, for there are no records of it yet"
            )
    elif flags.write is None:
        for name, table in found.items():
            print(f"## {name}\n\n{table}\n")
    named = [Path(flags.write)] if flags.write else []
    for path in PAGES if flags.write == OURS else named:
        if not path.is_file():
            raise FileNotFoundError(f"--write {path}: no such file ({around(path)}).")
        names = " and ".join(put_into(path, found))
        note(f"{path}: the table {names} is now that of {len(book.runs)} runs")
    return {"records": [record for record in book.runs if "preset" in record]}, 0


def put_into(path: Path, found: dict[str, str]) -> list[str]:
    """Replaces what stands between the marks of these tables in a file; the names of those there.

    Raises ValueError if the marks of one do not stand there once each, in order, or if none do.
    """
    try:
        text, names = require(path).read_bytes().decode(), []
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}. Name another file.") from error
    end_of_line = "\r\n" if "\r\n" in text else "\n"
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
        put = end_of_line.join([begin, *table.split("\n"), end])
        text = before + put + rest.split(end)[1]
        names.append(name)
    if not names:
        raise ValueError(
            f"{path}: it has no place for a table. Put the lines {MARK.format('summary', 'begin')} "
            f"and {MARK.format('summary', 'end')} where it shall stand (or runs for summary)."
        )
    write_text(path, text)
    return names
