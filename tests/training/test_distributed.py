"""Several processes that train one model together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run as command_line
from training_helpers import ROOT, assert_close, begin, metrics_of, places

from minits.checkpoint.weights import load


@pytest.mark.parametrize(
    "flags",
    [
        "--layout pack --batch-size 7 --accumulate 3",
        "--layout pack --batch-size 6 --accumulate 2 --chunk-size 64",
        "--layout rows --batch-size 12 --accumulate 12",
    ],
    ids=[
        "as many parts on one rank as on the other, or not",
        "hardly a thought, in some parts and on some rank none",
        "rows of one sample, as many parts as they are long",
    ],
)
def test_two_processes_take_the_steps_of_one(flags, tmp_path, capsys, processes):
    flags += " --steps 5 --max-ops 9 --eval-max-ops 9 --eval-samples 2 --warmup 0 --device cpu"
    flags += " --max-thought-tokens 99"
    one, two = (tmp_path / name for name in ("one", "two"))
    command = ["train", "parity", *flags.split(), "--out"]
    assert command_line.main([*command, str(one)]) == 0
    together = processes.run(tmp_path, [*command, str(two)], world=2)
    assert together.codes == [0, 0], together.stderr
    for out in (capsys.readouterr().out, together.stdout):
        assert out.count("in distribution (1 … 9 operations)") == 1
    assert len(metrics_of(one)) == 5
    for expected, found in zip(metrics_of(one), metrics_of(two), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    first, second = (load(folder)[0].state_dict() for folder in (one, two))
    assert_close(second, first, rtol=0, atol=2e-4)


def python(arguments: list[str], environment: dict[str, str] = {}) -> tuple[str, str]:
    """What a fresh Python prints on stdout and on stderr, given `arguments`; it must end well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_torchrun_tells_processes_what_the_tests_tell_them(tmp_path):
    script = tmp_path / "script.py"
    line = "json.dumps({**os.environ}) + '\\n'"  # in one piece, for both write at once
    script.write_text(f"import json, os, sys\nsys.stdout.write({line})\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    out, _ = python([*launcher, str(script)])
    told = sorted(map(json.loads, out.splitlines()), key=lambda found: found["RANK"])
    for found, expected in zip(told, places(2), strict=True):
        address = {name: found[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
        assert {name: found[name] for name in expected} == expected | address


def test_a_step_needs_a_sample_for_each_process(tmp_path, monkeypatch):
    for name, value in (("LOCAL_RANK", "2"), ("RANK", "2"), ("WORLD_SIZE", "5")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--batch-size 4: fewer samples than the 5 processes"):
        begin(tmp_path)


# -- a group of one process ------------------------------------------------------------------------


GROUP_OF_ONE = """
import json
from functools import partial
from pathlib import Path
import torch
from minits.methods import make_method
from minits.tasks import make_task
from minits.training import distributed, step
from minits.training.loop import read_figures, take_step
from minits.training.recipe import Plan, TrainSettings, resolve
from minits.training.session import set_up

def begin(**changes):
    task, method = make_task("parity"), make_method("thinking")
    settings = TrainSettings(task="parity", device="cpu", batch_size=2, steps=1, **changes)
    return set_up(Plan(resolve(settings, task), task, method), Path("none"))

def threads():
    tasks = Path("/proc/self/task")  # as Linux shows the process's threads
    names = [(task / "comm").read_text() for task in tasks.iterdir()] if tasks.exists() else []
    return [name for name in names if "gloo" in name]

distributed.world = lambda: 2  # so that it joins the group
found = {}

training = begin()
rows = training.stream.rows(0)
read_figures(training, take_step(training, rows, training.stream.parts(rows)))
found["threads"] = threads()
training.optimizer_step.release()
distributed.leave()
found["threads afterwards"] = threads()

graphs, compiled = [], torch.nn.Module.compile

def count(graph, inputs):
    graphs.append(1)
    return graph.forward

torch.nn.Module.compile = lambda layer: compiled(layer, backend=count)
step.decoder_layers = lambda model: model.backbone.model.layers[:1]  # all are alike
# A layer is larger than a bucket, and no bucket may be smaller than the first.
step.DistributedDataParallel = partial(step.DistributedDataParallel, bucket_cap_mb=0.01)
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1
training = begin(compile=True)
batch = training.stream.parts(training.stream.rows(0))[0]
training.optimizer_step.wrapped(batch)
found["graphs"] = len(graphs)
torch._dynamo.reset()
training.optimizer_step.loss_module(batch)
found["graphs alone"] = len(graphs) - found["graphs"]
training.optimizer_step.release()
distributed.leave()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def group_of_one() -> dict[str, Any]:
    """What a process finds that is a group by itself; it ends well and warns of nothing.

    A fresh one: what is imported before it joins the group decides what keeps the group's threads.
    """
    out, err = python(["-c", GROUP_OF_ONE], *places(1))
    assert "Warning" not in err, err
    return json.loads(out)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads as Linux shows them")
def test_no_thread_of_the_group_outlives_it(group_of_one):
    """One that lets go of a tensor while Python exits aborts the process.

    Seen in one of some 30 runs under load.
    """
    assert group_of_one["threads"]
    assert group_of_one["threads afterwards"] == []


def test_compiled_layers_stay_whole_in_a_group(group_of_one):
    """Otherwise this layer would be seven graphs."""
    assert 0 < group_of_one["graphs"] == group_of_one["graphs alone"]
