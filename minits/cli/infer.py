"""`run.py infer`: answers prompts and shows every thought where it arose."""
import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minits.checkpoint.files import listing
from minits.checkpoint.tokenizer import Tokenizer
from minits.cli.flags import Output, Weights, add_flags, note, take
from minits.cli.show import InlineText, chunk_table, counters
from minits.cli.sources import describe_model, open_model, say_limit, trained_task
from minits.generation import GenerationConfig, generate_ids, with_texts
from minits.settings import setting
from minits.supervision import encode_prompt
from minits.thinking import Engine
from minits.training.recipe import Machine

WORDS = "answer prompts and show every thought where it arose"
OPTIONS = ()


@dataclass(frozen=True)
class InferFlags(Output, Machine, Weights):
    """What `run.py infer` takes beside the settings of generation."""

    prompt: str | None = setting(None, "text; default: a built-in example", positional=True)
    file: str | None = setting(None, "file with one prompt a line, - for standard input")
    run: str | None = setting(None, "run folder; default: the newest in runs/, else what ships")
    chunk_size: int | None = setting(None, "c, where T and C are untrained; default: 8", least=1)
    inject_after: int | None = setting(None, "L_in there; default: 1", least=0)
    extract_after: int | None = setting(None, "L_out there; default: all but the last", least=0)
    think: str = setting(
        "auto", "whether to think; auto: where T and C are trained", choices=("auto", "on", "off")
    )
    stream: bool = setting(False, "print answer and thoughts as they come")
    plain: bool = setting(False, "the plain path, without kernels and graphs (cuda)")
    table: bool = setting(False, "show each chunk with its thought and the norm of its state")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the command."""
    add_flags(parser, InferFlags)
    add_flags(parser, GenerationConfig)
    parser.add_argument("--window", type=int, help=argparse.SUPPRESS)  # of older versions


def run(given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Answers prompts and shows the thoughts."""
    if "window" in given:
        note("--window is called --lookahead now; this name will go.")
        given.setdefault("lookahead", given.pop("window"))
    flags, config = take(given, InferFlags), take(given, GenerationConfig)
    if flags.run and flags.model:
        raise ValueError("--run and --model were both given; name one of them.")
    prompts, expected = read_prompts(flags), None
    engine, tokenizer, about, folder = open_model(flags)
    if flags.think == "on" and not engine.thinks:
        raise ValueError(
            f"--think on: {folder} was trained with the method {about['method']} and has no T and "
            "C; leave --think out, or name a run of the method thinking."
        )
    wanted = bool(about) if flags.think == "auto" else flags.think == "on"
    config = replace(config, think=engine.thinks and wanted)
    if prompts is None:
        example = trained_task(folder, about).demo()
        prompts, expected = [example.prompt], example.answer
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    config.check(engine, ids)  # all of them, before the first answer
    plain = "" if config.think else "; plain decoding, no thoughts"
    note(f"model {flags.model or folder}: {describe_model(about)}{plain}")
    say_limit(about, config.max_thought_tokens if config.think else None)
    if config.think and not about:
        note("T and C are untrained copies of layers: their thoughts mean nothing yet.")
    if expected is not None:
        note("no prompt given: a built-in example")
    shown = [show(engine, tokenizer, row, config, flags, expected) for row in ids]
    outputs = [{"prompt": prompt} | found for prompt, found in zip(prompts, shown)]
    return (outputs[0] if len(outputs) == 1 else {"results": outputs}), 0


def show(
    engine: Engine,
    tokenizer: Tokenizer,
    ids: list[int],
    config: GenerationConfig,
    flags: InferFlags,
    expected: str | None,  # the right answer, where it is known
) -> dict[str, Any]:
    """Answers one prompt, prints what was thought and said; what --json says of it."""
    started = time.perf_counter()
    inline = InlineText(
        tokenizer, ids, engine.config.chunk_size, thinks=config.think, at_once=flags.stream
    )
    (result,) = generate_ids(
        engine, [ids], listen=lambda _, event: inline.tell(event), **vars(config)
    )
    seconds = time.perf_counter() - started
    inline.end()
    result = with_texts(result, tokenizer)
    if flags.table:
        print(chunk_table(engine, tokenizer, ids, result), flush=True)
    right = f"   (expected: {expected})" if expected is not None else ""
    print(f"answer: {result.text.strip()}{right}")
    print(counters(result, ids, engine.config.chunk_size, seconds), flush=True)
    told = {name: getattr(result, name) for name in TOLD}
    return told | {"seconds": seconds}


# What --json says of a result.
TOLD = "text thoughts rounds nontrivial stop_reason cut_thoughts chunk_passes accepted".split()


def read_prompts(flags: InferFlags) -> list[str] | None:
    """The prompts that were given, None for none. Blank lines of a file are passed over."""
    if flags.prompt is not None and flags.file is not None:
        raise ValueError("a PROMPT and --file were both given; use one of them.")
    if flags.prompt is not None:
        return [flags.prompt]
    if flags.file is None:
        return None
    text = sys.stdin.read() if flags.file == "-" else read_text(Path(flags.file))
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--file {flags.file} holds no prompt; write one a line.")
    return prompts


def read_text(path: Path) -> str:
    """The text of the file that --file names."""
    if path.is_dir():
        raise ValueError(f"--file {path} is a folder (it holds {listing(path)}); name a file.")
    if not path.exists():
        near = path.parent
        raise FileNotFoundError(f"--file {path}: no such file ({near} holds {listing(near)}).")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file {path} is not UTF-8 text: {error}. Convert it first.") from error
