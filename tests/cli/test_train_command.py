"""`run.py train`: the run folder and its record, what goes wrong, Ctrl-C and --resume."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_helpers import FAST, PROMPT, QUICK, ROOT, SHORT, call, result

from minits.checkpoint.files import locked
from minits.cli import train
from minits.cli.main import make_parser
from minits.cli.sources import trained_task
from minits.tasks.vars import Vars
from minits.training import session

# -- the run folder and its record -----------------------------------------------------------------


def test_training_leaves_a_whole_run_folder(world):
    run_folder = world / "trained"
    assert {path.name for path in run_folder.iterdir()} == {
        "run.json",
        "metrics.jsonl",
        "record.json",
        "checkpoints",
        "predictions_id.jsonl",
        "predictions_ood.jsonl",
    }
    (checkpoint,) = (run_folder / "checkpoints").iterdir()
    assert checkpoint.name == "step-000003"
    assert {path.name for path in checkpoint.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "thinking.json",
        "thinking.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_state.pt",
    }
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert list(run_folder.rglob("*.tmp")) == []


def test_last_line_of_train_json_is_the_record(world):
    status, out, err = json.loads((world / "training.txt").read_text())
    figures = result(out)
    assert status == 0 and 0 <= figures["accuracy_id"] <= 1 and 0 <= figures["accuracy_ood"] <= 1
    assert figures == json.loads((world / "trained" / "record.json").read_text())
    assert err.splitlines()[0] == "run folder trained"


def test_record_says_what_is_needed_to_trust_and_repeat_the_run(world):
    record = json.loads((world / "trained" / "record.json").read_text())
    assert record.keys() >= {
        *("command", "date", "revision", "seed", "machine", "torch", "python", "accuracy_id"),
        *("accuracy_ood", "steps", "train_seconds", "id", "ood", "run", "settings"),
    }
    assert record["steps"] == record["settings"]["steps"] == 3 and record["id"]["n"] == 4
    assert record["id"]["operations"][1] <= 10 <= record["ood"]["operations"][0]
    assert record["settings"] == json.loads((world / "trained" / "run.json").read_text())


def test_train_without_out_makes_a_run_that_infer_and_resume_find(empty):
    status, out, _ = call(*QUICK, "--json")
    assert status == 0
    (folder,) = (empty / "runs").iterdir()
    assert folder.name.startswith("parity-thinking-s0-")
    assert result(out)["run"] == f"runs/{folder.name}"
    weights = (folder / "checkpoints" / "step-000003" / "model.safetensors").read_bytes()
    status, again, _ = call("train", "parity", "--resume", "--json")
    assert status == 0 and result(again)["id"] == result(out)["id"] and result(again)["steps"] == 3
    assert (folder / "checkpoints" / "step-000003" / "model.safetensors").read_bytes() == weights
    assert f"model runs/{folder.name}:" in call("infer", PROMPT, "--max-thought-tokens", "4")[2]


def test_training_without_saving_does_not_point_to_a_checkpoint(empty):
    status, out, _ = call(*QUICK, "--no-save", "--out", "run")
    assert status == 0 and not list(empty.rglob("*.safetensors"))
    assert "infer --run" not in out


# -- methods and tasks -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["no-cot", "cot"])
def test_baselines_train_evaluate_and_answer_without_thoughts(method, empty):
    status, out, _ = call(*QUICK, "--method", method, "--out", "run", "--json")
    assert status == 0 and result(out)["id"]["thought_accuracy"] is None
    assert not list((empty / "run").rglob("thinking.safetensors"))
    status, out, err = call("infer", PROMPT, "--run", "run", "--json", "--max-new-tokens", "4")
    assert status == 0 and result(out)["thoughts"] == [] and f"{method} on parity" in err


def test_vars_trains_with_its_own_options(empty):
    flags = "--variables 2 --modulus 5 --max-ops 3 --max-thought-tokens 12".split()
    arguments = ["train", "vars", "--steps", "2", *SHORT, *flags, "--json", "--out", "run"]
    status, out, _ = call(*arguments)
    assert status == 0 and result(out)["settings"]["variables"] == 2
    first = json.loads((empty / "run" / "predictions_id.jsonl").read_text().splitlines()[0])
    assert first["prompt"].count(";") == 1 and first["gold"].startswith("Final values: a=")


def test_a_run_of_vars_is_shown_with_its_own_options_and_evaluated_on_another_task_too(empty):
    options = ["--variables", "2", "--modulus", "5", "--steps", "1"]
    assert call("train", "vars", *options, *SHORT, "--out", "two")[0] == 0
    status, out, _ = call("infer", "--run", "two", "--json", *FAST)
    shown = result(out)["prompt"]
    values = [int(number) for number in re.findall(r"\d+", shown)]
    assert status == 0 and max(values) < 5 and "b=" in shown and "c=" not in shown
    short = ["--samples", "2", "--max-ops", "3", "--max-thought-tokens", "4"]
    assert call("eval", "parity", "--run", "two", *short)[0] == 0
    assert trained_task(empty / "two", {"task": "vars"}).variables == 2


# -- one training at a time, and what a run was trained with ---------------------------------------


@pytest.fixture
def finished(world, empty) -> Path:
    """A finished run of three steps, `run` in an otherwise empty working directory."""
    shutil.copytree(world / "trained", empty / "run")
    return empty / "run"


def test_a_folder_has_one_training_at_a_time(finished):
    with locked(Path("run")):
        status, _, err = call("train", "--resume", "--out", "run")
    assert status == 2 and "another process is training there" in err.splitlines()[-1]
    assert call("train", "--resume", "--out", "run")[0] == 0  # it was let go of


def test_who_waits_for_a_folder_reads_nothing_of_it(finished, monkeypatch):
    """What it had read could be old when its turn comes."""
    monkeypatch.setattr(session, "set_up", lambda *_: pytest.fail("it was read"))
    with locked(Path("run")):
        assert call("train", "--resume", "--out", "run")[0] == 2


def test_two_starts_do_not_share_a_new_folder(empty, monkeypatch):
    """The other one makes it while this one loads."""
    draw = session.evaluation_rows

    def meanwhile(*arguments):
        Path("run").mkdir(exist_ok=True)
        return draw(*arguments)

    monkeypatch.setattr(session, "evaluation_rows", meanwhile)
    status, _, err = call(*QUICK, "--out", "run")
    assert status == 2 and "run cannot be made (File exists)" in err.splitlines()[-1]
    assert list(Path("run").iterdir()) == []


def test_a_whole_number_in_run_json_does_for_any_number_and_recipes_of_others_do_not_matter(
    finished, monkeypatch
):
    file = finished / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"clip": 1}))
    # A setting that this run has no value for.
    changed = Vars.recipes["*", "tiny"] | {"revision": "main"}
    monkeypatch.setitem(Vars.recipes, ("*", "tiny"), changed)
    assert call("train", "--resume", "--out", "run")[0] == 0


def test_a_resumed_run_without_a_checkpoint_says_that_it_starts_anew(empty):
    assert call(*QUICK, "--out", "run", "--no-save")[0] == 0
    status, _, err = call("train", "--resume", "--out", "run")
    assert status == 0 and "no checkpoint: from the start" in err
    assert "resumed_after_step" not in json.loads(Path("run/record.json").read_text())


# -- what goes wrong -------------------------------------------------------------------------------


def test_diverged_training_exits_1_and_says_at_which_step_and_what_to_do(empty):
    status, _, err = call(*QUICK, "--lr", "1e30", "--warmup", "0", "--out", "run")
    assert status == 1 and "Traceback" not in err
    assert "step 2: loss" in err.splitlines()[-1] and "Lower --lr" in err.splitlines()[-1]


def test_full_disk_is_told_in_one_line_without_a_traceback(empty, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    status, _, err = call(*QUICK, "--out", "run")
    assert status in (1, 2) and "No space left on device" in err.splitlines()[-1]


# -- Ctrl-C ----------------------------------------------------------------------------------------


def test_ctrl_c_exits_130_with_a_checkpoint_and_the_printed_command_goes_on(empty):
    flags = ["--steps", "5000", *SHORT, "--max-ops", "3", "--log-every", "1"]
    process = subprocess.Popen(
        [sys.executable, ROOT / "run.py", "train", "parity", "--out", "run", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("step 1/5000")
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    (checkpoint,) = (empty / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert 1 <= step < 5000 and f"interrupted after step {step};" in err
    # So many steps left no hurry to interrupt; there is no need to wait for all of them.
    file, last = empty / "run" / "run.json", step + 9
    file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": last}))
    words = shlex.split(err.split("continue with: ")[1])
    status, out, _ = call(*words[words.index("run.py") + 1 :])
    assert status == 0
    assert out.splitlines()[0].startswith(f"step {step + 1}/{last}")
    lines = (empty / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, last + 1))


def test_ctrl_c_while_evaluating_leaves_a_run_to_resume_and_says_where_it_goes_on(
    empty, monkeypatch
):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session, "measure", stop)
        status, _, err = call(*QUICK, "--out", "run")
    said = err.splitlines()[-1]
    assert status == 130 and "after step 3; continue with: python run.py train" in said
    status, _, err = call("train", "--resume", "--out", "run")
    assert status == 0 and "it goes on after step 3 of 3" in err
    assert json.loads(Path("run/record.json").read_text())["resumed_after_step"] == 3


def interrupted(*_, **__) -> dict[str, object]:
    """In place of `run_training`: one that was interrupted."""
    return {"interrupted": True, "step": 3}


@pytest.mark.parametrize("folder", ["my run", "-run"])
def test_resume_command_can_be_pasted_into_a_shell(folder, empty, monkeypatch):
    monkeypatch.setattr(train, "run_training", interrupted)
    status, _, err = call(*QUICK, f"--out={folder}")
    assert status == 130
    words = shlex.split(err.split("continue with: ")[1])
    assert words[:2] == ["python", "run.py"]
    asked = make_parser().parse_args(words[2:])
    assert (asked.task, asked.out, asked.resume) == ("parity", folder, True)


def test_interrupted_run_without_saving_offers_no_resume(empty, monkeypatch):
    monkeypatch.setattr(train, "run_training", interrupted)
    status, _, err = call(*QUICK, "--no-save", "--out", "run")
    assert status == 130 and "interrupted after step 3" in err and "--resume" not in err
