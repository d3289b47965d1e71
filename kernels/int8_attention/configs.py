"""Which kernel and launch configuration a call gets: tables by architecture, so that no user's call autotunes."""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """Query rows of a program, keys of a step.

    gluon: the kernel of hopper.py, with four key scales a step, and a warpgroup for every 64 query rows.
    as_float: 1 where it saves the conversion of scores (see hopper_ring.Traits).
    polynomial: 2 or 4 where one exponential in so many is a polynomial; 0: none.
    turns: 1 where its warpgroups start their matrix products in turns.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    gluon: bool = False
    as_float: int = 0
    polynomial: int = 0
    turns: int = 0


# By padded head_dim. Set so that no variant spills on Triton 3.6 and 3.9 (tests/test_aot.py); not timed, but for sm_90.
_AMPERE = {64: Config(128, 64, 8, 2), 128: Config(128, 64, 8, 2), 256: Config(32, 32, 8, 2)}
# sm_90 with TMA: the best of bench/bench_configs.py on an H200 (bench/results/configs.jsonl).
_HOPPER = {64: Config(64, 128, 4, 2, True), 128: Config(64, 128, 4, 2, True), 256: Config(128, 64, 8, 3, True)}
# The kernel of hopper.py, by value_columns(): of its variants the fastest on an H200
# (bench/results/hopper_variants.jsonl).
HOPPER_GLUON = {
    64: Config(256, 64, 4, 4, True, True),
    96: Config(128, 128, 4, 3, True, True, as_float=1),
    128: Config(128, 128, 4, 3, True, True, as_float=1),
    256: Config(128, 64, 4, 3, True, True),
}
HOPPER_FP8 = {
    64: Config(256, 64, 4, 6, True, True),
    96: Config(128, 128, 4, 4, True, True),
    128: Config(192, 64, 4, 6, True, True, as_float=1),
    256: Config(128, 64, 4, 3, True, True, as_float=1),
}
_HOPPER_POINTERS = {64: Config(64, 64, 4, 2), 128: Config(64, 64, 4, 2), 256: Config(64, 64, 8, 2)}
_CDNA = {64: Config(128, 64, 8, 1), 128: Config(128, 32, 8, 1), 256: Config(64, 32, 8, 1)}
_RDNA = {64: Config(128, 64, 8, 1), 128: Config(64, 32, 8, 1), 256: Config(32, 16, 8, 1)}
# Triton's interpreter costs by the number of steps; tiles this small still make tests cross their borders.
_INTERPRETER = {64: Config(64, 64, 4, 1), 128: Config(64, 64, 4, 1), 256: Config(64, 64, 4, 1)}


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a head_dim is padded to inside the kernels; an int8 matrix product needs 32."""
    return max(32, 1 << (head_dim - 1).bit_length())


def value_columns(head_dim: int) -> int:
    """Columns of P @ V in the kernel of hopper.py: 96 for a head_dim of 65 to 96, else padded to a power of two."""
    return 96 if 64 < head_dim <= 96 else padded_head_dim(head_dim)


def hopper_config(head_dim: int, fp8: bool = False) -> Config:
    """The configuration of the kernel of hopper.py for a head_dim over 32; fp8: whether P @ V is in e4m3."""
    return (HOPPER_FP8 if fp8 else HOPPER_GLUON)[value_columns(head_dim)]


def config_for(
    arch: int | str, head_dim: int, describable: bool = True, per_key: bool = False, fp8: bool = False
) -> Config:
    """The configuration for `arch`: 10 * major + minor of a CUDA capability, an AMD architecture name, or "cpu".

    describable: whether a TMA descriptor can be made on the value tensor, see `describable()`.  per_key: whether each
    key has a scale.  fp8: whether P @ V is in e4m3.
    """
    table = _INTERPRETER
    if isinstance(arch, int):
        hopper = _HOPPER if describable else _HOPPER_POINTERS
        table = hopper if arch == 90 else _AMPERE
    elif arch.startswith("gfx"):
        table = _CDNA if arch.startswith("gfx9") else _RDNA
    config = table[max(64, padded_head_dim(head_dim))]
    if per_key and table in (_CDNA, _RDNA):
        config = config._replace(block_n=config.block_n // 2)  # with the scales of all keys they spill otherwise
    if fp8 and table is _AMPERE and head_dim > 128:
        config = config._replace(num_warps=4)  # with 8 an e4m3 value of this width spills
    return config


def config_of(query: torch.Tensor, value: torch.Tensor, pv: str = "auto", precision: str = "auto") -> Config:
    """The configuration for a call on these tensors."""
    if why_portable(query, value, pv, precision) is None:
        return hopper_config(query.shape[3], pv == "fp8")
    # The e4m3 copy of the value is made so that it can be described.
    held = _descriptors() if pv == "fp8" else describable(value)
    return config_for(arch_of(query.device), query.shape[3], held, per_key=precision == "high", fp8=pv == "fp8")


def kernel_name(query: torch.Tensor, value: torch.Tensor, pv: str = "auto", precision: str = "auto") -> str:
    """Name of the kernel that a call on these tensors gets."""
    return "Hopper (Gluon)" if why_portable(query, value, pv, precision) is None else "portable"


def why_portable(query: torch.Tensor, value: torch.Tensor, pv: str = "auto", precision: str = "auto") -> str | None:
    """Why a call on these tensors gets the portable kernel and not the one for Hopper; None if it gets that."""
    why = why_portable_on(query.device, query.shape[3])
    return _NOT_DESCRIBABLE if why is None and pv != "fp8" and not describable(value) else why


def why_portable_on(device: torch.device, head_dim: int) -> str | None:
    """Why calls on `device` get the portable kernel, whatever their values lie like; None if they don't."""
    arch = arch_of(device)
    if arch != 90:
        return f"the Hopper kernel needs sm_90, and this is {f'sm_{arch}' if isinstance(arch, int) else arch}"
    if value_columns(head_dim) not in HOPPER_GLUON:
        return f"head_dim {head_dim} is not over 32"
    return hopper_unavailable()


def why_portable_by_metadata(query: torch.Tensor, value: torch.Tensor, pv: str) -> str | None:
    """What why_portable() says of tensors whose values lie at a multiple of 16 bytes: it reads no address."""
    why = why_portable_on(query.device, query.shape[3])
    return _NOT_DESCRIBABLE if why is None and pv != "fp8" and not _strides_describable(value) else why


_NOT_DESCRIBABLE = "TMA takes values whose base and strides are whole 16 bytes, and no stride of 0"
_failures: list[str] = []  # why the kernel for Hopper did not compile, once it has not


def hopper_unavailable() -> str | None:
    """Why this Triton can't run the kernel for Hopper, so that sm_90 gets the portable one; None if it can."""
    return _failures[0] if _failures else _hopper_not_importable()


def give_up_hopper(error: Exception) -> str:
    """Use the portable kernel from now on, because this Triton could not compile the one for Hopper; return why."""
    text = (str(error).strip().splitlines() or [""])[-1]
    _failures.append(f"this Triton does not compile hopper.py: {type(error).__name__}: {text}")
    return _failures[0]


@functools.cache
def _hopper_not_importable() -> str | None:
    try:
        from . import hopper  # noqa: F401
    except Exception as error:  # whatever a Triton says whose Gluon is another one
        return f"this Triton has no Gluon that hopper.py knows: {type(error).__name__}: {error}"
    return None


def describable(value: torch.Tensor) -> bool:
    """Whether a TMA descriptor can be made on the view: base and strides in whole 16 bytes, no stride of 0."""
    return value.data_ptr() % 16 == 0 and _descriptors() and _strides_describable(value)


def _strides_describable(value: torch.Tensor) -> bool:
    return all(stride > 0 and stride * value.element_size() % 16 == 0 for stride in value.stride()[:3])


@functools.cache
def _descriptors() -> bool:
    """Whether this Triton has host-made descriptors (3.4 and newer)."""
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def arch_of(device: torch.device) -> int | str:
    """What config_for() takes, for a device that the kernel runs on."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
