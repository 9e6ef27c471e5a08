"""The tables of results, made of the records of real runs and nothing else."""
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from minits.checkpoint.files import require, write_text
from minits.lab import bench_cost, paper
from minits.lab.columns import (
    MADE,
    NONE,
    NOT_RUN,
    Columns,
    apart,
    distinct,
    draw,
    in_paper,
    interval,
    markdown,
    mean_of,
    share,
    times_over,
    title,
)
from minits.lab.paired import difference
from minits.lab.presets import LINES, PRESETS, TABLES, WIDTHS, Preset
from minits.lab.records import Book, Cell, Record, preset_of, weights_of
from minits.methods import METHODS

# Where the tables stand: each between two lines that name it.
PAGES = (Path(__file__).parents[2] / "README.md", Path(__file__).parent / "RESULTS.md")
MARK = "<!-- run.py report {}: {} -->"


def tables(book: Book) -> dict[str, str]:
    """All tables by name, in Markdown; what was not run says so.

    summary, runs: Table 1. methods, gsm, two-hop: Table 2. coconut: Table 3. layers, chunks,
    probes: the ablations. answers: speed. cost: the figure of training cost.
    """
    return {
        "summary": overview(book.runs),
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


# -- Table 1 ---------------------------------------------------------------------------------------


def state_tracking(records: Sequence[Record]) -> str:
    """A line for each run of a preset of Table 1, and for each that was never run."""
    heads = {"run": title, "paper": in_paper}
    figures: Columns = {
        "longer [N, 100], %": distinct(lambda run: share(run["ood"])),
        "in distribution, %": distinct(lambda run: share(run["id"])),
        "thoughts right (longer), %": mean_of("ood", "thought_accuracy"),
        "n": distinct(lambda run: str(run["ood"]["n"])),
    }
    parts = []
    for heading in TABLES:
        found = [Cell(*each, []) for each in table(heading, records)]
        cells = [each for cell in found for each in apart(cell)]
        parts += [f"**{heading}**", draw(cells, heads, figures | MADE)]
    return "\n\n".join(parts)


def table(heading: str, records: Sequence[Record]) -> Iterator[tuple[str, Preset, list[Record]]]:
    """The presets of a table by name, each with its runs.

    A preset that is no more is known by its runs, which carry their title.
    """
    gone = {
        run["preset"]: Preset(run["title"], run["settings"])
        for run in records
        if run.get("preset") and run["preset"] not in PRESETS
    }
    for name, preset in (PRESETS | gone).items():
        if name.startswith(TABLES[heading]):
            yield name, preset, [run for run in records if run.get("preset") == name]


def overview(records: Sequence[Record]) -> str:
    """Real weights, percent right on longer inputs: a line a task and method, a column an N."""
    found: dict[str, dict[int, str]] = {}
    models: set[str] = set()
    for heading in TABLES:
        for name, preset, runs in table(heading, records):
            if name.startswith("tiny/"):
                continue
            task, method = preset.settings["task"], preset.title.split(", N =")[0]
            line = found.setdefault(f"{task.capitalize()}: {method}", {})
            line[preset.settings["max_ops"]] = seeds(preset, runs)
            models |= {run["settings"]["model"] for run in runs}
    columns = sorted({N for line in found.values() for N in line})
    heads = [", ".join(sorted(models)), *(f"N = {N}" for N in columns)]
    lines = [[name, *(line.get(N, "–") for N in columns)] for name, line in found.items()]
    words = "**Longer [N, 100], %: every run of a preset (paper); † below 99 % in distribution**"
    return f"{words}\n\n{markdown(heads, lines)}"


def seeds(preset: Preset, runs: Sequence[Record]) -> str:
    """The runs of a preset in a few characters, and the paper's figure."""
    accuracies = [
        f"{100 * run['ood']['accuracy']:.1f}" + ("" if run["id"]["accuracy"] >= 0.99 else "†")
        for run in runs
    ]
    paper = "" if preset.paper is None else f" ({preset.paper:.2f})"
    return (", ".join(accuracies) or "not run") + paper


# -- Table 2 ---------------------------------------------------------------------------------------

BENCHMARKS = {"GSM": "gsm/", "2-hop FK": "two-hop/full-", "2-hop PK": "two-hop/parametric-"}


def methods(book: Book) -> str:
    """Methods beside benchmarks, means over seeds; and how far they lie apart on the same rows."""
    columns = ["method, weights"]
    columns += [f"{name}, {what}" for name in BENCHMARKS for what in ("%", "speed-up", "training")]
    lines, compared = [], []
    for size in WIDTHS:
        beginnings = {name: f"{each}{size.lower()}-" for name, each in BENCHMARKS.items()}
        for name in (*LINES, "as-written"):
            names = [f"{each}{name}" for each in beginnings.values()]
            if names[0] in PRESETS:
                found = [benchmark(each, book) for each in names]
                lines.append([title(book.cell(names[0])), *chain(*found)])
        for name, each in beginnings.items():
            compared += differences(f"- {name}, {size}", book.cells(each, *LINES))
    written = "paper/gsm-1.5b"
    lines.append([title(book.cell(written)), *benchmark(written, book), *[NONE] * 6])
    words = "**Test rows right and times CoT's speed, means over seeds (the paper's, on 1.5B); the "
    words += "presets of the two other tasks are named alike**"
    parts = [words, markdown(columns, lines), "\n".join(compared)]
    return "\n\n".join(filter(None, parts))


def benchmark(name: str, book: Book) -> list[str]:
    """Accuracy, speed-up and seconds of a cell, the paper's beside them."""
    if name not in PRESETS:
        return [NONE] * 3
    cell = book.cell(name)
    told, speed = "", ""
    if cell.preset.paper is not None:
        told, speed = f" ({cell.preset.paper:.2f})", f" ({cell.preset.paper_speed:.2f}×)"
    seconds = [run["train_seconds"] for run in cell.runs]
    return [
        (interval(cell.accuracy()) if cell.runs else NOT_RUN) + told,
        times_over(cell.speed_up()) + speed,
        f"{fmean(seconds):.0f} s" if seconds else NONE,
    ]


def differences(name: str, cells: Sequence[Cell]) -> Iterator[str]:
    """How far every method lies from CoT and from No-CoT, a line each."""
    cot, no_cot, *others = cells
    pairs = [(no_cot, cot), *((each, base) for each in others for base in (cot, no_cot))]
    for other, base in pairs:
        found = other.less(base)
        if not found:
            continue
        one, two = (each.preset.title.rpartition(",")[0] for each in (other, base))
        yield f"{name}: {one} less {two} {interval(found, '+')} points"
        if METHODS[other.label[0]].thinks and base is cot:
            alone = f"{other.right_alone(cot):.1%} (the paper, GSM: {paper.RIGHT_ALONE:.0%})"
            yield f"{name}: of the rows that {one} have right {two} has wrong {alone}"


def runs_of(task: str, book: Book, figures: Columns) -> str:
    """A line for each training on a task that was evaluated on test, by cells of Table 2."""
    beginnings = [name for name in BENCHMARKS.values() if name.startswith(task)]
    cells = [cell for name in beginnings for cell in book.cells(name)]
    told = [run for cell in cells for run in cell.runs]
    for run in book.runs:
        settings = run.get("settings", {})
        if preset_of(run) in PRESETS:
            continue  # it has a table of its own
        if settings.get("task") == task and "test" in run and run not in told:
            one = Preset(f"{METHODS[settings['method']].title}, {weights_of(run)}", settings)
            cells.append(Cell(preset_of(run) or "", one, [run], []))
    lines = [each for cell in cells if cell.runs for each in apart(cell)]
    lines = lines or [Cell("", Preset("all", {}), [], [])]
    return draw(lines, {"run": title, "paper": in_paper}, figures | MADE)


ROWS: Columns = {
    "test, %": distinct(lambda run: share(run["test"])),
    "valid, %": distinct(lambda run: share(run["valid"]) if "valid" in run else NONE),
    "n": distinct(lambda run: str(run["test"]["n"])),
    "thoughts that say something, right, %": mean_of("test", "nontrivial_right"),
}
SAYING = distinct(
    lambda run: f"{run['settings']['chunk_size']}, "
    + (f"{len(run['settings']['suffix'].split())} words" if run["settings"]["suffix"] else "none")
)
GSM = ROWS | {
    "first / last result, %": mean_of("test", "first_result", "last_result"),
    "answer right if the last is, %": mean_of("test", "right_if_last_is"),
    "c, text after": SAYING,
}
HOPS = ("bridge_wrong", "bridge_right_answer_wrong", "both_right")
TWO_HOP = ROWS | {
    "bridge wrong / answer wrong / both right, %": mean_of("test", *HOPS),
    "usual answer of the relations, %": mean_of("test", "usual_answer_right"),
    "c, text after": SAYING,
}


# -- Table 3, ablations, speed ---------------------------------------------------------------------

TESTED: Columns = {
    "test, %": lambda cell: interval(cell.accuracy()),
    "speed-up over CoT": lambda cell: times_over(cell.speed_up()),
    "n": distinct(lambda run: str(run["test"]["n"])),
}


def coconut(book: Book) -> str:
    """Coconut on word problems by the number of latents."""
    cells = book.cells("gsm/0.5b-coconut", "", *(f"-{n}" for n in paper.COCONUT))
    heads: Columns = {
        "run": title,
        "paper, %": in_paper,
        "paper, speed-up": lambda cell: times_over(cell.preset.paper_speed),
    }
    return draw(cells, heads, TESTED | MADE)


def ablation(kind: str, words: str, book: Book) -> str:
    """The cells of an ablation on both tasks, beside the one that all others change."""
    parts = [words]
    for task in ("gsm", "two-hop"):
        usual = book.cell(f"ablation/{task}-chunk-8")
        cells = book.cells(f"ablation/{task}-{kind}")
        cells += [] if usual in cells else [usual]

        def less(cell: Cell, usual: Cell = usual) -> str:
            return NONE if cell.name == usual.name else interval(cell.less(usual), "+")

        figures = TESTED | {"less that of `chunk-8`, points": less}
        figures |= {"thoughts that say something, right, %": mean_of("test", "nontrivial_right")}
        parts.append(draw(cells, {"run": title}, figures | MADE))
    return "\n\n".join(parts)


CHANGED = {  # what an evaluation of trained weights may change, and how it says so
    "states": {
        "zero": "states zero",
        "shuffled": "states of another row",
        "gold": "gold thoughts",
    },
    "prompt_thoughts": {True: "no thought in the answer"},
}
FIRST = "question first where it was wrong (the paper: {:.2f} to {:.2f})"
FIRST = FIRST.format(*paper.QUESTION_FIRST)


def probes(book: Book) -> str:
    """The small ablations: L_LM on all tokens; and trained weights with something changed."""
    trained = ablation("lm-loss-", "The paper does not say which tokens L_LM counts.", book)
    lines = [found for record in book.probes for found in probe(record, book)]
    wanted = [word for words in CHANGED.values() for word in words.values()] + [FIRST]
    missing = [word for word in wanted if word not in {line[1] for line in lines}]
    lines += [[NONE, word, NOT_RUN, *[NONE] * 5] for word in missing]
    columns = ["run", "changed", "test, %", "less as it is, points", "n", "seed", "machine"]
    return f"{trained}\n\n{markdown([*columns, 'revision'], lines)}"


def probe(record: Record, book: Book) -> Iterator[list[str]]:
    """The lines of an evaluation: what was changed in it, and the question-first probe."""
    settings = record.get("settings", {"model": record["run"]})
    method = METHODS[settings["method"]].title if "method" in settings else NONE
    named = f"{record['run']}, {method}"
    plain = [run["test"] for run in book.runs if run.get("run") == record["run"] and "test" in run]
    ending = [str(record["n"]), str(record["seed"]), record["machine"], record["revision"]]
    for key, words in CHANGED.items():
        if word := words.get(record.get(key)):
            same = plain and len(plain[-1].get("right", "")) == len(record["right"])
            less = NONE
            if same:
                both = [record["right"]], [plain[-1]["right"]]
                less = interval(difference(*both, record.get("clusters")), "+")
            yield [named, word, share(record), less, *ending]
    if found := record.get("question_first"):
        mended = found["of_them_right"] or 0
        gained = mended * found["rows_wrong_before"] / record["n"]
        right = f"{100 * record['accuracy']:.1f} to {100 * (record['accuracy'] + gained):.1f}"
        all_rows = f"on all rows {100 * found['accuracy']:.1f}"
        yield [named, FIRST, right, all_rows, *ending]


def answers(book: Book) -> str:
    """Milliseconds an answer, one at a time: a line for each way of each measurement."""
    columns = "thinking run, method, way of reading, ms, over the other, rounds, non-trivial + 1, "
    columns += "passes of chunks, tokens, of thoughts, prompts, path, machine, revision"
    lines = []
    for record, line in book.lines("speed_up"):
        way = [str(line[key]) for key in ("prefill", "draft", "lookahead") if line.get(key)]
        ways = "sequential" if way[:1] == ["sequential"] else ", lookahead ".join(way[1:])
        keys = ("rounds", "entered_and_one", "chunk_passes", "tokens", "thought_tokens")
        lines.append([
            record.get("run", line["run"]),
            METHODS[line["method"]].title,
            ways or NONE,
            f"{line['ms']:.1f}",
            times_over(line["speed_up"]),
            *(f"{line[key]:.1f}" for key in keys),
            str(line["prompts"]),
            record.get("path", NONE),
            record["machine"],
            record["revision"],
        ])
    heads = columns.split(", ")
    return markdown(heads, lines or [[NOT_RUN, *[NONE] * (len(heads) - 1)]])


def cost(book: Book) -> str:
    """Milliseconds of forward and backward pass by recurrent steps, and what they show."""
    found = {id(record): record for record, _ in book.lines("both")}
    parts = [f"The paper: {paper.COST}.", *([] if found else [f"Ours: {NOT_RUN}."])]
    for record in found.values():
        parts += [f"{record['machine']}, {record['revision']}, ms: both passes (each)"]
        parts += [bench_cost.table(record["lines"])]
        lines = [line for line in record["lines"] if line["what"] == "findings"]
        parts += ["\n".join(map(shown, lines))] if lines else []
    return "\n\n".join(parts)


def shown(findings: Record) -> str:
    """What a measurement of training cost shows, on one path."""
    latents, thinking = findings[bench_cost.COCONUT], findings[bench_cost.THINKING]
    (over,) = [value for key, value in findings.items() if key.endswith(" steps over")]
    return (
        f"- {findings['path']}: Coconut {latents['ms_a_latent']:.2f} ms a latent (R² "
        f"{latents['r_squared']:.3f}); Thinking States' slowest over fastest "
        f"{thinking['slowest_over_fastest']:.2f}; at ten steps Coconut takes "
        f"{over[bench_cost.THINKING]:.1f} times as long"
    )


# -- pages -----------------------------------------------------------------------------------------


def put_into(path: Path, found: dict[str, str]) -> list[str]:
    """Replaces what stands between the marks of these tables in a file; the names of those there.

    Raises ValueError if the marks of one do not stand there once each, in order, or if none do.
    """
    try:
        text, names = require(path).read_bytes().decode(), []
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}. Name another file.") from error
    end_of_line = "\r\n" if "\r\n" in text else "\n"
    for name, table in found.items():
        begin, end = (MARK.format(name, word) for word in ("begin", "end"))
        if begin not in text and end not in text:
            continue
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(
                f"{path}: a table goes between the lines {begin} and {end}, which must stand there "
                "once, in this order."
            )
        before, rest = text.split(begin)
        put = end_of_line.join([begin, *table.split("\n"), end])
        text = before + put + rest.split(end)[1]
        names.append(name)
    if not names:
        raise ValueError(
            f"{path}: it has no place for a table. Put the lines {MARK.format('summary', 'begin')} "
            f"and {MARK.format('summary', 'end')} where it shall stand (or runs for summary)."
        )
    write_text(path, text)
    return names
