"""--keep-best: the weights that were best on the first evaluation set are the run's in the end."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_helpers import (
    SHORT,
    assert_same_bits,
    begin,
    checkpoints_in,
    metrics_of,
    press_ctrl_c,
    settings,
    silent,
    train,
)

from minits.checkpoint.weights import load
from minits.methods import make_method
from minits.tasks import make_task
from minits.tasks.rows import Rows
from minits.training import loop, run_folder, session
from minits.training.loop import Training
from minits.training.scoring import Report
from minits.training.recipe import Plan
from minits.training.session import run_training

KEEPING = {"keep_best": True, "eval_every": 3, "eval_samples": 5}  # of 12 steps: 3, 6, 9 and 12


@pytest.fixture(autouse=True)
def no_collection(monkeypatch) -> None:
    """Spares a training the look at all objects before it, which takes a third of the time here."""
    monkeypatch.setattr(loop, "objects_frozen", nullcontext)


class Judge:
    """Has every evaluation on the first set find the accuracy that is meant for the step."""

    def __init__(self, monkeypatch, *accuracies: float) -> None:
        self.script = dict(zip((3, 6, 9, 12), accuracies))
        self.seen: list[tuple[int, int]] = []  # (step, samples) of each evaluation
        self.weights: list[dict[str, torch.Tensor]] = []  # that it was of
        self.measure = loop.measure
        monkeypatch.setattr(loop, "measure", self)
        monkeypatch.setattr(session, "measure", self)

    def __call__(self, training: Training, rows: list, *rest: Path) -> Report:
        self.seen.append((training.done, len(rows)))
        state = training.model.state_dict()
        self.weights.append({name: x.clone() for name, x in state.items()})
        return self.measure(training, rows, *rest) | {"accuracy": self.script[training.done]}

    def at(self, step: int) -> dict[str, torch.Tensor]:
        """The weights when they were first evaluated after `step`."""
        return self.weights[[done for done, _ in self.seen].index(step)]


def whole(folder: Path, log=silent, **changes) -> dict:
    """A whole run, its figures."""
    chosen = settings(**(KEEPING | changes))
    plan = Plan(chosen, make_task("parity", **SHORT), make_method("thinking"))
    return run_training(plan, folder, log=log, note=silent, named=True)


def best_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("best/*"))


CASES = {
    "the middle": ((0.2, 0.6, 0.4, 0.5), 6),
    "the last": ((0.2, 0.6, 0.4, 0.7), 12),
    "a tie: the later": ((0.2, 0.6, 0.6, 0.5), 9),
    "a tie with the last": ((0.6, 0.1, 0.6, 0.6), 12),
    "nothing right": ((0.0, 0.0, 0.0, 0.0), 12),
}


@pytest.mark.parametrize(
    "name, no_save", [*((name, False) for name in CASES), ("the middle", True), ("the last", True)]
)
def test_the_best_weights_are_evaluated_in_the_end(name, no_save, tmp_path, monkeypatch):
    accuracies, best = CASES[name]
    judge, said, run = Judge(monkeypatch, *accuracies), [], tmp_path / "run"
    figures = whole(run, said.append, no_save=no_save)
    assert figures["best_step"] == best and figures["steps"] == 12
    # Each on all samples; the last weights once more than needed only if they lost.
    evaluations = [(3, 5), (6, 5), (9, 5), (12, 5), (12, 5)] + [(12, 5)] * (best < 12)
    assert judge.seen == evaluations
    for final in judge.weights[4 if best < 12 else 3 :]:
        assert_same_bits(final, judge.at(best))
    verdicts = [line.splitlines()[-1] for line in said if line.startswith(("step 3:", "step 6:"))]
    second = (
        "the best so far" if accuracies[1] >= accuracies[0] else "best so far: 60.00% at step 3"
    )
    assert verdicts == ["the best so far", second]
    assert f"the best weights are those of step {best}" in said
    assert best_in(run) == ([] if no_save else [f"step-{best:06d}"])


def test_a_finished_run_is_opened_at_its_best(tmp_path, monkeypatch):
    judge, run = Judge(monkeypatch, 0.2, 0.6, 0.4, 0.5), tmp_path / "run"
    whole(run)
    kept = run / "best" / "step-000006"
    about = json.loads((kept / "thinking.json").read_text())
    assert (about["step"], about["valid_accuracy"], about["task"]) == (6, 0.6, "parity")
    assert not (kept / "training_state.pt").exists()
    assert checkpoints_in(run) == ["step-000012"]
    assert_same_bits(load(run)[0].state_dict(), judge.at(6))
    following = settings(model=str(run), steps=2)
    plan = Plan(following, make_task("parity"), make_method("thinking"))
    model, _ = session.make_model(plan, [])
    assert_same_bits(model.state_dict(), judge.at(6))
    # More steps are to come: the run is not over, and goes on from its last ones.
    run_json = run / "run.json"
    run_json.write_text(json.dumps(json.loads(run_json.read_text()) | {"steps": 15}))
    assert_same_bits(load(run)[0].state_dict(), judge.at(12))
    # Without them, to save room, there is still the best.
    shutil.rmtree(run / "checkpoints")
    assert_same_bits(load(run)[0].state_dict(), judge.at(6))


def test_keeping_the_best_changes_no_step(tmp_path):
    for name, keep_best in (("with", True), ("without", False)):
        train(begin(tmp_path / name, **(KEEPING | {"keep_best": keep_best})), silent)
    assert metrics_of(tmp_path / "with") == metrics_of(tmp_path / "without")
    states = [
        load(tmp_path / name / "checkpoints" / "step-000012")[0] for name in ("with", "without")
    ]
    assert_same_bits(*(model.state_dict() for model in states))


@pytest.mark.parametrize(
    "stop, accuracies",
    [
        (6, (0.2, 0.6, 0.4, 0.5)),  # before the evaluation that is due
        (7, (0.2, 0.6, 0.4, 0.5)),
        (9, (0.7, 0.6, 0.4, 0.5)),
    ],
)
def test_a_resumed_run_knows_the_best_so_far(stop, accuracies, tmp_path, monkeypatch):
    judge, run = Judge(monkeypatch, *accuracies), tmp_path / "run"
    undisturbed = whole(tmp_path / "whole")
    training = begin(run, **KEEPING)
    press_ctrl_c(training, stop)
    assert not train(training, silent) and checkpoints_in(run) == [f"step-{stop:06d}"]
    figures = whole(run)
    assert figures["best_step"] == undisturbed["best_step"] == (6 if accuracies[0] < 0.6 else 3)
    wanted = load(tmp_path / "whole")[0].state_dict()
    assert_same_bits(load(run)[0].state_dict(), wanted)
    assert_same_bits(judge.weights[-1], wanted)


def test_steps_done_again_after_a_crash_do_not_compete_again(tmp_path, monkeypatch):
    """Their weights are the same ones, and what stands in best is whole all the time."""
    Judge(monkeypatch, 0.5, 0.2, 0.5, 0.4)
    crashed = begin(tmp_path, **KEEPING, save_every=2)
    monkeypatch.setattr(crashed, "save", lambda: None)  # it comes to none
    train(crashed, silent)
    again = begin(tmp_path, **KEEPING)
    assert (again.done, again.best_step, again.best_accuracy) == (0, 9, 0.5)
    found = []
    monkeypatch.setattr(
        loop, "describe", lambda *_: found.append((again.best_step, *best_in(tmp_path))) or ""
    )
    train(again, silent)
    assert found == [(9, "step-000009")] * 3


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("some of rust's")])
def test_a_best_that_cannot_be_written_leaves_the_one_before(error, tmp_path, monkeypatch):
    Judge(monkeypatch, 0.2, 0.6, 0.4, 0.5)
    training, write = begin(tmp_path, **KEEPING), run_folder.write_model

    def full(model, tokenizer, folder: Path, about: dict, dtype) -> None:
        if about["step"] == 6:
            (folder / "half").touch()
            raise error
        write(model, tokenizer, folder, about, dtype=dtype)

    monkeypatch.setattr(run_folder, "write_model", full)
    with pytest.raises(OSError, match="best/step-000006 cannot be written .*nothing is the last"):
        train(training, silent)
    assert best_in(tmp_path) == ["step-000003"]
    load(tmp_path / "best" / "step-000003")


def test_a_kill_before_the_old_best_is_dropped_leaves_the_new_one(tmp_path, monkeypatch):
    Judge(monkeypatch, 0.2, 0.6, 0.4, 0.5)
    training = begin(tmp_path, **KEEPING)

    def killed(*_, **__) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            train(training, silent)
    assert best_in(tmp_path) == ["step-000003", "step-000006"]
    assert run_folder.best_so_far(tmp_path) == (6, 0.6)


def test_without_the_flag_nothing_is_kept(tmp_path):
    figures = whole(tmp_path / "run", keep_best=False)
    assert "best_step" not in figures and best_in(tmp_path / "run") == []


def test_what_there_is_nothing_to_choose_from_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="--keep-best: .*give --eval-every STEPS"):
        whole(tmp_path / "run", eval_every=0)
    train_file = tmp_path / "rows.jsonl"
    line = {"question": "One and one is", "steps": [], "answer": "two"}
    train_file.write_text((json.dumps(line) + "\n") * 8)
    chosen = replace(settings(**KEEPING), task="rows")
    plan = Plan(chosen, Rows(train=str(train_file)), make_method("thinking"))
    with pytest.raises(ValueError, match="--eval-every 3: the task has nothing to evaluate on"):
        run_training(plan, tmp_path / "run", log=silent, note=silent, named=True)
    assert not (tmp_path / "run").exists()
