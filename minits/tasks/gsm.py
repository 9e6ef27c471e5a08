"""GSM: word problems, the calculations that solve them, and a number as the answer.

    line -> Problem (align/problems.py) -> new numbers, perhaps (align/resample.py)
         -> each step at its place in the question (align/rules.py) -> Example

Lines of GSM8K, of iCoT's text form and of plain JSON may be mixed. A step is what stands inside
`<<48/2=24>>`.
"""
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

from minits.checkpoint.files import Json
from minits.settings import setting
from minits.supervision import OVERFLOW_SEPARATOR, Example
from minits.tasks.align.problems import Problem, parse_problem, value
from minits.tasks.align.resample import template
from minits.tasks.align.rules import ALIGNERS, traced
from minits.tasks.answers import COMPARED, NUMBER, SCORINGS, number_in
from minits.tasks.rows import Rows, SplitRows
from minits.tasks.task import Task


@dataclass(frozen=True)
class Gsm(Rows):
    """Trained on the problems whose last step gives the answer; evaluated on all."""

    scoring: str = setting("number", COMPARED, choices=tuple(SCORINGS))
    align: str = setting(
        "rules",
        "where steps stand: rules (the end of the clause that holds the last operand), end (of the "
        "question), or given (by lines as the task rows reads them, a teacher's for instance)",
        choices=(*ALIGNERS, "given"),
    )
    resample: float = setting(
        0.0,
        "share of the training samples whose numbers are drawn anew, of problems that allow it",
        least=0,
        most=1,
    )

    name: ClassVar = "gsm"
    kept: ClassVar = (*Rows.kept, "align")
    bucket: ClassVar = 1
    recipes: ClassVar = Rows.recipes | {
        ("*", "real"): {
            "chunk_size": 4, "layout": "pack", "steps": 6000, "batch_size": 64, "lr": 5e-5,
            "warmup": 40, "decay": 1.0, "max_thought_tokens": 128,
        },
        ("no-cot", "real"): {"steps": 4000, "lr": 3e-5},
        ("cot", "real"): {"steps": 2000, "lr": 3e-5},
    }

    def check(self) -> None:
        if self.resample and self.align == "given":
            raise ValueError(
                "--resample does nothing with --align given: numbers can be drawn anew where rules "
                "place the steps. Leave one of them out."
            )

    def read_split(self, split: str) -> SplitRows:
        rows, about = super().read_split(split)
        if split != "train" or self.align == "given":
            return SplitRows(rows, about)
        whole = [problem for problem in rows if problem.complete]
        if not whole:
            raise ValueError(
                f"{about['file']}: of {len(rows)} problems none has a last step that gives its "
                "answer, and only such are trained on; in a text a step is <<1+2=3>>. Mend the "
                "steps, or give --align given."
            )
        return SplitRows(whole, about | {"left_out": len(rows) - len(whole)})

    def parse(self, line: str) -> Any:
        if self.align != "given":
            return parse_problem(line)
        row = super().parse(line)
        if "####" in row.answer:
            raise ValueError(
                "the answer is a chain of thought (####), whose steps have no places: --align "
                "given is for lines as the task rows reads them, --align rules for this one"
            )
        return row

    def evaluated(self, given: Json) -> tuple[Task, str]:
        """As `Rows.evaluated`, the training rows as they stand in their file, too."""
        task, split = super().evaluated({"resample": 0.0} | given)
        if task.resample and split != "train":
            raise ValueError(f"--resample: numbers of {split} are never drawn anew; leave it out.")
        return task, split

    def overlap_key(self, split: str, index: int) -> str:
        row = self.loaded(split).examples[index]
        return self.asked(row.question) if isinstance(row, Problem) else row.prompt

    def example(self, split: str, index: int, seed: int | str) -> Example:
        row = self.loaded(split).examples[index]
        if not isinstance(row, Problem):
            return row
        rng = random.Random(f"{seed}/numbers/{index}")
        if split == "train" and rng.random() < self.resample:
            made = template(row)
            row = (made and made.draw(rng)) or row
        steps = ALIGNERS[self.align](row)
        return self.with_words(Example(row.question, steps, row.answer, (), len(steps), row.name))

    def with_words(self, example: Example) -> Example:
        """As that of the task rows; the answer's `values` are known if the last step gives it."""
        example = super().with_words(example)
        if not example.steps or value(example.steps[-1].text) != number_in(example.answer):
            return example
        *_, number = NUMBER.finditer(example.answer)
        return replace(example, values=((number.start(), len(example.steps) - 1),))

    def coverage(self, split: str, n: int) -> dict[str, float]:
        rows, about = self.loaded(split)
        problems = [row for row in rows[:n] if isinstance(row, Problem)]
        if not problems:
            return {}
        left_out = about.get("left_out", 0)
        # Of each step, whether all of its operands were found.
        steps = [found == there for problem in problems for found, there in traced(problem)]
        made = [template(problem) is not None for problem in problems]
        return {
            "steps_traced": fmean(steps or [0]),
            "problems_with_a_template": fmean(made),
            "rows_left_out": left_out / (len(rows) + left_out),  # of the whole split
        }

    def score_steps(
        self, text: str, thoughts: Sequence[str] | None, example: Example, right: bool
    ) -> dict[str, bool | None]:
        """Of the steps that were said, which are right, and what the answer makes of the last one.

        right_if_last_is: of the rows whose last result is right, whether the answer is.
        """
        said, answer = self.steps_and_answer(text, thoughts)
        gold = [step.text for step in example.steps]
        steps = said.replace(OVERFLOW_SEPARATOR, " ").split()
        if not gold or (thoughts is None and not steps):  # No-CoT says none
            return {}
        first, last = (steps[0], value(steps[-1])) if steps else ("", None)
        last_right = last is not None and last == value(gold[-1])
        return {
            "first_left_side": first.partition("=")[0] == gold[0].partition("=")[0],
            "first_result": bool(steps) and value(first) == value(gold[0]),
            "last_result": last_right,
            "chain": steps == gold,
            "answer_is_last_result": None if last is None else number_in(answer) == last,
            "right_if_last_is": right if last_right else None,
        }
