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
        cos, sin = tl.load(table + at * D + half).to(WIDE), tl.load(table + (P + at) * D + half).to(WIDE)
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
    GATED: weight is [2 * size, K], gates above ups, and out = silu(gate) * up. RESIDUAL: adds to what `out` holds.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros([BLOCK], WIDE)
    total, ups = tl.zeros([ROWS], WIDE), tl.zeros([ROWS], WIDE)
    valid = row < size
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < K
        part = tl.load(x + k, inside, 0.0).to(WIDE)
        if NORM:
            squares += part * part
            part = part * tl.load(norm + k, inside, 0.0).to(WIDE)
        where = valid[:, None] & inside[None, :]
        total += tl.sum(tl.load(weight + row[:, None] * K + k[None, :], where, 0.0).to(WIDE) * part[None, :], axis=1)
        if GATED:
            ups += tl.sum(tl.load(weight + (size + row)[:, None] * K + k[None, :], where, 0.0).to(WIDE) * part[None, :],
                          axis=1)
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
                     H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
                     WIDE: tl.constexpr):
    """One new token a row, one program for a row and kv head: rotates, stores k and v, attends for all its q heads.

    HEADS is H / G rounded up to a power of two. Reads the slots before the token's position (and within `window` of
    it); the token's own key and value come from registers, so nothing waits for the store.
    """
    row, g = tl.program_id(0), tl.program_id(1)
    folds: tl.constexpr = H // G
    half, wide = tl.arange(0, D // 2), tl.arange(0, D)
    at = tl.load(positions + row)
    base = qkv + row * (H + 2 * G) * D
    cos, sin = tl.load(table + at * D + half).to(WIDE), tl.load(table + (P + at) * D + half).to(WIDE)
    ka = tl.load(base + (H + g) * D + half).to(WIDE)
    kb = tl.load(base + (H + g) * D + D // 2 + half).to(WIDE)
    ka, kb = ka * cos - kb * sin, kb * cos + ka * sin
    v_new = tl.load(base + (H + G + g) * D + wide)
    kind = k_cache.dtype.element_ty
    k_row, v_row = k_cache + (row * G + g) * S * D, v_cache + (row * G + g) * S * D
    tl.store(k_row + at * D + half, ka.to(kind))
    tl.store(k_row + at * D + D // 2 + half, kb.to(kind))
    tl.store(v_row + at * D + wide, v_new)
    head = tl.arange(0, HEADS)
    real = (head < folds)[:, None]
    q = base + (g * folds + head)[:, None] * D
    qa, qb = tl.load(q + half[None, :], real, 0.0).to(WIDE), tl.load(q + D // 2 + half[None, :], real, 0.0).to(WIDE)
    qa, qb = qa * cos[None, :] - qb * sin[None, :], qb * cos[None, :] + qa * sin[None, :]
    qa, qb = qa.to(kind).to(WIDE), qb.to(kind).to(WIDE)  # as stored by the step for many tokens
    ka, kb = ka.to(kind).to(WIDE), kb.to(kind).to(WIDE)
    top = tl.sum(qa * ka[None, :] + qb * kb[None, :], axis=1) * scale  # [HEADS], the token's own score
    weight = tl.full([HEADS], 1.0, WIDE)
    total = tl.zeros([HEADS, D], WIDE) + v_new.to(WIDE)[None, :]
    first = tl.maximum(at - window + 1, 0) // BLOCK * BLOCK if SLIDING else 0
    for start in range(first, at, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        seen = slot < at
        if SLIDING:
            seen = seen & (slot > at - window)
        k = k_row + slot[:, None] * D
        old_a = tl.load(k + half[None, :], seen[:, None], 0.0).to(WIDE)
        old_b = tl.load(k + D // 2 + half[None, :], seen[:, None], 0.0).to(WIDE)
        scores = tl.sum(qa[:, None, :] * old_a[None, :, :] + qb[:, None, :] * old_b[None, :, :], axis=2) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))  # [HEADS, BLOCK]
        higher = tl.maximum(top, tl.max(scores, axis=1))
        fade, part = tl.exp(top - higher), tl.exp(scores - higher[:, None])
        old_v = tl.load(v_row + slot[:, None] * D + wide[None, :], seen[:, None], 0.0).to(WIDE)
        total = total * fade[:, None] + tl.sum(part[:, :, None] * old_v[None, :, :], axis=1)
        weight = weight * fade + tl.sum(part, axis=1)
        top = higher
    result = (total / weight[:, None]).to(kind)
    tl.store(out + (row * H + g * folds + head)[:, None] * D + wide[None, :], result, real)
