"""The engine on CUDA without launch overhead: fused steps in CUDA graphs, around a plain model.

At batch 1 a step of Qwen2.5-0.5B moves 1 GB of weights, 0.3 ms on an H100; launching its kernels
one by one takes 20 ms. So every step has a fixed shape (bucketed) and is replayed as one graph.
The plain model is the definition, and the tests compare with it. Inference only.
"""
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minits.cache import KVCache
from minits.fast.graphs import Graphs
from minits.fast.layouts import round_up
from minits.fast.packed import PackedLayer, StepFrame
from minits.tensors import in_order, in_pieces, on_device, pad
from minits.thinking import Scripts, Thought, ThinkingStates, closed

WIDEST = 8192  # tokens of one pass: at 32,768 slots its mask takes 3.8 GB with 7 heads a group
SLOTS = 128  # caches are rounded up to multiples of this, so that few graphs serve all lengths


def bucket(n: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, …: at most a third of a step is padding."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


def address(cache: KVCache) -> tuple[int, ...]:
    """What a graph knows of a cache: where its tensors lie. Part of the key of its graphs."""
    return cache.k.data_ptr(), cache.v.data_ptr(), cache.slots


class Pass(NamedTuple):
    """A pass over tokens: where they stand [B, L], and their cache."""

    positions: Tensor
    cache: KVCache


class FastEngine:
    """`Engine` through graphs. It holds a model and shares its weights."""

    def __init__(self, model: ThinkingStates) -> None:
        self.model, self.config, self.backbone = model, model.config, model.backbone
        self.thinks, self.device = model.thinks, model.device
        qwen = model.backbone.config
        self.layers = [PackedLayer(layer, qwen) for layer in model.backbone.model.layers]
        if model.thinks:
            self.t_layer = PackedLayer(model.thinking_block.layer, qwen)
            self.c_layer = PackedLayer(model.compression_block.layer, qwen)
        self.graphs = Graphs()
        self.pools: dict[tuple, list[KVCache]] = {}  # caches that were given back, by their sizes
        self.buffers: dict[tuple, list[Tensor]] = {}  # static ones, which graphs change in place
        self.tables: dict[int, Tensor] = {}  # rotary tables in the weights' dtype, by slots

    # -- caches and frames -------------------------------------------------------------------------

    def new_cache(self, rows: int, slots: int, layers: int | None = None) -> KVCache:
        """A cache that was given back, where there is one: graphs know its tensors by address."""
        most = self.backbone.config.max_position_embeddings
        slots = min(round_up(slots, SLOTS), most)
        pool = self.pools.setdefault((rows, slots, layers), [])
        kept = pool.pop() if pool else self.backbone.new_cache(rows, slots, layers)
        if slots not in self.tables:
            self.tables[slots] = self.make_table(slots)
        cache = copy(kept)  # of the object; its tensors are the kept ones
        # Back to the pool when its user lets go of it.
        weakref.finalize(cache, pool.append, kept)
        return cache

    def make_table(self, slots: int) -> Tensor:
        """[2, slots + 1, D], the sines of a head's first half negated, as the kernels need it."""
        dtype = self.backbone.lm_head.weight.dtype
        whole = self.backbone.rotary.table(slots + 1, dtype, self.device)
        table = whole[:, : slots + 1].clone()
        table[1, :, : table.shape[-1] // 2] *= -1
        return table

    def step_frame(self, positions: Tensor, cache: KVCache) -> StepFrame:
        """What the layers of a step over `positions` [B, L] share; made within its graph."""
        table = self.tables[cache.slots]
        return StepFrame(self.backbone.config, positions, table, cache.slots)

    def frame(self, positions: Tensor, cache: KVCache) -> Pass:
        """As `Engine.frame`: just what it is given, for graphs make the rest."""
        return Pass(positions, cache)

    def static(self, kind: str, cache: KVCache, *like: Tensor) -> list[Tensor]:
        """The tensors, shaped as `like`, that graphs of this kind and cache change in place."""
        key = (kind, *address(cache), *(tuple(x.shape) for x in like))
        if key not in self.buffers:
            self.buffers[key] = [torch.zeros_like(x) for x in like]
        return self.buffers[key]

    # -- the backbone in three parts ---------------------------------------------------------------

    def run_layers(
        self,
        name: str,
        layers: range,
        x: Tensor,  # [B, L, E]
        frame: Pass,
        finish: Callable[[Tensor], Tensor] = lambda flat: flat,
    ) -> Tensor:
        """x through `layers` and `finish` as one graph, or several for a pass past WIDEST tokens.

        L is padded to the next bucket; the padding goes to the trash slot.
        """
        (_, L, E), (positions, cache) = x.shape, frame
        pieces = in_pieces(x, positions, WIDEST)
        if len(pieces) > 1:
            runs = [self.run_layers(name, layers, x, Pass(at, cache), finish) for x, at in pieces]
            return torch.cat(runs, dim=1)
        extra = bucket(L) - L
        if extra:
            x = F.pad(x, (0, 0, 0, extra))
            positions = F.pad(positions, (0, extra), value=cache.trash)

        def run(x: Tensor, positions: Tensor) -> Tensor:
            flat, shared = x.reshape(-1, E).clone(), self.step_frame(positions, cache)
            for i in layers:
                self.layers[i].run(flat, shared, cache.k[i], cache.v[i])
            return finish(flat).view(x.shape)

        return self.graphs((name, *address(cache)), run, x, positions)[:, :L]

    def lower(self, x: Tensor, frame: Pass) -> Tensor:
        """As `Engine.lower`."""
        if not x.is_floating_point():
            x = self.backbone.model.embed_tokens(x)
        return self.run_layers("lower", range(self.config.inject_after), x, frame)

    def middle(self, x: Tensor, frame: Pass) -> Tensor:
        """As `Engine.middle`."""
        layers = range(self.config.inject_after, self.config.extract_after)
        return self.run_layers("middle", layers, x, frame)

    def upper(self, h: Tensor, frame: Pass) -> Tensor:
        """As `Engine.upper`."""
        layers = range(self.config.extract_after, len(self.layers))
        return self.run_layers("upper", layers, h, frame, self.backbone.model.norm)

    def next_ids(self, out: Tensor) -> Tensor:
        """As `Engine.next_ids`."""
        return self.model.next_ids(out)

    # -- thoughts and states -----------------------------------------------------------------------

    def think(self, h: Tensor, limit: int, scripts: Scripts = ()) -> list[Thought]:
        """As `Engine.think`; rows are padded to the next bucket."""
        (N, c, _), end, rows = h.shape, self.config.thought_end, bucket(len(h))
        cache = self.new_cache(rows, c + limit, layers=1)
        like = torch.empty(2, rows, dtype=torch.long, device=self.device)
        tokens, positions = self.static("think", cache, *like)  # [rows] each

        def begin(h: Tensor) -> Tensor:
            return self.say(h, in_order(rows, c, h.device).contiguous(), cache)

        def go_on(tokens: Tensor, positions: Tensor) -> None:
            x = self.backbone.model.embed_tokens(tokens)[:, None]  # [rows, 1, E]
            tokens.copy_(self.say(x, positions[:, None], cache))
            positions += 1

        padded = F.pad(h, (0, 0, 0, 0, 0, rows - N))
        tokens.copy_(self.graphs(("begin", *address(cache)), begin, padded))
        positions.fill_(c)
        said: list[list[int]] = [[] for _ in range(N)]
        while True:
            forced = False
            for ids, token, script in zip(said, tokens[:N].tolist(), scripts or [None] * N):
                ids.append(script[len(ids)] if script and len(ids) < len(script) else token)
                forced |= ids[-1] != token
            if len(said[0]) == limit or all(end in ids for ids in said):
                return [closed(ids, end) for ids in said]
            if forced:
                tokens[:N] = on_device([ids[-1] for ids in said], self.device)
            self.graphs.change(("think", *address(cache)), go_on, tokens, positions)

    def say(self, x: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """T on x [rows, L, E] at `positions` [rows, L]: the ids [rows] picked after the last."""
        T, flat = self.model.thinking_block, x.reshape(-1, x.shape[-1]).clone()
        self.t_layer.run(flat, self.step_frame(positions, cache), cache.k[0], cache.v[0])
        return self.model.pick(T.lm_head(T.norm(flat.view(x.shape)[:, -1])))

    def states(self, thoughts: Sequence[Sequence[int]]) -> Tensor:
        """As `Engine.states`; C runs over the non-trivial thoughts alone."""
        c, E = self.config.chunk_size, self.backbone.config.hidden_size
        states = self.backbone.lm_head.weight.new_zeros(len(thoughts), c, E)
        full = [i for i, ids in enumerate(thoughts) if len(ids) > 1]
        if full:
            lengths = [len(thoughts[i]) for i in full]
            width = bucket(max(c, *lengths))
            ids = pad([thoughts[i] for i in full], self.config.pad_id, width, self.device)
            at = on_device(full, self.device)
            states[at] = self.compress(ids, on_device(lengths, self.device))
        return states

    def compress(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """As `ThinkingStates.compress`, for thoughts that are not trivial."""
        (N, width), rows = ids.shape, bucket(len(ids))
        cache = self.new_cache(rows, width, layers=1)

        def run(ids: Tensor, lengths: Tensor) -> Tensor:
            positions = in_order(rows, width, ids.device).contiguous()
            flat = self.backbone.model.embed_tokens(ids).flatten(0, 1)
            self.c_layer.run(flat, self.step_frame(positions, cache), cache.k[0], cache.v[0])
            return self.model.last_outputs(flat.view(rows, width, -1), lengths)

        ids = F.pad(ids, (0, 0, 0, rows - N), value=self.config.pad_id)
        lengths = F.pad(lengths, (0, rows - N))
        return self.graphs(("compress", *address(cache)), run, ids, lengths)[:N]

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
        """As `Engine.read_tokens`; a step is one graph, which leaves all as the next one needs it.

        So the host launches and does not wait.
        """
        config, model = self.config, self.backbone

        def run(tokens: Tensor, positions: Tensor, state: Tensor, open_h: Tensor) -> None:
            rows, places = torch.arange(len(tokens), device=self.device), positions % state.shape[1]
            frame = self.step_frame(positions[:, None], cache)
            x = model.model.embed_tokens(tokens)  # [B, E]
            for i in range(len(self.layers) + 1):
                if i == config.inject_after:
                    x += state[rows, places]  # X + S
                if i == config.extract_after:
                    open_h[rows, places] = x  # H
                if i < len(self.layers):
                    self.layers[i].run(x, frame, cache.k[i], cache.v[i])
            tokens.copy_(self.next_ids(model.model.norm(x)))
            positions += positions != cache.trash

        given = (tokens, positions, state, open_h)
        buffers = self.static("read", cache, *given)
        for buffer, value in zip(buffers, given):
            buffer.copy_(value)
        picked = []
        for _ in range(steps):
            self.graphs.change(("read", *address(cache), state.shape), run, *buffers)
            picked.append(buffers[0].clone())
        open_h.copy_(buffers[3])
        return torch.stack(picked)
