"""The bench measures what it says: laid-down thoughts enter where they should, and every line has its figures."""
import json

import pytest
import torch
from strategies import Shape, fresh, write_checkpoint

import run
from minits.lab.bench import Forced, bench_drafts, bench_end_to_end, bench_prefill, weights_bytes
from minits.generation import GenerationConfig, prefill
from minits.checkpoint.weights import load

LIMITS = {"bandwidth": 1e10, "matmul": 1e11}
SHAPE = Shape(vocab=1024, limit=512, chunk_size=4)


@pytest.mark.parametrize("how", ["sequential", "speculative"])
@pytest.mark.parametrize("where", [set(), {0}, {3, 4}, {0, 2, 6}])
@pytest.mark.parametrize("length", [1, 5])
def test_laid_down_thoughts_arise_exactly_where_they_were_laid(how, where, length):
    forced = Forced(fresh(SHAPE, torch.float32), 8, where, length, sequential=how == "sequential")
    config = GenerationConfig(max_new_tokens=1, prefill=how, max_thought_tokens=8)
    reading = prefill(forced, [[5 + i for i in range(32)]], config)
    assert [len(z.ids) for z in reading.thoughts[0]] == [length + 1 if k in where else 1 for k in range(8)]
    assert reading.rounds == [8 if how == "sequential" else len(where) + 1]


def test_t_takes_as_many_steps_as_a_thought_of_that_length(monkeypatch):
    model = fresh(SHAPE, torch.float32)
    steps = []
    hook = model.thinking_block.register_forward_hook(lambda _m, inputs, _o: steps.append(inputs[0].shape[1]))
    prefill(Forced(model, 8, {2}, 5, sequential=True), [[5] * 32], GenerationConfig(max_new_tokens=1, prefill="sequential"))
    hook.remove()
    assert steps.count(4) == 8 and steps.count(1) == 5  # one pass a chunk; five tokens and EOS after the first token
    assert not model.blocked.any()


def test_every_prefill_line_has_both_times_and_their_ratio():
    lines = bench_prefill(fresh(SHAPE, torch.float32), LIMITS, chunks=6, where=[0, 2, 5], lengths=(1, 3), repeats=1)
    compared = [line for line in lines if "ratio" in line]
    assert [(line["R"], line["thought_tokens"]) for line in compared] == [
        (0, 1), (2, 1), (2, 3), (5, 1), (5, 3)]
    for line in compared:
        assert line["ratio"] == pytest.approx(line["sequential"]["ms"] / line["trivial"]["ms"])


def test_the_end_to_end_line_has_its_bound():
    line = bench_end_to_end(fresh(SHAPE, torch.float32), chunks=6, steps=2, length=3, answer=4, repeats=1)
    assert line["share"] == pytest.approx(line["ratio"] / line["bound"]) and line["ratio"] > 0


def test_drafts_are_compared_with_sequential():
    model, tokenizer = load("minits/assets/parity")
    lines = bench_drafts(model, [tokenizer.encode("The coin starts at state heads. Bob flips the coin.")], 1)
    assert lines[0]["prefill"] == "sequential" and lines[0]["over_sequential"] == 1
    assert len(lines) == 13


def test_a_step_reads_all_layers_the_norm_and_the_unembedding_once():
    model = fresh(SHAPE, torch.float32)
    backbone = sum(p.numel() for p in model.backbone.parameters())
    assert weights_bytes(model) == 4 * backbone  # tied: the embedding is the unembedding


def test_the_command_prints_one_json_line_last(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "model", SHAPE)
    assert run.main(["bench", "decode", "--model", str(folder), "--repeats", "1", "--device", "cpu", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["lines"][1]["tokens_per_s"] > 0 and figures["path"] == "packed"


@pytest.mark.parametrize("arguments, words", [
    (["bench"], "needs --model"), (["bench", "drafts"], "needs --run"), (["bench", "speed", "--model", "x"], "the part is"),
    (["bench", "--model", "./nowhere"], "no folder ./nowhere")])
def test_bad_input_is_one_line_and_status_2(arguments, words, capsys):
    assert run.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
