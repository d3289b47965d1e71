"""What is installed here, what the int8 route can run on and who replaced torch's SDPA."""

from __future__ import annotations

import functools
import inspect
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from sdpa_router import __version__
from sdpa_router.backends.base import candidates, find_backend
from sdpa_router.call import Call
from sdpa_router.cost_files import table_for, tuned_table
from sdpa_router.decide import switched_off
from sdpa_router.decision import Code, Reason
from sdpa_router.kernels.int8_attention.configs import kernel_name, why_portable
from sdpa_router.kernels.int8_attention.limits import LIMITS, Crossover, unavailable
from sdpa_router.settings import Settings

_PACKAGES = ("torch", "triton", "numpy", "diffusers", "transformers", "comfy-kitchen", "sageattention", "fa3-fwd")
_VARIABLES = ("SDPA_ROUTER", "SDPA_ROUTER_JSONL", "SDPA_ROUTER_LOG", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")


def environment() -> dict[str, Any]:
    """Return versions, devices with what runs there, settings from the environment and who patched SDPA."""
    return {
        "sdpa_router": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {**{name: _version(name) for name in _PACKAGES}, "torch": torch.__version__},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "devices": [_device_facts(device) for device in _devices()],
        "int8": {
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in LIMITS.dtypes],
            "max_head_dim": LIMITS.max_head_dim,
            "pv": list(LIMITS.pv),
            "precision": list(LIMITS.precision),
        },
        "backends": backends(),
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "sdpa": sdpa_owner(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*(torch.device("cuda", index) for index in range(gpus)), torch.device("cpu")]


def why_not(device: torch.device) -> str | None:
    """Return a sentence on why the int8 kernel can't run on `device`, or None if it can."""
    found = unavailable(device)
    if found is None:
        return None
    code, given, accepted = found
    return Reason(Code[code.upper()], given, accepted).detail


def _device_facts(device: torch.device) -> dict[str, Any]:
    why = why_not(device)
    facts: dict[str, Any] = {"device": str(device), "name": platform.machine(), "int8": why is None, "why": why}
    off = switched_off()
    if why is None and off is not None:
        facts.update(int8=False, why=Reason(Code.DISABLED, off, "any other value, or none").detail)
    facts["kernel"] = _kernel(device) if facts["int8"] else None
    facts["costs"] = _costs(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["name"] = properties.name
        facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return facts


def backends() -> dict[str, str | None]:
    """Return why a usual call on the current device can't go to each backend, None for those it can go to."""
    device = _devices()[0]
    with FakeTensorMode():
        sample = torch.empty(1, 1, 256, 128, dtype=torch.bfloat16, device=device)
    call, settings = Call(sample, sample, sample), Settings(min_kv=0)
    return {name: _all(find_backend(name).reasons_against(call, settings)) for name in candidates()}


def _all(reasons: Iterator[Reason]) -> str | None:
    return ", and ".join(f"no, {reason.detail}" for reason in reasons).replace(", and no, ", ", and ") or None


def _costs(device: torch.device) -> str | None:
    """Return which measured costs hold on `device`."""
    if device.type != "cuda":
        return None
    table = table_for(device)
    if table is None:
        return "none measured: rules decide; `sdpa-router tune` measures"
    errors = ", ".join(f"{name} {table.error_class(name):.2g}" for name in table.errors)
    lengths = (table.crossover(head_dim) for head_dim in (64, 128))
    pays = ", ".join(_pays(length) for length in lengths)
    kind = "tuned" if tuned_table(device) is not None else "shipped"
    return f"{kind}, {len(table.points)} calls ({table.source}); errors: {errors}; int8 pays from {pays} keys"


def _pays(length: Crossover | None) -> str:
    return "?" if length is None else f"{length.masked or 'no number of'} (masked) and {length.unmasked or 'no number'}"


def _kernel(device: torch.device) -> str:
    """Return which int8 kernel a usual call gets on `device`, and why if it is not the fastest one."""
    sample = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    why = why_portable(sample, sample)
    return kernel_name(sample, sample) + (f", because {why}" if why else "")


def sdpa_owner() -> dict[str, Any]:
    """Return whether `F.scaled_dot_product_attention` is torch's own function, and else where it was defined.

    >>> sdpa_owner()
    {'patched': False, 'by': None, 'file': None}
    """
    function: Any = F.scaled_dot_product_attention
    if inspect.isbuiltin(function) and not isinstance(function, functools.partial):
        return {"patched": False, "by": None, "file": None}
    function = function.func if isinstance(function, functools.partial) else function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None) or type(function).__module__
    code = getattr(function, "__code__", None)
    return {"patched": True, "by": f"{module}.{name}", "file": code.co_filename if code else None}
