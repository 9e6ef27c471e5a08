"""Where two runs differ, and how close the decision was: in float32 a near-tie may flip."""

import torch
from torch import Tensor

from minits.cache import KVCache
from minits.generation import generate_ids


def assert_close(what: str, found: Tensor, right: Tensor, atol: float, c: int, at: int = 0) -> None:
    """Both [..., tokens, numbers], token `at` first. Names the first token that is not within `atol`."""

    def told(text: str) -> str:
        wrong = ((found - right).abs() > atol) | (found.isfinite() != right.isfinite())
        wrong = wrong.any(-1).reshape(-1, found.shape[-2]).any(0).nonzero().flatten().tolist()
        first = at + wrong[0] if wrong else at
        return (
            f"{what}: wrong from token {first} on, place {first % c} of chunk {first // c}; {text}"
        )

    torch.testing.assert_close(found, right, rtol=0, atol=atol, msg=told)


def assert_same_keys(found: KVCache, right: KVCache, row: int, n: int, atol: float, c: int) -> None:
    """Keys and values of the first `n` tokens of a row within `atol`, layer by layer.

    Values first: they know no position. Where only keys are wrong, rotation is.
    """
    for layer in range(len(right.k)):
        for name in "vk":
            ours, theirs = (getattr(cache, name)[layer][row, :, :n] for cache in (found, right))
            assert_close(f"row {row}, {name} of layer {layer}", ours, theirs, atol, c)


def differing_margin(model, ids: list[int], a, b, options: dict) -> tuple[str, float]:
    """Where results a (sequential) and b first differ, and the top-two logit gap of that decision in a's run.

    Decisions of a single sequential row come in a known order: the thoughts of the prompt's chunks, then answer tokens;
    reading a token that completes a chunk picks the next token, then thinks.
    """
    margins: list[float] = []
    pick = model.pick

    def recording(logits):
        top = logits.float().topk(2).values[0]
        margins.append(float(top[0] - top[1]))
        return pick(logits)

    model.pick = recording
    try:
        (again,) = generate_ids(model, [ids], prefill="sequential", **options)
    finally:
        del model.pick
    assert again.ids == a.ids and again.thought_ids == a.thought_ids
    c, order = model.config.chunk_size, []

    def thought(k: int) -> list[tuple]:
        decided = len(a.thought_ids[k]) - (
            k in a.cut_thoughts
        )  # the EOS that closes a cut thought was not decided
        return [("thought", k, i) for i in range(decided)]

    for k in range(len(ids) // c):
        order += thought(k)
    for i in range(len(a.ids)):
        order.append(("answer", 0, i))
        if i and (len(ids) + i) % c == 0:
            order += thought((len(ids) + i) // c - 1)
    assert len(order) <= len(
        margins
    )  # a block of decoding steps may read on past the end of the row
    for (kind, k, i), margin in zip(order, margins):
        other = b.ids if kind == "answer" else b.thought_ids[k] if k < len(b.thought_ids) else []
        mine = a.ids if kind == "answer" else a.thought_ids[k]
        if other[i : i + 1] != mine[i : i + 1]:
            return f"{kind} {k} token {i}", margin
    raise AssertionError("the results do not differ")
