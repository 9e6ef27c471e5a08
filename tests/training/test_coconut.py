"""Coconut and its control (methods/coconut.py, pause.py): property 12, cached and batched = naive."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from strategies import Shape, build, fresh, half, shapes
from test_step_graphs import pretend_card, use_graphs
from training_helpers import (
    QUICK,
    SHORT,
    assert_close,
    assert_same_bits,
    gradients,
    metrics_of,
    press_ctrl_c,
    settings,
    silent,
    snapshot,
    train,
    train_step,
)

from minits.checkpoint.tiny import make_tiny, tiny_tokenizer
from minits.checkpoint.weights import load, load_checkpoint
from minits.cli import main
from minits.cli.models import trained_method
from minits.fast.accelerate import accelerate
from minits.fast.layouts import BucketedSizes, ExactSizes
from minits.generation import GenerationConfig
from minits.methods import make_method
from minits.prefill import Intervention
from minits.supervision import Example, Row, Step
from minits.tasks import make_task
from minits.tensors import in_order
from minits.thinking import ThinkingStates
from minits.training.loop import Training
from minits.training.recipe import Plan, TrainSettings, resolve
from minits.training.session import set_up

BEGIN = 20  # of the vocabulary of 24 that random models have; end and latent follow it
END, LATENT = BEGIN + 1, BEGIN + 2
COCONUT, PAUSE = make_method("coconut"), make_method("pause")
TOKENIZER = tiny_tokenizer()
EXAMPLE = Example("The coin starts at state heads.", (Step(0, "heads"), Step(0, "tails")), "tails")


# -- the plain definition: one row, all of it read again for each latent ---------------------------


def vectors(model: ThinkingStates, x: torch.Tensor) -> torch.Tensor:
    """Embeddings [1, L, E] -> final normed vectors, in one pass without a cache."""
    backbone = model.backbone
    frame = backbone.frame(in_order(*x.shape[:2], x.device))
    out = backbone.run_layers(x, range(backbone.config.num_hidden_layers), frame)
    return backbone.model.norm(out)


def naive(model: ThinkingStates, prompt: list[int], following: list[int]) -> torch.Tensor:
    """Logits [L, V] at `end` and after it; prompt: up to `end`, latents in it."""
    embed, k = model.backbone.model.embed_tokens, prompt.count(LATENT)
    x = embed(torch.tensor([prompt[: -1 - k]]))
    for _ in range(k):
        x = torch.cat([x, vectors(model, x)[:, -1:]], dim=1)
    rest = embed(torch.tensor([[*prompt[-1:], *following]]))
    out = vectors(model, torch.cat([x, rest], dim=1))[0]
    return model.backbone.lm_head(out[-rest.shape[1] :])


def naive_loss(model: ThinkingStates, row: Row) -> torch.Tensor:
    prompt, answer = row.ids[: row.prompt_length], row.ids[row.prompt_length :]
    logits = naive(model, prompt, answer[:-1])
    return F.cross_entropy(logits, torch.tensor(answer), reduction="sum")


def naive_answer(model: ThinkingStates, prompt: list[int], most: int) -> list[int]:
    said: list[int] = []
    while len(said) < most and not set(said) & set(model.config.eos_ids):
        said.append(int(naive(model, prompt, said)[-1].argmax()))
    return said


@torch.no_grad()
def tamed(model: ThinkingStates) -> ThinkingStates:
    """The model with less of its layers in the residual stream.

    Fed back 21 times, random weights make 1e8 of a difference of 1, and 1e-8 of one by rounding;
    with a quarter of the layers 1 of 1,000 draws still had gradients of 1e6, and 2e-8 of rounding.
    """
    for layer in model.backbone.model.layers:
        layer.self_attn.o_proj.weight *= 0.1
        layer.mlp.down_proj.weight *= 0.1
    return model


@st.composite
def latent_rows(draw, most: int = 4) -> list[Row]:
    """Rows of one number of latents, 1 … 21 (0: the curriculum's first stage)."""
    latents = draw(st.integers(0, 21) | st.sampled_from([1, 2, 21]))
    made = []
    for _ in range(draw(st.integers(1, most))):
        question = draw(st.lists(st.integers(0, BEGIN - 1), min_size=1, max_size=30))
        answer = draw(st.lists(st.integers(3, BEGIN - 1), max_size=8))
        prompt = [*question, BEGIN, *[LATENT] * latents, END]
        made.append(Row([*prompt, *answer, 0], len(prompt), []))
    return made


@half
@given(shapes(), latent_rows(), st.sampled_from([ExactSizes, BucketedSizes]))
def test_losses_and_gradients_are_those_of_the_plain_definition(shape, rows, sizes):
    model = tamed(fresh(shape, thinks=False))
    batch = COCONUT.collate(rows, model.config, sizes=sizes())
    found = COCONUT.losses(model, batch)
    found.lm.backward()
    mine = gradients(model)
    model.zero_grad()
    wanted = sum(naive_loss(model, row) for row in rows)
    wanted.backward()
    theirs = gradients(model)
    largest = max(float(x.abs().max()) for x in theirs.values())
    torch.testing.assert_close(found.lm, wanted, rtol=1e-9, atol=1e-9)
    assert_close(mine, theirs, rtol=1e-9, atol=1e-9 * max(largest, 1.0))
    answers = sum(len(row.ids) - row.prompt_length for row in rows)
    assert batch.counts.tolist() == [answers, 0] and int(found.lm_tokens) == answers


@half
@given(shapes(), latent_rows(), st.integers(1, 12), st.sampled_from(["sequential", "speculative"]))
def test_answers_in_a_batch_are_those_of_the_plain_definition(shape, rows, most, prefill):
    model = tamed(fresh(shape, thinks=False))
    prompts = [row.ids[: row.prompt_length] for row in rows]
    config = GenerationConfig(max_new_tokens=most, prefill=prefill)
    with torch.no_grad():
        reading = COCONUT.read(model, prompts, config)
        logits = model.backbone.lm_head(reading.out)
        for row, prompt in enumerate(prompts):
            wanted = naive(model, prompt, [])[-1]
            # 21 latents of random weights made 2e-9 of rounding (a draw in the deep profile).
            torch.testing.assert_close(logits[row], wanted, rtol=1e-6, atol=1e-6)
        results = COCONUT.answer(model, prompts, config)
        wanted = [naive_answer(model, prompt, most) for prompt in prompts]
    assert [result.ids for result in results] == wanted
    assert reading.lengths == [len(prompt) for prompt in prompts]


@given(shapes(), latent_rows(3))
@half
def test_the_control_reads_its_prompt_in_one_pass(shape, rows):
    """The same rows, and `latent` is a token as any other."""
    model = build(shape, thinks=False)
    found = PAUSE.losses(model, PAUSE.collate(rows, model.config)).lm
    wanted = 0.0
    for row in rows:
        logits = model.backbone(torch.tensor([row.ids[:-1]]))[0, row.prompt_length - 1 :]
        labels = torch.tensor(row.ids[row.prompt_length :])
        wanted += F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(found, wanted)


def test_autocast_computes_what_float32_does_up_to_rounding():
    model = fresh(Shape(), torch.float32, thinks=False)
    question = [5, 6, 7, BEGIN, LATENT, LATENT, LATENT, END, 8, 9, 0]
    batch = COCONUT.collate([Row(question, 8, []), Row(question[1:], 7, [])], model.config)
    wanted = COCONUT.losses(model, batch).lm
    with torch.autocast("cpu", torch.bfloat16):
        found = COCONUT.losses(model, batch).lm
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=0.1)
    assert all(p.grad.isfinite().all() for p in model.parameters())


class Other(Intervention):
    """Other latents, and where they were asked for."""

    def __init__(self, change) -> None:
        self.change, self.places = change, []

    def states(self, places, states):
        self.places.append(list(places))
        return self.change(states)


def test_the_hook_sees_and_replaces_every_latent():
    model = build(Shape(), thinks=False)
    prompts = [[5, BEGIN, LATENT, LATENT, END], [7, 8, BEGIN, LATENT, LATENT, END]]
    same, zero = Other(lambda x: x), Other(torch.zeros_like)
    usual = COCONUT.read(model, prompts, GenerationConfig()).out
    torch.testing.assert_close(COCONUT.read(model, prompts, GenerationConfig(hook=same)).out, usual)
    assert same.places == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]
    assert not torch.allclose(
        COCONUT.read(model, prompts, GenerationConfig(hook=zero)).out, usual, atol=0.01
    )


# -- rows and stages -------------------------------------------------------------------------------


def parts(method, stage: int, steps: int) -> tuple[int, int]:
    """(latents, tokens after `end`) of an example with so many steps."""
    example = replace(EXAMPLE, steps=(Step(0, "heads"),) * steps)
    row = method.encode(example, TOKENIZER, None, "x", stage)
    begin = max(TOKENIZER.known_ids) + 1
    question, rest = TOKENIZER.encode(EXAMPLE.prompt), row.ids[row.prompt_length :]
    latents = row.prompt_length - len(question) - 2
    prompt = [*question, begin, *[begin + 2] * latents, begin + 1]
    assert row.ids[: row.prompt_length] == prompt and row.name == "x"
    assert rest[-2:] == [*TOKENIZER.encode(" tails"), TOKENIZER.eos_id]
    return latents, len(rest) - 2


@pytest.mark.parametrize("kind", ["coconut", "pause"])
@pytest.mark.parametrize("latents", [6, 9, 12, 15, 21])
def test_the_number_of_latents_is_the_stages_and_never_the_rows(kind, latents):
    method = make_method(kind, latents=latents)
    for steps in (0, 1, 2, 5):
        found = [parts(method, stage, steps) for stage in (0, 1, 2, 3, -1)]
        each = latents // 3
        left = [max(steps - 1, 0), max(steps - 2, 0), max(steps - 3, 0), 0, 0]
        assert found == list(zip([each, 2 * each, latents, latents, latents], left))


def test_the_first_stage_may_be_all_steps_and_no_latent():
    method = make_method("coconut", first_stage=0)
    assert [parts(method, stage, 2) for stage in range(5)] == [
        (0, 2), (2, 1), (4, 0), (6, 0), (6, 0),
    ]  # fmt: skip
    names = [stage.name for stage in method.stages(1000, 64)]
    assert names[:2] == ["0 latents, 0 steps gone", "2 latents, 1 steps gone"] and len(names) == 5


def test_the_schedule_is_an_epoch_a_stage():
    stages = COCONUT.stages(400, 128)
    assert [s.steps for s in stages] == [55, 55, 55, 235]
    assert [s.partial for s in stages] == [True, True, True, False]
    assert all(s.resets and s.fresh for s in stages)


# -- three rows of the vocabulary ------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
def test_the_three_start_as_a_known_token_and_nothing_else_changes(tie):
    model = fresh(Shape(vocab=60, tie=tie), torch.float32, thinks=False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    COCONUT.prepare(model, TOKENIZER, {"method": "cot"})
    begin, source = max(TOKENIZER.known_ids) + 1, TOKENIZER.encode(".")[0]
    for name in ("backbone.model.embed_tokens.weight", "backbone.lm_head.weight"):
        weight, old = model.state_dict()[name], before.pop(name)
        for row in range(3):
            assert torch.equal(weight[begin + row], old[source])
        assert torch.equal(weight[:begin], old[:begin])
        assert torch.equal(weight[begin + 3 :], old[begin + 3 :])
    after = model.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_trained_ones_are_kept_and_a_model_without_room_is_refused():
    model = fresh(Shape(vocab=60), torch.float32, thinks=False)
    before = model.backbone.lm_head.weight.clone()
    PAUSE.prepare(model, TOKENIZER, {"method": "coconut"})
    assert torch.equal(model.backbone.lm_head.weight, before)
    model, _ = make_tiny(seed=0, window=None, thinks=False)
    with pytest.raises(ValueError, match="needs 3 rows of the vocabulary .*this model has 0"):
        COCONUT.prepare(model, TOKENIZER, {})


@pytest.mark.parametrize("trained", [{}, {"method": "no-cot"}, {"method": "icot"}])
def test_weights_without_cot_are_told_of_where_the_first_stage_lacks_a_step(trained):
    model = fresh(Shape(vocab=60), torch.float32, thinks=False)
    with pytest.warns(UserWarning, match="--first-stage 1: .* starts from a run of CoT"):
        COCONUT.prepare(model, TOKENIZER, trained)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make_method("coconut", first_stage=0).prepare(model, TOKENIZER, trained)
        for method in ("cot", "coconut", "pause"):
            COCONUT.prepare(model, TOKENIZER, {"method": method})
    assert told == []


# -- training --------------------------------------------------------------------------------------

CURRICULUM = {"stage_samples": 8, "first_stage": 0, "latents": 3}  # 4 stages of 2 steps, one of 4


def begin(folder: Path, method: str = "coconut", **changes) -> Training:
    folder.mkdir(parents=True, exist_ok=True)
    made = make_method(method, **CURRICULUM)
    plan = Plan(settings(method=method, **changes), make_task("parity", **SHORT), made)
    return set_up(plan, folder)


@pytest.mark.parametrize(
    "method, stop", [("coconut", 3), ("coconut", 6), ("coconut", 10), ("pause", 5)]
)
def test_a_resume_is_exact(method, stop, tmp_path):
    whole, training = (begin(tmp_path / name, method) for name in ("whole", "half"))
    train(whole, silent)
    press_ctrl_c(training, stop)
    assert not train(training, silent)
    resumed = begin(tmp_path / "half", method)
    assert resumed.done == stop and train(resumed, silent)
    assert_same_bits(snapshot(resumed), snapshot(whole))
    assert metrics_of(tmp_path / "half") == metrics_of(tmp_path / "whole")


def test_parts_of_a_step_make_the_step(tmp_path):
    whole, split = (begin(tmp_path / str(n), accumulate=n, row_tokens=1) for n in (1, 4))
    for training in (whole, split):
        train_step(training, whole.stream.rows(0))
    # Adam's first step is the sign of the gradient: only its moments tell how close the two are.
    assert_close(snapshot_of_moments(whole), snapshot_of_moments(split), rtol=1e-4, atol=1e-6)


def snapshot_of_moments(training: Training) -> dict[str, torch.Tensor]:
    return {name: x for name, x in snapshot(training).items() if name.endswith("exp_avg")}


def assert_same_steps_in_all_stages(
    other: Training, plain: Training, sizes: type[ExactSizes] | None = None, **near: float
) -> None:
    """Steps of two trainings have the same figures. sizes: of `other`, new ones in each stage."""
    for step in range(12):
        if step in (2, 4, 6, 8):
            for training in (plain, other):
                training.begin_stage()
        if sizes and step in (0, 2, 4, 6, 8):
            other.stream.sizes = sizes()
        rows = plain.stream.rows(step)
        expected = train_step(plain, rows)
        assert train_step(other, rows) == pytest.approx(expected, **near)


def test_steps_through_graphs_are_the_plain_steps_in_all_stages(tmp_path, monkeypatch):
    pretend_card(monkeypatch)
    plain, graphed = (begin(tmp_path / name) for name in ("plain", "graphed"))
    use_graphs(graphed)
    assert_same_steps_in_all_stages(graphed, plain, BucketedSizes, rel=1e-3, abs=1e-6)
    assert plain.stage_number == 4 and graphed.optimizer_step.graphs.captured


def test_compiled_layers_share_graphs_in_all_stages(tmp_path, graphs):
    """dynamo gives up after eight, and the model has four layers."""
    plain, compiled = (begin(tmp_path / str(on), compile=on) for on in (False, True))
    assert_same_steps_in_all_stages(compiled, plain, rel=1e-3, abs=1e-6)
    assert 0 < len(graphs) <= 6


def test_it_learns_through_its_latents(tmp_path):
    training = begin(tmp_path, steps=60, warmup=0, decay=0.0)
    first = training.model.backbone.model.embed_tokens.weight[-3:].detach().clone()
    train(training, silent)
    lines = metrics_of(tmp_path)
    assert lines[-1]["lm_loss"] < 0.5 * lines[8]["lm_loss"]
    now = training.model.backbone.model.embed_tokens.weight[-3:]
    # `latent` is never read: all that moves its row is the softmax, in which it is a word too.
    assert (now - first).abs().amax(1).gt(1e-3).tolist()[:2] == [True, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_on_a_card_steps_and_answers_are_the_plain_ones(accumulate, tmp_path):
    options = {"device": "cuda", "dtype": "float32", "batch_size": 8}
    options |= {"accumulate": accumulate, "row_tokens": 1}  # so in parts, short as rows are
    graphed, plain = (begin(tmp_path / name, **options) for name in ("graphed", "plain"))
    plain.optimizer_step.graphs = None
    assert_same_steps_in_all_stages(graphed, plain, rel=2e-3, abs=1e-5)
    assert graphed.optimizer_step.graphs.captured
    prompts = [row.ids[: row.prompt_length] for row in plain.stream.rows(12)]
    model, config = plain.model.eval(), GenerationConfig(max_new_tokens=12)
    slow = COCONUT.answer(model, prompts, config)
    fast = COCONUT.answer(accelerate(copy.deepcopy(model)), prompts, config)
    assert [result.ids for result in fast] == [result.ids for result in slow]


def test_only_rows_of_one_sample_are_known_and_recipes_give_way():
    task = make_task("parity")
    with pytest.raises(ValueError, match="--layout pack: --method coconut knows rows"):
        resolve(TrainSettings(task="parity", method="coconut", layout="pack"), task)
    real = TrainSettings(task="parity", model="somewhere/real", device="cpu")
    layouts = {
        name: resolve(replace(real, method=name), task).layout for name in ("coconut", "pause")
    }
    assert layouts == {"coconut": "rows", "pause": "pack"}


@pytest.mark.parametrize("method", ["coconut", "pause"])
def test_the_command_line_trains_evaluates_and_answers(method, tmp_path, capsys):
    out = tmp_path / "run"
    quick = [f"--{k.replace('_', '-')}={v}" for k, v in (QUICK | SHORT | CURRICULUM).items()]
    assert main.main(["train", "parity", f"--method={method}", f"--out={out}", *quick]) == 0
    assert "step 8 (3 latents, 3 steps gone): accuracy" in capsys.readouterr().out
    assert main.main(["eval", f"--run={out}", "--samples=4", "--json"]) == 0
    assert main.main(["infer", EXAMPLE.prompt, f"--run={out}", "--json", "--max-new-tokens=9"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    model, tokenizer = load(out)
    made = make_method(method, **CURRICULUM)
    prompt = made.prompt(EXAMPLE.prompt, tokenizer)
    config = GenerationConfig(max_new_tokens=9)
    said = tokenizer.without_eos(made.answer(model, [prompt], config)[0].ids)
    assert tokenizer.decode(said) == told["text"]
    states = ["eval", f"--run={out}", "--samples=4", "--states=zero", "--json"]
    assert main.main(states) == (0 if method == "coconut" else 2)
    # A checkpoint alone knows its number of latents.
    (folder,) = (out / "checkpoints").iterdir()
    found = trained_method(folder, load_checkpoint(folder).about)
    assert (found.name, found.latents) == (method, 3)
    second = f"train parity --method={method} --out={tmp_path / 'second'} --model={out}".split()
    assert main.main([*second, *quick]) == 0  # from weights that have the three
