"""New numbers for a problem: the question's are drawn anew, steps and answer are computed again.

    Tom has 3 bags of six pens.   3*6=18      a problem
    Tom has a bags of b pens.     a*b         its template
    Tom has 5 bags of four pens.  5*4=20      a draw

A problem is a template if each operand of its steps has exactly one source: a number of the
question, an earlier result, or a constant (a half, 60 minutes an hour, …). Where one number has
two sources, nobody knows which of them it must follow.
"""
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from minits.tasks.align.arithmetic import evaluate, fixed, spelled, tokens_of
from minits.tasks.align.mentions import FREE, WORDS, Mention, forms, mentions
from minits.tasks.align.problems import Problem, result

TRIES = 100  # draws until one fits: division without rest, results above zero, …
DECIMALS = 4  # that a number of the text may have where it enters a step: "4.5%" as 0.045
ROUND = (1000, 500, 100, 50, 10, 5)  # what is at least four times one of these stays a multiple
NO_AMOUNT = re.compile("[^\\W_]|[:/#]")  # what stands beside the digits of "5pm", "7:30", "#2"
DIGITS = re.compile(r"[\d,]*\.?\d+", re.ASCII)


class Variable(NamedTuple):
    """A number that is drawn; all mentions of the same number follow it."""

    kind: str  # percent or digits
    number: Fraction  # as it was
    decimals: int


class Operand(NamedTuple):
    """A number of a step that follows a source, and in which of the source's forms."""

    source: int  # first come the variables, then the results
    form: int


@dataclass(frozen=True)
class Template:
    """A problem whose numbers can be drawn anew."""

    problem: Problem
    variables: tuple[Variable, ...]
    places: tuple[tuple[Mention, int], ...]  # mentions that follow a variable, and which
    steps: tuple[tuple[tuple[str | Operand, ...], int], ...]  # left side, decimals of the result

    def draw(self, rng: random.Random) -> Problem | None:
        """The problem with other numbers of like size; None if none were found that fit.

        What was a whole number stays one, and all numbers are above zero.
        """
        for attempt in range(TRIES):
            # The longer it takes, the more numbers stay as they are.
            keep = attempt / TRIES
            numbers = [
                variable.number if rng.random() < keep else nearby(variable, rng)
                for variable in self.variables
            ]
            try:
                drawn = self.fill(numbers)
            except ValueError:
                continue
            if drawn.question != self.problem.question:
                return drawn
        return None

    def fill(self, numbers: Sequence[Fraction]) -> Problem:
        """The problem with these numbers. Raises ValueError where one comes out that cannot be."""
        sources = [forms(old.kind, new) for old, new in zip(self.variables, numbers)]
        steps = []
        for left, decimals in self.steps:
            written = ""
            for token in left:
                if isinstance(token, Operand):
                    token = positive(sources[token.source][token.form], DECIMALS)
                written += token
            value = evaluate(tokens_of(written))
            answer = positive(value, decimals)
            steps.append(f"{written}={answer}")
            sources.append((value,))
        old, new, end = self.problem.question, "", 0
        for mention, variable in self.places:
            new += old[end : mention.start]
            new += rewritten(old[mention.start : mention.end], numbers[variable])
            end = mention.end
        return Problem(new + old[end:], tuple(steps), answer, self.problem.line)


def template(problem: Problem) -> Template | None:
    """The template of a problem; None if it has none."""
    variables: dict[tuple[str, Fraction], Variable] = {}
    constants = set(FREE)
    amounts = []
    for mention in mentions(problem.question):
        if not is_amount(mention, problem.question):
            constants.update(mention.values)
            continue
        kind = "percent" if mention.kind == "percent" else "digits"
        key = kind, mention.values[0]
        decimals = decimals_of(problem.question[mention.start : mention.end])
        if key in variables:
            decimals = min(decimals, variables[key].decimals)
        variables[key] = Variable(*key, decimals)
        amounts.append((mention, key))
    sources = [forms(*key) for key in variables]
    steps = []
    try:
        for step in problem.steps:
            left = tokens_of(step.rpartition("=")[0])
            value = result(step)
            if evaluate(left) != value or not problem.complete:
                return None
            tokens = tuple(traced_back(token, sources, constants) for token in left)
            steps.append((tokens, decimals_of(spelled(value, DECIMALS))))
            sources.append((value,))
    except ValueError:
        return None
    order = list(variables)
    used = {token.source for left, _ in steps for token in left if isinstance(token, Operand)}
    places = tuple((mention, order.index(key)) for mention, key in amounts)
    places = tuple(place for place in places if place[1] in used)
    if not places:
        return None
    return Template(problem, tuple(variables.values()), places, tuple(steps))


def is_amount(mention: Mention, question: str) -> bool:
    """Whether another number could stand there."""
    beside = question[: mention.start][-1:] + question[mention.end :][:1]
    if mention.kind not in ("digits", "percent", "word") or NO_AMOUNT.search(beside):
        return False
    return mention.values[0] > 0


def traced_back(
    token: str, sources: Sequence[tuple[Fraction, ...]], constants: set[Fraction]
) -> str | Operand:
    """What a token of a step follows. Raises ValueError if nothing is known, or more than one."""
    if not token[-1].isdigit():
        return token  # an operator
    number = Fraction(token)
    found: list[str | Operand] = [
        Operand(source, form)
        for source, values in enumerate(sources)
        for form, value in enumerate(values)
        if value == number
    ]
    if number in constants:
        found.append(token)
    if len(found) != 1:
        raise ValueError(f"{token} has {len(found)} sources")
    return found[0]


def nearby(old: Variable, rng: random.Random) -> Fraction:
    """A number from half to twice the old one, as round, with as many decimals."""
    scale = 10**old.decimals
    amount = int(old.number * scale)
    unit = next((unit for unit in ROUND if amount % unit == 0 and amount >= 4 * unit), 1)
    least, most = amount // unit // 2, amount // unit * 2
    if old.kind == "percent" and old.number < 100:
        most = min(most, (100 * scale - 1) // unit)
    return Fraction(rng.randint(max(least, 1), most) * unit, scale)


def rewritten(old: str, number: Fraction) -> str:
    """The number in place of the one in `old`, and in its form. Raises ValueError if it has none."""
    digits = DIGITS.match(old)
    if not digits:
        if number >= len(WORDS):
            raise ValueError(f"{number} is not written in a word here")
        word = WORDS[int(number)]
        return word.capitalize() if old[0].isupper() else word
    new = fixed(number, decimals_of(digits[0]))
    if "," in old:
        whole, point, rest = new.partition(".")
        new = f"{int(whole):,}{point}{rest}"
    return new + old[digits.end() :]


def decimals_of(text: str) -> int:
    """How many decimals the number at the beginning of a text has."""
    return len(re.match(r"[\d,]*\.?(\d*)", text)[1]) if "." in text else 0


def positive(value: Fraction, decimals: int) -> str:
    """`spelled`. Raises ValueError if the number is not above zero."""
    if value <= 0:
        raise ValueError(f"{value} is not above zero")
    return spelled(value, decimals)
