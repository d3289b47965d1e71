"""Parts of the sparse Hopper kernel: the softmax of a step, and the dense mask that it reads."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..int8_attention.hopper_parts import _AS_FLOAT


@gluon.constexpr_function
def _by_words():
    """Layout of a step's mask as words of two keys, [64, 2, 32]: a thread loads four words of a row at once."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 1, 0], [8, 0, 0]],
        lane_bases=[[0, 0, 4], [0, 0, 8], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, 2, 32],
    )  # fmt: skip


@gluon.jit
def _words_of(tile, tile2, L: gl.constexpr):
    """Index of each word of a step in a row of the mask, [1, 2, 32]: the halves are key tiles of their own."""
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    half = gl.expand_dims(gl.expand_dims(gl.where(half == 0, tile * 32, tile2 * 32), 0), 2)
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return half + gl.expand_dims(gl.expand_dims(word, 0), 1)


@gluon.jit
def _read_mask(MASK, rows, tile, tile2, M, N, s_mq):
    """The mask of a step as words of two keys each, [64, 2, 32]; the loads come before the waits of the step."""
    L: gl.constexpr = _by_words()
    row = gl.convert_layout(gl.minimum(rows, M - 1).to(gl.int64) * s_mq, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    n = _words_of(tile, tile2, L)
    # Rows start with whole 16 bytes (configs.in_words); what Triton knew of that is lost on the way into a warpgroup.
    at = gl.multiple_of(gl.max_contiguous(MASK + gl.expand_dims(gl.expand_dims(row, 1), 2) + n, [1, 1, 32]), [1, 1, 16])
    if gl.maximum(tile, tile2) * 64 + 64 <= N:
        words = gl.load(at)
    else:
        words = gl.load(at, mask=n < N // 2, other=0)
    return words


@gluon.jit
def _add_mask(x, words, tile, tile2, N, T: gl.constexpr, EXACT: gl.constexpr):
    """Scores with the mask added (log2 units); -inf past the last key."""
    E: gl.constexpr = x.type.layout
    # Four neighbours exchange words, so that each has those of its own columns.
    words = gl.convert_layout(words.reshape([64, 2, 8, 4]), gl.SliceLayout(4, E))
    if T.KIND == "fp32":
        low = words.to(gl.int32).to(gl.float32, bitcast=True)
        high = (words >> 32).to(gl.int32).to(gl.float32, bitcast=True)
    elif T.KIND == "bf16":
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    elif T.KIND == "fp16":
        low = words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    else:
        low = words & 255
        high = words & -256
    y = gl.convert_layout(gl.join(low, high), E)
    if T.KIND == "bool":
        x = gl.where(y != 0, x, float("-inf"))
    else:
        if EXACT:
            # As list_kernels._in_log2().
            x += y * 0.75 + gl.minimum(gl.maximum(y * 0.6926950408889634, -6.926950408889634e37), 6.926950408889634e37)
        else:
            x += y * 1.4426950408889634
    if gl.maximum(tile, tile2) * 64 + 64 > N:
        L: gl.constexpr = _by_words()
        n = gl.convert_layout(_words_of(tile, tile2, L).reshape([1, 2, 8, 4]), gl.SliceLayout(4, E))
        x = gl.where(gl.expand_dims(n, 4) < N // 2, x, float("-inf"))
    return x


@gluon.jit
def _give_back(empty):
    """Let TMA overwrite what this warpgroup has read: without the fence it may come before reads that are under way."""
    fence_async_shared()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def _add_brought(x, mask, tile, tile2, N, S: gl.constexpr, T: gl.constexpr, EXACT: gl.constexpr):
    """_add_mask() of a tile [BM, BN] that TMA brought; its memory is free again as soon as it was read."""
    E: gl.constexpr = x.type.layout
    memory, full, empty, phase = mask
    mbarrier.wait(full, phase)
    y = gl.convert_layout(memory.load(S).to(gl.float32).reshape([T.BM, 2, T.BN // 16, 4, 2]), E)
    if EXACT and T.KIND != "fp16":
        # As list_kernels._in_log2().
        x += y * 0.75 + gl.minimum(gl.maximum(y * 0.6926950408889634, -6.926950408889634e37), 6.926950408889634e37)
    else:
        x += y * 1.4426950408889634
    _give_back(empty)
    if gl.maximum(tile, tile2) * 64 + 64 > N:
        # After the sum: the branch would hold all of the mask as floats otherwise.
        column = gl.arange(0, T.BN, layout=gl.SliceLayout(0, S))
        inside = gl.expand_dims(gl.where(column < 64, tile * 64, tile2 * 64 - 64) + column < N, 0)
        x = gl.where(gl.convert_layout(inside.reshape([1, 2, T.BN // 16, 4, 2]), E), x, float("-inf"))
    return x


@gluon.constexpr_function
def _started_as_float(T, reads, online):
    """Whether a step's product starts from _AS_FLOAT_BITS, so that its scores need no conversion."""
    return T.AS_FLOAT and not online and not (reads and (T.HAS_BIAS or T.HAS_MASK))


@gluon.jit
def _by_half(x, E: gl.constexpr):
    """[BM or 1, 2, 4 or 1] -> [.., 2, 1, .., 1] in the layout of a step's scores [BM, 2, BN / 16, 4, 2]."""
    return gl.convert_layout(gl.expand_dims(gl.expand_dims(x, 2), 4), E)


@gluon.jit
def _softmax(
    s, q_scale, k_scale, bias, entry, mask, N, total, top, T: gl.constexpr, READS: gl.constexpr, ONLINE: gl.constexpr
):
    """One step of the softmax in log2 units: weights [BM, BN], row sums by thread [BM, 4], row maximum, decay.

    READS: whether this step has a bias by key, or a mask to read: as words, or as what _add_brought() takes.
    """
    offset, offset2, tile, tile2 = entry
    IS_MIXED: gl.constexpr = READS and T.HAS_MASK
    S: gl.constexpr = s.type.layout
    s5 = s.reshape([T.BM, 2, T.BN // 16, 4, 2])
    E: gl.constexpr = s5.type.layout
    # Of [BM, 2, 4]: row, half of the step, and the scale of keys {8j + 2t, 8j + 2t + 1} of that half.
    H: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, E))
    G: gl.constexpr = gl.SliceLayout(1, H)
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, H)))
    q3 = gl.expand_dims(gl.expand_dims(gl.convert_layout(q_scale, gl.SliceLayout(1, gl.SliceLayout(2, H))), 1), 2)
    scale = q3 * gl.expand_dims(k_scale.slice(0, 4, dim=1).load(gl.SliceLayout(0, H)), 0)
    if IS_MIXED:
        # A half with a number is read like the other; one without a tile has -inf.
        offset = 0.0
        offset2 = gl.where(offset2 == float("-inf"), offset2, 0.0)
    add = gl.expand_dims(gl.expand_dims(gl.where(half == 0, offset, offset2), 0), 2)
    if _started_as_float(T, READS, ONLINE):
        # In one operation, as int8_attention.hopper_parts._softmax() has it.
        x = s5.to(gl.float32, bitcast=True) * _by_half(scale, E) + _by_half(add - scale * _AS_FLOAT, E)
    elif READS and T.HAS_BIAS:
        # By key before by score: half of the additions, or none, for a table leaves out a half by its row of -inf.
        columns = gl.expand_dims(bias.load(gl.SliceLayout(0, S)), 0).reshape([1, 2, T.BN // 16, 4, 2])
        columns = gl.convert_layout(columns, E)
        if not T.HAS_TABLE:
            columns += _by_half(add, E)
        x = s5.to(gl.float32) * _by_half(scale, E) + columns
    else:
        x = s5.to(gl.float32) * _by_half(scale, E) + _by_half(add, E)
    if IS_MIXED:
        if T.BROUGHT:
            x = _add_brought(x, mask, tile, tile2, N, S, T, ONLINE)
        else:
            x = _add_mask(x, mask, tile, tile2, N, T, ONLINE)
    decay = top
    if ONLINE:
        peak = gl.max(gl.max(gl.max(gl.max(x, 4), 2), 1), 1)
        new_top = gl.maximum(top, gl.convert_layout(peak, gl.SliceLayout(1, S)))
        decay = gl.exp2(top - new_top)
        top = new_top
        top3 = gl.convert_layout(top, gl.SliceLayout(1, gl.SliceLayout(2, H)))
        top5 = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(top3, 1), 2), 2), 4)
        x -= gl.convert_layout(top5, E)
        total *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, G)), 1)
    p = gl.exp2(x)
    total += gl.sum(gl.sum(gl.sum(p, 4), 2), 1)
    return gl.convert_layout(p.reshape([T.BM, T.BN]), S), total, top, decay
