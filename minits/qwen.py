"""Qwen2.5 from scratch: configuration, RMSNorm, rotary embedding, attention, MLP, decoder layer, language model.

Parameters carry the checkpoint's names, so that state-dict keys are the keys of a Hugging Face file (weights.py).
Follows the published Qwen2 architecture: https://huggingface.co/docs/transformers/model_doc/qwen2.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minits.cache import KVCache

SUPPORTED = ("qwen2",)


@dataclass(frozen=True)
class QwenConfig:
    """The numbers of a Qwen2.5 model, under the names of its `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_window: int | None  # tokens a query sees, itself included, in the layers of `sliding_layers`
    sliding_layers: tuple[int, ...]  # the layers that use the window

    @classmethod
    def from_json(cls, raw: dict, where: str = "config.json") -> QwenConfig:
        """Reads the parsed `config.json`; `where` names it in messages.

        Raises ValueError for another `model_type`, a missing key or a setting that this implementation lacks.
        """
        kind = raw.get("model_type")
        if kind not in SUPPORTED:
            raise ValueError(f"{where}: model_type is {kind!r}; supported: {', '.join(SUPPORTED)}. "
                             "Use a Qwen2 or Qwen2.5 checkpoint.")
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                  "rms_norm_eps", "max_position_embeddings")
        if missing := [key for key in needed if raw.get(key) is None]:
            raise ValueError(f"{where}: lacks {', '.join(missing)}; download the checkpoint's config.json again.")
        for key in needed:
            kinds = (int, float) if key == "rms_norm_eps" else (int,)
            if type(raw[key]) not in kinds or not raw[key] > 0:
                raise ValueError(f"{where}: {key} is {raw[key]!r}, not a positive {'' if len(kinds) > 1 else 'whole '}number; "
                                 "download the checkpoint's config.json again.")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{where}: hidden_act is {raw['hidden_act']!r}; only 'silu' is supported.")
        heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
        kv_heads = raw.get("num_key_value_heads") or heads
        if heads % kv_heads or (raw.get("head_dim") is None and raw["hidden_size"] % heads):
            raise ValueError(f"{where}: {heads} heads do not divide by {kv_heads} kv heads, "
                             f"or hidden_size {raw['hidden_size']} by the heads.")
        window, sliding = _sliding(raw, layers, where)
        return cls(
            vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"], intermediate_size=raw["intermediate_size"],
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads, rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=_rope_theta(raw, where), max_position_embeddings=raw["max_position_embeddings"],
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            sliding_window=window, sliding_layers=sliding)

    def to_json(self) -> dict:
        """The `config.json` that reads back to this configuration, here and in transformers."""
        raw = asdict(self)
        sliding = raw.pop("sliding_layers")
        # Older readers know only max_window_layers (from there on, layers slide); layer_types says it exactly.
        kinds = ["sliding_attention" if i in sliding else "full_attention" for i in range(self.num_hidden_layers)]
        return raw | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu",
                      "attention_dropout": 0.0, "use_cache": True, "use_sliding_window": bool(sliding),
                      "max_window_layers": min(sliding, default=self.num_hidden_layers), "layer_types": kinds}


def _rope_theta(raw: dict, where: str) -> float:
    """The rotary base from either spelling; silence about it is an error, for 10000 would be wrong without a sign."""
    nested = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    for settings in (nested, scaling):
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{where}: rope type {kind!r} is not supported, only 'default' (no context extension).")
    found = {float(v) for v in (raw.get("rope_theta"), nested.get("rope_theta")) if v is not None}
    if len(found) != 1:
        problem = f"contradictory rotary bases {sorted(found)}" if found else "neither rope_theta nor rope_parameters"
        raise ValueError(f"{where}: {problem}; set the one value that the model was trained with.")
    return found.pop()


def _sliding(raw: dict, layers: int, where: str) -> tuple[int | None, tuple[int, ...]]:
    """(window in tokens, sliding layers); `sliding_window` counts only where `use_sliding_window` is on."""
    if not raw.get("use_sliding_window", False) or raw.get("sliding_window") is None:
        return None, ()
    if kinds := raw.get("layer_types"):
        if len(kinds) != layers:
            raise ValueError(f"{where}: layer_types has {len(kinds)} entries for {layers} layers.")
        sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        sliding = tuple(range(raw.get("max_window_layers", layers), layers))
    return raw["sliding_window"], sliding


@dataclass(frozen=True)
class Frame:
    """What all layers share in one forward pass: rotation, masks, cache.

    cos, sin: [B or 1, 1, T, D]. full, sliding: what each query may see, bool [B or 1, 1, H/G * T, S] (folded as in
    `Attention`), or None where plain causal attention over the new tokens is meant. positions: [B or 1, T].
    """

    cos: Tensor
    sin: Tensor
    full: Tensor | None
    sliding: Tensor | None
    positions: Tensor
    cache: KVCache | None
    span: int  # slots (or new tokens, without cache) that are read


class Rotary:
    """Rotary angles, half-split layout, tabulated once.

    A table, not a formula per call: vectorised and scalar cosines differ in the last bit, so the same position could
    get two values in two passes. Float32 as in the reference, whatever the model's dtype: the weights were trained
    so. Not a module: a constant of the configuration is neither saved nor cast by `.to(dtype)`.
    """

    def __init__(self, config: QwenConfig) -> None:
        self.config = config
        self.table: Tensor | None = None  # [2, max_position_embeddings + 1, D]

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [B, 1, T, D] for `positions` [B, T]; the sines of a head's first half are negated, as `rotate` needs."""
        if self.table is None or self.table.device != positions.device:
            half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
            steps = torch.arange(self.config.max_position_embeddings + 1, dtype=torch.float32)
            angles = torch.outer(steps, 1.0 / self.config.rope_theta ** half).repeat(1, 2)  # [positions, D]
            sines = angles.sin() * torch.tensor([-1.0, 1.0]).repeat_interleave(self.config.head_dim // 2)
            self.table = torch.stack([angles.cos(), sines]).to(positions.device)
        cos, sin = self.table[:, positions].to(dtype)[:, :, None]
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, H, T, D] by the positions' angles: pair i is (x[i], x[i + D/2]). `sin`: as `Rotary` gives it.

    The halves trade places by a roll, whose backward pass is a roll too; slices and a join cost more there.
    """
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean square in float32 (float64 stays), then the cast, then the weight: HF's order."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with q/k/v biases (a property of qwen2, not a key of its config)."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.packed: tuple[Tensor, Tensor] | None = None  # weight and bias of q, k, v in one; see `pack`

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """q [B, T, H D], k and v [B, T, G D] before the rotation."""
        projections, keys = (self.q_proj, self.k_proj, self.v_proj), self.kv_heads * self.head_dim
        if self.packed is None and not self.training:
            return [projection(x) for projection in projections]
        # In training, too, q, k and v are one product: those of k and v alone are too small to fill a card.
        weight, bias = self.packed or (torch.cat([p.weight for p in projections]), torch.cat([p.bias for p in projections]))
        return F.linear(x, weight, bias).split([self.heads * self.head_dim, keys, keys], dim=-1)

    def forward(self, x: Tensor, frame: Frame, mask: Tensor | None, layer: int) -> Tensor:
        """x [B, T, E] -> [B, T, E]; with a cache, writes the new keys and values as its layer `layer`."""
        B, T, _ = x.shape
        q, k, v = (part.view(B, T, -1, self.head_dim).transpose(1, 2) for part in self.project(x))
        q, k = rotate(q, frame.cos, frame.sin), rotate(k, frame.cos, frame.sin)  # [B, H, T, D], [B, G, T, D]
        if frame.cache is not None:
            frame.cache.write(layer, k, v, frame.positions)
            k, v = frame.cache.read(layer, frame.span)  # [B, G, S, D]
        if mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        else:
            # The H/G query heads of a group read the same keys: fold them into the time axis, and no key is copied.
            folded = q.reshape(B, self.kv_heads, -1, self.head_dim)  # [B, G, H/G * T, D]
            out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask).reshape(B, self.heads, T, -1)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.packed: Tensor | None = None  # weights of gate and up in one; see `pack`

    def forward(self, x: Tensor) -> Tensor:
        gate, up = ((self.gate_proj(x), self.up_proj(x)) if self.packed is None
                    else F.linear(x, self.packed).chunk(2, dim=-1))
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream; `sliding` chooses the frame's mask."""

    def __init__(self, config: QwenConfig, sliding: bool) -> None:
        super().__init__()
        self.sliding = sliding
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, frame: Frame, layer: int = 0) -> Tensor:
        """x [B, T, E] -> [B, T, E]; `layer` is this layer's place in the frame's cache."""
        mask = frame.sliding if self.sliding else frame.full
        x = x + self.self_attn(self.input_layernorm(x), frame, mask, layer)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2Model(nn.Module):
    """Embedding, decoder layers and final norm: the part whose checkpoint keys begin with `model.`"""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, sliding=i in config.sliding_layers) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen2ForCausalLM(nn.Module):
    """The language model. `frame` once, then `run` over any range of layers, then `lm_head` where logits are needed."""

    def __init__(self, config: QwenConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.tie()

    def tie(self) -> None:
        """Makes the unembedding the embedding itself where the config says so; needed after tensors were replaced."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def new_cache(self, rows: int, slots: int, layers: int | None = None) -> KVCache:
        """An empty cache for `rows` rows of up to `slots` tokens, in the weights' dtype and device."""
        weight = self.model.embed_tokens.weight
        return KVCache(self.config.num_hidden_layers if layers is None else layers, rows,
                       self.config.num_key_value_heads, slots, self.config.head_dim,
                       dtype=weight.dtype, device=weight.device)

    def frame(self, positions: Tensor, cache: KVCache | None = None, span: int | None = None,
              segments: Tensor | None = None) -> Frame:
        """The shared part of one pass over tokens at `positions` [B or 1, T].

        With a cache, a query at p sees the slots in (p - window, p]; `span` says how many slots can matter (the last
        position + 1; None: all). Without one the tokens see one another, in their order; `segments` [B, T] keeps apart
        samples that share a row, each at positions of its own.
        """
        T = positions.shape[1]
        span = T if cache is None else min(span or cache.slots, cache.slots)
        cos, sin = self.rotary(positions, self.model.embed_tokens.weight.dtype)
        slots = torch.arange(span, device=positions.device)
        places = positions if cache is not None else slots[None]  # where in the row of keys each query stands
        seen = slots <= places[..., None]  # [B or 1, T, S]
        if segments is not None:
            seen = seen & (segments[:, :, None] == segments[:, None, :])
        folds = self.config.num_attention_heads // self.config.num_key_value_heads
        full = seen.repeat(1, folds, 1)[:, None] if cache is not None or segments is not None else None
        sliding = None
        if self.config.sliding_layers:
            near = seen & (slots > places[..., None] - self.config.sliding_window)
            sliding = near.repeat(1, folds, 1)[:, None]
        return Frame(cos, sin, full, sliding, positions, cache, span)

    def run(self, x: Tensor, frame: Frame, layers: range) -> Tensor:
        """x [B, T, E] through the layers with numbers in `layers`."""
        for i in layers:
            x = self.model.layers[i](x, frame, i)
        return x

    def forward(self, ids: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Plain Qwen2.5: ids [B, T] at `positions` [B, T] (None: 0 … T-1) -> logits [B, T, V]."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
        frame = self.frame(positions, cache)
        x = self.run(self.model.embed_tokens(ids), frame, range(self.config.num_hidden_layers))
        return self.lm_head(self.model.norm(x))


def pack(layer: DecoderLayer) -> None:
    """For inference: q/k/v and gate/up of a layer as one product each, of which the parameters become views.

    Four matrix products a layer instead of seven, and no memory twice. The last thing to do with a model: it can be
    neither trained, cast nor moved afterwards.
    """
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    attention.packed = join(projections, "weight"), join(projections, "bias")
    mlp.packed = join([mlp.gate_proj, mlp.up_proj], "weight")


def join(modules: Sequence[nn.Linear], name: str) -> Tensor:
    """The parameters called `name` of `modules` as one tensor, of which they become views."""
    whole = torch.cat([getattr(module, name).detach() for module in modules])
    start = 0
    for module in modules:
        end = start + len(getattr(module, name))
        setattr(module, name, nn.Parameter(whole[start:end], requires_grad=False))
        start = end
    return whole


def init_random(model: nn.Module, std: float, generator: torch.Generator) -> None:
    """Draws every matrix from a normal distribution with `std`; biases become 0 and norms 1 (a fresh model's start)."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

