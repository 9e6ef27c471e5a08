"""The task `gsm`: what its lines become, new numbers, text after the question, scores of steps."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

import minits.checkpoint.download as hub
from minits.supervision import render_marked
from minits.tasks import make_task
from minits.tasks.rows import question_first
from minits.tasks.task import check_overlap
from minits.training.stream import SampleStream

TOM = "Tom has 3 bags of 6 pens. He gives half of them away. How many are left?"
ANN = "Ann reads 4 pages a day. How many pages does she read in 5 days?"
LINES = [
    json.dumps({"question": TOM, "answer": "He has 3*6=<<3*6=18>>18, so <<18/2=9>>9.\n#### 9"}),
    f"{ANN}||<<4*5=20>> #### 20",
    json.dumps({"question": "Jo has 8 cats and buys 9.", "steps": ["8+9=17"], "answer": "17"}),
]
OTHER = "Uma bakes 7 pies and eats 2. How many are left?||<<7-2=5>> #### 5"


def written(folder: Path, *lines: str, name: str = "train.txt") -> str:
    (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(folder / name)


def gsm(folder: Path, **options):
    return make_task("gsm", train=written(folder, *LINES), **options)


def examples(task, split: str = "train", seed: int | str = 0):
    return [task.example(split, i, seed) for i in range(task.size(split))]


# -- lines and places ------------------------------------------------------------------------------


def test_the_three_forms_may_be_mixed(tmp_path):
    tom, ann, jo = examples(gsm(tmp_path))
    assert render_marked(tom.prompt, tom.steps) == (
        "Tom has 3 bags of 6 pens.<T> He gives half of them away. How many are left?<T>"
    )
    assert [step.text for step in tom.steps] == ["3*6=18", "18/2=9"]
    assert [each.answer for each in (tom, ann, jo)] == [f"The answer is {n}" for n in (9, 20, 17)]
    assert [each.name for each in (tom, ann, jo)] == [f"train.txt, line {n}" for n in (1, 2, 3)]
    assert tom.values == ((len("The answer is "), 1),)


def test_all_at_the_end_is_a_choice(tmp_path):
    tom, *_ = examples(gsm(tmp_path, align="end"))
    assert [step.position for step in tom.steps] == [len(TOM)] * 2


def test_given_places_are_read_as_by_the_task_rows(tmp_path):
    row = {"question": "Two and two,<T> how many?", "steps": ["2+2=4"], "answer": "4"}
    path = written(tmp_path, json.dumps(row))
    given, rows = (
        make_task(name, train=path, **how)
        for name, how in (("gsm", {"align": "given"}), ("rows", {}))
    )
    (found,) = examples(given)
    assert found.values == ((len("The answer is "), 0),)
    assert [replace(found, values=())] == examples(rows)
    chain = written(tmp_path, json.dumps(row | {"answer": "<<2+2=4>> #### 4"}), name="chain.jsonl")
    with pytest.raises(ValueError, match="chain.jsonl, line 1: .*--align rules for this one"):
        make_task("gsm", train=chain, align="given").size("train")


def test_problems_whose_steps_do_not_give_the_answer_are_evaluated_but_not_trained_on(tmp_path):
    astray = ["What?||<<1+2=3>> #### 4", "How many?|| #### 4"]
    train = written(tmp_path, *LINES, *astray)
    task = make_task("gsm", train=train, test=written(tmp_path, *astray, name="test.txt"))
    assert (task.size("train"), task.size("test")) == (3, 2)
    assert task.sources()["train"]["left_out"] == 2
    assert all(not example.values for example in examples(task, "test"))
    with pytest.raises(
        ValueError, match="of 2 problems none has a last step that gives its answer.* <<1.2=3>>"
    ):
        make_task("gsm", train=written(tmp_path, *astray)).size("train")


@pytest.mark.parametrize("apart", [False, True], ids=["in one file", "in two"])
def test_rows_without_steps_are_counted(apart, tmp_path):
    """A text that lacks its << >> has none, too."""
    bare = ["Two pens and 5 caps?||2+5=7 #### 7", "How many?|| #### 4"]
    files = written(tmp_path, *LINES, *([] if apart else bare))
    if apart:
        files += "," + written(tmp_path, *bare, name="more.txt")
    about = make_task("gsm", train=files, test=files).sources()
    assert about["train"]["without_steps"] == about["test"]["without_steps"] == 2
    assert about["train"]["left_out"] == 2 and "left_out" not in about["test"]
    assert "without_steps" not in gsm(tmp_path).sources()["train"]


def test_a_bad_line_is_named_or_passed_over_and_counted(tmp_path):
    train = written(tmp_path, *LINES, "What?||<<1+2>> #### 3")
    with pytest.raises(ValueError, match=r"train.txt, line 4: '1\+2' is no calculation"):
        make_task("gsm", train=train).size("train")
    task = make_task("gsm", train=train, skip_bad=True)
    assert task.size("train") == 3 and task.sources()["train"]["skipped"] == 1


def test_a_mark_of_bytes_inside_is_told_with_its_line(tmp_path):
    """It stands at the head of files, and of their parts where they were joined."""
    path = written(tmp_path, "\ufeff" + LINES[1], "\ufeff" + OTHER)
    with pytest.raises(ValueError, match="line 2: neither a JSON object nor .*feffUma bakes"):
        make_task("gsm", train=path).size("train")


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"question": "Two and two,<T> how many?", "steps": ["2+2=4"], "answer": "4"}),
        "Two and<T> two?||<<2+2=4>> #### 4",
    ],
)
def test_a_marker_that_nothing_would_take_out_of_the_question_is_told(line, tmp_path):
    path = written(tmp_path, LINES[0], line)
    with pytest.raises(ValueError, match="line 2: .* <T>, which marks steps .* --align given"):
        make_task("gsm", train=path).size("train")


# -- files -----------------------------------------------------------------------------------------


def test_several_files_packed_or_not_are_one_split(tmp_path):
    plain = written(tmp_path, *LINES)
    packed = tmp_path / "more.txt.gz"
    packed.write_bytes(gzip.compress(OTHER.encode()))
    task = make_task("gsm", train=f"{plain},{packed},{packed}")
    assert [example.answer[-2:] for example in examples(task)] == [" 9", "20", "17", " 5", " 5"]
    about = task.sources()["train"]
    assert about["rows"] == 5 and about["file"] == f"{plain},{packed},{packed}"
    assert (
        about["sha256"] != make_task("gsm", train=f"{packed},{plain}").sources()["train"]["sha256"]
    )
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match="more.txt.gz is no whole gzip file"):
        make_task("gsm", train=str(packed)).size("train")


def test_a_file_of_the_hub_is_fetched_by_its_name(tmp_path, monkeypatch):
    asked = []

    def fetch(repository, file, repo_type):
        asked.append((repository, file, repo_type))
        return written(tmp_path, *LINES)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    task = make_task("gsm", train="hf://datasets/own/er/data/train.txt")
    assert task.size("train") == 3
    assert asked == [("own/er", "data/train.txt", "dataset")]
    assert task.sources()["train"]["file"] == "hf://datasets/own/er/data/train.txt"


@pytest.mark.parametrize("name", ["own/er", "own", "own/er/data.parquet"])
def test_a_data_set_of_the_hub_needs_a_file_that_can_be_read(name):
    with pytest.raises(ValueError, match="name a file of text or JSON lines"):
        hub.dataset_file(name)


def test_a_question_in_two_splits_is_an_error_however_it_is_written(tmp_path):
    again = json.dumps({"question": ANN.replace(" ", "  "), "answer": "<<4*5=20>> #### 20"})
    task = gsm(tmp_path, valid=written(tmp_path, OTHER, again, name="valid.txt"))
    with pytest.raises(ValueError, match="valid.txt, line 2 asks what train.txt, line 2 asks"):
        check_overlap(task)


# -- text after the question -----------------------------------------------------------------------


def test_text_after_the_question_moves_no_step(tmp_path):
    plain, longer = (examples(gsm(tmp_path, suffix=suffix)) for suffix in ("", "Think."))
    for one, other in zip(plain, longer):
        assert other.prompt == one.prompt + " Think." and other.steps == one.steps
    task = gsm(tmp_path, suffix="Think.")
    assert [task.overlap_key("train", i) for i in range(3)] == [each.prompt for each in longer]
    assert task.asked("How many?") == "How many? Think."


def test_the_question_comes_first_and_stays(tmp_path):
    tom = question_first(examples(gsm(tmp_path, suffix="Think."))[0], "Think.")
    assert tom.prompt == f"How many are left? {TOM} Think."


# -- new numbers -----------------------------------------------------------------------------------


def test_numbers_are_drawn_anew_in_training_alone_and_in_every_epoch(tmp_path):
    task = gsm(tmp_path, resample=1.0, test=written(tmp_path, OTHER, name="test.txt"))
    drawn = {seed: examples(task, seed=seed) for seed in ("0/0", "0/1", "1/0")}
    assert drawn["0/0"] == examples(gsm(tmp_path, resample=1.0), seed="0/0")
    assert len({each[1].prompt for each in drawn.values()}) == 3
    for each in drawn.values():
        for example in each:
            *_, last = example.steps
            left, _, result = last.text.partition("=")
            assert Fraction(eval(left)) == Fraction(result)  # digits and operators of our own
            assert example.answer == f"The answer is {result}"
    assert len({repr(examples(task, "test", seed)) for seed in drawn}) == 1


def test_an_evaluation_of_the_training_rows_leaves_their_numbers(tmp_path):
    task, split = gsm(tmp_path, resample=1.0).evaluated({"train": gsm(tmp_path).train})
    assert split == "train"
    assert examples(task) == examples(gsm(tmp_path))
    task, _ = gsm(tmp_path).evaluated({"train": gsm(tmp_path).train, "resample": 1.0})
    assert examples(task) != examples(gsm(tmp_path))


def test_a_share_of_the_samples_is_drawn_anew(tmp_path):
    task = gsm(tmp_path, resample=0.5)
    old = sum(task.example("train", 1, f"0/{epoch}").prompt == ANN for epoch in range(400))
    assert 150 < old < 250


def test_the_stream_draws_with_another_seed_in_every_epoch(tmp_path):
    class Settings:
        seed, device = 3, "cpu"

    class Spy:
        splits = ("train",)

        def size(self, split):
            return 2

        def example(self, split, index, seed):
            return index, seed

    stream = SampleStream.__new__(SampleStream)
    stream.settings, stream.task = Settings, Spy()
    found = [stream.example(index) for index in range(4)]
    assert [seed for _, seed in found] == ["3/0", "3/0", "3/1", "3/1"]


# -- what was said ---------------------------------------------------------------------------------

RIGHT = {"first_left_side": True, "first_result": True, "last_result": True, "chain": True}
SAID = {
    "all": (["", " 3*6=18", "", " 18/2=9"], 9, RIGHT | {"answer_is_last_result": True}),
    "in one thought": ([" 3*6=18; 18/2=9"], 9, RIGHT | {"answer_is_last_result": True}),
    "another way": ([" 6*3=18", " 18/2=9.0"], 9, {"first_left_side": False, "first_result": True,
                    "last_result": True, "chain": False, "right_if_last_is": True}),
    "wrong": ([" 3*6=20", " 20/2=10"], 10, {"first_left_side": True, "first_result": False,
              "last_result": False, "answer_is_last_result": True, "right_if_last_is": None}),
    "not believed": ([" 3*6=18", " 18/2=9"], 8, {"right_if_last_is": False, "chain": True}),
    "no calculation": ([" pens"], 9, {"first_result": False, "answer_is_last_result": None}),
    "nothing": (["", ""], 9, {"first_left_side": False, "first_result": False, "chain": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_thoughts_say_is_held_against_the_gold_steps(name, tmp_path):
    thoughts, answer, expected = SAID[name]
    task = gsm(tmp_path)
    tom = examples(task)[0]
    text = f" The answer is {answer}"
    found = task.score_steps(text, thoughts, tom, task.score(text, tom)["right"])
    assert found | expected == found


def test_a_chain_of_thought_is_scored_alike_and_no_chain_not_at_all(tmp_path):
    task = gsm(tmp_path)
    tom = examples(task)[0]
    chain = task.score_steps(" 3*6=18 18/2=9 The answer is 9", None, tom, True)
    assert len(chain) == 6 and all(chain.values())
    assert task.score_steps(" The answer is 9", None, tom, True) == {}


def test_every_gold_answer_counts_as_right(tmp_path):
    golds = ["1,234", "-5", "$7.", "0.5"]
    lines = [f"Q{i}?||<<1+2=3>> #### {gold}" for i, gold in enumerate(golds)]
    task = gsm(tmp_path, test=written(tmp_path, *lines, name="test.txt"))
    for example in examples(task, "test"):
        assert task.score(example.answer, example)["right"]
