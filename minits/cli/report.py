"""`run.py report`: the tables of results, made of the records of real runs."""
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minits.cli.flags import Output, add_flags, note, take
from minits.lab.tables import put_into, read_records, tables
from minits.settings import setting

WORDS = "print the tables of results, made of the records of real runs"
OPTIONS = ()


@dataclass(frozen=True)
class ReportFlags(Output):
    """What `run.py report` takes."""

    write: str | None = setting(None, "file (the README) to put the tables in, between two marks")


add_arguments = partial(add_flags, config=ReportFlags)


def run(given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Prints the tables of results, or puts them into a file."""
    flags, records = take(given, ReportFlags), read_records()
    text = tables(records)
    if flags.write:
        put_into(Path(flags.write), text)
        note(f"the tables in {flags.write} are now those of {len(records)} records")
    else:
        print(text, end="", flush=True)
    return {"records": [record for record in records if "preset" in record]}, 0
