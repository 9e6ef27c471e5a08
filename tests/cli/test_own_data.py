"""The commands on a file of one's own: train, resume, infer, eval, data."""

from __future__ import annotations

import json
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from cli_helpers import call, result

from minits.checkpoint.tiny import ASSETS

QUICK = "--batch-size 4 --max-thought-tokens 8 --warmup 1 --device cpu".split()
TRAIN = ["train", "rows", "--train", "train.jsonl", "--steps", "2", *QUICK]


@pytest.fixture
def files(empty) -> Path:
    """A folder with the sample's two files."""
    for name in ("train", "test"):
        shutil.copy(ASSETS / f"rows-{name}.jsonl", empty / f"{name}.jsonl")
    return empty


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with the sample's files and a short run on them; nobody changes it."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("train", "test"):
        shutil.copy(ASSETS / f"rows-{name}.jsonl", folder / f"{name}.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        status, _, err = call(*TRAIN, "--test", "test.jsonl", "--out", "run")
    assert status == 0, err
    return folder


@pytest.fixture
def trained(made, tmp_path, monkeypatch) -> Path:
    """A folder of the test's own with a copy of that run and of its files."""
    shutil.copytree(made, tmp_path / "own")
    run = tmp_path / "own" / "run" / "run.json"
    run.write_text(run.read_text().replace(str(made), str(tmp_path / "own")))
    monkeypatch.chdir(tmp_path / "own")
    return tmp_path / "own"


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def test_run_and_record_tell_rows_and_hash_of_each_file(trained):
    run = json.loads((trained / "run" / "run.json").read_text())
    record = json.loads((trained / "run" / "record.json").read_text())
    for found, rows in (("train", 32), ("test", 8)):
        for about in (run["data_files"][found], record["settings"]["data_files"][found]):
            assert (about["rows"], about["skipped"]) == (rows, 0)
            assert about["sha256"] == digest(trained / f"{found}.jsonl")
    assert record["test"]["n"] == 8 and "accuracy_test" in record


def test_the_runs_own_tokenizer_answers_without_the_files(trained):
    (trained / "train.jsonl").unlink()
    (trained / "test.jsonl").unlink()
    odd = "Ünknown wörds 🙂\u2028?"
    status, out, err = call("infer", odd, "--run", "run", "--max-new-tokens", "2", "--json")
    assert status == 0 and result(out)["prompt"] == odd, err
    status, _, err = call("infer", "--run", "run")
    assert status == 2 and "test.jsonl is no file" in err and "give a PROMPT" in err


def test_a_marker_in_a_prompt_is_text_and_said_to_be(trained):
    status, out, err = call("infer", "A box.<T>", "--run", "run", "--max-new-tokens", "2", "--json")
    assert status == 0 and result(out)["prompt"] == "A box.<T>"
    assert "<T> is read as it stands" in err


def test_infer_without_a_prompt_shows_a_row_of_the_last_file(trained):
    status, out, _ = call("infer", "--run", "run", "--max-new-tokens", "2", "--json")
    first = json.loads((trained / "test.jsonl").read_text().splitlines()[0])
    assert status == 0 and result(out)["prompt"] == first["question"]


def test_a_run_goes_on_from_any_folder_with_the_same_files(files, tmp_path_factory, monkeypatch):
    constant = [*TRAIN, "--decay", "0"]
    assert call(*constant, "--steps", "4", "--out", "whole")[0] == 0
    assert call(*constant, "--out", "half")[0] == 0
    run = files / "half" / "run.json"
    run.write_text(json.dumps(json.loads(run.read_text()) | {"steps": 4}))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    status, _, err = call("train", "--resume", "--out", files / "half")
    assert status == 0 and "goes on after step 2 of 4" in err
    losses = [
        [json.loads(line)["lm_loss"] for line in (files / name / "metrics.jsonl").open()]
        for name in ("whole", "half")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4


@pytest.mark.parametrize("name", ["train", "test"])
def test_a_resume_refuses_a_file_that_changed(name, trained):
    with (trained / f"{name}.jsonl").open("a") as file:
        file.write("\n")
    status, _, err = call("train", "rows", "--resume", "--out", "run")
    assert status == 2 and f"{name}.jsonl is not what the run in run began with" in err


def test_a_resume_takes_the_same_file_by_another_name_of_its_path_and_no_other_file(trained):
    same = ["train", "rows", "--resume", "--out", "run", "--train", "./train.jsonl"]
    status, _, err = call(*same)
    assert status == 0, err
    status, _, err = call(*same[:-1], "test.jsonl")
    assert status == 2 and "--train" in err and "test.jsonl" in err


def test_a_moved_file_is_told(trained):
    (trained / "train.jsonl").rename(trained / "gone.jsonl")
    status, _, err = call("train", "rows", "--resume", "--out", "run")
    assert status == 2 and "train.jsonl is no file" in err and "gone.jsonl" in err
    assert "name another" in err


def test_a_resume_takes_a_moved_file_by_its_new_name_and_no_file_that_the_run_had_not(trained):
    (trained / "train.jsonl").rename(trained / "moved.jsonl")
    again = ["train", "--resume", "--out", "run", "--train", "moved.jsonl"]
    status, _, err = call(*again, "--valid", "test.jsonl")
    assert status == 2 and "--valid test.jsonl (run: not given)" in err
    status, _, err = call(*again)
    assert status == 0, err
    run = json.loads((trained / "run" / "run.json").read_text())
    moved = str(trained / "moved.jsonl")
    assert run["train"] == run["data_files"]["train"]["file"] == moved
    assert call("train", "--resume", "--out", "run")[0] == 0  # it knows the new place


def test_training_without_a_file_to_evaluate_on_says_so(files):
    status, out, err = call(*TRAIN, "--out", "run")
    assert status == 0 and "not evaluated" in out, err
    for name, value in (("--eval-every", "1"), ("--eval-samples", "500")):
        status, _, err = call(*TRAIN, name, value, "--out", "other")
        assert status == 2 and not (files / "other").exists()
        assert f"{name} {value}: the task has nothing to evaluate on" in err


def test_rows_without_a_step_are_told_of(files):
    assert "has a step" not in call(*TRAIN, "--out", "run")[2]
    chain = "He buys 2+3=<<2+3=5>>5.\n#### 5"
    lines = [json.dumps({"question": f"Tom buys 2, then {i}.", "answer": chain}) for i in range(9)]
    (files / "train.jsonl").write_text("\n".join(lines))  # as GSM8K has them
    status, _, err = call(*TRAIN, "--out", "other")
    (told,) = (line for line in err.splitlines() if "has a step" in line)
    assert status == 0 and told.startswith("none of the first 32 training rows") and "gsm" in told
    # A method that has no thoughts misses nothing.
    assert "has a step" not in call(*TRAIN, "--method", "no-cot", "--out", "third")[2]


def test_other_steps_than_the_runs_say_how_to_go_on(files):
    assert call(*TRAIN, "--steps", "6", "--out", "run")[0] == 0
    status, _, err = call("train", "rows", "--resume", "--out", "run", "--steps", "9")
    assert status == 2 and "--steps 9" in err
    assert "--model run --steps NUMBER, and the run's other flags (the task's, too)." in err


REFUSED = {
    "no file": (["train", "rows"], "no --train FILE"),
    "overlap": ([*TRAIN, "--valid", "train.jsonl"], "train.jsonl, line 1 asks what"),
    "bad line": ([*TRAIN, "--test", "bad.jsonl"], "bad.jsonl, line 1: no JSON"),
    "CoT without an opening": ([*TRAIN, "--method", "cot", "--opening", ""], "Give --opening"),
    "CoT with a blank opening": ([*TRAIN, "--method", "cot", "--opening", " "], "Give --opening"),
    "data of no file": (["data", "rows"], "no --train FILE"),
    "data beyond the file": (
        ["data", "rows", "--train", "train.jsonl", "--index", "32"],
        "--index 32: there are 32",
    ),
    "data with thoughts too long": (
        [
            "data",
            "rows",
            "--train",
            "train.jsonl",
            "--max-thought-tokens",
            "1",
            "--chunk-size",
            "99",
        ],
        "line 1: the gold thought of chunk 0",
    ),
    "scoring unknown": ([*TRAIN, "--scoring", "vibes"], "--scoring"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_one_line_and_leaves_no_run(arguments, message, files):
    (files / "bad.jsonl").write_text("{\n")
    status, _, err = call(*arguments)
    assert status == 2 and message in err and len(err.splitlines()) == 1
    assert not (files / "runs").exists()


def test_skipped_lines_are_counted_and_told(files):
    with (files / "train.jsonl").open("a") as file:
        file.write("{\n[]\n")
    assert call(*TRAIN)[0] == 2
    status, _, err = call(*TRAIN, "--skip-bad", "--out", "run")
    assert status == 0 and "rows 32, skipped 2, first_skipped line 33: no JSON" in err
    status, _, err = call("data", "rows", "--train", "train.jsonl", "--skip-bad")
    assert status == 0 and "skipped 2" in err


@pytest.mark.parametrize("method", ["thinking", "no-cot"])
def test_rows_without_steps_are_counted_and_told(method, files):
    with (files / "train.jsonl").open("a") as file:
        file.write('{"question": "A box holds 3 pens.", "answer": "3"}\n')
    status, _, err = call(*TRAIN, "--method", method, "--out", "run")
    assert status == 0 and re.search("train: .* rows 33, .*, without_steps 1$", err, re.MULTILINE)
    status, _, err = call("data", "rows", "--train", "train.jsonl")
    assert status == 0 and "without_steps 1" in err


# -- eval ------------------------------------------------------------------------------------------


def evaluated(*flags: str) -> dict:
    status, out, err = call("eval", "--run", "run", *flags, "--json")
    assert status == 0, err
    return result(out)


def test_eval_looks_at_the_runs_file_or_at_another(trained):
    record = json.loads((trained / "run" / "record.json").read_text())
    found = evaluated()
    assert {key: found[key] for key in record["test"]} == record["test"]
    lines = (trained / "test.jsonl").read_text().splitlines()
    (trained / "few.jsonl").write_text("\n".join(lines[:3]))
    few = evaluated("--test", "few.jsonl")
    assert few["n"] == 3 and few["data_files"]["test"]["sha256"] == digest(trained / "few.jsonl")


def test_eval_on_what_was_trained_on_must_be_asked_for_by_its_name(trained):
    assert evaluated("--train", "train.jsonl")["n"] == 32
    status, _, err = call("eval", "--run", "run", "--test", "train.jsonl")
    assert status == 2 and "asks what" in err
    (trained / "train.jsonl").rename(trained / "gone.jsonl")
    assert evaluated()["n"] == 8  # the run does not need its training file any more
    status, _, err = call("eval", "--run", "run", "--test", "test.jsonl", "--valid", "test.jsonl")
    assert status == 2 and "eval looks at one file" in err


def test_eval_of_a_run_without_evaluation_says_what_to_name(files):
    assert call(*TRAIN, "--out", "run")[0] == 0
    status, _, err = call("eval", "--run", "run")
    assert status == 2 and "no file of the task rows to evaluate on. Name one with --test" in err
    assert evaluated("--test", "test.jsonl")["n"] == 8


def test_scoring_by_number_tells_strict_and_unparsable(trained):
    found = evaluated("--scoring", "number")
    assert set(found["counts"]) == {"strict", "unparsable"}
    assert evaluated()["counts"] == {}


def test_scoring_and_opening_go_with_a_checkpoint_alone(files):
    assert call(*TRAIN, "--scoring", "number", "--opening", "So:", "--out", "run")[0] == 0
    (checkpoint,) = (files / "run" / "checkpoints").iterdir()
    flags = ["--run", str(checkpoint), "--test", "test.jsonl", "--json"]
    found = result(call("eval", *flags)[1])
    assert set(found["counts"]) == {"strict", "unparsable"}


@pytest.mark.parametrize(
    "name, value", [("opening", 5), ("opening", None), ("scoring", "vibes"), ("scoring", [])]
)
def test_options_in_a_checkpoint_that_cannot_be_are_told(name, value, trained):
    (checkpoint,) = (trained / "run" / "checkpoints").iterdir()
    about = checkpoint / "thinking.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {name: value}))
    status, _, err = call("eval", "--run", checkpoint, "--test", "test.jsonl")
    assert status == 2 and "thinking.json" in err and name in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("name, value", [("train", 5), ("opening", 5), ("skip_bad", "no")])
def test_options_in_a_run_that_cannot_be_are_told(name, value, trained):
    run = trained / "run" / "run.json"
    run.write_text(json.dumps(json.loads(run.read_text()) | {name: value}))
    status, _, err = call("infer", "--run", "run")
    assert status == 2 and "run.json" in err and len(err.splitlines()) == 1


# -- data ------------------------------------------------------------------------------------------


def test_data_shows_a_row_in_the_tokens_of_the_tiny_model(files):
    status, out, _ = call("data", "rows", "--train", "train.jsonl", "--json")
    first = json.loads((files / "train.jsonl").read_text().splitlines()[0])
    assert status == 0 and out.splitlines()[0] == "marked: " + first["question"]
    assert result(out)["samples"] == 32 and result(out)["data_files"]["train"]["rows"] == 32


def test_data_shows_characters_whole_though_their_bytes_are_tokens(files):
    row = {"question": "小明有 3 支笔。🙂<T> 他买了 2 支。", "steps": ["3"], "answer": "5"}
    (files / "train.jsonl").write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    status, out, err = call("data", "rows", "--train", "train.jsonl")
    assert status == 0, err
    chunks = out.split("thoughts are what T must say after the chunk:")[1]
    assert "\ufffd" not in chunks and "🙂" in chunks and "支" in chunks


def test_data_of_a_run_takes_its_task_tokenizer_chunks_and_limit(trained):
    status, out, _ = call("data", "--model", "run", "--json")
    alone = call("data", "rows", "--train", "train.jsonl", "--chunk-size", "4", "--json")[1]
    told = [result(each) for each in (out, alone)]
    assert status == 0 and told[0]["ids"] == told[1]["ids"] and told[0]["samples"] == 32
    long = {"question": "a b c", "steps": [{"at": 1, "text": "x y " * 9}], "answer": "z"}
    (trained / "long.jsonl").write_text(json.dumps(long))
    status, _, err = call("data", "--model", "run", "--train", "long.jsonl")
    assert status == 2 and "long.jsonl, line 1" in err and "--max-thought-tokens = 8" in err
    assert (
        call("data", "--model", "run", "--train", "long.jsonl", "--max-thought-tokens", "99")[0]
        == 0
    )
