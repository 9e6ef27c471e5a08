#!/usr/bin/env python3
"""`python run.py train parity`, `python run.py infer`, …: the command line of minits."""
import gc
import signal
import sys

alone = __name__ == "__main__"
heeded = alone and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if heeded:
    # Ctrl-C while torch is imported just ends the process, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if alone:
    gc.disable()  # no import leaves garbage, and looking for it takes half a second of three

from minits.cli.main import main

if alone:
    gc.freeze()
    gc.enable()
    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
