"""Times an older revision of this project beside this one, in turn, in two processes that stay.

    git archive c5f297b | tar x -C ../old          # any folder
    python tests/old_against_new_speed.py ../old MODEL [cpu] [ROUNDS]

MODEL: a folder of weights. Decoding, prefill as in `bench prefill`, and optimizer steps. In every round each
measurement is the median of three calls; a rate is old milliseconds over new ones, its median over the rounds. One JSON
object a line, the last one the summary.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import geometric_mean, median

NEW = Path(__file__).parent.parent
CALLS = 3


# -- the worker, which runs in either revision -----------------------------------------------------


def measurements(
    root: Path, folder: str, device: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, what to time) one after the other."""
    import torch

    new = (root / "minits/lab").exists()
    cuda = device == "cuda"
    if new:
        from minits.checkpoint.weights import load
        from minits.generation import GenerationConfig, generate_ids, prefill
        from minits.lab.bench import LaidDown, spread
    else:
        from minits.bench import Forced, spread
        from minits.generation import GenerationConfig, generate_ids, prefill
        from minits.weights import load
    model, _ = load(folder, dtype=torch.bfloat16 if cuda else torch.float32, device=device)
    if cuda:  # only there: the older module wants triton
        where = import_module("minits" if new else "minits.generation")
        model = where.accelerate(model)
    c, words = model.config.chunk_size, model.backbone.config.vocab_size

    def prompt_of(tokens: int) -> list[int]:
        return [5 + 37 * i % (min(words, 990) - 8) for i in range(tokens)]

    def laid_down(chunks: int, where, length: int, how: str) -> tuple:
        """(model, options) under which the chunks in `where` think `length` tokens."""
        if new:
            return model, {"hook": LaidDown(model, where, length)}
        forced = Forced(model, chunks, where, length, sequential=how == "sequential")
        forced.word %= words
        return forced, {}

    def read(chunks: int, count: int, length: int, how: str) -> Callable[[], object]:
        where = spread(count, chunks - 1)
        engine, options = laid_down(chunks, where, length, how)
        config = GenerationConfig(max_new_tokens=1, prefill=how, max_thought_tokens=32, **options)

        def run() -> None:
            engine.next = 0  # which chunk Forced is asked for
            reading = prefill(engine, [prompt_of(chunks * c)], config)
            entered = sum(not z.trivial for z in reading.thoughts[0][:-1])
            assert entered == count, (entered, count)

        return run

    def write(batch: int, think: int) -> Callable[[], object]:
        where = range(128 // c, 128)
        engine, options = laid_down(0, where, think, "sequential") if think else (model, {})
        prompts = [prompt_of(128 // c * c)] * batch

        def run() -> None:
            engine.next = 0
            generate_ids(
                engine,
                prompts,
                max_new_tokens=65,
                eos_ids=[],
                prefill="sequential",
                max_thought_tokens=32,
                think=think > 0,
                **options,
            )

        return run

    for batch in (1, 64) if cuda else (1,):
        yield f"decode, batch {batch}", write(batch, 0)
    yield "decode, a thought of 1 after every chunk", write(1, 1)
    for chunks in (8, 16, 32, 64) if cuda else (8,):
        for count in (0, 2, 5, chunks - 1):
            for length in (1, 8) if count else (1,):
                for how in ("sequential", "speculative"):
                    name = f"prefill, K = {chunks}, R = {count}, thoughts of {length}, {how}"
                    yield name, read(chunks, count, length, how)
    del model
    yield from steps(new, folder, device)


def steps(new: bool, folder: str, device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Optimizer steps at a learning rate of 0."""
    base = folder if device == "cuda" else "tiny"
    cells = [("parity", {}, {}), ("vars", {"max_ops": 20}, {"compile": device == "cuda"})]
    for task, options, changes in cells:
        how = {"task": task, "model": base, "device": device} | changes
        if new:
            from minits.methods import make_method
            from minits.tasks import make_task
            from minits.training.recipe import Plan, TrainSettings, resolve
            from minits.training.session import set_up

            made = make_task(task, **options)
            settings = resolve(TrainSettings(**how), made)
            run = set_up(Plan(settings, made, make_method("thinking")), Path("nowhere"))
        else:
            from minits.config import TrainConfig, resolve_train
            from minits.train import set_up

            run = set_up(resolve_train(TrainConfig(**how, **options)), Path("nowhere"))
        parts = run.stream.parts(run.stream.rows(0))
        name = f"training step, {task}, {list(parts[0].ids.shape)}"
        yield name, lambda: (run.optimizer_step if new else run.update)(parts, 0.0)
        if new:
            run.optimizer_step.release()
        del run, parts
        gc.collect()  # two processes share one card


def work(root: Path, folder: str, device: str) -> None:
    """Per line of stdin: "next" makes the next measurement ready, else the ready one is timed."""
    sys.path.insert(0, str(root))
    import torch

    def timed(function: Callable[[], object]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    left = measurements(root, folder, device)
    function = None
    for line in sys.stdin:
        if line == "next\n":
            name, function = next(left, (None, None))
            if device == "cuda":
                torch.cuda.empty_cache()
            for _ in range(2 if function else 0):  # compiling, capture of graphs
                timed(function)
            print(json.dumps(name), flush=True)
        else:
            print(median(timed(function) for _ in range(CALLS)), flush=True)


# -- the two in turn -------------------------------------------------------------------------------


def main(old: Path, folder: str, device: str = "cuda", rounds: int = 5) -> None:
    """Prints each measurement with its rate in every round, and the medians."""
    command = [sys.executable, __file__, "work"]
    sides = {
        root: subprocess.Popen(
            [*command, str(root), folder, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for root in (old, NEW)
    }

    def ask(root: Path, what: str) -> object:
        side = sides[root]
        print(what, file=side.stdin, flush=True)
        return json.loads(side.stdout.readline())

    rates = {}
    while name := ask(old, "next"):
        assert ask(NEW, "next") == name
        pairs = []
        for turn in range(rounds):
            order = [old, NEW] if turn % 2 == 0 else [NEW, old]
            taken = {root: ask(root, "time") for root in order}
            pairs.append((taken[old], taken[NEW]))
        rates[name] = median(theirs / ours for theirs, ours in pairs)
        told = {"what": name, "rate": rates[name], "old_and_new_ms": pairs}
        print(json.dumps(told), flush=True)
    for side in sides.values():
        side.stdin.close()
        side.wait()
    prefill = [rate for name, rate in rates.items() if name.startswith("prefill")]
    others = {name: rate for name, rate in rates.items() if not name.startswith("prefill")}
    print(json.dumps({"prefill, geometric mean": geometric_mean(prefill)} | others))


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(Path(sys.argv[2]), *sys.argv[3:])
    else:
        main(Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:]))
