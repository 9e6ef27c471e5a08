#!/usr/bin/env python3
"""`python run.py train parity`, `python run.py infer`, …: the command line of minits."""
import gc
import os
import signal
import sys

program = __name__ == "__main__"  # else imported, by a spawned process perhaps
interruptible = program and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if interruptible:
    # Ctrl-C while torch is imported just ends the process, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if program:
    # How long threads spin before they sleep while they wait for one another. Beside a busy process
    # of another terminal, on two cores, a step of the tiny model takes 0.5 s so, 4 s by default;
    # on a machine of its own 0.09 s both ways.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    gc.disable()  # no import leaves garbage, and looking for it takes half a second of three

from minits.cli.main import main

if program:
    gc.freeze()
    gc.enable()
    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
