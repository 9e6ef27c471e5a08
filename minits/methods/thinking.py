"""Thinking States, the paper's method: thoughts while reading, from T and C."""
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from minits.checkpoint.tokenizer import Tokenizer
from minits.fast.flat_batch import FlatBatch
from minits.methods.method import Method, Stage
from minits.settings import setting
from minits.supervision import Example, Row, encode_example, steps_to_tokens
from minits.thinking import ThinkingConfig


@dataclass(frozen=True)
class Thinking(Method):
    """T is taught the steps of each chunk; the answer follows the prompt at once."""

    one_per_chunk: bool = setting(
        False, "thinking: a step whose chunk has one already goes to the next chunk"
    )
    thought_warmup: int = setting(
        0,
        "thinking: steps at the start in which T learns, from plain text without labels, to say "
        "the next chunk's tokens",
        least=0,
    )

    name: ClassVar = "thinking"
    title: ClassVar = "Thinking States"
    thinks: ClassVar = True
    has_states: ClassVar = True

    def stages(self, steps: int, batch_size: int) -> tuple[Stage, ...]:
        if not self.thought_warmup:
            return super().stages(steps, batch_size)
        left = steps - self.thought_warmup
        if left < 1:
            raise ValueError(
                f"--thought-warmup {self.thought_warmup}: of --steps {steps} none is left in which "
                "the answer is learned. Lower it, or raise --steps."
            )
        return Stage("T's warm-up", self.thought_warmup), *super().stages(left, batch_size)

    def encode(
        self,
        example: Example,
        tokenizer: Tokenizer,
        config: ThinkingConfig,
        name: str = "row",
        stage: int = -1,
    ) -> Row:
        if self.one_per_chunk:
            _, offsets = tokenizer.encode_with_offsets(example.prompt, start=True)
            example = one_step_a_chunk(example, offsets, config.chunk_size)
        row = encode_example(example, tokenizer, config, name)
        return saying_the_next_chunk(row, config) if self.thought_warmup and stage == 0 else row

    def collate(self, rows: Sequence[Row], config: ThinkingConfig, **how: Any) -> FlatBatch:
        batch = super().collate(rows, config, **how)
        # Rows of T's warm-up have no answers. Thoughts are the text to come, so no state is read.
        if all(row.prompt_length == len(row.ids) for row in rows):
            return replace(batch, state_at=torch.full_like(batch.state_at, -1))
        return batch


def saying_the_next_chunk(row: Row, config: ThinkingConfig) -> Row:
    """Prompt and answer as one text without labels; each thought is the next chunk's tokens.

    For T's warm-up, an addition to the paper: T learns to say several tokens from one H.
    """
    text, c = row.ids[:-1], config.chunk_size
    # A chunk that has a next one is complete once all but the text's last token are read.
    following = [text[start : start + c] for start in range(c, len(text), c)]
    thoughts = [[*ids[: config.max_thought_tokens], config.thought_end] for ids in following]
    return Row(text, prompt_length=len(text), thoughts=thoughts, name=row.name)


def one_step_a_chunk(example: Example, offsets: Sequence[tuple[int, int]], c: int) -> Example:
    """`example` with steps moved on so that no two share a chunk, as far as the prompt goes.

    An addition to the paper, which lets steps share a state. offsets: (start, end) characters of
    the prompt's tokens. Steps that find no chunk stay together at the end of the prompt.
    """
    free, steps = 0, []  # the first chunk that no step has
    for step, (token, _) in zip(example.steps, steps_to_tokens(offsets, example.steps)):
        if token // c < free:
            token = free * c
            # Of tokens that share a character the last one, as `steps_to_tokens` has it.
            while token + 1 < len(offsets) and offsets[token + 1][0] == offsets[token][0]:
                token += 1
            inside = token < len(offsets)
            step = replace(step, position=offsets[token][0] + 1 if inside else len(example.prompt))
        steps.append(step)
        free = token // c + 1
    return replace(example, steps=tuple(steps))
