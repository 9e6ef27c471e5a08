"""Coconut, chain of continuous thought (Hao et al. 2024): hidden states are fed back as inputs.

    prompt  begin │  h₁   h₂   h₃  end │ answer       one pass over the prompt, one over each latent
              └────────┘└───┘└───┘                    but the last, which is read with what follows

A latent is the final normed vector of the token before it. Gradients flow back through all of them,
over the cache: a latent costs a token's pass, and nothing is read twice. Rows are padded on the
right in each of the passes; what stands in a padded place is overwritten by the row's next token,
whose position it is, or lies past the row's end, where only padding sees it.
"""
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from minits.cache import DifferentiableKVCache
from minits.fast.cross_entropy import cross_entropy_sum
from minits.fast.flat_batch import FoldedFrame, Tensors
from minits.fast.layouts import BucketedSizes, ExactSizes
from minits.generation import GenerationConfig, prefill
from minits.methods.pause import Pause, latents_of
from minits.prefill import NOTHING, Reading
from minits.qwen import Frame, Qwen2ForCausalLM
from minits.supervision import Row
from minits.teacher_forcing import Losses
from minits.tensors import IGNORED, in_order, on_device, pad
from minits.thinking import Engine, ThinkingConfig, ThinkingStates


@dataclass(frozen=True)
class LatentBatch(Tensors):
    """B rows with k latents each."""

    ids: Tensor  # [B, P] prompts, `begin` included
    lengths: Tensor  # [B] their tokens
    latents: Tensor  # [B, k] zeros, which are not read: the shape says how many latents there are
    rest: Tensor  # [B, R] `end` and what follows it, but for the last token
    labels: Tensor  # [B, R] the token after each, IGNORED past the row's end

    @property
    def counts(self) -> Tensor:
        """As `FlatBatch.counts`; there are no thoughts."""
        used = (self.labels != IGNORED).sum()
        return torch.stack([used, torch.zeros_like(used)])


class LatentCache(DifferentiableKVCache):
    """One whose dtype may be narrower than that of the keys, which autocast leaves in float32."""

    def write(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> None:
        kind = self.k[layer].dtype
        super().write(layer, k.to(kind), v.to(kind), positions)


class LatentFrame(Frame):
    """The frame of a pass over tokens at `positions` [B, L] that sees all of the cache behind it.

    Its span is known without a look at the device, so the pass fits into a CUDA graph.
    """

    def __init__(
        self, backbone: Qwen2ForCausalLM, positions: Tensor, cache: LatentCache
    ) -> None:
        config, dtype = backbone.config, backbone.model.embed_tokens.weight.dtype
        table = backbone.rotary.table(cache.slots, dtype, positions.device)
        super().__init__(config, positions, table, cache, cache.slots)
        folds = config.num_attention_heads // config.num_key_value_heads
        if config.sliding_layers:  # first, for it is made of `full`
            self.sliding = self.sliding.repeat(1, 1, folds, 1)
        self.full = self.full.repeat(1, 1, folds, 1)  # [B, 1, Q/G * L, span]

    attend = FoldedFrame.attend  # which wants masks folded like these


@dataclass(frozen=True)
class Coconut(Pause):
    """The pause tokens give way to hidden states."""

    name: ClassVar = "coconut"
    title: ClassVar = "Coconut"
    has_states: ClassVar = True
    layouts: ClassVar = ("rows",)

    def collate(
        self,
        rows: Sequence[Row],
        config: ThinkingConfig,
        *,
        sizes: ExactSizes = ExactSizes(),
        **_how: Any,  # layout and row_tokens: there is but one layout
    ) -> LatentBatch:
        k = latents_of(rows[0].ids[: rows[0].prompt_length])
        prompts = [row.ids[: row.prompt_length - 1 - k] for row in rows]
        rest = [row.ids[row.prompt_length - 1 :] for row in rows]
        P = sizes.width(max(map(len, prompts)), 1)
        R = sizes.size(P, "rest", max(map(len, rest)) - 1, step=8)
        return LatentBatch(
            ids=pad(prompts, config.pad_id, P),
            lengths=torch.tensor([len(prompt) for prompt in prompts]),
            latents=torch.zeros(len(rows), k),
            rest=pad([ids[:-1] for ids in rest], config.pad_id, R),
            labels=pad([ids[1:] for ids in rest], IGNORED, R),
        )

    def losses(self, model: ThinkingStates, batch: LatentBatch) -> Losses:
        """The summed cross-entropy of what follows `end`, differentiable through all latents."""
        (B, P), k, R = batch.ids.shape, batch.latents.shape[1], batch.rest.shape[1]
        backbone, device = model.backbone, batch.ids.device
        net, config = backbone.model, backbone.config
        embedded = net.embed_tokens(torch.cat([batch.ids, batch.rest], dim=1))
        prompt, rest = embedded.split([P, R], dim=1)
        casts = torch.is_autocast_enabled(device.type)
        slots = BucketedSizes().width(P + k + R, 1)  # a span at which gradients are finite
        # One for each layer, so that all layers look alike to --compile: with a common one it would
        # compile each layer's place in it anew, and give up after eight.
        caches = [
            LatentCache(
                1,
                B,
                config.num_key_value_heads,
                slots,
                config.head_dim,
                dtype=torch.get_autocast_dtype(device.type) if casts else embedded.dtype,
                device=device,
            )
            for _ in net.layers
        ]

        def read(x: Tensor, starts: Tensor) -> Tensor:
            """x [B, L, E] from positions `starts` [B, 1] on -> final normed vectors [B, L, E]."""
            frame = LatentFrame(backbone, starts + in_order(*x.shape[:2], device), caches[0])
            x = x.contiguous()  # as what a layer gives: the first one needs no graph of its own
            for layer, cache in zip(net.layers, caches):
                frame.cache = cache
                x = layer(x, frame)
            return net.norm(x)

        lengths = batch.lengths[:, None]  # [B, 1]
        out = read(prompt, torch.zeros_like(lengths))
        vector = out[torch.arange(B, device=device)[:, None], lengths - 1]  # [B, 1, E]
        for number in range(k - 1):
            vector = read(vector, lengths + number)
        x = torch.cat([vector, rest], dim=1) if k else rest
        out = read(x, lengths + max(k - 1, 0))[:, -R:]
        lm = cross_entropy_sum(out.flatten(0, 1), backbone.lm_head.weight, batch.labels.flatten())
        return Losses(lm, torch.zeros_like(lm), *batch.counts)

    @torch.no_grad()
    def read(
        self, engine: Engine, prompts: Sequence[Sequence[int]], config: GenerationConfig
    ) -> Reading:
        k, device = latents_of(prompts[0]), engine.device
        # The hook is for latents alone; they and `end` need room in the cache.
        room = replace(config, max_new_tokens=config.max_new_tokens + k + 1, hook=NOTHING)
        reading = prefill(engine, [ids[: len(ids) - 1 - k] for ids in prompts], room)
        ends = on_device([ids[-1:] for ids in prompts], device)  # [B, 1]
        for number in range(k or 1):
            parts = []
            if k:
                places = [(row, number) for row in range(len(prompts))]
                parts.append(config.hook.states(places, reading.out[:, None]))
            if number >= k - 1:  # `end` is read with the last latent
                parts.append(engine.backbone.model.embed_tokens(ends))
            x = torch.cat(parts, dim=1)  # [B, 1 or 2, E]
            starts = on_device(reading.lengths, device)[:, None]
            positions = starts + torch.arange(x.shape[1], device=device)
            frame = engine.frame(positions, reading.cache)
            h = engine.middle(engine.lower(x, frame), frame)
            reading.out = engine.upper(h, frame)[:, -1]
            reading.lengths = [length + x.shape[1] for length in reading.lengths]
        return reading
