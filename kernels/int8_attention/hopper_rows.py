"""Parts of the Hopper kernel: the rows of a consumer warpgroup, their bound, their range in e4m3, and their answer."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_parts import _by_row, _quadruples, _rounded

# e4m3 ends at 448 = 2^8.8. Where no row maximum is kept, what a thread sums up of a row and tile stays below that, and
# is brought under 2^7 where it does not, so that a weight is normal from 2^-12 of the largest on, and 0 under 2^-16.


@gluon.jit
def _by_thread(T: gl.constexpr, S: gl.constexpr):
    """Zeros, one a row and thread: [BM, 4] in the layout of sums by thread."""
    E: gl.constexpr = gl.full([T.BM, T.BN], 0.0, gl.float32, layout=S).reshape([T.BM, T.BN // 8, 4, 2]).type.layout
    return gl.full([T.BM, 4], 0.0, gl.float32, layout=gl.SliceLayout(1, gl.SliceLayout(3, E)))


@gluon.jit
def _by_group(x, E: gl.constexpr):
    """[BM] -> [BM, 1] in the layout of sums by thread [BM, 4]; these as they are."""
    G: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, E))
    if len(x.shape) == 1:
        x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, G)), 1)
    return x


@gluon.jit
def _gap(part, M):
    """A store of sums by thread that never happens, for M is not negative: what it reads must be there by then."""
    never, _same = gl.broadcast(gl.full(part.type.shape, 0, gl.int32, layout=part.type.layout) + M, part)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $2, 0; @p st.shared.f32 [$2], $1; mov.b32 $0, $2; }", "=r,f,r", [part, never],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _lowered(p, part, total, top, FIRST: gl.constexpr, T: gl.constexpr):
    """Rounded weights (as _rounded) of a tile in the range of e4m3, the new total and top, and the factor to get there.

    The factor is a power of two, and 1 unless a thread's sum left that range.  FIRST: it is made whatever the sum is,
    but by at most 2^60, so that no weight of a later tile overflows a float32.  part, total, top, factor: by thread
    [BM, 4], the last two alike in the four of a row.
    """
    COUNT: gl.constexpr = T.BM * T.BN // 512
    PTX: gl.constexpr = _round_again(COUNT, FIRST)
    k0, k1, k2, k3 = _quadruples(p, T)
    low, high = _rounded(k0, k1, k2, k3)
    low, high, total, top, factor = gl.inline_asm_elementwise(
        PTX[0], PTX[1],
        [k0, k1, k2, k3, low, high, _each(part, low), _each(total, low), _each(top, low)],
        dtype=(gl.int32, gl.int32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=COUNT,
    )  # fmt: skip
    G: gl.constexpr = part.type.layout
    J: gl.constexpr = T.BN // 16
    total = gl.convert_layout(_first(total, T.BM, J), G, assert_trivial=True)
    top = gl.convert_layout(_first(top, T.BM, J), G, assert_trivial=True)
    return low, high, total, top, gl.convert_layout(_first(factor, T.BM, J), G, assert_trivial=True)


@gluon.jit
def _each(x, like):
    """[BM, 4] for each of the words [BM, BN / 16, 4] of `like`, which is in the thread."""
    L: gl.constexpr = like.type.layout
    _same, each = gl.broadcast(like, gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, L), assert_trivial=True), 1))
    return each


@gluon.jit
def _first(x, BM: gl.constexpr, J: gl.constexpr):
    """x[:, 0] of [BM, J, 4], which is in the thread."""
    if J > 1:
        x, _rest = gl.split(x.reshape([BM, 2, J // 2, 4]).permute((0, 2, 3, 1)))
        x = _first(x, BM, J // 2)
    else:
        x = x.reshape([BM, 4])
    return x


@gluon.constexpr_function
def _round_again(count, always):
    """PTX and constraints: halves of words [count] of a thread's two rows in turns, their new totals, tops and factors.

    Unless `always`, a warp in which no sum is over what e4m3 holds leaves halves and tops as given; its factors are 1.
    """
    total, top, factor, k = 2 * count, 3 * count, 4 * count, 5 * count
    low, part = 9 * count, 11 * count
    before, above = part + count, part + 2 * count  # totals and tops so far
    least = "max.s32 e, e, -60;" if always else "setp.gt.f32 p, t, 0f43E00000; selp.s32 e, e, 0, p;"  # 448
    text = "{ .reg .pred p, q; .reg .f32 t, u, f0, f1; .reg .s32 e; .reg .b16 a, z; mov.b16 z, 0; "
    text += " ".join(f"mov.b32 ${i}, ${low + i};" for i in range(2 * count))
    for i in range(count):
        text += f" add.f32 ${total + i}, ${before + i % 2}, ${part + i % 2};"
        text += f" mov.f32 ${top + i}, ${above + i % 2}; mov.f32 ${factor + i}, 0f3F800000;"
    if not always:
        text += f" max.f32 t, ${part}, ${part + 1}; setp.gt.f32 p, t, 0f43E00000;"
        text += " vote.sync.any.pred q, p, 0xffffffff; @!q bra L;"
    for row in (0, 1):
        text += f" mov.f32 t, ${part + row};"
        for distance in (1, 2):
            text += f" shfl.sync.bfly.b32 u, t, {distance}, 31, 0xffffffff; max.f32 t, t, u;"
        text += f" mov.b32 e, t; shr.s32 e, e, 23; sub.s32 e, e, {126 + 7}; {least}"  # the exponent; it becomes 2^7
        text += f" cvt.rn.f32.s32 t, e; add.f32 ${top + row}, ${above + row}, t;"
        text += f" sub.s32 e, 127, e; shl.b32 e, e, 23; mov.b32 f{row}, e; mov.f32 ${factor + row}, f{row};"
        text += f" mul.f32 ${total + row}, ${total + row}, f{row};"
    for i in range(2 * count):
        x = k + 2 * count * (i >= count) + i % count
        text += f" mul.f32 t, ${x}, f{i % 2}; mul.f32 u, ${x + count}, f{i % 2};"
        text += f" cvt.rn.satfinite.e4m3x2.f32 a, u, t; mov.b32 ${i}, {{a, z}};"
    constraints = ["=&r"] * 2 * count + ["=&f"] * 3 * count + ["f"] * 4 * count + ["r"] * 2 * count + ["f"] * 3 * count
    return text + " L: }", ",".join(constraints)


@gluon.constexpr_function
def _multiply(count):
    """PTX and constraints: `count` registers times as many factors, all skipped by a warp whose factors are 1.

    A thread holds two rows, and so two factors: those of registers 0 and 2 (or 1, where registers are that few).
    """
    second = 2 * count + min(2, count - 1)
    moves = " ".join(f"mov.b32 ${i}, ${count + i};" for i in range(count))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    text = (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.or.f32 p, ${second}, 0f3F800000, p; "
        f"vote.sync.any.pred q, p, 0xffffffff; {moves} @!q bra L; {products} L: }}"
    )
    return text, ",".join(["=&f"] * count + ["f"] * 2 * count)


@gluon.jit
def _times(x, factor, COUNT: gl.constexpr):
    """x * factor, of one shape and layout; COUNT: registers that a thread holds of x, or a part of them."""
    PTX: gl.constexpr = _multiply(COUNT)
    return gl.inline_asm_elementwise(PTX[0], PTX[1], [x, factor], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def _decayed(acc, decay, T: gl.constexpr):
    """acc [BM, DV] times decay [BM] or, by thread, [BM, 4]; in e4m3 that is 1 nearly always."""
    DV: gl.constexpr = acc.type.shape[1]
    if len(decay.shape) == 1:
        factor = gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout)), 1)
    else:
        acc4 = acc.reshape([T.BM, DV // 8, 4, 2])
        E: gl.constexpr = acc4.type.layout
        _same, factor = gl.broadcast(acc4, _by_row(decay, E))
        factor = gl.convert_layout(factor.reshape([T.BM, DV]), acc.type.layout, assert_trivial=True)
    if T.FP8:
        _same, factor = gl.broadcast(acc, factor)
        acc = _times(acc, factor, min(64, T.BM * DV // 128))
    else:
        acc *= factor
    return acc


@gluon.constexpr_function
def _row_layout(by_warp):
    """Layout of numbers in a row, dealt out to all threads of a warpgroup or to those of each warp."""
    whole = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
    return whole if by_warp else gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def _bound(q, q_scale, rows, K_NORM, M, k_tiles, BM: gl.constexpr, D: gl.constexpr, BY_WARP: gl.constexpr):
    """Largest |score| (log2) that this warpgroup's rows can have: |q| times the largest |k| of the head.

    BY_WARP: each warp finds it by itself. What a reduction over a warpgroup leaves undefined ptxas keeps through the
    whole kernel, and spills where registers are few.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (D // 16), D // 16], [4, 1], [1, 0])
    x = q.load(L).to(gl.float32)
    r = gl.convert_layout(rows, gl.SliceLayout(1, L))
    norm = gl.sqrt(gl.sum(x * x, 1)) * gl.load(q_scale + r, mask=r < M, other=0.0)
    T: gl.constexpr = _row_layout(BY_WARP)
    if BY_WARP:
        norm = gl.convert_layout(norm, T)
    t = gl.arange(0, 512, layout=T)
    largest = gl.zeros([512], gl.float32, layout=T)
    for start in range(0, k_tiles, 512):
        largest = gl.maximum(largest, gl.load(K_NORM + start + t, mask=start + t < k_tiles, other=0.0))
    return gl.max(norm, 0) * gl.max(largest, 0)


@gluon.jit
def _times_channels(acc, scale):
    """acc [BM, DV] times float32 [DV]."""
    L: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    return acc * gl.expand_dims(gl.load(scale + gl.arange(0, acc.type.shape[1], layout=L)), 0)


@gluon.jit
def _write(
    acc, total, top, rows, out, lse, term, anchor, keep, M, s_om, s_lm,
    ACC: gl.constexpr, D: gl.constexpr, HEAD_DIM: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Divide by the row sums and store; out, lse and term point at this head's first row."""
    shifted = 0.0
    if HAS_LSE:
        shifted = gl.load(term + rows, mask=rows < M, other=0.0)  # on its way while the rows are stored
    empty = total == 0  # not "total > 0": NaN must stay NaN
    inverse = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
    o = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, ACC)), 1)
    m = gl.expand_dims(gl.convert_layout(rows, gl.SliceLayout(1, ACC)), 1)
    d = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, ACC)), 0)
    gl.store(out + m.to(gl.int64) * s_om + d, o.to(out.dtype.element_ty), mask=(m < M) & (d < HEAD_DIM))
    if HAS_LSE:
        value = (top + gl.log2(gl.where(empty, 1.0, total))) * 0.6931471805599453
        value += shifted * keep + anchor
        gl.store(lse + rows.to(gl.int64) * s_lm, gl.where(empty, float("-inf"), value), mask=rows < M)


@gluon.jit
def _write_parts(acc, rest, total, top, rows, out, lse, v_scale, term, anchor, keep, M, s_om, s_lm, T: gl.constexpr):
    """_write() of P @ V in one or two parts, times the scales of an e4m3 value."""
    ACC: gl.constexpr = acc.type.layout
    if T.FP8:
        acc = _times_channels(acc, v_scale)
    _write(acc, total, top, rows, out, lse, term, anchor, keep, M, s_om, s_lm, ACC, T.COLUMNS, T.HEAD_DIM, T.HAS_LSE)
    if T.REST > 0:
        REST: gl.constexpr = rest.type.layout
        if T.FP8:
            rest = _times_channels(rest, v_scale + T.COLUMNS)
        left: gl.constexpr = T.HEAD_DIM - T.COLUMNS
        _write(
            rest, total, top, rows, out + T.COLUMNS, lse, term, anchor, keep, M, s_om, s_lm, REST, T.REST, left, False
        )
