"""New numbers for word problems, checked by an interpreter of the test's own."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minits.supervision import render_marked
from minits.tasks.align.problems import Problem, parse_problem
from minits.tasks.align.resample import template
from minits.tasks.align.rules import by_rules, traced

# Made up for this test. Of each: what must stay as it is, in the question and in the steps.
TEMPLATES = {
    "Tom has 30 bags of 60 pens, Ann three.||<<30*60=1800>> #### 1800": "three",
    "A coat costs $1,250.00, now 20% less. Pay?||<<1250*.2=250>> <<1250-250=1000>> #### 1000": "%",
    "Of 80 eggs 15% break. How many stay?||<<100-15=85>> <<80*85/100=68>> #### 68": "/100=",
    "Of 80 eggs 15% break. How many stay?||<<80*15%=12>> <<80-12=68>> #### 68": "%=",
    "He runs 2.5 miles in half the 3 days. All?||<<2.5*3=7.5>> <<7.5/2=3.75>> #### 3.75": "/2=",
    "She works 4 hours for $15 a minute. Pay?||<<4*60=240>> <<240*15=3600>> #### 3600": "*60=",
    "At 7:30 or 5pm, #8 and 3/4 of 24 cups.||<<3/4*24=18>> #### 18": "At 7:30 or 5pm, #8 and 3/4 of",
    # Said in digits and otherwise: it stays, and the others are drawn.
    "He buys 2 hats at $9, then twice as many.||<<2*9=18>> <<18*2=36>> #### 36": "buys 2 hats",
    "It takes 1 hour and 5 more.||<<1+5=6>> #### 6": "1 hour",
    # 20 may be the result or what is written; one use of it is the result's.
    "He pays $20 for pens and $4 each for 5 pads.||<<4*5=20>> <<20+20=40>> #### 40": None,
    "Ann has 20, Bob 4 and Carl 5 of 9.||<<4*5=20>> <<20-9=11>> #### 11": "Ann has",
}
NO_TEMPLATES = {
    "no step": "Tom has 3 pens.||#### 3",
    "an operand from nowhere": "Tom has 3 pens.||<<3*7=21>> #### 21",
    "a result or a number": "A 5, B 2, C 3.||<<2+3=5>> <<5*5=25>> <<25-5=20>> #### 20",
    "a step that is wrong": "Tom has 3 bags of 6.||<<3*6=19>> #### 19",
    "a step that is rounded": "A third of 10 by 3.||<<10/3=3.33>> #### 3.33",
    "another answer": "Tom has 3 bags of 6.||<<3*6=18>> #### 19",
    "no calculation": "Tom has 3 bags of 6.||<<3**6=729>> #### 729",
    "a result below zero": "Tom has 3 and owes 6.||<<3-6=-3>> #### -3",
    "a result of zero": "Tom has 6 and 6 go.||<<6-6=0>> #### 0",
    "numbers in words only": "Tom has three bags of six.||<<3*6=18>> #### 18",
    "digits that are no amounts": "At 3:00 and 6pm.||<<3*6=18>> #### 18",
    "more decimals than are drawn": "A 0.00001 and 6.||<<0.00001*6=0.00006>> #### 0.00006",
}
DRAWN = [row for row, stays in TEMPLATES.items() if stays]
NUMBER = r"\d*\.?\d+"


def interpreted(step: str) -> tuple[Fraction, Fraction]:
    """Both sides of a step, by Python's own eval over fractions."""
    text = re.sub(rf"({NUMBER})%", r"(\1/100)", step)
    left, right = re.sub(NUMBER, r"Fraction('\g<0>')", text).split("=")
    return eval(left), eval(right)


def draws(row: str, number: int = 30) -> list[Problem]:
    found = template(parse_problem(row))
    return [found.draw(random.Random(seed)) for seed in range(number)]


@pytest.mark.parametrize("row", DRAWN)
def test_draws_are_exact_and_keep_what_is_no_variable(row):
    old = parse_problem(row)
    for new in draws(row):
        assert new.complete and new.question != old.question
        for step in new.steps:
            left, right = interpreted(step)
            assert left == right > 0
        assert interpreted("0=" + new.answer)[1] == right
        assert TEMPLATES[row] in new.question + " ".join(new.steps)
        assert all(found == operands for found, operands in traced(new))
        # Beside the numbers nothing changes, and whole numbers stay whole.
        for before, after in zip((old.question, *old.steps), (new.question, *new.steps)):
            assert re.sub(r"[\d.,]*\d", "", before) == re.sub(r"[\d.,]*\d", "", after)
        assert all("." in text for text in old.steps) or "." not in new.steps[0] or "." in row


@pytest.mark.parametrize("row", [*NO_TEMPLATES.values(), *(set(TEMPLATES) - set(DRAWN))])
def test_problems_without_a_template(row):
    assert template(parse_problem(row)) is None


def test_a_draw_follows_its_numbers():
    row = "Ann has 20, Bob 4 and Carl 5 of 9.||<<4*5=20>> <<20-9=11>> #### 11"
    for new in draws(row):
        _, bob, carl, nine = map(int, re.findall(r"\d+", new.question))
        assert new.steps == (f"{bob}*{carl}={bob * carl}", f"{bob * carl}-{nine}={new.answer}")


def test_forms_stay_and_all_mentions_follow():
    row = "Now $1,250.00, not $1250, less 4.5%.||<<1250*4.5=5625>> <<5625/100=56.25>> #### 56.25"
    for new in draws(row):
        found = re.fullmatch(r"Now \$([\d,]+)\.00, not \$(\d+), less (\d+\.\d)%\.", new.question)
        assert found[1] == f"{int(found[2]):,}"
        assert new.steps[0].startswith(f"{found[2]}*{float(found[3]):g}=")
        assert float(found[3]) < 100
    assert len({new.question for new in draws(row)}) > 20


def test_the_name_stays_and_the_problem_that_was_read_too():
    old = Problem("Tom has 30 bags of 60.", ("30*60=1800",), "1800", name="rows.txt, line 7")
    new = template(old).draw(random.Random(1))
    assert new.name == old.name
    assert old == Problem("Tom has 30 bags of 60.", ("30*60=1800",), "1800", "rows.txt, line 7")
    assert new == template(old).draw(random.Random(1)) != template(old).draw(random.Random(2))
    assert render_marked(new.question, by_rules(new)) == new.question + "<T>"


def test_where_nothing_fits_there_is_no_draw():
    """Of the numbers that can be drawn five in nine million leave no rest."""
    row = "Split 6000000000 coins by two billion.||<<6000000000/2000000000=3>> #### 3"
    assert draws(row, 3) == [None] * 3


@settings(max_examples=60)
@given(st.lists(st.integers(2, 3000), min_size=2, max_size=5), st.data())
def test_chains_of_calculations_are_drawn_exactly(numbers, data):
    total, steps = Fraction(numbers[0]), []
    for number in numbers[1:]:
        sign = data.draw(st.sampled_from("+-*"))
        new = eval(f"total {sign} number")
        steps.append(f"{total}{sign}{number}={new}")
        total = new
    problem = Problem("He has " + ", ".join(map(str, numbers)) + ".", tuple(steps), str(total))
    found = template(problem)
    new = found and found.draw(random.Random(0))
    if new is None:
        return
    drawn = [int(number) for number in re.findall(r"\d+", new.question)]
    assert len(drawn) == len(numbers)
    for before, after in zip(problem.steps, new.steps):
        left, right = interpreted(after)
        assert left == right > 0
        assert re.sub(r"\d", "", before) == re.sub(r"\d", "", after)
