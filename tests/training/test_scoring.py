"""Evaluation: gold is only compared with, batches change nothing, figures are what they say."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minits.checkpoint.tiny import make_tiny, tiny_tokenizer
from minits.generation import GenerationResult, generate_ids
from minits.methods import make_method
from minits.supervision import Example, Row
from minits.tasks import make_task
from minits.tasks.answers import extract_answer
from minits.training.scoring import (
    SEQUENTIAL,
    Report,
    describe,
    draw_rows,
    predict,
    sharing,
    summarise,
    verdict,
    wilson,
    with_room,
)

LIMIT = 3  # tokens of the longest thought: random models ramble
PARITY = make_task("parity")
TOKENIZER = tiny_tokenizer()
Pairs = list[tuple[Example, Row]]


@pytest.fixture(scope="module")
def model():
    """A random tiny model, in float64 so that no near-tie can flip."""
    model, _ = make_tiny(seed=0, window=16, thinks=True)
    model.config = replace(model.config, chunk_size=4)
    return model.double().eval()


def drawn(
    model,
    n: int,
    *,
    task=PARITY,
    method: str = "thinking",
    operations: tuple[int, int] = (1, 4),
    seed: int = 0,
) -> Pairs:
    """`n` examples with their encodings."""
    least, most = operations
    return draw_rows(
        replace(task, min_ops=least, max_ops=most),
        make_method(method),
        "id",
        TOKENIZER,
        model.config,
        seed=seed,
        n=n,
    )


@pytest.fixture(scope="module")
def rows(model) -> Pairs:
    return drawn(model, 12)


def evaluated(
    model,
    rows: Pairs,
    folder: Path,
    *,
    method: str = "thinking",
    batch_size: int = 64,
    **how: Any,
) -> tuple[Report, list[dict[str, Any]]]:
    """The report and the lines of the predictions file."""
    path = folder / "predictions.jsonl"
    lines, _ = predict(
        model,
        TOKENIZER,
        PARITY,
        make_method(method),
        rows,
        replace(SEQUENTIAL, max_thought_tokens=LIMIT, **how),
        batch_size=batch_size,
        predictions=path,
    )
    return summarise(lines, PARITY), [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def usual(model, rows, tmp_path_factory) -> tuple[Report, list[dict[str, Any]]]:
    """What `evaluated` gives for `rows`."""
    return evaluated(model, rows, tmp_path_factory.mktemp("usual"))


@pytest.fixture(scope="module")
def agreeing(model, rows, usual) -> Pairs:
    """The same prompts with the model's own answers and thoughts as gold."""
    prompts = [row.ids[: row.prompt_length] for _, row in rows]
    results = generate_ids(model, prompts, max_thought_tokens=LIMIT)
    return [
        (
            replace(example, answer=said["answer"], values=()),
            replace(row, thoughts=result.thought_ids[: len(row.thoughts)]),
        )
        for (example, row), said, result in zip(rows, usual[1], results)
    ]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def judged(
    said: str,
    thoughts: list[str],
    *,
    answer: str = "The final state of the coin is heads.",
    gold: list[str],
) -> dict[str, Any]:
    """The verdict on a model that said and thought that, against `answer` and `gold`."""
    result = GenerationResult(
        ids=[*ids(said and " " + said), TOKENIZER.eos_id],
        thought_ids=[[*ids(z), TOKENIZER.eos_id] for z in thoughts],
        rounds=1,
        nontrivial=0,
        stop_reason="eos",
        cut_thoughts=[],
        chunk_passes=1,
        accepted=[1],
    )
    row = Row([3, 4, 5], 2, [[*ids(z), TOKENIZER.eos_id] for z in gold])
    return verdict(
        PARITY, TOKENIZER, 4, Example("The coin", (), answer, size=2), row, result, thinks=True
    )


def line(**changes: Any) -> dict[str, Any]:
    """A line of predictions with three gold chunks, all right, unless `changes` say otherwise."""
    usual = {
        "operations": 5,
        "group": None,
        "cluster": None,
        "correct": True,
        "gold_thoughts": ["", " heads", ""],
        "gold_steps": ["heads", "tails", "heads"],
        "thoughts_right": 3,
        "nontrivial_right": 1,
        "sharing": 0,
        "first_wrong": None,
        "late": False,
        "rounds": 3,
        "nontrivial": 1,
        "stop_reason": "eos",
    }
    return usual | changes


def summed(*lines: dict[str, Any]) -> Report:
    return summarise(lines, PARITY)


# -- the interval ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        # The score interval without continuity correction, Newcombe (1998), table I.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_has_the_published_values(right, n, low, high):
    assert wilson(right, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_share_and_mirrors_its_complement(counts):
    right, n = counts
    low, high = wilson(right, n)
    assert 0 <= low <= right / n <= high <= 1
    assert high - low > 0
    assert wilson(n - right, n) == pytest.approx((1 - high, 1 - low), abs=2e-6)


# -- gold is only compared with --------------------------------------------------------------------


def corrupted(rows: Pairs) -> Pairs:
    """The same rows with a wrong token in front of every gold thought."""
    (wrong,) = ids(" heads")
    return [
        (example, replace(row, thoughts=[[wrong, *z] for z in row.thoughts]))
        for example, row in rows
    ]


def test_model_that_agrees_with_gold_scores_everything_right(model, agreeing, tmp_path):
    report, lines = evaluated(model, agreeing, tmp_path)
    assert report["accuracy"] == report["thought_accuracy"] == report["thoughts_all_right"] == 1.0
    assert report["first_wrong"] is None
    thought = any(z for said in lines for z in said["thoughts"])
    assert thought, "the model thought nothing: the test shows nothing"


OWN = ("prompt", "answer", "correct", "text", "thoughts", "rounds", "nontrivial", "stop_reason")


def test_corrupted_gold_thoughts_change_no_answer_but_every_thought_figure(
    model, agreeing, tmp_path
):
    clean, clean_lines = evaluated(model, agreeing, tmp_path)
    spoilt, spoilt_lines = evaluated(model, corrupted(agreeing), tmp_path)
    spoilt_own, clean_own = (
        [{key: said[key] for key in OWN} for said in lines] for lines in (spoilt_lines, clean_lines)
    )
    assert spoilt_own == clean_own
    assert spoilt["accuracy"] == clean["accuracy"] == 1.0
    assert spoilt["thought_accuracy"] == spoilt["thoughts_all_right"] == 0.0
    assert spoilt["first_wrong"]["rows"] == len(agreeing)


def test_the_answer_part_of_a_row_is_never_read(model, rows, usual, tmp_path):
    wrong = []
    for example, row in rows:
        others = [5] * (len(row.ids) - row.prompt_length)
        wrong.append((example, replace(row, ids=row.ids[: row.prompt_length] + others)))
    assert evaluated(model, wrong, tmp_path) == usual


# -- batches and streams ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["thinking", "no-cot", "cot"])
def test_predictions_do_not_depend_on_the_batch_size(method, model, tmp_path):
    rows = drawn(model, 12, method=method)
    alone, *batched = (
        evaluated(model, rows, tmp_path, method=method, batch_size=size) for size in (1, 3, 8)
    )
    assert batched == [alone, alone]


def test_predictions_follow_the_order_of_the_rows(model, rows, usual, tmp_path):
    shuffled = list(rows)
    random.Random(0).shuffle(shuffled)
    _, lines = usual
    _, others = evaluated(model, shuffled, tmp_path)
    assert [said["prompt"] for said in others] == [example.prompt for example, _ in shuffled]
    unnumbered = [[said | {"index": 0} for said in each] for each in (others, lines)]
    assert sorted(unnumbered[0], key=str) == sorted(unnumbered[1], key=str)


@pytest.mark.parametrize("draft", ["trivial", "carry"])
def test_speculative_prefill_gives_the_same_report_apart_from_rounds(
    draft, model, rows, usual, tmp_path
):
    sequential, lines = usual
    speculative, others = evaluated(model, rows, tmp_path, prefill="speculative", draft=draft)
    assert speculative | {"mean_rounds": 0.0} == sequential | {"mean_rounds": 0.0}
    assert [said | {"rounds": 0} for said in others] == [said | {"rounds": 0} for said in lines]


def test_evaluation_leaves_no_gradients(model, rows, tmp_path):
    assert torch.is_grad_enabled()
    evaluated(model, rows[:2], tmp_path)
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in model.parameters())


def test_all_methods_are_asked_the_same_prompts_and_other_seeds_other_ones(model):
    thinking, no_cot, cot = (
        [example for example, _ in drawn(model, 5, method=method, operations=(10, 40), seed=3)]
        for method in ("thinking", "no-cot", "cot")
    )
    assert thinking == no_cot == cot
    others = [example for example, _ in drawn(model, 5, operations=(10, 40), seed=4)]
    assert not {example.prompt for example in others} & {example.prompt for example in cot}


def test_evaluation_asks_other_prompts_than_training():
    task = make_task("parity", min_ops=20, max_ops=40, eval_max_ops=60)
    trained = {task.example("train", i, 0).prompt for i in range(200)}
    for split in ("id", "ood"):
        asked = {task.example(split, i, 0).prompt for i in range(50)}
        assert len(asked) == 50
        assert not asked & trained


def test_prompt_beyond_the_models_positions_is_refused_with_its_length(model):
    rows = drawn(model, 1, operations=(400, 400))
    length = rows[0][1].prompt_length
    assert length > 2048
    with pytest.raises(ValueError, match=f"{length}.*2048"):
        with_room(model, rows)


def test_room_is_made_for_the_longest_answer_or_the_rows_are_refused(model):
    example = Example("x", (), "y")
    long, wordy = (Row([5] * (n + a), n, []) for n, a in ((2000, 5), (10, 80)))
    assert with_room(model, [(example, long)]).max_new_tokens == 13
    assert with_room(model, [(example, wordy)]).max_new_tokens == 88
    named = replace(example, name="own.jsonl, line 3")
    words = "^own.jsonl, line 3: the prompt has 2000 tokens; with up to 80 new .* 2079 positions"
    with pytest.raises(ValueError, match=words):
        with_room(model, [(example, wordy), (named, long)])


def test_a_setting_that_does_not_fit_the_model_is_no_fault_of_a_row(model):
    pair = Example("x", (), "y", name="own.jsonl, line 3"), Row([5] * 12, 10, [])
    with pytest.raises(ValueError, match="^max_thought_tokens 5000: .* 1 … 2044"):
        with_room(model, [pair], replace(SEQUENTIAL, max_thought_tokens=5000))


# -- verdicts --------------------------------------------------------------------------------------


def test_predictions_file_is_json_lines_with_the_verdict_of_every_row(rows, usual):
    report, lines = usual
    assert len(lines) == report["n"] == len(rows)
    for said, (example, row) in zip(lines, rows):
        assert said["prompt"] == example.prompt
        assert said["gold"] == example.answer
        assert said["operations"] == example.size
        assert len(said["gold_thoughts"]) == len(row.thoughts)
        assert said["correct"] == (said["answer"] == said["gold"])
    assert report == summed(*lines)


def test_report_is_json():
    report = summed(line(first_wrong=1, thoughts_right=2, correct=False), line(operations=30))
    assert json.loads(json.dumps(report))["buckets"].keys() == {"1-20", "21-40"}


def test_a_report_has_the_sizes_under_their_unit():
    assert summed(line(operations=4), line(operations=30))["operations"] == (4, 30)


@pytest.mark.parametrize(
    ("said", "correct"),
    [
        ("The final state of the coin is heads.", True),
        ("The final state of the coin is tails.", False),
        ("heads.", False),
        ("The final state of the coin is heads. heads", False),
        ("", False),
    ],
)
def test_answer_is_right_only_if_it_is_the_gold_answer_whole(said, correct):
    assert judged(said, [""], gold=[""])["correct"] is correct


def test_first_wrong_thought_is_the_first_chunk_that_differs():
    thoughts, gold = [" heads", " tails", "", " heads"], [" heads", " heads", "", " tails"]
    found = judged("heads", thoughts, gold=gold)
    assert (found["first_wrong"], found["thoughts_right"]) == (1, 2)


def test_thought_with_a_right_beginning_is_wrong():
    assert judged("heads", [" heads heads"], gold=[" heads"])["thoughts_right"] == 0
    assert judged("heads", [" heads"], gold=[" heads heads"])["thoughts_right"] == 0


def test_missing_chunks_count_as_wrong_thoughts():
    found = judged("heads", [" heads"], gold=[" heads", "", " tails"])
    assert (found["first_wrong"], found["thoughts_right"]) == (1, 1)
    report = summed(found | {"operations": 5})
    assert (
        report["thought_accuracy"] == pytest.approx(1 / 3) and report["thoughts_all_right"] == 0.0
    )


def test_chunks_beyond_the_gold_ones_count_neither_way():
    found = judged("heads", [" heads", " tails"], gold=[" heads"])
    assert (found["first_wrong"], found["thoughts_right"]) == (None, 1)
    assert summed(found)["thought_accuracy"] == 1.0


# -- the report ------------------------------------------------------------------------------------


def test_buckets_hold_twenty_operations_each():
    report = summed(*(line(operations=n, correct=n != 21) for n in (1, 20, 21, 40, 41, 100)))
    assert {name: (b["n"], b["accuracy"]) for name, b in report["buckets"].items()} == {
        "1-20": (2, 1.0),
        "21-40": (2, 0.5),
        "41-60": (1, 1.0),
        "81-100": (1, 1.0),
    }
    assert report["buckets"]["21-40"]["interval"] == wilson(1, 2)
    assert report["operations"] == (1, 100)


def test_a_group_holds_its_examples_of_all_sizes():
    lines = [line(operations=n, group="odd" if n % 2 else "even", correct=n < 3) for n in range(6)]
    buckets = summed(*lines)["buckets"]
    assert [(name, b["n"], round(b["accuracy"] * 3)) for name, b in buckets.items()] == [
        ("even", 3, 2),
        ("odd", 3, 1),
    ]


def test_clusters_are_numbered_as_they_first_come():
    lines = [line(cluster=name) for name in ("b", "a", "b")]
    assert summed(*lines)["clusters"] == [0, 1, 0]
    assert summed(line())["clusters"] is None


def test_what_else_a_task_counts_is_told_as_shares_of_rows():
    report = summed(*(line(strict=strict, unparsable=False) for strict in (True, False)))
    assert report["counts"] == {"strict": 0.5, "unparsable": 0.0}
    assert "strict: 50.00%" in describe(report, "operations")
    assert summed(line())["counts"] == {}


def test_thought_accuracy_is_over_chunks_and_not_over_rows():
    long = line(gold_thoughts=[""] * 9, thoughts_right=0, first_wrong=0)
    report = summed(line(gold_thoughts=[""], thoughts_right=1), long)
    assert report["thought_accuracy"] == pytest.approx(0.1)
    assert report["thoughts_all_right"] == 0.5


def test_first_wrong_thoughts_are_reported_by_chunk_and_by_share_of_the_way():
    wrong = [
        line(first_wrong=k, gold_thoughts=[""] * n, thoughts_right=k)
        for k, n in ((1, 4), (2, 4), (9, 10))
    ]
    expected = {"rows": 3, "median_chunk": 2, "median_share": 0.5}
    assert summed(*[line()] * 2, *wrong)["first_wrong"] == expected


def test_shares_of_late_and_unfinished_rows_and_means_are_over_all_rows():
    report = summed(
        line(late=True, rounds=5), line(stop_reason="length", nontrivial=3), line(), line()
    )
    assert (report["late_share"], report["stopped_by_length"]) == (0.25, 0.25)
    assert (report["mean_rounds"], report["mean_nontrivial"]) == (3.5, 1.5)
    unknown = summed(line(late=None), line(late=None))
    assert unknown["late_share"] is None
    assert "late" not in describe(unknown, "operations")


def test_baselines_have_no_thought_figures(tmp_path):
    plain = make_tiny(seed=0, window=None, thinks=False)[0].eval()
    rows = drawn(plain, 3, method="no-cot")
    report, lines = evaluated(plain, rows, tmp_path, method="no-cot")
    assert (
        report["thought_accuracy"] is report["thoughts_all_right"] is report["first_wrong"] is None
    )
    assert [said["thoughts"] for said in lines] == [[], [], []]


def test_description_names_the_interval_and_the_thought_accuracy_beside_the_accuracy():
    text = describe(
        summed(line(), line(correct=False, first_wrong=2, thoughts_right=2)), "operations"
    )
    low, high = wilson(1, 2)
    assert f"accuracy 50.00% [{low:.1%}, {high:.1%}] on 2 samples" in text
    assert "thoughts right: 83.33% of chunks; all of them in 50.00% of rows" in text
    assert "first wrong thought: 1 rows, median chunk 2" in text


# -- extraction ------------------------------------------------------------------------------------

OPENING = PARITY.opening


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f" {OPENING} heads.", f"{OPENING} heads."),
        (f" heads tails heads {OPENING} heads.", f"{OPENING} heads."),
        (f"{OPENING} tails. {OPENING} heads.", f"{OPENING} heads."),
        (" heads tails ", "heads tails"),
        ("", ""),
    ],
)
def test_answer_of_a_chain_of_thought_begins_at_the_last_opening(text, answer):
    assert extract_answer(text, OPENING) == answer


def test_chain_of_thought_before_the_answer_does_not_make_it_wrong():
    assert judged(f"heads tails heads {OPENING} heads.", [], gold=[])["correct"]


@pytest.mark.parametrize("name", ["parity", "vars"])
def test_gold_chain_of_thought_gives_back_its_own_answer(name, model):
    task = make_task(name)
    for example, row in drawn(model, 5, task=task, method="cot", operations=(1, 9)):
        written = TOKENIZER.decode(TOKENIZER.without_eos(row.ids[row.prompt_length :]))
        assert len(example.steps) > 0
        assert written.strip() != example.answer
        assert extract_answer(written, task.opening) == example.answer


# -- thoughts that say something, steps that share a chunk -----------------------------------------


def test_thoughts_that_say_something_are_counted_apart_from_empty_ones():
    report = summed(line(), line(nontrivial_right=0, thoughts_right=2, first_wrong=1))
    assert report["nontrivial_right"] == 0.5 and report["thought_accuracy"] == 5 / 6
    assert "thoughts that say something: 50.00% right" in describe(report, "operations")
    found = judged("heads", ["", " heads"], gold=["", " tails"])
    assert (found["thoughts_right"], found["nontrivial_right"]) == (1, 0)


def test_steps_that_share_a_chunk_are_a_share_of_all_steps():
    row = Row([3, 4, 5, 6], 4, [[]], ends=((0, 1), (0, 3), (1, 2)))
    assert sharing(row) == 2
    assert summed(line(sharing=2), line())["sharing"] == 2 / 6


def test_of_what_a_task_says_of_steps_none_does_not_count():
    report = summed(line(chain=True), line(chain=False), line(chain=None))
    assert report["counts"] == {"chain": 0.5}
