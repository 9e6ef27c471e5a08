"""Parity (paper, appendix A.4): a coin, two people who flip it or don't, and its final state."""
import random
from dataclasses import dataclass
from typing import ClassVar

from minits.supervision import Example, Step
from minits.tasks.state_tracking import StateTracking
from minits.tasks.task import USUAL

SIDES = ("heads", "tails")
PEOPLE = ("Alice", "Bob")  # they take turns
ACTIONS = ("doesn't flip", "flips")


@dataclass(frozen=True)
class Parity(StateTracking):
    """After the first sentence and after each operation comes a step: the coin's state."""

    name: ClassVar = "parity"
    opening: ClassVar = "The final state of the coin is"
    recipes: ClassVar = USUAL | {
        ("no-cot", "real"): {"steps": 600},
        ("cot", "real"): {"steps": 600},
    }

    @property
    def data_key(self) -> str:
        # Without the lengths, so that an example is the same for all of them. Name and opening are
        # in it only because the first examples were drawn so.
        return f"Parity(name={self.name!r}, opening={self.opening!r})"

    def draw(self, rng: random.Random, operations: int) -> Example:
        """`operations` people flip the coin or not, each with probability 1/2."""
        side = rng.randrange(2)
        text = f"The coin starts at state {SIDES[side]}."
        steps = [Step(len(text), SIDES[side])]
        for i in range(operations):
            flip = rng.randrange(2)
            side ^= flip
            text += f" {PEOPLE[i % 2]} {ACTIONS[flip]} the coin."
            steps.append(Step(len(text), SIDES[side]))
        values = ((len(self.opening) + 1, operations),)  # the side, which the last step gives
        return Example(text, tuple(steps), f"{self.opening} {SIDES[side]}.", values)
