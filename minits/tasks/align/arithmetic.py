"""Exact arithmetic on texts such as "(75/100)*40%": + - * / % and parentheses, nothing else."""
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from operator import add, mul, sub, truediv

NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)"
TOKEN = re.compile(NUMBER + r"|[-+*/()%]", re.ASCII)
# How strongly an operator binds, and what it does.
OPERATORS = {"+": (1, add), "-": (1, sub), "*": (2, mul), "/": (2, truediv)}


def tokens_of(text: str) -> list[str]:
    """Numbers and operators. Raises ValueError if there is any other thing."""
    tokens = TOKEN.findall(text)
    if "".join(tokens) != text:
        raise ValueError(f"{text!r:.100} is no calculation of numbers, + - * / % and ( )")
    return tokens


def evaluate(tokens: Sequence[str | Fraction]) -> Fraction:
    """The value of a calculation. Raises ValueError if it has none."""
    rest = list(reversed(tokens))
    try:
        value = expression(rest, 0)
    except (IndexError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"the calculation has no value: {error}") from error
    if rest:
        raise ValueError(f"{rest[-1]} stands where the calculation has ended")
    return value


def expression(rest: list[str | Fraction], least: int) -> Fraction:
    """Takes what binds more strongly than `least` off the end of `rest`."""
    value = operand(rest)
    while rest and rest[-1] in OPERATORS:
        strength, operation = OPERATORS[rest[-1]]
        if strength <= least:
            break
        rest.pop()
        value = operation(value, expression(rest, strength))
    return value


def operand(rest: list[str | Fraction]) -> Fraction:
    """Takes a number, or what stands in parentheses, with its signs, off the end of `rest`."""
    token = rest.pop()
    if token == "-":
        return -operand(rest)
    if token == "(":
        value = expression(rest, 0)
        if rest.pop() != ")":
            raise ValueError("a parenthesis is not closed")
    else:
        value = Fraction(token)  # raises ValueError for an operator
    while rest and rest[-1] == "%":
        rest.pop()
        value /= 100
    return value


def fixed(value: Fraction, decimals: int) -> str:
    """The number with so many decimals: "2.50". Raises ValueError if it has more."""
    text = f"{Decimal(int(value * 10**decimals)).scaleb(-decimals):f}"
    if Fraction(text) != value:
        raise ValueError(f"{value} has more than {decimals} decimals")
    return text


def spelled(value: Fraction, decimals: int) -> str:
    """The number without zeros at its end: "2.5". Raises ValueError if it has more decimals."""
    text = fixed(value, decimals)
    return text.rstrip("0").rstrip(".") if "." in text else text
