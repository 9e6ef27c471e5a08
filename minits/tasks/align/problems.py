"""Word problems with their calculations, one a line, in three forms that may be mixed:

    {"question": "…", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\n#### 24"}    GSM8K
    question||<<48/2=24>> <<48+24=72>> #### 72                                      iCoT
    {"question": "…", "steps": ["48/2=24", "48+24=72"], "answer": "72"}             plain
"""
import gzip
import json
import re
import unicodedata
import zlib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

LINE_ENDS = re.compile(rb"\r\n|\r|\n")  # and nothing else: U+2028 may stand in a text
STEP = re.compile("<<(.*?)>>")
ANSWER = re.compile(r"(?=.*\d)-?\$?(\d{1,3}(,\d{3})+|\d*)(\.\d+)?\.*", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """A question, its calculations in order ("48/2=24"), and its answer, a plain number ("72")."""

    question: str
    steps: tuple[str, ...]
    answer: str
    line: int = 0  # of the file that it was read from

    @property
    def complete(self) -> bool:
        """Whether the steps lead to the answer: it is the last one's result."""
        try:
            return bool(self.steps) and result(self.steps[-1]) == Fraction(self.answer)
        except ValueError:
            return False


def result(step: str) -> Fraction:
    """The number behind the equals sign. Raises ValueError if there is another thing."""
    try:
        return Fraction(step.rpartition("=")[2])
    except ZeroDivisionError as error:
        raise ValueError(f"step {step!r:.100} divides by zero") from error


def content_key(question: str) -> str:
    """What is equal for questions of the same words, however they are spaced, spelled or cased."""
    return " ".join(unicodedata.normalize("NFC", question).casefold().split())


def read_problems(path: str | Path, *, skipped: list[str] | None = None) -> list[Problem]:
    """The problems of a file, plain or .gz.

    skipped: where it is given, what is wrong with a bad line goes there, and the line is passed
    over. Else it raises ValueError, naming file and line; in any case if there is no problem.
    """
    content = Path(path).read_bytes()
    if str(path).endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is no whole gzip file: {error}. Fetch it anew.") from error
    problems = []
    for number, line in enumerate(LINE_ENDS.split(content), 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                problems.append(parse_problem(text, number))
        except (ValueError, RecursionError) as error:  # the latter: lists in lists in lists
            if skipped is None:
                raise ValueError(
                    f"{path}, line {number}: {error}. Mend the line, or have bad lines skipped."
                ) from error
            skipped.append(f"line {number}: {error}")
    if not problems:
        raise ValueError(
            f"{path} holds no problem; one is a line such as question||<<1+2=3>> #### 3"
        )
    return problems


def parse_problem(text: str, line: int = 0) -> Problem:
    """The problem in a line of any of the three forms. Raises ValueError saying what is wrong."""
    if text.lstrip().startswith("{"):
        row = json.loads(text)
        question, answer = (member(row, key, str) for key in ("question", "answer"))
        steps = member(row, "steps", list) if "steps" in row else None
    else:
        question, found, answer = text.rpartition("||")
        steps = None
        if not found:
            raise ValueError("neither a JSON object nor question||<<steps>> #### answer")
    if steps is None:
        solution, found, answer = answer.rpartition("####")
        if not found:
            raise ValueError("no #### before the answer")
        steps = STEP.findall(solution)
        if re.search("<<|>>", STEP.sub("", solution)):
            raise ValueError("<< and >> are not in pairs")
    if not question.strip():
        raise ValueError("the question is empty")
    return Problem(question.strip(), tuple(map(plain_step, steps)), plain_number(answer), line)


def member(row: dict[str, Any], key: str, kind: type) -> Any:
    """The value of a key. Raises ValueError if it is missing or of another kind."""
    if not isinstance(row.get(key), kind):
        raise ValueError(f"{key!r} is {json.dumps(row.get(key)):.100}, not a {kind.__name__}")
    return row[key]


def plain_step(step: Any) -> str:
    """A step without blanks, commas and dollar signs."""
    plain = re.sub(r"[\s,$]", "", step) if isinstance(step, str) else ""
    if not re.fullmatch("[^=].*=[^=]+", plain):
        raise ValueError(f"{step!r:.100} is no calculation such as 48/2=24")
    return plain


def plain_number(answer: str) -> str:
    """A number without thousands commas, dollar sign and full stop."""
    answer = answer.strip()
    if not ANSWER.fullmatch(answer):
        raise ValueError(f"the answer {answer!r:.100} is no number")
    return re.sub("[,$]", "", answer).rstrip(".")
