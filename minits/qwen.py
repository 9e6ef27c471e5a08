"""Qwen2.5 from scratch: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, decoder layers.

Parameters carry the checkpoint's names, so that the keys of a state dict are the keys of a Hugging
Face file. Architecture: https://huggingface.co/docs/transformers/model_doc/qwen2
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minits.cache import KVCache
from minits.tensors import in_order, in_pieces


@dataclass(frozen=True)
class QwenConfig:
    """The numbers of a Qwen2.5 model, under the names of its config.json."""

    vocab_size: int  # V
    hidden_size: int  # E, the paper's d
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int  # Q
    num_key_value_heads: int  # G
    head_dim: int  # D
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_window: int | None  # tokens that a query sees, itself included, in sliding layers
    sliding_layers: tuple[int, ...]


class Rotary:
    """Cosines and sines of the rotary angles, in a table that grows as needed.

    A table, not a formula per call: vectorised and scalar cosines differ in the last bit, so one
    position could get two values in two passes. For the same reason it is made of blocks of one
    size. Float32 as in the reference, whatever the model's dtype: the weights were trained so.

    Not a module: a constant of the configuration is neither saved nor cast by `.to(dtype)`.
    """

    BLOCK = 4096  # positions

    def __init__(self, config: QwenConfig) -> None:
        self.config = config
        # Tables are kept by their size: a CUDA graph knows the one that it read by its address.
        self.tables: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def table(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[2, >= length, D]: cosines and sines of the positions from 0 on."""
        blocks = 1
        while blocks * self.BLOCK < length:
            blocks *= 2
        key = blocks, dtype, device
        if key not in self.tables:
            parts = [self.block(number) for number in range(blocks)]
            self.tables[key] = torch.cat(parts, dim=1).to(device, dtype)
        return self.tables[key]

    def block(self, number: int) -> Tensor:
        """[2, BLOCK, D]: the table's block of that number."""
        D = self.config.head_dim
        exponents = torch.arange(0, D, 2, dtype=torch.float32) / D
        positions = number * self.BLOCK + torch.arange(self.BLOCK, dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / self.config.rope_theta**exponents)  # [BLOCK, D/2]
        # Half-split layout: numbers i and i + D/2 of a head are a pair and share an angle.
        table = torch.stack([angles.cos(), angles.sin()])
        return table.repeat(1, 1, 2)


class Frame:
    """What all layers share in one pass over tokens: where they stand, and what each may see.

    A query at position p sees the keys at positions in (p - window, p]. With a cache the keys are
    its slots; without one they are the tokens themselves, at positions 0 … L - 1.

    How queries, keys and values are made, rotated and attended stands here, not in `Attention`, so
    that a pass of another layout is another frame for the same layers (fast/flat_batch.py).
    """

    def __init__(
        self,
        config: QwenConfig,
        positions: Tensor,  # [B, L]
        table: Tensor,  # of `Rotary`, in the weights' dtype
        cache: KVCache | None,
        span: int,  # slots that are read, or tokens where there is no cache
    ) -> None:
        self.window, self.positions = config.sliding_window, positions
        self.cache, self.span = cache, span
        # Padding may lie past the table; its angles do not matter.
        within = positions.clamp(max=table.shape[1] - 1)
        self.cos, self.sin = table[:, within][:, :, None]  # [B, 1, L, D] each

    @cached_property
    def full(self) -> Tensor:
        """[B, 1, L, span], bool: which keys each query sees in a dense layer."""
        keys = torch.arange(self.span, device=self.positions.device)
        return (keys <= self.positions[:, :, None])[:, None]

    @cached_property
    def sliding(self) -> Tensor:
        """The same in a layer with a window."""
        keys = torch.arange(self.span, device=self.positions.device)
        return self.full & (keys > self.positions[:, :, None] - self.window)[:, None]

    def project(self, attention: Attention, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of x [B, L, E]: [B, L, heads * D] each."""
        return attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates queries or keys [B, heads, L, D] by the angles of their positions."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin

    def attend(self, q: Tensor, k: Tensor, v: Tensor, slides: bool) -> Tensor:
        """Attention of q [B, Q, L, D] over k, v [B, G, span, D] -> [B, Q, L, D]."""
        mask = self.sliding if slides else self.full
        # Grouped-query attention: Q / G query heads share each key and value head.
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class RMSNorm(nn.Module):
    """x / rms(x) * weight. The mean square is taken in float32 at least, then cast, then weighted.

    This is the order of the reference; any other drifts in half precision.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(mean_square + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention. q, k and v have biases, as in all qwen2: no config key says so."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        E, D = config.hidden_size, config.head_dim
        Q, G = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = D
        self.q_proj = nn.Linear(E, Q * D, bias=True)
        self.k_proj = nn.Linear(E, G * D, bias=True)
        self.v_proj = nn.Linear(E, G * D, bias=True)
        self.o_proj = nn.Linear(Q * D, E, bias=False)

    def forward(self, x: Tensor, frame: Frame, layer: int, slides: bool) -> Tensor:
        """x [B, L, E] -> [B, L, E]; new keys and values go to place `layer` of the cache."""
        q, k, v = map(self.heads, frame.project(self, x))
        q = frame.rotate(q)  # [B, Q, L, D]
        k = frame.rotate(k)  # [B, G, L, D]
        if frame.cache is not None:
            frame.cache.write(layer, k, v, frame.positions)
            k, v = frame.cache.read(layer, frame.span)  # [B, G, span, D]
        out = frame.attend(q, k, v, slides)  # [B, Q, L, D]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """[B, L, heads * D] -> [B, heads, L, D]."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        E, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(E, inner, bias=False)
        self.up_proj = nn.Linear(E, inner, bias=False)
        self.down_proj = nn.Linear(inner, E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: QwenConfig, layer: int) -> None:
        """`layer`: the place in the model, which decides between dense and sliding attention."""
        super().__init__()
        self.slides = layer in config.sliding_layers
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, frame: Frame, layer: int = 0) -> Tensor:
        """x [B, L, E] -> [B, L, E]; `layer` is this layer's place in the frame's cache."""
        x = x + self.self_attn(self.input_layernorm(x), frame, layer, self.slides)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2Model(nn.Module):
    """Embedding, decoder layers and final norm: what a checkpoint calls `model.…`"""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen2ForCausalLM(nn.Module):
    """The language model. Any range of its layers can be run by itself, with `run_layers`."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.tie()

    def tie(self) -> None:
        """Makes the unembedding the embedding itself where the config says so.

        Needed again after tensors were replaced.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def new_cache(self, rows: int, slots: int, layers: int | None = None) -> KVCache:
        """An empty cache for `rows` rows of up to `slots` tokens, in the weights' dtype and device.

        layers: None for those of the model.
        """
        config, weight = self.config, self.model.embed_tokens.weight
        return KVCache(
            config.num_hidden_layers if layers is None else layers,
            rows,
            config.num_key_value_heads,
            slots,
            config.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    def frame(self, positions: Tensor, cache: KVCache | None = None) -> Frame:
        """The shared part of a pass over tokens at `positions` [B, L]."""
        L = positions.shape[1]
        span = L if cache is None else cache.span(positions)
        dtype = self.model.embed_tokens.weight.dtype
        table = self.rotary.table(max(L, span), dtype, positions.device)
        return Frame(self.config, positions, table, cache, span)

    def run_layers(self, x: Tensor, layers: range, frame: Frame) -> Tensor:
        """x [B, L, E] through the layers with numbers in `layers` -> [B, L, E].

        With a cache a long pass goes piece by piece: each finds those before it in the cache.
        """
        pieces = in_pieces(x, frame.positions)
        if frame.cache is not None and len(pieces) > 1:
            runs = [
                self.run_layers(piece, layers, self.frame(at, frame.cache))
                for piece, at in pieces
            ]
            return torch.cat(runs, dim=1)
        for layer in layers:
            x = self.model.layers[layer](x, frame, layer)
        return x

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Plain Qwen2.5: ids [B, L] at `positions` [B, L] (None: 0 … L - 1) -> logits [B, L, V]."""
        if positions is None:
            positions = in_order(*ids.shape, ids.device)
        every = range(self.config.num_hidden_layers)
        x = self.run_layers(self.model.embed_tokens(ids), every, self.frame(positions, cache))
        return self.lm_head(self.model.norm(x))
