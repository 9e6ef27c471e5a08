"""`run.py infer`: which model answers, what is shown, and that ways of reading answer alike."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

import pytest
from cli_helpers import FAST, INFER, PROMPT, call, result, without_seconds

from minits import GenerationConfig, generate, load
from minits.cli import sources
from minits.cli.sources import SHIPPED

# -- what is shown ---------------------------------------------------------------------------------


def test_infer_json_of_one_prompt_is_one_object_with_text_thoughts_and_counters(inside):
    status, out, _ = call(*INFER, PROMPT, *FAST, "--json")
    answer = result(out)
    assert status == 0 and answer["prompt"] == PROMPT
    assert isinstance(answer["text"], str)
    assert all(isinstance(thought, str) for thought in answer["thoughts"])
    assert answer["stop_reason"] in ("eos", "length")
    assert len(answer["thoughts"]) >= 2 and answer["rounds"] == answer["nontrivial"] + 1
    assert answer["nontrivial"] == sum(bool(thought) for thought in answer["thoughts"][:2])


def test_infer_without_json_prints_answer_and_counters_for_people(inside):
    status, out, _ = call(*INFER, PROMPT, *FAST)
    assert status == 0 and not out.splitlines()[-1].startswith("{")
    assert out.startswith(PROMPT[:20]) and "\nanswer: " in out and "18 tokens in 3 chunks" in out


def test_infer_without_a_prompt_shows_an_example_with_its_expected_answer(inside):
    status, out, err = call(*INFER, *FAST)
    assert status == 0 and "built-in example" in err
    assert "(expected: The final state of the coin is " in out


def test_table_has_a_line_for_each_complete_chunk(inside):
    answer = result(call(*INFER, PROMPT, *FAST, "--json")[1])
    lines = call(*INFER, PROMPT, *FAST, "--table")[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("chunk  state norm"))
    rows = lines[start + 1 : start + 1 + len(answer["thoughts"])]
    assert [row.split()[0] for row in rows] == [str(k) for k in range(len(answer["thoughts"]))]
    assert "The coin starts at state heads. Alice" in rows[0]
    assert repr(answer["thoughts"][0]) in rows[0]


def test_streamed_text_equals_the_text_shown_at_once(empty):
    prompt = "The coin starts at state heads. Bob flips the coin. Alice flips the coin."
    outputs = []
    for more in ([], ["--stream"]):
        status, out, _ = call("infer", prompt, "--run", SHIPPED, *more)
        assert status == 0
        outputs.append(out.splitlines()[:2])
    assert outputs[0] == outputs[1]
    assert outputs[0][0].startswith("The coin") and "[T:" in outputs[0][0]


# -- ways of reading -------------------------------------------------------------------------------


def test_sequential_and_speculative_prefill_answer_alike(inside):
    ways = (["--prefill", "sequential"], ["--draft", "trivial"], ["--draft", "carry"])
    found = [result(call(*INFER, PROMPT, *FAST, "--json", *flags)[1]) for flags in ways]
    sequential, trivial, carry = found
    for key in ("text", "thoughts", "nontrivial", "stop_reason"):
        assert sequential[key] == trivial[key] == carry[key]
    assert sequential["rounds"] == 3


def test_the_old_name_of_the_flag_lookahead_is_taken_with_a_note(inside):
    flags = ([], ["--lookahead", "1"], ["--window", "1"])
    usual, new, old = (call(*INFER, PROMPT, *FAST, "--json", *each) for each in flags)
    assert old[0] == new[0] == 0
    assert without_seconds(result(old[1])) == without_seconds(result(new[1]))
    assert result(new[1])["chunk_passes"] < result(usual[1])["chunk_passes"]  # the flag is heard
    assert [line for line in old[2].splitlines() if line not in new[2].splitlines()] == [
        "--window is called --lookahead now; this name will go."
    ]


def test_a_wrong_value_under_the_old_name_is_told_under_the_new_one(inside):
    status, _, err = call(*INFER, PROMPT, "--window", "0")
    assert status == 2 and err.splitlines()[-1].startswith("run.py infer: --lookahead 0: must be")


def test_the_old_name_of_the_setting_lookahead_is_taken_with_a_warning():
    with pytest.warns(UserWarning, match="`window` is called `lookahead` now") as warned:
        old = GenerationConfig(window=2)
    assert warned[0].filename == __file__
    assert old == GenerationConfig(lookahead=2)
    model, tokenizer = load(SHIPPED)
    with pytest.warns(UserWarning, match="lookahead"):
        answers = generate(model, tokenizer, [PROMPT], window=2)
    assert answers == generate(model, tokenizer, [PROMPT], lookahead=2)
    assert answers != generate(model, tokenizer, [PROMPT])  # by rounds and passes


# -- prompts from files ----------------------------------------------------------------------------


def test_file_with_two_prompts_answers_each_as_alone(inside, tmp_path):
    prompts = [PROMPT, "The coin starts at state tails."]
    (tmp_path / "prompts.txt").write_text(prompts[0] + "\n\n" + prompts[1] + "\n")
    status, out, _ = call(*INFER, "--file", tmp_path / "prompts.txt", *FAST, "--json")
    alone = [result(call(*INFER, prompt, *FAST, "--json")[1]) for prompt in prompts]
    assert status == 0
    assert list(map(without_seconds, result(out)["results"])) == list(map(without_seconds, alone))


def test_a_dash_reads_prompts_from_standard_input(inside, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    status, out, _ = call(*INFER, "--file", "-", *FAST, "--json")
    assert status == 0 and result(out)["prompt"] == PROMPT


# -- which model -----------------------------------------------------------------------------------


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
    err = call("infer", PROMPT, *FAST, "--run", "runs/older")[2]
    assert "model runs/older: thinking on parity" in err


def test_infer_without_runs_uses_the_checkpoint_that_ships(world, empty, monkeypatch):
    monkeypatch.setattr(sources, "SHIPPED", world / "trained")
    status, _, err = call("infer", PROMPT, *FAST)
    assert status == 0 and f"model {world / 'trained'}: thinking on parity" in err


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="no checkpoint ships yet")
def test_shipped_checkpoint_answers_the_built_in_example_rightly(empty):
    status, out, err = call("infer", "--json")
    assert status == 0 and "thinking on parity" in err
    answer = next(line for line in out.splitlines() if line.startswith("answer: "))
    said, expected = answer.removeprefix("answer: ").rstrip(")").split("   (expected: ")
    assert said == expected and result(out)["stop_reason"] == "eos"
    last_words = {thought.split()[-1] for thought in result(out)["thoughts"] if thought}
    assert last_words <= {"heads", "tails"}


@pytest.mark.parametrize("think", ["auto", "off"])
def test_plain_checkpoint_decodes_without_thoughts(think, inside):
    plain = ["infer", "Hi there, how are you?", "--model", "plain", "--think", think]
    status, out, err = call(*plain, *FAST, "--json")
    answer = result(out)
    assert status == 0 and "plain decoding, no thoughts" in err
    assert answer["nontrivial"] == 0 and not any(answer["thoughts"])
    assert answer["stop_reason"] == "length"


def test_plain_checkpoint_thinks_if_asked_and_says_that_it_is_untrained(inside):
    flags = "--think on --chunk-size 4 --inject-after 1 --extract-after 2".split()
    plain = ["infer", "Hi there, how are you?", "--model", "plain"]
    status, out, err = call(*plain, *flags, *FAST, "--json")
    answer = result(out)
    assert status == 0 and "untrained copies" in err
    assert len(answer["thoughts"]) == (22 + 5) // 4 and answer["nontrivial"] > 0
