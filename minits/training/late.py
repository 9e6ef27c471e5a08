"""Late thoughts: values of answers, due before a state can hold the step that gives them.

A row of which this is true says nothing about states: the model has to compute the step itself.
"""
from collections.abc import Iterable
from statistics import fmean

from minits.checkpoint.tokenizer import Tokenizer
from minits.supervision import Example, Row


def known_from(chunk: int, place: int, length: int, c: int) -> int:
    """The first position that can know token number `place` of the thought after chunk `chunk`.

    length: of the thought, EOS included. C is causal and the state is its last c outputs, so no
    vector of it holds tokens that come after its own.
    """
    return (chunk + 1) * c + max(place - max(length - c, 0), 0)


def is_late(example: Example, row: Row, tokenizer: Tokenizer, c: int) -> bool | None:
    """Whether a value of the answer is due before a state can hold it.

    None where nothing is known of it: the example has no `values`, or its row no thoughts, or a
    method has left steps out, so that their numbers are others.
    Raises ValueError, naming the row, for a value without its step.
    """
    if not (example.values and row.ends) or len(row.ends) != len(example.steps):
        return None
    _, offsets = tokenizer.encode_with_offsets(" " + example.answer)
    for character, step in example.values:
        if step >= len(row.ends):
            raise ValueError(
                f"{row.name}: a value of the answer names step {step}; there are "
                f"{len(row.ends)}, from 0 on. Mend the `values` that the task gives it."
            )
        chunk, place = row.ends[step]
        if chunk >= len(row.thoughts):
            return True
        # A space stands before the answer, and the token before a value predicts it.
        token = next(t for t, (_, end) in enumerate(offsets) if end > character + 1)
        if known_from(chunk, place, len(row.thoughts[chunk]), c) > row.prompt_length + token - 1:
            return True
    return False


def late_share(late: Iterable[bool | None]) -> float | None:
    """The share that is late of the rows for which that is known; None if there are none."""
    known = [value for value in late if value is not None]
    return fmean(known) if known else None
