"""A decoder layer for inference on CUDA: five kernels for a single token, about ten for more.

The layer in qwen.py is the definition. Needs triton.
"""
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from minits.fast.kernels import decode_attention, matvec, rope_and_store, silu_times
from minits.qwen import DecoderLayer, QwenConfig


class StepFrame:
    """What the layers of one step share, as `Frame` does for the plain layers.

    positions: [B, L]. table: [2, places, D] of rotary cosines and sines in the weights' dtype.
    Masks are made when they are first asked for.
    """

    def __init__(self, config: QwenConfig, positions: Tensor, table: Tensor, slots: int) -> None:
        self.positions, self.table, self.slots = positions, table, slots
        self.window = config.sliding_window
        self.folds = config.num_attention_heads // config.num_key_value_heads
        self.masks: dict[bool, Tensor] = {}

    def mask(self, slides: bool) -> Tensor:
        """The additive mask [B, 1, Q/G * L, P].

        In the table's dtype, which spares attention a conversion in every layer.
        """
        if slides not in self.masks:
            at = torch.arange(self.slots, device=self.positions.device)
            seen = at <= self.positions[..., None]  # [B, L, P]
            if slides:
                seen &= at > self.positions[..., None] - self.window
            additive = torch.zeros_like(seen, dtype=self.table.dtype)
            additive.masked_fill_(~seen, -torch.inf)
            self.masks[slides] = additive.repeat(1, self.folds, 1)[:, None]
        return self.masks[slides]


class PackedLayer:
    """A decoder layer with q/k/v and gate/up as one product each."""

    def __init__(self, layer: DecoderLayer, config: QwenConfig) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.slides = layer, layer.slides
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv, self.bias = join(projections, "weight"), join(projections, "bias")
        self.gate_up = join([mlp.gate_proj, mlp.up_proj], "weight")
        # The type of sums within kernels.
        self.wide = tl.float64 if self.qkv.dtype == torch.float64 else tl.float32
        # What decode_attention is made for; every real Qwen2.5 fits.
        self.one_kernel = (
            self.wide is tl.float32
            and self.heads // self.kv_heads <= 16
            and self.head_dim in (16, 32, 64, 128)
        )

    def run(self, x: Tensor, frame: StepFrame, k: Tensor, v: Tensor) -> None:
        """Adds the layer's work to x [B * L, E] in place; k, v [B, G, P + 1, D]: its cache."""
        layer = self.layer
        qkv = self.product(x, self.qkv, norm=layer.input_layernorm, bias=self.bias)
        one = frame.positions.shape[1] == 1 and self.one_kernel
        attend = self.attend_one if one else self.attend
        self.product(attend(qkv, frame, k, v), layer.self_attn.o_proj.weight, into=x)
        hidden = self.product(x, self.gate_up, norm=layer.post_attention_layernorm, gated=True)
        self.product(hidden, layer.mlp.down_proj.weight, into=x)

    def product(
        self,
        x: Tensor,  # [N, width]
        weight: Tensor,  # [size, width]; gated: [2 * size, width], gates above ups
        *,
        norm: nn.Module | None = None,  # applied to x first
        bias: Tensor | None = None,
        gated: bool = False,  # silu(gate) * up
        into: Tensor | None = None,  # the product is added to it
    ) -> Tensor:
        """norm(x) @ weight.T and what belongs to it: one kernel for N = 1, cuBLAS else."""
        (N, width), size = x.shape, len(weight) // 2 if gated else len(weight)
        out = x.new_empty(N, size) if into is None else into
        if N == 1:
            rows = 2 if size < 2048 else 4
            grid = (triton.cdiv(size, rows),)
            block = min(triton.next_power_of_2(width), 1024)
            # A tensor that is not used must be something all the same: x stands in for it.
            matvec[grid](
                x, norm.weight if norm else x, weight, x if bias is None else bias, out, out,
                size, width, norm.eps if norm else 0.0, norm is not None, bias is not None,
                into is not None, gated, rows, block, self.wide, num_warps=4,
            )
            return out
        if norm:
            x = F.rms_norm(x, x.shape[1:], norm.weight, norm.eps)
        if into is not None:
            return into.addmm_(x, weight.T)
        if not gated:
            return torch.addmm(bias, x, weight.T)
        silu_times[(N, triton.cdiv(size, 1024))](x @ weight.T, out, size, 1024, self.wide)
        return out

    def attend(self, qkv: Tensor, frame: StepFrame, k: Tensor, v: Tensor) -> Tensor:
        """qkv [B * L, (Q + 2 G) D] -> [B * L, Q D]; writes the new keys and values."""
        (B, L), Q, G, D = frame.positions.shape, self.heads, self.kv_heads, self.head_dim
        q = qkv.new_empty(B, G, Q // G * L, D)
        rope_and_store[(B * L, Q + 2 * G)](
            qkv, frame.table, frame.positions, q, k, v, L, k.shape[2], frame.table.shape[1],
            Q, G, D, self.wide, num_warps=1,
        )
        mask = frame.mask(self.slides)
        P = mask.shape[-1]
        out = F.scaled_dot_product_attention(q, k[:, :, :P], v[:, :, :P], attn_mask=mask)
        return out.reshape(B, Q, L, D).transpose(1, 2).reshape(B * L, -1)

    def attend_one(self, qkv: Tensor, frame: StepFrame, k: Tensor, v: Tensor) -> Tensor:
        """The same for one new token a row, in one kernel."""
        B, Q, G, D = len(qkv), self.heads, self.kv_heads, self.head_dim
        out = qkv.new_empty(B, Q * D)
        decode_attention[(B, G)](
            qkv, frame.table, frame.positions, k, v, out, k.shape[2], frame.table.shape[1],
            frame.window or 0, D**-0.5, self.slides, Q, G, D, 64, num_warps=4,
        )
        return out


def join(modules: Sequence[nn.Linear], name: str) -> Tensor:
    """The parameters called `name` as one tensor, of which they become views: no memory twice.

    The last thing to do with a model: it can be neither trained, cast nor moved afterwards.
    """
    whole = torch.cat([getattr(module, name).detach() for module in modules])
    start = 0
    for module in modules:
        end = start + len(getattr(module, name))
        setattr(module, name, nn.Parameter(whole[start:end], requires_grad=False))
        start = end
    return whole
