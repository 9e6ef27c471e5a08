"""The tables of results, made of the records of real runs and nothing else."""
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean

from minits.lab import bench_cost, paper
from minits.lab.bench_answers import WAYS
from minits.lab.columns import (
    NONE,
    NOT_RUN,
    Columns,
    accuracy_of,
    apart,
    distinct,
    in_paper,
    interval,
    markdown,
    mean_of,
    not_run,
    table_of,
    times_over,
    title,
    way_of_reading,
)
from minits.lab.paired import difference
from minits.lab.presets import LINES, PRESETS, WIDTHS, Preset
from minits.lab.records import Book, Cell, Interval, Record, alike, preset_of, weights_of
from minits.lab.table1 import overview, state_tracking
from minits.methods import METHODS


def tables(book: Book) -> dict[str, str]:
    """All tables by name, in Markdown; what was not run says so.

    summary: Tables 1 and 2 in short. runs: Table 1. methods, gsm, two-hop: Table 2. coconut: Table
    3. layers, chunks, probes: the ablations. answers: speed. cost: the figure of training cost.
    """
    return {
        "summary": f"{overview(book.runs)}\n\n{benchmarks(book)}",
        "runs": state_tracking(book.runs),
        "methods": methods(book),
        "gsm": runs_of("gsm", book, GSM),
        "two-hop": runs_of("two-hop", book, TWO_HOP),
        "coconut": coconut(book),
        "layers": ablation("extract-", f"The paper: {paper.LAYERS}", book),
        "chunks": ablation("chunk-", f"The paper: {paper.CHUNKS}", book),
        "probes": probes(book),
        "answers": answers(book),
        "cost": cost(book),
    }


# -- Table 2 ---------------------------------------------------------------------------------------

PLAIN = ("cot-plain", "no-cot-plain", "thinking-plain")  # two-hop: facts that nobody says
BENCHMARKS = {"GSM": "gsm/", "2-hop FK": "two-hop/full-", "2-hop PK": "two-hop/parametric-"}


def benchmarks(book: Book) -> str:
    """Means over seeds in short: a line a benchmark, a column for each method that was run."""
    columns = {}
    for method, line in LINES.items():
        sizes = [f"{size.lower()}-{method}" for size in WIDTHS]
        found = [book.cells(beginning, *sizes) for beginning in BENCHMARKS.values()]
        if any(cell.runs for cells in found for cell in cells):
            columns[line.title] = list(map(in_short, found))
    words = f"% right, at × CoT's speed if timed: {', '.join(WIDTHS)} (paper: 1.5B); "
    words += f"{NONE}: not run"
    return markdown([words, *columns], list(zip(BENCHMARKS, *columns.values())))


def in_short(cells: Sequence[Cell]) -> str:
    """Accuracy and speed-up of a method at each size, and the paper's."""

    def at(accuracy: str, speed: float | None) -> str:
        return accuracy if speed in (None, 1) else f"{accuracy} at {times_over(speed)}"

    ours = [
        at(mean_of("test", "accuracy")(cell), cell.speed_up()) if cell.runs else NONE
        for cell in cells
    ]
    theirs = at(in_paper(cells[0]), cells[0].preset.paper_speed)
    return f"{', '.join(ours)} ({theirs})"


def methods(book: Book) -> str:
    """Methods beside benchmarks, means over seeds; and how far they lie apart on the same rows."""
    columns = ["method, weights"]
    columns += [f"{name}, {what}" for name in BENCHMARKS for what in ("%", "speed-up", "training")]
    rows = [
        [f"{beginning}{size.lower()}-{method}" for beginning in BENCHMARKS.values()]
        for size in WIDTHS
        for method in (*LINES, *PLAIN, "as-written")
    ]
    rows.append(["paper/gsm-1.5b", "", ""])
    lines = []
    for names in rows:
        if known := [name for name in names if name in PRESETS]:
            cells = [part for name in names for part in cell_in_full(name, book)]
            lines.append([title(book.cell(known[0])), *cells])
    compared: list[str] = []
    for size, (name, beginning), group in product(WIDTHS, BENCHMARKS.items(), (LINES, PLAIN)):
        cells = book.cells(f"{beginning}{size.lower()}-", *group)
        compared += differences(f"- {name}, {size}", cells)
    words = "**Test rows right and times CoT's speed, means over seeds (the paper's, on 1.5B); the "
    words += "presets of the two other tasks are named alike**"
    return "\n\n".join(filter(None, [words, markdown(columns, lines), "\n".join(compared)]))


def cell_in_full(name: str, book: Book) -> list[str]:
    """Accuracy, speed-up and training of a cell, the paper's beside them."""
    if name not in PRESETS:
        return [NONE] * 3
    cell = book.cell(name)
    accuracy, training = NOT_RUN, NONE
    if cell.runs:
        accuracy = interval(cell.accuracy())
        training = f"{fmean(run['train_seconds'] for run in cell.runs):.0f} s, "
        samples = [run["steps"] * run["settings"]["batch_size"] for run in cell.runs]
        training += f"{fmean(samples) / 1000:.0f}k samples"
        training += f", {len(cell.runs)} seeds" if len(cell.runs) > 1 else ""
    found = [accuracy, times_over(cell.speed_up()), training]
    if cell.preset.paper is not None:
        found[0] += f" ({in_paper(cell)})"
        found[1] += f" ({times_over(cell.preset.paper_speed)})"
    return found


def differences(name: str, cells: Sequence[Cell]) -> Iterator[str]:
    """Each method less CoT and No-CoT, Thinking States less every other: a line each.

    cells: of CoT, No-CoT and Thinking States, in this order, then of the others.
    """
    if len(cells) < 3:
        return  # none of these presets
    cot, no_cot, thinking, *others = cells
    pairs = [(no_cot, cot), *product((thinking, *others), (cot, no_cot))]
    pairs += [(thinking, other) for other in others]
    for one, other in pairs:
        found = one.less(other)
        if not found:
            continue
        first, second = (each.preset.title.rpartition(",")[0] for each in (one, other))
        yield f"{name}: {first} less {second} {interval(found, '+')} points"
        if one is thinking and other is cot:
            alone = f"{one.right_alone(cot):.1%} (the paper, GSM: {paper.RIGHT_ALONE:.0%})"
            yield f"{name}: of the rows that {first} have right {second} has wrong {alone}"


def runs_of(task: str, book: Book, figures: Columns) -> str:
    """A line for each training on a task that was evaluated on test, by cells of Table 2."""
    beginnings = tuple(name for name in BENCHMARKS.values() if name.startswith(task))
    cells = [cell for name in beginnings for cell in book.cells(name) if cell.runs]
    placed = [run for cell in cells for run in cell.runs]
    for run in book.runs:
        settings, name = run["settings"], preset_of(run)
        of_task = settings.get("task") == task and "test" in run
        # A run of any other preset has a table of its own.
        elsewhere = name in PRESETS and not name.startswith(beginnings)
        if of_task and not elsewhere and run not in placed:
            how = f"{called(settings['method'], settings)} at {settings['lr']:g}, {weights_of(run)}"
            cells.append(Cell(name or "", Preset(how, settings), [run]))
    heads: Columns = {"run": title, "paper (1.5B)": in_paper}
    return table_of(apart(cells or [Cell("", Preset("all", {}), [])]), heads, figures)


def called(method: str, options: Record) -> str:
    """A method's name, and of iCoT what it removes."""
    removal = options.get("removal")
    return METHODS[method].title + (f" by {removal}" if removal else "")


SAYING = "thoughts that say something, right, %"
ROWS: Columns = {
    "test, %": distinct(lambda run: accuracy_of(run["test"])),
    "valid, %": distinct(lambda run: accuracy_of(run["valid"]) if "valid" in run else NONE),
    "n": distinct(lambda run: str(run["test"]["n"])),
    SAYING: mean_of("test", "nontrivial_right"),
}


def chunk_and_suffix(run: Record) -> str:
    """c, and how long the text after the question is."""
    settings = run["settings"]
    words = len(settings["suffix"].split())
    return f"{settings['chunk_size']}, " + (f"{words} words" if words else "none")


GSM = ROWS | {
    "first / last result, %": mean_of("test", "first_result", "last_result"),
    "answer right if the last is, %": mean_of("test", "right_if_last_is"),
    "c, text after": distinct(chunk_and_suffix),
}


def facts_and_step(run: Record) -> str:
    """What T learns where a fact is read, and what the step of a question is."""
    settings = run["settings"]
    facts = settings["fact_thoughts"] if settings.get("facts") else "none"
    steps = {"bridge": "a fact", "both": "both facts", "name": "a name"}
    return f"{facts}, {steps[settings['steps_shown']]}"


TWO_HOP = ROWS | {
    "bridge wrong / right, answer wrong / both right, %": mean_of(
        "test", "bridge_wrong", "bridge_right_answer_wrong", "both_right"
    ),
    "usual answer of the relations, %": mean_of("test", "usual_answer_right"),
    "second fact in questions of training / not, %": mean_of(
        "test", "right_where_second_fact_seen", "right_where_second_fact_new"
    ),
    "facts, step": distinct(facts_and_step),
    "c, text after": distinct(chunk_and_suffix),
}


# -- Table 3, ablations, speed ---------------------------------------------------------------------

TESTED: Columns = {
    "test, %": lambda cell: interval(cell.accuracy()),
    "speed-up over CoT": lambda cell: times_over(cell.speed_up()),
    "n": ROWS["n"],
}


def coconut(book: Book) -> str:
    """Coconut on word problems by the number of latents."""
    cells = book.cells("gsm/0.5b-coconut", "", *(f"-{n}" for n in paper.COCONUT))
    heads: Columns = {
        "run": title,
        "paper (1.5B), %": in_paper,
        "paper, speed-up": lambda cell: times_over(cell.preset.paper_speed),
    }
    return table_of(cells, heads, TESTED)


def ablation(kind: str, words: str, book: Book) -> str:
    """The cells of an ablation on both tasks, beside the one that all others change."""
    parts = [words]
    for task in ("gsm", "two-hop"):
        usual = book.cell(f"ablation/{task}-chunk-8")
        cells = book.cells(f"ablation/{task}-{kind}")
        if usual not in cells:
            cells.append(usual)

        def less(cell: Cell) -> str:
            return NONE if cell.name == usual.name else interval(cell.less(usual), "+")

        figures = TESTED | {"less that of `chunk-8`, points": less, SAYING: ROWS[SAYING]}
        figures |= {"late rows, %": mean_of("test", "late_share")}
        parts.append(table_of(cells, {"run": title}, figures))
    return "\n\n".join(parts)


CHANGED = {  # what an evaluation of trained weights may change: (key, value) of its record
    ("states", "zero"): "states zero",
    ("states", "shuffled"): "states of another row",
    ("states", "gold"): "gold thoughts",
    ("prompt_thoughts", True): "no thought in the answer",
    ("ask", "first"): "the first hop alone is asked for",
    ("ask", "second"): "the second hop alone is asked for",
}
ASKED_FIRST = "question first where it was wrong (the paper: %.2f to %.2f)" % paper.QUESTION_FIRST


def probes(book: Book) -> str:
    """The small ablations: L_LM on all tokens; and trained weights with something changed."""
    trained = ablation("lm-loss-", f"The paper: {paper.LM_LOSS}", book)
    columns = ["run", "changed", "test, %", "less as it is, points", "n", "machine", "revision"]
    lines = [found for record in book.probes for found in probe(record, book)]
    done = {changed for _, changed, *_ in lines}
    for word in (*CHANGED.values(), ASKED_FIRST):
        if word not in done:
            lines.append([NONE, word, *not_run(len(columns) - 2)])
    return f"{trained}\n\n{markdown(columns, lines)}"


def probe(record: Record, book: Book) -> Iterator[list[str]]:
    """The lines of an evaluation: what was changed in it, and the question-first probe."""
    method = record.get("settings", {}).get("method")
    named = f"{record['run']}, {METHODS[method].title if method else NONE}"
    ending = [str(record["n"]), record["machine"], record["revision"]]
    for (key, value), words in CHANGED.items():
        if record.get(key) == value:
            less = interval(less_as_it_is(record, book), "+")
            yield [named, words, accuracy_of(record), less, *ending]
    if found := record.get("question_first"):
        before = record["accuracy"]
        mended = (found["of_them_right"] or 0) * found["rows_wrong_before"] / record["n"]
        right = f"{100 * before:.1f} to {100 * (before + mended):.1f}"
        yield [named, ASKED_FIRST, right, f"(on all rows {100 * found['accuracy']:.1f} %)", *ending]


def less_as_it_is(record: Record, book: Book) -> Interval | None:
    """What a changed evaluation has right less the one of the run's training, on the same rows."""
    plain = [
        run["test"]["right"]
        for run in book.runs
        if run.get("run") == record["run"] and "right" in run.get("test", {})
    ][-1:]
    if not plain or not alike([record["right"], *plain]):
        return None
    return difference([record["right"]], plain, record.get("clusters"))


COUNTS = {  # means over prompts
    "rounds": "rounds",
    "non-trivial + 1": "entered_and_one",
    "passes of chunks": "chunk_passes",
    "tokens": "tokens",
    "of thoughts": "thought_tokens",
}


def answers(book: Book) -> str:
    """Milliseconds an answer, one at a time: a line a measurement, a column a way of reading.

    Rounds, passes and tokens are those of `trivial`, the default.
    """
    ways, ends = list(map(way_of_reading, WAYS)), ("path", "machine", "revision")
    heads = ["thinking run", "beside, ms (tokens)", *(f"{way}, ms" for way in ways)]
    heads += ["`trivial`, × the first beside", *COUNTS, "prompts", *ends]
    lines = []
    for record, found in book.measured("speed_up"):
        run = found[-1]["run"]  # the thinking one comes last
        own = {way_of_reading(line): line for line in found if line["run"] == run}
        usual = own["trivial"]
        lines.append([
            record["run"],
            ", ".join(answered(line) for line in found if line["run"] != run),
            *(f"{own[way]['ms']:.1f}" if way in own else NONE for way in ways),
            times_over(usual["speed_up"]),
            *(f"{usual[key]:.1f}" for key in COUNTS.values()),
            str(usual["prompts"]),
            *(record[key] for key in ends),
        ])
    return markdown(heads, lines or [not_run(len(heads))])


def answered(line: Record) -> str:
    """What a run that others are measured beside took for an answer, and how long that was."""
    name = called(line["method"], line.get("options", {}))  # older records have none
    return f"{name} {line['ms']:.1f} ({line['tokens']:.1f})"


def cost(book: Book) -> str:
    """Milliseconds of forward and backward pass by recurrent steps, and what they show."""
    parts = []
    for record, lines in book.measured("both"):
        found = [in_words(line) for line in record["lines"] if line["what"] == "findings"]
        words = f"{record['machine']}, {record['revision']}, ms: forward and backward (each)"
        parts += [words, bench_cost.table(lines), "\n".join(found)]
    parts = parts or [f"Ours: {NOT_RUN}."]
    return "\n\n".join([f"The paper: {paper.COST}.", *filter(None, parts)])


def in_words(findings: Record) -> str:
    """What a measurement of training cost shows, on one path."""
    latents, thinking = findings[bench_cost.COCONUT], findings[bench_cost.THINKING]
    (over,) = [value for key, value in findings.items() if key.endswith(" steps over")]
    return (
        f"- {findings['path']}: Coconut {latents['ms_a_latent']:.2f} ms a latent (R² "
        f"{latents['r_squared']:.3f}); Thinking States' slowest over fastest "
        f"{thinking['slowest_over_fastest']:.2f}; at ten steps Coconut takes "
        f"{over[bench_cost.THINKING]:.1f} times as long"
    )
