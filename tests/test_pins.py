"""What users rely on and no refactoring may change, pinned from revision c5f297b: examples, samples, losses, answers, flags.

`python tests/test_pins.py` writes the values of the revision at hand into pins.json; do so only for a change that is meant.
"""
from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import run
import torch
from minits import generate, load
from minits.training.recipe import TrainConfig, resolve_train
from minits.supervision import encode_example
from minits.tasks import draw_example, make_task
from minits.thinking import ThinkingConfig
from minits.checkpoint.tiny import tiny_tokenizer
from minits.training.loop import set_up, train

PINS = Path(__file__).parent / "pins.json"
SHIPPED = Path(__file__).parent.parent / "minits" / "assets" / "parity"
QUICK = dict(steps=20, batch_size=8, max_thought_tokens=16, eval_samples=2, eval_max_ops=12, warmup=2, device="cpu")
PROMPTS = ["The coin starts at state heads.",
           "The coin starts at state tails. Alice flips the coin.",
           "The coin starts at state heads. Alice doesn't flip the coin. Bob flips the coin. Alice flips the coin.",
           "The coin starts at state tails." + " Alice flips the coin. Bob doesn't flip the coin." * 12]
SPLITS = {"train": ("train", (1, 10)), "in distribution": ("eval", (1, 10)), "longer": ("eval", (10, 100))}


def begin(task: str, folder: Path, **changes):
    """A tiny training in `folder`, ready to go."""
    folder.mkdir()
    return set_up(resolve_train(TrainConfig(task=task, **(QUICK | changes))), folder)


def examples(name: str) -> dict:
    """The ids and thoughts of the first 20 examples of each split."""
    task, tokenizer = make_task(name), tiny_tokenizer()
    config, found = ThinkingConfig(4, 1, 1, (0,), 1), {}
    for split, (word, lengths) in SPLITS.items():
        rows = [encode_example(draw_example(task, seed=0, split=word, index=i, operations=lengths), tokenizer, config)
                for i in range(20)]
        found[split] = [{"ids": row.ids, "prompt": row.prompt_length, "thoughts": row.thoughts, "late": row.late}
                        for row in rows]
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
            found.append([[int(row.name.split()[-1]) for row in training.stream.rows(step)] for step in range(16)])
    return found


def losses(task: str, folder: Path) -> list:
    """Answer loss, thought loss and gradient norm of 20 steps of a tiny training."""
    training = begin(task, folder)
    train(training, lambda _: None)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[line[key] for key in ("lm_loss", "thought_loss", "grad_norm", "tokens")] for line in lines]


def answers() -> list:
    """What the shipped checkpoint says and thinks, in three ways of reading."""
    model, tokenizer = load(SHIPPED)
    found = []
    for how in ({"prefill": "sequential"}, {"draft": "trivial"}, {"draft": "carry"}):
        results = generate(model, tokenizer, PROMPTS, **how)
        found.append([{"text": r.text, "thoughts": r.thoughts, "rounds": r.rounds, "nontrivial": r.nontrivial,
                       "stop": r.stop_reason, "accepted": r.accepted} for r in results])
    return found


def helps() -> dict:
    """The help of every command."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        for command in run.COMMANDS:
            with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
                run.main([command, "--help"])
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
    assert helps() == pinned("help")


def write() -> None:
    """Pins the values of this revision."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        pins = {"examples": {task: examples(task) for task in ("parity", "vars")},
                "samples": {f"{layout} {world}": samples(layout, world, at / f"{layout}{world}")
                            for layout in ("rows", "pack", "long_rows") for world in (1, 2)},
                "losses": {task: losses(task, at / task) for task in ("parity", "vars")},
                "answers": answers(), "help": helps()}
    PINS.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in pins.items()) + "\n}\n")


if __name__ == "__main__":
    write()
