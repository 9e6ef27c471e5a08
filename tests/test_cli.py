"""The command line as a person meets it: bad input costs one line and nothing else, good input does what it says."""
from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import run
import torch
from strategies import Shape, write_checkpoint

import minits.training.loop
from minits.cli import commands
from minits.cli.commands import SHIPPED
from minits.training.recipe import RECIPES
from minits.checkpoint.files import held
from minits.tasks import TASKS
from minits.tasks.parity import Parity

ROOT = Path(__file__).parent.parent
PROMPT = "The coin starts at state heads. Alice flips the coin. Bob doesn't flip the coin."
SHORT = "--batch-size 4 --eval-samples 4 --eval-max-ops 12 --max-thought-tokens 4".split()
QUICK = ["train", "parity", "--steps", "3", *SHORT]


def call(*arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of run.py, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = run.main([str(a) for a in arguments])
        except SystemExit as stop:  # argparse's way out
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def result(out: str) -> dict:
    """The JSON object on the last line of stdout."""
    return json.loads(out.splitlines()[-1])


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path under `folder` and every file's bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with a short trained run, a plain checkpoint, broken ones, and files to trip over."""
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
    shutil.copytree(world / "trained", world / "torn")
    state = world / "torn" / "checkpoints" / "step-000003" / "training_state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    shutil.copytree(world / "trained", world / "emptied")
    (world / "emptied" / "checkpoints" / "step-000003" / "training_state.pt").write_bytes(b"")
    shutil.copytree(world / "trained", world / "stateless")
    torch.save({"step": 3}, world / "stateless" / "checkpoints" / "step-000003" / "training_state.pt")
    shutil.copytree(world / "trained", world / "unlabelled")
    (world / "unlabelled" / "checkpoints" / "step-000003" / "thinking.json").unlink()
    for name, change in {"shorter": {"steps": 2}, "wordy": {"steps": "many"}, "rechunked": {"chunk_size": 4},
                         "relayered": {"inject_after": 2},
                         "negative": {"warmup": -5}, "undecided": {"steps": None}}.items():
        shutil.copytree(world / "trained", world / name)
        file = world / name / "run.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    (world / "filled").mkdir()
    (world / "filled" / "thesis.txt").write_text("years of work")
    (world / "empty.txt").write_text("\n  \n")
    (world / "latin1.txt").write_bytes("Zürich".encode("latin-1"))
    (world / "good-then-long.txt").write_text(f"{PROMPT}\nThe{' coin' * 2100}\n")
    return world


@pytest.fixture
def inside(world, monkeypatch) -> Iterator[Path]:
    """`world` as the working directory; a run that a test left there does not reach the next one."""
    monkeypatch.chdir(world)
    yield world
    shutil.rmtree(world / "runs", ignore_errors=True)


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- bad input ---------------------------------------------------------------------------------------------------------

INFER = ["infer", "--run", "trained"]
TRAIN = ["train", "parity", "--steps", "1", *SHORT]
EVAL = ["eval", "parity", "--run", "trained", "--samples", "2", "--max-ops", "12", "--max-thought-tokens", "4"]
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")

# name -> command line, and what the message must hold: what was found, and what to do.
BAD = {
    # infer: prompts
    "empty prompt": ([*INFER, ""], ["empty", "Give at least one character"]),
    "prompt beyond the positions": ([*INFER, "The" + " coin" * 2100], ["2101 tokens", "2048", "Shorten"]),
    "new tokens beyond the positions": ([*INFER, PROMPT, "--max-new-tokens", "9999"],
                                        ["2048", "lower max_new_tokens to"]),
    "a later prompt of a file too long": ([*INFER, "--file", "good-then-long.txt"],
                                          ["prompt 1", "2101 tokens", "Shorten"]),
    "word outside the vocabulary": ([*INFER, "The coin sings"], ["' sings'", "Use these words", "--model"]),
    "prompt and file": ([*INFER, PROMPT, "--file", "empty.txt"], ["PROMPT", "--file", "use one of them"]),
    "no such file": ([*INFER, "--file", "nope.txt"], ["nope.txt", "no such file", "empty.txt"]),
    "file without a prompt": ([*INFER, "--file", "empty.txt"], ["empty.txt", "no prompt", "write one a line"]),
    "file that is not UTF-8": ([*INFER, "--file", "latin1.txt"], ["latin1.txt", "UTF-8", "Convert"]),
    "folder as a file": ([*INFER, "--file", "filled"], ["filled is a folder", "thesis.txt"]),
    "prompt that is not UTF-8": ([*INFER, "The coin \udcff"], ["'The coin \\udcff' is not UTF-8", "Convert"]),
    # train: presets
    "no task": (["train"], ["parity, vars", "--preset"]),
    "unknown preset": (["train", "--preset", "table9/x"], ["table9/x", "table1/vars-20-thinking"]),
    "preset and another setting": (["train", "--preset", "tiny/parity-cot", "--steps", "7"], ["steps 7 (preset: 400)"]),
    "preset of real weights on the tiny model": (["train", "--preset", "table1/parity-10-cot"], ["--model tiny", "FOLDER"]),
    "layout": ([*TRAIN, "--layout", "heap"], ["heap", "long_rows"]),
    "negative weight": ([*TRAIN, "--thought-weight", "-1"], ["--thought-weight -1.0", "positive"]),
    "weight that is no number": ([*TRAIN, "--weight-decay", "nan"], ["--weight-decay nan", "positive"]),
    "seed of too many bits": ([*TRAIN, "--seed", str(2 ** 63)], [f"--seed {2 ** 63}", "2^63 - 1"]),
    "evaluation of less than no operations": ([*TRAIN, "--eval-max-ops", "-3"], ["--eval-max-ops -3", "at least 0"]),
    "decay": ([*TRAIN, "--decay", "2"], ["--decay 2.0", "from 0 to 1"]),
    "long rows beyond the positions": ([*TRAIN, "--layout", "long_rows", "--row-tokens", "4096"], ["4096", "2048"]),
    "report into a file without marks": (["report", "--write", "empty.txt"], ["empty.txt", "begin"]),
    # infer: flags
    "no new tokens": ([*INFER, PROMPT, "--max-new-tokens", "0"], ["max_new_tokens is 0", "at least 1"]),
    "no thought tokens": ([*INFER, PROMPT, "--max-thought-tokens", "0"], ["max_thought_tokens is 0", "1 …"]),
    "unknown prefill": ([*INFER, PROMPT, "--prefill", "nope"], ["'nope'", "speculative, sequential"]),
    "unknown draft": ([*INFER, PROMPT, "--draft", "nope"], ["'nope'", "trivial, carry"]),
    "unknown think": ([*INFER, PROMPT, "--think", "perhaps"], ["--think perhaps", "auto, on or off"]),
    "run and model": ([*INFER, PROMPT, "--model", "plain"], ["--run", "--model", "name one"]),
    "chunk size against training": ([*INFER, PROMPT, "--chunk-size", "4"],
                                    ["chunk_size 4", "trained with 8", "leave it out"]),
    # infer: folders
    "no such run": (["infer", PROMPT, "--run", "nope"], ["--run nope", "no such folder", "empty.txt"]),
    "no such model": (["infer", PROMPT, "--model", "./nope"], ["./nope", "empty.txt", "Give a folder"]),
    "folder without weights": (["infer", PROMPT, "--model", "no-weights"],
                               ["no model.safetensors", "it holds config.json"]),
    "folder without config": (["infer", PROMPT, "--model", "filled"], ["no config.json", "it holds thesis.txt"]),
    "truncated shard": (["infer", PROMPT, "--model", "truncated"],
                        ["model-00002-of-00002", "no whole safetensors file", "Download it again"]),
    "Git-LFS pointer": (["infer", PROMPT, "--model", "pointer"], ["Git-LFS pointer", "git lfs pull"]),
    # devices
    "no CUDA": ([*INFER, PROMPT, "--device", "cuda"], ["--device cuda", "no CUDA", "--device cpu"]),
    "no CUDA to train on": ([*TRAIN, "--device", "cuda"], ["--device cuda", "no CUDA", "--device cpu"]),
    "MPS": ([*INFER, PROMPT, "--device", "mps"], ["--device mps", "only cpu and cuda"]),
    "no number of a card": ([*INFER, PROMPT, "--device", "cpu:x"], ["--device cpu:x", "number of a card"]),
    "drafts of a plain model": (["bench", "drafts", "--run", "plain"],
                                ["--run plain", "not trained to think", "method thinking"]),
    "unknown dtype": ([*INFER, PROMPT, "--dtype", "float16"], ["--dtype float16", "use float32"]),
    # train
    "unknown task": (["train", "pairty"], ["'pairty'", "parity, vars"]),
    "chunk size 0": ([*TRAIN, "--chunk-size", "0"], ["--chunk-size 0", "at least 1"]),
    "chunk size beyond the model": ([*TRAIN, "--chunk-size", "5000"], ["chunk size 5000", "1 … 1024"]),
    "no steps": ([*TRAIN, "--steps", "0"], ["--steps 0", "at least 1"]),
    "negative rate": ([*TRAIN, "--lr", "-1"], ["--lr -1", "positive"]),
    "rate that is no number": ([*TRAIN, "--lr", "nan"], ["--lr nan", "positive"]),
    "unknown method": ([*TRAIN, "--method", "nope"], ["--method 'nope'", "thinking, no-cot, cot"]),
    "layers out of order": ([*TRAIN, "--inject-after", "9"], ["inject_after 9", "<= 4"]),
    "training in float64": ([*TRAIN, "--dtype", "float64"], ["--dtype float64", "float32", "bfloat16"]),
    "option of another task": ([*TRAIN, "--modulus", "7"], ["--modulus: the task parity has no such option"]),
    "variables beyond the vocabulary": (["train", "vars", "--steps", "1", *SHORT, "--variables", "12"],
                                        ["' i'", "vocabulary"]),
    "training rows beyond the positions": ([*TRAIN, "--max-ops", "900"], ["2048"]),
    "evaluation beyond the positions": ([*TRAIN, "--eval-max-ops", "2000"], ["--eval-max-ops 2000", "2048"]),
    "thoughts beyond the positions": ([*TRAIN, "--max-thought-tokens", "4000"], ["4000", "2040"]),
    # train: folders
    "out is below a file": ([*TRAIN, "--out", "empty.txt/run"], ["empty.txt/run cannot be made", "--out"]),
    "eval into a file that is there": ([*EVAL, "--out", "filled/thesis.txt"], ["thesis.txt exists", "another file"]),
    "resume with an emptied state": (["train", "--resume", "--out", "emptied"], ["training_state.pt is damaged", "new run"]),
    "resume without thinking.json": (["train", "--resume", "--out", "unlabelled"], ["no thinking.json"]),
    "infer without thinking.json": (["infer", PROMPT, "--run", "unlabelled"], ["no thinking.json"]),
    "resume to fewer steps": (["train", "--resume", "--out", "shorter"], ["past the 2 steps", "run.json"]),
    "resume with a word for a number": (["train", "--resume", "--out", "wordy"], ["run.json: steps is 'many'"]),
    "resume with a state that is none": (["train", "--resume", "--out", "stateless"], ["is damaged (KeyError)"]),
    "resume with another layer": (["train", "--resume", "--out", "relayered"], ["inject_after 2", "trained with 1"]),
    "resume with other chunks": (["train", "--resume", "--out", "rechunked"], ["chunk_size 4", "trained with 8"]),
    "resume with a negative number": (["train", "--resume", "--out", "negative"], ["--warmup -5", "at least 0"]),
    "resume without a number": (["train", "--resume", "--out", "undecided"], ["older version", "new run"]),
    "bench of a small vocabulary": (["bench", "decode", "--model", "plain"], ["1000 ids", "260", "bench drafts"]),
    "bench train of a small vocabulary": (["bench", "train", "--model", "plain"], ["1000 ids", "260"]),
    "out is not empty": ([*TRAIN, "--out", "filled"],
                         ["--out filled", "thesis.txt", "Nothing is overwritten", "--resume"]),
    "out is a finished run": ([*TRAIN, "--out", "trained"], ["--out trained", "record.json", "--resume"]),
    "out is a file": ([*TRAIN, "--out", "empty.txt"], ["--out empty.txt", "it is a file", "name another folder"]),
    "resume in a folder not ours": (["train", "parity", "--out", "filled", "--resume"],
                                    ["filled is not a run", "--out"]),
    "resume in a folder not there": (["train", "parity", "--out", "nope", "--resume"], ["nope is not a run", "--out"]),
    "resume without any run": (["train", "parity", "--resume"], ["no run of parity", "python run.py train parity"]),
    "resume with other settings": (["train", "parity", "--out", "trained", "--resume", "--lr", "0.5"],
                                   ["--lr 0.5", "run: 0.003", "Leave it out"]),
    "resume with another task": (["train", "vars", "--out", "trained", "--resume"],
                                 ["vars", "run: parity", "start a new run"]),
    "resume from a torn state": (["train", "parity", "--out", "torn", "--resume"], ["training_state.pt"]),
    # eval and data
    "eval of an unknown task": (["eval", "pairty"], ["'pairty'", "parity, vars"]),
    "eval of no run": (["eval", "parity", "--run", "nope"], ["--run nope", "no such folder", "empty.txt"]),
    "eval without samples": ([*EVAL, "--samples", "0"], ["--samples 0", "at least 1"]),
    "eval with lengths exchanged": ([*EVAL, "--min-ops", "13"], ["--min-ops 13", "--max-ops 12", "exchange"]),
    "eval beyond the positions": ([*EVAL, "--min-ops", "900", "--max-ops", "900"], ["2048"]),
    "eval into a folder not there": ([*EVAL, "--out", "nope/predictions.jsonl"],
                                     ["--out nope/predictions.jsonl", "no"]),
    "data of an unknown task": (["data", "pairty"], ["'pairty'", "parity, vars"]),
    "data with chunk size 0": (["data", "parity", "--chunk-size", "0"], ["--chunk-size 0", "at least 1"]),
}
MARKS = {"no CUDA": no_cuda, "no CUDA to train on": no_cuda}


@pytest.mark.parametrize(("arguments", "words"), [
    pytest.param(*case, id=name, marks=MARKS.get(name, ())) for name, case in BAD.items()])
def test_bad_input_is_told_in_one_line_with_status_2_and_changes_no_file(arguments, words, inside):
    before = snapshot(inside)
    status, out, err = call(*arguments)
    after = snapshot(inside)
    assert [word for word in words if word not in err] == []
    assert status == 2 and "Traceback" not in out + err
    assert after == before
    assert out == ""
    assert err.startswith(f"run.py {arguments[0]}: ") and err.endswith("\n") and err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "words"), [
    pytest.param(["infer", "--no-such-flag"], ["--no-such-flag"], id="unknown flag"),
    pytest.param([*TRAIN, "--lr", "abc"], ["--lr", "'abc'"], id="word for a number"),
    pytest.param([*TRAIN, "--steps", "1.5"], ["--steps", "'1.5'"], id="fraction of a step"),
    pytest.param([*TRAIN, "--lr"], ["--lr", "expected one argument"], id="flag without value"),
    pytest.param(["dance"], ["'dance'", "train"], id="unknown command"),
    pytest.param([], ["COMMAND"], id="no command")])
def test_misused_command_line_shows_usage_on_stderr_with_status_2(arguments, words, inside):
    before = snapshot(inside)
    status, out, err = call(*arguments)
    assert status == 2 and out == "" and err.startswith("usage: run.py") and "Traceback" not in err
    assert [word for word in words if word not in err.splitlines()[-1]] == []
    assert snapshot(inside) == before


@pytest.mark.parametrize("arguments", [["--traceback", "infer", PROMPT, "--run", "nope"],
                                       ["infer", PROMPT, "--run", "nope", "--traceback"]])
def test_traceback_flag_lets_the_error_through_before_or_after_the_command(arguments, inside):
    with pytest.raises(FileNotFoundError, match="--run nope"):
        call(*arguments)


def test_a_real_process_prints_one_line_and_no_traceback(inside):
    command = [sys.executable, ROOT / "run.py", "train", "pairty"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"run.py train: task 'pairty' is not known; the tasks are: {', '.join(TASKS)}.\n"


def test_a_folder_has_one_training_at_a_time(empty):
    assert call(*QUICK, "--out", "run")[0] == 0
    with held(Path("run")):
        status, _, err = call("train", "--resume", "--out", "run")
    assert status == 2 and "another process is training there" in err.splitlines()[-1]
    assert call("train", "--resume", "--out", "run")[0] == 0  # it was let go of


def test_a_whole_number_in_run_json_does_for_any_number_and_recipes_of_others_do_not_matter(empty, monkeypatch):
    assert call(*QUICK, "--out", "run")[0] == 0
    file = Path("run/run.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"clip": 1}))
    monkeypatch.setitem(RECIPES, ("vars", "tiny"), RECIPES["vars", "tiny"] | {"variables": 2})
    assert call("train", "--resume", "--out", "run")[0] == 0


def test_who_waits_for_a_folder_reads_nothing_of_it(empty, monkeypatch):
    """What it had read could be old when its turn comes."""
    assert call(*QUICK, "--out", "run")[0] == 0
    monkeypatch.setattr(minits.training.loop, "set_up", lambda *_: pytest.fail("it was read"))
    with held(Path("run")):
        assert call("train", "--resume", "--out", "run")[0] == 2


def test_two_starts_do_not_share_a_new_folder(empty, monkeypatch):
    """The other one makes it while this one loads."""
    draw = minits.training.loop.evaluation_set
    monkeypatch.setattr(minits.training.loop, "evaluation_set", lambda *a: (Path("run").mkdir(exist_ok=True), draw(*a))[1])
    status, _, err = call(*QUICK, "--out", "run")
    assert status == 2 and "run cannot be made (File exists)" in err.splitlines()[-1]
    assert list(Path("run").iterdir()) == []


def test_ctrl_c_while_evaluating_leaves_a_run_to_resume_and_says_where_it_goes_on(empty, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(minits.training.loop, "measure", stop)
        status, _, err = call(*QUICK, "--out", "run")
    assert status == 130 and "interrupted after step 3; continue with: python run.py train" in err.splitlines()[-1]
    status, _, err = call("train", "--resume", "--out", "run")
    assert status == 0 and "it goes on after step 3 of 3" in err
    assert json.loads(Path("run/record.json").read_text())["resumed_after_step"] == 3


def test_a_resumed_run_without_a_checkpoint_says_that_it_starts_anew(empty):
    assert call(*QUICK, "--out", "run", "--no-save")[0] == 0
    status, _, err = call("train", "--resume", "--out", "run")
    assert status == 0 and "no checkpoint: from the start" in err
    assert "resumed_after_step" not in json.loads(Path("run/record.json").read_text())


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


# -- help --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", run.COMMANDS)
def test_help_of_every_command_exits_0_and_explains_every_flag(command, empty):
    status, out, err = call(command, "--help")
    assert status == 0 and err == "" and out.startswith(f"usage: run.py {command}")
    shown = "".join(out.split())  # argparse wraps lines, at hyphens too
    for field in fields(run.COMMANDS[command][0]):
        flag = field.name if field.name in ("task", "prompt", "part") else "--" + field.name.replace("_", "-")
        assert flag.lower() in shown.lower()
        assert "".join(field.metadata.get("help", "").split()) in shown, field.name


def test_help_without_a_command_lists_the_commands(empty):
    status, out, _ = call("--help")
    assert status == 0 and all(f"  {name} " in out for name in run.COMMANDS)


# -- train -------------------------------------------------------------------------------------------------------------


def test_training_leaves_a_whole_run_folder(world):
    run_folder = world / "trained"
    assert {p.name for p in run_folder.iterdir()} == {
        "run.json", "metrics.jsonl", "record.json", "checkpoints", "predictions_id.jsonl", "predictions_ood.jsonl"}
    (checkpoint,) = (run_folder / "checkpoints").iterdir()
    assert checkpoint.name == "step-000003"
    assert {p.name for p in checkpoint.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "thinking.json", "thinking.safetensors",
        "tokenizer.json", "tokenizer_config.json", "training_state.pt"}
    assert [json.loads(line)["step"] for line in (run_folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert list(run_folder.rglob("*.tmp")) == []


def test_last_line_of_train_json_is_the_record(world):
    status, out, err = json.loads((world / "training.txt").read_text())
    figures = result(out)
    assert status == 0 and 0 <= figures["accuracy_id"] <= 1 and 0 <= figures["accuracy_ood"] <= 1
    assert figures == json.loads((world / "trained" / "record.json").read_text())
    assert err.splitlines()[0] == "run folder trained"


def test_record_says_what_is_needed_to_trust_and_repeat_the_run(world):
    record = json.loads((world / "trained" / "record.json").read_text())
    assert record.keys() >= {"command", "date", "revision", "seed", "machine", "torch", "python", "accuracy_id",
                             "accuracy_ood", "steps", "train_seconds", "id", "ood", "run", "settings"}
    assert record["steps"] == record["settings"]["steps"] == 3 and record["id"]["n"] == 4
    assert record["id"]["operations"][1] <= 10 <= record["ood"]["operations"][0]
    assert record["settings"] == json.loads((world / "trained" / "run.json").read_text())


def test_train_without_out_makes_a_run_that_infer_and_resume_find(empty):
    status, out, _ = call(*QUICK, "--json")
    assert status == 0
    (folder,) = (empty / "runs").iterdir()
    assert folder.name.startswith("parity-thinking-s0-") and result(out)["run"] == f"runs/{folder.name}"
    weights = (folder / "checkpoints" / "step-000003" / "model.safetensors").read_bytes()
    status, again, _ = call("train", "parity", "--resume", "--json")
    assert status == 0 and result(again)["id"] == result(out)["id"] and result(again)["steps"] == 3
    assert (folder / "checkpoints" / "step-000003" / "model.safetensors").read_bytes() == weights
    assert f"model runs/{folder.name}:" in call("infer", PROMPT, "--max-thought-tokens", "4")[2]


@pytest.mark.parametrize("method", ["no-cot", "cot"])
def test_baselines_train_evaluate_and_answer_without_thoughts(method, empty):
    status, out, _ = call(*QUICK, "--method", method, "--out", "run", "--json")
    assert status == 0 and result(out)["id"]["thought_accuracy"] is None
    assert not list((empty / "run").rglob("thinking.safetensors"))
    status, out, err = call("infer", PROMPT, "--run", "run", "--json", "--max-new-tokens", "4")
    assert status == 0 and result(out)["thoughts"] == [] and f"{method} on parity" in err


def test_vars_trains_with_its_own_options(empty):
    flags = "--variables 2 --modulus 5 --max-ops 3 --max-thought-tokens 12".split()
    status, out, _ = call("train", "vars", "--steps", "2", *SHORT, *flags, "--json", "--out", "run")
    assert status == 0 and result(out)["settings"]["variables"] == 2
    first = json.loads((empty / "run" / "predictions_id.jsonl").read_text().splitlines()[0])
    assert first["prompt"].count(";") == 1 and first["gold"].startswith("Final values: a=")


def test_a_run_of_vars_is_shown_with_its_own_options_and_evaluated_on_another_task_too(empty):
    assert call("train", "vars", "--variables", "2", "--modulus", "5", "--steps", "1", *SHORT, "--out", "two")[0] == 0
    status, out, _ = call("infer", "--run", "two", "--json", *FAST)
    values = [int(x) for x in re.findall(r"\d+", result(out)["prompt"])]
    assert status == 0 and max(values) < 5 and "b=" in result(out)["prompt"] and "c=" not in result(out)["prompt"]
    assert call("eval", "parity", "--run", "two", "--samples", "2", "--max-ops", "3", "--max-thought-tokens", "4")[0] == 0
    assert commands.trained_task(empty / "two", {"task": "vars"}).variables == 2


def test_a_reader_that_leaves_before_the_json_line_is_no_error(empty):
    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("{"):
                raise BrokenPipeError
            return super().write(text)
    with contextlib.redirect_stdout(Pipe()) as out, contextlib.redirect_stderr(io.StringIO()):
        assert run.main(["report", "--json"]) == 141
    assert "| run | paper |" in out.getvalue()


def test_training_without_saving_does_not_point_to_a_checkpoint(empty):
    status, out, _ = call(*QUICK, "--no-save", "--out", "run")
    assert status == 0 and not list(empty.rglob("*.safetensors"))
    assert "infer --run" not in out


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def test_ctrl_c_exits_130_with_a_checkpoint_and_the_printed_command_goes_on(empty):
    flags = ["--steps", "150", *SHORT, "--max-ops", "3", "--log-every", "1"]
    process = subprocess.Popen([sys.executable, ROOT / "run.py", "train", "parity", "--out", "run", *flags],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("step 1/150")
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    (checkpoint,) = (empty / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert 1 <= step < 150 and f"interrupted after step {step};" in err
    words = shlex.split(err.split("continue with: ")[1])
    status, out, _ = call(*words[words.index("run.py") + 1:])
    assert status == 0
    assert out.splitlines()[0].startswith(f"step {step + 1}/150")
    steps = [json.loads(line)["step"] for line in (empty / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 151))


def test_resume_command_can_be_pasted_into_a_shell(empty, monkeypatch):
    monkeypatch.setattr(commands, "run_training", lambda config, folder, log, note: {"interrupted": True, "step": 3})
    status, _, err = call(*QUICK, "--out", "my run")
    assert status == 130
    words = shlex.split(err.split("continue with: ")[1])
    assert words == ["python", "run.py", "train", "parity", "--out", "my run", "--resume"]


def test_interrupted_run_without_saving_offers_no_resume(empty, monkeypatch):
    monkeypatch.setattr(commands, "run_training", lambda config, folder, log, note: {"interrupted": True, "step": 3})
    status, _, err = call(*QUICK, "--no-save", "--out", "run")
    assert status == 130 and "interrupted after step 3" in err and "--resume" not in err


def test_ctrl_c_elsewhere_exits_130_without_a_traceback(inside, monkeypatch):
    def press(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr(commands, "generate_ids", press)
    status, _, err = call(*INFER, PROMPT)
    assert status == 130 and err.splitlines()[-1] == "run.py infer: interrupted"


# -- infer -------------------------------------------------------------------------------------------------------------

FAST = ["--max-new-tokens", "6", "--max-thought-tokens", "4"]


def without_seconds(answer: dict) -> dict:
    return {key: value for key, value in answer.items() if key != "seconds"}


def test_infer_json_of_one_prompt_is_one_object_with_text_thoughts_and_counters(inside):
    status, out, _ = call(*INFER, PROMPT, *FAST, "--json")
    answer = result(out)
    assert status == 0 and answer["prompt"] == PROMPT
    assert isinstance(answer["text"], str) and all(isinstance(thought, str) for thought in answer["thoughts"])
    assert answer["stop_reason"] in ("eos", "length")
    assert len(answer["thoughts"]) >= 2 and answer["rounds"] == answer["nontrivial"] + 1
    assert answer["nontrivial"] == sum(bool(thought) for thought in answer["thoughts"][:2])


def test_infer_without_json_prints_answer_and_counters_for_people(inside):
    status, out, _ = call(*INFER, PROMPT, *FAST)
    assert status == 0 and not out.splitlines()[-1].startswith("{")
    assert out.startswith(PROMPT[:20]) and "\nanswer: " in out and "18 tokens in 3 chunks" in out


def test_infer_without_a_prompt_shows_an_example_with_its_expected_answer(inside):
    status, out, err = call(*INFER, *FAST)
    assert status == 0 and "built-in example" in err and "(expected: The final state of the coin is " in out


def test_sequential_and_speculative_prefill_answer_alike(inside):
    sequential, trivial, carry = (result(call(*INFER, PROMPT, *FAST, "--json", *flags)[1]) for flags in (
        ["--prefill", "sequential"], ["--draft", "trivial"], ["--draft", "carry"]))
    for key in ("text", "thoughts", "nontrivial", "stop_reason"):
        assert sequential[key] == trivial[key] == carry[key]
    assert sequential["rounds"] == 3


def test_table_has_a_line_for_each_complete_chunk(inside):
    answer = result(call(*INFER, PROMPT, *FAST, "--json")[1])
    lines = call(*INFER, PROMPT, *FAST, "--table")[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("chunk  state norm"))
    rows = lines[start + 1:start + 1 + len(answer["thoughts"])]
    assert [row.split()[0] for row in rows] == [str(k) for k in range(len(answer["thoughts"]))]
    assert "The coin starts at state heads. Alice" in rows[0] and repr(answer["thoughts"][0]) in rows[0]


def test_file_with_two_prompts_answers_each_as_alone(inside, tmp_path):
    prompts = [PROMPT, "The coin starts at state tails."]
    (tmp_path / "prompts.txt").write_text(prompts[0] + "\n\n" + prompts[1] + "\n")
    status, out, _ = call(*INFER, "--file", tmp_path / "prompts.txt", *FAST, "--json")
    alone = [result(call(*INFER, prompt, *FAST, "--json")[1]) for prompt in prompts]
    assert status == 0
    assert [without_seconds(a) for a in result(out)["results"]] == [without_seconds(a) for a in alone]


def test_a_dash_reads_prompts_from_standard_input(inside, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    status, out, _ = call(*INFER, "--file", "-", *FAST, "--json")
    assert status == 0 and result(out)["prompt"] == PROMPT


@pytest.fixture
def two_runs(world, empty) -> Path:
    """A folder whose runs/ holds `older` and `newer`; `older` was made last, but saved to first."""
    for name, time in (("newer", 2_000_000_000), ("older", 1_000_000_000)):
        shutil.copytree(world / "trained", empty / "runs" / name)
        os.utime(empty / "runs" / name / "checkpoints" / "step-000003", (time, time))
    return empty


def test_infer_uses_the_run_that_was_saved_to_last(two_runs):
    assert "model runs/newer: thinking on parity" in call("infer", PROMPT, *FAST)[2]


def test_infer_passes_over_runs_without_a_finished_checkpoint(two_runs):
    checkpoints = two_runs / "runs" / "newer" / "checkpoints"
    (checkpoints / "step-000003").rename(checkpoints / "step-000003.77.tmp")
    assert "model runs/older: thinking on parity" in call("infer", PROMPT, *FAST)[2]


def test_run_flag_chooses_the_run(two_runs):
    assert "model runs/older: thinking on parity" in call("infer", PROMPT, *FAST, "--run", "runs/older")[2]


def test_infer_without_runs_uses_the_checkpoint_that_ships(world, empty, monkeypatch):
    monkeypatch.setattr(commands, "SHIPPED", world / "trained")
    status, _, err = call("infer", PROMPT, *FAST)
    assert status == 0 and f"model {world / 'trained'}: thinking on parity" in err


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="no checkpoint ships yet")
def test_shipped_checkpoint_answers_the_built_in_example_rightly(empty):
    status, out, err = call("infer", "--json")
    assert status == 0 and "thinking on parity" in err
    answer = next(line for line in out.splitlines() if line.startswith("answer: "))
    said, expected = answer.removeprefix("answer: ").rstrip(")").split("   (expected: ")
    assert said == expected and result(out)["stop_reason"] == "eos"
    assert {thought.split()[-1] for thought in result(out)["thoughts"] if thought} <= {"heads", "tails"}


@pytest.mark.parametrize("think", ["auto", "off"])
def test_plain_checkpoint_decodes_without_thoughts(think, inside):
    status, out, err = call("infer", "Hi there, how are you?", "--model", "plain", "--think", think, *FAST, "--json")
    answer = result(out)
    assert status == 0 and "plain decoding, no thoughts" in err
    assert answer["nontrivial"] == 0 and not any(answer["thoughts"]) and answer["stop_reason"] == "length"


def test_plain_checkpoint_thinks_if_asked_and_says_that_it_is_untrained(inside):
    flags = ["--think", "on", *"--chunk-size 4 --inject-after 1 --extract-after 2".split(), *FAST, "--json"]
    status, out, err = call("infer", "Hi there, how are you?", "--model", "plain", *flags)
    answer = result(out)
    assert status == 0 and "untrained copies" in err
    assert len(answer["thoughts"]) == (22 + 5) // 4 and answer["nontrivial"] > 0


# -- eval and data -----------------------------------------------------------------------------------------------------


def test_eval_of_a_run_repeats_the_report_of_its_training(inside, tmp_path):
    record = json.loads((inside / "trained" / "record.json").read_text())
    status, out, _ = call("eval", "parity", "--run", "trained", "--samples", "4", "--min-ops", "1", "--max-ops", "10",
                          "--max-thought-tokens", "4", "--out", tmp_path / "predictions.jsonl", "--json")
    assert status == 0 and {key: result(out)[key] for key in record["id"]} == record["id"]
    assert (tmp_path / "predictions.jsonl").read_text() == (inside / "trained" / "predictions_id.jsonl").read_text()


def test_eval_begins_at_the_longest_trained_length_by_default(inside):
    status, out, _ = call(*EVAL, "--samples", "6", "--json")
    low, high = result(out)["operations"]
    assert status == 0 and 10 <= low <= high <= 12


def test_data_of_a_task_without_values_counts_no_late_ones(empty, monkeypatch):
    draw = Parity.draw
    monkeypatch.setattr(Parity, "draw", lambda *given: replace(draw(*given), values=()))
    status, out, _ = call("data", "parity", "--samples", "5", "--json")
    assert status == 0 and result(out)["late_share"] is None and "late" not in out.splitlines()[-2]


@pytest.mark.parametrize("task", ["parity", "vars"])
def test_data_shows_an_example_with_markers_targets_and_statistics(task, empty):
    status, out, _ = call("data", task, "--samples", "5", "--json")
    figures = result(out)
    lines = out.splitlines()
    assert status == 0 and lines[0].startswith("marked: ") and lines[0].count("<T>") >= 4
    assert lines[0].removeprefix("marked: ").replace("<T>", "") == figures["prompt"]
    assert figures["samples"] == 5 and 0 <= figures["late_share"] <= 1 and 0 < figures["nontrivial_share"] <= 1
    assert len(figures["thoughts"]) == (len(figures["ids"]) - 1) // 8


def test_data_of_another_index_shows_another_example_of_the_same_length(empty):
    first, second = (result(call("data", "parity", "--samples", "1", "--ops", "9", "--index", i, "--json")[1])
                     for i in ("0", "1"))
    assert first["prompt"] != second["prompt"]
    assert first["prompt"].count(".") == second["prompt"].count(".") == 10


def test_streamed_text_equals_the_text_shown_at_once(empty, capsys):
    prompt = "The coin starts at state heads. Bob flips the coin. Alice flips the coin."
    outputs = []
    for more in ([], ["--stream"]):
        status, out, _ = call("infer", prompt, "--run", str(SHIPPED), *more)
        assert status == 0
        outputs.append(out.splitlines()[:2])
    assert outputs[0] == outputs[1] and outputs[0][0].startswith("The coin") and "[T:" in outputs[0][0]
