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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import EVAL, FAST, PROMPT, QUICK, ROOT, SHORT, TRAIN, call, result, without_seconds

from minits import generate, load
from minits.checkpoint.files import locked
from minits.checkpoint.tiny import tiny_tokenizer
from minits.checkpoint.tokenizer import Tokenizer
from minits.checkpoint.weights import read_about
from minits.cli import train
from minits.cli.main import make_parser
from minits.cli.models import trained_method, trained_task
from minits.methods import METHODS
from minits.methods.plain import NoCoT
from minits.methods.thinking import Thinking
from minits.settings import setting
from minits.supervision import Example, Row
from minits.tasks import make_task
from minits.tasks.parity import Parity
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
    (figures,) = re.findall("^step 3/3  .*", out, re.MULTILINE)
    assert "answer " in figures and "thoughts" not in figures
    assert not list((empty / "run").rglob("thinking.safetensors"))
    status, out, err = call("infer", PROMPT, "--run", "run", "--json", "--max-new-tokens", "4")
    assert status == 0 and result(out)["thoughts"] == [] and f"{method} on parity" in err
    status, _, err = call("infer", PROMPT, "--run", "run", "--thought", "0= heads")
    assert status == 2 and "name a run of the method thinking" in err and "--think on" not in err


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
    # A checkpoint alone says so, too: of other examples its accuracy would be another.
    (checkpoint,) = (empty / "two" / "checkpoints").iterdir()
    alone = trained_task(checkpoint, read_about(checkpoint))
    assert alone == trained_task(empty / "two", {"task": "vars"})


def test_a_checkpoint_alone_knows_the_options_of_a_method_of_ones_own(empty, monkeypatch):
    @dataclass(frozen=True)
    class Mine(NoCoT):
        hint: str = setting("", "what prompts end with")

    monkeypatch.setitem(METHODS, "no-cot", Mine)
    options = ["--method", "no-cot", "--hint", "!", "--steps", "1"]
    assert call("train", "parity", *options, *SHORT, "--out", "own")[0] == 0
    (checkpoint,) = (empty / "own" / "checkpoints").iterdir()
    assert trained_method(checkpoint, read_about(checkpoint)) == Mine(hint="!")


def test_an_option_called_as_a_key_of_thinking_json_leaves_it_readable(empty, monkeypatch):
    @dataclass(frozen=True)
    class Mine(NoCoT):
        step: int = setting(2, "the checkpoint's own has this name")
        base_model: int = setting(3, "and so has this")

    monkeypatch.setitem(METHODS, "no-cot", Mine)
    options = ["--method", "no-cot", "--step", "5", "--steps", "1"]
    assert call("train", "parity", *options, *SHORT, "--out", "own")[0] == 0
    (checkpoint,) = (empty / "own" / "checkpoints").iterdir()
    about = read_about(checkpoint)
    assert (about["step"], about["base_model"]) == (1, "tiny")
    assert trained_method(checkpoint, about) == Mine()  # only its run says more
    assert trained_method(empty / "own", about) == Mine(step=5)


def test_a_method_of_ones_own_is_trained_on_the_prompt_that_infer_asks_with(empty, monkeypatch):
    @dataclass(frozen=True)
    class Twice(NoCoT):
        def prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
            return super().prompt(f"{text} {text}", tokenizer)

    monkeypatch.setitem(METHODS, "no-cot", Twice)
    assert call("train", "parity", "--method", "no-cot", "--steps", "1", *SHORT)[0] == 0
    example, tokenizer = make_task("parity").example("train", 0, 0), tiny_tokenizer()
    config = None  # is for methods that think
    usual, row = (kind().encode(example, tokenizer, config) for kind in (NoCoT, Twice))
    prompt = Twice().prompt(example.prompt, tokenizer)
    assert row.ids == prompt + usual.ids[usual.prompt_length :]
    assert row.prompt_length == len(prompt) > usual.prompt_length


def test_a_method_of_ones_own_that_infer_would_ask_otherwise_is_refused(empty, monkeypatch):
    @dataclass(frozen=True)
    class Mine(Thinking):
        def prompt(self, text: str, tokenizer: Tokenizer) -> list[int]:
            return super().prompt(f"{text} The coin.", tokenizer)

    monkeypatch.setitem(METHODS, "thinking", Mine)
    status, _, err = call(*TRAIN)
    assert status == 2 and "--method thinking: of " in err and "Let `encode` call `prompt`" in err
    assert list(empty.iterdir()) == []


def test_a_method_that_leaves_steps_out_is_evaluated_without_late_values(empty, monkeypatch):
    """A value of the answer names its step by number, and the numbers are others then."""

    @dataclass(frozen=True)
    class Last(Thinking):
        def encode(self, example: Example, *arguments: Any) -> Row:
            return super().encode(replace(example, steps=example.steps[-1:]), *arguments)

    monkeypatch.setitem(METHODS, "thinking", Last)
    status, out, _ = call(*TRAIN, "--json")
    assert status == 0 and result(out)["id"]["late_share"] is None


def test_a_value_without_its_step_is_told_before_the_first_step(empty, monkeypatch):
    draw = Parity.draw
    monkeypatch.setattr(Parity, "draw", lambda *given: replace(draw(*given), values=((0, 99),)))
    status, _, err = call(*TRAIN, "--out", "run")
    assert status == 2 and "example 0: a value of the answer names step 99" in err
    assert not Path("run").exists()


def test_a_checkpoint_of_a_method_that_is_gone_is_told_with_its_file(world, tmp_path):
    shutil.copytree(world / "trained" / "checkpoints" / "step-000003", tmp_path / "alone")
    file = tmp_path / "alone" / "thinking.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"method": "mine"}))
    for command in (["infer", PROMPT], ["eval"]):
        status, _, err = call(*command, "--run", tmp_path / "alone")
        assert status == 2 and "alone, thinking.json: method 'mine' is not known" in err


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
    # A constant rate, so that the run may be made shorter.
    flags = ["--steps", "5000", *SHORT, "--max-ops", "3", "--log-every", "1", "--decay", "0"]
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
    last, words = step + 9, shlex.split(err.split("continue with: ")[1])
    status, out, _ = call(*words[words.index("run.py") + 1 :], "--steps", last)
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


def interrupted(_plan, folder, **_) -> dict[str, object]:
    """In place of `run_training`: one that was interrupted."""
    return {"interrupted": True, "step": 3, "run": str(folder)}


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


# -- what a training chose, and stages after the first ---------------------------------------------


def test_the_longest_thought_of_a_training_is_the_default_everywhere_and_others_are_told(empty):
    flags = ["--max-thought-tokens", "7", "--out", "run", "--steps", "1"]
    assert call(*QUICK, *flags)[0] == 0
    for command in (["infer", PROMPT], ["eval", "--samples", "1", "--max-ops", "3"]):
        status, _, err = call(*command, "--run", "run")
        assert status == 0 and "--max-thought-tokens" not in err
        status, _, err = call(*command, "--run", "run", "--max-thought-tokens", "9")
        assert status == 0 and "--max-thought-tokens 9: trained with 7" in err
    status, out, _ = call("infer", PROMPT, "--run", "run", "--json", "--max-new-tokens", "2")
    # An untrained T hardly ever ends a thought: it is cut where training allows no longer one.
    assert status == 0 and result(out)["cut_thoughts"]
    model, tokenizer = load("run")
    assert model.config.max_thought_tokens == 7
    (cut,) = generate(model, tokenizer, [PROMPT], max_new_tokens=2)
    assert max(map(len, cut.thought_ids)) == 8


def test_a_second_stage_starts_from_the_first_whatever_its_method_was(empty):
    assert call(*QUICK, "--method", "cot", "--out", "A")[0] == 0
    status, out, err = call(*QUICK, "--model", "A", "--out", "B")
    assert status == 0 and "look: python run.py infer --run=B" in out
    assert "thinking on parity" in call("infer", PROMPT, "--run", "B", *FAST)[2]
    assert call("train", "--resume", "--out", "B")[0] == 0
    shutil.rmtree("A")
    assert call("train", "--resume", "--out", "B")[0] == 0  # it has all that it needs


def test_steps_after_a_finished_run_are_taken_or_the_command_that_works_is_given(empty):
    assert call(*QUICK, "--warmup", "0", "--out", "run")[0] == 0
    status, _, err = call("train", "--resume", "--out", "run", "--steps", "5")
    assert status == 2 and "--steps 5" in err.splitlines()[-1]
    words = shlex.split(err.splitlines()[-1].split("with: ")[-1].split("weights: ")[-1])
    assert words[:6] == ["python", "run.py", "train", "parity", "--model", "run"]
    assert call(*words[2:6], "--steps", "2", *SHORT, "--out", "more")[0] == 0
    assert call(*QUICK, "--decay", "0", "--out", "flat")[0] == 0
    assert call("train", "--resume", "--out", "flat", "--steps", "5")[0] == 0
    assert call("train", "--resume", "--out", "flat", "--steps", "2")[0] == 2
    assert json.loads(Path("flat/run.json").read_text())["steps"] == 5


def test_a_resume_clears_away_what_a_killed_process_wrote_half(finished):
    (finished / "metrics.jsonl.123.tmp").write_text("{")
    (finished / "checkpoints" / "step-000003.123.tmp").mkdir()
    assert call("train", "--resume", "--out", "run")[0] == 0
    assert list(finished.rglob("*.tmp")) == []


# -- runs of other makers --------------------------------------------------------------------------


def as_old(folder: Path) -> None:
    """Makes a run folder what revision c5f297b would have written."""
    file = folder / "run.json"
    run = json.loads(file.read_text())
    for name in ("save_dtype", "keep", "min_ops"):
        del run[name]
    file.write_text(json.dumps(run | {"variables": None, "modulus": None}))
    (checkpoint,) = (folder / "checkpoints").iterdir()
    about = json.loads((checkpoint / "thinking.json").read_text())
    del about["thinks"], about["max_thought_tokens"]
    (checkpoint / "thinking.json").write_text(json.dumps(about))
    state = torch.load(checkpoint / "training_state.pt")
    del state["stage"], state["settings"]
    torch.save(state, checkpoint / "training_state.pt")


def test_a_run_of_an_older_version_is_read_but_not_continued_inexactly(finished):
    before = call("infer", PROMPT, "--run", "run", "--json", "--max-new-tokens", "4")
    as_old(finished)
    after = call("infer", PROMPT, "--run", "run", "--json", "--max-new-tokens", "4")
    assert after[0] == 0 and without_seconds(result(after[1])) == without_seconds(result(before[1]))
    assert call("eval", "--run", "run", "--samples", "2")[0] == 0
    status, _, err = call("train", "--resume", "--out", "run")
    assert status == 2 and "saved by an older version" in err.splitlines()[-1]
    words = shlex.split(err.splitlines()[-1].split("with: ")[1])
    assert call(*words[2:], "--steps", "2", *SHORT, "--out", "more")[0] == 0


@pytest.mark.parametrize(
    "name, text",
    [("run.json", "{"), ("run.json", '{"task": "chess"}'), ("checkpoints", ""), ("run.json", None)],
    ids=["cut off", "of another task", "foreign weights", "no run.json"],
)
def test_a_broken_newest_run_is_passed_over_with_a_note(name, text, finished):
    Path("runs").mkdir()
    finished.rename("runs/good")
    shutil.copytree("runs/good", "runs/bad")
    os.utime("runs/bad/checkpoints/step-000003", (2**32, 2**32))
    if name == "checkpoints":
        for file in Path("runs/bad/checkpoints/step-000003").glob("thinking.*"):
            file.unlink()
        os.utime("runs/bad/checkpoints/step-000003", (2**32, 2**32))
    elif text is None:
        Path("runs/bad/run.json").unlink()
    else:
        Path("runs/bad/run.json").write_text(text)
    commands = (
        ["train", "--resume"],
        ["train", "parity", "--resume"],
        ["infer", PROMPT, *FAST],
        ["eval", "--samples", "1"],
    )
    for command in commands:
        status, _, err = call(*command)
        assert status == 0 and "passed over: runs/bad" in err and "runs/good" in err, err


def test_two_trainings_of_one_second_get_folders_of_their_own(empty, monkeypatch):
    monkeypatch.setattr(train.time, "strftime", lambda _: "20300101-000000")
    draw, made = session.evaluation_rows, Path("runs/parity-thinking-s0-20300101-000000")
    assert call(*TRAIN)[0] == 0

    def meanwhile(*arguments):
        """Another one, that was not there yet as the name was chosen."""
        made.with_name(f"{made.name}-2").mkdir(exist_ok=True)
        return draw(*arguments)

    monkeypatch.setattr(session, "evaluation_rows", meanwhile)
    status, out, _ = call(*TRAIN, "--json")
    third = f"{made}-2-2"
    assert status == 0 and result(out)["run"] == third and f"--run={third}" in out
    assert Path(third, "record.json").exists()
    assert list(made.with_name(f"{made.name}-2").iterdir()) == []


# -- the process around it -------------------------------------------------------------------------


def python(*arguments: str, **how) -> subprocess.CompletedProcess:
    """`run.py` in a process of its own."""
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **how)


def test_ctrl_c_while_torch_is_imported_leaves_no_traceback(empty):
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", ROOT / "run.py", *QUICK],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    for line in process.stderr:  # what has been imported, one a line
        if "torch" in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130) and "Traceback" not in err
    assert list(empty.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell does")
@pytest.mark.parametrize("closed, arguments", [(0, ["infer", "--file", "-"]), (2, TRAIN)])
def test_a_closed_stream_is_an_empty_one(closed, arguments, empty):
    done = python(*arguments, preexec_fn=lambda: os.close(closed))
    assert "Traceback" not in done.stderr and done.returncode == (2 if closed == 0 else 0)
    assert closed or "standard input is closed" in done.stderr


def test_a_character_that_the_output_lacks_is_replaced(inside):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = python(*EVAL, env=environment)
    assert done.returncode == 0 and "operations" in done.stdout and " ? " in done.stdout
