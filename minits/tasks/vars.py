"""Variable assignment (paper, appendix A.4): integer variables that are updated from one another."""
from __future__ import annotations

import random
from dataclasses import dataclass
from string import ascii_lowercase

from minits.supervision import Example, Step


@dataclass(frozen=True)
class Vars:
    """Operations `x=x+y` and `x=x+k` modulo `modulus`; after each comes a step with the updated variable's value."""

    variables: int = 3
    modulus: int = 10
    name: str = "vars"
    opening: str = "Final values:"

    def __post_init__(self) -> None:
        if not 1 <= self.variables <= 26 or self.modulus < 2:
            raise ValueError(f"vars with {self.variables} variables modulo {self.modulus}: use 1 … 26 variables and a "
                             "modulus of at least 2.")

    def draw(self, rng: random.Random, operations: int) -> Example:
        """Each operation takes a random variable and adds another one or a constant 1 … modulus - 1, evenly."""
        names = ascii_lowercase[:self.variables]
        values = {name: rng.randrange(self.modulus) for name in names}
        text = "Track the variables values: " + "; ".join(f"{name}={value}" for name, value in values.items())
        steps, latest = [], {}  # latest: of each updated variable, the last step
        for i in range(operations):
            target = rng.choice(names)
            others = [name for name in names if name != target]
            if others and rng.randrange(2):
                term = rng.choice(others)
                values[target] = (values[target] + values[term]) % self.modulus
            else:
                term = rng.randrange(1, self.modulus)
                values[target] = (values[target] + term) % self.modulus
            text += f" {target}={target}+{term}"
            steps.append(Step(len(text), f"{target}={values[target]}"))
            latest[target] = i
        answer, places = self.opening, []
        for name, value in values.items():
            answer += f" {name}="
            if name in latest:
                places.append((len(answer), latest[name]))
            answer += str(value)
        return Example(text, tuple(steps), answer, tuple(places))
