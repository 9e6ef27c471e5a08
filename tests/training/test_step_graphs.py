"""Steps through graphs (fast/training_graph.py), where there is no card to record any."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from training_helpers import begin, train_step

from minits.fast import training_graph
from minits.fast.layouts import BucketedSizes
from minits.fast.training_graph import StepGraphs
from minits.training.loop import Training

LAYOUTS = ["rows", "pack", "long_rows"]


class FakeGraph:
    """What a CUDA graph does, without CUDA: runs again on the tensors it was recorded on."""

    def __init__(
        self, run: Callable[[], object], _pool: object, restore: Callable[[], None] = lambda: None
    ) -> None:
        for _ in range(2):
            run()
            restore()
        self.replay = run


def pretend_card(monkeypatch, capture=FakeGraph) -> None:
    """Graphs without CUDA: `capture` makes them, and each pool is something new."""
    monkeypatch.setattr(training_graph, "capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


def use_graphs(training: Training) -> None:
    """Has `training` take its steps through graphs, as it would on a card."""
    update = training.optimizer_step
    update.graphs = StepGraphs(
        update.step, update.without_effect, several_widths=training.settings.layout == "rows"
    )


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_through_graphs_are_the_plain_steps_whatever_shapes_come(
    layout, accumulate, tmp_path, monkeypatch
):
    pretend_card(monkeypatch)
    options = {"layout": layout, "steps": 16, "accumulate": accumulate, "batch_size": 5}
    options["row_tokens"] = 36 if layout == "rows" else 64  # shorter rows make fewer parts
    plain, graphed = (begin(tmp_path / name, **options) for name in ("plain", "graphed"))
    use_graphs(graphed)
    graphed.stream.sizes = BucketedSizes()
    for step in range(16):
        rows = plain.stream.rows(step)
        expected = train_step(plain, rows)
        assert train_step(graphed, rows) == pytest.approx(expected, rel=1e-3, abs=1e-6)
    captured = graphed.optimizer_step.graphs.captured
    assert len(captured) > 1 if layout == "rows" else len(captured) == 1
    parts = {len(widths) for widths in captured}
    assert parts == ({2, 3} if layout == "rows" and accumulate == 3 else {accumulate})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_takes_the_place_of_those_that_never_come_again(layout, tmp_path, monkeypatch):
    """All living graphs share a pool, and none gets a pool that all of its own have left."""
    training = begin(tmp_path, layout=layout, row_tokens=64, batch_size=8)
    use_graphs(training)
    training.stream.sizes = BucketedSizes()
    beside, pools = [], []  # of each capture: the widths of the other graphs, and its pool

    def watched(run: Callable[[], object], pool: object) -> FakeGraph:
        beside.append(list(training.optimizer_step.graphs.captured))
        pools.append(pool)
        return FakeGraph(run, pool)

    pretend_card(monkeypatch, watched)
    *_, longest = rows = sorted(training.stream.rows(0), key=lambda row: len(row.ids))
    for samples in (rows[:1], [longest] * 2, rows[:1] * 20):
        if samples[0] is longest:
            training.stream.sizes.room(256)
        for _ in range(2):
            train_step(training, samples)
    if layout == "rows":
        assert beside == [[], [(32,)], [(96,)]]
        assert pools[0] is pools[1] is pools[2]
    else:
        assert beside == [[], [], []]
        assert len(set(pools)) == 3


def test_training_goes_on_after_a_graph_that_could_not_be_captured(tmp_path, monkeypatch):
    def failing(run: Callable[[], object], _pool: object) -> None:
        run()
        raise torch.OutOfMemoryError("no room")

    pretend_card(monkeypatch, failing)
    training, plain = (begin(tmp_path / name) for name in ("training", "plain"))
    use_graphs(training)
    with pytest.raises(torch.OutOfMemoryError):
        train_step(training, training.stream.rows(0))
    monkeypatch.setattr(training_graph, "capture", FakeGraph)
    for step in range(2):
        expected = train_step(plain, plain.stream.rows(step))
        assert train_step(training, training.stream.rows(step)) == pytest.approx(expected)
    for ours, theirs in zip(training.model.parameters(), plain.model.parameters()):
        torch.testing.assert_close(ours, theirs)
