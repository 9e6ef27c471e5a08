"""Going on from a checkpoint: exactly as uninterrupted, or not at all; and stages after the first."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from training_helpers import (
    SHORT,
    assert_same_bits,
    begin,
    checkpoints_in,
    press_ctrl_c,
    settings,
    silent,
    snapshot,
    train,
)

from minits.checkpoint.weights import load
from minits.methods import make_method
from minits.tasks import make_task
from minits.tasks.parity import Parity
from minits.thinking import CompressionBlock
from minits.training import loop, run_folder, session
from minits.training.loop import TrainingError
from minits.training.recipe import Plan, TrainSettings, resolve
from minits.training.run_folder import kept_options
from minits.training.session import run_training, set_up

# -- more steps, other types -----------------------------------------------------------------------


def test_more_steps_are_those_of_a_longer_run_where_the_rate_allows_it(tmp_path):
    train(begin(tmp_path / "first", steps=5, decay=0.0), silent)
    more, whole = begin(tmp_path / "first", decay=0.0), begin(tmp_path / "whole", decay=0.0)
    assert more.done == 5
    train(more, silent)
    train(whole, silent)
    assert_same_bits(snapshot(more), snapshot(whole))


def test_more_steps_are_refused_where_those_taken_would_have_been_others(tmp_path):
    train(begin(tmp_path, steps=5), silent)
    with pytest.raises(ValueError, match="--steps 12: .* a run of 5 steps.*train parity --model"):
        begin(tmp_path)


def test_fewer_steps_than_were_taken_are_refused(tmp_path):
    train(begin(tmp_path, steps=2), silent)
    with pytest.raises(ValueError, match="step-000002 is past the 1 steps"):
        begin(tmp_path, steps=1)


def test_a_state_with_a_changed_bit_is_refused(tmp_path):
    train(begin(tmp_path, steps=1), silent)
    path = tmp_path / "checkpoints" / "step-000001" / "training_state.pt"
    content = bytearray(path.read_bytes())
    moment = torch.load(path)["optimizer"]["state"][0]["exp_avg"]
    content[content.index(moment.numpy().tobytes())] ^= 1  # torch.load would not see it
    path.write_bytes(content)
    with pytest.raises(ValueError, match="training_state.pt is damaged"):
        begin(tmp_path, steps=1)


def test_a_run_until_ctrl_c_goes_on_without_a_list_of_all_its_steps(tmp_path):
    many = 10**7
    training = begin(tmp_path, steps=many)
    press_ctrl_c(training, 2)
    train(training, silent)
    tracemalloc.start()
    try:
        assert begin(tmp_path, steps=many).done == 2
        assert tracemalloc.get_traced_memory()[1] < 4 * many  # bytes; a list has 8 an entry
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_checkpoints_in_bfloat16_resume_exactly(weight_decay, tmp_path):
    chosen = {"save_dtype": "bfloat16", "weight_decay": weight_decay}
    whole = begin(tmp_path / "whole", weight_decay=weight_decay)
    train(whole, silent)
    training = begin(tmp_path / "half", **chosen)
    press_ctrl_c(training, 5)
    train(training, silent)
    at = tmp_path / "half" / "checkpoints" / "step-000005"
    assert json.loads((at / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = training.model.state_dict()["backbone.lm_head.weight"].bfloat16().float()
    assert torch.equal(load(at)[0].state_dict()["backbone.lm_head.weight"], rounded)
    resumed = begin(tmp_path / "half", **chosen)
    train(resumed, silent)
    assert_same_bits(snapshot(resumed), snapshot(whole))


def test_weight_decay_leaves_norms_and_biases_alone(tmp_path):
    """No gradient reaches anything: what changes has decayed."""
    training = begin(tmp_path, weight_decay=0.5, lr=0.1, warmup=0)
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training.optimizer_step.optimizer.step()
    for name, parameter in training.model.named_parameters():
        wanted = before[name] * (0.95 if parameter.dim() > 1 else 1.0)
        torch.testing.assert_close(parameter.detach(), wanted, msg=name)


def test_without_weight_decay_the_optimizer_has_one_group_as_ever(tmp_path):
    assert len(begin(tmp_path).optimizer_step.optimizer.param_groups) == 1


# -- what is not of this training ------------------------------------------------------------------


def at(folder: Path) -> Path:
    return folder / "checkpoints" / "step-000003"


def edit_json(name: str, **change: object):
    def edit(folder: Path) -> None:
        file = at(folder) / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change))

    return edit


def edit_state(**change: object):
    def edit(folder: Path) -> None:
        file = at(folder) / "training_state.pt"
        torch.save(torch.load(file) | change, file)

    return edit


def edit_settings(**change: object):
    def edit(folder: Path) -> None:
        file = at(folder) / "training_state.pt"
        state = torch.load(file)
        torch.save(state | {"settings": state["settings"] | change}, file)

    return edit


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory) -> Path:
    """A run of three steps, one checkpoint."""
    folder = tmp_path_factory.mktemp("three")
    train(begin(folder, steps=3), silent)
    return folder


STRANGERS = {
    "another task": (edit_json("thinking.json", task="vars"), "task 'vars' in thinking.json"),
    "another seed": (edit_json("thinking.json", seed=1), "seed 1 in thinking.json"),
    "another step": (edit_json("thinking.json", step=2), "step 2 in thinking.json"),
    "another base": (edit_json("thinking.json", base_model="x"), "base_model 'x'"),
    "other examples": (edit_json("thinking.json", max_ops=9), "max_ops 9 in thinking.json"),
    "another longest thought": (
        edit_json("thinking.json", max_thought_tokens=9),
        "max_thought_tokens 9 in thinking.json",
    ),
    "a state of another step": (edit_state(step=2), "step 3 in thinking.json, 2"),
    "a state of another seed": (edit_settings(seed=1), "seed 1 in training_state.pt"),
    "a state of another rate": (edit_settings(lr=0.5), "lr 0.5 in training_state.pt"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_checkpoint_that_is_not_of_this_training_is_refused(name, three_steps, tmp_path):
    edit, words = STRANGERS[name]
    shutil.copytree(three_steps, tmp_path / "run")
    edit(tmp_path / "run")
    with pytest.raises(ValueError, match="is not of this training") as caught:
        begin(tmp_path / "run", steps=3)
    assert words in str(caught.value) and "train parity --model" in str(caught.value)


def test_a_checkpoint_that_says_less_of_its_task_is_continued(three_steps, tmp_path):
    """Older versions wrote max_ops alone."""
    shutil.copytree(three_steps, tmp_path / "run")
    file = at(tmp_path / "run") / "thinking.json"
    about = json.loads(file.read_text())
    del about["min_ops"], about["eval_max_ops"]
    file.write_text(json.dumps(about))
    assert begin(tmp_path / "run", steps=3).done == 3


def test_where_files_lie_does_not_go_with_a_checkpoint():
    """A resume may find them elsewhere."""

    @dataclass(frozen=True)
    class Told(Parity):
        file: str = "names.txt"
        paths = ("file",)

    assert kept_options(Told(), asdict(Told())) == asdict(Parity())


@pytest.mark.parametrize(
    "change", [{"lr": 0.5}, {"warmup": 0}, {"batch_size": 3}, {"seed": 1}, {"max_ops": 4}], ids=str
)
def test_a_run_json_that_was_edited_is_refused(change, three_steps):
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} .* in (thinking.json|training_state.pt)"):
        begin(three_steps, steps=3, **change)


def test_what_changes_no_step_may_change(three_steps):
    chosen = {"save_every": 1, "log_every": 1, "keep": 1, "save_dtype": "bfloat16"}
    assert begin(three_steps, steps=3, **chosen).done == 3


# -- a stage after the first -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_stages(tmp_path_factory) -> dict[str, Path]:
    """Method -> a run of it."""
    found = {}
    for method in ("thinking", "cot"):
        found[method] = tmp_path_factory.mktemp(method)
        chosen = {"chunk_size": 4, "inject_after": 2} if method == "thinking" else {}
        train(begin(found[method], steps=2, method=method, **chosen), silent)
    return found


def second(folder: Path, first: Path, **changes):
    """A training that starts from the run `first`, with no more said than needed."""
    task = make_task("parity", **SHORT)
    chosen = TrainSettings(task="parity", model=str(first), device="cpu", **changes)
    chosen = resolve(replace(chosen, eval_samples=2), task)
    return set_up(Plan(chosen, task, make_method(chosen.method)), folder)


def test_thinking_after_cot_starts_from_its_weights_with_copies_as_t_and_c(first_stages, tmp_path):
    training = second(tmp_path, first_stages["cot"], max_thought_tokens=8, steps=2)
    model, old = training.model, load(first_stages["cot"])[0]
    assert_same_bits(model.backbone.state_dict(), old.backbone.state_dict())
    layers = model.backbone.model.layers
    T, C = model.thinking_block, model.compression_block
    assert_same_bits(T.layer.state_dict(), layers[-1].state_dict())
    assert_same_bits(C.layer.state_dict(), layers[0].state_dict())
    assert torch.equal(model.blocked, old.blocked)
    assert training.settings.chunk_size == model.config.chunk_size == 8
    train(training, silent)
    assert load(tmp_path)[0].thinks


def test_thinking_after_thinking_keeps_t_and_c_and_what_was_chosen(first_stages, tmp_path):
    training = second(tmp_path, first_stages["thinking"])
    old = load(first_stages["thinking"])[0]
    assert_same_bits(training.model.state_dict(), old.state_dict())
    chosen = training.settings
    assert (chosen.chunk_size, chosen.inject_after, chosen.max_thought_tokens) == (4, 2, 8)
    assert training.model.config.chunk_size == 4 and training.done == 0


def test_cot_after_thinking_drops_t_and_c(first_stages, tmp_path):
    training = second(tmp_path, first_stages["thinking"], method="cot")
    assert not training.model.thinks
    assert {name.split(".")[0] for name in training.model.state_dict()} == {"backbone"}


def test_a_stage_after_the_tiny_model_has_its_recipe(first_stages, tmp_path):
    chosen = second(tmp_path, first_stages["cot"]).settings
    assert (chosen.layout, chosen.lr, chosen.steps) == ("rows", 3e-3, 400)


def test_a_folder_called_tiny_is_not_the_tiny_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert settings().lr == 3e-3


def test_a_chunk_size_against_that_of_the_first_stage_is_refused(first_stages, tmp_path):
    with pytest.raises(ValueError, match="chunk_size 8 .*trained with 4"):
        second(tmp_path, first_stages["thinking"], chunk_size=8)


# -- before the first step -------------------------------------------------------------------------


def whole(folder: Path, note=silent, **changes) -> dict:
    """A whole training, its figures."""
    options = {name: changes.pop(name, value) for name, value in SHORT.items()}
    task, chosen = make_task("parity", **options), settings(steps=2, **changes)
    plan = Plan(chosen, task, make_method(chosen.method))
    return run_training(plan, folder, log=silent, note=note, named=True)


def test_chunks_that_no_row_completes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--chunk-size 64: none of the first 32 training rows"):
        whole(tmp_path / "run", chunk_size=64)
    assert not (tmp_path / "run").exists()
    whole(tmp_path / "run", chunk_size=64, method="cot")  # which has no chunks


def test_chunks_that_few_rows_complete_are_told_of(tmp_path):
    said = []
    whole(tmp_path / "run", said.append, chunk_size=30)
    (told,) = (line for line in said if line.startswith("--chunk-size 30: only"))
    assert "% of the first 32 training rows complete a chunk" in told


def test_a_warm_up_longer_than_the_run_is_told_of(tmp_path):
    said = []
    whole(tmp_path / "one", said.append, warmup=3)
    whole(tmp_path / "two", silent, warmup=2)
    assert any(line.startswith("--warmup 3 is longer than the run's 2 steps") for line in said)


# -- the disk and memory ---------------------------------------------------------------------------

NO_MEMORY = [
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_keeps_the_last_checkpoint_and_says_what_to_lower(
    error, tmp_path, monkeypatch
):
    take = loop.take_step

    def fail(training, *batch):
        if training.done == 1:
            raise error
        return take(training, *batch)

    monkeypatch.setattr(loop, "take_step", fail)
    # A resumed run keeps its settings, so that what to lower is for a new one.
    told = "no memory left .* new run .*--accumulate.*--batch-size.*--resume .*these settings"
    with pytest.raises(TrainingError, match=told):
        whole(tmp_path / "run", save_every=1)
    assert checkpoints_in(tmp_path / "run") == ["step-000001"]


def test_another_error_is_none_of_memory(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(session, "train", fail)
    with pytest.raises(RuntimeError, match="^shapes do not fit$"):
        whole(tmp_path / "run")


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")],
    ids=["of the system", "of torch"],
)
def test_a_full_disk_names_what_was_written_and_the_checkpoint_that_is_left(
    error, tmp_path, monkeypatch
):
    training = begin(tmp_path, save_every=4)
    press_ctrl_c(training, 5)
    save = torch.save

    def full(state, path):
        if state["step"] == 5:
            raise error
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="step-000005 cannot be written .*step-000004 is the last"):
        train(training, silent)
    assert checkpoints_in(tmp_path) == ["step-000004"]
    assert begin(tmp_path).done == 4


def test_weights_that_a_c_of_ones_own_has_besides_are_those_of_the_seed(tmp_path, monkeypatch):
    make = CompressionBlock.__init__

    def with_gate(block, config):
        make(block, config)
        block.gate = nn.Linear(config.hidden_size, config.hidden_size)

    monkeypatch.setattr(CompressionBlock, "__init__", with_gate)
    one, same, other = (
        begin(tmp_path / str(number), seed=seed).model.compression_block.gate.weight
        for number, seed in enumerate((1, 1, 2))
    )
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("line", [b'{"step": 3', b"\0\0\0", b"7", b"{}", b"\xff"])
def test_a_damaged_line_of_metrics_is_named(line, tmp_path):
    whole(tmp_path / "run", save_every=4)
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*lines[:2], line, *lines[2:], b""]))
    with pytest.raises(ValueError, match="metrics.jsonl, line 3 is no step's metrics: .*Take it"):
        run_folder.keep_metrics(file, 4)
    file.write_bytes(b"\n".join(lines + [line]))  # a last one that is cut off
    run_folder.keep_metrics(file, 4)
    assert file.read_bytes().splitlines() == lines[:4]
