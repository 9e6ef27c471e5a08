"""The commands on word problems: text after the question, the probe, answers side by side."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from cli_helpers import call, result

from minits.cli import bench
from minits.cli.models import SHIPPED, trained_task
from minits.lab import bench_answers
from minits.tasks.gsm import Gsm
from minits.tasks.rows import files_in
from minits.tasks.two_hop import TwoHop
from minits.training.run_folder import kept_options

QUICK = "--steps 2 --batch-size 4 --max-thought-tokens 8 --warmup 1 --device cpu".split()
SUFFIX = "Say it now."


def lines(first: int) -> str:
    """Twelve problems of one form."""
    return "".join(
        f"Tom has {n} pens. He buys {n + 1}. How many has he?||<<{n}+{n + 1}={2 * n + 1}>> "
        f"#### {2 * n + 1}\n"
        for n in range(first, first + 12)
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a run of Thinking States and one of CoT; nobody changes it."""
    folder = tmp_path_factory.mktemp("gsm")
    (folder / "train.txt").write_text(lines(1))
    (folder / "test.txt").write_text(lines(20))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for method in (["thinking", "--one-per-chunk"], ["cot"]):
            files = ["--train", "train.txt", "--test", "test.txt", "--suffix", SUFFIX]
            how = ["--method", *method, "--resample", "0.5", "--out", method[0], *QUICK]
            status, _, err = call("train", "gsm", *files, *how)
            assert status == 0, err
    return folder


@pytest.fixture
def inside(runs, monkeypatch) -> Path:
    monkeypatch.chdir(runs)
    return runs


def test_infer_puts_the_text_of_training_after_the_prompt(inside):
    status, out, err = call("infer", "--run", "thinking", "Tom has 3 pens.", "--device", "cpu")
    assert status == 0 and f"put after every prompt, as in training: '{SUFFIX}'" in err
    assert "Tom has 3 pens. Say it now.  ->" in out
    _, out, _ = call("infer", "--run", "thinking", "Tom has 3 pens.", "--json", "--device", "cpu")
    told = json.loads(out)
    assert told["prompt"] == "Tom has 3 pens."


def test_a_checkpoint_alone_knows_the_text_too(inside):
    (checkpoint,) = (inside / "thinking" / "checkpoints").iterdir()
    _, out, _ = call("infer", "--model", str(checkpoint), "Tom has 3 pens.", "--device", "cpu")
    assert "Tom has 3 pens. Say it now.  ->" in out


@pytest.mark.parametrize(
    "task", [Gsm(align="given"), TwoHop(steps_shown="both", step_after="subject")]
)
def test_a_checkpoint_alone_knows_what_its_gold_thoughts_are(task, inside):
    about = {"task": task.name} | kept_options(task, asdict(task))
    assert trained_task(Path("no-run"), about) == task


def test_files_may_be_named_with_a_blank_behind_the_comma(inside):
    assert files_in("train", "train.txt, test.txt") == files_in("train", "train.txt,test.txt")
    many = ",".join(f"a-file-with-a-long-name-{i}" for i in range(12))
    assert len(files_in("train", many)) == 12  # as one name it is longer than a name may be


def test_predictions_name_row_and_gold_steps(inside):
    first = json.loads((inside / "thinking" / "predictions_test.jsonl").read_text().splitlines()[0])
    assert (first["index"], first["name"]) == (0, "test.txt, line 1")
    assert first["gold_steps"] == ["20+21=41"]
    report = json.loads((inside / "thinking" / "record.json").read_text())["test"]
    assert report["counts"].keys() >= {"first_result", "chain", "strict", "unparsable"}
    assert report["buckets"].keys() == {"1"}


@pytest.mark.parametrize("run", ["thinking", "cot"])
def test_the_question_can_be_read_first(run, inside):
    _, out, _ = call("eval", "--run", run, "--question-first", "--json", "--device", "cpu")
    told = result(out)
    probe = told["question_first"]
    assert probe["rows_wrong_before"] == 12 - round(told["accuracy"] * 12)
    assert 0 <= probe["accuracy"] <= 1


def test_numbers_are_drawn_anew_of_training_rows_alone(inside):
    again = ["eval", "--run", "thinking", "--resample", "0.5", "--device", "cpu"]
    status, _, err = call(*again)
    assert status == 2 and "--resample: numbers of test are never drawn anew; leave it out" in err
    assert call(*again, "--train", "train.txt")[0] == 0


def test_the_probe_is_for_tasks_with_questions(inside):
    status, _, err = call("eval", "parity", "--question-first", "--device", "cpu")
    assert status == 2 and "--question-first: parity has no questions" in err


def test_a_page_shows_each_row_as_it_is_and_with_the_question_first(inside, tmp_path):
    page = tmp_path / "page.html"
    flags = ["--question-first", "--html", page, "--prefill", "speculative", "--device", "cpu"]
    assert call("eval", "--run", "thinking", *flags)[0] == 0
    html = page.read_text(encoding="utf-8")
    titles = re.findall(r'<h2><span dir="auto">(.*?)</span>', html)
    assert len(titles) == 24 and html.count("<section>") == 12
    assert titles[1::2] == [f"question first: {title}" for title in titles[::2]]
    assert set(titles[::2]) == {f"test.txt, line {i}" for i in range(1, 13)}
    # Golds are known of rows as they are alone: nobody placed the steps in the others.
    for section in html.split("<section>")[1:]:
        usual, first = section.split("<article>")[1:]
        assert re.search('class="[a-z]+ (right|wrong)"', usual)
        assert not re.search('class="[a-z]+ (right|wrong)"', first)
    assert "--question-first" in html and "round 1" in html


def test_gold_thoughts_and_the_question_first_do_not_go_together(inside):
    flags = ["--question-first", "--states", "gold", "--device", "cpu"]
    status, _, err = call("eval", "--run", "thinking", *flags)
    assert status == 2 and "nobody knows where the steps" in err


def test_infer_copies_the_question_and_not_the_text_of_training(inside):
    flags = ["--run", "thinking", "Tom has 3 pens. How many?", "--device", "cpu"]
    out = call("infer", *flags, "--question-first")[1]
    assert "question first:\n" in out
    plain = re.sub(r" \[T:[^\]]*\]", "", out)
    assert "How many? Tom has 3 pens. How many? Say it now.  ->" in plain


def test_answers_are_timed_in_turn(inside):
    how = "bench answers --run thinking --against cot --samples 2 --repeats 1 --device cpu --json"
    _, out, err = call(*how.split())
    told = result(out)
    assert f"{2 * 8 * 3} answers before the first line" in err
    other, *ways = told["lines"]
    assert told["settings"]["method"] == "thinking" and told["hidden_size"] == 64
    assert (told["run"], ways[0]["options"]["one_per_chunk"]) == ("thinking", True)
    assert (other["method"], other["speed_up"], other["prompts"]) == ("cot", 1.0, 2)
    assert {way["method"] for way in ways} == {"thinking"} and len(ways) == 7
    for way in ways:
        assert way["speed_up"] == pytest.approx(other["ms"] / way["ms"], rel=1e-3)
        if way["draft"] == "trivial" and way["prefill"] == "speculative" and not way["lookahead"]:
            assert way["rounds"] <= way["entered_and_one"]


def test_how_many_prompts_a_line_of_drafts_takes_is_said_before_the_first(inside):
    how = "bench drafts --run thinking --repeats 1 --device cpu --json"
    _, out, err = call(*how.split())
    lines = result(out)["lines"]
    assert f"{2 * lines[0]['prompts'] * 3} prompts are read for a line" in err
    assert len(lines) == 9


def test_several_runs_are_timed_in_turn_with_one_that_thinks(inside, tmp_path):
    shutil.copytree(inside / "cot", tmp_path / "other")
    how = f"--run thinking --against cot,{tmp_path / 'other'} --samples 1 --repeats 1 --json"
    _, out, err = call("bench", "answers", *how.split(), "--device", "cpu")
    one, two, *ways = result(out)["lines"]
    assert f"{9 * 3} answers before the first line" in err
    assert [one["run"], two["run"]] == ["cot", str(tmp_path / "other")]
    assert two["speed_up"] == pytest.approx(one["ms"] / two["ms"], rel=1e-3)
    assert {way["run"] for way in ways} == {"thinking"}
    assert ways[0]["speed_up"] == pytest.approx(one["ms"] / ways[0]["ms"], rel=1e-3)


@pytest.mark.parametrize(
    "against, words",
    {
        "cot,": "--against cot,: between commas a run has no name",
        "cot,cot": "--run thinking --against cot,cot: cot stands there twice",
        "cot,thinking": "--run thinking --against cot,thinking: thinking stands there twice",
        "cot,./cot": "--run thinking --against cot,./cot: cot stands there twice",
        "thinking/": "--run thinking --against thinking/: thinking/ stands there twice",
        "cot, ": "--against cot, : between commas a run has no name",
        "cot , cot": "--run thinking --against cot , cot: cot stands there twice",
        "cot,nope": "--against nope: no such folder",
        ",".join(f"a-run-with-a-long-name-{i}" for i in range(12)): "--against a-run-with-a-long-n"
        "ame-0: no such folder",
    }.items(),
)
def test_every_run_to_compare_with_is_named_once(against, words, inside, monkeypatch):
    monkeypatch.setattr(bench, "open_model", None)  # that is said before weights are loaded
    status, out, err = call("bench", "answers", "--run", "thinking", "--against", against)
    assert (status, out) == (2, "") and words in err


def test_a_comma_in_the_name_of_a_folder_parts_nothing(inside, tmp_path):
    shutil.copytree(inside / "cot", tmp_path / "a,b")
    how = ["--run", "thinking", "--against", tmp_path / "a,b", "--samples", "1", "--repeats", "1"]
    told = result(call("bench", "answers", *how, "--device", "cpu", "--json")[1])
    assert told["lines"][0]["run"] == str(tmp_path / "a,b")


@pytest.mark.parametrize("whole", [0, 1])
def test_ctrl_c_leaves_the_times_of_the_prompts_before_it(whole, inside, monkeypatch):
    left = iter([bench_answers.time_interleaved] * whole)

    def interrupted(calls, repeats):
        for measure in left:
            return measure(calls, repeats)
        calls[0]()  # one way of this prompt has answered, the others have not
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_answers, "time_interleaved", interrupted)
    how = "bench answers --run thinking --against cot --samples 3 --repeats 1 --device cpu --json"
    status, out, err = call(*how.split())
    told = result(out)
    assert status == 130 and told["interrupted"]
    assert [line["prompts"] for line in told["lines"]] == [1] * 8 * whole
    assert f"{8 * whole} measurements were made" in err


@pytest.mark.parametrize("missing", ["--run thinking", "--against cot"])
def test_both_runs_must_be_named(missing, inside):
    status, _, err = call("bench", "answers", *missing.split(), "--device", "cpu")
    assert status == 2 and "bench answers needs --run FOLDER --against FOLDER" in err


def test_both_runs_must_be_there_of_one_task_and_behind_one_text(inside, tmp_path):
    (cot,) = (inside / "cot" / "checkpoints").iterdir()
    shutil.copytree(cot, tmp_path / "bare")
    about = json.loads((cot / "thinking.json").read_text()) | {"suffix": ""}
    (tmp_path / "bare" / "thinking.json").write_text(json.dumps(about))
    for other, words in {
        tmp_path / "bare": f"was trained behind '', --run thinking behind '{SUFFIX}'",
        "nope": "--against nope: no such folder",
        SHIPPED: f"--against {SHIPPED} was trained on parity, --run thinking on gsm",
    }.items():
        how = ["--run", "thinking", "--against", other, "--device", "cpu"]
        status, out, err = call("bench", "answers", *how)
        assert (status, out) == (2, "") and words in err


def test_rows_of_training_are_read_where_there_are_no_others_and_that_is_said(inside, tmp_path):
    how = ["--train", "train.txt", "--suffix", SUFFIX, "--out", tmp_path / "run", *QUICK]
    assert call("train", "gsm", *how)[0] == 0
    how = ["--run", tmp_path / "run", "--against", "cot", "--samples", "1", "--repeats", "1"]
    status, _, err = call("bench", "answers", *how, "--device", "cpu")
    said = "gsm has nothing to evaluate on: its training rows are read"
    assert status == 0 and err.count(said) == 1
