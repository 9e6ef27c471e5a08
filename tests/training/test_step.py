"""One optimizer step: what its gradient is, what may not change it, a loss that is not finite."""

from __future__ import annotations

from math import isfinite

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Shape, fresh, shapes, training_rows
from training_helpers import (
    assert_close,
    assert_same_bits,
    begin,
    break_loss,
    gradients,
    metrics_of,
    silent,
    snapshot,
    step_on,
    sums,
    train,
    train_step,
)

from minits.checkpoint.weights import load
from minits.fast import cross_entropy
from minits.supervision import Row
from minits.training.loop import TrainingError

# -- the gradient ----------------------------------------------------------------------------------


@given(st.data())
def test_gradient_of_a_step_is_that_of_the_rows_summed_losses_over_the_steps_token_counts(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape))
    accumulate = data.draw(st.sampled_from([1, 2, 4]))
    training, _ = step_on(shape, rows, accumulate=accumulate, thought_weight=0.5)
    model = fresh(shape)
    lm_tokens = sum(len(row.ids) - row.prompt_length for row in rows)
    thought_tokens = sum(len(thought) for row in rows for thought in row.thoughts)
    for row in rows:
        lm, thought = sums(model, [row])
        (lm / lm_tokens + 0.5 * thought / max(thought_tokens, 1)).backward()
    assert_close(gradients(training.model), gradients(model))


@given(st.data())
def test_accumulation_changes_neither_gradient_nor_weights_nor_reported_losses(data):
    shape = data.draw(shapes())
    rows = data.draw(training_rows(shape, rows=6))
    whole, reported = step_on(shape, rows)
    split, metrics = step_on(shape, rows, accumulate=data.draw(st.sampled_from([2, 4])))
    assert_close(gradients(split.model), gradients(whole.model))
    assert_close(split.model.state_dict(), whole.model.state_dict())
    assert metrics == pytest.approx(reported, rel=1e-9, abs=1e-9)


@given(st.data())
def test_slicing_the_logits_changes_no_gradient_of_a_step(data):
    shape = data.draw(shapes(max_chunk=6))
    rows = data.draw(training_rows(shape))
    whole, _ = step_on(shape, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "LOGIT_SLICE", 2)
        sliced, _ = step_on(shape, rows)
    assert_close(gradients(sliced.model), gradients(whole.model))


PARTIAL = Row([3, 4, 5, 0], 2, [])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("case", "rows"),
    [
        ("all thoughts trivial", [Row(list(range(3, 16)), 8, [[0]] * 3)] * 2),
        ("no complete chunk", [PARTIAL] * 2),
        ("one row of each kind", [PARTIAL, Row(list(range(3, 16)), 8, [[0], [7, 8, 0], [0]])]),
    ],
)
def test_batch_without_thoughts_or_complete_chunks_gives_finite_loss_and_gradients(
    case, rows, accumulate
):
    training, metrics = step_on(Shape(), rows, accumulate=accumulate)
    assert isfinite(metrics["lm_loss"]) and isfinite(metrics["thought_loss"])
    assert metrics["grad_norm"] > 0
    assert (metrics["thought_loss"] == 0) == (case == "no complete chunk")
    parameters = list(training.model.parameters())
    assert all(p.grad is None or p.grad.isfinite().all() for p in parameters)
    assert all(p.isfinite().all() for p in parameters)


# -- the weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nearly_all_parameters_change_within_a_few_steps_of_a_small_rate(dtype, tmp_path):
    training = begin(tmp_path, steps=4, lr=1e-5, warmup=0, dtype=dtype)
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    train(training, silent)
    after = dict(training.model.named_parameters())
    assert {p.dtype for p in after.values()} == {torch.float32}
    changed = sum(int((after[name] != before[name]).sum()) for name in before)
    assert changed / sum(p.numel() for p in before.values()) > 0.9


def test_steps_are_adamws_on_clipped_gradients_and_only_matrices_decay(tmp_path):
    lr, decay, clip = 1e-3, 0.5, 0.1
    training = begin(tmp_path, lr=lr, warmup=0, decay=0.0, weight_decay=decay, clip=clip)
    parameters = dict(training.model.named_parameters())
    p = {name: each.detach().clone() for name, each in parameters.items()}
    m = {name: torch.zeros_like(each) for name, each in p.items()}
    v = {name: torch.zeros_like(each) for name, each in p.items()}
    for t in (1, 2, 3):
        rows = training.stream.rows(t - 1)
        training.optimizer_step.gradients(training.stream.parts(rows))
        grads = {name: each.grad.clone() for name, each in parameters.items()}
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        assert norm > 2 * clip
        metrics = train_step(training, rows)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert metrics["tokens"] == sum(len(row.ids) - 1 for row in rows)
        for name, g in grads.items():
            g = g * clip / norm
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.99 * v[name] + 0.01 * g.square()
            p[name] *= 1 - lr * decay * (p[name].dim() > 1)
            mean, square = m[name] / (1 - 0.9**t), v[name] / (1 - 0.99**t)
            p[name] -= lr * mean / (square.sqrt() + 1e-8)
            torch.testing.assert_close(parameters[name].detach(), p[name], rtol=1e-4, atol=2e-6)
            moment = training.optimizer_step.optimizer.state[parameters[name]]["exp_avg"]
            torch.testing.assert_close(moment, m[name], rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("method", ["no-cot", "cot"])
def test_baselines_have_no_thinking_and_no_compression_block(method, tmp_path):
    training = begin(tmp_path, method=method, steps=2)
    train(training, silent)
    model = training.model
    assert model.thinking_block is None and model.compression_block is None
    assert all(name.startswith("backbone.") for name, _ in model.named_parameters())
    assert [line["thought_loss"] for line in metrics_of(tmp_path)] == [0, 0]
    assert not load(tmp_path)[0].thinks


# -- a loss that is not finite ---------------------------------------------------------------------


def test_nan_loss_stops_with_the_step_and_rows_and_leaves_the_weights_unchanged(tmp_path):
    training = begin(tmp_path)
    break_loss(training, step=3)
    for step in range(2):
        train_step(training, training.stream.rows(step))
    before = snapshot(training)
    rows = training.stream.rows(2)
    names = f"{rows[0].name} … {rows[-1].name}"
    with pytest.raises(TrainingError, match=f"^step 3: .*nan.*{names}.*Lower --lr"):
        train_step(training, rows)
    assert training.done == 2
    assert_same_bits(snapshot(training), before)


def test_after_a_failed_step_the_next_one_counts_again(tmp_path):
    training = begin(tmp_path)
    broken = break_loss(training, step=1)
    with pytest.raises(TrainingError):
        train_step(training, training.stream.rows(0))
    broken.remove()
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    train_step(training, training.stream.rows(1))
    after = training.model.state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_a_gradient_that_is_not_finite_stops_the_run_though_the_losses_are(tmp_path):
    training = begin(tmp_path)
    training.model.backbone.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = snapshot(training)
    with pytest.raises(TrainingError, match="^step 1: .*gradient norm (inf|nan)"):
        train_step(training, training.stream.rows(0))
    assert_same_bits(snapshot(training), before)


def test_steps_without_effect_do_not_set_a_stopped_training_going(tmp_path):
    step = begin(tmp_path).optimizer_step
    for stopped in (0.0, 1.0):
        step.stopped.fill_(stopped)
        with step.without_effect():
            assert step.stopped
        assert step.stopped == stopped
