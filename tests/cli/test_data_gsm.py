"""`run.py data gsm`: coverage, the method's options, rows written and read back, the teacher."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_helpers import call, result
from teacher_server import serving

from minits.tasks import make_task

LINES = [
    "Ann has 3 bags of 6 pens, and she gives half of them away. What is left after 2 more go?"
    "||<<3*6=18>> <<18/2=9>> <<9-2=7>> #### 7",
    "Tom’s bag holds 4 pens and 5 caps. How many things?||<<4+5=9>> #### 9",
    "A lamp costs $8. What do all of them cost?||<<8*7=56>> #### 56",  # the 7 comes from nowhere
    "Who is 5?||<<5+1=6>> #### 5",  # the last step does not lead to the answer
]
SUFFIX = "Think it over step by step, then give the answer."


@pytest.fixture
def files(empty) -> Path:
    (empty / "train.txt").write_text("\n".join(LINES), encoding="utf-8")
    (empty / "valid.txt").write_text(LINES[1].replace("4", "2").replace("9", "7"), encoding="utf-8")
    return empty


SHORT_PARITY = ["parity", "--max-ops", "6", "--chunk-size", "10", "--samples", "9", "--json"]
DATA = ["data", "gsm", "--train", "train.txt", "--valid", "valid.txt", "--json"]


def test_coverage_counts_steps_templates_and_rows_that_were_left_out(files):
    status, out, err = call(*DATA)
    figures = result(out)
    assert status == 0, err
    assert figures["samples"] == 3
    assert figures["coverage"]["steps_traced"] == pytest.approx(4 / 5)
    assert figures["coverage"]["problems_with_a_template"] == pytest.approx(2 / 3)
    assert figures["coverage"]["rows_left_out"] == pytest.approx(1 / 4)
    assert "steps traced 80.0%, problems with a template 66.7%, rows left out 25.0%" in out


def test_coverage_is_over_the_samples(files):
    coverage = result(call(*DATA, "--samples", "2")[1])["coverage"]
    assert coverage["steps_traced"] == 1 and coverage["rows_left_out"] == pytest.approx(1 / 4)


def test_a_task_without_problems_has_no_coverage(empty):
    assert result(call("data", "parity", "--samples", "2", "--json")[1])["coverage"] == {}


def test_data_of_another_split(files):
    status, out, _ = call(*DATA, "--split", "valid")
    assert status == 0 and result(out)["samples"] == 1
    assert out.startswith("marked: Tom’s bag holds 2 pens and 5 caps.")
    status, _, err = call(*DATA, "--split", "test")
    assert status == 2 and "--split test: gsm has train, valid." in err


@pytest.mark.parametrize(
    "given",
    [
        [*DATA, "--chunk-size", "24", "--suffix", SUFFIX * 9],
        ["data", *SHORT_PARITY],
    ],
)
def test_one_per_chunk_moves_the_steps_that_share_a_chunk(files, given):
    usual, moved = (result(call(*given, *option)[1]) for option in ([], ["--one-per-chunk"]))
    assert usual["sharing"] > moved["sharing"]


def test_the_share_of_steps_that_share_a_chunk(files):
    (files / "one.txt").write_text(LINES[0])
    figures = result(call("data", "gsm", "--train", "one.txt", "--json", "--chunk-size", "99")[1])
    assert figures["sharing"] == 1
    figures = result(call("data", "gsm", "--train", "one.txt", "--json", "--chunk-size", "1")[1])
    assert figures["sharing"] == 0


def test_a_run_says_how_its_steps_share_chunks(world, monkeypatch, tmp_path):
    monkeypatch.chdir(world)
    settings = json.loads(Path("trained/run.json").read_text())
    limit = ["--max-thought-tokens", "64"]
    data = ["data", "--model", "trained", *SHORT_PARITY[1:], *limit]
    usual, asked = (result(call(*data, *more)[1]) for more in ([], ["--one-per-chunk"]))
    settings["one_per_chunk"] = True
    run = tmp_path / "moved"
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(settings))
    (last,) = Path("trained/checkpoints").glob("step-000003")
    (run / "checkpoints" / last.name).symlink_to(last.absolute())
    data[2] = str(run)
    assert result(call(*data)[1])["sharing"] == asked["sharing"] < usual["sharing"]


def test_the_warm_up_of_t_is_no_option_of_data(empty):
    status, _, err = call("data", "parity", "--thought-warmup", "3")
    assert status == 2 and "--thought-warmup" in err


# -- rows that are written -------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--align", "end"], ["--suffix", SUFFIX]])
@pytest.mark.parametrize("task", ["gsm", "rows"])
def test_rows_that_were_written_are_read_back_as_they_were(files, more, task):
    assert call(*DATA, *more, "--out", "rows.jsonl")[0] == 0
    options = {"suffix": SUFFIX} if SUFFIX in more else {}
    there = make_task(
        "gsm", train="train.txt", align="end" if "end" in more else "rules", **options
    )
    given = {"align": "given"} if task == "gsm" else {"scoring": "number"}
    back = make_task(task, train="rows.jsonl", **given, **options)
    assert back.size("train") == there.size("train") == 3
    for i in range(3):
        old, new = (each.example("train", i, 0) for each in (there, back))
        values = old.values if task == "gsm" else ()
        assert replace(new, name="") == replace(old, name="", values=values)
    first = json.loads((files / "rows.jsonl").read_text(encoding="utf-8").split("\n")[0])
    assert set(first) == {"question", "steps", "answer"} and first["answer"] == "7"
    assert first["question"] == LINES[0].partition("||")[0]
    assert (
        result(
            call(
                "data",
                task,
                "--train",
                "rows.jsonl",
                *(["--align", "given"] if task == "gsm" else []),
                "--json",
            )[1]
        )["coverage"]
        == {}
    )


def test_the_split_that_is_written_is_the_one_that_is_named(files):
    assert call(*DATA, "--split", "valid", "--out", "rows.jsonl")[0] == 0
    (line,) = (files / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["question"].startswith("Tom’s bag holds 2")


def test_drawn_numbers_are_written_as_the_seed_draws_them(files):
    drawn = [*DATA, "--resample", "1", "--out"]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert call(*drawn, name, "--seed", seed)[0] == 0
    a, b, c = (Path(name).read_text(encoding="utf-8") for name in "abc")
    assert a == b != c and a.split("\n")[2] == c.split("\n")[2]


@pytest.mark.parametrize(
    "given, said",
    [
        (["--out", "train.txt"], "--out train.txt exists. Nothing is overwritten"),
        (["--out", "no/rows.jsonl"], "--out no/rows.jsonl: its folder does not exist"),
        (["--teacher-url", "http://x"], "--teacher-url needs --teacher-model NAME and --out FILE"),
        (["--teacher-model", "m"], "--teacher-model does nothing without --teacher-url"),
        (["--teacher-threads", "2"], "--teacher-threads does nothing without --teacher-url"),
        (["--out", "new", "--index", "3"], "--index 3: there are 3 examples"),
    ],
)
def test_what_cannot_be_written_is_refused(files, given, said):
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    status, _, err = call(*DATA, *given)
    assert status == 2 and said in err and err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before


def test_examples_without_an_end_are_not_written(empty):
    status, _, err = call("data", "parity", "--out", "rows.jsonl")
    assert status == 2 and "--out: the examples of parity have no end" in err
    assert not list(empty.iterdir())


# -- the teacher -----------------------------------------------------------------------------------


@pytest.fixture
def serve():
    with serving() as start:
        yield start


def teacher(number: int, message: str) -> tuple[int, str]:
    """All markers at the end, but for Tom's question, which it mends."""
    asked = json.loads(message)
    question = asked["question"].replace("Tom’s", "Tim's") + "<T>" * len(asked["steps"])
    return 200, json.dumps({"question": question, "steps": asked["steps"]})


def test_a_teacher_is_asked_for_the_split_and_a_second_call_goes_on(serve, files):
    server = serve(teacher)
    asked = [*DATA, "--teacher-url", server.url, "--teacher-model", "m", "--out", "rows.jsonl"]
    for _ in range(2):
        status, out, err = call(*asked, "--teacher-threads", "2")
        assert status == 0, err
        assert "m, 3 problems: 2 accepted, 1 question\n" in out
        figures = result(out)
        assert figures["teacher"] == {"accepted": 2, "question": 1} and figures["samples"] == 2
        assert server.asked == 3
    rows = [json.loads(line) for line in (files / "rows.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["7", "56"]
    assert {step["at"] for step in rows[0]["steps"]} == {len(rows[0]["question"])}
    kept = (files / "rows.jsonl.replies.jsonl").read_text().splitlines()
    assert len(kept) == 3 and sum("question: " in json.loads(line)["reason"] for line in kept) == 1
    assert "train.txt, line 1" in {json.loads(line)["problem"] for line in kept}
    given = ["data", "gsm", "--align", "given", "--train", "rows.jsonl", "--json"]
    assert result(call(*given)[1])["prompt"] == figures["prompt"]
    assert call(*DATA, "--out", "rows.jsonl")[0] == 2  # rows by rules do not replace them


def test_a_teacher_of_whom_nothing_can_be_used(serve, files):
    url = serve(lambda number, message: (200, "Certainly!")).url
    asked = [*DATA, "--teacher-url", url, "--teacher-model", "m", "--out", "rows.jsonl"]
    status, out, err = call(*asked)
    assert status == 2 and "3 form" in out
    assert "no reply was accepted; rows.jsonl.replies.jsonl holds the reasons" in err


def test_only_problems_without_places_go_to_a_teacher(files):
    how = ["--teacher-url", "http://127.0.0.1:9", "--teacher-model", "m", "--out", "new.jsonl"]
    assert call(*DATA, "--out", "rows.jsonl")[0] == 0
    for task in (["rows"], ["gsm", "--align", "given"]):
        status, _, err = call("data", *task, "--train", "rows.jsonl", *how)
        assert status == 2 and f"--teacher-url: the steps of {task[0]} have their places" in err
    assert not (files / "new.jsonl").exists()
