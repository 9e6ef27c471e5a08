"""The same model on CUDA without launch overhead: fused steps in CUDA graphs. `accelerate(model)` is all there is to use.

At batch 1 a step of Qwen2.5-0.5B moves 1 GB of weights, 0.3 ms on an H100; launching its kernels one by one takes 20 ms.
So every step has a fixed shape (bucketed), runs as 5 kernels a layer for one token (9 for more), and is replayed as one
graph. The plain path in thinking.py stays the definition, and the tests compare with it. Inference only; nothing else
knows of this file.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from minits.cache import KVCache
from minits.kernels import decode_attention, matvec, rope_and_store, silu_times
from minits.qwen import DecoderLayer, Frame, pack
from minits.thinking import Thought, ThinkingStates, closed

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


# -- graphs --------------------------------------------------------------------------------------------------------------


class Graphs:
    """Functions of fixed-shape tensors, each captured once as a CUDA graph and replayed from then on."""

    def __init__(self) -> None:
        self.captured: dict[tuple, tuple] = {}
        self.pool = None  # scratch memory, shared: graphs run one after another, and results are kept elsewhere

    def __call__(self, key: tuple, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs), as a tensor of the caller's own. `key` must name all that the function depends on besides."""
        key = (*key, *(tuple(x.shape) for x in inputs))
        if key not in self.captured:
            self.captured[key] = self.capture(function, inputs)
        graph, statics, out = self.captured[key]
        for static, x in zip(statics, inputs):
            static.copy_(x)
        graph.replay()
        return out.clone()

    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple:
        """Runs the function twice to warm up (kernels are chosen and compiled then), then records it."""
        statics = [x.clone() for x in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                out = torch.empty_like(function(*statics))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out.copy_(function(*statics))
        self.pool = self.pool or graph.pool()
        return graph, statics, out


class FastThinkingStates(ThinkingStates):
    """ThinkingStates whose steps run through graphs. Shares the weights of the model it is made from."""

    def __init__(self, model: ThinkingStates) -> None:
        nn.Module.__init__(self)
        self.config, self.backbone = model.config, model.backbone
        self.thinking_block, self.compression_block = model.thinking_block, model.compression_block
        self.register_buffer("blocked", model.blocked, persistent=False)
        self.dtype = model.backbone.lm_head.weight.dtype
        cos, sin = model.backbone.rotary(torch.arange(model.backbone.config.max_position_embeddings + 1,
                                                      device=model.device)[None], self.dtype)
        self.table = torch.stack([cos[0, 0], sin[0, 0]])  # [2, P, D]
        self.layers = [PackedLayer(layer) for layer in model.backbone.model.layers]
        if self.thinks:
            self.t_layer, self.c_layer = PackedLayer(model.thinking_block.layer), PackedLayer(
                model.compression_block.layer)
        self.graphs, self.free = Graphs(), {}

    def new_cache(self, rows: int, slots: int, layers: int | None = None) -> KVCache:
        """A cache from those that were given back, for a graph knows its tensors by address; else a new one."""
        slots = min(-(-slots // SLOTS) * SLOTS, self.backbone.config.max_position_embeddings)
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

    def read_tokens(self, tokens: Tensor, positions: Tensor, state: Tensor, open_h: Tensor, cache: KVCache, *,
                    steps: int, span: int) -> Tensor:
        """As the plain one; a step is one graph, and its results are the next step's inputs without the host."""
        E, c, model = open_h.shape[-1], self.config.chunk_size, self.backbone

        def run(tokens: Tensor, positions: Tensor, state: Tensor) -> Tensor:
            rows, places = torch.arange(len(tokens), device=tokens.device), positions % c
            step, x = Step(self, positions[:, None], cache.slots), model.model.embed_tokens(tokens)  # [B, E]
            h = x
            for i, layer in enumerate(self.layers):
                if i == self.config.inject_after:
                    x = x + state[rows, places]
                if i == self.config.extract_after:
                    h = x.clone()
                layer.run(x, step, cache.k[i], cache.v[i])
            if self.config.inject_after == len(self.layers):
                x = x + state[rows, places]
            if self.config.extract_after == len(self.layers):
                h = x
            picked = self.pick(model.lm_head(model.model.norm(x)))
            return torch.cat([picked[:, None].double(), h.double()], dim=1)  # [B, 1 + E]: ids are exact in float64

        rows, picked = torch.arange(len(tokens), device=tokens.device), []
        for _ in range(steps):
            out = self.graphs(("read", *place(cache)), run, tokens, positions, state)
            open_h[rows, positions % c] = out[:, 1:].to(open_h.dtype)
            tokens = out[:, 0].long()
            picked.append(tokens)
            positions = torch.where(positions == cache.waste, positions, positions + 1)
        return torch.stack(picked)

    def begin_thoughts(self, h: Tensor, max_thought_tokens: int) -> tuple[KVCache, Tensor]:
        N, c, E = h.shape
        rows = bucket(N)
        cache = self.new_cache(rows, c + max_thought_tokens, layers=1)

        def run(h: Tensor) -> Tensor:
            positions = torch.arange(c, device=h.device)[None].expand(rows, c).contiguous()
            return self.think_step(h, positions, cache)

        h = F.pad(h, (0, 0, 0, 0, 0, rows - N)) if rows > N else h
        return cache, self.graphs(("begin", *place(cache)), run, h)[:N]

    def think_step(self, x: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """T on x [N, T, E] at `positions` [N, T]: the ids [N] picked after the last one."""
        flat = x.reshape(-1, x.shape[-1]).clone()
        self.t_layer.run(flat, Step(self, positions, cache.slots), cache.k[0], cache.v[0])
        return self.pick(self.thinking_block.lm_head(self.thinking_block.norm(flat.view(x.shape)[:, -1])))

    def finish_thoughts(self, cache: KVCache, first: Tensor, max_thought_tokens: int) -> list[Thought]:
        N, end = len(first), self.config.thought_end
        if bool((first == end).all()):
            return [Thought([end]) for _ in range(N)]
        rows = bucket(N)
        own = self.new_cache(rows, self.config.chunk_size + max_thought_tokens, layers=1)
        own.k[:, :N], own.v[:, :N] = cache.k[:, :N], cache.v[:, :N]

        def run(tokens: Tensor, position: Tensor) -> Tensor:
            x = self.backbone.model.embed_tokens(tokens)[:, None]
            return self.think_step(x, position.expand(rows)[:, None].contiguous(), own)

        tokens = [F.pad(first, (0, rows - N), value=end)]
        position = torch.full((1,), self.config.chunk_size, device=first.device)
        alive = first != end
        for _ in range(max_thought_tokens - 1):
            tokens.append(self.graphs(("think", *place(own)), run, tokens[-1], position))
            position, alive = position + 1, alive & (tokens[-1][:N] != end)
            if not alive.any():
                break
        return closed(torch.stack(tokens, dim=1)[:N].tolist(), end)

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


def accelerate(model: ThinkingStates) -> ThinkingStates:
    """A faster `model` for inference on CUDA: same weights, same results up to rounding. Raises ValueError elsewhere."""
    if model.device.type != "cuda":
        raise ValueError(f"accelerate: the model is on {model.device}, CUDA graphs need cuda; move it there, or use it "
                         "as it is.")
    return FastThinkingStates(model.eval())
