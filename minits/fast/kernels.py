"""Triton kernels: what a decoder layer does between its products and, for one token, in them.

Places in tensors are counted in 64 bits wherever a wide batch could pass 2^31.
"""
import triton
import triton.language as tl


@triton.jit
def rope_and_store(
    qkv,  # [tokens, Q + 2 G, D]
    table,  # [2, places, D]: cosines; sines, a head's first half negated
    positions,  # [tokens]
    q_out,  # [B, G, Q/G * L, D]: the query heads of a group folded into time
    k_cache,  # [B, G, P + 1, D]
    v_cache,
    L,
    P1,  # P + 1
    places,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One head of one token: rotates q and k, puts q where attention reads it, k and v in slots."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, D // 2)
    at = tl.load(positions + token)
    source = qkv + (token * (Q + 2 * G) + head) * D
    a = tl.load(source + half).to(WIDE)
    b = tl.load(source + D // 2 + half).to(WIDE)
    if head < Q + G:
        cos = tl.load(table + at * D + half).to(WIDE)
        sin = tl.load(table + (places + at) * D + D // 2 + half).to(WIDE)
        a, b = a * cos - b * sin, b * cos + a * sin
    row, t = token // L, token % L
    folds = Q // G
    if head < Q:
        target = q_out + (((row * G + head // folds) * folds + head % folds) * L + t) * D
    elif head < Q + G:
        target = k_cache + ((row * G + head - Q) * P1 + at) * D
    else:
        target = v_cache + ((row * G + head - Q - G) * P1 + at) * D
    tl.store(target + half, a.to(qkv.dtype.element_ty))
    tl.store(target + D // 2 + half, b.to(qkv.dtype.element_ty))


@triton.jit
def silu_times(gate_up, out, size, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """out = silu(gate) * up for gate_up [tokens, 2 * size]."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    gate = tl.load(gate_up + token * 2 * size + at, real, 0.0).to(WIDE)
    up = tl.load(gate_up + token * 2 * size + size + at, real, 0.0).to(WIDE)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * size + at, product.to(out.dtype.element_ty), real)


@triton.jit
def matvec(
    x,  # [width]
    norm,  # [width]: weight of the RMSNorm that x goes through first
    weight,  # [size, width]; gated: [2 * size, width], gates above ups
    bias,  # [size]
    residual,  # [size], added
    out,  # [size]
    size,
    width,
    eps,
    NORM: tl.constexpr,  # whether there is a norm, a bias, …
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,  # out = silu(gate) * up
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """ROWS entries of weight @ x, for one token: bound by reading the weights once.

    Every program norms x again: width numbers, all in the processor's cache.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < size
    squares = tl.zeros([BLOCK], WIDE)
    sums = tl.zeros([ROWS, BLOCK], WIDE)  # added up along width at the very end
    up_sums = tl.zeros([ROWS, BLOCK], WIDE)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < width
        both = valid[:, None] & inside[None, :]
        tile = tl.load(weight + row[:, None] * width + k[None, :], both, 0.0)
        if GATED:
            up_tile = tl.load(weight + (size + row)[:, None] * width + k[None, :], both, 0.0)
        part = tl.load(x + k, inside, 0.0).to(WIDE)
        if NORM:
            squares += part * part
            part = part * tl.load(norm + k, inside, 0.0).to(WIDE)
        sums += tile.to(WIDE) * part[None, :]
        if GATED:
            up_sums += up_tile.to(WIDE) * part[None, :]
    total, ups = tl.sum(sums, axis=1), tl.sum(up_sums, axis=1)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)
        total, ups = total * scale, ups * scale
    if BIAS:
        total += tl.load(bias + row, valid, 0.0).to(WIDE)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * ups
    if RESIDUAL:
        total += tl.load(residual + row, valid, 0.0).to(WIDE)
    tl.store(out + row, total.to(out.dtype.element_ty), valid)


@triton.jit
def decode_attention(
    qkv,  # [B, Q + 2 G, D]
    table,  # as for rope_and_store
    positions,  # [B]
    k_cache,  # [B, G, P + 1, D]
    v_cache,
    out,  # [B, Q, D]
    P1,  # P + 1
    places,
    window,
    scale,
    SLIDING: tl.constexpr,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One new token a row, a program for a row and kv head: rotates, stores k and v, attends.

    Needs Q / G <= 16 and D >= 16, for the products are matrix instructions on 16 heads. Reads the
    slots before the token's position (and within `window` of it); its own key and value come from
    registers, so no store is waited for.
    """
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    folds: tl.constexpr = Q // G
    kind = k_cache.dtype.element_ty
    d, head = tl.arange(0, D), tl.arange(0, 16)
    other = (d + D // 2) % D  # the partner of each entry in the half-split rotation
    at = tl.load(positions + row)
    cos = tl.load(table + at * D + d).to(tl.float32)
    sin = tl.load(table + (places + at) * D + d).to(tl.float32)
    base = qkv + row * (Q + 2 * G) * D
    k_row, v_row = k_cache + (row * G + g) * P1 * D, v_cache + (row * G + g) * P1 * D

    k_new = tl.load(base + (Q + g) * D + d).to(tl.float32) * cos
    k_new += tl.load(base + (Q + g) * D + other).to(tl.float32) * sin
    k_new, v_new = k_new.to(kind), tl.load(base + (Q + G + g) * D + d)
    tl.store(k_row + at * D + d, k_new)
    tl.store(v_row + at * D + d, v_new)

    real = (head < folds)[:, None]
    q_at = base + (g * folds + head)[:, None] * D
    q = tl.load(q_at + d[None, :], real, 0.0).to(tl.float32) * cos[None, :]
    q += tl.load(q_at + other[None, :], real, 0.0).to(tl.float32) * sin[None, :]
    q = q.to(kind)
    # The token's own score; the running maximum, weight and sum of the softmax begin with it.
    top = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1) * scale
    weight = tl.full([16], 1.0, tl.float32)
    total = tl.zeros([16, D], tl.float32) + v_new.to(tl.float32)[None, :]
    first = tl.maximum(at - window + 1, 0) // BLOCK * BLOCK if SLIDING else 0
    for start in range(first, at, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        before = slot < at
        seen = before & (slot > at - window) if SLIDING else before
        k = tl.load(k_row + slot[None, :] * D + d[:, None], before[None, :], 0.0)  # [D, BLOCK]
        v = tl.load(v_row + slot[:, None] * D + d[None, :], before[:, None], 0.0)  # [BLOCK, D]
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        fade, part = tl.exp(top - higher), tl.exp(scores - higher[:, None])
        total = total * fade[:, None] + tl.dot(part.to(kind), v, input_precision="ieee")
        weight = weight * fade + tl.sum(part, axis=1)
        top = higher
    target = out + (row * Q + g * folds + head)[:, None] * D + d[None, :]
    tl.store(target, (total / weight[:, None]).to(kind), real)


@triton.jit
def cross_entropy(logits, labels, losses, V, BLOCK: tl.constexpr):
    """One row of logits [N, V]: its loss, and the gradient in the logits' place.

    A negative label counts nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    at, real = logits + row * V, label >= 0
    # Read long before any thread writes there.
    picked = tl.load(at + tl.where(real, label, 0)).to(tl.float32)
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
