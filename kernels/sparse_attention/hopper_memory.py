"""Shared memory of the sparse Hopper kernel: as TMA fills it, and as a step reads it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..int8_attention.hopper_ring import _buffer

_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # in Triton 3.9


@gluon.constexpr_function
def _wide(columns, bits):
    """Layout in shared memory of a slot's [128, columns]: what loads of [64, 128 bytes] side by side leave there."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, columns * bits // 8), element_bitwidth=bits, rank=2)


@gluon.jit
def _viewed(memory, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr = None):
    """The same shared memory in another shape, layout and, if given, dtype."""
    HELD: gl.constexpr = memory.dtype if DTYPE is None else DTYPE
    if _RENAMED:
        view = memory.reinterpret(HELD, SHAPE, LAYOUT)
    else:
        view = memory._reinterpret(HELD, SHAPE, LAYOUT)
    return view


@gluon.jit
def _memory(q_desc, k_desc, v_desc, scale_desc, bias_desc, T: gl.constexpr):
    """Shared memory as TMA fills it, by key tile, and for keys, values, scales and bias as a step reads it, by slot."""
    STAGES: gl.constexpr = T.STAGES
    BN: gl.constexpr = T.BN
    D: gl.constexpr = T.D
    FLOATS: gl.constexpr = scale_desc.layout
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    k_s = _buffer(k_desc, 2 * STAGES)
    v_s = _buffer(v_desc, 2 * STAGES * (D // 64))
    scale_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 32], FLOATS)
    scales = _viewed(scale_s, [STAGES, 2, 32], ROWS)
    bias_s = scale_s
    bias = scales
    if T.HAS_BIAS:
        bias_s = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], FLOATS)
        bias = _viewed(bias_s, [STAGES, BN], FLOATS)
    keys = _viewed(k_s, [STAGES, BN, D], _wide(D, 8))
    values = _viewed(v_s, [STAGES, BN, D], _wide(D, 16))
    return k_s, v_s, scale_s, bias_s, (keys, values, scales, bias)


@gluon.jit
def _query_memory(q_desc, mask_desc, T: gl.constexpr):
    """Shared memory of either warpgroup's query and, where TMA brings masks, of a step's mask, which follows there.

    The query goes to registers first thing: four slots of the ring leave no room for both. Returns the query by
    warpgroup, and the mask by key tile, by warpgroup, and its barriers.
    """
    BM: gl.constexpr = T.BM
    BN: gl.constexpr = T.BN
    D: gl.constexpr = T.D
    HELD: gl.constexpr = q_desc.layout
    TWO: gl.constexpr = 4 * BN // D  # queries that fill the memory of two masks
    if T.BROUGHT:
        boxes = _buffer(mask_desc, 4)
        tiles = _viewed(boxes, [2, BM, BN], _wide(BN, 16))
        queries = _viewed(boxes, [TWO, 1, BM, D], HELD, gl.int8)
        mask_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mask_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(mask_full.index(i), count=1)
            mbarrier.init(mask_empty.index(i), count=1)
        q_s = (queries.index(0), queries.index(TWO // 2))
        brought = (boxes, tiles, mask_full, mask_empty)
    else:
        queries = _buffer(q_desc, 2)
        q_s = (queries.index(0), queries.index(1))
        brought = (0, 0, 0, 0)
    return q_s, brought
