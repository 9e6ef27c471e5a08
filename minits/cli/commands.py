"""What the commands of run.py do: each takes its configuration and the names of the flags that were given.

Each returns (figures for --json, exit status). What a person reads goes to stdout, notes and progress to stderr.
"""
from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from shlex import quote
from statistics import fmean

import torch

from minits.training import distributed
from minits.training import scoring as evaluation
from minits.lab.bench import bench as measure, bench_drafts
from minits.lab.bench_train import bench_train
from minits.training.recipe import (RECIPES, BenchConfig, DataConfig, EvalConfig, InferConfig, ReportConfig, TrainCommand,
                           TrainConfig, check_train, flag, recipe_key, resolve_device, resolve_train, task_options)
from minits.checkpoint.files import listing, present, write_text
from minits.generation import GenerationConfig, accelerate, generate_ids, with_texts
from minits.lab.presets import find
from minits.lab.provenance import machine, record
from minits.lab.tables import put_into, read_records, report as make_report
from minits.cli.show import InlineText, chunk_table, counters
from minits.supervision import encode_example, render_marked
from minits.tasks import TASKS, Task, draw_example, make_task
from minits.thinking import ThinkingConfig
from minits.checkpoint.tiny import ASSETS, tiny_tokenizer
from minits.checkpoint.tokenizer import Tokenizer
from minits.training.loop import read_run, run_training
from minits.checkpoint.weights import CHOICES, checkpoint_of, finished_checkpoints, load, read_about, read_config, resolve, special_ids

RUNS = Path("runs")
SHIPPED = ASSETS / "parity"


def note(text: str) -> None:
    """A line for the person at the terminal that is not part of the result."""
    print(text, file=sys.stderr, flush=True)


# -- train ---------------------------------------------------------------------------------------------------------------


def train(command: TrainCommand, given: frozenset[str]) -> tuple[dict, int]:
    """Trains, evaluates and records a run."""
    if command.preset and not command.resume:  # a run that is resumed knows its preset
        command = with_preset(command, given)
    if command.task is None and not command.resume:
        raise ValueError(f"name a task ({', '.join(TASKS)}) or a --preset.")
    if command.task:
        make_task(command.task, **task_options(command))  # an unknown task is the first thing to say
    settings = {f.name: getattr(command, f.name) for f in fields(TrainConfig)}
    lead = distributed.rank() == 0
    if command.resume:
        folder = Path(command.out) if command.out else newest_run(command.task)
        config = resumed(read_run(folder), settings, given)
    else:
        config = resolve_train(TrainConfig(**settings))
        name = f"{config.task}-{config.method}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = Path(command.out) if command.out else RUNS / name
        if lead and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"--out {folder} exists (it holds {listing(folder)}). Nothing is overwritten: name another "
                             "folder, or continue a run there with --resume.")
    figures = run_training(config, folder, log=lambda text: print(text, flush=True) if lead else None, note=note)
    if not lead:
        return figures, 130 if figures["interrupted"] else 0
    if figures.get("interrupted"):
        again = f"continue with: python run.py train {config.task} --out {quote(str(folder))} --resume"
        note(f"interrupted after step {figures['step']}; " + ("nothing was saved (--no-save)" if config.no_save else again))
        return figures, 130
    figures |= {"settings": asdict(config)} | ({"preset": config.preset} if config.preset else {})
    line = record(figures, device=config.device, seed=config.seed)
    write_text(folder / "record.json", json.dumps(line) + "\n")
    print(f"{config.method} on {config.task}: in distribution {figures['accuracy_id']:.2%}, longer "
          f"{figures['accuracy_ood']:.2%}; {figures['steps']} steps in {figures['train_seconds']:.0f} s on "
          f"{line['machine']}" + ("" if config.no_save else f"; look: python run.py infer --run {quote(str(folder))}"),
          flush=True)
    return line, 0


# What may be chosen beside a preset: none of it makes another run of it.
FREE = {"task", "preset", "model", "revision", "seed", "device", "dtype", "out", "json", "compile", "accumulate",
        "eval_every", "save_every", "no_save", "log_every", "row_tokens"}


def with_preset(command: TrainCommand, given: frozenset[str]) -> TrainCommand:
    """`command` with its preset's settings; raises ValueError for a flag that would make it another run."""
    settings = find(command.preset).settings
    contrary = [f"{flag(name)} {getattr(command, name)} (preset: {settings.get(name, 'the default')})"
                for name in sorted(given) if (getattr(command, name) != settings[name] if name in settings else name not in FREE)]
    if contrary:
        raise ValueError(f"--preset {command.preset} has its own settings, but {', '.join(contrary)} was given. Leave it "
                         "out, or give the settings without --preset.")
    if (command.model == "tiny") != command.preset.startswith("tiny/"):
        raise ValueError(f"--preset {command.preset} with --model {command.model}: presets tiny/… train the tiny "
                         "model, the others real weights (--model FOLDER or a hub id).")
    return replace(command, **settings)


def resumed(stored: TrainConfig, settings: dict, given: frozenset[str]) -> TrainConfig:
    """The stored configuration; raises ValueError if a flag contradicts it (only the device may change)."""
    contrary = [f"{flag(name)} {settings[name]} (run: {getattr(stored, name)})" for name in sorted(given)
                if name in settings and name != "device" and settings[name] != getattr(stored, name)]
    if contrary:
        raise ValueError(f"--resume continues a run with its own settings, but {', '.join(contrary)} was given. "
                         "Leave it out, or start a new run.")
    recipe = RECIPES.get(recipe_key(stored), {})
    if any(getattr(stored, name) is None for name in ("layout", "decay", *recipe)):
        raise ValueError("the run was made by an older version, which this one does not continue exactly. Start a new run.")
    device, dtype = resolve_device(settings["device"] if "device" in given else stored.device, stored.dtype)
    return check_train(replace(stored, device=device, dtype=dtype))


def newest_run(task: str | None = None) -> Path:
    """The run folder in runs/ that was saved to last, of `task` if one is named."""
    found = []
    for folder in RUNS.glob("*/"):
        checkpoints = finished_checkpoints(folder)
        if checkpoints and (task is None or read_run(folder).task == task):
            found.append((checkpoints[-1].stat().st_mtime, folder))
    if not found:
        raise FileNotFoundError(f"no run{' of ' + task if task else ''} with a checkpoint in {RUNS.absolute()} (it holds "
                                f"{listing(RUNS)}). Train one with: python run.py train {task or 'parity'}")
    return max(found)[1]


def run_folder(name: str | None) -> Path:
    """The folder given by --run, which is never looked for on the hub; else the newest run, or the one that ships."""
    if name:
        folder = Path(name)
        if not folder.is_dir():
            raise FileNotFoundError(f"--run {name}: no such folder ({folder.parent} holds {listing(folder.parent)}).")
        return folder
    try:
        return newest_run()
    except FileNotFoundError:
        return SHIPPED


def trained_options(folder: Path, task: str) -> dict:
    """What the run in `folder` chose for its `task`; nothing where it is no run, or one of another task."""
    trained = read_run(folder) if (folder / "run.json").exists() else None
    return task_options(trained) if trained and trained.task == task else {}


def trained_task(folder: Path, about: dict) -> Task:
    """The task of the weights in `folder`, as far as they tell (`about`); else Parity."""
    name = about["task"] if about.get("task") in TASKS else "parity"
    return make_task(name, **trained_options(folder, name))


# -- infer ---------------------------------------------------------------------------------------------------------------


def infer(config: InferConfig, given: frozenset[str]) -> tuple[dict, int]:
    """Answers prompts and shows the thoughts."""
    if config.run and config.model:
        raise ValueError("--run and --model were both given; name one of them.")
    if config.think not in ("auto", "on", "off"):
        raise ValueError(f"--think {config.think}: use auto, on or off.")
    prompts = read_prompts(config)
    device, dtype = resolve_device(config.device, config.dtype)
    source = config.model or run_folder(config.run)
    folder = resolve(source, config.revision)
    choices = {name: getattr(config, name) for name in CHOICES}
    model, tokenizer = load(folder, getattr(torch, dtype), device, **choices)
    model = model if config.plain else accelerate(model)
    about = read_about(checkpoint_of(folder))
    if config.think == "on" and not model.thinks:
        raise ValueError(f"--think on: {source} was trained with the method {about['method']} and has no T and C; "
                         "leave --think out, or name a run of the method thinking.")
    think = model.thinks and (config.think == "on" or (config.think == "auto" and bool(about)))
    example = None
    if prompts is None:
        example = draw_example(trained_task(folder, about), seed=0, split="demo", index=0, operations=(5, 5))
        prompts = [example.prompt]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    options = GenerationConfig(max_new_tokens=config.max_new_tokens, prefill=config.prefill, draft=config.draft,
                               window=config.window, max_thought_tokens=config.max_thought_tokens, think=think)
    options.check(model, ids)  # all of them, before the first answer
    note(f"model {source}: {describe_model(about)}" + ("" if think else "; plain decoding, no thoughts"))
    if think and not about:
        note("T and C are untrained copies of the model's own layers: their thoughts mean nothing yet.")
    if example:
        note("no prompt given: a built-in example")
    outputs = []
    for prompt, row in zip(prompts, ids):
        started = time.perf_counter()
        shown = InlineText(tokenizer, row, model.config.chunk_size, thinks=think, at_once=config.stream)
        (result,) = generate_ids(model, [row], listen=lambda _, event: shown.tell(event), **asdict(options))
        seconds = time.perf_counter() - started
        shown.end()
        result = with_texts(result, tokenizer)
        if config.table:
            print(chunk_table(model, tokenizer, row, result), flush=True)
        print(f"answer: {result.text.strip()}" + (f"   (expected: {example.answer})" if example else ""))
        print(counters(result, row, model, seconds), flush=True)
        outputs.append({"prompt": prompt, "text": result.text, "thoughts": result.thoughts, "rounds": result.rounds,
                        "nontrivial": result.nontrivial, "stop_reason": result.stop_reason,
                        "cut_thoughts": result.cut_thoughts, "chunk_passes": result.chunk_passes,
                        "accepted": result.accepted, "seconds": seconds})
    return (outputs[0] if len(outputs) == 1 else {"results": outputs}), 0


def read_prompts(config: InferConfig) -> list[str] | None:
    """The prompts that were given, None for none. Blank lines of a file are passed over."""
    if config.prompt is not None and config.file is not None:
        raise ValueError("a PROMPT and --file were both given; use one of them.")
    if config.prompt is not None:
        return [config.prompt]
    if config.file is None:
        return None
    if config.file == "-":
        text = sys.stdin.read()
    else:
        path = Path(config.file)
        if path.is_dir():
            raise ValueError(f"--file {path} is a folder (it holds {listing(path)}); name a file in it.")
        if not path.exists():
            raise FileNotFoundError(f"--file {path}: no such file ({path.parent} holds {listing(path.parent)}).")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--file {path} is not UTF-8 text: {error}. Convert it first.") from error
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--file {config.file} holds no prompt; write one a line.")
    return prompts


def describe_model(about: dict) -> str:
    """One line on where a checkpoint comes from."""
    if not about:
        return "a plain Qwen2.5 without trained T and C"
    return (f"{about.get('method')} on {about.get('task')} up to {about.get('max_ops')} operations, base "
            f"{about.get('base_model')}, step {about.get('step')}, seed {about.get('seed')}, c = {about['chunk_size']}")


# -- eval ----------------------------------------------------------------------------------------------------------------


def evaluate(config: EvalConfig, given: frozenset[str]) -> tuple[dict, int]:
    """Free-running accuracy of a run on fresh examples."""
    make_task(config.task)
    for name in ("samples", "max_ops", "batch_size", "min_ops"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{flag(name)} {value}: must be at least 1.")
    if config.out and not Path(config.out).absolute().parent.is_dir():
        raise FileNotFoundError(f"--out {config.out}: its folder does not exist; make it first, or name another file.")
    if config.out and present(Path(config.out)):
        raise ValueError(f"--out {config.out} exists. Nothing is overwritten: name another file.")
    folder = run_folder(config.run)
    device, dtype = resolve_device(config.device, config.dtype)
    model, tokenizer = load(folder, getattr(torch, dtype), device)
    model = model if config.plain else accelerate(model)
    about = read_about(checkpoint_of(folder))
    task = make_task(config.task, **(trained_options(folder, config.task) | task_options(config)))
    lengths = (config.min_ops or min(about.get("max_ops", 1), config.max_ops), config.max_ops)
    if lengths[0] > lengths[1]:
        raise ValueError(f"--min-ops {lengths[0]} is more than --max-ops {lengths[1]}; exchange them.")
    rows = evaluation.draw_rows(task, tokenizer, model, method=about.get("method", "thinking"), seed=config.seed,
                                n=config.samples, operations=lengths, max_thought_tokens=config.max_thought_tokens)
    options = evaluation.options(model, rows, prefill=config.prefill, draft=config.draft,
                                 max_thought_tokens=config.max_thought_tokens)
    note(f"model {folder}: {describe_model(about)}")
    if about.get("task") not in (None, config.task):
        note(f"it was trained on {about['task']}; evaluating it on {config.task} all the same.")
    report = evaluation.evaluate(model, tokenizer, task, rows, options, batch_size=config.batch_size,
                                 predictions=Path(config.out) if config.out else None)
    print(evaluation.describe(report), flush=True)
    return record(asdict(report), device=device, seed=config.seed), 0


# -- bench ---------------------------------------------------------------------------------------------------------------


def bench(config: BenchConfig, given: frozenset[str]) -> tuple[dict, int]:
    """Measures speed; one line a measurement."""
    if config.part not in ("prefill", "decode", "end-to-end", "all", "drafts", "train") or config.repeats < 1:
        raise ValueError(f"bench {config.part} --repeats {config.repeats}: the part is prefill, decode, end-to-end, all, "
                         "drafts or train, and --repeats is at least 1.")
    source = config.run if config.part == "drafts" else config.model
    if not source:
        raise ValueError(f"bench {config.part} needs {'--run FOLDER' if config.part == 'drafts' else '--model FOLDER'}: "
                         "the weights to measure.")
    device, dtype = resolve_device(config.device, config.dtype)
    if config.part == "train" and (config.plain or config.chunk_size):
        raise ValueError("bench train takes neither --plain nor --chunk-size: it measures the recipes of the tasks.")
    folder = run_folder(source) if config.part == "drafts" else resolve(source, config.revision)
    checkpoint = checkpoint_of(folder)
    if config.part != "drafts" and (words := read_config(checkpoint).vocab_size) < 1000:
        raise ValueError(f"bench {config.part} --model {source}: its made-up texts need a vocabulary of 1000 ids, this one has "
                         f"{words}. Name real weights; bench drafts --run measures a small run.")
    if config.part == "train":
        note(f"{source} in {dtype} on {machine(device)}")
        lines = bench_train(str(folder), device=device, dtype=dtype, compile=config.compile, repeats=config.repeats)
        return told(lines, {"dtype": dtype}, device), 0
    about = read_about(checkpoint)
    if config.part == "drafts" and about.get("method") != "thinking":
        raise ValueError(f"bench drafts --run {source}: it measures prefill with a model's own thoughts, and this one was not "
                         f"trained to think (method: {about.get('method')}). Name a run of the method thinking.")
    model, tokenizer = load(folder, getattr(torch, dtype), device, chunk_size=config.chunk_size)
    path = "plain" if config.plain else "graphs" if device.startswith("cuda") else "packed"
    model = model if config.plain else accelerate(model)
    note(f"{source} in {dtype} on {machine(device)}, path: {path}")
    if config.part == "drafts":
        task = trained_task(folder, about)
        examples = [draw_example(task, seed=7, split="bench", index=i, operations=(10, 40)) for i in range(16)]
        lines = bench_drafts(model, [tokenizer.encode(example.prompt) for example in examples], config.repeats)
    else:
        lines = measure(model, str(folder), parts=config.part, repeats=config.repeats)
    return told(lines, {"path": path, "dtype": dtype}, device), 0


def told(lines: list[dict], how: dict, device: str) -> dict:
    """Prints measurements, one a line, and returns their record; `how`: what they were made with."""
    for line in lines:
        print(json.dumps(rounded(line)), flush=True)
    return record(how | {"lines": lines}, device=device)


def rounded(value):
    """`value` with every float to 4 significant digits, for reading."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


# -- report --------------------------------------------------------------------------------------------------------------


def report(config: ReportConfig, given: frozenset[str]) -> tuple[dict, int]:
    """Prints the tables of results, or puts them into a file."""
    records = read_records()
    text = make_report(records)
    if config.write:
        put_into(Path(config.write), text)
        note(f"the tables in {config.write} are now those of {len(records)} records")
    else:
        print(text, end="", flush=True)
    return {"records": [record for record in records if "preset" in record]}, 0


# -- data ----------------------------------------------------------------------------------------------------------------


def data(config: DataConfig, given: frozenset[str]) -> tuple[dict, int]:
    """Shows one example as the model sees it, and statistics of the supervision."""
    task = make_task(config.task, **task_options(config))
    if min(config.chunk_size, config.samples) < 1 or config.ops < 0 or config.index < 0:
        raise ValueError(f"--chunk-size {config.chunk_size}, --samples {config.samples}, --ops {config.ops}, --index "
                         f"{config.index}: the first two must be at least 1, the others at least 0.")
    if config.model == "tiny":
        tokenizer = tiny_tokenizer()
    else:
        folder = checkpoint_of(resolve(config.model, config.revision))
        tokenizer = Tokenizer.from_folder(folder, *special_ids(folder, sys.maxsize))
    thinking = ThinkingConfig(config.chunk_size, 1, 1, tokenizer.eos_ids, tokenizer.pad_id)
    example = draw_example(task, seed=config.seed, split="train", index=config.index, operations=(config.ops,) * 2)
    row = encode_example(example, tokenizer, thinking)
    c = config.chunk_size
    print("marked: " + render_marked(example.prompt, example.steps))
    print("answer: " + example.answer)
    print(f"chunks of {c} tokens, | between tokens; the thought is what T must say after the chunk:")
    for k in range(-(-len(row.ids) // c)):
        text = "|".join(tokenizer.decode([i]) for i in row.ids[k * c:(k + 1) * c])
        target = repr(tokenizer.decode(row.thoughts[k])) if k < len(row.thoughts) else "(never complete: no thought)"
        print(f"{k:4}  {text!r} -> {target}")
    print(f"the prompt's {row.prompt_length} tokens end in chunk {(row.prompt_length - 1) // c}; "
          f"steps without a target: {row.without_target}")
    many = [encode_example(draw_example(task, seed=config.seed, split="train", index=i, operations=(1, 100)),
                           tokenizer, thinking) for i in range(config.samples)]
    thoughts = [z for r in many for z in r.thoughts]
    figures = {
        "samples": len(many), "tokens_mean": fmean(len(r.ids) for r in many),
        "chunks_mean": fmean(len(r.thoughts) for r in many),
        "nontrivial_share": sum(len(z) > 1 for z in thoughts) / max(len(thoughts), 1),
        "thought_tokens_max": max(map(len, thoughts), default=0),
        "late_share": evaluation.late_share(r.late for r in many),
        "steps_without_target": sum(r.without_target for r in many), "prompt": example.prompt,
        "ids": row.ids, "thoughts": row.thoughts}
    print(f"over {len(many)} examples of 1 … 100 operations: {figures['tokens_mean']:.0f} tokens and "
          f"{figures['chunks_mean']:.1f} complete chunks a row, {figures['nontrivial_share']:.1%} of thoughts "
          f"non-trivial, the longest of {figures['thought_tokens_max']} tokens; "
          + ("" if figures["late_share"] is None else f"late thoughts in {figures['late_share']:.1%} of rows; ")
          + f"{figures['steps_without_target']} steps without a target", flush=True)
    return figures, 0
