"""Free-running evaluation: the model reads the prompt with its own thoughts and answers; gold is only compared with."""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, median

from tqdm import tqdm

from minits.checkpoint.files import write_text
from minits.generation import GenerationConfig, GenerationResult, generate_ids
from minits.supervision import Example, Row, encode_example
from minits.tasks import Task, draw_example, extract_answer
from minits.thinking import ThinkingStates
from minits.checkpoint.tokenizer import Tokenizer


@dataclass(frozen=True)
class Report:
    """What an evaluation found. Shares are 0 … 1; `interval` is the 95 % Wilson interval of `accuracy`."""

    n: int
    operations: tuple[int, int]
    accuracy: float
    interval: tuple[float, float]
    buckets: dict[str, dict]  # "low-high" operations -> n, accuracy, interval
    thought_accuracy: float | None  # share of gold chunks whose thought is exactly right; None without thoughts
    thoughts_all_right: float | None  # share of rows with every thought right
    first_wrong: dict | None  # rows with a wrong thought: their number, and the median of chunk and of its share of K
    late_share: float | None  # rows in which a value begins before a state can hold all of the step that gives it
    stopped_by_length: float
    mean_rounds: float
    mean_nontrivial: float


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share right / n."""
    if not n:
        return 0.0, 1.0
    p, square = right / n, z * z / n
    centre, half = p + square / 2, z * sqrt(p * (1 - p) / n + square / (4 * n))
    return round(max(0.0, (centre - half) / (1 + square)), 6), round(min(1.0, (centre + half) / (1 + square)), 6)


def draw_rows(task: Task, tokenizer: Tokenizer, model: ThinkingStates, *, method: str, seed: int, n: int,
              operations: tuple[int, int], max_thought_tokens: int) -> list[tuple[Example, Row]]:
    """`n` evaluation examples with their encodings. The stream is apart from training's, the same for all methods."""
    examples = [draw_example(task, seed=seed, split="eval", index=i, operations=operations) for i in range(n)]
    return [(example, encode_example(example, tokenizer, model.config, method=method, name=f"eval row {i}",
                                     max_thought_tokens=max_thought_tokens)) for i, example in enumerate(examples)]


def options(model: ThinkingStates, rows: Sequence[tuple[Example, Row]], *, prefill: str = "sequential",
            draft: str = "trivial", max_thought_tokens: int = 64) -> GenerationConfig:
    """How to generate answers for `rows`; raises ValueError if one does not fit the model.

    Sequential prefill is the default: in state tracking nearly every chunk thinks, so there is little to speculate on.
    A model without T and C reads its prompts in one pass.
    There is room for the longest right answer and a little more for one that goes wrong; the same for every row, so
    that no answer depends on which rows it shares a batch with.
    """
    room = max(len(row.ids) - row.prompt_length for _, row in rows) + 8
    left = model.backbone.config.max_position_embeddings - max(row.prompt_length for _, row in rows) + 1
    config = GenerationConfig(max_new_tokens=max(1, min(room, left)), draft=draft,
                              prefill=prefill if model.thinks else "speculative",
                              max_thought_tokens=max_thought_tokens)
    config.check(model, [row.ids[:row.prompt_length] for _, row in rows])
    return config


def evaluate(model: ThinkingStates, tokenizer: Tokenizer, task: Task, rows: Sequence[tuple[Example, Row]],
             config: GenerationConfig, *, batch_size: int = 64, predictions: Path | None = None,
             quiet: bool = False) -> Report:
    """Generates an answer for each of `rows` and scores it against the example's, exactly.

    `config`: from `options`. `predictions`: JSON lines with prompt, answer, thoughts and verdict of every row.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][1].ids))  # rows of a batch alike in length
    results: dict[int, GenerationResult] = {}
    for start in tqdm(range(0, len(order), batch_size), desc="evaluate", unit="batch", leave=False,
                      disable=True if quiet else None):
        chosen = order[start:start + batch_size]
        prompts = [rows[i][1].ids[:rows[i][1].prompt_length] for i in chosen]
        results |= zip(chosen, generate_ids(model, prompts, **asdict(config)))
    records = [verdict(task, tokenizer, example, row, results[i]) for i, (example, row) in enumerate(rows)]
    if predictions:
        write_text(predictions, "".join(json.dumps(record) + "\n" for record in records))
    return summarise(records)


def verdict(task: Task, tokenizer: Tokenizer, example: Example, row: Row, result: GenerationResult) -> dict:
    """One line of predictions: what was asked, said and thought, and what was right."""
    text = tokenizer.decode(tokenizer.without_eos(result.ids))
    answer = extract_answer(text, task.opening)
    right = [k < len(result.thought_ids) and result.thought_ids[k] == gold for k, gold in enumerate(row.thoughts)]
    return {
        "prompt": example.prompt, "operations": example.size, "gold": example.answer, "answer": answer,
        "correct": answer == example.answer, "text": text.strip(),
        "thoughts": [tokenizer.decode(ids[:-1]) for ids in result.thought_ids],
        "gold_thoughts": [tokenizer.decode(ids[:-1]) for ids in row.thoughts],
        "thoughts_right": sum(right), "first_wrong": right.index(False) if False in right else None,
        "late": row.late, "rounds": result.rounds, "nontrivial": result.nontrivial,
        "stop_reason": result.stop_reason}


def summarise(records: Sequence[dict], bucket: int = 20) -> Report:
    """The report over lines of predictions; buckets of `bucket` operations."""
    n = len(records)
    chunks = sum(len(r["gold_thoughts"]) for r in records)
    wrong = [r for r in records if r["first_wrong"] is not None]
    groups: dict[int, list[bool]] = {}
    for r in records:
        groups.setdefault(max(r["operations"] - 1, 0) // bucket, []).append(r["correct"])
    return Report(
        n=n, operations=(min(r["operations"] for r in records), max(r["operations"] for r in records)),
        accuracy=fmean(r["correct"] for r in records), interval=wilson(sum(r["correct"] for r in records), n),
        buckets={f"{g * bucket + 1}-{(g + 1) * bucket}": {
            "n": len(v), "accuracy": fmean(v), "interval": wilson(sum(v), len(v))}
            for g, v in sorted(groups.items())},
        thought_accuracy=sum(r["thoughts_right"] for r in records) / chunks if chunks else None,
        thoughts_all_right=1 - len(wrong) / n if chunks else None,
        first_wrong={"rows": len(wrong), "median_chunk": median(r["first_wrong"] for r in wrong),
                     "median_share": median(r["first_wrong"] / len(r["gold_thoughts"]) for r in wrong)}
        if wrong else None,
        late_share=late_share(r["late"] for r in records),
        stopped_by_length=fmean(r["stop_reason"] == "length" for r in records),
        mean_rounds=fmean(r["rounds"] for r in records), mean_nontrivial=fmean(r["nontrivial"] for r in records))


def late_share(late: Iterable[bool | None]) -> float | None:
    """The share of rows that are `late` (see `Row`), of those of which it is known; None if it is of none."""
    known = [value for value in late if value is not None]
    return fmean(known) if known else None


def describe(report: Report) -> str:
    """The report in words, for a terminal."""
    low, high = report.interval
    lines = [f"accuracy {report.accuracy:.2%} [{low:.1%}, {high:.1%}] on {report.n} samples with "
             f"{report.operations[0]} … {report.operations[1]} operations (95 % interval)"]
    lines += [f"  {name:>7} operations: {b['accuracy']:7.2%} of {b['n']}" for name, b in report.buckets.items()]
    if report.thought_accuracy is not None:
        lines.append(f"thoughts right: {report.thought_accuracy:.2%} of chunks; all of them in "
                     f"{report.thoughts_all_right:.2%} of rows")
        if report.first_wrong:
            f = report.first_wrong
            lines.append(f"first wrong thought: {f['rows']} rows, median chunk {f['median_chunk']:g} "
                         f"({f['median_share']:.0%} of the way)")
    if report.late_share is not None:
        lines.append(f"late thoughts: {report.late_share:.1%} of rows")
    if report.stopped_by_length:
        lines.append(f"stopped by length, not by EOS: {report.stopped_by_length:.1%} of rows")
    return "\n".join(lines)
