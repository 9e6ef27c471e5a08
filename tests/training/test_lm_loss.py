"""--lm-loss all: L_LM is a mean over the prompt's tokens, too, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
import pytest
import torch
from torch.nn.functional import cross_entropy
from training_helpers import SHORT, begin, settings

from minits.methods import make_method
from minits.tasks import make_task
from minits.teacher_forcing import collate, losses, teacher_forced
from minits.training.recipe import Plan
from minits.training.session import set_up


def test_all_tokens_but_the_first_are_predicted(tmp_path):
    usual, every = (begin(tmp_path / name, lm_loss=name) for name in ("answer", "all"))
    for row, other in zip(usual.stream.rows(0), every.stream.rows(0)):
        assert other == replace(row, prompt_length=1) and row.prompt_length > 1
    rows, model = every.stream.rows(0), every.model
    batch = collate(rows, model)
    with torch.no_grad():
        found = losses(model, batch)
        logits = model.backbone.lm_head(teacher_forced(model, batch)[1])
    said = sum(
        cross_entropy(each[: len(row.ids) - 1], torch.tensor(row.ids[1:]), reduction="sum")
        for each, row in zip(logits, rows)
    )
    assert float(found.lm) == pytest.approx(float(said), rel=1e-5)
    assert found.lm_tokens == sum(len(row.ids) - 1 for row in rows)
    thoughts = [losses(model, collate(x.stream.rows(0), model)).thought for x in (usual, every)]
    assert torch.equal(*thoughts)


def test_rows_of_the_warm_up_have_no_answer_all_the_same(tmp_path):
    method = make_method("thinking", thought_warmup=5)
    chosen = settings(lm_loss="all")
    training = set_up(Plan(chosen, make_task("parity", **SHORT), method), tmp_path)
    assert all(row.prompt_length == len(row.ids) for row in training.stream.rows(0))


@pytest.mark.parametrize("method", ["coconut", "pause"])
def test_latents_are_nothing_to_predict(method):
    with pytest.raises(ValueError, match=f"--lm-loss all: the prompts of --method {method}"):
        settings(method=method, lm_loss="all")


def test_the_choice_is_the_runs(tmp_path):
    begin(tmp_path / "run", lm_loss="all").save()
    assert begin(tmp_path / "run", lm_loss="all").done == 0
    with pytest.raises(ValueError, match="lm_loss 'all' in training_state.pt"):
        begin(tmp_path / "run")
