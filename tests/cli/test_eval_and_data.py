"""`run.py eval` and `run.py data`: which examples they look at, and what they say of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from cli_helpers import EVAL, call, result

from minits.cli.eval import became
from minits.tasks.parity import Parity

EVAL_ANY_LENGTH = [
    *["eval", "parity", "--run", "trained", "--samples", "6"],
    *["--max-thought-tokens", "4", "--json"],
]


def test_a_second_evaluation_tells_what_became_of_wrong_and_right_rows():
    one, two = (
        [{"index": i, "correct": mark == "1"} for i, mark in enumerate(marks)]
        for marks in ("00011", "10010")
    )
    found = {"accuracy": 0.4, "rows_wrong_before": 3, "of_them_right": pytest.approx(1 / 3)}
    assert became(one, two) == found | {"of_the_others_right": 0.5}


# -- eval ------------------------------------------------------------------------------------------


def test_eval_of_a_run_repeats_the_report_of_its_training(inside, tmp_path):
    record = json.loads((inside / "trained" / "record.json").read_text())
    file = tmp_path / "predictions.jsonl"
    lengths = ["--min-ops", "1", "--max-ops", "10"]
    status, out, _ = call(*EVAL, "--samples", "4", *lengths, "--out", file, "--json")
    assert status == 0 and {key: result(out)[key] for key in record["id"]} == record["id"]
    assert file.read_text() == (inside / "trained" / "predictions_id.jsonl").read_text()


def test_eval_begins_at_the_longest_trained_length_by_default(inside):
    status, out, _ = call(*EVAL, "--samples", "6", "--json")
    low, high = result(out)["operations"]
    assert status == 0 and 10 <= low <= high <= 12


@pytest.mark.parametrize("most", [3, 10])
def test_eval_of_lengths_as_trained_begins_where_training_began(most, inside):
    status, out, _ = call(*EVAL_ANY_LENGTH, "--samples", "60", "--max-ops", most)
    assert status == 0 and tuple(result(out)["operations"]) == (1, most)


def test_a_plain_model_does_not_think_in_eval_as_it_does_not_in_infer(inside):
    plain = ["eval", "vars", "--run", "plain", "--variables", "1", "--samples", "3"]
    status, out, err = call(*plain, "--min-ops", "0", "--max-ops", "1", "--json")
    figures = result(out)
    assert status == 0 and figures["thought_accuracy"] is None, err
    assert (figures["mean_rounds"], figures["mean_nontrivial"]) == (1, 0)


def test_eval_without_a_task_takes_that_of_the_training(inside):
    named, unnamed = (
        result(call(*EVAL[:1], *task, *EVAL[2:], "--json")[1]) for task in (["parity"], [])
    )
    assert named == unnamed


def test_eval_can_begin_beyond_the_trained_lengths(inside):
    status, out, err = call(*EVAL_ANY_LENGTH, "--min-ops", "11")
    assert status == 0, err
    assert 11 <= result(out)["operations"][0]


def test_eval_takes_its_longest_length_under_its_name_in_training_too(inside):
    status, out, _ = call(*EVAL_ANY_LENGTH, "--eval-max-ops", "11")
    low, high = result(out)["operations"]
    assert status == 0 and 10 <= low <= high <= 11


# -- data ------------------------------------------------------------------------------------------


def test_self_addition_is_drawn_only_if_asked_for(empty):
    shown = ["data", "vars", "--samples", "1", "--ops", "60", "--json"]
    usual, added = (result(call(*shown, *more)[1]) for more in ([], ["--self-addition"]))
    own = [re.findall(r" (\w)=\1\+\1", found["prompt"]) for found in (usual, added)]
    assert own[0] == [] and len(own[1]) > 3


def test_data_has_the_limit_of_thoughts_and_names_what_is_longer(inside):
    long = ["data", "parity", "--max-thought-tokens", "1", "--samples", "3"]
    status, _, err = call(*long)
    assert (
        status == 2 and "example 0: the gold thought" in err and "--max-thought-tokens = 1" in err
    )
    status, out, err = call("data", "--model", "trained", "--samples", "3", "--chunk-size", "99")
    assert status == 2 and "--max-thought-tokens = 4" in err  # that of the run


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
    assert "training (1 … 10 operations), 5 examples" in out  # as training draws them
    assert figures["samples"] == 5 and 0 <= figures["late_share"] <= 1
    assert 0 < figures["nontrivial_share"] <= 1
    c = {"parity": 8, "vars": 4}[task]  # as they are trained
    assert len(figures["thoughts"]) == (len(figures["ids"]) - 1) // c


def test_data_of_another_index_shows_another_example_of_the_same_length(empty):
    shown = ["data", "parity", "--samples", "1", "--ops", "9", "--json", "--index"]
    first, second = (result(call(*shown, index)[1]) for index in ("0", "1"))
    assert first["prompt"] != second["prompt"]
    assert first["prompt"].count(".") == second["prompt"].count(".") == 10
