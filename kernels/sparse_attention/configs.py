"""Which sparse kernel and launch configuration a call gets, by architecture."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..int8_attention.configs import Config, arch_of, padded_head_dim, why_portable

# A power of two, for hopper_ring._in_ring; even, so that a warpgroup meets only its own and common slots again while
# their own slots alternate (hopper_ring._await).
_STAGES = 4
# Pairs of query tiles; keys are quantised by tiles of 64 with four scales each.
HOPPER = Config(128, 64, 4, _STAGES, True, True)
HOPPER_MAX_HEAD_DIM = 128

# Kinds of dense masks whose tiles TMA brings to shared memory, of "fp16" and "bf16"; others are read by words of two
# keys. A float32 tile would take twice the memory that is left, and bool tiles are hardly ever mixed.
BROUGHT_MASKS: tuple[str, ...] = ("fp16", "bf16")
WORDS = {torch.bool: torch.int16, torch.float16: torch.int32, torch.bfloat16: torch.int32, torch.float32: torch.int64}

# By padded head_dim, so that no variant spills (tests/test_sparse_aot.py); not timed.
_NVIDIA = {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(64, 64, 8, 1)}
_BLACKWELL = {64: Config(64, 64, 4, 2), 128: Config(64, 64, 8, 2), 256: Config(64, 64, 8, 1)}
_CDNA = {64: Config(64, 64, 4, 1), 128: Config(64, 64, 4, 1), 256: Config(64, 64, 8, 1)}
_RDNA = {64: Config(64, 64, 4, 1), 128: Config(64, 64, 16, 1), 256: Config(64, 64, 16, 1)}
_INTERPRETER = dict.fromkeys((64, 128, 256), Config(64, 64, 4, 1))

_failures: list[str] = []  # why the sparse kernel for Hopper did not compile, once it has not


def portable_config(arch: int | str, head_dim: int, masked: bool = False) -> Config:
    """The configuration of the portable kernel for `arch`, as int8_attention.configs.config_for() takes it.

    masked: whether it reads a dense mask, whose tile needs registers besides.
    """
    table = (_BLACKWELL if arch >= 100 else _NVIDIA) if isinstance(arch, int) else _INTERPRETER
    if isinstance(arch, str) and arch.startswith("gfx"):
        table = _CDNA if arch.startswith("gfx9") else _RDNA
    config = table[max(64, padded_head_dim(head_dim))]
    return config._replace(num_warps=max(8, config.num_warps)) if masked else config


def config_of(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None) -> Config:
    """The configuration for a call on these tensors; mask: a dense mask [1 or B, 1 or H, Q, K]."""
    small = padded_head_dim(query.shape[3]) <= HOPPER_MAX_HEAD_DIM
    if not _failures and small and (mask is None or in_words(mask)) and why_portable(query, value) is None:
        return HOPPER
    return portable_config(arch_of(query.device), query.shape[3], mask is not None)


# Of the memory of query, key, value and answer, what the int8 copies and the rest may take besides, if over 256 MiB.
MEMORY_SHARE = 0.05
MEMORY_FREE = 256 * 2**20


def heads_at_a_time(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Split heads [B, H, ..] and their key heads [B, Hkv, ..], so that what a launch needs besides stays small."""
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    group = heads // kv_heads
    padded = padded_head_dim(head_dim)
    each = batch * (group * q_len * (padded + 8) + kv_len * (padded + 5))  # with scales, the LSE's term and a bias
    given = (2 * query.numel() + key.numel() + value.numel()) * query.element_size()
    most = max(MEMORY_FREE, MEMORY_SHARE * given)
    parts = -(-kv_heads // max(1, int(most / each)))
    step = -(-kv_heads // parts)
    for first in range(0, kv_heads, step):
        last = min(first + step, kv_heads)
        yield slice(first * group, last * group), slice(first, last)


def in_words(mask: torch.Tensor) -> bool:
    """Whether a dense mask can be read by words: keys lie side by side, and every row starts with whole 16 bytes."""
    size = mask.element_size()
    rows = all(stride * size % 16 == 0 for stride in mask.stride()[:3])
    return rows and mask.stride(3) == 1 and mask.shape[3] % 2 == 0 and mask.data_ptr() % 16 == 0


def give_up_hopper(error: Exception) -> str:
    """Use the portable sparse kernel from now on, because this Triton could not compile the other; return why."""
    text = (str(error).strip().splitlines() or [""])[-1]
    _failures.append(f"this Triton does not compile sparse_attention/hopper.py: {type(error).__name__}: {text}")
    return _failures[0]
