"""The samples of a training run, as a function of (seed, step), drawn ahead of time, and the batches made of them."""
from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from minits.training import distributed
from minits.training.recipe import TrainConfig
from minits.supervision import Exact, Example, Roomy, Row, collate, encode_example
from minits.tasks import Task, draw_example
from minits.thinking import Batch, ThinkingStates
from minits.checkpoint.tokenizer import Tokenizer

POOL = 8  # steps whose samples are drawn together


class Stream(Dataset):
    """This process's share of the samples of every step; as a data set, of every pool."""

    def __init__(self, config: TrainConfig, task: Task, tokenizer: Tokenizer, model: ThinkingStates) -> None:
        self.config, self.task, self.tokenizer, self.thinking = config, task, tokenizer, model.config
        self.positions = model.backbone.config.max_position_embeddings
        self.cuda, least = config.device.startswith("cuda"), int(config.method == "thinking")
        self.sizes = Roomy(least) if self.cuda else Exact(least)  # graphs and compiled layers need shapes that repeat
        # On CUDA another process draws samples ahead. A thread would take Python's lock from the launches: of every 8 steps
        # of 0.26 s on each of two H200s 1 s was lost.
        self.workers = int(self.cuda)
        self.pools: dict[int, list[list[Row]]] = {}  # the current one

    def __getitem__(self, number: int) -> list[list[Row]] | ValueError:
        """Pool `number`, or the error that it met, which a worker cannot raise in its own words."""
        try:
            return self.pool(number)
        except ValueError as error:
            return error

    def rows(self, step: int) -> list[Row]:
        """The samples of optimizer step `step`. Raises ValueError naming one that does not fit."""
        return self.pool(step // POOL)[step % POOL]

    def pool(self, number: int) -> list[list[Row]]:
        """The samples of the POOL steps from number * POOL on; the newest pool is kept."""
        if number not in self.pools:
            self.pools = {number: self.draw_pool(number)}
        return self.pools[number]

    def draw_pool(self, pool: int) -> list[list[Row]]:
        """The samples of POOL steps.

        For one sample a row, all are sorted by length and cut into batches, so that rows need little padding. Otherwise
        every batch gets its share of short and long ones, so that all have about as many tokens (their shapes repeat
        with less filling up), and no process encodes the others' samples.
        """
        size, rng = self.config.batch_size, random.Random(f"{self.config.seed}/pool/{pool}")
        samples = [(i, self.example(i)) for i in range(pool * POOL * size, (pool + 1) * POOL * size)]
        if self.config.layout == "rows":
            rows = sorted((self.row(*sample) for sample in samples), key=lambda row: len(row.ids))
            cut = [rows[i:i + size] for i in range(0, len(rows), size)]
            rng.shuffle(cut)
            return [self.own(batch) for batch in cut]
        samples.sort(key=lambda sample: sample[1].size)
        dealt = [self.own(samples[i::POOL]) for i in range(POOL)]
        for each in (dealt, *dealt):
            rng.shuffle(each)
        return [[self.row(*sample) for sample in share] for share in dealt]

    @staticmethod
    def own(samples: list) -> list:
        """This process's part of `samples`, which come by size and are dealt back and forth.

        So all processes get about as many tokens, and wait little for one another.
        """
        rank, world = distributed.rank(), distributed.world()
        return [sample for i, sample in enumerate(samples)
                if rank == (world - 1 - i % world if i // world % 2 else i % world)]

    def example(self, index: int) -> Example:
        """Sample number `index` as the task draws it."""
        return draw_example(self.task, seed=self.config.seed, split="train", index=index,
                            operations=(1, self.config.max_ops))

    def row(self, index: int, example: Example) -> Row:
        """Sample number `index`, encoded. Raises ValueError if it has more tokens than the model has positions."""
        row = encode_example(example, self.tokenizer, self.thinking, method=self.config.method,
                             max_thought_tokens=self.config.max_thought_tokens, name=f"training row {index}")
        if len(row.ids) - 1 > self.positions:
            raise ValueError(f"{row.name} has {len(row.ids)} tokens, the model has {self.positions} positions "
                             "(max_position_embeddings). Lower --max-ops.")
        return row

    def parts(self, rows: list[Row]) -> list[Batch]:
        """A step's samples in `accumulate` batches, in memory from which a card can take them."""
        config, size = self.config, -(-len(rows) // self.config.accumulate)
        parts = [collate(rows[i:i + size], self.thinking, layout=config.layout, row_tokens=config.row_tokens,
                         sizes=self.sizes) for i in range(0, len(rows), size)]
        return [part.map(torch.Tensor.pin_memory) for part in parts] if self.cuda else parts

    def ahead(self, first: int) -> Iterator[tuple[list[Row], list[Batch]]]:
        """Samples and batches of the steps from `first` to the last.

        On CUDA, where shapes are to repeat, the first ones are made once before: the sizes then have grown before the first
        step, whose graph or compiled layers serve the later ones too.
        """
        numbers, last = range(first // POOL, -(-self.config.steps // POOL)), self.config.steps
        loader = DataLoader(self, batch_size=None, sampler=numbers, num_workers=self.workers, collate_fn=as_it_is,
                            worker_init_fn=ignore_signals)
        for number, pool in zip(numbers, loader):
            if isinstance(pool, ValueError):
                raise pool
            if self.cuda and number == numbers[0]:
                for rows in pool:
                    self.parts(rows)
            for rows in pool[max(first - number * POOL, 0):last - number * POOL]:
                yield rows, self.parts(rows)


def as_it_is(pool: list[list[Row]]) -> list[list[Row]]:
    """What the loader gets: it would look for tensors in it otherwise."""
    return pool


def ignore_signals(_worker: int) -> None:
    """A signal to the whole group (Ctrl-C, a closed terminal) is for the training, which ends its worker itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
