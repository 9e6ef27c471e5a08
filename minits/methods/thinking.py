"""Thinking States, the paper's method: thoughts while reading, from T and C."""
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from minits.checkpoint.tokenizer import Tokenizer
from minits.methods.method import Method
from minits.settings import setting
from minits.supervision import Example, Row, encode_example, steps_to_tokens
from minits.thinking import ThinkingConfig


@dataclass(frozen=True)
class Thinking(Method):
    """T is taught the steps of each chunk; the answer follows the prompt at once."""

    one_per_chunk: bool = setting(
        False, "thinking: a step whose chunk has one already goes to the next chunk"
    )

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
        if self.one_per_chunk:
            _, offsets = tokenizer.encode_with_offsets(example.prompt)
            example = one_step_a_chunk(example, offsets, config.chunk_size)
        return encode_example(example, tokenizer, config, name)


def one_step_a_chunk(example: Example, offsets: Sequence[tuple[int, int]], c: int) -> Example:
    """`example` with steps moved on so that no two share a chunk, as far as the prompt goes.

    An addition to the paper, which lets steps share a state. offsets: (start, end) characters of
    the prompt's tokens. Steps that find no chunk stay together at the end of the prompt.
    """
    free, steps = 0, []  # the first chunk that no step has
    for step, (token, _) in zip(example.steps, steps_to_tokens(offsets, example.steps)):
        if token // c < free:
            token = free * c
            # The last token of its character, for that is where a step after it belongs.
            while token + 1 < len(offsets) and offsets[token + 1][0] == offsets[token][0]:
                token += 1
            inside = token < len(offsets)
            step = replace(step, position=offsets[token][0] + 1 if inside else len(example.prompt))
        steps.append(step)
        free = token // c + 1
    return replace(example, steps=tuple(steps))
