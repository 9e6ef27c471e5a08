"""The samples of a training, as a function of (seed, step), drawn ahead, and their batches."""
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from minits.checkpoint.tokenizer import Tokenizer
from minits.fast.flat_batch import FlatBatch
from minits.fast.layouts import BucketedSizes, ExactSizes
from minits.supervision import Example, Row
from minits.thinking import ThinkingConfig
from minits.training import distributed
from minits.training.recipe import Plan
from minits.training.stopping import SIGNALS

POOL = 8  # steps whose samples are drawn together


@dataclass(eq=False)
class SampleStream(Dataset):
    """This process's share of the samples of every step. For the loader, item n is pool n."""

    plan: Plan
    tokenizer: Tokenizer
    config: ThinkingConfig
    positions: int  # of the model: a sample must fit
    stage: int = 0
    sizes: ExactSizes | None = None  # those of the stage before, to go on with; None: new ones

    def __post_init__(self) -> None:
        self.settings, self.task, self.method = self.plan
        self.cuda = self.settings.device.startswith("cuda")
        kind = BucketedSizes if self.cuda else ExactSizes
        self.sizes = self.sizes or kind(least=int(self.method.thinks))
        # On CUDA two worker processes draw samples ahead: one alone just keeps up with 0.5B on gsm.
        # A thread would take Python's lock from the kernel launches: it cost 1 s of every 8 steps
        # of 0.26 s on each of two H200s.
        self.workers = 2 * self.cuda
        self.pools: dict[int, list[list[Row]]] = {}  # the newest alone

    def __getitem__(self, number: int) -> list[list[Row]] | ValueError:
        """Pool `number`, or the error that it met: a worker cannot raise it in its own words."""
        try:
            return self.pool(number)
        except ValueError as error:
            return error

    def rows(self, step: int) -> list[Row]:
        """The samples of optimizer step `step`. Raises ValueError naming one that does not fit."""
        return self.pool(step // POOL)[step % POOL]

    def pool(self, number: int) -> list[list[Row]]:
        """The samples of the POOL steps from number * POOL on."""
        if number not in self.pools:
            self.pools = {number: self.draw_pool(number)}
        return self.pools[number]

    def draw_pool(self, number: int) -> list[list[Row]]:
        """Draws and encodes a pool.

        With one sample a row, all are sorted by length and cut into batches, so that rows need
        little padding; where a stage ends within a pool, lengths and so batches are new, and some
        of its samples come twice or not at all. Otherwise every batch gets its share of short and
        long ones, so that all have about as many tokens, and no process encodes the others'
        samples.
        """
        size = self.settings.batch_size
        rng = random.Random(f"{self.settings.seed}/pool/{number}")
        first = number * POOL * size
        samples = [(i, self.example(i)) for i in range(first, first + POOL * size)]
        if self.settings.layout == "rows":
            rows = sorted((self.row(*each) for each in samples), key=lambda row: len(row.ids))
            batches = [rows[i : i + size] for i in range(0, len(rows), size)]
            rng.shuffle(batches)
            return [self.shard(batch) for batch in batches]
        samples.sort(key=lambda each: each[1].size)
        shares = [self.shard(samples[i::POOL]) for i in range(POOL)]
        for each in (shares, *shares):
            rng.shuffle(each)
        return [[self.row(*each) for each in share] for share in shares]

    @staticmethod
    def shard(samples: list) -> list:
        """This process's share of `samples`, which are sorted by size.

        They are dealt out back and forth (0 1 1 0 0 1 …), so that all processes get about as many
        tokens, and wait little for one another.
        """
        rank, period = distributed.rank(), 2 * distributed.world()
        turns = (rank, period - 1 - rank)
        return [sample for i, sample in enumerate(samples) if i % period in turns]

    def example(self, index: int) -> Example:
        """Sample number `index`. A finite split is gone through in a new order every epoch."""
        split, seed = self.task.splits[0], self.settings.seed
        size = self.task.size(split)
        if not size:
            return self.task.example(split, index, seed)
        epoch, place = divmod(index, size)
        return self.task.example(split, epoch_order(seed, epoch, size)[place], f"{seed}/{epoch}")

    def row(self, index: int, example: Example) -> Row:
        """Sample number `index`, encoded. Raises ValueError if the model has too few positions."""
        name = example.name or f"training row {index}"
        row = self.method.encode(example, self.tokenizer, self.config, name, self.stage)
        if len(row.ids) - 1 > self.positions:
            raise ValueError(
                f"{row.name} needs {len(row.ids) - 1} positions, the model has {self.positions} "
                "(max_position_embeddings). Train on shorter examples."
            )
        # L_LM is over what follows `prompt_length`: with "all", each token but the first. Rows
        # without an answer are those of T's warm-up.
        if self.settings.lm_loss == "all" and row.prompt_length < len(row.ids):
            return replace(row, prompt_length=1)
        return row

    def parts(self, rows: list[Row]) -> list[FlatBatch]:
        """A step's samples in at most `accumulate` micro-batches, on CUDA in pinned memory.

        Every count-th sample goes to one part: sorted samples then make parts of nearly the same
        width, so few graphs are captured. With one sample a row, short rows need less memory, so
        fewer parts do: a step of Coconut on 128 rows of 96 tokens (0.5B, an H200, compiled) takes
        138 ms in one part, 181 in two.
        """
        settings = self.settings
        count = min(settings.accumulate, len(rows))  # of several processes each has a share
        if settings.layout == "rows":
            longest = max(len(row.ids) for row in rows)
            count = min(count, ceil(settings.accumulate * longest / settings.row_tokens))
        parts = [
            self.method.collate(
                rows[i::count],
                self.config,
                layout=settings.layout,
                row_tokens=settings.row_tokens,
                sizes=self.sizes,
            )
            for i in range(count)
        ]
        return [part.map(Tensor.pin_memory) for part in parts] if self.cuda else parts

    def ahead(self, first: int, end: int) -> Iterator[tuple[list[Row], list[FlatBatch]]]:
        """Samples and batches of the steps first … end - 1. Raises as `rows`.

        On CUDA, where shapes are to repeat, the batches of the first pool are made twice: so sizes
        have grown before the first step, whose graph or compiled layers serve later ones, too.
        """
        numbers = range(first // POOL, -(-end // POOL))
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=numbers,
            num_workers=self.workers,
            collate_fn=identity,
            worker_init_fn=ignore_signals,
        )
        error, pools = None, iter(loader)
        try:
            for number, pool in zip(numbers, pools):
                if isinstance(pool, ValueError):
                    error = pool
                    break
                if self.cuda and number == numbers[0]:
                    for rows in pool:
                        self.parts(rows)
                start = number * POOL
                for rows in pool[max(first - start, 0) : end - start]:
                    yield rows, self.parts(rows)
        finally:
            if self.workers:
                # Not left to Python's collector, which is frozen: at exit Python would wait for
                # workers, and they ignore SIGTERM (seen: torch 2.11 on CUDA).
                pools._shutdown_workers()
        # Not within the loop: the traceback would keep the loader, and so its workers, alive.
        if error:
            raise error


@lru_cache(maxsize=2)  # a pool may lie in two epochs
def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """The order in which an epoch goes through a split of `size` examples."""
    order = list(range(size))
    random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order


def identity(pool: list[list[Row]]) -> list[list[Row]]:
    """How the loader collates a pool: not at all. By default it would look for tensors in it."""
    return pool


def ignore_signals(_worker: int) -> None:
    """Leaves a signal to the whole group (Ctrl-C, a closed terminal) to the main process.

    It ends its workers itself.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
