"""The bench measures what it says: thoughts enter where they were laid down, lines are whole."""

import gc
import json
import weakref
from dataclasses import replace
from functools import partial

import pytest
import run
import torch
from strategies import Shape, fresh, write_checkpoint

import minits.lab.bench_train
from minits.checkpoint.weights import load
from minits.cli import bench as command
from minits.cli.models import SHIPPED, open_model
from minits.generation import GenerationConfig, prefill
from minits.lab.bench import (
    LaidDown,
    bench_drafts,
    bench_prefill,
    ratio,
    summary,
    time_interleaved,
    weights_bytes,
)
from minits.lab.bench_train import bench_train
from minits.training.recipe import TrainSettings

LIMITS = {"copy_TB_per_s": 0.01, "matmul_TFLOP_per_s": 0.1}
SHAPE = Shape(vocab=1024, limit=512, chunk_size=4)


@pytest.mark.parametrize("how", ["sequential", "speculative"])
@pytest.mark.parametrize("where", [set(), {0}, {3, 4}, {0, 2, 6}])
@pytest.mark.parametrize("length", [1, 5])
def test_laid_down_thoughts_arise_exactly_where_they_were_laid(how, where, length):
    model = fresh(SHAPE, torch.float32)
    hook = LaidDown(model, where, length)
    config = GenerationConfig(max_new_tokens=1, prefill=how, max_thought_tokens=8, hook=hook)
    reading = prefill(model, [[5 + i for i in range(32)]], config)
    lengths = [len(thought.ids) for thought in reading.thoughts[0]]
    assert lengths == [length + 1 if k in where else 1 for k in range(8)]
    assert reading.rounds == [8 if how == "sequential" else len(where) + 1]


def test_t_takes_as_many_steps_as_a_thought_of_that_length():
    model = fresh(SHAPE, torch.float32)
    steps = []

    def note(_module, inputs, _out):
        steps.append(inputs[0].shape[1])

    handle = model.thinking_block.register_forward_hook(note)
    laid_down = LaidDown(model, {2}, 5)
    config = GenerationConfig(max_new_tokens=1, prefill="sequential", hook=laid_down)
    prefill(model, [[5] * 32], config)
    handle.remove()
    # One pass a chunk; five tokens and EOS after the first token.
    assert steps.count(4) == 8 and steps.count(1) == 5
    assert not model.blocked.any()


def test_every_prefill_line_has_both_times_and_their_ratio():
    model = fresh(SHAPE, torch.float32)
    lines = bench_prefill(model, LIMITS, chunks=6, counts=[0, 2, 5], repeats=1)
    compared = [line for line in lines if "ratio" in line]
    kinds = [(line["R"], line["thought_tokens"]) for line in compared]
    assert kinds == [(0, 1), (2, 1), (2, 8), (5, 1), (5, 8)]
    for line in compared:
        assert line["ratio"] == pytest.approx(line["sequential"]["ms"] / line["trivial"]["ms"])
        assert line["ratio_by_round"].keys() == {"median", "least", "most"}


def test_a_ratio_tells_its_spread_over_the_rounds():
    # The first two calls are warm-up. The slow moment of the third round hits both sides.
    one, other = [99, 98, 2, 20, 4, 6], [1, 1, 1, 10, 1, 2]
    assert ratio(one, other) == {
        "ratio": 5 / 1.5,
        "ratio_by_round": {"median": 2.5, "least": 2, "most": 4},
    }


def test_sides_take_turns_and_the_first_calls_are_told_apart():
    calls = []
    one, other = map(
        summary, time_interleaved([lambda: calls.append("a"), lambda: calls.append("b")], repeats=3)
    )
    assert calls == ["a", "b"] * 5
    assert one.keys() == other.keys() == {"ms", "least", "most", "first"}


def test_steps_with_and_without_thoughts_are_compared(tmp_path, monkeypatch):
    folder = str(write_checkpoint(tmp_path / "model", replace(SHAPE, limit=2048)))
    few = partial(TrainSettings, batch_size=4)  # the recipe's 128 rows take 15 s on a CPU
    monkeypatch.setattr(minits.lab.bench_train, "TrainSettings", few)
    lines = list(bench_train(folder, "cpu", "float32", False, 1))
    ratios = {line["what"]: line["ratio"] for line in lines if "ratio" in line}
    assert list(ratios) == ["thinking over no-cot on parity", "thinking over no-cot on vars"]
    assert all(ratio > 0 for ratio in ratios.values())
    assert all("ratio_by_round" in line for line in lines if "ratio" in line)


def test_drafts_are_compared_with_sequential():
    model, tokenizer = load(SHIPPED)
    prompt = tokenizer.encode("The coin starts at state heads. Bob flips the coin.")
    lines = list(bench_drafts(model, [prompt], 1))
    assert lines[0]["prefill"] == "sequential" and lines[0]["over_sequential"] == 1
    for line in lines:
        over = line["time"]["ms"] / line["sequential"]["ms"]
        assert line["over_sequential"] == over and line["ratio_by_round"]["least"] > 0
    ways = [(line["draft"], line["lookahead"]) for line in lines[1:]]
    assert len(ways) == 8
    assert set(ways) == {(d, n) for d in ("trivial", "carry") for n in (None, 1, 2, 4)}


def test_a_step_reads_all_layers_the_norm_and_the_unembedding_once():
    model = fresh(SHAPE, torch.float32)
    backbone = sum(p.numel() for p in model.backbone.parameters())
    assert weights_bytes(model) == 4 * backbone  # tied: the embedding is the unembedding


def test_the_command_prints_a_line_a_measurement_and_one_json_line_last(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "model", SHAPE)
    where = ["--model", str(folder), "--device", "cpu"]
    assert run.main(["bench", "decode", *where, "--repeats", "1", "--json"]) == 0
    *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["lines"][1]["tokens_per_s"] > 0 and last["path"] == "plain"
    assert [line["what"] for line in lines] == [line["what"] for line in last["lines"]]


def test_a_training_is_measured_with_the_memory_of_one_model(tmp_path, monkeypatch):
    opened = []

    def open_and_watch(flags):
        found = open_model(flags)
        opened.append(weakref.ref(found.engine))
        return found

    def lines(*_):
        gc.collect()
        yield {"what": "there", "model": opened[0]() is not None}

    monkeypatch.setattr(command, "open_model", open_and_watch)
    monkeypatch.setattr(command, "bench_train", lines)
    folder = write_checkpoint(tmp_path / "model", SHAPE)
    flags = {"part": "train", "model": str(folder), "device": "cpu"}
    record, _ = command.run(flags)
    assert record["lines"] == [{"what": "there", "model": False}]


def test_ctrl_c_keeps_what_was_measured_and_each_line_is_told_at_once(
    tmp_path, capsys, monkeypatch
):
    told = []

    def lines(*_):
        yield {"what": "first", "ms": 1.23456}
        told.append(capsys.readouterr().out)
        yield {"what": "second", "ms": 2.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "bench", lines)
    folder = write_checkpoint(tmp_path / "model", SHAPE)
    flags = ["bench", "decode", "--model", str(folder), "--device", "cpu", "--json"]
    assert run.main(flags) == 130
    assert json.loads(told[0]) == {"what": "first", "ms": 1.235}
    out, err = capsys.readouterr()
    second, record = map(json.loads, out.splitlines())
    assert [line["what"] for line in record["lines"]] == ["first", second["what"]]
    assert record["interrupted"] is True and record["lines"][0]["ms"] == 1.23456
    assert err.splitlines()[-1].startswith("interrupted: 2 measurements were made")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["bench"], ["needs --model"]),
        (["bench", "drafts"], ["needs --run"]),
        (["bench", "speed", "--model", "x"], ["PART", "'speed'", "prefill", "train"]),
        (["bench", "--model", "./nowhere"], ["no folder ./nowhere"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, words, capsys):
    try:
        status = run.main(arguments)
    except SystemExit as stop:  # argparse's way out
        status = stop.code
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []
    assert status == 2 and error.count("\n") == 1
