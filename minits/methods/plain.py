"""The baselines, plain Qwen2.5: No-CoT answers at once, CoT writes the steps before the answer."""
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from minits.checkpoint.tokenizer import Tokenizer
from minits.generation import GenerationConfig, GenerationResult, Listener
from minits.methods.method import Method
from minits.supervision import Example, Row, encode_rest
from minits.tasks.task import Task
from minits.thinking import Engine, ThinkingConfig


@dataclass(frozen=True)
class NoCoT(Method):
    """Prompt, answer."""

    name: ClassVar = "no-cot"
    title: ClassVar = "No-CoT"
    thinks: ClassVar = False

    def chain(self, example: Example, tokenizer: Tokenizer) -> list[int]:
        """The ids between prompt and answer: those of a chain of thought, where there is one."""
        return []

    def encode(
        self,
        example: Example,
        tokenizer: Tokenizer,
        config: ThinkingConfig,
        name: str = "row",
        stage: int = -1,
    ) -> Row:
        prompt = self.prompt(example.prompt, tokenizer)
        rest = self.chain(example, tokenizer) + encode_rest(tokenizer, example.answer)
        return Row([*prompt, *rest, tokenizer.eos_id], len(prompt), thoughts=[], name=name)

    def answer(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        listen: Listener | None = None,
    ) -> list[GenerationResult]:
        # Without thoughts nothing has to be waited for: every prompt is read in one pass.
        one_pass = replace(config, think=False, prefill="speculative")
        return super().answer(engine, prompts, one_pass, listen)


@dataclass(frozen=True)
class CoT(NoCoT):
    """Prompt, steps, answer. Loss is on steps and answer alike."""

    name: ClassVar = "cot"
    title: ClassVar = "CoT"

    def check(self, task: Task) -> None:
        if not task.opening.strip():
            raise ValueError(
                f"--method {self.name}: {task.name} has no words that its answers begin with, so "
                "they cannot be told from the chain of thought before them. Give --opening; a "
                "task of one's own has it as `opening`."
            )

    def chain(self, example: Example, tokenizer: Tokenizer) -> list[int]:
        return [i for step in example.steps for i in encode_rest(tokenizer, step.text)]
