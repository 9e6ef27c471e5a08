"""Triton kernels of the fast path (fast.py): what a decoder layer does between and, for a single token, in its products."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope_and_store(qkv, table, positions, q_out, k_cache, v_cache, T, S, P, H: tl.constexpr, G: tl.constexpr,
                   D: tl.constexpr, WIDE: tl.constexpr):
    """One head of one token: rotates q and k, puts q where attention reads it and k, v into their cache slots."""
    token, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, D // 2)
    at = tl.load(positions + token)
    source = qkv + (token * (H + 2 * G) + head) * D
    a, b = tl.load(source + half).to(WIDE), tl.load(source + D // 2 + half).to(WIDE)
    if head < H + G:
        cos, sin = tl.load(table + at * D + half).to(WIDE), tl.load(table + (P + at) * D + D // 2 + half).to(WIDE)
        a, b = a * cos - b * sin, b * cos + a * sin
    row, t = token // T, token % T
    folds = H // G
    if head < H:  # q is [B, G, H/G * T, D]: the heads of a group folded into time
        target = q_out + (((row * G + head // folds) * folds + head % folds) * T + t) * D
    elif head < H + G:
        target = k_cache + ((row * G + head - H) * S + at) * D
    else:
        target = v_cache + ((row * G + head - H - G) * S + at) * D
    tl.store(target + half, a.to(qkv.dtype.element_ty))
    tl.store(target + D // 2 + half, b.to(qkv.dtype.element_ty))


@triton.jit
def silu_times(gate_up, out, size, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """out = silu(gate) * up for gate_up [tokens, 2 * size]."""
    token, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + token * 2 * size + at, at < size, 0.0).to(WIDE)
    up = tl.load(gate_up + token * 2 * size + size + at, at < size, 0.0).to(WIDE)
    tl.store(out + token * size + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), at < size)


@triton.jit
def matvec(x, norm, weight, bias, residual, out, size, K, eps, NORM: tl.constexpr, BIAS: tl.constexpr,
           RESIDUAL: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """ROWS entries of out [size] = weight [size, K] @ x [K], for one token: bound by reading the weights once.

    NORM: x goes through RMSNorm with weight `norm` first (every program does it again: K numbers, all in cache).
    GATED: weight is [2 * size, K], gates above ups, and out = silu(gate) * up. RESIDUAL: adds `residual` [size].
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < size
    squares = tl.zeros([BLOCK], WIDE)
    sums, up_sums = tl.zeros([ROWS, BLOCK], WIDE), tl.zeros([ROWS, BLOCK], WIDE)  # added up along K at the very end
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < K
        both = valid[:, None] & inside[None, :]
        tile = tl.load(weight + row[:, None] * K + k[None, :], both, 0.0)
        if GATED:
            up_tile = tl.load(weight + (size + row)[:, None] * K + k[None, :], both, 0.0)
        part = tl.load(x + k, inside, 0.0).to(WIDE)
        if NORM:
            squares += part * part
            part = part * tl.load(norm + k, inside, 0.0).to(WIDE)
        sums += tile.to(WIDE) * part[None, :]
        if GATED:
            up_sums += up_tile.to(WIDE) * part[None, :]
    total, ups = tl.sum(sums, axis=1), tl.sum(up_sums, axis=1)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + eps)
        total, ups = total * scale, ups * scale
    if BIAS:
        total += tl.load(bias + row, valid, 0.0).to(WIDE)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * ups
    if RESIDUAL:
        total += tl.load(residual + row, valid, 0.0).to(WIDE)
    tl.store(out + row, total.to(out.dtype.element_ty), valid)


@triton.jit
def decode_attention(qkv, table, positions, k_cache, v_cache, out, S, P, window, scale, SLIDING: tl.constexpr,
                     H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """One new token a row, one program for a row and kv head: rotates, stores k and v, attends for all its q heads.

    Needs H / G <= 16 and D >= 16, for the products are matrix instructions on 16 heads. Reads the slots before the
    token's position (and within `window` of it); its own key and value come from registers, so no store is waited for.
    """
    row, g = tl.program_id(0), tl.program_id(1)
    folds: tl.constexpr = H // G
    d, head = tl.arange(0, D), tl.arange(0, 16)
    other = (d + D // 2) % D  # the partner of each entry in the half-split rotation
    at = tl.load(positions + row)
    cos, sin = tl.load(table + at * D + d).to(tl.float32), tl.load(table + (P + at) * D + d).to(tl.float32)
    base = qkv + row * (H + 2 * G) * D
    kind = k_cache.dtype.element_ty
    k_row, v_row = k_cache + (row * G + g) * S * D, v_cache + (row * G + g) * S * D
    k_new = tl.load(base + (H + g) * D + d).to(tl.float32) * cos + tl.load(base + (H + g) * D + other).to(tl.float32) * sin
    k_new, v_new = k_new.to(kind), tl.load(base + (H + G + g) * D + d)
    tl.store(k_row + at * D + d, k_new)
    tl.store(v_row + at * D + d, v_new)
    real = (head < folds)[:, None]
    q_at = base + (g * folds + head)[:, None] * D
    q = (tl.load(q_at + d[None, :], real, 0.0).to(tl.float32) * cos[None, :]
         + tl.load(q_at + other[None, :], real, 0.0).to(tl.float32) * sin[None, :]).to(kind)
    top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * scale  # [16], the token's own score
    weight = tl.full([16], 1.0, tl.float32)
    total = tl.zeros([16, D], tl.float32) + v_new.to(tl.float32)[None, :]
    first = tl.maximum(at - window + 1, 0) // BLOCK * BLOCK if SLIDING else 0
    for start in range(first, at, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        seen = slot < at
        if SLIDING:
            seen = seen & (slot > at - window)
        k = tl.load(k_row + slot[None, :] * D + d[:, None], (slot < at)[None, :], 0.0)  # [D, BLOCK]
        v = tl.load(v_row + slot[:, None] * D + d[None, :], (slot < at)[:, None], 0.0)  # [BLOCK, D]
        scores = tl.where(seen[None, :], tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        fade, part = tl.exp(top - higher), tl.exp(scores - higher[:, None])
        total = total * fade[:, None] + tl.dot(part.to(kind), v, input_precision="ieee")
        weight = weight * fade + tl.sum(part, axis=1)
        top = higher
    tl.store(out + (row * H + g * folds + head)[:, None] * D + d[None, :], (total / weight[:, None]).to(kind), real)


@triton.jit
def cross_entropy(logits, labels, losses, V, BLOCK: tl.constexpr):
    """One row of logits [M, V]: its loss against its label (negative: none), and the gradient in the logits' place."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    at, real = logits + row * V, label >= 0
    picked = tl.load(at + tl.where(real, label, 0)).to(tl.float32)  # long before any thread writes there
    top, total = float("-inf"), 0.0
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(at + k, k < V, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
        top = higher
    tl.store(losses + row, tl.where(real, tl.log(total) + top - picked, 0.0))
    scale = tl.where(real, 1.0 / total, 0.0)
    for start in range(0, V, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(at + k, k < V, float("-inf")).to(tl.float32)
        gradient = tl.exp(x - top) * scale - tl.where(real & (k == label), 1.0, 0.0)
        tl.store(at + k, gradient.to(logits.dtype.element_ty), k < V)
