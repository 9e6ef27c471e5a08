"""Scoring: what is right and what was said are found and compared in one way."""

from __future__ import annotations

import json
import unicodedata
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minits.checkpoint.tiny import ASSETS, tiny_tokenizer
from minits.generation import GenerationResult
from minits.methods import METHODS, make_method
from minits.tasks import make_task
from minits.tasks.answers import SCORINGS, extract_answer, number_in, score_number, score_text
from minits.thinking import ThinkingConfig
from minits.training.scoring import draw_rows, verdict

# said, gold, opening
SAME = {
    "no opening": ("5 pens", "5 pens", ""),
    "blanks at the ends": (" yes\n", "  yes \n", ""),
    "other blanks between": ("a  b\u00a0c", "a b c", ""),
    "accent after its letter": ("cafe\u0301", "caf\u00e9", ""),
    "accent before, letter after": ("caf\u00e9", "cafe\u0301", ""),
    "accent in the opening": ("Re\u0301ponse: 5", "R\u00e9ponse: 5", "R\u00e9ponse:"),
    "opening again in the answer": ("A: Anna has 3 Apples", "A: Anna has 3 Apples", "A"),
    "the same behind a chain": ("An Apple. A: Anna has 3 Apples", "A: Anna has 3 Apples", "A"),
    "opening again, at the end": ("is x is", "is x is", "is"),
    "an answer that is nothing but it": ("is is", "is is", "is"),
    "a chain of thought": ("3 5 The answer is 5", "The answer is 5", "The answer is"),
    "an answer given up": ("The answer is 4. The answer is 5", "The answer is 5", "The answer is"),
    "a question of its own": ("The answer is 5\nQ: 2 + 2?", "The answer is 5", "The answer is"),
    "an answer of two lines": ("so\na: 1\nb\nc", "a: 1\nb", "a:"),
    "gold without the opening": ("heads", "heads", "The answer is"),
}
OTHER = {
    "another word": ("5 pens", "5 cups", ""),
    "more": ("5 pens 5", "5 pens", ""),
    "less": ("5", "5 pens", ""),
    "nothing": ("", "5", ""),
    "another case": ("Yes", "yes", ""),
    "another beginning, with the opening inside": (
        "A: Bob has 3 Apples",
        "A: Anna has 3 Apples",
        "A",
    ),
    "no opening said": ("5", "The answer is 5", "The answer is"),
}


@pytest.mark.parametrize("said, gold, opening", SAME.values(), ids=SAME)
def test_the_same_answer_is_right(said, gold, opening):
    assert score_text(said, gold, opening)["right"]


@pytest.mark.parametrize("said, gold, opening", OTHER.values(), ids=OTHER)
def test_another_answer_is_wrong(said, gold, opening):
    assert not score_text(said, gold, opening)["right"]


@given(
    gold=st.text(max_size=30),
    opening=st.sampled_from(["", "A", "The answer is", "é", "aa", " "]),
    scoring=st.sampled_from(sorted(SCORINGS)),
    form=st.sampled_from(["NFC", "NFD"]),
    chain=st.text(alphabet="abc A", max_size=10),
)
def test_a_gold_answer_is_right_as_it_is_in_another_form_and_behind_a_chain(
    gold, opening, scoring, form, chain
):
    gold = f"{opening} {gold} 7"
    said = unicodedata.normalize(form, f"  {gold}  ")
    assert SCORINGS[scoring](said, gold, opening)["right"]
    if opening.strip():
        behind = SCORINGS[scoring](f"{chain} {said}", gold, opening)
        assert behind["right"] or opening in ("A", "aa")  # which the chain may end with


NUMBERS = {
    "72": 72,
    "72.": 72,
    "72.0": 72,
    "$72": 72,
    "72 dollars": 72,
    "72 dollars.": 72,
    "1,234": 1234,
    "$1,234.50.": Fraction(2469, 2),
    "12,345,678": 12345678,
    "1,23": 23,
    "50%": 50,
    "50 %.": 50,
    ".5": Fraction(1, 2),
    "0.50": Fraction(1, 2),
    "1/2": Fraction(1, 2),
    "-5": -5,
    "\u22125": -5,
    "$-5": -5,
    "-$5": -5,
    "(-5)": -5,
    "x=-5": -5,
    "3-5": 5,
    "a-5": 5,
    "3 - 5 = -2": -2,
    "2 + 2 = 4": 4,
    "€3 and then €4": 4,
    "007": 7,
    "72, or so": 72,
    "72,": 72,
    "": None,
    "none": None,
    "-": None,
    ".": None,
    "1/0": None,
    "9" * 5000: None,
}


@pytest.mark.parametrize("text, value", NUMBERS.items(), ids=[text[:12] for text in NUMBERS])
def test_the_last_number_of_a_text(text, value):
    assert number_in(text) == value


@given(value=st.decimals(allow_nan=False, allow_infinity=False, places=2))
def test_a_number_is_found_however_it_is_written(value):
    written = [
        f"{value:f}",
        f"{value:,f}",
        f"${value:f}",
        f"about {value:,f} dollars.",
        f"{value:f}%",
    ]
    assert {number_in(text) for text in written} == {Fraction(value)}


@pytest.mark.parametrize(
    "said, right, strict, unparsable",
    [
        ("The answer is 1,000.", True, True, False),
        ("The answer is $1000", True, False, False),
        ("5 * 200 The answer is 1000.00", True, False, False),
        ("The answer is 100", False, False, False),
        ("The answer is many", False, False, True),
        ("1,000", False, False, True),  # only behind the opening
        ("", False, False, True),
        ("The answer is 1,000.\nQuestion 2: how many?", True, True, False),
    ],
)
def test_scoring_by_number_tells_strict_and_unparsable_beside_right(
    said, right, strict, unparsable
):
    found = score_number(said, "The answer is 1,000.", "The answer is")
    assert (found["right"], found["strict"], found["unparsable"]) == (right, strict, unparsable)


def test_an_unparsable_gold_makes_no_unparsable_answer_right():
    assert not score_number("The answer is x", "The answer is y", "The answer is")["right"]
    assert not score_number("The answer is x", "The answer is x", "The answer is")["right"]


def test_a_number_in_the_opening_is_not_the_answer():
    assert score_number("Answer 1: x", "Answer 1: 1", "Answer 1:")["unparsable"]


def test_the_answer_is_told_as_it_was_written():
    assert extract_answer("so The  answer is  5 ", "The  answer") == "The  answer is  5"


# -- every task, its own golds ---------------------------------------------------------------------

SAMPLE = {name: str(ASSETS / f"rows-{name}.jsonl") for name in ("train", "test")}
ODD = [
    "A: Anna has 3 Apples",
    " 5\n",
    "cafe\u0301 6",
    "caf\u00e9 7",
    "two\nlines 8",
    "9\u00a0A",
    "$1,0",
]
TASKS = {
    "parity": ("parity", {}),
    "vars": ("vars", {}),
    "vars, self addition": ("vars", {"self_addition": True}),
    "rows": ("rows", SAMPLE),
    "rows by number": ("rows", SAMPLE | {"scoring": "number"}),
    "rows without an opening": ("rows", SAMPLE | {"opening": ""}),
    "odd answers": ("rows", {"train": "odd.jsonl"}),
    "odd answers, opening A": ("rows", {"train": "odd.jsonl", "opening": "A"}),
    "odd answers by number": ("rows", {"train": "odd.jsonl", "scoring": "number"}),
    "odd answers without an opening": ("rows", {"train": "odd.jsonl", "opening": ""}),
}


@pytest.mark.parametrize("name, options", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_task_scores_its_own_golds_100_percent(name, options, method, tmp_path, monkeypatch):
    """The whole way: answer -> ids of the row -> decoded -> scored."""
    monkeypatch.chdir(tmp_path)
    lines = [{"question": f"q{i}<T>", "steps": ["s"], "answer": a} for i, a in enumerate(ODD)]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = make_task(name, **options)
    if method == "cot" and not task.opening:
        pytest.skip("without an opening no answer can be told from its chain")
    tokenizer = tiny_tokenizer(task.texts())
    config = ThinkingConfig(4, 1, 1, tokenizer.eos_ids, tokenizer.pad_id)
    for split in task.splits:
        pairs = draw_rows(task, make_method(method), split, tokenizer, config, seed=3, n=200)
        for example, row in pairs:
            result = GenerationResult(
                ids=row.ids[row.prompt_length :],
                thought_ids=row.thoughts,
                rounds=1,
                nontrivial=0,
                stop_reason="eos",
                cut_thoughts=[],
                chunk_passes=1,
                accepted=[1],
            )
            line = verdict(task, tokenizer, 4, example, row, result, thinks=True)
            assert line["correct"] and line["first_wrong"] is None, line
