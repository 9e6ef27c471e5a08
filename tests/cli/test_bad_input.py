"""Bad input costs one line, says what was found and what to do, and changes no file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_helpers import EVAL, FAST, INFER, PROMPT, SHORT, TRAIN, call

from minits.checkpoint import files

RESUME = ["train", "--resume", "--out"]
RESUME_PARITY = ["train", "parity", "--resume", "--out"]
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")

# name -> command line, and what the message must hold: what was found, and what to do.
PROMPTS = {
    "empty prompt": ([*INFER, ""], ["empty", "Give at least one character"]),
    "prompt beyond the positions": (
        [*INFER, "The" + " coin" * 2100],
        ["2101 tokens", "2048", "Shorten"],
    ),
    "new tokens beyond the positions": (
        [*INFER, PROMPT, "--max-new-tokens", "9999"],
        ["the prompt has", "2048", "lower --max-new-tokens to"],
    ),
    "a later prompt of a file too long": (
        [*INFER, "--file", "good-then-long.txt"],
        ["--file good-then-long.txt, line 2", "2101 tokens", "Shorten"],
    ),
    "word outside the vocabulary": (
        [*INFER, "The coin sings"],
        ["' sings'", "Use these words", "--model, --run"],
    ),
    "prompt and file": (
        [*INFER, PROMPT, "--file", "empty.txt"],
        ["PROMPT", "--file", "use one of them"],
    ),
    "no such file": (
        [*INFER, "--file", "nope.txt"],
        ["nope.txt", "no such file", "empty.txt", "Name another"],
    ),
    "file without a prompt": (
        [*INFER, "--file", "empty.txt"],
        ["empty.txt", "no prompt", "write one a line"],
    ),
    "file that is not UTF-8": (
        [*INFER, "--file", "latin1.txt"],
        ["latin1.txt", "UTF-8", "Convert"],
    ),
    "folder as a file": ([*INFER, "--file", "filled"], ["filled is a folder", "thesis.txt"]),
    "a word of a later line outside the vocabulary": (
        [*INFER, "--file", "good-then-unknown.txt"],
        ["--file good-then-unknown.txt, line 3", "' sings'"],
    ),
    "two prompts": ([*INFER, PROMPT, PROMPT], ["unrecognized arguments"]),
    "a word that the question first begins with": (
        [*INFER, PROMPT.replace("Bob", "Alice"), "--question-first"],
        ["--question-first: the word 'Alice' is not in this small vocabulary"],
    ),
    "a word of 200 kB": ([*INFER, "x" * 200_000], ["not in this small vocabulary", " … "]),
    "UTF-16": ([*INFER, "--file", "utf16.txt"], ["utf16.txt", "not UTF-8", "Convert"]),
    "a path that is too long": ([*INFER, "--file", "x" * 5000], ["too long"]),
    "prompt that is not UTF-8": (
        [*INFER, "The coin \udcff"],
        ["'The coin \\udcff' is not UTF-8", "Convert"],
    ),
}
INFER_FLAGS = {
    "no new tokens": (
        [*INFER, PROMPT, "--max-new-tokens", "0"],
        ["--max-new-tokens 0", "at least 1"],
    ),
    "no thought tokens": (
        [*INFER, PROMPT, "--max-thought-tokens", "0"],
        ["--max-thought-tokens 0", "at least 1"],
    ),
    "thoughts longer than the positions": (
        [*INFER, PROMPT, "--max-thought-tokens", "4000"],
        ["4000", "1 … 2040"],
    ),
    "no chunk to look ahead": (
        [*INFER, PROMPT, "--lookahead", "0"],
        ["--lookahead 0", "at least 1"],
    ),
    "unknown prefill": (
        [*INFER, PROMPT, "--prefill", "nope"],
        ["--prefill", "'nope'", "speculative", "sequential"],
    ),
    "unknown draft": (
        [*INFER, PROMPT, "--draft", "nope"],
        ["--draft", "'nope'", "trivial", "carry"],
    ),
    "unknown think": (
        [*INFER, PROMPT, "--think", "perhaps"],
        ["--think", "'perhaps'", "auto", "on", "off"],
    ),
    "unknown dtype": (
        [*INFER, PROMPT, "--dtype", "float16"],
        ["--dtype", "'float16'", "float32", "bfloat16", "float64"],
    ),
    "run and model": ([*INFER, PROMPT, "--model", "plain"], ["--run", "--model", "name one"]),
    "chunk size against training": (
        [*INFER, PROMPT, "--chunk-size", "4"],
        ["--chunk-size 4", "trained with 8", "leave it out"],
    ),
}
# A flag that would do nothing is refused, not passed over.
IDLE = {
    "draft of sequential reading": (
        [*INFER, PROMPT, "--draft", "carry", "--prefill", "sequential"],
        ["--draft does nothing with --prefill sequential", "leave one of them out"],
    ),
    "lookahead of sequential reading": (
        [*INFER, PROMPT, "--prefill", "sequential", "--lookahead", "2"],
        ["--lookahead does nothing with --prefill sequential"],
    ),
    "draft of an evaluation, which reads sequentially": (
        [*EVAL, "--draft", "carry"],
        ["--draft does nothing with --prefill sequential"],
    ),
    "draft without thoughts": (
        [*INFER, PROMPT, "--think", "off", "--draft", "carry"],
        ["--draft does nothing without thoughts", "--think on"],
    ),
    "lookahead of a plain model": (
        ["infer", PROMPT, "--model", "plain", "--lookahead", "2"],
        ["--lookahead does nothing without thoughts", "plain", "--think on"],
    ),
    "chunk size of a plain model": (
        ["infer", PROMPT, "--model", "plain", "--chunk-size", "4"],
        ["--chunk-size does nothing without thoughts", "plain", "--think on"],
    ),
    "states of another row where there is none": (
        [*EVAL, "--states", "shuffled", "--batch-size", "1"],
        ["--states shuffled", "2 samples in batches of 1", "--batch-size"],
    ),
    "states of another row in the last batch": (
        [*EVAL[:-6], "--samples", "5", "--states", "shuffled", "--batch-size", "4"],
        ["--states shuffled", "5 samples in batches of 4", "--samples"],
    ),
    "gold thoughts that would be cut": (
        [*EVAL[:-1], "1", "--states", "gold"],
        ["--states gold", "--max-thought-tokens 1", "Raise it"],
    ),
    "table of no thoughts": (
        ["infer", PROMPT, "--model", "plain", "--table"],
        ["--table does nothing without thoughts"],
    ),
    "layer of a plain model": (
        ["infer", PROMPT, "--model", "plain", "--inject-after", "1"],
        ["--inject-after does nothing without thoughts"],
    ),
    "old and new name of a flag": (
        [*INFER, PROMPT, "--window", "3", "--lookahead", "2"],
        ["--window is the old name of --lookahead", "one of them"],
    ),
    "batches of one prompt": (
        [*INFER, PROMPT, "--batch-size", "2"],
        ["--batch-size does nothing without --file"],
    ),
    "batches of a stream": (
        [*INFER, "--file", "good-then-long.txt", "--batch-size", "2", "--stream"],
        ["--batch-size does nothing with --stream"],
    ),
    "batches of nothing": (
        [*INFER, "--file", "good-then-long.txt", "--batch-size", "0"],
        ["--batch-size 0", "at least 1"],
    ),
    "stream of JSON": ([*INFER, "--stream", "--json"], ["--stream does nothing with --json"]),
    "table of JSON": ([*INFER, "--table", "--json"], ["--table does nothing with --json"]),
    "revision of a folder": (
        ["infer", PROMPT, "--model", "plain", "--revision", "main"],
        ["revision main", "plain is a folder", "hub id"],
    ),
    "revision of no model": (
        [*INFER, PROMPT, "--revision", "main"],
        ["--revision does nothing without --model"],
    ),
    "revision of the tiny model": (
        [*TRAIN, "--revision", "main"],
        ["--revision does nothing with --model tiny"],
    ),
    "revision of a folder to train": (
        [*TRAIN, "--model", "plain", "--revision", "main"],
        ["revision main", "plain is a folder"],
    ),
    "revision of the tiny tokenizer": (
        ["data", "parity", "--revision", "main"],
        ["--revision does nothing with --model tiny"],
    ),
    "bench of a model by the name of a run": (
        ["bench", "decode", "--model", "plain", "--run", "trained"],
        ["--run does nothing in bench decode"],
    ),
    "drafts of a run and a model": (
        ["bench", "drafts", "--run", "trained", "--model", "plain"],
        ["--model does nothing in bench drafts"],
    ),
    "drafts compiled": (
        ["bench", "drafts", "--run", "trained", "--compile"],
        ["--compile does nothing in bench drafts"],
    ),
    "training measured in chunks of one's own": (
        ["bench", "train", "--model", "plain", "--chunk-size", "4"],
        ["bench train", "--chunk-size"],
    ),
}
EMPTY = {
    f"empty {name} of {command[0]}": ([*command, name, ""], [name, "empty text", "leave"])
    for command, names in (
        (["infer"], ["--file", "--stop", "--run", "--model", "--revision", "--device"]),
        (["bench"], ["--model", "--run", "--device"]),
        (["train", "parity"], ["--out", "--model", "--preset"]),
        (["eval"], ["--run", "--out"]),
        (["data"], ["--model"]),
    )
    for name in names
}
INFER_FOLDERS = {
    "no such run": (
        ["infer", PROMPT, "--run", "nope"],
        ["--run nope", "no such folder", "empty.txt", "Name another"],
    ),
    "no such model": (
        ["infer", PROMPT, "--model", "./nope"],
        ["./nope", "empty.txt", "Give a folder"],
    ),
    "folder without weights": (
        ["infer", PROMPT, "--model", "no-weights"],
        ["no model.safetensors", "it holds config.json"],
    ),
    "folder without config": (
        ["infer", PROMPT, "--model", "filled"],
        ["no config.json", "it holds thesis.txt"],
    ),
    "truncated shard": (
        ["infer", PROMPT, "--model", "truncated"],
        ["model-00002-of-00002", "no whole safetensors file", "Download it again", "of yours"],
    ),
    "Git-LFS pointer": (
        ["infer", PROMPT, "--model", "pointer"],
        ["Git-LFS pointer", "git lfs pull"],
    ),
    "weights whose thinking.json was changed": (
        ["infer", "--model", "unsized"],
        ["thinking.json", "max_ops is None"],
    ),
    "infer without thinking.json": (
        ["infer", PROMPT, "--run", "unlabelled"],
        ["no thinking.json"],
    ),
}
DEVICES = {
    "no CUDA": (
        [*INFER, PROMPT, "--device", "cuda"],
        ["--device cuda", "no CUDA", "--device cpu"],
    ),
    "no CUDA to train on": (
        [*TRAIN, "--device", "cuda"],
        ["--device cuda", "no CUDA", "--device cpu"],
    ),
    "MPS": ([*INFER, PROMPT, "--device", "mps"], ["--device mps", "only cpu and cuda"]),
    "a second CPU": ([*INFER, PROMPT, "--device", "cpu:7"], ["--device cpu:7", "no such", "1"]),
    "a number of 20 digits": (
        [*INFER, PROMPT, "--device", "cpu:" + "9" * 20],
        ["--device cpu:999", "no such device"],
    ),
    "a number of other digits": ([*TRAIN, "--device", "cpu:\u0663"], ["no such device"]),
    "no number of a card": (
        [*INFER, PROMPT, "--device", "cpu:x"],
        ["--device cpu:x", "no such device", "has 1"],
    ),
}
TRAIN_FLAGS = {
    "no task": (["train"], ["parity, vars", "--preset"]),
    "unknown task": (["train", "pairty"], ["'pairty'", "parity, vars"]),
    "unknown preset": (
        ["train", "--preset", "table9/x"],
        ["table9/x", "table1/…", "gsm/…"],
    ),
    "part of a preset's name": (
        ["train", "--preset", "table1/"],
        ["'table1/'", "table1/vars-20-thinking"],
    ),
    "preset and another setting": (
        ["train", "--preset", "tiny/parity-cot", "--steps", "7"],
        ["steps 7 (preset: 400)"],
    ),
    "preset and a flag without value": (
        ["train", "--preset", "tiny/parity-cot", "--keep-best"],
        ["but --keep-best (preset: the default) was given"],
    ),
    "preset and another task": (
        ["train", "vars", "--preset", "tiny/parity-cot"],
        ["but vars (preset: parity) was given"],
    ),
    "preset of real weights on the tiny model": (
        ["train", "--preset", "table1/parity-10-cot"],
        ["--model tiny", "FOLDER"],
    ),
    "layout": ([*TRAIN, "--layout", "heap"], ["--layout", "'heap'", "rows", "pack", "long_rows"]),
    "unknown method": (
        [*TRAIN, "--method", "nope"],
        ["--method", "'nope'", "thinking", "no-cot", "cot"],
    ),
    "weight of no thoughts": (
        [*TRAIN, "--method", "cot", "--thought-weight", "2"],
        ["--thought-weight does nothing with --method cot"],
    ),
    "layer of no state": (
        [*TRAIN, "--method", "no-cot", "--inject-after", "2"],
        ["--inject-after does nothing with --method no-cot"],
    ),
    "length of rows that hold one sample": (
        [*TRAIN, "--layout", "rows", "--row-tokens", "512"],
        ["--row-tokens does nothing with --layout rows; leave one of them out"],
    ),
    "length of rows that hold one sample by recipe": (
        [*TRAIN, "--row-tokens", "512"],
        ["--row-tokens does nothing with --layout rows; leave it out"],
    ),
    "length of rows of a preset that hold one sample": (
        ["train", "--preset", "tiny/parity-cot", "--row-tokens", "512"],
        ["--row-tokens does nothing with --layout rows"],
    ),
    "checkpoints that nobody writes": (
        [*TRAIN, "--no-save", "--save-every", "1"],
        ["--save-every does nothing with --no-save"],
    ),
    "number of no checkpoints": (
        [*TRAIN, "--no-save", "--keep", "1"],
        ["--keep does nothing with --no-save"],
    ),
    "type of no checkpoint": (
        [*TRAIN, "--no-save", "--save-dtype", "bfloat16"],
        ["--save-dtype does nothing with --no-save"],
    ),
    "more parts than samples": (
        [*TRAIN, "--accumulate", "5"],
        ["--accumulate 5: a step has --batch-size 4 samples", "Lower it, or raise --batch-size"],
    ),
    "negative weight": (
        [*TRAIN, "--thought-weight", "-1"],
        ["--thought-weight -1.0", "at least 0"],
    ),
    "weight that is no number": (
        [*TRAIN, "--weight-decay", "nan"],
        ["--weight-decay nan", "at least 0"],
    ),
    "seed of too many bits": (
        [*TRAIN, "--seed", str(2**63)],
        [f"--seed {2**63}", f"at most {2**63 - 1}"],
    ),
    "warm-up of T that leaves no step": (
        [*TRAIN, "--thought-warmup", "1"],
        ["--thought-warmup 1: of --steps 1 none is left", "Lower it, or raise --steps"],
    ),
    "window beyond all sizes": (
        [*TRAIN, "--window", str(10**20)],
        [f"--window {10**20}", "at most 1000000"],
    ),
    "rows beyond all sizes": (
        [*TRAIN, "--layout", "pack", "--row-tokens", str(10**20)],
        [f"--row-tokens {10**20}", "at most 1000000"],
    ),
    "latents beyond all sizes": (
        [*TRAIN, "--method", "coconut", "--latents", str(10**20)],
        [f"--latents {10**20}", "at most 100000"],
    ),
    "stages of latents beyond all sizes": (
        [*TRAIN, "--method", "pause", "--latent-stages", str(10**9)],
        [f"--latent-stages {10**9}", "at most 100000"],
    ),
    "stages of a chain beyond all sizes": (
        [*TRAIN, "--method", "icot", "--remove-all-at", str(10**9)],
        [f"--remove-all-at {10**9}", "at most 100000"],
    ),
    "norm beyond all numbers": ([*TRAIN, "--clip", "inf"], ["--clip inf", "at most 1e+30"]),
    "decay": ([*TRAIN, "--decay", "2"], ["--decay 2.0", "at most 1"]),
    "decay below nothing": ([*TRAIN, "--decay", "-1"], ["--decay -1.0", "at least 0"]),
    "chunk size 0": ([*TRAIN, "--chunk-size", "0"], ["--chunk-size 0", "at least 1"]),
    "chunk size beyond the model": (
        [*TRAIN, "--chunk-size", "5000"],
        ["chunk size 5000", "1 … 1024"],
    ),
    "no steps": ([*TRAIN, "--steps", "0"], ["--steps 0", "at least 1"]),
    "negative rate": ([*TRAIN, "--lr", "-1"], ["--lr -1.0", "more than 0"]),
    "rate that is no number": ([*TRAIN, "--lr", "nan"], ["--lr nan", "more than 0"]),
    "rate beyond all numbers": ([*TRAIN, "--lr", "inf"], ["--lr inf", "at most 1e+30"]),
    "word for a number": ([*TRAIN, "--lr", "abc"], ["--lr", "'abc'"]),
    "fraction of a step": ([*TRAIN, "--steps", "1.5"], ["--steps", "'1.5'"]),
    "flag without value": ([*TRAIN, "--lr"], ["--lr", "expected one argument"]),
    "layers out of order": ([*TRAIN, "--inject-after", "9"], ["--inject-after 9", "<= 4"]),
    "training in float64": (
        [*TRAIN, "--dtype", "float64"],
        ["--dtype float64", "float32", "bfloat16"],
    ),
    "option of another task": (
        [*TRAIN, "--modulus", "7"],
        ["--modulus: the task parity has no such option"],
    ),
    "option of another method": (
        [*TRAIN, "--method", "cot", "--latents", "2"],
        ["--latents: the method cot has no such option"],
    ),
    "a file without a name": (
        ["train", "gsm", "--train", "good-then-long.txt,"],
        ["good-then-long.txt,: between commas a file has no name"],
    ),
    "other numbers for steps that were given": (
        ["train", "gsm", "--train", "x", "--align", "given", "--resample", "0.5"],
        ["--resample does nothing with --align given", "Leave one of them out"],
    ),
    "no operation to train on": ([*TRAIN, "--max-ops", "0"], ["--max-ops 0", "at least 1"]),
    "evaluation of less than no operations": (
        [*TRAIN, "--eval-max-ops", "-3"],
        ["--eval-max-ops -3", "at least 0"],
    ),
    "variables beyond the vocabulary": (
        ["train", "vars", "--steps", "1", *SHORT, "--variables", "12"],
        ["' i'", "vocabulary"],
    ),
    "training rows beyond the positions": ([*TRAIN, "--max-ops", "900"], ["2048"]),
    "evaluation beyond the positions in the words of a user": (
        ["train", "vars", "--steps", "1", *SHORT, "--eval-max-ops", "2000"],
        ["--eval-max-ops 2000 --variables 3 --modulus 10):"],
    ),
    "evaluation beyond the positions": (
        [*TRAIN, "--eval-max-ops", "2000"],
        ["--eval-max-ops 2000", "2048"],
    ),
    "thoughts beyond the positions": (
        [*TRAIN, "--max-thought-tokens", "4000"],
        ["4000", "2040"],
    ),
    "long rows beyond the positions": (
        [*TRAIN, "--layout", "long_rows", "--row-tokens", "4096"],
        ["4096", "2048"],
    ),
}
TRAIN_FOLDERS = {
    "out is not empty": (
        [*TRAIN, "--out", "filled"],
        ["--out filled", "thesis.txt", "Nothing is overwritten", "--resume"],
    ),
    "out is a finished run": (
        [*TRAIN, "--out", "trained"],
        ["--out trained", "record.json", "--resume"],
    ),
    "out is a file": (
        [*TRAIN, "--out", "empty.txt"],
        ["--out empty.txt", "it is a file", "name another folder"],
    ),
    "out is below a file": (
        [*TRAIN, "--out", "empty.txt/run"],
        ["empty.txt/run cannot be made", "--out"],
    ),
    "resume in a folder not ours": (
        [*RESUME_PARITY, "filled"],
        ["filled is not a run", "--out"],
    ),
    "resume in a folder not there": ([*RESUME_PARITY, "nope"], ["nope is not a run", "--out"]),
    "resume without any run": (
        ["train", "parity", "--resume"],
        ["no run of parity", "python run.py train parity"],
    ),
    "resume with other settings": (
        [*RESUME_PARITY, "trained", "--lr", "0.5"],
        ["--lr 0.5", "run: 0.003", "Leave it out"],
    ),
    "resume with a flag without value": (
        [*RESUME_PARITY, "trained", "--compile"],
        ["but --compile (run: not given) was given"],
    ),
    "resume with another task": (
        ["train", "vars", "--out", "trained", "--resume"],
        ["vars", "run: parity", "start a new run"],
    ),
    "resume from a torn state": ([*RESUME_PARITY, "torn"], ["training_state.pt"]),
    "resume with an emptied state": (
        [*RESUME, "emptied"],
        ["training_state.pt is damaged", "new run"],
    ),
    "resume with a state that is none": ([*RESUME, "stateless"], ["is damaged (KeyError)"]),
    "resume without thinking.json": ([*RESUME, "unlabelled"], ["no thinking.json"]),
    "resume to fewer steps": ([*RESUME, "shorter"], ["past the 2 steps", "run.json"]),
    "resume with a word for a number": ([*RESUME, "wordy"], ["run.json: steps is 'many'"]),
    "resume with a word for an option": (
        [*RESUME, "worded option"],
        ["run.json: ", "ops", "'many'"],
    ),
    "resume with a fraction for an option": (
        [*RESUME, "broken option"],
        ["run.json: ", "ops", "2.5"],
    ),
    "resume with another layer": (
        [*RESUME, "relayered"],
        ["--inject-after 2", "trained with 1"],
    ),
    "resume with other chunks": ([*RESUME, "rechunked"], ["--chunk-size 4", "trained with 8"]),
    "resume with a negative number": ([*RESUME, "negative"], ["run.json: warmup -5", "at least 0"]),
    "resume without a number": ([*RESUME, "undecided"], ["older version", "new run"]),
}
OTHERS = {
    "eval of an unknown task": (["eval", "pairty"], ["'pairty'", "parity, vars"]),
    "eval of no run": (
        ["eval", "parity", "--run", "nope"],
        ["--run nope", "no such folder", "empty.txt", "Name another"],
    ),
    "eval without samples": ([*EVAL, "--samples", "0"], ["--samples 0", "at least 1"]),
    "eval without rows a batch": ([*EVAL, "--batch-size", "0"], ["--batch-size 0", "at least 1"]),
    "eval with lengths exchanged": (
        [*EVAL, "--min-ops", "13"],
        ["--min-ops 13", "--max-ops 12", "exchange"],
    ),
    "eval beyond the positions": (
        [*EVAL, "--min-ops", "900", "--max-ops", "900"],
        ["2048"],
    ),
    "eval into a folder not there": (
        [*EVAL, "--out", "nope/predictions.jsonl"],
        ["--out nope/predictions.jsonl", "folder does not exist"],
    ),
    "eval into a file that is there": (
        [*EVAL, "--out", "filled/thesis.txt"],
        ["thesis.txt exists", "another file"],
    ),
    "eval into a folder that takes no file": (
        [*EVAL, "--out", "/proc/predictions.jsonl"],
        ["--out /proc/predictions.jsonl: its folder", "takes no file", "name another"],
    ),
    "a page in a folder that takes no file": (
        [*EVAL, "--html", "/proc/page.html"],
        ["--html /proc/page.html: its folder", "takes no file", "name another"],
    ),
    "a run of a later version": (
        ["infer", "--run", "later"],
        ["run.json: later_flag: the task parity has no such option", "take the version"],
    ),
    "data of an unknown task": (["data", "pairty"], ["'pairty'", "parity, vars"]),
    "data with chunk size 0": (
        ["data", "parity", "--chunk-size", "0"],
        ["--chunk-size 0", "at least 1"],
    ),
    "data of no examples": (["data", "parity", "--samples", "0"], ["--samples 0", "at least 1"]),
    "data of less than no operations": (
        ["data", "parity", "--ops", "-1"],
        ["--ops -1", "at least 0"],
    ),
    "data of more operations than anyone reads": (
        ["data", "parity", "--ops", "9" * 20],
        ["--ops 999", "at most 100000"],
    ),
    "data of a word for a number": (["data", "parity", "--index", "x" * 2000], ["--index", " … "]),
    "data of no folder": (["data", "--model", "./nope"], ["./nope", "empty.txt"]),
    "data of an option of another task": (
        ["data", "parity", "--modulus", "7"],
        ["--modulus: the task parity has no such option"],
    ),
    "data of no task": (["data", ""], ["task ''", "parity, vars"]),
    "bench of no part": (["bench", "", "--model", "plain"], ["PART", "invalid choice", "prefill"]),
    "bench of a run that is not there": (
        ["bench", "drafts", "--run", "nope"],
        ["--run nope", "no such folder"],
    ),
    "bench of weights that are not there": (["bench", "--model", "./nope"], ["./nope"]),
    "bench on a device that is not there": (
        ["bench", "decode", "--model", "plain", "--device", "tpu"],
        ["--device tpu", "cpu and cuda"],
    ),
    "report into a file of one's own": (
        ["report", "--write", "page.md"],
        ["unrecognized arguments: page.md"],
    ),
    "report on something": (["report", "vars"], ["unrecognized arguments: vars"]),
    "data of an example before the first": (
        ["data", "parity", "--index", "-1"],
        ["--index -1", "at least 0"],
    ),
    "drafts of a plain model": (
        ["bench", "drafts", "--run", "plain"],
        ["--run plain", "not trained to think", "method thinking"],
    ),
    "bench of a small vocabulary": (
        ["bench", "decode", "--model", "plain"],
        ["1000 ids", "260", "bench drafts"],
    ),
    "bench without a call": (
        ["bench", "decode", "--model", "plain", "--repeats", "0"],
        ["--repeats 0", "at least 1"],
    ),
}
BAD = PROMPTS | INFER_FLAGS | IDLE | EMPTY | INFER_FOLDERS | DEVICES
BAD |= TRAIN_FLAGS | TRAIN_FOLDERS | OTHERS
MARKS = {"no CUDA": no_cuda, "no CUDA to train on": no_cuda}


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path under `folder` and every file's bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def before(world) -> dict[str, bytes | None]:
    """What `world` holds before the first bad command."""
    return snapshot(world)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [pytest.param(*case, id=name, marks=MARKS.get(name, ())) for name, case in BAD.items()],
)
def test_bad_input_is_told_in_one_line_with_status_2_and_changes_no_file(
    arguments, words, before, inside
):
    status, out, err = call(*arguments)
    after = snapshot(inside)
    assert [word for word in words if word not in err] == []
    assert status == 2 and "Traceback" not in out + err
    assert after == before
    assert out == ""
    assert err.startswith(f"run.py {arguments[0]}: ")
    assert len(err) < 2000
    assert err.endswith("\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["infer", "--no-such"], ["--no-such (run.py infer --help"], id="unknown flag"),
        pytest.param(["dance"], ["'dance'", "train"], id="unknown command"),
        pytest.param([], ["COMMAND"], id="no command"),
    ],
)
def test_a_misused_command_line_is_told_in_one_line_that_names_the_help(
    arguments, words, before, inside
):
    status, out, err = call(*arguments)
    assert status == 2 and out == "" and err.startswith("run.py") and "Traceback" not in err
    assert [word for word in [*words, "--help"] if word not in err] == []
    assert err.endswith("\n") and err.count("\n") == 1
    assert snapshot(inside) == before


@pytest.mark.parametrize(
    "number, words", [(13, "Permission denied"), (30, "Read-only file system")]
)
def test_what_may_not_be_read_is_told_with_what_to_do(number, words, inside, monkeypatch):
    def shut(path):
        raise OSError(number, words, str(path))

    (inside / "prompts.txt").write_text(PROMPT)
    monkeypatch.setattr(Path, "read_bytes", shut)
    status, out, err = call("infer", "--file", "prompts.txt")
    assert status == 2 and out == "" and err.count("\n") == 1
    assert f"{words}: '" in err and "name another place" in err


def test_a_full_disk_is_told_with_the_file_and_what_to_do(inside, monkeypatch):
    def full(_path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "flush", full)
    status, _, err = call(*INFER, PROMPT, *FAST, "--html", "page.html")
    last = err.splitlines()[-1]
    assert status == 2 and "device: 'page.html'. Make room, or name another place" in last
    assert not Path("page.html").exists()
