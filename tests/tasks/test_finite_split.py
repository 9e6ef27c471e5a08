"""A finite training split: every epoch goes through all of it, in an order of its own."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minits.checkpoint.tiny import tiny_tokenizer
from minits.methods import make_method
from minits.supervision import Example
from minits.tasks import TASKS, make_task
from minits.tasks.task import Task, check_overlap
from minits.thinking import ThinkingConfig
from minits.training.recipe import Plan, TrainSettings
from minits.training.scoring import draw_rows
from minits.training.stream import SampleStream

ROWS = ("heads", "tails", "Alice", "Bob", "coin")
CONFIG = ThinkingConfig(4, 1, 1, (0,), 1)


@dataclass(frozen=True)
class Few(Task):
    """Five rows to train on, the first two of them to test on."""

    name: ClassVar = "few"
    splits: ClassVar = ("train", "test")

    def size(self, split: str) -> int:
        return len(ROWS) if split == "train" else 2

    def example(self, split: str, index: int, seed: int) -> Example:
        return Example(f"The {ROWS[index]}", (), ROWS[index])


def stream(seed: int, task: Task = Few(), batch_size: int = 3, positions: int = 64) -> SampleStream:
    """The samples of a training on `task`."""
    settings = TrainSettings(
        task=task.name, seed=seed, batch_size=batch_size, layout="rows", device="cpu"
    )
    plan = Plan(settings, task, make_method("no-cot"))
    return SampleStream(plan, tiny_tokenizer(), CONFIG, positions)


def epochs(samples: SampleStream, count: int) -> list[list[str]]:
    """The answers of the first `count` epochs, in the order in which they are trained on."""
    found = [samples.example(index).answer for index in range(count * len(ROWS))]
    return [found[start : start + len(ROWS)] for start in range(0, len(found), len(ROWS))]


seeds = st.integers(-(2**63), 2**63 - 1)


@given(seed=seeds, count=st.integers(1, 6))
def test_every_epoch_has_each_row_once(seed, count):
    for epoch in epochs(stream(seed), count):
        assert sorted(epoch) == sorted(ROWS)


def test_every_epoch_has_an_order_of_its_own():
    # There are 120 orders, so of as many epochs as here some fall together.
    orders = {tuple(epoch) for epoch in epochs(stream(0), 60)}
    assert len(orders) > 30
    assert {order[0] for order in orders} == set(ROWS)


def test_the_order_hangs_on_the_seed():
    orders = {tuple(map(tuple, epochs(stream(seed), 2))) for seed in range(20)}
    assert len(orders) == 20


@given(seed=seeds, wanted=st.permutations(range(4 * len(ROWS))))
def test_a_sample_is_a_function_of_seed_and_number(seed, wanted):
    """In whatever order they are asked for, over more epochs than are kept in mind."""
    expected = [answer for epoch in epochs(stream(seed), 4) for answer in epoch]
    samples = stream(seed)
    assert all(samples.example(index).answer == expected[index] for index in wanted)


def test_the_steps_of_a_training_use_every_row_equally_often():
    """Batches of 5 over a pool of 8 steps: 8 epochs, shuffled within the pool."""
    samples = stream(1, batch_size=5)
    tokenizer = tiny_tokenizer()
    rows = [row for step in range(8) for row in samples.rows(step)]
    prompts = [tokenizer.decode(row.ids[: row.prompt_length]) for row in rows]
    assert sorted(prompts) == sorted(f"The {word}" for word in ROWS * 8)


def test_an_endless_split_is_numbered_as_it_is():
    task = make_task("parity")
    samples = stream(5, task)
    for index in (0, 1, 7, 10_000):
        assert samples.example(index) == task.example("train", index, 5)


def test_a_sample_too_long_is_told_with_the_positions_that_it_needs():
    example = Example("The" + " coin" * 32, (), "tails", name="own.jsonl, line 7")
    stream(0, positions=34).row(0, replace(example, answer="heads"))
    with pytest.raises(ValueError, match="^own.jsonl, line 7 needs 34 positions, the model has 33"):
        stream(0, positions=33).row(0, example)


def test_overlap_of_finite_splits_is_an_error_and_endless_ones_are_let_be():
    with pytest.raises(ValueError, match="^test row 0 asks what train row 0 asks: 'The heads'"):
        check_overlap(Few())
    check_overlap(make_task("parity"))


def test_of_a_doubled_prompt_the_first_place_is_named():
    class Doubled(Few):
        def overlap_key(self, split, index):
            return "Heads?"

    with pytest.raises(ValueError, match="^test row 0 asks what train row 0 asks"):
        check_overlap(Doubled())


@pytest.mark.parametrize("asked, given", [(1, 1), (2, 2), (500, 2)])
def test_an_evaluation_on_a_finite_split_has_each_row_at_most_once(asked, given):
    arguments = [Few(), make_method("no-cot"), "test", tiny_tokenizer(), CONFIG]
    rows = draw_rows(*arguments, seed=0, n=asked)
    assert [example.answer for example, _ in rows] == list(ROWS[:given])


def test_a_finite_task_has_no_operations_to_choose(monkeypatch):
    monkeypatch.setitem(TASKS, "few", Few)
    task = make_task("few")
    assert task.sized(None) == task and task.evaluated({}) == (task, "test")
    assert task.demo() == task.example("test", 0, 0)
    with pytest.raises(ValueError, match="--ops 3: few has no such option"):
        task.sized(3)
