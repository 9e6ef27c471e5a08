"""Free-running evaluation: the model reads with its own thoughts and answers, as a user's does."""
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, median

from tqdm import tqdm

from minits.checkpoint.files import Json, write_text
from minits.checkpoint.tokenizer import Tokenizer
from minits.generation import GenerationConfig, GenerationResult
from minits.methods.method import Method
from minits.prefill import Intervention
from minits.supervision import Example, Row
from minits.tasks.task import Task
from minits.thinking import Engine, ThinkingConfig
from minits.training.late import is_late, late_share

Pairs = Sequence[tuple[Example, Row]]
Verdict = Json  # what the model made of a row: a line of predictions
Report = Json  # of an evaluation, as records hold it: see `summarise`
HookMaker = Callable[[Sequence[Row]], Intervention]  # makes one for each batch, from its rows


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share right / n."""
    z = 1.96
    p, square = right / n, z * z / n
    centre = p + square / 2
    half = z * sqrt(p * (1 - p) / n + square / (4 * n))
    low, high = (centre - half) / (1 + square), (centre + half) / (1 + square)
    return round(max(0.0, low), 6), round(min(1.0, high), 6)


def draw_rows(
    task: Task,
    method: Method,
    split: str,
    tokenizer: Tokenizer,
    config: ThinkingConfig,
    *,
    seed: int,
    n: int,  # of a finite split at most all
    stage: int = -1,  # as for `Method.encode`
) -> Pairs:
    """The first n examples of a split, the same for all methods, with their encodings."""
    found = []
    for i in range(min(n, task.size(split) or n)):
        example = task.example(split, i, seed)
        name = example.name or f"example {i}"
        found.append((example, method.encode(example, tokenizer, config, name, stage)))
    return found


# In state tracking nearly every chunk thinks, so there is little to speculate on.
SEQUENTIAL = GenerationConfig(prefill="sequential")


def with_room(
    engine: Engine, rows: Pairs, config: GenerationConfig = SEQUENTIAL
) -> GenerationConfig:
    """`config` with room for the longest right answer and a little more for one that goes wrong.

    The same for every row, so that no answer depends on who shares its batch. Raises ValueError if
    a row does not fit the model.
    """
    longest = max(len(row.ids) - row.prompt_length for _, row in rows)
    prompt = max(row.prompt_length for _, row in rows)
    left = engine.backbone.config.max_position_embeddings - prompt + 1
    config = replace(config, max_new_tokens=max(longest, min(longest + 8, left)))
    config.check(engine)
    for (example, _), ids in zip(rows, prompts_of(rows)):
        config.check_prompt(engine, ids, f"{example.name or 'a row'}: the prompt")
    return config


def prompts_of(rows: Pairs) -> list[list[int]]:
    """Their ids, without the answers."""
    return [row.ids[: row.prompt_length] for _, row in rows]


def predict(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    method: Method,
    rows: Pairs,
    config: GenerationConfig = SEQUENTIAL,
    *,
    batch_size: int = 64,
    predictions: Path | None = None,  # file for them, as JSON lines
    make_hook: HookMaker | None = None,
) -> tuple[list[Verdict], list[GenerationResult]]:
    """Generates an answer for each of `rows`: (verdicts, results). Raises as `with_room`."""
    config = with_room(engine, rows, config)
    # Rows of a batch are alike in length.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][1].ids))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    found: dict[int, GenerationResult] = {}
    # disable=None: no bar where there is no terminal.
    for chosen in tqdm(batches, desc="evaluate", unit="batch", leave=False, disable=None):
        batch = [rows[i] for i in chosen]
        if make_hook:
            config = replace(config, hook=make_hook([row for _, row in batch]))
        found |= zip(chosen, method.answer(engine, prompts_of(batch), config))
    results = [found[i] for i in range(len(rows))]
    c = engine.config.chunk_size
    lines = [
        {"index": i} | verdict(task, tokenizer, c, *pair, result, method.thinks)
        for i, (pair, result) in enumerate(zip(rows, results))
    ]
    if predictions:
        write_text(predictions, "".join(json.dumps(line) + "\n" for line in lines))
    return lines, results


def verdict(
    task: Task,
    tokenizer: Tokenizer,
    c: int,
    example: Example,
    row: Row,
    result: GenerationResult,
    thinks: bool,  # whether the method does
) -> Verdict:
    """What was asked, said and thought, and what was right."""
    text = tokenizer.decode(tokenizer.without_eos(result.ids))
    score = task.score(text, example)
    thoughts = result.thought_ids
    right = [k < len(thoughts) and thoughts[k] == gold for k, gold in enumerate(row.thoughts)]
    said = [tokenizer.decode(ids[:-1]) for ids in thoughts]
    steps = task.score_steps(text, said if thinks else None, example, score["right"])
    return {
        "name": example.name,
        "prompt": example.prompt,
        task.unit: example.size,
        "group": task.group(example),
        "cluster": task.cluster(example),
        "gold": example.answer,
        "answer": score.pop("answer"),
        "correct": score.pop("right"),
        **score,
        **steps,
        "text": text.strip(),
        "gold_steps": [step.text for step in example.steps],
        "thoughts": said,
        "gold_thoughts": [tokenizer.decode(ids[:-1]) for ids in row.thoughts],
        "thoughts_right": sum(right),
        "nontrivial_right": sum(
            same for same, gold in zip(right, row.thoughts) if len(gold) > 1
        ),
        "sharing": sharing(row),
        "first_wrong": right.index(False) if False in right else None,
        "late": is_late(example, row, tokenizer, c),
        "rounds": result.rounds,
        "nontrivial": result.nontrivial,
        "stop_reason": result.stop_reason,
    }


def sharing(row: Row) -> int:
    """How many steps stand in a chunk with another one."""
    chunks = [chunk for chunk, _ in row.ends]
    return sum(chunks.count(chunk) > 1 for chunk in chunks)


def summarise(lines: Sequence[Verdict], task: Task) -> Report:
    """The report over lines of predictions.

    Shares are 0 … 1, None where there is nothing that they could be of; intervals are 95 % Wilson
    intervals.
    """
    n, right = len(lines), [line["correct"] for line in lines]
    sizes = [line[task.unit] for line in lines]
    chunks = sum(len(line["gold_thoughts"]) for line in lines)
    wrong = [line for line in lines if line["first_wrong"] is not None]
    nontrivial = sum(gold != "" for line in lines for gold in line["gold_thoughts"])
    steps = sum(len(line["gold_steps"]) for line in lines)
    # What the task's scores told beside `right`.
    marks = {name for line in lines for name in line if isinstance(line[name], bool)}
    counts = {
        name: fmean(line[name] for line in lines if line.get(name) is not None)
        for name in sorted(marks - {"correct", "late"})
    }
    first_wrong = None
    if wrong:
        shares = [line["first_wrong"] / len(line["gold_thoughts"]) for line in wrong]
        first_wrong = {
            "rows": len(wrong),
            "median_chunk": median(line["first_wrong"] for line in wrong),
            "median_share": median(shares),  # chunk / chunks
        }

    def share(name: str, of: int) -> float | None:
        """The sum of what the lines hold under that name, over `of`; None where that is 0."""
        return sum(line[name] for line in lines) / of if of else None

    return {
        "n": n,
        task.unit: (min(sizes), max(sizes)),
        "accuracy": fmean(right),
        "interval": wilson(sum(right), n),
        "buckets": buckets(lines, task),
        "thought_accuracy": share("thoughts_right", chunks),  # of gold chunks, exactly right
        # Of gold thoughts that say something, exactly right.
        "nontrivial_right": share("nontrivial_right", nontrivial),
        "thoughts_all_right": 1 - len(wrong) / n if chunks else None,  # of rows
        "first_wrong": first_wrong,  # of the rows that have a wrong thought
        "late_share": late_share(line["late"] for line in lines),  # of rows; see `known_from`
        # Of gold steps, those whose chunk has another one.
        "sharing": share("sharing", steps) if chunks else None,
        "counts": counts,  # what else the task counts: shares of rows by name
        "stopped_by_length": fmean(line["stop_reason"] == "length" for line in lines),
        "mean_rounds": fmean(line["rounds"] for line in lines),
        "mean_nontrivial": fmean(line["nontrivial"] for line in lines),
        # Of each row "1" or "0", in order: to compare with others on the same rows.
        "right": "".join(str(int(each)) for each in right),
        "clusters": clusters(lines),
    }


def clusters(lines: Sequence[Verdict]) -> list[int] | None:
    """The number of each line's cluster, from 0 as they first come; None: rows are independent."""
    names = [line["cluster"] for line in lines]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return None if None in numbers else [numbers[name] for name in names]


def buckets(lines: Sequence[Verdict], task: Task) -> dict[str, dict]:
    """n, accuracy and interval by group, else by size: 1 … task.bucket, as many more, and so on.

    With a bucket of 1 that is each size. Smaller sizes come first.
    """
    groups: dict[tuple[int, str], list[bool]] = {}  # whether right, by (size, name)
    for line in lines:
        size, name, width = line[task.unit], line["group"], task.bucket
        if name is not None:
            size = 0  # a group may hold examples of several sizes
        elif width == 1:
            name = f"{size}"
        elif width:
            size = max(size - 1, 0) // width * width
            name = f"{size + 1}-{size + width}"
        if name is not None:
            groups.setdefault((size, name), []).append(line["correct"])
    return {
        name: {
            "n": len(found),
            "accuracy": fmean(found),
            "interval": wilson(sum(found), len(found)),
        }
        for (_, name), found in sorted(groups.items())
    }


def describe(report: Report, unit: str) -> str:
    """The report in words, for a terminal. unit: of the sizes of the task's examples."""
    low, high = report["interval"]
    least, most = report[unit]
    lines = [
        f"accuracy {report['accuracy']:.2%} [{low:.1%}, {high:.1%}] on {report['n']} samples with "
        f"{least} … {most} {unit} (95 % interval)"
    ]
    for name, share in report["counts"].items():
        lines.append(f"  {name.replace('_', ' ')}: {share:.2%}")
    for name, found in report["buckets"].items():
        lines.append(f"  {name:>7} {unit}: {found['accuracy']:7.2%} of {found['n']}")
    if report["thought_accuracy"] is not None:
        lines.append(
            f"thoughts right: {report['thought_accuracy']:.2%} of chunks; all of them in "
            f"{report['thoughts_all_right']:.2%} of rows"
        )
    if report["nontrivial_right"] is not None:
        lines.append(f"thoughts that say something: {report['nontrivial_right']:.2%} right")
    if first := report["first_wrong"]:
        lines.append(
            f"first wrong thought: {first['rows']} rows, median chunk {first['median_chunk']:g} "
            f"({first['median_share']:.0%} of the way)"
        )
    if report["late_share"] is not None:
        lines.append(f"late thoughts: {report['late_share']:.1%} of rows")
    if report["stopped_by_length"]:
        lines.append(f"stopped by length, not by EOS: {report['stopped_by_length']:.1%} of rows")
    return "\n".join(lines)
