"""Working directories for the tests of the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli_helpers import PROMPT, QUICK, call
from strategies import Shape, write_checkpoint

# Runs like `trained`, but for a change of their run.json.
CHANGED = {
    "shorter": {"steps": 2},
    "wordy": {"steps": "many"},
    "rechunked": {"chunk_size": 4},
    "relayered": {"inject_after": 2},
    "negative": {"warmup": -5},
    "undecided": {"steps": None},
    "worded option": {"max_ops": "many"},
    "broken option": {"max_ops": 2.5},
    "later": {"later_flag": 1},
}
LAST = Path("checkpoints/step-000003")


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """A folder with a short trained run, a plain checkpoint, broken ones, and files to trip over.

    All tests share it: whoever changes something in it takes it back.
    """
    world = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        (world / "training.txt").write_text(json.dumps(call(*QUICK, "--out", "trained", "--json")))
    small = Shape(vocab=260, limit=64)
    write_checkpoint(world / "plain", small)
    shutil.copytree(world / "plain", world / "no-weights")
    (world / "no-weights" / "model.safetensors").unlink()
    write_checkpoint(world / "truncated", small, shards=2)
    shard = world / "truncated" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-16])
    shutil.copytree(world / "plain", world / "pointer")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (world / "pointer" / "model.safetensors").write_text(pointer)
    for name in ("torn", "emptied", "stateless", "unlabelled", *CHANGED):
        shutil.copytree(world / "trained", world / name)
    state = world / "torn" / LAST / "training_state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    (world / "emptied" / LAST / "training_state.pt").write_bytes(b"")
    torch.save({"step": 3}, world / "stateless" / LAST / "training_state.pt")
    (world / "unlabelled" / LAST / "thinking.json").unlink()
    shutil.copytree(world / "trained" / LAST, world / "unsized")
    about = world / "unsized" / "thinking.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"max_ops": None}))
    for name, change in CHANGED.items():
        file = world / name / "run.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (world / "filled").mkdir()
    (world / "filled" / "thesis.txt").write_text("years of work")
    (world / "empty.txt").write_text("\n  \n")
    (world / "latin1.txt").write_bytes("Zürich".encode("latin-1"))
    (world / "good-then-long.txt").write_text(f"{PROMPT}\nThe{' coin' * 2100}\n")
    (world / "good-then-unknown.txt").write_text(f"{PROMPT}\n\nThe coin sings\n")
    (world / "utf16.txt").write_bytes(PROMPT.encode("utf-16"))
    return world


@pytest.fixture
def inside(world, monkeypatch) -> Iterator[Path]:
    """`world` as the working directory; a run that a test leaves there does not reach the next."""
    monkeypatch.chdir(world)
    yield world
    shutil.rmtree(world / "runs", ignore_errors=True)


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
