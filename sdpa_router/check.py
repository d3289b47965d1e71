"""`sdpa-router check`: the int8 kernel of this machine against float64, one row for each kind of input."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sdpa_router import int8_attention
from sdpa_router.info import why_not
from sdpa_router.kernels.int8_attention.limits import LIMITS
from sdpa_router.terminal import console, show, table, verdict
from sdpa_router.testing import BUDGET, fade_bias, gaussian, lse_error, outliers, relative_error, sdpa_oracle

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One kind of input; mask takes (heads, kv_len) and change rearranges (query, key, value)."""

    name: str
    head_dim: int = 64
    kv_len: int | None = None
    kv_heads: int | None = None
    mask: Callable[[int, int], Tensor] | None = None
    change: Callable[[Inputs], Inputs] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[..., Inputs] = gaussian
    budget: float = BUDGET.gaussian
    lse_budget: float = BUDGET.lse


def _keep(keep: Callable[[Tensor], Tensor]) -> Callable[[int, int], Tensor]:
    """Make a bool mask [1, 1, 1, K] out of a condition on the key's place, 0 to 1."""
    return lambda heads, kv_len: keep(torch.arange(kv_len) / kv_len).view(1, 1, 1, -1)


def _per_head(heads: int, kv_len: int) -> Tensor:
    out = (torch.arange(kv_len) + torch.arange(heads)[:, None]) % 3 == 0
    return torch.zeros(heads, kv_len).masked_fill(out, -10000).view(1, heads, 1, kv_len)


def _garbage(inputs: Inputs) -> Inputs:
    """Multiply what the last fifth of the keys holds by 1000, as padding does that was never cleared."""
    query, key, value = inputs
    padding = slice(key.shape[2] * 4 // 5, None)
    key, value = key.clone(), value.clone()
    key[:, :, padding] *= 1000
    value[:, :, padding] *= 1000
    return query, key, value


def _heads_last(inputs: Inputs) -> Inputs:
    """Lay the tensors out as [B, L, H, D] in memory, as diffusers does."""
    query, key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs)
    return query, key, value


# Scores of the outlier inputs are about 8 times as large, and so is what int8 errs by in their sum: 0.021 measured.
_OUTLIERS: dict[str, Any] = {"make": outliers, "budget": BUDGET.outliers, "lse_budget": 0.04}

CASES = (
    Case("head_dim 64"),
    Case("head_dim 128", head_dim=128),
    Case("head_dim 40", head_dim=40),
    Case("head_dim 256", head_dim=256),
    Case("1 key", kv_len=1),
    Case("77 keys", kv_len=77),
    Case("heads last in memory", change=_heads_last),
    Case("grouped heads", kv_heads=1, options={"enable_gqa": True}),
    Case("causal", options={"is_causal": True}),
    Case("scale 0.05", options={"scale": 0.05}),
    Case("scale -0.1", options={"scale": -0.1}),
    Case("fade, float32", mask=lambda heads, kv_len: fade_bias(kv_len)),
    Case("0/-10000 per head", mask=_per_head),
    Case("left padding, bool", mask=_keep(lambda place: place > 0.4)),
    Case("gap, bool", mask=_keep(lambda place: (place < 0.3) | (place > 0.5))),
    Case("garbage in padding", mask=_keep(lambda place: place < 0.79), change=_garbage),
    Case("all keys masked", mask=_keep(lambda place: place > 1)),
    Case("outlier channels", **_OUTLIERS),
    Case("outliers and fade", mask=lambda heads, kv_len: fade_bias(kv_len), **_OUTLIERS),
)


@dataclass(frozen=True)
class Result:
    """Errors of one case: out relative, lse absolute."""

    error: float
    lse_error: float
    good: bool


def run_check() -> int:
    """Check the kernel on the GPU, or in Triton's interpreter if that is on; return 1 if it errs or can't run."""
    interpret = why_not(torch.device("cpu")) is None
    device = torch.device("cpu" if interpret or not torch.cuda.is_available() else "cuda")
    why = why_not(device)
    if why is not None:
        show(f"the int8 kernel can't run here: {why}")
        return 1
    where = "Triton's interpreter on the CPU" if interpret else torch.cuda.get_device_name()
    show(f"int8 attention in {where} against float64")
    names = ("error", "at most", "LSE error", "at most ")
    grid = table("case", "dtype", *names, "", numbers=names)
    good, count, started = True, 0, time.perf_counter()
    with console().status("checking") as status:
        for case, dtype in _plan(device):
            status.update(f"checking: {case.name}")
            result = run_case(case, dtype, device)
            figures = (f"{result.error:.5f}", f"{case.budget}", f"{result.lse_error:.5f}", f"{case.lse_budget}")
            grid.add_row(case.name, str(dtype).removeprefix("torch."), *figures, verdict(result.good))
            good, count = good and result.good, count + 1
    show(grid)
    seconds = time.perf_counter() - started
    show(f"{count} cases, {'all within budget' if good else 'some OVER budget'}; {seconds:.1f} s")
    return 0 if good else 1


def _plan(device: torch.device) -> Iterator[tuple[Case, torch.dtype]]:
    for case in CASES:
        for dtype in LIMITS.dtypes if device.type == "cuda" else LIMITS.dtypes[:1]:
            yield case, dtype


def run_case(case: Case, dtype: torch.dtype, device: torch.device) -> Result:
    """Run the kernel and the oracle on one case; sizes are small on the CPU, where every step is slow."""
    batch, heads, q_len, kv_len = (2, 4, 300, 1000) if device.type == "cuda" else (1, 2, 70, 150)
    kv_len = case.kv_len or kv_len
    inputs = case.make(batch, heads, q_len, kv_len, case.head_dim, kv_heads=case.kv_heads, dtype=dtype, device=device)
    query, key, value = case.change(inputs) if case.change else inputs
    mask = case.mask(heads, kv_len).to(device) if case.mask else None
    out, lse = int8_attention(query, key, value, mask, return_lse=True, **case.options)
    expected, expected_lse = sdpa_oracle(query, key, value, mask, **case.options)
    error, difference = relative_error(out, expected), lse_error(lse, expected_lse)
    return Result(error, difference, good=error <= case.budget and difference <= case.lse_budget)
