"""`run.py infer`: which model answers, what is shown, and that ways of reading answer alike."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import run
from cli_helpers import FAST, INFER, PROMPT, call, result, without_seconds

from minits import generate, load
from minits.cli import infer, models
from minits.cli.models import SHIPPED

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


def test_prompts_of_a_file_are_streamed_in_their_order(empty):
    (empty / "prompts.txt").write_text("\n".join(coins(5)))
    told = []
    for more in ([], ["--stream"]):
        status, out, _ = call("infer", "--run", SHIPPED, "--file", "prompts.txt", *more)
        assert status == 0
        told.append([line for line in out.splitlines() if " seconds" not in line])
    without_time = [[line.rpartition(";")[0] or line for line in each] for each in told]
    assert without_time[0] == without_time[1]


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


def test_the_setting_lookahead_is_heard():
    model, tokenizer = load(SHIPPED)
    answers = generate(model, tokenizer, [PROMPT], lookahead=2)
    assert answers != generate(model, tokenizer, [PROMPT])  # by rounds and passes


def test_one_text_in_place_of_a_list_of_prompts_is_refused():
    model, tokenizer = load(SHIPPED)
    with pytest.raises(ValueError, match=r"one text; give a list of texts: \['The coin'\]"):
        generate(model, tokenizer, "The coin")


# -- prompts from files ----------------------------------------------------------------------------

OPERATIONS = (" Alice flips the coin.", " Bob doesn't flip the coin.", " Bob flips the coin.")


def coins(count: int) -> list[str]:
    """Prompts of 0 … 12 operations, lengths and chunks in no order."""
    begin = ("The coin starts at state heads.", "The coin starts at state tails.")
    return [
        begin[i % 2] + "".join(OPERATIONS[(i * i + j) % 3] for j in range(7 * i % 13))
        for i in range(count)
    ]


def json_lines(out: str) -> list[dict]:
    """What `infer --json` says of each prompt, less the time and the neighbours of its batch."""
    own = {"seconds", "batch"}
    return [
        {key: value for key, value in json.loads(line).items() if key not in own}
        for line in out.splitlines()
    ]


def test_a_file_in_batches_is_answered_in_its_order_as_one_by_one(empty):
    prompts = coins(60)
    (empty / "prompts.txt").write_text("\n".join(prompts))
    flags = [*INFER[:1], "--run", SHIPPED, "--file", "prompts.txt", "--json"]
    found = [json_lines(call(*flags, "--batch-size", size)[1]) for size in (1, 7)]
    assert found[0] == found[1]
    assert [line["line"] for line in found[0]] == list(range(1, 61))
    assert [line["prompt"] for line in found[0]] == prompts
    assert {line["stop_reason"] for line in found[0]} == {"eos"}
    assert len({line["text"] for line in found[0]}) == 2
    model, tokenizer = load(SHIPPED)
    for prompt, line in zip(prompts[:5], found[0]):
        (alone,) = generate(model, tokenizer, [prompt])
        assert line["text"] == alone.text and line["thoughts"] == alone.thoughts
        assert line["rounds"] == alone.rounds and line["accepted"] == alone.accepted


def test_batches_hold_as_many_prompts_as_was_asked(empty):
    (empty / "prompts.txt").write_text("\n".join(coins(9)))
    flags = ["infer", "--run", SHIPPED, "--file", "prompts.txt", "--json"]
    for more, sizes in (([], {9}), (["--batch-size", 4], {4, 1}), (["--batch-size", 1], {1})):
        out = call(*flags, *more)[1]
        assert {json.loads(line)["batch"] for line in out.splitlines()} == sizes


def test_answers_are_told_as_soon_as_those_before_them_are_there(empty, monkeypatch, capsys):
    (empty / "prompts.txt").write_text("\n".join(coins(9)))
    usual, told = infer.answer_batch, []

    def noted(*given):
        told.append(capsys.readouterr().out.count("answer: "))
        return usual(*given)

    monkeypatch.setattr(infer, "answer_batch", noted)
    flags = ["infer", "--run", str(SHIPPED), "--file", "prompts.txt", "--batch-size", "1"]
    assert run.main(flags) == 0
    told.append(capsys.readouterr().out.count("answer: "))
    # Lines 1 … 4 have 0, 7, 1 and 8 operations, 5 … 8 have 2, 9, 3 and 10; 9 comes alone.
    assert told == [0, 1, 0, 2, 1, 1, 0, 2, 1, 1]


def test_people_are_told_the_same_of_a_file_as_of_its_prompts(empty):
    prompts = coins(5)
    (empty / "prompts.txt").write_text("\n".join(prompts))
    together = call("infer", "--run", SHIPPED, "--file", "prompts.txt")[1]
    alone = [call("infer", "--run", SHIPPED, prompt)[1] for prompt in prompts]
    seconds = re.compile(r"; [0-9.]+ s( for 5 prompts together)?$", re.MULTILINE)
    assert seconds.sub("", together) == seconds.sub("", "".join(alone))
    assert together.count(" s for 5 prompts together\n") == 5


# Lines end at \n, \r\n and \r; a mark at the beginning is no text; blank lines are no prompts.
LINES = {
    "blank lines": (b"a\n\nb\n  \n\n", [(1, "a"), (3, "b")]),
    "Windows": (b"a\r\n\r\nb\r\n", [(1, "a"), (3, "b")]),
    "old Macintosh": (b"a\rb", [(1, "a"), (2, "b")]),
    "mark": (b"\xef\xbb\xbfa\nb", [(1, "a"), (2, "b")]),
    "mark inside": (b"a\n\xef\xbb\xbfb", [(1, "a"), (2, "\ufeffb")]),
    "other separators": (
        "a\u2028b\x85c\x0bd\x0ce\u2029f\x1cg\nh".encode(),
        [(1, "a\u2028b\x85c\x0bd\x0ce\u2029f\x1cg"), (2, "h")],
    ),
    "blanks at the ends": (b" a \n", [(1, " a ")]),
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_a_file_and_of_standard_input_are_prompts(name, empty, monkeypatch):
    content, prompts = LINES[name]
    (empty / "prompts.txt").write_bytes(content)
    assert infer.read_prompts(infer.InferFlags(file="prompts.txt")) == prompts
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "latin-1"))
    assert infer.read_prompts(infer.InferFlags(file="-")) == prompts


def test_a_dash_reads_prompts_from_standard_input(inside, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"\n{PROMPT}\n".encode())))
    status, out, _ = call(*INFER, "--file", "-", *FAST, "--json")
    assert status == 0 and result(out)["prompt"] == PROMPT and result(out)["line"] == 2


def test_a_closed_standard_input_is_told_in_one_line(inside, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # so Python shows it
    status, out, err = call(*INFER, "--file", "-")
    assert (status, out) == (2, "")
    assert err == (
        "run.py infer: --file -: standard input is closed; name a file, or pipe one in.\n"
    )


# -- texts that end an answer ----------------------------------------------------------------------

SAYS = " The final state of the coin is heads."
STOPS = {
    "a word": ([" coin"], " The final state of the", 6),
    "across tokens": (["te of t"], " The final sta", 5),
    "the first of several": (["coin", " sta", "is"], " The final", 3),
    "within one token the first": (["nal", "i"], " The f", 2),
    "at the beginning": ([" "], "", 1),
    "nowhere": (["tails"], SAYS, 10),
}


@pytest.mark.parametrize("name", STOPS)
def test_an_answer_ends_before_the_first_stop(name, empty):
    stops, text, tokens = STOPS[name]
    flags = [flag for stop in stops for flag in ("--stop", stop)]
    prompt = "The coin starts at state heads."
    answer = result(call("infer", prompt, "--run", SHIPPED, *flags, "--json")[1])
    assert answer["text"] == text
    assert answer["stop_reason"] == ("stop" if text != SAYS else "eos")
    read = 7 + tokens - 1  # the last token is not read
    assert len(answer["thoughts"]) == read // 8
    out = call("infer", prompt, "--run", SHIPPED, *flags)[1]
    assert f"\nanswer: {text.strip()}\n" in out and f"{tokens} new tokens, stopped by" in out


def test_stops_in_batches_are_those_one_by_one(empty):
    (empty / "prompts.txt").write_text("\n".join(coins(12)))
    flags = ["infer", "--run", SHIPPED, "--file", "prompts.txt", "--stop", "tai", "--json"]
    found = [json_lines(call(*flags, "--batch-size", size)[1]) for size in (1, 12)]
    assert found[0] == found[1]
    assert {line["stop_reason"] for line in found[0]} == {"stop", "eos"}


def test_nothing_is_read_after_a_stop(empty, monkeypatch):
    usual, taken = infer.InlineText.take, []
    monkeypatch.setattr(
        infer.InlineText, "take", lambda self, event: taken.append(event) or usual(self, event)
    )
    call("infer", "The coin starts at state heads.", "--run", SHIPPED, "--stop", " final")
    assert sum(isinstance(event, int) for event in taken) == 2


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
    monkeypatch.setattr(models, "SHIPPED", world / "trained")
    status, _, err = call("infer", PROMPT, *FAST)
    assert status == 0 and f"model {world / 'trained'}: thinking on parity" in err


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="no checkpoint ships yet")
def test_shipped_checkpoint_answers_the_built_in_example_rightly(empty):
    status, out, err = call("infer")
    assert status == 0 and "thinking on parity" in err
    answer = next(line for line in out.splitlines() if line.startswith("answer: "))
    said, expected = answer.removeprefix("answer: ").rstrip(")").split("   (expected: ")
    (line,) = call("infer", "--json")[1].splitlines()  # and nothing else
    found = json.loads(line)
    assert said == expected == found["text"].strip() and found["stop_reason"] == "eos"
    assert found["line"] is None
    last_words = {thought.split()[-1] for thought in found["thoughts"] if thought}
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
