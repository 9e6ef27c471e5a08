"""Word problems with their calculations, one a line, in forms that may be mixed:

    {"question": "…", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\n#### 24"}        GSM8K
    question||<<48/2=24>> <<48+24=72>> #### 72                                          iCoT
    {"question": "…", "cot": "<<48/2=24>> <<48+24=72>>", "answer": "72"}                GSM8K-Aug
    {"question": "…", "steps": ["48/2=24", "<<48+24=72>>"], "answer": "72"}             plain
"""
import json
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from minits.tasks.align.arithmetic import LONGEST, evaluate
from minits.tasks.answers import NUMBER, number_in
from minits.tasks.rows import check_texts, check_unmarked, members, parse_json

STEP = re.compile("<<(.*?)>>", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """A question, its calculations in order ("48/2=24"), and its answer, a plain number ("72")."""

    question: str
    steps: tuple[str, ...]
    answer: str
    name: str = ""  # where it was read, for errors

    @property
    def complete(self) -> bool:
        """Whether the steps lead to the answer: it is the last one's result."""
        return bool(self.steps) and value(self.steps[-1]) == number_in(self.answer)


def result(step: str) -> Fraction:
    """The number behind the equals sign. Raises ValueError if there is another thing."""
    return evaluate(step.rpartition("=")[2])


def value(step: str) -> Fraction | None:
    """The `result` of a step that was said; None if it has none."""
    try:
        return result(step)
    except ValueError:
        return None


def parse_problem(text: str) -> Problem:
    """The problem in a line of any of the forms. Raises ValueError saying what is wrong."""
    if text.lstrip().startswith("{"):
        row = parse_json(text)
    else:
        question, found, answer = text.rpartition("||")
        if not found or text.startswith("\ufeff"):  # files that were joined hold marks inside
            raise ValueError(
                f"neither a JSON object nor question||<<steps>> #### answer: {text!r:.60}"
            )
        row = {"question": question, "answer": answer}
    kinds = {"question": str, "answer": str}
    question, solved = members(row, kinds, "the problem", others=True)
    if not question.strip():
        raise ValueError("the question is empty")
    check_texts([question])
    check_unmarked(question)
    solution, found, answer = solved.rpartition("####")
    if "steps" in row or "cot" in row:
        key = "steps" if "steps" in row else "cot"
        solution = row[key]
        if not isinstance(solution, str | list):
            raise ValueError(f"{key!r} is {json.dumps(solution):.100}, not a text or a list")
    elif not found:
        raise ValueError("there is no #### before the answer, and no key 'steps' or 'cot'")
    return Problem(question.strip(), steps_of(solution), plain_number(answer))


def steps_of(solution: str | list[Any]) -> tuple[str, ...]:
    """What stands inside << >>; in a list, an entry without them is a step itself."""
    steps, whole = [], isinstance(solution, str)
    for text in [solution] if whole else solution:
        if not isinstance(text, str):
            raise ValueError(
                f"a step is {json.dumps(text):.100}, not a text; steps that name their places (at) "
                "are read with --align given, or by the task rows"
            )
        if re.search("<<|>>", STEP.sub("", text)):
            raise ValueError(f"<< and >> are not in pairs in {text!r:.100}")
        steps += STEP.findall(text) or ([] if whole else [text])
    return tuple(map(plain_step, steps))


def plain_step(step: str) -> str:
    """A step without blanks, commas and dollar signs."""
    plain = re.sub(r"[\s,$]", "", step)
    if not re.fullmatch("[^=].*=[^=]+", plain) or len(plain) > LONGEST:
        raise ValueError(
            f"{step!r:.100} is no calculation such as 48/2=24 of at most {LONGEST} characters"
        )
    return plain


def plain_number(answer: str) -> str:
    """A number without thousands commas, currency and full stop. Raises ValueError for others."""
    number = answer.strip().rstrip(".")
    if not NUMBER.fullmatch(number) or number_in(number) is None:
        raise ValueError(f"the answer {answer.strip()!r:.100} is no number")
    return re.sub("[,$€£¥]", "", number).replace("\u2212", "-")
