"""The batch and the pass that train at full speed; teacher_forcing.py is the definition.

The dense batch has a place for every thought of every chunk, most of them empty, and logits at
every position. Here rows may hold several samples, index tensors name the few places that matter,
and T runs apart over the chunks whose thought is trivial, which most are.
Three samples of 6, 5 and 3 tokens in chunks of 4, packed into rows of 12 (`|` between chunks),
the longest first, each where there is room:

    ids        a b c d | e f . . | u v w .        flat position = row * L + place in the row
    positions  0 1 2 3 | 4 5 6 7 | 0 1 2 3        flat chunk    = row * K + chunk in the row
    segments   0 0 0 0 | 0 0 0 0 | 2 2 2 2
               p q r s | t . . . | . . . .        the second sample opens the second row
    chunks     0         1         2
               3         4         5
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minits.fast.cross_entropy import cross_entropy_sum
from minits.fast.layouts import LAYOUTS, ExactSizes, lay_out, round_up
from minits.qwen import Attention, Frame, Qwen2ForCausalLM
from minits.supervision import Row
from minits.teacher_forcing import Losses
from minits.tensors import IGNORED, pad
from minits.thinking import ThinkingConfig, ThinkingStates


@dataclass(frozen=True)
class Tensors:
    """A batch whose fields are tensors."""

    @property
    def tensors(self) -> list[Tensor]:
        """All fields, in order."""
        return [getattr(self, each.name) for each in fields(self)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The batch with `function` of every tensor."""
        return type(self)(*map(function, self.tensors))


@dataclass(frozen=True)
class FlatBatch(Tensors):
    """Samples of one pass. Each begins on a chunk border; rows are padded on the right.

    Index tensors may be filled up with -1, so that shapes repeat: such places change nothing.
    """

    ids: Tensor  # [B, L] each sample without its last token, which is only predicted
    positions: Tensor  # [B or 1, L]
    segments: Tensor  # [B, L] the sample of each token where rows are packed, else [0]
    lm_at: Tensor  # flat positions whose next token is supervised (answer, closing EOS)
    lm_labels: Tensor  # that token
    trivial_at: Tensor  # flat chunks whose thought is EOS alone
    thought_at: Tensor  # [R] flat chunks with any other thought
    thoughts: Tensor  # [R, n] their ids, EOS included, padded with pad_id to n >= c
    lengths: Tensor  # [R] tokens of each, EOS included
    state_at: Tensor  # [R] flat chunk that reads the state after each, -1 where none does
    tokens_at: Tensor  # flat places in [R, n] that hold a token, not padding

    @property
    def counts(self) -> Tensor:
        """[2]: the tokens that L_LM and L_T are means over, every closing EOS included."""
        used = [(at >= 0).sum() for at in (self.lm_at, self.trivial_at, self.tokens_at)]
        return torch.stack([used[0], used[1] + used[2]])


def collate(
    rows: Sequence[Row],
    config: ThinkingConfig,
    *,
    layout: str = "rows",  # see layouts.py
    row_tokens: int = 0,
    sizes: ExactSizes = ExactSizes(),
) -> FlatBatch:
    """Samples -> one batch. Raises ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known; use one of {', '.join(LAYOUTS)}.")
    c, packed = config.chunk_size, layout == "pack"
    if packed:  # longest first leaves the least room; among long rows the order is the drawn one
        rows = sorted(rows, key=lambda row: -len(row.ids))
    spans = [round_up(len(row.ids) - 1, c) for row in rows]
    L, B, places = lay_out(spans, layout, row_tokens, c, sizes)
    ids, positions = torch.full((B, L), config.pad_id), torch.arange(L)[None]
    segments = torch.empty(0, dtype=torch.long)
    if packed:
        positions, segments = positions.repeat(B, 1), torch.full((B, L), -1)
    lm_at, lm_labels, trivial_at, thought_at, thoughts, state_at = [], [], [], [], [], []
    for number, (row, span, (b, start)) in enumerate(zip(rows, spans, places)):
        read, first = len(row.ids) - 1, b * L + start
        ids[b, start : start + read] = torch.tensor(row.ids[:-1])
        if packed:
            positions[b, start : start + span] = torch.arange(span)
            segments[b, start : start + span] = number
        lm_at += range(first + row.prompt_length - 1, first + read)
        lm_labels += row.ids[row.prompt_length :]
        for k, thought in enumerate(row.thoughts):
            chunk = first // c + k
            if len(thought) == 1:
                trivial_at.append(chunk)
                continue
            thought_at.append(chunk)
            thoughts.append(thought)
            state_at.append(chunk + 1 if (k + 1) * c < read else -1)  # or no token reads it
    n = sizes.size(L, "thought width", max([c, *map(len, thoughts)]), step=4)
    lengths = [len(thought) for thought in thoughts]
    tokens_at = [r * n + i for r, length in enumerate(lengths) for i in range(length)]

    def filled(name: str, values: list[int]) -> Tensor:
        room = sizes.size(L, name, len(values)) - len(values)
        return torch.tensor(values + [-1] * room, dtype=torch.long)

    R = sizes.size(L, "thoughts", len(thoughts))
    return FlatBatch(
        ids=ids,
        positions=positions,
        segments=segments,
        lm_at=filled("answer", lm_at),
        lm_labels=filled("answer", lm_labels),
        trivial_at=filled("trivial", trivial_at),
        thought_at=filled("thoughts", thought_at),
        thoughts=pad(thoughts + [[]] * (R - len(thoughts)), config.pad_id, n),
        lengths=filled("thoughts", lengths),
        state_at=filled("thoughts", state_at),
        tokens_at=filled("thought tokens", tokens_at),
    )


class FoldedFrame(Frame):
    """The frame of a pass over tokens that see one another in the order of their row.

    Its masks are [B or 1, 1, Q/G * L, L]: the Q/G query heads of a group read the same keys, and
    folded into the time axis they need no copy of them, and kernels will do that know neither
    groups nor a mask a head.
    """

    def __init__(
        self,
        backbone: Qwen2ForCausalLM,
        positions: Tensor,  # [B or 1, L], of each token in its sample
        segments: Tensor | None = None,  # [B, L] keeps apart samples that share a row
    ) -> None:
        config, dtype = backbone.config, backbone.model.embed_tokens.weight.dtype
        L = positions.shape[1]
        table = backbone.rotary.table(L, dtype, positions.device)
        super().__init__(config, positions, table, None, L)
        first, second = self.sin.chunk(2, dim=-1)
        self.sin = torch.cat([-first, second], dim=-1)  # as `rotate` needs it
        places = torch.arange(L, device=positions.device)
        seen = (places <= places[:, None])[None]  # [1, L, L]
        if segments is not None:
            seen = seen & (segments[:, :, None] == segments[:, None, :])
        folds = config.num_attention_heads // config.num_key_value_heads
        # None where plain causal attention is meant, for which there are faster kernels.
        self.full = None if segments is None else seen.repeat(1, folds, 1)[:, None]
        if config.sliding_layers:
            near = seen & (places > places[:, None] - config.sliding_window)
            self.sliding = near.repeat(1, folds, 1)[:, None]

    def project(self, attention: Attention, x: Tensor) -> Sequence[Tensor]:
        """As `Frame.project`, in one product: those of k and v alone are too small to fill a card.

        Seven products a layer cost 5 % of a step of 3,584 tokens (0.5B on an H200).
        """
        three = attention.q_proj, attention.k_proj, attention.v_proj
        weight, bias = (torch.cat([getattr(p, name) for p in three]) for name in ("weight", "bias"))
        return F.linear(x, weight, bias).split([len(p.weight) for p in three], dim=-1)

    def rotate(self, x: Tensor) -> Tensor:
        """As `Frame.rotate`. The halves trade places by a roll, whose backward pass is a roll too.

        Slices and a join cost more there.
        """
        return x * self.cos + x.roll(x.shape[-1] // 2, dims=-1) * self.sin

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slides: bool) -> Tensor:
        """As `Frame.attend`."""
        (B, Q, L, D), G = q.shape, k.shape[1]
        mask = self.sliding if slides else self.full
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=Q != G)
        folded = q.reshape(B, G, -1, D)  # [B, G, Q/G * L, D]
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        return out.reshape(B, Q, L, D)


def flat_losses(model: ThinkingStates, batch: FlatBatch) -> Losses:
    """As `teacher_forcing.losses`."""
    embedding = model.backbone.model.embed_tokens
    # One look-up for both: the backward pass of each fills a gradient as large as the vocabulary.
    ids = torch.cat([batch.ids.flatten(), batch.thoughts.flatten()])
    tokens, thoughts = embedding(ids).split([batch.ids.numel(), batch.thoughts.numel()])
    thoughts = thoughts.unflatten(0, batch.thoughts.shape)  # [R, n, E]
    h, out = teacher_forced(model, batch, tokens.unflatten(0, batch.ids.shape), thoughts)
    answers = model.backbone.model.norm(picked(out.flatten(0, 1), batch.lm_at))
    labels = batch.lm_labels.where(batch.lm_at >= 0, IGNORED)
    lm = cross_entropy_sum(answers, model.backbone.lm_head.weight, labels)
    thought = thought_loss(model, h, batch, thoughts) if model.thinks else torch.zeros_like(lm)
    return Losses(lm, thought, *batch.counts)


def picked(values: Tensor, at: Tensor) -> Tensor:
    """The values at these places; some value where a place is -1."""
    return values[at.clamp(min=0)]


def teacher_forced(
    model: ThinkingStates,
    batch: FlatBatch,
    tokens: Tensor,  # [B, L, E], embedded
    thoughts: Tensor,  # [R, n, E], embedded
) -> tuple[Tensor, Tensor]:
    """(H, the last layer's outputs), both [B, L, E], under the batch's gold thoughts."""
    config, backbone = model.config, model.backbone
    segments = batch.segments if len(batch.segments) else None
    frame = FoldedFrame(backbone, batch.positions, segments)
    x = backbone.run_layers(tokens, range(config.inject_after), frame)
    if len(thoughts):
        places = torch.arange(thoughts.shape[1], device=thoughts.device)[None]
        out = model.compression_block(thoughts, FoldedFrame(backbone, places))
        states = model.last_outputs(out, batch.lengths) * (batch.state_at >= 0)[:, None, None]
        chunks = x.reshape(-1, config.chunk_size, x.shape[-1])  # [B * K, c, E]
        at = batch.state_at.clamp(min=0)
        # X + S* (equation 5), for all other states are 0.
        x = chunks.index_add(0, at, states.to(x.dtype)).view_as(x)
    h = backbone.run_layers(x, range(config.inject_after, config.extract_after), frame)
    return h, backbone.run_layers(h, range(config.extract_after, len(backbone.model.layers)), frame)


def thought_loss(model: ThinkingStates, h: Tensor, batch: FlatBatch, thoughts: Tensor) -> Tensor:
    """Summed cross-entropy of T on the gold thoughts, given H [B, L, E] and embeddings [R, n, E].

    A trivial thought is one prediction, made at the chunk's last vector, and takes no thought token
    as input: those chunks run apart from the others.
    """
    c, T = model.config.chunk_size, model.thinking_block
    chunks = h.reshape(-1, c, h.shape[-1])  # [B * K, c, E]

    def frame(L: int) -> FoldedFrame:
        return FoldedFrame(model.backbone, torch.arange(L, device=h.device)[None])

    vectors, labels = [], []
    if len(batch.trivial_at):
        vectors.append(T(picked(chunks, batch.trivial_at), frame(c))[:, 0])
        ends = torch.full_like(batch.trivial_at, model.config.thought_end)
        labels.append(ends.where(batch.trivial_at >= 0, IGNORED))
    if len(batch.thought_at):
        before = thoughts[:, :-1]  # the last token is only predicted
        x = torch.cat([picked(chunks, batch.thought_at).to(before.dtype), before], dim=1)
        out = T(x, frame(x.shape[1]), last=thoughts.shape[1])  # [R, n, E]
        vectors.append(picked(out.flatten(0, 1), batch.tokens_at))
        said = picked(batch.thoughts.flatten(), batch.tokens_at)
        labels.append(said.where(batch.tokens_at >= 0, IGNORED))
    if not labels:  # a batch without a complete chunk
        return h.new_zeros(())
    return cross_entropy_sum(torch.cat(vectors), T.lm_head.weight, torch.cat(labels))
