"""One key of a JSON file changed, one byte of a file flipped or a file cut: refused by name, or used.

The full numbers, 500 changed keys and 300 damaged files, run under MINITS_PROFILE=deep.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from training_helpers import begin

from minits import generate
from minits.checkpoint.config_json import ConfigFile
from minits.checkpoint.tiny import ASSETS
from minits.checkpoint.weights import Checkpoint, load_checkpoint
from minits.cli.models import trained_task
from minits.cli.train import resumed
from minits.training.run_folder import run_json, read_run, read_state, write_run

DEEP = os.environ.get("MINITS_PROFILE") == "deep"
SHIPPED = ASSETS / "parity"
PROMPTS = [
    "The coin starts at state heads. Alice flips the coin. Bob doesn't flip the coin.",
    "The coin starts at state tails. Bob flips the coin. Alice flips the coin. Bob flips the coin.",
]
ADVICE = 1500  # characters that a message may have


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy that may be damaged."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(shutil.copytree(folder, Path(name) / "copy"))


def told(error: Exception, *names: str) -> None:
    """The error is one that a command tells in a line, and says all of `names`, spelled somehow."""
    text = str(error)
    assert isinstance(error, (ValueError, FileNotFoundError)), repr(error)
    assert len(text) < ADVICE and text.isprintable(), text
    spelled = text.replace(" ", "_").replace("-", "_")
    assert [name for name in names if name not in text and name not in spelled] == [], text


# -- one key changed -------------------------------------------------------------------------------

JUNK = [
    *[None, True, False, "", "x", "8", "an unknown word", "\x1b[2J", "w" * 200_000],
    *[[], [1], ["x"], {}, {"a": 1}, 0, 1, -1, 2, 7, 1.5, -0.5, 10**11, 10**30, 1e300],
    *[float("nan"), float("inf"), "thinking", "no-cot", "float16"],
]


def neighbours(value: Any) -> list[Any]:
    """Values that are nearly `value`: another sign, size, word or type."""
    if isinstance(value, bool):
        return [not value, int(value), str(value)]
    if isinstance(value, (int, float)):
        return [
            -value,
            value + 1,
            value - 1,
            value * 2,
            value / 2,
            str(value),
            [value],
            value * 1.0,
        ]
    if isinstance(value, str):
        return [value + "x", value[:-1], value.upper(), [value]]
    if isinstance(value, list):
        return [value + value, value[1:], [*value, None], [*value, -1]]
    return [None, {}]


@st.composite
def changes(draw, whole: dict[str, Any]) -> tuple[tuple, Any]:
    """(the way to a value in the JSON `whole`, what comes to stand there)."""
    way, value = (), whole
    while isinstance(value, (dict, list)) and value and (not way or draw(st.booleans())):
        key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        way, value = (*way, key), value[key]
    return way, draw(st.sampled_from(JUNK + neighbours(value)))


def changed(whole: Any, way: tuple, value: Any) -> Any:
    """`whole` with `value` at the end of the way."""
    if not way:
        return value
    copy = dict(whole) if isinstance(whole, dict) else list(whole)
    copy[way[0]] = changed(copy[way[0]], way[1:], value)
    return copy


def answers(found: Checkpoint) -> list:
    with suppress(ValueError):
        found.tokenizer.encode("Zoë\n<eos> 5 <unk>")
    results = generate(found.model, found.tokenizer, PROMPTS, max_new_tokens=12)
    return [(result.ids, result.thought_ids) for result in results]


@pytest.fixture(scope="module")
def usual() -> list:
    """What the shipped checkpoint answers."""
    found = answers(load_checkpoint(SHIPPED))
    assert all(ids[-1] == 0 and len(ids) > 5 for ids, _ in found)
    return found


FILES = ["config.json", "generation_config.json", "thinking.json", "tokenizer.json"]
READ = {each.name for each in fields(ConfigFile)}  # of config.json, where there is the other


def used(found: Checkpoint, file: str, key: str, value: Any) -> bool:
    """Whether a loaded model has the value, where it is one that the model's choices hold."""
    model = found.model
    if file == "thinking.json" and key != "max_thought_tokens":
        return found.about[key] == value and getattr(model.config, key, value) == value
    held = asdict(model.backbone.config) | asdict(model.config)
    held["eos_token_id"], held["pad_token_id"] = list(model.config.eos_ids), model.config.pad_id
    if file == "generation_config.json" and isinstance(value, list):
        value = list(dict.fromkeys(value))
    held["layer_types"] = ["sliding_attention"] * 4
    held |= {"use_sliding_window": bool(model.backbone.config.sliding_layers)}
    held |= {"max_window_layers": 0, "model_type": "qwen2", "hidden_act": "silu"}
    return held.get(key, value) in (value, [value])


SHARE = 400 if DEEP else 60


@settings(max_examples=SHARE)
@given(data=st.data())
def test_one_changed_key_of_a_model_folder_is_used_or_refused_by_name(usual, data):
    file = data.draw(st.sampled_from(FILES))
    whole = json.loads((SHIPPED / file).read_text())
    way, value = data.draw(changes(whole))
    names = [part for part in way if isinstance(part, str)]
    with copied(SHIPPED) as folder, warnings.catch_warnings(record=True) as noted:
        (folder / file).write_text(json.dumps(changed(whole, way, value)))
        try:
            found = load_checkpoint(folder)
            trained_task(folder, found.about)
        except Exception as error:
            told(error, file)
            assert any(name.lower() in str(error).lower().replace(" ", "_") for name in names)
            return
        try:
            now = answers(found)
        except ValueError as error:  # legal, and no vocabulary for these prompts
            assert file == "tokenizer.json" and names[0] in ("model", "pre_tokenizer", "normalizer")
            assert "vocabulary" in str(error)
            return
    if file != "tokenizer.json":
        key, new = way[0], changed(whole, way, value)[way[0]]
        inert = file == "config.json" and key not in READ
        silent = new is None or (key == "eos_token_id" and new == [])  # then the other file's
        said = any(key in str(each.message) for each in noted)
        assert inert or silent or said or used(found, file, key, new)
        if inert or silent:
            assert now == usual
    elif names[0] in ("truncation", "padding", "post_processor", "version"):
        assert now == usual


@pytest.fixture(scope="module")
def run_of(tmp_path_factory) -> Path:
    """A run folder with a checkpoint, of a training that has begun."""
    training = begin(tmp_path_factory.mktemp("run"))
    write_run(training.folder, training.plan)
    training.done = 3
    training.save()
    return training.folder


@settings(max_examples=100 if DEEP else 30)
@given(data=st.data())
def test_one_changed_key_of_run_json_is_used_or_refused_by_name(run_of, data):
    whole = json.loads((run_of / "run.json").read_text())
    way, value = data.draw(changes(whole))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.json").write_text(json.dumps(changed(whole, way, value)))
        try:
            found = run_json(read_run(folder))
        except Exception as error:
            told(error, "run.json", way[0])
            return
        assert found[way[0]] == value
        try:
            resumed(folder, {})
        except ValueError as error:  # legal, and not for this machine
            assert way[0] in str(error).replace("-", "_")


# -- files cut, bytes flipped ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(run_of, tmp_path_factory) -> Path:
    """The run's checkpoint, its backbone in two shards with an index."""
    run = Path(shutil.copytree(run_of, tmp_path_factory.mktemp("sharded") / "run"))
    (folder,) = (run / "checkpoints").iterdir()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for number in (1, 2):
        file = f"model-{number:05d}-of-00002.safetensors"
        part = names[: len(names) // 2] if number == 1 else names[len(names) // 2 :]
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return run


DAMAGED = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "thinking.safetensors",
    "training_state.pt",
]


def contents(run: Path) -> dict[str, Any]:
    """Every value that a resume reads."""
    state = read_state(run, "cpu")
    moments = state.pop("optimizer")
    return load_checkpoint(run).model.state_dict() | {"moments": moments, "state": state}


def same(one: Any, other: Any) -> bool:
    """Nested values that are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def header(content: bytes, file: str) -> int:
    """Bytes before tensor data begin; of a state all of it, for it has checksums."""
    is_tensors = file.endswith(".safetensors")
    return 8 + int.from_bytes(content[:8], "little") if is_tensors else len(content)


@settings(max_examples=300 if DEEP else 40)
@given(
    file=st.sampled_from(DAMAGED),
    cut=st.booleans(),
    place=st.floats(0, 1, exclude_max=True),
    mask=st.integers(1, 255),
)
def test_a_cut_file_or_a_flipped_byte_is_refused_by_name_or_changes_nothing(
    sharded, file, cut, place, mask
):
    with copied(sharded) as run:
        (path,) = run.glob(f"checkpoints/*/{file}")
        content = bytearray(path.read_bytes())
        if cut:
            content = content[: int(place * len(content))]
        else:
            content[int(place * header(content, file))] ^= mask
        path.write_bytes(content)
        try:
            found = contents(run)
        except Exception as error:
            told(error, file)
            return
        assert same(found, contents(sharded))
