"""Ablations at test: what an answer is worth without the states, or with those of another row.

If it is worth as much, the thoughts do nothing.
"""
from collections.abc import Sequence

import torch
from torch import Tensor

from minits.prefill import Intervention


class Zero(Intervention):
    """Every state is as after a trivial thought; every latent of Coconut is zero."""

    def states(self, places: Sequence[tuple[int, int]], states: Tensor) -> Tensor:
        return torch.zeros_like(states)


class Shuffled(Intervention):
    """Every row reads the newest state of the next row of its batch, counted round.

    Zero where there is none yet, or no other row. Prompts must be read in turn: the drafts of
    speculation are not what a row thought.
    """

    def __init__(self) -> None:
        self.newest: dict[int, tuple[int, Tensor]] = {}  # of each row: its chunk, its own state

    def states(self, places: Sequence[tuple[int, int]], states: Tensor) -> Tensor:
        if any(row in self.newest and chunk <= self.newest[row][0] for row, chunk in places):
            self.newest.clear()  # another batch
        for (row, chunk), state in zip(places, states):
            self.newest[row] = chunk, state
        found = []
        for row, _ in places:
            others = sorted(self.newest.keys() - {row}, key=lambda other: (other < row, other))
            newest = [self.newest[other][1] for other in others[:1]]
            found += newest or [torch.zeros_like(states[0])]
        return torch.stack(found)


STATES = {"normal": Intervention, "zero": Zero, "shuffled": Shuffled}
