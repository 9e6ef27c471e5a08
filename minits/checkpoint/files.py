"""Reading and writing files so that a kill at any moment leaves the previous state whole."""
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from minits.settings import check_settings

Json = dict[str, Any]  # a JSON object
# Whether there is something at a path. A link to a missing file counts, so that `require` gets to
# say so.
present = os.path.lexists


def printable(text: object, most: int = 200) -> str:
    """Foreign text as it may stand in a message: its middle left out, control characters shown."""
    text, half = str(text), most // 2
    if len(text) > most:
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def said_by(error: object) -> str:
    """What an error of another library says, on one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def listing(folder: Path) -> str:
    """What a folder holds, in words, for error messages."""
    if not folder.is_dir():
        return "nothing: " + ("it is a file" if folder.exists() else "there is no such folder")
    names = sorted(path.name for path in folder.iterdir())
    first, rest = ", ".join(names[:8]), names[8:]
    return f"{first} and {len(rest)} more" if rest else first or "nothing"


def parted(given: str, names: str, kind: str) -> list[str]:
    """What the flag `given` names: one `kind`, or several with commas between.

    A comma in the name of what is there parts nothing. Raises ValueError where a name is empty.
    """
    each = [names] if present(names) else [name.strip() for name in names.split(",")]
    if not all(each):
        raise ValueError(
            f"{given} {names}: between commas a {kind} has no name; take one comma out."
        )
    return each


def around(path: Path) -> str:
    """What stands where `path` should be something else, for error messages."""
    folder = path if path.is_dir() else path.parent
    return f"{folder} holds {listing(folder)}"


def require(path: Path) -> Path:
    """`path` itself. Raises FileNotFoundError with what is there instead if it cannot be read."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"{path} is a link to a missing file (blob missing): download the model again."
        )
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} has no {path.name} (it holds {listing(path.parent)}). Copy it from "
            "where the model came from, or name another folder."
        )
    if not path.is_file():  # reading a named pipe would wait for ever
        raise ValueError(f"{path} is not a file. Copy it from where the model came from.")
    return path


def read_json(path: Path) -> Json:
    """The JSON object in `path`.

    Raises FileNotFoundError as `require`, ValueError if it is not a JSON object.
    """
    require(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # the latter: nested a thousand times
        raise ValueError(
            f"{path} is not valid JSON ({printable(error)}); download or write it again."
        ) from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ValueError(f"{path} holds a {kind}, not a JSON object; download or write it again.")
    return value


def read_values(kind: type, raw: Json, where: Path | str) -> Any:
    """The keys of `raw` that the dataclass `kind` has, each checked as its `setting` says.

    A null counts as a missing key. Raises ValueError naming the file, `where`, and the key.
    """
    found = {
        each.name: raw[each.name] for each in fields(kind) if raw.get(each.name) is not None
    }
    missing = [
        each.name for each in fields(kind) if each.default is MISSING and each.name not in found
    ]
    if missing:
        raise ValueError(
            f"{where}: lacks {', '.join(missing)}; copy the file again from where it came."
        )
    try:
        return check_settings(kind(**found))
    except ValueError as error:
        raise ValueError(f"{where}: {printable(error)} Put back what it was.") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: under a temporary name, flushed to disk, then renamed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # a full disk names none
        raise
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Has a file that was written put on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill, which becomes `path` in one rename if all went well.

    `path` must not exist.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps `folder` for this process, however that ends.

    Raises ValueError if another process has it.
    """
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"{folder}: another process is training there. Wait for it, or name another folder."
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows lets no one remove a file that is open
            (folder / ".lock").unlink()
        lock.release()
