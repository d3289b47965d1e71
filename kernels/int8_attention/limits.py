"""What the int8 kernel takes, where it runs and from which size it pays: data, readable without Triton."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Limits:
    """Limits of the kernel as data.

    dtypes: of query, key and value.  max_head_dim: the largest head_dim; smaller ones are padded inside the kernel.
    max_scale: the largest softmax scale of either sign for which float32 holds every score of finite fp16 inputs.
    max_heads: heads of all batches together, for which CUDA's grid has room on its second axis.
    pv, precision: names of the modes of P @ V and of the scores.  min_capability: the oldest CUDA compute capability.
    hip_archs: AMD architectures that the kernel compiles for.  fp8_*: where matrix products take e4m3.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    max_head_dim: int = 256
    max_scale: float = 2.0**20
    max_heads: int = 65535
    pv: tuple[str, ...] = ("auto", "16bit", "fp8")
    precision: tuple[str, ...] = ("auto", "high")
    min_capability: tuple[int, int] = (8, 0)
    hip_archs: tuple[str, ...] = ("gfx942", "gfx950", "gfx1100", "gfx1201")
    fp8_min_capability: tuple[int, int] = (8, 9)
    fp8_hip_archs: tuple[str, ...] = ("gfx950", "gfx1201")


LIMITS = Limits()

# Triton before 3.8 lowers an int8 dot on compute capability 10.x to slow mma.sync instructions.
_BLACKWELL_TRITON = (3, 8)
# The interpreter of Triton 3.6 and older turns one-element arrays into loop bounds, which numpy 2.4 refuses.
_INTERPRETER_TRITON = (3, 7)
_INTERPRETER_NUMPY = (2, 4)
# The first GPU with programmatic dependent launches, and the first driver (CUDA 12.4) whose graphs keep them.
_OVERLAP_CAPABILITY = (9, 0)
_OVERLAP_DRIVER = 12040


def interpreting() -> bool:
    """Whether Triton's interpreter is switched on, so that CPU tensors are accepted."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _compiled_kernels() -> bool:
    """Whether Triton is loaded with its own functions compiled, so that the interpreter can't run them."""
    standard = sys.modules.get("triton.language.standard")
    return standard is not None and hasattr(standard.max, "cache_key")


@functools.cache
def _version(package: str) -> tuple[int, int] | None:
    for name in (package, f"{package}-windows", f"{package}-rocm", f"pytorch-{package}-rocm"):
        try:
            major, minor = metadata.version(name).split(".")[:2]
        except metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return None


def unavailable(device: torch.device) -> tuple[str, str, str] | None:
    """Why the kernel can't run on `device`: (reason code, what was given, what is accepted), or None if it can."""
    triton = _version("triton")
    if triton is None:
        return "kernel", "no Triton", "the triton package (triton-windows on Windows)"
    if device.type == "cpu" and interpreting():
        numpy = _version("numpy")
        if numpy is None or (triton < _INTERPRETER_TRITON and numpy >= _INTERPRETER_NUMPY):
            pair = f"the interpreter of Triton {_text(triton)} with numpy {_text(numpy)}"
            return "kernel", pair, "numpy < 2.4 or Triton >= 3.7"
        if _compiled_kernels():
            return "kernel", "Triton imported before TRITON_INTERPRET=1 was set", "the variable set before that"
        return None
    if device.type != "cuda":
        return "device", f"{device.type} tensors", "CUDA or ROCm tensors; CPU tensors when TRITON_INTERPRET=1 is set"
    if not torch.cuda.is_available():
        return "device", "no usable GPU", "a CUDA or ROCm GPU that this torch build can use"
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return None if arch in LIMITS.hip_archs else ("capability", arch, f"one of {', '.join(LIMITS.hip_archs)}")
    capability = torch.cuda.get_device_capability(device)
    if capability < LIMITS.min_capability:
        return "capability", f"sm_{_text(capability, '')}", f"sm_{_text(LIMITS.min_capability, '')} or newer"
    if capability[0] == 10 and triton < _BLACKWELL_TRITON:
        pair = f"Triton {_text(triton)} on sm_{_text(capability, '')}"
        return "kernel", pair, f"Triton >= {_text(_BLACKWELL_TRITON)} there"
    return None


def fp8_unavailable(device: torch.device) -> tuple[str, str] | None:
    """Why pv="fp8" can't run on `device`, where the kernel runs: (what was given, what is accepted), or None."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        has, needs = arch in LIMITS.fp8_hip_archs, ", ".join(LIMITS.fp8_hip_archs)
    else:
        capability = torch.cuda.get_device_capability(device)
        arch = f"sm_{_text(capability, '')}"
        has, needs = capability >= LIMITS.fp8_min_capability, f"sm_{_text(LIMITS.fp8_min_capability, '')} or newer"
    return None if has else (f"fp8 on {arch}", f"auto or 16bit there, and fp8 on {needs}")


def overlaps(device: torch.device) -> bool:
    """Whether a kernel can begin on `device` while the one before it runs (programmatic dependent launch)."""
    if device.type != "cuda" or torch.version.hip or interpreting() or not torch.cuda.is_available():
        return False
    capable = torch.cuda.get_device_capability(device) >= _OVERLAP_CAPABILITY
    return capable and _driver() >= _OVERLAP_DRIVER and triton_overlaps()


@functools.cache
def _driver() -> int:
    """The CUDA version that the driver knows, 12040 for 12.4; 0 where it can't be asked."""
    library, version = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1", ctypes.c_int(0)
    try:
        ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


@functools.cache
def triton_overlaps() -> bool:
    """Whether this Triton compiles kernels for that."""
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.language.extra import cuda

    return hasattr(CUDAOptions, "launch_pdl") and hasattr(cuda, "gdc_wait")


def _text(version: tuple[int, int] | None, separator: str = ".") -> str:
    return separator.join(map(str, version)) if version else "(not installed)"


class Crossover(NamedTuple):
    """From how many queries and keys on the int8 route is not slower than torch; None: from no number on."""

    queries: int
    masked: int | None
    unmasked: int | None


# head_dim up to 64, and above; eager calls, quantisation included. torch is slower under a mask.
# The Hopper kernel on an H200: the crossover cases of bench/bench_attention.py in bench/results/attention.jsonl.
_HOPPER = (Crossover(2048, 3072, 8192), Crossover(2048, 3072, 4608))
# The portable kernel on an H200: as fast as torch's without a mask, but for what quantisation costs.
_HOPPER_PORTABLE = (Crossover(2048, 4096, None), Crossover(2048, 4608, None))
# Elsewhere nothing was measured. int8 products are 2 to 4 times as fast as 16-bit ones there, so this is conservative.
_ELSEWHERE = (Crossover(2048, 4096, 4096), Crossover(2048, 4096, 4096))


def crossover(device: torch.device, head_dim: int) -> Crossover:
    """The crossover on `device`; one that is no GPU (a meta tensor's) stands for the current GPU, if there is one."""
    pair = _ELSEWHERE
    if torch.cuda.is_available() and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device if device.type == "cuda" else None)
        if capability == (9, 0):
            pair = _HOPPER if _hopper_kernel(head_dim) else _HOPPER_PORTABLE
    return pair[head_dim > 64]


def _hopper_kernel(head_dim: int) -> bool:
    from .configs import HOPPER_GLUON, hopper_unavailable, value_columns

    return value_columns(head_dim) in HOPPER_GLUON and hopper_unavailable() is None
