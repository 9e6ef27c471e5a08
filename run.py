#!/usr/bin/env python3
"""`python run.py train parity`, `python run.py infer`, …: the command line of minits."""
import sys

from minits.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
