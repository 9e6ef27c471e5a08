"""New numbers for a problem: the question's are drawn anew, steps and answer are computed again.

    Tom has 3 bags of 6 pens, Ann three.   3*6=18   a problem
    Tom has a bags of b pens, Ann three.   a*b      its template
    Tom has 5 bags of 4 pens, Ann three.   5*4=20   a draw

A problem is a template if each operand of its steps has exactly one source: a number of the
question, an earlier result, or a constant (a half, 60 minutes an hour, …). Where one number has
two sources, nobody knows which of them it must follow. Numbers in words stay as they are: "the
three of them" counts what the story lists.
"""
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

from minits.tasks.align.arithmetic import NUMBER, evaluate, tokens_of
from minits.tasks.align.mentions import FREE, Mention, forms, mentions
from minits.tasks.align.problems import Problem, result

TRIES = 100  # draws until one fits: division without rest, results above zero, …
DECIMALS = 4  # that a number of the text may have where it enters a step: "4.5%" as 0.045
ROUND = (1000, 500, 100, 50, 10, 5)  # what is at least four times one of these stays a multiple
DIGITS = re.compile(r"[\d,.]*\d", re.ASCII)
NO_AMOUNT = re.compile("[^\\W_]|[:/#]")  # what stands beside the digits of "5pm", "7:30", "#2"


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
            value = evaluate(written)
            answer = positive(value, decimals)
            steps.append(f"{written}={answer}")
            sources.append((value,))
        old, new, end = self.problem.question, "", 0
        for mention, variable in self.places:
            new += old[end : mention.start]
            new += rewritten(old[mention.start : mention.end], numbers[variable])
            end = mention.end
        return Problem(new + old[end:], tuple(steps), answer, self.problem.name)


def template(problem: Problem) -> Template | None:
    """The template of a problem; None if it has none."""
    amounts, constants = amounts_of(problem.question)
    lefts = [step.rpartition("=")[0] for step in problem.steps]
    operands = [[Fraction(number) for number in NUMBER.findall(left)] for left in lefts]
    needed = set(chain(*operands))
    claims = Counter(constants)
    for kind, number in amounts:
        claims.update(forms(kind, number))
    variables, places = [], []
    for (kind, number), found in amounts.items():
        followed = needed.intersection(forms(kind, number))
        if not followed or any(claims[each] > 1 for each in followed):
            constants.update(forms(kind, number))
            continue
        texts = [problem.question[mention.start : mention.end] for mention in found]
        places += [(mention, len(variables)) for mention in found]
        variables.append(Variable(kind, number, min(map(decimals_of, texts))))
    sources = [forms(kind, number) for kind, number, _ in variables]
    steps = []
    try:
        for index, (step, left) in enumerate(zip(problem.steps, lefts)):
            uses = Counter(chain(*operands[index:]))
            value = result(step)
            if evaluate(left) != value:
                return None
            tokens = tuple(
                traced_back(token, sources, constants, len(variables), uses)
                for token in tokens_of(left)
            )
            steps.append((tokens, decimals_of(spelled(value, DECIMALS))))
            sources.append((value,))
    except ValueError:
        return None
    if not variables or not problem.complete:
        return None
    return Template(problem, tuple(variables), tuple(sorted(places)), tuple(steps))


def amounts_of(question: str) -> tuple[dict[tuple[str, Fraction], list[Mention]], set[Fraction]]:
    """(kind and number of what may be drawn, with its mentions; all numbers said otherwise)."""
    amounts: dict[tuple[str, Fraction], list[Mention]] = {}
    constants: set[Fraction] = set()
    for mention in mentions(question):
        beside = question[: mention.start][-1:] + question[mention.end :][:1]
        number = mention.values[0]
        if mention.kind in ("digits", "percent") and not NO_AMOUNT.search(beside) and number > 0:
            amounts.setdefault((mention.kind, number), []).append(mention)
        else:
            constants.update(mention.values)
        if mention.kind == "percent":
            constants.update((Fraction(1), Fraction(100)))  # of the whole
    return amounts, constants


def traced_back(
    token: str,
    sources: Sequence[tuple[Fraction, ...]],  # of each, the forms that it may be written in
    constants: set[Fraction],
    first_result: int,  # the source from which on they are results
    uses: Counter[Fraction],  # how often each number is an operand from this step on
) -> str | Operand:
    """What a token of a step follows. Raises ValueError if nothing is known, or more than one."""
    if not token[-1].isdigit():
        return token  # an operator
    number = Fraction(token)
    found = [
        Operand(source, form)
        for source, values in enumerate(sources)
        for form, value in enumerate(values)
        if value == number
    ]
    results = [operand for operand in found if operand.source >= first_result]
    if len(results) == uses[number] == 1:
        return results[0]  # or else nothing would follow from that result
    if len(found) + (number in constants) > 1:
        raise ValueError(f"{token} may stand for two things")
    if not found and number not in constants and number not in FREE:
        raise ValueError(f"{token} comes from nowhere")
    return found[0] if found else token


def nearby(old: Variable, rng: random.Random) -> Fraction:
    """A number from half to twice the old one, as round, with as many decimals."""
    scale = 10**old.decimals
    amount = int(old.number * scale)
    unit = next((unit for unit in ROUND if amount % unit == 0 and amount >= 4 * unit), 1)
    least, most = amount // unit // 2, amount // unit * 2
    if old.kind == "percent" and old.number < 100:
        most = min(most, (100 * scale - 1) // unit)
    least = max(least, 2 if unit == scale else 1)  # "1 apples" is no English
    return Fraction(rng.randint(least, most) * unit, scale)


def rewritten(old: str, number: Fraction) -> str:
    """`old` with another number in the same form. Raises ValueError if that has more decimals."""
    return DIGITS.sub(fixed(number, decimals_of(old), "," if "," in old else ""), old, count=1)


def decimals_of(text: str) -> int:
    """How many decimals the number in a text has."""
    return len(DIGITS.search(text)[0].partition(".")[2])


def fixed(number: Fraction, decimals: int, comma: str = "") -> str:
    """The number with so many decimals: "2.50". Raises ValueError if it has more."""
    scaled = number * 10**decimals
    if scaled.denominator > 1:
        raise ValueError(f"{number} has more than {decimals} decimals")
    return f"{Decimal(f'{scaled.numerator}e-{decimals}'):{comma}f}"


def spelled(number: Fraction, decimals: int) -> str:
    """The number without zeros at its end: "2.5". Raises ValueError if it has more decimals."""
    text = fixed(number, decimals)
    return text.rstrip("0").rstrip(".") if decimals else text


def positive(number: Fraction, decimals: int) -> str:
    """`spelled`. Raises ValueError if the number is not above zero."""
    if number <= 0:
        raise ValueError(f"{number} is not above zero")
    return spelled(number, decimals)
