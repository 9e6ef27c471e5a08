"""The same model on CUDA without launch overhead: fused steps in CUDA graphs. `generation.accelerate` makes it.

At batch 1 a step of Qwen2.5-0.5B moves 1 GB of weights, 0.3 ms on an H100; launching its kernels one by one takes 20 ms.
So every step has a fixed shape (bucketed), runs as 5 kernels a layer for one token (9 for more), and is replayed as one
graph. The plain path in thinking.py stays the definition, and the tests compare with it. Inference only.
"""
from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from minits.cache import KVCache
from minits.fast.graphs import Graphs
from minits.fast.kernels import decode_attention, matvec, rope_and_store, silu_times
from minits.qwen import DecoderLayer, Frame, pack
from minits.supervision import round_up
from minits.thinking import OpenThoughts, ThinkingStates

SLOTS = 128  # caches are rounded up to multiples of this, so that few graphs serve all lengths


def bucket(n: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, …: at most a third of a step is padding."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


class PackedLayer:
    """A decoder layer, packed, as five kernels for one token or nine for more."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.layer, attention, mlp = layer, layer.self_attn, layer.mlp
        self.heads, self.kv_heads, self.head_dim = attention.heads, attention.kv_heads, attention.head_dim
        pack(layer)
        (self.qkv, self.bias), self.gate_up = attention.packed, mlp.packed
        self.wide = tl.float64 if self.qkv.dtype == torch.float64 else tl.float32
        # What decode_attention is made for; every real Qwen2.5 fits.
        self.one_kernel = (self.wide is tl.float32 and self.heads // self.kv_heads <= 16
                           and self.head_dim in (16, 32, 64, 128))

    def run(self, x: Tensor, step: Step, k: Tensor, v: Tensor) -> None:
        """Adds the layer's work to x [B * T, E] in place; k, v [B, G, S + 1, D] are its part of the cache."""
        layer = self.layer
        qkv = self.product(x, self.qkv, norm=layer.input_layernorm, bias=self.bias)  # [B * T, (H + 2 G) D]
        one = step.positions.shape[1] == 1 and self.one_kernel
        attend = self.attend_one if one else self.attend
        self.product(attend(qkv, step, k, v), layer.self_attn.o_proj.weight, into=x)
        hidden = self.product(x, self.gate_up, norm=layer.post_attention_layernorm, gated=True)
        self.product(hidden, layer.mlp.down_proj.weight, into=x)

    def product(self, x: Tensor, weight: Tensor, *, norm: nn.Module | None = None, bias: Tensor | None = None,
                gated: bool = False, into: Tensor | None = None) -> Tensor:
        """norm(x) [M, K] @ weight.T (+ bias, or silu-gated, or added to `into`): one kernel for M = 1, cuBLAS else."""
        (M, K), size = x.shape, len(weight) // 2 if gated else len(weight)
        out = x.new_empty(M, size) if into is None else into
        if M == 1:
            rows = 2 if size < 2048 else 4
            matvec[(triton.cdiv(size, rows),)](
                x, norm.weight if norm else x, weight, bias if bias is not None else x, out, out, size, K,
                norm.eps if norm else 0.0, norm is not None, bias is not None, into is not None, gated, rows,
                min(triton.next_power_of_2(K), 1024), self.wide, num_warps=4)
            return out
        if norm:
            x = F.rms_norm(x, x.shape[1:], norm.weight, norm.eps)
        if into is not None:
            return into.addmm_(x, weight.T)
        if not gated:
            return torch.addmm(bias, x, weight.T)
        silu_times[(M, triton.cdiv(size, 1024))](x @ weight.T, out, size, 1024, self.wide)
        return out

    def attend(self, qkv: Tensor, step: Step, k: Tensor, v: Tensor) -> Tensor:
        """Attention of T new tokens a row; writes their keys and values. qkv -> [B * T, H D]."""
        (B, T), folds = step.positions.shape, self.heads // self.kv_heads
        q = qkv.new_empty(B, self.kv_heads, folds * T, self.head_dim)
        rope_and_store[(B * T, self.heads + 2 * self.kv_heads)](
            qkv, step.table, step.positions, q, k, v, T, k.shape[2], step.table.shape[1], self.heads, self.kv_heads,
            self.head_dim, self.wide, num_warps=1)
        bias = step.mask(self.layer.sliding)
        S = bias.shape[-1]
        out = F.scaled_dot_product_attention(q, k[:, :, :S], v[:, :, :S], attn_mask=bias)
        return out.reshape(B, self.heads, T, self.head_dim).transpose(1, 2).reshape(B * T, -1)

    def attend_one(self, qkv: Tensor, step: Step, k: Tensor, v: Tensor) -> Tensor:
        """The same for one new token a row, in one kernel."""
        B = len(qkv)
        out = qkv.new_empty(B, self.heads * self.head_dim)
        decode_attention[(B, self.kv_heads)](
            qkv, step.table, step.positions, k, v, out, k.shape[2], step.table.shape[1], step.window or 0,
            self.head_dim ** -0.5, self.layer.sliding, self.heads, self.kv_heads, self.head_dim, 64, num_warps=4)
        return out


def place(cache: KVCache) -> tuple[int, ...]:
    """What a graph knows of a cache: where its tensors lie. Part of the key of every graph that uses one."""
    return cache.k.data_ptr(), cache.v.data_ptr(), cache.slots


class Step:
    """What the layers of one step share: positions [B, T], rotation table [2, P, D], masks made when first asked for."""

    def __init__(self, model: FastThinkingStates, positions: Tensor, slots: int) -> None:
        config = model.backbone.config
        self.positions, self.table, self.slots, self.window = positions, model.table, slots, config.sliding_window
        self.folds, self.masks = config.num_attention_heads // config.num_key_value_heads, {}

    def mask(self, sliding: bool) -> Tensor:
        """The additive mask [B, 1, H/G * T, S] in the table's dtype, which spares attention a conversion a layer."""
        if sliding not in self.masks:
            at = torch.arange(self.slots, device=self.positions.device)
            seen = at <= self.positions[..., None]  # [B, T, S]
            if sliding:
                seen &= at > self.positions[..., None] - self.window
            additive = torch.zeros_like(seen, dtype=self.table.dtype).masked_fill_(~seen, -torch.inf)
            self.masks[sliding] = additive.repeat(1, self.folds, 1)[:, None]
        return self.masks[sliding]


class FastThinkingStates(ThinkingStates):
    """ThinkingStates whose steps run through graphs. Shares the weights of the model it is made from."""

    def __init__(self, model: ThinkingStates) -> None:
        nn.Module.__init__(self)
        self.config, self.backbone = model.config, model.backbone
        self.thinking_block, self.compression_block = model.thinking_block, model.compression_block
        self.register_buffer("blocked", model.blocked, persistent=False)
        positions = torch.arange(model.backbone.config.max_position_embeddings + 1, device=model.device)
        cos, sin = model.backbone.rotary(positions[None], model.backbone.lm_head.weight.dtype)
        self.table = torch.stack([cos[0, 0], sin[0, 0]])  # [2, P, D]
        self.layers = [PackedLayer(layer) for layer in model.backbone.model.layers]
        if self.thinks:
            self.t_layer, self.c_layer = PackedLayer(model.thinking_block.layer), PackedLayer(
                model.compression_block.layer)
        self.graphs, self.free, self.desks = Graphs(), {}, {}

    def new_cache(self, rows: int, slots: int, layers: int | None = None) -> KVCache:
        """A cache from those that were given back, for a graph knows its tensors by address; else a new one."""
        slots = min(round_up(slots, SLOTS), self.backbone.config.max_position_embeddings)
        pool = self.free.setdefault((rows, slots, layers), [])
        kept = pool.pop() if pool else self.backbone.new_cache(rows, slots, layers)
        cache = KVCache.over(kept.k, kept.v)
        weakref.finalize(cache, pool.append, kept)  # back to the pool when its user lets go of it
        return cache

    def frame(self, positions: Tensor, cache: KVCache, span: int) -> Frame:
        """Only positions and cache: masks and angles are made inside the graphs."""
        return Frame(None, None, None, None, positions, cache, cache.slots)

    def layers_step(self, name: str, layers: range, x: Tensor, frame: Frame, finish=None) -> Tensor:
        """x [B, T, E] through `layers` as one graph; T is padded to the next bucket, the padding goes to waste."""
        B, T, E = x.shape
        extra = bucket(T) - T
        cache, positions = frame.cache, frame.positions
        if extra:
            x, positions = F.pad(x, (0, 0, 0, extra)), F.pad(positions, (0, extra), value=cache.waste)

        def run(x: Tensor, positions: Tensor) -> Tensor:
            flat, step = x.reshape(-1, E).clone(), Step(self, positions, cache.slots)
            for i in layers:
                self.layers[i].run(flat, step, cache.k[i], cache.v[i])
            return (finish(flat) if finish else flat).view(x.shape)

        return self.graphs((name, *place(cache)), run, x, positions)[:, :T]

    def lower(self, ids: Tensor, frame: Frame) -> Tensor:
        x = self.backbone.model.embed_tokens(ids)
        return self.layers_step("lower", range(self.config.inject_after), x, frame)

    def middle(self, x: Tensor, frame: Frame) -> Tensor:
        return self.layers_step("middle", range(self.config.inject_after, self.config.extract_after), x, frame)

    def upper(self, h: Tensor, frame: Frame) -> Tensor:
        layers = range(self.config.extract_after, self.backbone.config.num_hidden_layers)
        return self.layers_step("upper", layers, h, frame, self.backbone.model.norm)

    def desk(self, kind: str, cache: KVCache, *like: Tensor) -> list[Tensor]:
        """The tensors, shaped as `like`, that graphs of this kind and cache change in place."""
        key = (kind, *place(cache), *(tuple(x.shape) for x in like))
        if key not in self.desks:
            self.desks[key] = [torch.zeros_like(x) for x in like]
        return self.desks[key]

    def read_tokens(self, tokens: Tensor, positions: Tensor, state: Tensor, open_h: Tensor, cache: KVCache, *,
                    steps: int, span: int) -> Tensor:
        """As the plain one; a step is one graph that leaves everything as the next one needs it."""
        c, model, desk = self.config.chunk_size, self.backbone, self.desk("read", cache, tokens, positions, state, open_h)

        def run(tokens: Tensor, positions: Tensor, state: Tensor, open_h: Tensor) -> None:
            rows, places = torch.arange(len(tokens), device=tokens.device), positions % c
            step, x = Step(self, positions[:, None], cache.slots), model.model.embed_tokens(tokens)  # [B, E]
            for i in range(len(self.layers) + 1):
                if i == self.config.inject_after:
                    x += state[rows, places]
                if i == self.config.extract_after:
                    open_h[rows, places] = x
                if i < len(self.layers):
                    self.layers[i].run(x, step, cache.k[i], cache.v[i])
            tokens.copy_(self.pick(model.lm_head(model.model.norm(x))))
            positions += positions != cache.waste

        for ours, given in zip(desk, (tokens, positions, state, open_h)):
            ours.copy_(given)
        picked = []
        for _ in range(steps):
            self.graphs.change(("read", *place(cache), state.shape), run, *desk)
            picked.append(desk[0].clone())
        open_h.copy_(desk[3])
        return torch.stack(picked)

    def new_thoughts(self, rows: int, max_thought_tokens: int) -> OpenThoughts:
        """As the plain one, with rows up to the next bucket and tensors that graphs know."""
        cache = self.new_cache(bucket(rows), self.config.chunk_size + max_thought_tokens, layers=1)
        tokens, positions = self.desk("think", cache, *torch.empty(2, bucket(rows), dtype=torch.long, device=self.device))
        tokens.zero_()
        positions.fill_(self.config.chunk_size)
        return OpenThoughts(cache, tokens, positions, rows, max_thought_tokens)

    def begin_thoughts(self, h: Tensor, max_thought_tokens: int) -> OpenThoughts:
        thoughts = self.new_thoughts(len(h), max_thought_tokens)
        rows, cache = len(thoughts.tokens), thoughts.cache

        def run(h: Tensor) -> Tensor:
            positions = torch.arange(h.shape[1], device=h.device)[None].expand(rows, -1).contiguous()
            return self.think(h, positions, cache)

        h = F.pad(h, (0, 0, 0, 0, 0, rows - len(h)))
        thoughts.tokens.copy_(self.graphs(("begin", *place(cache)), run, h))
        return thoughts

    def think_step(self, thoughts: OpenThoughts) -> None:
        cache = thoughts.cache

        def run(tokens: Tensor, positions: Tensor) -> None:
            x = self.backbone.model.embed_tokens(tokens)[:, None]
            tokens.copy_(self.think(x, positions[:, None], cache))
            positions += 1

        self.graphs.change(("think", *place(cache)), run, thoughts.tokens, thoughts.positions)

    def think(self, x: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """T on x [N, T, E] at `positions` [N, T]: the ids [N] picked after the last one."""
        flat = x.reshape(-1, x.shape[-1]).clone()
        self.t_layer.run(flat, Step(self, positions, cache.slots), cache.k[0], cache.v[0])
        return self.pick(self.thinking_block.lm_head(self.thinking_block.norm(flat.view(x.shape)[:, -1])))

    def compress(self, thoughts: Tensor, lengths: Tensor) -> Tensor:
        R, n = thoughts.shape
        rows, width = bucket(R), bucket(n)
        cache = self.new_cache(rows, width, layers=1)

        def run(thoughts: Tensor, lengths: Tensor) -> Tensor:
            positions = torch.arange(width, device=thoughts.device)[None].expand(rows, width).contiguous()
            flat = self.backbone.model.embed_tokens(thoughts).flatten(0, 1)
            self.c_layer.run(flat, Step(self, positions, cache.slots), cache.k[0], cache.v[0])
            return self.last_outputs(flat.view(rows, width, -1), lengths)

        thoughts = F.pad(thoughts, (0, width - n, 0, rows - R), value=self.config.pad_id)
        return self.graphs(("compress", *place(cache)), run, thoughts, F.pad(lengths, (0, rows - R)))[:R]
