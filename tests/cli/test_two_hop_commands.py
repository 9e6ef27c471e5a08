"""The commands on two-hop questions: full knowledge, what a model knows, results by hop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import call, result

from minits.lab.provenance import without_paths
from minits.lab.records import Book
from minits.lab.tables import tables

QUICK = "--steps 2 --batch-size 8 --max-thought-tokens 24 --warmup 1 --device cpu".split()
LANDS = {"Norway": "Oslo", "Japan": "Tokyo"}
FULL = ["--knowledge", "full", "--facts", "facts.jsonl"]
FILES = ["--train", "train.jsonl", "--test", "test.jsonl"]


def row(number: int) -> dict:
    land = list(LANDS)[number % 2]
    return {
        "question": f"What is the capital of the country where Bay {number} lies?",
        "e1": f"Bay {number}",
        "r1": "bay_in_country" if number % 4 else "port_in_country",
        "r2": "capital_of",
        "bridge": land,
        "answer": LANDS[land],
        "steps": [f"Bay {number} is in {land}.", f"The capital of {land} is {LANDS[land]}."],
    }


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with files of rows and facts, and a run of each method; nobody changes it."""
    folder = tmp_path_factory.mktemp("two-hop")
    write(folder / "train.jsonl", [row(n) for n in range(30)])
    write(folder / "test.jsonl", [row(n) for n in range(50, 58)])
    facts = [(f"Bay {n}", list(LANDS)[n % 2], "{} is in") for n in range(60)]
    facts += [(land, capital, "The capital of {} is") for land, capital in LANDS.items()]
    keys = "subject", "object", "template"
    write(folder / "facts.jsonl", [dict(zip(keys, fact)) for fact in facts])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for method, more in (
            ("thinking", ["--fact-thoughts", "untaught"]),
            ("cot", []),
            ("no-cot", []),
        ):
            how = ["--suffix", "Say it now.", "--method", method, "--out", method, *more, *QUICK]
            status, _, err = call("train", "two-hop", *FILES, *FULL, *how)
            assert status == 0, err
    return folder


@pytest.fixture
def inside(folder, monkeypatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def test_data_shows_a_row_and_names_all_files(inside):
    status, out, err = call("data", "two-hop", *FILES, *FULL, "--chunk-size", "4")
    assert status == 0, err
    assert "lies<T>?" in out and "training, " in out
    assert "\nfacts: file " in err and "repeats 1" in err and "\nvalid: file " in err


@pytest.mark.parametrize("method", ["thinking", "cot", "no-cot"])
def test_results_are_told_by_hop_and_by_bridge(method, inside):
    record = json.loads((inside / method / "record.json").read_text())
    files = {"train", "valid", "test", "facts"}
    assert record.keys() >= {"valid", "test"} and record["settings"]["data_files"].keys() == files
    report = record["test"]
    assert report["hops"] == [2, 2]
    assert {name: found["n"] for name, found in report["buckets"].items()} == {
        "bay_in_country": 6,
        "port_in_country": 2,
    }
    # Eight subjects, one row each.
    assert report["clusters"] == list(range(8)) and record["valid"]["clusters"][0] == 0
    assert record["hidden_size"] == 64
    counts = report["counts"]
    assert counts["usual_answer_right"] == 0.75 and "strict" in counts
    assert "right_where_second_fact_seen" in counts and "right_where_second_fact_new" not in counts
    by_hop = {"bridge_wrong", "bridge_right_answer_wrong", "both_right"} & counts.keys()
    if method == "thinking":
        assert sum(counts[name] for name in by_hop) == pytest.approx(1)
    assert method != "no-cot" or by_hop <= {"bridge_wrong"}  # untrained, it may say anything


def test_the_record_of_a_run_fills_its_cell_of_the_report(inside):
    names = {method: f"two-hop/full-0.5b-{method}" for method in ("thinking", "cot", "no-cot")}
    records = [
        json.loads((inside / method / "record.json").read_text()) | {"preset": name}
        for method, name in names.items()
    ]
    found = tables(Book(records))
    lines = [line for line in found["methods"].splitlines() if "`gsm/0.5b-thinking`" in line]
    accuracy = 100 * records[0]["test"]["accuracy"]
    assert (
        f"| {accuracy:.1f} [" in lines[0] and "2-hop FK, 0.5B: Thinking States" in found["methods"]
    )
    assert all(f"(`{name}`)" in found["two-hop"] for name in names.values())


def test_a_training_may_begin_with_a_fact_whose_answer_has_no_opening(inside, tmp_path):
    how = [*QUICK, "--fact-repeats", "9", "--out", tmp_path / "run"]  # so nearly all are facts
    status, _, err = call("train", "two-hop", *FILES, *FULL, *how)
    assert status == 0, err


def test_untaught_facts_are_what_the_run_was_trained_with(inside):
    assert json.loads((inside / "thinking" / "run.json").read_text())["fact_thoughts"] == "untaught"


def test_rows_of_a_run_whose_facts_were_untaught_say_what_to_name(inside, tmp_path):
    how = ["data", "two-hop", "--model", "thinking", "--out", tmp_path / "rows.jsonl"]
    status, _, err = call(*how)
    assert status == 2 and "--fact-thoughts untaught, be it asked for or how --model was" in err
    assert "leave" not in err and not (tmp_path / "rows.jsonl").exists()
    assert call(*how, "--fact-thoughts", "trivial")[0] == 0


def test_eval_asks_the_second_hop_alone(inside):
    how = ["--run", "thinking", "--json", "--device", "cpu"]
    status, out, err = call("eval", *how, "--ask", "second", "--out", "second.jsonl")
    assert status == 0, err
    told = result(out)
    assert told["n"] == 8 and told["hops"] == [1, 1] and told["buckets"].keys() == {"capital_of"}
    assert told["ask"] == "second"
    first = json.loads(Path("second.jsonl").read_text().splitlines()[0])
    Path("second.jsonl").unlink()
    assert first["prompt"] == "The capital of Norway is" and first["gold"] == "Oslo"
    status, out, _ = call("eval", *how)
    assert status == 0 and result(out)["hops"] == [2, 2] and "ask" not in result(out)


def test_a_model_is_asked_and_training_reads_what_it_knows(inside, tmp_path):
    out = tmp_path / "known.json"
    asked = ["data", "two-hop", *FILES, "--ask-model", "--model", "no-cot", "--device", "cpu"]
    status, said, err = call(*asked, "--out", out, "--json")
    assert status == 0, err
    assert "train: rows 30, first_hop " in said and "test: rows 8, first_hop " in said
    found = json.loads(out.read_text())
    assert found["data"].keys() == {"train", "test"} and found["model"].endswith("no-cot")
    assert len(found["phrasings"]) == 3 and result(said)["shares"] == found["shares"]
    # So small a model knows nothing; here is what one would have known.
    known = [row(n)["question"] for n in (*range(20), 50, 51)]
    out.write_text(json.dumps(found | {"kept": known}))
    how = ["--knowledge", "parametric", "--known", out, "--out", tmp_path / "run", "--json"]
    status, said, err = call("train", "two-hop", *FILES, *how, *QUICK)
    assert status == 0, err
    told = result(said)
    files = told["settings"]["data_files"]
    assert told["test"]["n"] == 2 and files["known"]["rows"] == 22
    assert files["train"]["used"] + files["valid"]["used"] == 20
    status, said, err = call("eval", "--run", tmp_path / "run", "--device", "cpu", "--json")
    assert status == 0 and result(said)["n"] == 2, err


def test_an_evaluation_tells_of_the_weights_that_it_measured(inside):
    status, out, err = call("eval", "--run", "cot", "--json", "--device", "cpu")
    told, run = result(out), json.loads((inside / "cot" / "run.json").read_text())
    assert status == 0 and told["settings"] == without_paths(run) and told["run"] == "cot", err
    assert told["hidden_size"] == 64 and told["clusters"] == list(range(8))


def test_thoughts_can_end_with_the_prompt(inside, tmp_path):
    how = ["eval", "--run", "thinking", "--json", "--device", "cpu", "--max-thought-tokens", "4"]
    lengths = {}
    for more in ([], ["--prompt-thoughts"]):
        file = tmp_path / f"{len(more)}.jsonl"
        status, out, err = call(*how, *more, "--out", file)
        assert status == 0 and result(out).get("prompt_thoughts", False) == bool(more), err
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lengths[bool(more)] = [len(line["thoughts"]) for line in lines]
    assert all(less < most for less, most in zip(lengths[True], lengths[False]))


@pytest.mark.parametrize(
    "given",
    ["--prompt-thoughts", "--max-thought-tokens 4", "--draft carry --prefill speculative"],
)
def test_what_is_about_thoughts_is_refused_where_none_are_thought(given, inside):
    status, out, err = call("eval", "--run", "cot", *given.split(), "--device", "cpu")
    assert (status, out) == (2, "") and f"{given.split()[0]}: cot does not think" in err


@pytest.mark.parametrize(
    "given, said",
    [
        (["two-hop", *FILES, "--ask-model", "--out", "o"], "--ask-model needs --model"),
        (["two-hop", *FILES, "--ask-model", "--model", "cot"], "--ask-model needs --model"),
        (
            ["parity", "--ask-model", "--model", "no-cot", "--out", "o"],
            "--ask-model: parity has no two hops to ask",
        ),
        (["two-hop", *FILES, "--device", "cpu"], "--device does nothing without --ask-model"),
        (["two-hop", *FILES, "--knowledge", "full"], "--knowledge full and --facts FILE"),
        (
            ["two-hop", *FILES, "--knowledge", "full", "--facts", "no.jsonl"],
            "--facts",
        ),
        (
            ["two-hop", *FILES, "--knowledge", "parametric", "--known", "train.jsonl"],
            "train.jsonl is no JSON object with model, data, kept: make it with data two-hop",
        ),
        (
            ["two-hop", *FILES, "--knowledge", "full", "--facts", "train.jsonl"],
            "train.jsonl, line 1: the fact holds ",
        ),
        (
            ["two-hop", *FILES, *FULL, "--fact-thoughts", "untaught", "--out", "o"],
            "--out: no row can say --fact-thoughts untaught",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(inside, given, said):
    status, _, err = call("data", *given)
    assert status == 2 and said in err and err.count("\n") == 1
    assert not Path("o").exists()


PLAIN = ["train", "two-hop", "--train", "train.jsonl", *QUICK]
ASKING = ["data", "two-hop", *FILES, "--ask-model", "--model", "no-cot", "--out", "never.json"]
IN_VAIN = {
    "thoughts of no facts": ([*PLAIN, "--fact-thoughts", "said"], "without --facts"),
    "repeats of no facts": (["data", *PLAIN[1:4], "--fact-repeats", "3"], "without --facts"),
    "a share beside a file": (
        [*PLAIN, "--valid", "test.jsonl", "--valid-share", "0.3"],
        "--valid-share does nothing with --valid",
    ),
    "asking and teaching": (
        [*ASKING, "--teacher-url", "http://x", "--teacher-model", "y"],
        "--teacher-url does nothing with --ask-model",
    ),
    "asking of a split": ([*ASKING, "--split", "test"], "--split does nothing with --ask-model"),
    "asking of the first": ([*ASKING, "--samples", "3"], "--samples does nothing with --ask-model"),
}


@pytest.mark.parametrize("arguments, message", IN_VAIN.values(), ids=IN_VAIN)
def test_a_flag_that_would_do_nothing_is_refused(arguments, message, inside):
    status, _, err = call(*arguments)
    assert status == 2 and message in err and len(err.splitlines()) == 1, err
    assert not (inside / "runs").exists() and not (inside / "never.json").exists()


def test_no_row_that_was_trained_on_is_evaluated_by_another_share(inside):
    assert call(*PLAIN, "--out", "untested")[0] == 0
    again = ["eval", "--run", "untested", "--samples", "2"]
    status, _, err = call(*again, "--valid-share", "0.5")
    assert status == 2 and "--valid-share 0.5: the run left out 0.15" in err
    assert call(*again, "--valid-share", "0.15")[0] == 0
    # Of test rows the counts of what training rows hold would be of other rows.
    status, _, err = call(*again, "--test", "test.jsonl", "--valid-share", "0.5")
    assert status == 2 and "--valid-share 0.5: the run left out 0.15" in err


def test_hops_of_training_rows_are_not_said_to_be_asked(inside):
    rows = ["eval", "--run", "no-cot", "--train", "train.jsonl", "--samples", "2"]
    status, _, err = call(*rows, "--ask", "first")
    assert status == 2 and "--ask first: of --train only whole questions" in err
    assert call(*rows)[0] == 0


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--facts", "facts.jsonl"], "--facts: no facts are evaluated on; leave it out"),
        (["--facts", "nowhere.jsonl"], "--facts: no facts are evaluated on; leave it out"),
        (FULL, "--facts: no facts are evaluated on; leave it out"),
        (["--fact-repeats", "3"], "--fact-repeats: no facts are evaluated on; leave it out"),
        (["--fact-thoughts", "said"], "--fact-thoughts: no facts are evaluated on; leave it out"),
        (["--knowledge", "parametric"], "--knowledge parametric and --known FILE go together"),
    ],
)
def test_an_evaluation_of_questions_takes_no_flags_of_facts(flags, message, inside):
    again = ["eval", "two-hop", "--run", "thinking", "--samples", "2"]
    status, out, err = call(*again, *flags)
    assert status == 2 and not out and message in err and len(err.splitlines()) == 1, err


def test_a_hop_alone_is_asked_as_the_facts_are_if_they_are_said(inside, tmp_path):
    again = ["eval", "--run", "thinking", "--samples", "1", "--ask", "first"]
    found = tmp_path / "found.jsonl"
    assert call(*again, "--fact-thoughts", "said", "--out", found)[0] == 0
    assert json.loads(found.read_text())["prompt"] == "Bay 50 is in Say it now."
