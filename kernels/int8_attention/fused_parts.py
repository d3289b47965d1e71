"""Steps of the fused quantisation: loads of rows and of what belongs to them, RMSNorm and RoPE, in registers.

A pair of RoPE lies in one thread: (2j, 2j + 1) where pairs are interleaved, (j, j + R/2) where they are halves.
A tile to be turned is [4, W, R, C, 4], one to be written [4, W, R, J, E]. Four threads share a row, W rows lie in the
threads of a warp and in the warps, R in a thread. That is how a matrix product takes and leaves its rows, so that none
of them changes its thread on the way from one load to the store, if every thread has four neighbouring pairs C times,
takes them for those channels that the product wants of it, and writes side by side what the product leaves to it. The
order of channels is another one then, the same for query and key; their products don't notice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .limits import interpreting

# Triton deals the contiguous axis of a load or store to registers, the others to threads, then warps, then registers;
# since 3.7 from the last to the first.
LAST_FIRST = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7))

# What rotated fp16 values are counted in. A row over its rms and the largest weight has a norm of at most sqrt(D), the
# shift too: at D 256 and 2 the squares add up to 32768, and rows a thousandth as large still have all their int8 steps.
FP16_UNIT = tl.constexpr(2.0)
ASM = tl.constexpr(not interpreting())


@triton.jit
def _largest_weight(W, W2, D: tl.constexpr, DP: tl.constexpr, TWO: tl.constexpr):
    """Largest magnitude of the weights, 1 where they are too small to count."""
    i = tl.arange(0, DP)
    w = tl.abs(tl.load(W + i, mask=i < D, other=0).to(tl.float32))
    if TWO:
        w = tl.maximum(w, tl.abs(tl.load(W2 + i, mask=i < D, other=0).to(tl.float32)))
    most = tl.max(w, 0)
    return tl.where(most > 1e-30, most, 1.0)


@triton.jit
def _dealt(x):
    """A tile with its axes in the order in which Triton deals them to threads, warps and registers; or back."""
    if LAST_FIRST:
        x = x.permute(3, 2, 1, 0, 4)
    return x


@triton.jit
def _row_numbers(W: tl.constexpr, R: tl.constexpr):
    """[1, W, R, 1, 1]: the row of the tile that a thread has; in a product it has rows i and i + 8 of 16."""
    TWICE: tl.constexpr = 2 if R > 1 else 1
    w = tl.arange(0, W)[None, :, None, None, None]
    r = tl.arange(0, R)[None, None, :, None, None]
    return ((r // TWICE * (W // 8) + w // 8) * TWICE + r % TWICE) * 8 + w % 8


@triton.jit
def _numbers(HALF: tl.constexpr, N: tl.constexpr):
    """[4, 1, 1, C, N], dealt: what is N in a thread side by side, for N = 4 the numbers of the pairs."""
    t = _dealt(tl.arange(0, 4)[:, None, None, None, None])
    c = _dealt(tl.arange(0, HALF // 16)[None, None, None, :, None])
    return c * (4 * N) + t * N + tl.arange(0, N)[None, None, None, None, :]


@triton.jit
def _columns(j, HALF: tl.constexpr, R: tl.constexpr):
    """Channels of the first and the second of the pairs j of halves; those that RoPE leaves alone as they come."""
    if R == 2 * HALF:
        return j, j + HALF
    return tl.where(j < R // 2, j, j + R // 2), tl.where(j < R // 2, j + R // 2, j + HALF)


@triton.jit
def _load_channels(start, channel, keep, D: tl.constexpr, DP: tl.constexpr, ONCE: tl.constexpr = False):
    """Those channels of rows, 0 where not kept; all but the answer dealt.  keep: None for all rows.

    ONCE: what no program reads again, and so shall not take what others read again out of the SM's cache; keep is one
    for all then, and what is not kept is anything.
    """
    modifier: tl.constexpr = ".cg" if ONCE else ""
    if keep is not None:
        at = start + channel
        if D < DP:
            x = tl.load(at, mask=keep & (channel < D), other=0, cache_modifier=modifier)
        elif ONCE:
            x = tl.load(at, mask=tl.broadcast_to(keep, at.shape), cache_modifier=modifier)
        else:
            x = tl.load(at, mask=keep, other=0, cache_modifier=modifier)
    elif D < DP:
        x = tl.load(start + channel, mask=channel < D, other=0, cache_modifier=modifier)
    else:
        x = tl.load(start + channel, cache_modifier=modifier)
    return _dealt(x)


@triton.jit
def _load_raw(
    start, keep, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr, WORDS: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """What _pairs_of() takes apart: the channels of rows as they are loaded; the second is 0 where one holds all.

    start: pointers [1, W, R, 1, 1] to the first channel, dealt; keep: the same, or one for all, or None.  WORDS:
    whether two bf16 may be read as one word, of which a float32 of either is one instruction; Triton takes them apart
    first.
    """
    b = 0
    if WORDS:
        start = start.to(tl.pointer_type(tl.int32), bitcast=True)
    if not HALVES:
        if WORDS:
            a = _load_channels(start, _numbers(HALF, 4), keep, D // 2, HALF, ONCE)
        else:
            a = _load_channels(start, _numbers(HALF, 8), keep, D, 2 * HALF, ONCE)
    elif WORDS:
        a = _load_channels(start, _numbers(HALF, 2), keep, 1, 1, ONCE)
        b = _load_channels(start + HALF // 2, _numbers(HALF, 2), keep, 1, 1, ONCE)
    else:
        first, second = _columns(_numbers(HALF, 4), HALF, R)
        a = _load_channels(start, first, keep, D, 2 * HALF, ONCE)
        b = _load_channels(start, second, keep, D, 2 * HALF, ONCE)
    return a, b


@triton.jit
def _pairs_of(a, b, HALVES: tl.constexpr, WORDS: tl.constexpr):
    """[4, W, R, C, 4] of the first and of the second channels of the pairs, in float32, of what _load_raw() loaded."""
    if not HALVES:
        if WORDS:
            x, y = _low(a), _high(a)
        else:
            x, y = a.reshape([4, a.shape[1], a.shape[2], a.shape[3], 4, 2]).split()
    elif WORDS:
        x = tl.join(_low(a), _high(a)).reshape([4, a.shape[1], a.shape[2], a.shape[3], 4])
        y = tl.join(_low(b), _high(b)).reshape([4, b.shape[1], b.shape[2], b.shape[3], 4])
    else:
        x, y = a, b
    return x.to(tl.float32), y.to(tl.float32)


@triton.jit
def _load_pairs(
    start, keep, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr, WORDS: tl.constexpr
):
    """Both in one."""
    a, b = _load_raw(start, keep, D, HALF, R, HALVES, WORDS, False)
    return _pairs_of(a, b, HALVES, WORDS)


@triton.jit
def _low(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rows_of(X, X2, row, split, s_h, s_l, s_h2, s_l2, TWO: tl.constexpr):
    """Pointers to rows of the first head, and the step to the next head; rows from `split` on are in X2. All dealt."""
    row = row.to(tl.int64)
    start = X + row * s_l
    step = row * 0 + s_h
    if TWO:
        front = row < split
        start = tl.where(front, start, X2 + (row - split) * s_l2)
        step = tl.where(front, step, row * 0 + s_h2)
    return start, step


@triton.jit
def _weights(
    W, W2, h, row, split, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr,
    ACROSS: tl.constexpr, TWO: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """[4, W or 1, R or 1, C, 4] weights of the first and of the second channels of the pairs.

    h, row: [1, W, R, 1, 1], dealt; rows may belong to two segments with weights of their own.
    """
    at = h * D if ACROSS else tl.zeros([1, 1, 1, 1, 1], tl.int32)
    start = tl.where(row < split, W + at, W2 + at) if TWO else W + at
    return _load_pairs(start, None, D, HALF, R, HALVES, WORDS)


@triton.jit
def _angles(COS, SIN, h, row, s_h, s_l, s_j, HALF: tl.constexpr, R: tl.constexpr):
    """[4, W, R, C, 4] cosines and sines; 1 and 0 for channels that RoPE leaves alone.  h, row: dealt."""
    j = _numbers(HALF, 4)
    at = (h.to(tl.int64) * s_h + row.to(tl.int64) * s_l) + j * s_j
    if R == 2 * HALF:
        cos, sin = tl.load(COS + at), tl.load(SIN + at)
    else:
        cos = tl.load(COS + at, mask=j < R // 2, other=1.0)
        sin = tl.load(SIN + at, mask=j < R // 2, other=0.0)
    return _dealt(cos).to(tl.float32), _dealt(sin).to(tl.float32)


@triton.jit
def _summed(x):
    """Sum over the channels of a tile [4, W, R, C, ...]: [1, W, R, 1, 1]."""
    return tl.sum(tl.sum(tl.sum(x, 4), 3), 0)[None, :, :, None, None]


@triton.jit
def _squares(a, b):
    """Sum of squares over the channels of pairs. Side by side, so that they are added as they are multiplied."""
    x = tl.join(a, b).reshape([4, a.shape[1], a.shape[2], a.shape[3], 8])
    return _summed(x * x)


@triton.jit
def _product(a, b):
    """a * b of fp16, two in an instruction."""
    if ASM:
        b = tl.broadcast_to(b, a.shape)
        return tl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.float16, is_pure=True, pack=2)
    else:
        return a * b


@triton.jit
def _multiply_add(a, b, c):
    """a * b + c of fp16, two in an instruction."""
    b, c = tl.broadcast_to(b, a.shape), tl.broadcast_to(c, a.shape)
    if ASM:
        asm: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, c], tl.float16, is_pure=True, pack=2)
    else:
        return a * b + c


@triton.jit
def _turned(a, b, turn):
    """RoPE of pairs. turn: what the first gives to the first, the second to it, the first to the second, it to itself.

    (cos, sin, sin, cos), or with the weights in them.
    """
    if a.dtype == tl.float16:
        return _multiply_add(a, turn[0], -_product(b, turn[1])), _multiply_add(b, turn[3], _product(a, turn[2]))
    else:
        return a * turn[0] - b * turn[1], a * turn[2] + b * turn[3]


@triton.jit
def _as_rows(a, b, DP: tl.constexpr):
    """A tile of pairs as the rows [W * R, DP] of a matrix product, which asks each of four threads for two of eight.

    Two firsts or two seconds, which already share a register in fp16.
    """
    W: tl.constexpr = a.shape[1]
    R: tl.constexpr = a.shape[2]
    TWICE: tl.constexpr = 2 if R > 1 else 1
    x = tl.join(a, b).reshape([4, W // 8, 8, R // TWICE, TWICE, DP // 32, 2, 2, 2])
    return x.permute(3, 1, 4, 2, 5, 6, 8, 0, 7).reshape([W * R, DP])
