"""Word problems: how lines are read, numbers found, steps placed."""

from __future__ import annotations

import json
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minits.supervision import parse_marked, render_marked
from minits.tasks.align.arithmetic import evaluate
from minits.tasks.align.mentions import mentions
from minits.tasks.align.problems import Problem, parse_problem
from minits.tasks.align.rules import ALIGNERS, by_rules, traced

F = Fraction
CLIPS = Problem("Tom has 48 clips.", ("48/2=24", "48+24=72"), "72")
FORMS = {
    "GSM8K": {"answer": "He sold 48/2 = <<48/2=24>>24.\nAll: <<48+24=72>>72\n#### 72"},
    "steps": {"steps": ["48/2=24", "48+24=72"], "answer": "72"},
    "marked steps": {"steps": ["<<48/2=24>>", "<<48+24=72>>"], "answer": "72"},
    "cot": {"cot": "<<48/2=24>> <<48+24=72>>", "answer": "72"},
    "cot in a list": {"cot": ["<<48/2=24>> <<48+24=72>>"], "answer": "#### 72"},
    "blanks, dollars, commas": {"steps": ["$48 / 2 = 24", "4,8+24= $72"], "answer": " $72. "},
    "other keys": {"steps": ["48/2=24", "48+24=72"], "answer": "72", "id": 7},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_a_line_of_json_in_any_form(row):
    assert parse_problem(json.dumps({"question": " Tom has 48 clips. "} | row)) == CLIPS


def test_a_line_of_text():
    assert parse_problem("Tom has 48 clips.||<<48/2=24>> <<48+24=72>> #### 72\n") == CLIPS
    assert parse_problem("a || b?||#### -1,234.50") == Problem("a || b?", (), "-1234.50")


COMPLETE = {
    "<<1+1=2>> #### 2": True,
    "<<1/2=.50>> #### 0.5": True,
    "<<1-3=-2>> #### -2": True,
    "<<10*5%=50%>> #### .5": True,
    "<<1+1=2>> <<2+1=3>> #### 2": False,
    "#### 2": False,
    "<<1+1=two>> #### 2": False,
    "<<1+1=2e999999999>> #### 2": False,
    "<<1+1=2/0>> #### 2": False,
    "<<1+1=2**99**99>> #### 2": False,
}


@pytest.mark.parametrize("solution", COMPLETE)
def test_a_problem_is_complete_if_its_last_result_is_the_answer(solution):
    assert parse_problem(f"q||{solution}").complete is COMPLETE[solution]


BAD_LINES = {
    "Tom has 2. #### 2": "neither a JSON object nor question||",
    "||<<1+1=2>> #### 2": "the question is empty",
    "q||<<1+1=2>> 2": "there is no #### before the answer",
    "q||<<1+1=2>> <<1+1=2 #### 2": "<< and >> are not in pairs",
    "q||<<two>> #### 2": "'two' is no calculation such as 48/2=24",
    "q||<<1+1=>> #### 2": "'1+1=' is no calculation",
    "q||<<" + "1+" * 300 + "1=301>> #### 301": "is no calculation",
    "q||#### five": "the answer 'five' is no number",
    "q||#### 1,2": "the answer '1,2' is no number",
    "q||#### 1e5": "the answer '1e5' is no number",
    "q||#### ": "the answer '' is no number",
    "q||#### 1/0": "is no number",
    "q||#### ٣": "is no number",
    "q||#### " + "9" * 5000: "is no number",
    '{"question": "q"': "no JSON: Expecting",
    '{"question": "q", "answer": "5"}': "no #### before the answer, and no key 'steps' or 'cot'",
    '{"question": "q", "answer": "#### 5", "answer": "#### 6"}': "a key is there twice",
    '{"answer": "#### 5", "a": 1}': (
        "the problem holds answer, a; it must be an object that holds question, answer"
    ),
    '{"question": ["q"], "answer": "#### 5"}': "'question' of the problem is [\"q\"], not a text",
    '{"question": "q", "answer": 5}': "'answer' of the problem is 5, not a text",
    '{"question": "q", "answer": "5", "steps": 3}': "'steps' is 3, not a text or a list",
    '{"question": "q", "answer": "5", "steps": [3]}': "a step is 3, not a text",
    '{"question": "q", "answer": "5", "steps": [{"at": 1, "text": "5"}]}': "read with --align given",
    '{"question": "q", "answer": "5", "cot": ["so 5"]}': "'so 5' is no calculation",
    '{"question": "q\\ud800", "answer": "#### 5"}': "is no character of a text",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_says_what_is_wrong(line):
    with pytest.raises(ValueError) as error:
        parse_problem(line)
    assert BAD_LINES[line] in str(error.value)
    assert len(str(error.value)) < 300


# A tree of operations: written by `written`, computed by `computed`, without the module's help.
NUMBERS = st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,3})?%?|\.[0-9]{1,3}%?", fullmatch=True)
TREES = st.recursive(
    NUMBERS,
    lambda tree: st.tuples(st.sampled_from("+-*/"), tree, tree) | st.tuples(st.just("-"), tree),
    max_leaves=12,
)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def written(tree) -> str:
    if isinstance(tree, str):
        return tree
    if len(tree) == 2:
        return f"(-{written(tree[1])})"
    return f"({written(tree[1])}{tree[0]}{written(tree[2])})"


def computed(tree) -> Fraction:
    if isinstance(tree, str):
        return F(tree.rstrip("%")) / (100 if tree.endswith("%") else 1)
    values = [computed(side) for side in tree[1:]]
    return OPERATORS[tree[0]](*values) if len(values) == 2 else -values[0]


@given(TREES)
def test_calculations_are_exact(tree):
    try:
        right = computed(tree)
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="divides by zero"):
            evaluate(written(tree))
    else:
        assert evaluate(written(tree)) == right


@given(st.lists(st.integers(1, 99), min_size=1, max_size=8), st.data())
def test_operators_bind_as_in_python(numbers, data):
    operators = [data.draw(st.sampled_from("+-*/")) for _ in numbers[1:]]
    text = "".join(map("".join, zip(map(str, numbers), [*operators, ""])))
    right = eval("".join(map("".join, zip(map("F({})".format, numbers), [*operators, ""]))))
    assert evaluate(text) == right


@pytest.mark.parametrize(
    "text, right", [("007", 7), ("+5", 5), ("--5", 5), ("8/(2)", 4), ("200*5%", 10)]
)
def test_odd_calculations(text, right):
    assert evaluate(text) == right


NO_CALCULATIONS = (
    """2**3 7//2 1e5 1_000 2(3) () (5)(6) 1.2.3 5. . 5%% 5%5 (5)% 5=5 x+1 ٣ ½ 1,000 1<2
    [1] 1j 0x1 3*/4 (1 1) not~1""".split()
)


@pytest.mark.parametrize("text", ["", "1 2", *NO_CALCULATIONS, "(" * 10_000 + "1" + ")" * 10_000])
def test_other_things_are_no_calculations(text):
    with pytest.raises(ValueError, match="calculation"):
        evaluate(text)


@pytest.mark.parametrize("sign", ["(", "-", "1+", "1*("])
def test_deep_calculations_have_a_value_or_are_refused(sign):
    for length in range(0, 600, 7):
        text = (sign * length)[:499] + "1"
        try:
            evaluate(text + ")" * text.count("("))
        except ValueError as error:
            assert "calculation" in str(error)


# The mentions of a text, and the first values of each.
MENTIONS = {
    "nothing": {},
    "12 cats": {"12": [12]},
    "$1,234,567.50 now": {"1,234,567.50": [F("1234567.5")]},
    "1,23": {"1": [1], "23": [23]},
    ".5 and 0.5": {".5": [F(1, 2)], "0.5": [F(1, 2)]},
    "30% off": {"30%": [30, F("0.3"), F("0.7"), 70, F("1.3"), 130]},
    "5 percent": {"5 percent": [5, F("0.05")]},
    "5 percents": {"5": [5]},
    "Seven": {"Seven": [7]},
    "a half": {"half": [F(1, 2), 2, F(1, 2)]},
    "two thirds": {"thirds": [F(1, 3), 3, F(2, 3), F(2, 3)]},
    "three-quarters": {"quarters": [F(1, 4), 4, F(3, 4), F(3, 4)]},
    "3/4 of it": {"4": [4, F(3, 4)]},
    "twenty-five": {"twenty": [20], "five": [5, 100, 25]},
    "two hundred": {"hundred": [100, 200]},
    "two and a half": {"half": [F(1, 2), 2, F(1, 2), 1, F(5, 2)]},
    "2½ cups": {"2": [2], "½": [F(1, 2), 2, F(1, 2), 1, F(5, 2)]},
    "two dozens": {"dozens": [12, 24]},
    "an hour": {"hour": [24, 60, 3600]},
    "$20/hour": {"20": [20], "hour": [24, 60, 3600]},
    "1/0": {"1": [1], "0": [0]},
    "٣ ²": {},
    "tense hourly": {},
    "9" * 5000: {},
}


@pytest.mark.parametrize("text", MENTIONS, ids=lambda text: text[:20])
def test_mentions(text):
    found = {text[mention.start : mention.end]: mention.values for mention in mentions(text)}
    for said, values in MENTIONS[text].items():
        assert list(found[said][: len(values)]) == values
    assert MENTIONS[text] or not found or len(text) > 4300


# Marked question -> steps.
PLACED = {
    "Tom has 3 bags of 6 pens,<T> and he gives half of them away.<T> Are 2 more left?<T>": (
        "3*6=18 18/2=9 9-2=7"
    ),
    "A pen costs $2,<T> and she buys a pad for $1,500.50.  Pay?<T>": "2*3=6 6+1500.50=1506.5",
    "Ann is 5.<T> Bob is twice as old.<T> Carl?<T>": "5+1=6 2*6=12 12+1=13",
    "He has 4 and loses 4 and finds 4.<T> How many?<T>": "4-4+4=4 4*1=4",
    "The walk takes 3 hours.<T> How many minutes for 2 walks?<T>": "3*60=180 180*2=360",
    "60 cups an hour for 5 days,<T> is it?<T>": "60*5=300 300*1=300",
    "It fell by 20% from 50,<T> then rose by 3.<T>": "50*0.8=40 40+3=43",
    "One third of 9 is red,<T> 2 are not. What is it?<T>": "9/3=3 3+2=5",
    "None of it is said here, 1, 2.<T><T>": "77*88=6776 6776-1=6775",
    "Later steps wait, 8 and 9.<T> See 2.<T><T>": "8+9=17 2*8=16 9-8=1",
    "It ends.<T>": "1+1=2",
    "": "",
}


@pytest.mark.parametrize("marked", PLACED, ids=lambda text: text[:30])
def test_places(marked):
    question, steps = parse_marked(marked, PLACED[marked].split())
    assert (
        render_marked(question, by_rules(Problem(question, PLACED[marked].split(), ""))) == marked
    )


def test_traced_operands():
    problem = parse_problem("Tom has 3 bags of 6.||<<3*6=18>> <<18/2=9>> <<18*9+77=239>> #### 239")
    assert traced(problem) == [(2, 2), (1, 2), (2, 3)]


WORDS = st.sampled_from(
    "3 4 half dozen, 50% pens and . then hours 1,200 ½ 3/4 ? 0 twenty é".split()
)
STEPS = st.lists(st.from_regex(r"[0-9(]{0,3}[-+*/]\.?[0-9]{1,9}=[0-9]{1,3}[)%]?", fullmatch=True))


@given(st.lists(WORDS).map(" ".join), STEPS, st.sampled_from(list(ALIGNERS)))
def test_steps_keep_their_order_and_the_last_stands_at_the_end(question, steps, aligner):
    placed = ALIGNERS[aligner](Problem(question, tuple(steps), "1"))
    places = [step.position for step in placed]
    assert [step.text for step in placed] == steps
    assert places == sorted(places)
    assert places[-1:] == [len(question)][: len(steps)]
    assert all(place == len(question) for place in places) or aligner == "rules"
    assert all(0 < place <= len(question) for place in places) or not question


@given(st.text(max_size=60), st.text("0123456789.,/%½ -half", max_size=60))
def test_any_text_has_mentions_in_order(text, numbers):
    for question in (text, numbers, "9" * 5000 + numbers):
        found = mentions(question)
        spans = [place for mention in found for place in (mention.start, mention.end)]
        assert spans == sorted(spans)
        by_rules(Problem(question, ("1+1=2", "2+1=3"), "3"))
