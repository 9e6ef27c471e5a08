"""Standard streams that no output makes fail but the disk and the reader."""
import os
import sys


def make_safe() -> None:
    """Characters that an encoding lacks become ?; a closed stream becomes an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
