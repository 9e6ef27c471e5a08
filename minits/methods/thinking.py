"""Thinking States, the paper's method: thoughts while reading, from T and C."""
from dataclasses import dataclass
from typing import ClassVar

from minits.checkpoint.tokenizer import Tokenizer
from minits.methods.method import Method
from minits.supervision import Example, Row, encode_example
from minits.thinking import ThinkingConfig


@dataclass(frozen=True)
class Thinking(Method):
    """T is taught the steps of each chunk; the answer follows the prompt at once."""

    name: ClassVar = "thinking"
    title: ClassVar = "Thinking States"
    thinks: ClassVar = True

    def encode(
        self,
        example: Example,
        tokenizer: Tokenizer,
        config: ThinkingConfig,
        name: str = "row",
        stage: int = -1,
    ) -> Row:
        return encode_example(example, tokenizer, config, name)
