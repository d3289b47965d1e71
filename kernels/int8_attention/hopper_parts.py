"""Parts of the Hopper kernel: what a consumer warpgroup does with one tile of keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

# Added to an integer of up to 2^22, the bits of this float make a float of it, by as much too large: no conversion.
_AS_FLOAT = gl.constexpr(12582912.0)
_AS_FLOAT_BITS = gl.constexpr(0x4B400000)
_E4M3_TOP = gl.constexpr(8.0)  # the largest weight of a row (log2) where the maximum is kept


@gluon.constexpr_function
def _accumulator(n, bits):
    """Layout of a warpgroup's [64, n] product of operands of `bits` bits."""
    shape = [16, min(n, 128 if bits == 8 else 256), 256 // bits]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=shape)


@gluon.jit
def _scores(q, k, S: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, ADDED: gl.constexpr = 0):
    """int8 [BM, D] x [BN, D] -> int32 [BM, BN] + ADDED, started."""
    added = gl.full([BM, BN], ADDED, gl.int32, layout=S)
    return warpgroup_mma(q, k.reshape([BN, D]).permute((1, 0)), added, use_acc=ADDED != 0, is_async=True)


@gluon.jit
def _started(q, k, T: gl.constexpr, ONLINE: gl.constexpr):
    """_scores(), as _softmax takes them: with _AS_FLOAT_BITS added if T.AS_FLOAT and they are bounded."""
    ADDED: gl.constexpr = _AS_FLOAT_BITS if T.AS_FLOAT and not ONLINE else 0
    return _scores(q, k, _accumulator(T.BN, 8), T.BM, T.BN, T.D, ADDED)


@gluon.jit
def _by_row(x, E: gl.constexpr):
    """[BM] or [BM, 4] -> [BM, 1, 1 or 4, 1] in the layout of a tile of scores [BM, BN / 8, 4, 2]."""
    G: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, E))
    if len(x.shape) == 1:
        x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, G)), 1)
    return gl.convert_layout(gl.expand_dims(gl.expand_dims(x, 1), 3), E)


@gluon.jit
def _by_key(x, S: gl.constexpr, E: gl.constexpr, BN: gl.constexpr):
    """[BN] floats in shared memory -> [1, BN / 8, 4, 2] in the layout of a tile of scores."""
    row = gl.expand_dims(x.load(gl.SliceLayout(0, S)), 0).reshape([1, BN // 8, 4, 2])
    return gl.convert_layout(row, E)


@gluon.jit
def _polynomial(x, FP8: gl.constexpr):
    """2^x of x from -126 on, without the special function unit: relative error 1.8e-3 for e4m3, else 1.5e-4.

    2^(x - n) by a minimax polynomial, n the nearest integer, which then is added to the exponent (Cody and Waite).
    """
    shifted = x + _AS_FLOAT
    f = x - (shifted - _AS_FLOAT)
    if FP8:
        y = (f * 0.23842894 + 0.70344804) * f + 1.00044314
    else:
        y = ((f * 0.05517167 + 0.24261113) * f + 0.69326099) * f + 0.99992807
    return (y.to(gl.int32, bitcast=True) + (shifted.to(gl.int32, bitcast=True) << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def _exp2(x, T: gl.constexpr):
    """2^x of a tile [BM, BN / 8, 4, 2]; one in T.POLYNOMIAL (2, 4) by a polynomial."""
    BM: gl.constexpr = T.BM
    J: gl.constexpr = T.BN // 8
    low, high = gl.split(x)
    if T.POLYNOMIAL == 2:
        low = _polynomial(low, T.FP8)
    else:
        some, others = gl.split(low.reshape([BM, J // 2, 2, 4]).permute((0, 1, 3, 2)))
        low = gl.join(_polynomial(some, T.FP8), gl.exp2(others)).permute((0, 1, 3, 2)).reshape([BM, J, 4])
        low = gl.convert_layout(low, high.type.layout, assert_trivial=True)
    return gl.convert_layout(gl.join(low, gl.exp2(high)), x.type.layout, assert_trivial=True)


@gluon.jit
def _of_keys(q_scale, k_scale, bias, T: gl.constexpr):
    """What the scores of a tile are multiplied by, and its bias (0 without one), for what each thread holds of them.

    The scale is that of rows and keys [BM, 4], or, if HIGH, of keys [1, BN / 8, 4, 2], as the bias.
    """
    S: gl.constexpr = _accumulator(T.BN, 8)
    E: gl.constexpr = gl.full([T.BM, T.BN], 0, gl.int32, layout=S).reshape([T.BM, T.BN // 8, 4, 2]).type.layout
    G: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, E))
    if T.HIGH:
        scale = _by_key(k_scale, S, E, T.BN)
    else:
        scale = gl.expand_dims(gl.convert_layout(q_scale, gl.SliceLayout(1, G)), 1) * gl.expand_dims(
            k_scale.slice(0, 4).load(gl.SliceLayout(0, G)), 0
        )
    added = 0.0
    if T.HAS_BIAS:
        added = _by_key(bias, S, E, T.BN)
    return scale, added


@gluon.jit
def _softmax(s, q_scale, of_keys, rows, col, N, top, T: gl.constexpr, MASKED: gl.constexpr, ONLINE: gl.constexpr):
    """One tile in log2 units: weights [BM, BN / 8, 4, 2], their sums by thread [BM, 4], row maximum, decay.

    Keys {8j + 2t, 8j + 2t + 1} of a tile are what one thread holds; unless HIGH they share a scale.
    """
    BM: gl.constexpr = T.BM
    BN: gl.constexpr = T.BN
    S: gl.constexpr = s.type.layout
    s4 = s.reshape([BM, BN // 8, 4, 2])
    E: gl.constexpr = s4.type.layout
    scale, bias = of_keys
    if T.HIGH:
        x = s4.to(gl.float32) * scale * _by_row(q_scale, E)
    else:
        if T.AS_FLOAT and not ONLINE:
            # In one operation, which rounds to 2^-8 (log2) or finer where scores are bounded.
            less = scale * _AS_FLOAT + top if T.FP8 else scale * _AS_FLOAT
            x = s4.to(gl.float32, bitcast=True) * _by_row(scale, E) - _by_row(less, E)
        else:
            x = s4.to(gl.float32) * _by_row(scale, E)
    if T.HAS_BIAS:
        x += bias
    if MASKED:
        n = gl.expand_dims(col + gl.arange(0, BN, layout=gl.SliceLayout(0, S)), 0)
        keep = n < N
        if T.CAUSAL:
            keep = keep & (n <= gl.expand_dims(rows, 1))
        kept = gl.where(keep, gl.convert_layout(x.reshape([BM, BN]), S), float("-inf"))
        x = gl.convert_layout(kept.reshape([BM, BN // 8, 4, 2]), E)
    decay = top
    if ONLINE:
        if T.HAS_BIAS or MASKED or T.HIGH:
            peak = gl.max(gl.max(gl.max(x, 3), 1), 1)
        else:
            # The scale is not negative: the order of the int8 scores is the order of the scores.
            peak = gl.max(gl.max(gl.max(s4, 3), 1).to(gl.float32) * scale, 1)
        peak = gl.convert_layout(peak, gl.SliceLayout(1, S))
        # In whole numbers, as in forward.py: no weight's e4m3 depends on the maximum.
        new_top = gl.maximum(top, gl.ceil(peak - _E4M3_TOP) if T.FP8 else peak)
        decay = gl.exp2(top - new_top)
        top = new_top
    if ONLINE or (T.FP8 and not T.AS_FLOAT):
        x -= _by_row(top, E)
    if T.POLYNOMIAL > 0 and not ONLINE and not MASKED:
        p = _exp2(x, T)
    else:
        p = gl.exp2(x)
    return p, gl.sum(gl.sum(p, 3), 1), top, decay


@gluon.jit
def _quadruples(p, T: gl.constexpr):
    """The weights that a word of four e4m3 ones is made of, four times [BM, BN / 16, 4]."""
    low, high = gl.split(p.reshape([T.BM, T.BN // 16, 2, 4, 2]))
    k0, k2 = gl.split(low.permute((0, 1, 3, 2)))
    k1, k3 = gl.split(high.permute((0, 1, 3, 2)))
    return k0, k1, k2, k3


@gluon.jit
def _rounded(k0, k1, k2, k3):
    """Four weights in e4m3, two and two in the lower half of a word."""
    PTX: gl.constexpr = "{ .reg .b16 a, z; mov.b16 z, 0; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; mov.b32 $0, {a, z}; }"
    low = gl.inline_asm_elementwise(PTX, "=r,f,f", [k0, k1], dtype=gl.int32, is_pure=True, pack=1)
    high = gl.inline_asm_elementwise(PTX, "=r,f,f", [k2, k3], dtype=gl.int32, is_pure=True, pack=1)
    return low, high


@gluon.jit
def _words(low, high):
    """Both halves in one word."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _packed(p, dtype: gl.constexpr, P: gl.constexpr, T: gl.constexpr):
    """Weights as operand of P @ V; e4m3 ones as words [BM, BN / 16, 4]: Triton carries bytes in a register each."""
    if dtype == gl.float8e4nv:
        k0, k1, k2, k3 = _quadruples(p, T)
        low, high = _rounded(k0, k1, k2, k3)
        packed = _words(low, high)
    else:
        packed = gl.convert_layout(gl.convert_layout(p.reshape([T.BM, T.BN]), _accumulator(T.BN, 8)).to(dtype), P)
    return packed


@gluon.jit
def _operand(packed, P: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Words [BM, BN / 16, 4] -> e4m3 [BM, BN], the same registers."""
    E: gl.constexpr = gl.zeros([BM, BN], gl.int8, layout=P).reshape([BM, BN // 16, 4, 4]).type.layout
    words = gl.expand_dims(gl.convert_layout(packed, gl.SliceLayout(3, E), assert_trivial=True), 3)
    four, _same = gl.broadcast(words, gl.zeros([BM, BN // 16, 4, 4], gl.int32, layout=E))
    p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.float8e4nv, is_pure=True, pack=4)
    return gl.convert_layout(p.reshape([BM, BN]), P, assert_trivial=True)


@gluon.jit
def _product(packed, v, acc, P: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """acc [BM, DV] + P @ V, started."""
    DV: gl.constexpr = acc.type.shape[1]
    if v.dtype == gl.float8e4nv:
        acc = warpgroup_mma(_operand(packed, P, BM, BN), v.reshape([DV, BN]).permute((1, 0)), acc, is_async=True)
    else:
        acc = warpgroup_mma(packed, v.reshape([BN, DV]), acc, is_async=True)
    return acc
