"""iCoT (methods/icot.py), and what stages share: when the optimizer begins anew, and what counts."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_step_graphs import pretend_card, use_graphs
from training_helpers import (
    QUICK,
    SHORT,
    assert_same_bits,
    metrics_of,
    press_ctrl_c,
    settings,
    silent,
    snapshot,
    train,
    train_step,
)

from minits.checkpoint.tiny import tiny_tokenizer
from minits.cli import main
from minits.fast.layouts import BucketedSizes
from minits.methods import make_method
from minits.supervision import Example, Step
from minits.tasks import make_task
from minits.training import loop
from minits.training.loop import Training
from minits.training.recipe import Plan
from minits.training.session import run_training, set_up

STEPS = tuple(Step(0, text) for text in ("heads tails", "tails", "heads heads tails"))
EXAMPLE = Example("The coin starts at state heads.", STEPS, "heads")
CHAIN = 6  # tokens
TOKENIZER = tiny_tokenizer()
CURRICULUM = {"stage_samples": 8, "remove_all_at": 3, "smoothing": 2.0}  # 2, 2, 2 and 6 steps


def rest(method, stage: int, example: Example = EXAMPLE, name: str = "row") -> list[int]:
    row = method.encode(example, TOKENIZER, None, name, stage)
    assert row.ids[: row.prompt_length] == TOKENIZER.encode(example.prompt) and row.name == name
    return row.ids[row.prompt_length :]


def begin(folder: Path, method: str = "icot", options: dict | None = None, **changes) -> Training:
    folder.mkdir(parents=True, exist_ok=True)
    made = make_method(method, **(CURRICULUM if options is None else options))
    chosen = settings(method=method, **changes)
    return set_up(Plan(chosen, make_task("parity", **SHORT), made), folder)


# -- what is removed -------------------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(1, 9))
def test_tokens_go_from_the_left_and_in_the_end_all(stage, all_at):
    method = make_method("icot", remove_all_at=all_at, smoothing=100.0)
    whole = rest(make_method("cot"), 0)
    taken = CHAIN if stage >= all_at else min(stage, CHAIN)
    assert rest(method, stage) == whole[taken:]
    assert rest(method, -1) == rest(make_method("no-cot"), 0)


@pytest.mark.parametrize("stage, taken", [(0, 0), (1, 2), (2, 3), (3, 6), (4, 6), (-1, 6)])
def test_steps_go_whole(stage, taken):
    method = make_method("icot", removal="steps")
    assert rest(method, stage) == rest(make_method("cot"), 0)[taken:]
    longer = replace(EXAMPLE, steps=STEPS * 2)  # than there are stages
    assert rest(method, -1, longer) == rest(make_method("no-cot"), 0)


def test_a_chain_of_no_step_is_an_answer():
    bare = Example(EXAMPLE.prompt, (), EXAMPLE.answer)
    for removal in ("tokens", "steps"):
        assert rest(make_method("icot", removal=removal), 0, bare) == rest(
            make_method("no-cot"), 0, bare
        )


def test_the_extra_tokens_follow_their_distribution_and_the_sample():
    method, n = make_method("icot"), 4000
    whole = len(rest(make_method("cot"), 0))
    lost = [whole - len(rest(method, 2, name=f"row {i}")) - 2 for i in range(n)]
    assert lost == [whole - len(rest(method, 2, name=f"row {i}")) - 2 for i in range(n)]
    assert lost != [whole - len(rest(method, 1, name=f"row {i}")) - 1 for i in range(n)]
    shares = Counter(lost)
    # p(o) ~ exp(-4 o): 0.982, 0.018, 0.0003; four standard errors.
    for o, p in enumerate((0.98168, 0.01798, 0.00033)):
        assert abs(shares[o] / n - p) < 4 * (p * (1 - p) / n) ** 0.5


# -- the schedule ----------------------------------------------------------------------------------


def test_the_schedule_for_our_rows():
    stages = make_method("icot").stages(11_500, 64)
    assert [s.steps for s in stages] == [125] * 60 + [4000]
    assert [s.partial for s in stages] == [True] * 60 + [False]
    fresh = [number for number, stage in enumerate(stages) if stage.fresh]
    assert fresh == [*range(0, 60, 10), 60] and all(stage.resets for stage in stages)
    by_steps = make_method("icot", removal="steps", keep_optimizer=True).stages(2000, 64)
    assert [s.steps for s in by_steps] == [328] * 4 + [688]
    assert all(stage.fresh for stage in by_steps)  # so each is evaluated
    assert not any(stage.resets for stage in by_steps)
    quick = make_method("icot", removal="steps", stage_samples=1)  # a step a stage at least
    assert [s.steps for s in quick.stages(5, 64)] == [1] * 5
    with pytest.raises(ValueError, match="--steps 4: the 4 stages .* take 1 each"):
        quick.stages(4, 64)


def test_too_few_steps_for_the_schedule_are_refused_before_anything_is_written(tmp_path, capsys):
    flags = f"train parity --method icot --device cpu --steps 400 --out {tmp_path / 'run'}"
    assert main.main(flags.split()) == 2
    told = capsys.readouterr().err
    assert "--steps 400: the 60 stages before the last one take 250 each" in told
    assert "--stage-samples 8000" in told and not (tmp_path / "run").exists()


# -- what stages share -----------------------------------------------------------------------------


def new_optimizer(training: Training) -> None:
    """What a reset in place has to equal."""
    training.optimizer_step.optimizer.state.clear()


@pytest.mark.parametrize("keep", [False, True])
def test_a_stage_resets_the_optimizer_unless_it_is_kept(keep, tmp_path):
    options = CURRICULUM | {"keep_optimizer": keep}
    training, plain = (begin(tmp_path / name, options=options) for name in ("one", "two"))
    assert train(training, silent)
    for step in range(12):
        if step in (2, 4, 6):
            plain.begin_stage()
            if not keep:
                new_optimizer(plain)
        train_step(plain, plain.stream.rows(step))
    assert_same_bits(snapshot(training), snapshot(plain))
    state = training.optimizer_step.optimizer.state_dict()["state"]
    steps = {float(s["step"]) for s in state.values()}
    assert steps == {12.0 if keep else 6.0}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 5, 9])
def test_a_resume_within_a_stage_and_between_two_is_exact(keep, stop, tmp_path):
    options = CURRICULUM | {"keep_optimizer": keep}
    whole, training = (begin(tmp_path / name, options=options) for name in ("whole", "half"))
    train(whole, silent)
    press_ctrl_c(training, stop)
    assert not train(training, silent)
    resumed = begin(tmp_path / "half", options=options)
    assert resumed.done == stop and train(resumed, silent)
    assert_same_bits(snapshot(resumed), snapshot(whole))
    assert metrics_of(tmp_path / "half") == metrics_of(tmp_path / "whole")


def test_graphs_serve_all_stages_of_a_block(tmp_path, monkeypatch):
    pretend_card(monkeypatch)
    options = {"layout": "pack", "row_tokens": 64}
    plain, graphed = (begin(tmp_path / name, **options) for name in ("plain", "graphed"))
    use_graphs(graphed)
    graphed.stream.sizes = BucketedSizes()
    captures = []
    for step in range(12):
        if step in (2, 4, 6):
            for training in (plain, graphed):
                training.begin_stage()
        if step == 6:
            assert not graphed.optimizer_step.graphs.captured
            graphed.stream.sizes = BucketedSizes()
        rows = plain.stream.rows(step)
        expected = train_step(plain, rows)
        assert train_step(graphed, rows) == pytest.approx(expected, rel=1e-3, abs=1e-6)
        captures.append(id(*graphed.optimizer_step.graphs.captured.values()))
    # The first batches may be outgrown; what came to stay serves the stages after it.
    assert captures[2] == captures[3] == captures[4] == captures[5]


def test_each_part_is_evaluated_as_it_was_trained_and_only_the_last_can_be_best(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "objects_frozen", nullcontext)
    said, seen, measure = [], [], loop.measure

    def looked(training, rows, *rest):
        lengths = {len(row.ids) - row.prompt_length for _, row in rows}
        seen.append((training.done, max(lengths)))
        return measure(training, rows, *rest)

    monkeypatch.setattr(loop, "measure", looked)
    chosen = settings(method="icot", keep_best=True, eval_every=9, eval_samples=5)
    method = make_method("icot", removal="steps", stage_samples=8, remove_all_at=3)
    plan = Plan(chosen, make_task("parity", **SHORT), method)
    figures = run_training(plan, tmp_path / "run", log=said.append, note=silent, named=True)
    told = [line.split(":")[0] for line in said if line.startswith("step ")]
    told = [line for line in told if "/" not in line]
    assert told == [*(f"step {2 * n + 2} ({n} steps removed)" for n in range(3)), "step 9"]
    assert not any("best" in line for line in said if " removed)" in line)
    assert figures["best_step"] >= 9 and not list((tmp_path / "run").glob("best/step-000006"))
    steps, lengths = zip(*seen[:4])
    assert steps == (2, 4, 6, 9) and lengths[0] > lengths[1] > lengths[2] > lengths[3]


def test_the_command_line_trains_and_evaluates(tmp_path, capsys):
    out = tmp_path / "run"
    quick = [f"--{k.replace('_', '-')}={v}" for k, v in (QUICK | SHORT | CURRICULUM).items()]
    assert main.main(["train", "parity", "--method=icot", f"--out={out}", *quick]) == 0
    assert main.main(["eval", f"--run={out}", "--samples=4"]) == 0
    assert "step 6 (2 tokens removed): accuracy" in capsys.readouterr().out
    assert torch.load(out / "checkpoints/step-000012/training_state.pt")["stage"] == 3
