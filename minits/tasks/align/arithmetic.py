"""Exact arithmetic on texts such as "(75/100)*40%": + - * / % and parentheses, nothing else."""
import ast
import re
from fractions import Fraction
from operator import add, mul, neg, pos, sub, truediv

# Without sign, commas and units: what stands in a calculation.
OPERAND = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
TOKEN = re.compile(rf"{OPERAND.pattern}|[-+*/()%]")
PERCENT = re.compile(rf"({OPERAND.pattern})(%?)")  # or none: any operand
LONGEST = 500  # characters of a calculation: Python's parser calls itself
OPERATIONS = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
    ast.UAdd: pos,
    ast.USub: neg,
}


def evaluate(text: str) -> Fraction:
    """The value of a calculation, by Python's own grammar. Raises ValueError if it has none."""
    if TOKEN.sub("", text) or len(text) > LONGEST:
        raise ValueError(
            f"{text!r:.100} is no calculation of numbers, + - * / % and ( ) in at most {LONGEST} "
            "characters"
        )
    exact = PERCENT.sub(lambda found: f"({Fraction(found[1]) / (100 if found[2] else 1)})", text)
    try:
        return computed(ast.parse(exact, mode="eval").body)
    except ZeroDivisionError as error:
        raise ValueError(f"{text!r:.100} divides by zero") from error
    except (SyntaxError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r:.100} is no whole calculation") from error


def computed(node: ast.expr) -> Fraction:
    """The value of what Python's parser made of a calculation.

    Raises KeyError for an operation that is not ours (** or //), AttributeError for another thing
    that is no operation, such as the call 2(3).
    """
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    sides = (side for side in ast.iter_child_nodes(node) if isinstance(side, ast.expr))
    return OPERATIONS[type(node.op)](*map(computed, sides))
