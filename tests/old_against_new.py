"""Runs an older revision of this project beside this one, through the command line alone, and compares what they print.

    git archive c5f297b | tar x -C ../old          # any folder
    python tests/old_against_new.py ../old

The same short trainings (losses of every step to 1e-5, gradient norms to 5e-5), the same answers and thoughts of the shipped checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NEW = Path(__file__).parent.parent
SHORT = "--steps 20 --eval-samples 8 --device cpu --json".split()
TRAININGS = {
    "parity": [],
    "vars": [],
    "parity cot": ["--method", "cot"],
    "parity no-cot": ["--method", "no-cot"],
    "vars packed": ["--layout", "pack", "--variables", "2"],
    "parity long rows": ["--layout", "long_rows"],
    "parity in parts": ["--accumulate", "2"],
}
PROMPTS = (
    "The coin starts at state heads. Alice flips the coin. Bob flips the coin. Alice doesn't flip the coin.\n"
    * 2
)


def call(root: Path, folder: Path, *arguments: str) -> list[str]:
    """The lines that the revision in `root` prints, working in `folder`."""
    command = [sys.executable, str(root / "run.py"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout.splitlines()


def steps(root: Path, folder: Path, name: str) -> list[list[float]]:
    """Answer loss, thought loss and gradient norm of every step of a training, then its accuracies."""
    out = folder / name.replace(" ", "-")
    figures = json.loads(
        call(root, folder, "train", name.split()[0], "--out", str(out), *SHORT, *TRAININGS[name])[
            -1
        ]
    )
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [
        *([line["lm_loss"], line["thought_loss"], line["grad_norm"]] for line in lines),
        [figures["accuracy_id"], figures["accuracy_ood"], figures["id"]["late_share"] or 0.0],
    ]


def answers(root: Path, folder: Path, *flags: str) -> list[str]:
    """Prompts and answers of the shipped checkpoint, thoughts in their places, without times."""
    (folder / "prompts.txt").write_text(PROMPTS)
    lines = call(
        root,
        folder,
        "infer",
        "--run",
        str(root / "minits/assets/parity"),
        "--file",
        "prompts.txt",
        *flags,
    )
    return [line.rpartition(";")[0] or line for line in lines]


def main(old: Path) -> int:
    """The number of comparisons that differ."""
    wrong = 0

    def compare(name: str, same: bool, shown: str) -> None:
        nonlocal wrong
        wrong += not same
        print(f"{'same' if same else 'DIFFERENT':9}  {name}: {shown}", flush=True)

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for name in TRAININGS:
            ours, theirs = steps(NEW, Path(one), name), steps(old, Path(other), name)
            gaps = [
                [abs(a - b) / max(1.0, abs(b)) for a, b in zip(x, y)] for x, y in zip(ours, theirs)
            ]
            # A norm gathers the rounding of all steps before it.
            norm = max(gap[2] for gap in gaps)
            loss = max(gap for line in gaps for gap in line[:2])
            compare(
                f"training {name}",
                len(ours) == len(theirs) and loss <= 1e-5 and norm <= 5e-5,
                f"largest gap {loss:.1e} of a loss, {norm:.1e} of a gradient norm",
            )
        for flags in (["--prefill", "sequential"], ["--draft", "trivial"], ["--draft", "carry"]):
            ours, theirs = answers(NEW, Path(one), *flags), answers(old, Path(other), *flags)
            compare(f"infer {' '.join(flags)}", ours == theirs, ours[0])
    return wrong


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
