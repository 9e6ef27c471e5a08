"""Standard streams that fail only where the disk is full or the reader has gone."""
import os
import sys


def make_safe() -> None:
    """Each line is shown at once; characters that an encoding lacks become ?.

    A closed stream takes all and shows nothing.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace", line_buffering=True)
