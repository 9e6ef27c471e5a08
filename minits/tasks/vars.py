"""Variable assignment (paper, appendix A.4): integer variables, updated from one another."""
import random
from dataclasses import dataclass
from string import ascii_lowercase
from typing import ClassVar

from minits.settings import setting
from minits.supervision import Example, Step
from minits.tasks.state_tracking import StateTracking


@dataclass(frozen=True)
class Vars(StateTracking):
    """Operations `x=x+y` and `x=x+k`; after each comes a step with the updated variable's value.

    y is another variable than x; with `self_addition` `x=x+x` is drawn, too.
    """

    variables: int = setting(3, "number of variables", least=1, most=26)
    modulus: int = setting(10, "modulus of the values", least=2)
    self_addition: bool = setting(
        False, "draw x=x+x, too; without it no variable is ever added to itself"
    )

    name: ClassVar = "vars"
    opening: ClassVar = "Final values:"
    recipes: ClassVar = {
        ("*", "tiny"): {
            "chunk_size": 4, "layout": "rows", "steps": 600, "batch_size": 32, "lr": 3e-3,
            "warmup": 20, "decay": 1.0,
        },
        ("*", "real"): {
            "chunk_size": 3, "layout": "pack", "steps": 600, "batch_size": 128, "lr": 2e-5,
            "warmup": 50, "decay": 0.25,
        },
        ("no-cot", "real"): {"batch_size": 64, "lr": 5e-5},
        ("cot", "real"): {"steps": 400, "batch_size": 64, "lr": 5e-5},
    }

    @property
    def data_key(self) -> str:
        more = ", self_addition=True" if self.self_addition else ""
        return (
            f"Vars(variables={self.variables}, modulus={self.modulus}, name={self.name!r}, "
            f"opening={self.opening!r}{more})"
        )

    def draw(self, rng: random.Random, operations: int) -> Example:
        """Each operation adds another variable or a constant 1 … modulus - 1 to a random one.

        Both with probability 1/2.
        """
        names = ascii_lowercase[: self.variables]
        values = {name: rng.randrange(self.modulus) for name in names}
        start = "; ".join(f"{name}={value}" for name, value in values.items())
        text = "Track the variables values: " + start
        steps: list[Step] = []
        latest: dict[str, int] = {}  # of each updated variable: its last step
        for i in range(operations):
            target = rng.choice(names)
            others = [name for name in names if self.self_addition or name != target]
            if others and rng.randrange(2):
                term = rng.choice(others)
                added = values[term]
            else:
                term = added = rng.randrange(1, self.modulus)
            values[target] = (values[target] + added) % self.modulus
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
