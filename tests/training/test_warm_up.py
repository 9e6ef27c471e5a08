"""T's warm-up (methods/thinking.py): T says the next chunk's tokens, and nothing else is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_step_graphs import pretend_card, use_graphs
from training_helpers import (
    SHORT,
    assert_same_bits,
    checkpoints_in,
    gradients,
    metrics_of,
    press_ctrl_c,
    settings,
    silent,
    snapshot,
    train,
    train_step,
)

from minits.cli import main
from minits.fast.flat_batch import FlatBatch, collate, teacher_forced
from minits.fast.layouts import BucketedSizes
from minits.methods import make_method
from minits.supervision import Row, encode_example
from minits.tasks import make_task
from minits.training.loop import Training
from minits.training.recipe import Plan
from minits.training.session import set_up

WARM_UP = 5  # steps
LAYOUTS = ["rows", "pack", "long_rows"]


def begin(folder: Path, thought_warmup: int = WARM_UP, **changes) -> Training:
    """As in training_helpers, with a warm-up."""
    folder.mkdir(parents=True, exist_ok=True)
    method = make_method("thinking", thought_warmup=thought_warmup)
    return set_up(Plan(settings(**changes), make_task("parity", **SHORT), method), folder)


def hidden(training: Training, batch: FlatBatch) -> torch.Tensor:
    embed = training.model.backbone.model.embed_tokens
    return teacher_forced(training.model, batch, embed(batch.ids), embed(batch.thoughts))[0]


def test_the_stages_share_the_steps():
    def steps(thought_warmup: int, whole: int) -> list[int]:
        return [
            s.steps for s in make_method("thinking", thought_warmup=thought_warmup).stages(whole, 4)
        ]

    assert [steps(0, 12), steps(5, 12), steps(11, 12)] == [[12], [5, 7], [11, 1]]
    for thought_warmup in (12, 20):
        with pytest.raises(ValueError, match=f"--thought-warmup {thought_warmup}: of --steps 12 "):
            steps(thought_warmup, 12)


@pytest.mark.parametrize("limit", [2, 8])
def test_a_thought_is_the_next_chunk_of_the_plain_text_then_eos(limit, tmp_path):
    training = begin(tmp_path, chunk_size=4, max_thought_tokens=32)
    example, config = training.stream.example(0), training.model.config
    method, tokenizer = training.method, training.tokenizer
    plain = encode_example(example, tokenizer, config)
    object.__setattr__(config, "max_thought_tokens", limit)
    text = plain.ids[:-1]
    row = method.encode(example, tokenizer, config, "x", stage=0)
    assert row.ids == text and row.prompt_length == len(text) and row.name == "x"
    chunks = [text[start : start + 4] for start in range(0, len(text), 4)]
    assert [t[:-1] for t in row.thoughts] == [chunk[:limit] for chunk in chunks[1:]]
    assert {t[-1] for t in row.thoughts} == {config.thought_end}
    object.__setattr__(config, "max_thought_tokens", 32)
    for stage in (1, -1):
        assert method.encode(example, tokenizer, config, stage=stage) == plain
    assert make_method("thinking").encode(example, tokenizer, config, stage=0) == plain


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [None, BucketedSizes])
def test_nothing_but_t_is_asked_and_no_state_is_read(layout, sizes, tmp_path):
    training = begin(tmp_path, layout=layout, row_tokens=96)
    stream, model = training.stream, training.model
    stream.sizes = sizes(least=1) if sizes else stream.sizes
    rows = stream.rows(0)
    (batch,) = stream.parts(rows)
    said = sum(len(thought) for row in rows for thought in row.thoughts)
    assert batch.counts.tolist() == [0, said] and said
    losses = training.method.losses(model, batch)
    assert losses.lm == 0 and losses.thought.isfinite() and losses.thought > 0
    (losses.lm + losses.thought).backward()
    found = gradients(model)
    assert not any(found[name].any() for name in found if name.startswith("compression"))
    assert any(found[name].any() for name in found if name.startswith("thinking"))
    how = {"layout": layout, "row_tokens": 96, "sizes": stream.sizes}
    bare = [Row(row.ids, row.prompt_length, thoughts=[]) for row in rows]
    plain = collate(bare, model.config, **how)
    states = collate(rows, model.config, **how)
    torch.testing.assert_close(hidden(training, batch), hidden(training, plain))
    assert not torch.allclose(hidden(training, states), hidden(training, plain))


def test_t_learns_in_its_thought_warmup_and_what_has_no_part_in_it_stays(tmp_path):
    training = begin(tmp_path, 40, steps=41, warmup=0, decay=0.0)
    press_ctrl_c(training, 40)
    C = {name: p.clone() for name, p in training.model.compression_block.named_parameters()}
    train(training, silent)
    lines = metrics_of(tmp_path)
    assert len(lines) == 40
    assert {line["lm_loss"] for line in lines} == {0.0}
    assert lines[-1]["thought_loss"] < 0.6 * lines[0]["thought_loss"]
    assert_same_bits(dict(training.model.compression_block.named_parameters()), C)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[dict, list[dict]]:
    folder = tmp_path_factory.mktemp("whole")
    training = begin(folder)
    assert train(training, silent)
    return snapshot(training), metrics_of(folder)


@pytest.mark.parametrize("step", [3, WARM_UP, WARM_UP + 2])
def test_a_resume_within_the_thought_warmup_at_its_end_and_after_it_is_exact(
    step, tmp_path, uninterrupted, monkeypatch
):
    training = begin(tmp_path)
    start = Training.begin_stage

    def pressed(self) -> None:  # the optimizer, and what hangs on it, is new in each stage
        start(self)
        press_ctrl_c(self, step)

    press_ctrl_c(training, step)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "begin_stage", pressed)
        assert train(training, silent) is False
    assert checkpoints_in(tmp_path) == [f"step-{step:06d}"]
    resumed = begin(tmp_path)
    assert resumed.stage_number == int(step >= WARM_UP)
    assert train(resumed, silent)
    weights, metrics = uninterrupted
    assert_same_bits(snapshot(resumed), weights)
    assert metrics_of(tmp_path) == metrics
    assert [line["lm_loss"] == 0 for line in metrics] == [line["step"] <= 5 for line in metrics]


def test_another_length_of_the_thought_warmup_is_another_training(tmp_path):
    train(begin(tmp_path, steps=6), silent)
    with pytest.raises(ValueError, match="thought_warmup 5 in thinking.json, 4 in run.json"):
        begin(tmp_path, 4, steps=6)


def test_steps_through_graphs_are_the_plain_steps_in_both_stages(tmp_path, monkeypatch):
    pretend_card(monkeypatch)
    plain, graphed = (
        begin(tmp_path / name, thought_warmup=3, steps=6) for name in ("plain", "graphed")
    )
    for step in range(6):
        if step in (0, 3):
            for training in (plain, graphed):
                training.begin_stage()
            use_graphs(graphed)
            graphed.stream.sizes = BucketedSizes(least=1)
        rows = plain.stream.rows(step)
        expected = train_step(plain, rows)
        assert train_step(graphed, rows) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert plain.stage_number == 1


def test_the_command_line_trains_with_a_thought_warmup(tmp_path):
    options = "--device cpu --batch-size 4 --max-ops 3 --eval-max-ops 4 --eval-samples 2"
    out = tmp_path / "run"
    flags = f"train parity --steps 4 --thought-warmup 2 {options} --out".split()
    assert main.main([*flags, str(out)]) == 0
    assert [line["lm_loss"] > 0 for line in metrics_of(out)] == [False, False, True, True]
