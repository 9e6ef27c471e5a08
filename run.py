#!/usr/bin/env python3
"""`python run.py train parity`, `python run.py infer`, …: the command line of minits."""
import signal
import sys

heeded = __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if heeded:
    # Ctrl-C while torch is imported just ends the process, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from minits.cli.main import main

if __name__ == "__main__":
    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
