"""What users rely on and no refactoring may change, pinned from revision c5f297b: examples, samples, losses, answers, flags.

`python tests/test_pins.py help` pins the help of the revision at hand; so with the other names,
but do that only for a change that is meant.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import torch

from minits import generate, load
from minits.checkpoint.tiny import ASSETS, tiny_tokenizer
from minits.cli.main import COMMANDS, main, make_parser
from minits.methods import make_method
from minits.supervision import encode_example
from minits.tasks import make_task
from minits.thinking import ThinkingConfig
from minits.training.late import is_late
from minits.training.loop import train
from minits.training.recipe import Plan, TrainSettings, resolve
from minits.training.session import set_up
from minits.training.stopping import Stop

PINS = Path(__file__).parent / "pins.json"
QUICK = {
    "steps": 20,
    "batch_size": 8,
    "max_thought_tokens": 16,
    "eval_samples": 2,
    "warmup": 2,
    "device": "cpu",
}
PROMPTS = [
    "The coin starts at state heads.",
    "The coin starts at state tails. Alice flips the coin.",
    "The coin starts at state heads. Alice doesn't flip the coin. Bob flips the coin. Alice flips the coin.",
    "The coin starts at state tails." + " Alice flips the coin. Bob doesn't flip the coin." * 12,
]
SPLITS = {"train": "train", "in distribution": "id", "longer": "ood"}  # as they were called


def begin(name: str, folder: Path, max_ops: int = 10, **changes):
    """A tiny training in `folder`, ready to go."""
    folder.mkdir()
    task = make_task(name, max_ops=max_ops, eval_max_ops=12)
    settings = resolve(TrainSettings(task=name, **(QUICK | changes)), task)
    return set_up(Plan(settings, task, make_method("thinking")), folder)


def examples(name: str) -> dict:
    """The ids and thoughts of the first 20 examples of each split."""
    task, tokenizer = make_task(name), tiny_tokenizer()
    config, found = ThinkingConfig(4, 1, 1, (0,), 1), {}
    for title, split in SPLITS.items():
        drawn = [task.example(split, i, 0) for i in range(20)]
        rows = [(each, encode_example(each, tokenizer, config)) for each in drawn]
        found[title] = [
            {
                "ids": row.ids,
                "prompt": row.prompt_length,
                "thoughts": row.thoughts,
                "late": is_late(each, row, tokenizer, 4),
            }
            for each, row in rows
        ]
    return found


def samples(layout: str, world: int, folder: Path) -> list:
    """The sample numbers of every step of two pools, on each of `world` processes."""
    training = begin("parity", folder, layout=layout, batch_size=8, max_ops=20)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minits.training.distributed.world", lambda: world)
        for rank in range(world):
            patch.setattr("minits.training.distributed.rank", lambda rank=rank: rank)
            training.stream.pools.clear()
            found.append(
                [
                    [int(row.name.split()[-1]) for row in training.stream.rows(step)]
                    for step in range(16)
                ]
            )
    return found


def losses(task: str, folder: Path) -> list:
    """Answer loss, thought loss and gradient norm of 20 steps of a tiny training."""
    training = begin(task, folder)
    with Stop(print) as stop:
        train(training, lambda _: None, stop)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        [line[key] for key in ("lm_loss", "thought_loss", "grad_norm", "tokens")] for line in lines
    ]


def answers() -> list:
    """What the shipped checkpoint says and thinks, in three ways of reading."""
    model, tokenizer = load(ASSETS / "parity")
    found = []
    for how in ({"prefill": "sequential"}, {"draft": "trivial"}, {"draft": "carry"}):
        results = generate(model, tokenizer, PROMPTS, **how)
        found.append(
            [
                {
                    "text": r.text,
                    "thoughts": r.thoughts,
                    "rounds": r.rounds,
                    "nontrivial": r.nontrivial,
                    "stop": r.stop_reason,
                    "accepted": r.accepted,
                }
                for r in results
            ]
        )
    return found


def helps() -> dict:
    """The help of every command."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        for command in COMMANDS:
            with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
                main([command, "--help"])
            found[command] = out.getvalue().splitlines()
    return found


def pinned(name: str):
    return json.loads(PINS.read_text(encoding="utf-8"))[name]


@pytest.mark.parametrize("task", ["parity", "vars"])
def test_the_examples_of_every_split_are_the_pinned_ones(task):
    assert examples(task) == pinned("examples")[task]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("layout", ["rows", "pack", "long_rows"])
def test_the_samples_of_every_step_are_the_pinned_ones(layout, world, tmp_path):
    assert samples(layout, world, tmp_path / "run") == pinned("samples")[f"{layout} {world}"]


@pytest.mark.parametrize("task", ["parity", "vars"])
def test_the_losses_of_twenty_steps_are_the_pinned_ones(task, tmp_path):
    for ours, theirs in zip(losses(task, tmp_path / "run"), pinned("losses")[task], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


def test_the_shipped_checkpoint_says_and_thinks_what_is_pinned():
    assert answers() == pinned("answers")


def test_the_help_of_every_command_is_the_pinned_one():
    told = "another flag, task or method, and meant? `python tests/test_pins.py help` pins it"
    assert helps() == pinned("help"), told


def test_every_flag_of_the_pinned_revision_is_still_taken():
    for command, flags in pinned("flags").items():
        (choices,) = (
            a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)
        )
        known = {
            name for action in choices.choices[command]._actions for name in action.option_strings
        }
        assert set(flags) <= known, command


def write(*names: str) -> None:
    """Pins what is called `names` as it is in this revision."""
    torch.set_num_threads(1)
    pins = json.loads(PINS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        ways = [(layout, world) for layout in ("rows", "pack", "long_rows") for world in (1, 2)]
        makers = {
            "examples": lambda: {task: examples(task) for task in ("parity", "vars")},
            "samples": lambda: {f"{a} {b}": samples(a, b, at / f"{a}{b}") for a, b in ways},
            "losses": lambda: {task: losses(task, at / task) for task in ("parity", "vars")},
            "answers": answers,
            "help": helps,
        }
        pins |= {name: makers[name]() for name in names}
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pins.items())
    PINS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write(*sys.argv[1:])
