"""Thinking States (paper, section 3.1): the backbone in three parts, the blocks T and C.

    ids -> lower -> X ─(+)─> middle -> H -> upper -> vectors for the unembedding
                     S            |
                     └── C <── Z ─┴─ T

Training (teacher_forcing.py) and inference (prefill.py, generation.py) use the same parts, so the
state enters and leaves at the same place in both.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minits.cache import KVCache
from minits.qwen import DecoderLayer, Frame, Qwen2ForCausalLM, QwenConfig, RMSNorm
from minits.tensors import in_order, on_device, pad

# For each chunk: the ids that T is made to say, or None for its own.
Scripts = Sequence[Sequence[int] | None]


@dataclass(frozen=True)
class Thought:
    """One thought Z: its ids, closing EOS included."""

    ids: list[int]
    cut: bool = False  # closed by the length limit, not by the model

    @property
    def trivial(self) -> bool:
        """EOS alone: nothing was thought, and the next state is exactly zero."""
        return len(self.ids) == 1


@dataclass(frozen=True)
class ThinkingConfig:
    """The choices of Thinking States on top of a backbone; symbols as in the paper."""

    chunk_size: int  # c: tokens a chunk
    inject_after: int  # L_in: the state is added after this many layers
    extract_after: int  # L_out: H is taken after this many layers
    eos_ids: tuple[int, ...]  # every id that ends an answer; the first one ends a thought
    pad_id: int  # fills thoughts shorter than c before C reads them
    max_thought_tokens: int = 64  # a thought that has no EOS by then is closed and marked as cut

    def check(self, config: QwenConfig) -> ThinkingConfig:
        """Returns self; raises ValueError naming what does not fit the backbone's `config`."""
        layers, places = config.num_hidden_layers, config.max_position_embeddings
        if not 1 <= self.chunk_size <= places // 2:
            raise ValueError(
                f"chunk size {self.chunk_size}: must lie in 1 … {places // 2} (half of "
                "max_position_embeddings); beyond 8 the paper saw less accuracy on GSM."
            )
        room = places - self.chunk_size  # T reads H of a chunk, then the thought
        if not 1 <= self.max_thought_tokens <= room:
            raise ValueError(
                f"max_thought_tokens {self.max_thought_tokens}: with chunks of {self.chunk_size} "
                f"it must lie in 1 … {room}."
            )
        if not 0 <= self.inject_after <= self.extract_after <= layers:
            raise ValueError(
                f"inject_after {self.inject_after}, extract_after {self.extract_after}: must "
                f"satisfy 0 <= inject_after <= extract_after <= {layers} (the model's layers)."
            )
        return self

    @property
    def thought_end(self) -> int:
        """The id that closes every thought."""
        return self.eos_ids[0]

    @property
    def trivial_thought(self) -> Thought:
        """EOS alone."""
        return Thought([self.thought_end])


class ThinkingBlock(nn.Module):
    """T: one decoder layer, its own final norm and unembedding. The embedding is the backbone's."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.layer = DecoderLayer(config, layer=config.num_hidden_layers - 1)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor, frame: Frame, last: int = 1) -> Tensor:
        """x [N, L, E], H of a chunk and then thought tokens -> normed vectors [N, last, E].

        Only the last places are normed: the logits are needed nowhere else.
        """
        return self.norm(self.layer(x, frame)[:, -last:])


class CompressionBlock(nn.Module):
    """C: one causal decoder layer over the thought's embeddings. `last_outputs` is its pooling."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.layer = DecoderLayer(config, layer=0)

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        """x [N, n, E] -> [N, n, E]."""
        return self.layer(x, frame)


class Engine(Protocol):
    """What reading and answering call on a model.

    `ThinkingStates` is the definition; fast/engine.py does the same at full speed.
    """

    config: ThinkingConfig
    backbone: Qwen2ForCausalLM
    thinks: bool  # whether T and C exist
    device: torch.device

    def new_cache(self, rows: int, slots: int) -> KVCache:
        """An empty cache of the backbone for `rows` rows of up to `slots` tokens."""

    def frame(self, positions: Tensor, cache: KVCache | None) -> Any:
        """What a pass over tokens at `positions` [B, L], slots of the cache, needs to know."""

    def lower(self, x: Tensor, frame: Any) -> Tensor:
        """X: ids [B, L] or embeddings [B, L, E] after layer L_in [B, L, E]. Reads no state."""

    def middle(self, x: Tensor, frame: Any) -> Tensor:
        """H: X + S (equation 1), added by the caller, after layer L_out (equation 2), [B, L, E]."""

    def upper(self, h: Tensor, frame: Any) -> Tensor:
        """H [B, L, E] -> final normed vectors [B, L, E], ready for the unembedding."""

    def next_ids(self, out: Tensor) -> Tensor:
        """The ids [...] that follow final normed vectors [..., E], greedily."""

    def think(self, h: Tensor, limit: int, scripts: Scripts = ()) -> list[Thought]:
        """Z of N chunks, h [N, c, E] (equation 3), greedily, of at most `limit` tokens and EOS.

        T goes on from the ids of `scripts` as if they were its own.
        """

    def states(self, thoughts: Sequence[Sequence[int]]) -> Tensor:
        """S [N, c, E] after N thoughts, EOS included (equation 4); exactly 0 after trivial ones."""

    def read_tokens(
        self,
        tokens: Tensor,
        positions: Tensor,
        state: Tensor,
        open_h: Tensor,
        cache: KVCache,
        steps: int,
    ) -> Tensor:
        """Reads one token of each row and picks the next, `steps` times: the picked ids [steps, B].

        tokens, positions: [B]; rows at the trash slot stay there. state: [B, c, E] of the chunk
        that each row is in, which must not end before the last step; open_h: [B, c, E] takes its H.
        """


class ThinkingStates(nn.Module):
    """A backbone with T and C; plain Qwen2.5 without. `Engine` says what its methods do."""

    def __init__(
        self, backbone: Qwen2ForCausalLM, config: ThinkingConfig, *, thinks: bool = True
    ) -> None:
        super().__init__()
        self.config = config.check(backbone.config)
        self.backbone = backbone
        self.thinking_block = ThinkingBlock(backbone.config) if thinks else None
        self.compression_block = CompressionBlock(backbone.config) if thinks else None
        # The vocabulary is padded for speed. Ids that the tokenizer lacks are never emitted; what
        # loads or makes a model marks them here.
        blocked = torch.zeros(backbone.config.vocab_size, dtype=torch.bool)
        self.register_buffer("blocked", blocked, persistent=False)

    @property
    def thinks(self) -> bool:
        """Whether T and C exist."""
        return self.thinking_block is not None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.model.embed_tokens.weight.device

    def copy_blocks(self) -> None:
        """T and C start as copies of parts of the backbone (appendix A.1, silent on T.norm)."""
        model, T, C = self.backbone.model, self.thinking_block, self.compression_block
        pairs = [
            (T.layer, model.layers[-1]),
            (T.norm, model.norm),
            (T.lm_head, self.backbone.lm_head),
            (C.layer, model.layers[0]),
        ]
        for block, part in pairs:
            block.load_state_dict(part.state_dict())

    # -- the backbone in three parts ---------------------------------------------------------------

    def new_cache(self, rows: int, slots: int) -> KVCache:
        return self.backbone.new_cache(rows, slots)

    def frame(self, positions: Tensor, cache: KVCache | None = None) -> Frame:
        return self.backbone.frame(positions, cache)

    def lower(self, x: Tensor, frame: Frame) -> Tensor:
        if not x.is_floating_point():
            x = self.backbone.model.embed_tokens(x)
        return self.backbone.run_layers(x, range(self.config.inject_after), frame)

    def middle(self, x: Tensor, frame: Frame) -> Tensor:
        layers = range(self.config.inject_after, self.config.extract_after)
        return self.backbone.run_layers(x, layers, frame)

    def upper(self, h: Tensor, frame: Frame) -> Tensor:
        layers = range(self.config.extract_after, self.backbone.config.num_hidden_layers)
        return self.backbone.model.norm(self.backbone.run_layers(h, layers, frame))

    def next_ids(self, out: Tensor) -> Tensor:
        return self.pick(self.backbone.lm_head(out))

    def pick(self, logits: Tensor) -> Tensor:
        """The one argmax rule: [..., V] -> the id of the highest logit, the lowest id at ties."""
        return logits.masked_fill(self.blocked, -torch.inf).argmax(-1)

    # -- thoughts and states -----------------------------------------------------------------------

    def think(self, h: Tensor, limit: int, scripts: Scripts = ()) -> list[Thought]:
        (N, c, _), end = h.shape, self.config.thought_end
        cache = self.backbone.new_cache(N, c + limit, layers=1)
        # T reads H at positions 0 … c - 1, and behind it the tokens that it has said.
        x, positions = h, in_order(N, c, h.device)
        said: list[list[int]] = [[] for _ in range(N)]
        while len(said[0]) < limit and not all(end in ids for ids in said):
            out = self.thinking_block(x, self.frame(positions, cache))[:, 0]  # [N, E]
            tokens = self.pick(self.thinking_block.lm_head(out)).tolist()
            for ids, token, script in zip(said, tokens, scripts or [None] * N):
                ids.append(script[len(ids)] if script and len(ids) < len(script) else token)
            newest = on_device([ids[-1] for ids in said], h.device)
            x = self.backbone.model.embed_tokens(newest)[:, None]  # [N, 1, E]
            positions = positions[:, -1:] + 1
        return [closed(ids, end) for ids in said]

    def states(self, thoughts: Sequence[Sequence[int]]) -> Tensor:
        c, lengths = self.config.chunk_size, [len(ids) for ids in thoughts]
        if max(lengths) == 1:  # all trivial, as without T and C
            E = self.backbone.config.hidden_size
            return self.backbone.lm_head.weight.new_zeros(len(thoughts), c, E)
        ids = pad(thoughts, self.config.pad_id, max([c, *lengths]), self.device)
        return self.compress(ids, on_device(lengths, self.device))

    def compress(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """C over padded thoughts: ids [N, n], n >= c, and their lengths [N] -> S [N, c, E]."""
        frame = self.frame(in_order(*ids.shape, ids.device))
        x = self.backbone.model.embed_tokens(ids)  # [N, n, E]
        return self.last_outputs(self.compression_block(x, frame), lengths)

    def last_outputs(self, out: Tensor, lengths: Tensor) -> Tensor:
        """S [N, c, E] in C's outputs [N, n, E]: the last c of each, 0 for a trivial thought.

        A thought shorter than c is padded to c, and this padding is attended like any token; what
        lies past max(length, c) only fills up the batch.
        """
        c = self.config.chunk_size
        rows = torch.arange(len(out), device=out.device)[:, None]  # [N, 1]
        starts = lengths.clamp(min=c) - c
        states = out[rows, starts[:, None] + torch.arange(c, device=out.device)]
        return states.where((lengths > 1)[:, None, None], 0.0)

    # -- decoding ----------------------------------------------------------------------------------

    def read_tokens(
        self,
        tokens: Tensor,
        positions: Tensor,
        state: Tensor,
        open_h: Tensor,
        cache: KVCache,
        steps: int,
    ) -> Tensor:
        rows, picked = torch.arange(len(tokens), device=tokens.device), []
        for _ in range(steps):
            frame = self.frame(positions[:, None], cache)
            places = positions % self.config.chunk_size
            X = self.lower(tokens[:, None], frame)  # [B, 1, E]
            H = self.middle(X + state[rows, places][:, None], frame)
            open_h[rows, places] = H[:, 0]
            tokens = self.next_ids(self.upper(H, frame)[:, 0])
            picked.append(tokens)
            positions = torch.where(positions == cache.trash, positions, positions + 1)
        return torch.stack(picked)


def closed(ids: list[int], end: int) -> Thought:
    """A thought from what T said: up to the first `end`, or closed with one there and cut."""
    if end in ids:
        return Thought(ids[: ids.index(end) + 1])
    return Thought([*ids, end], cut=True)
