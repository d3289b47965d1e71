"""Named attention shapes with the model they come from, named masks, and the inputs drawn for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sdpa_router import testing

# torch's memory-efficient backend answers garbage for larger dense masks in some releases.
_DENSE_LIMIT = 2**32


@dataclass(frozen=True)
class Case:
    """One call: shapes, where they come from, and which masks make sense on it.

    gap: the keys that the mask of that name hides (padding behind the text of a joint or cross attention).
    """

    name: str
    batch: int
    heads: int
    q_len: int
    kv_len: int
    head_dim: int
    source: str
    is_causal: bool = False
    masks: tuple[str, ...] = ("none", "fade")
    gap: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(B, H, Q, K, D)."""
        return self.batch, self.heads, self.q_len, self.kv_len, self.head_dim

    @property
    def flops(self) -> float:
        """Effective operations, 4*B*H*Q*K*D, half of it for causal: what masks and tails save is not taken off."""
        full = 4.0 * self.batch * self.heads * self.q_len * self.kv_len * self.head_dim
        return full / 2 if self.is_causal else full


def _cases(*cases: Case) -> dict[str, Case]:
    return {case.name: case for case in cases}


def _square(name: str, heads: int, length: int, head_dim: int, source: str) -> Case:
    return Case(name, 1, heads, length, length, head_dim, source)


CASES = _cases(
    Case("h3-window", 1, 56, 4096, 33600, 128, "one window of a long video: [text | refs | audio | video] keys, 480p",
         masks=("none", "fade", "half", "gap", "dense"), gap=(200, 512)),
    Case("wan-14b", 1, 40, 32760, 32760, 128, "Wan 2.1 14B, 480p (832x480), 81 frames"),
    Case("wan-14b-720p", 1, 40, 75600, 75600, 128, "Wan 2.1 14B, 720p (1280x720), 81 frames", masks=("none",)),
    Case("flux", 1, 24, 4608, 4608, 128, "FLUX.1, 1024x1024: 512 text and 4096 image tokens",
         masks=("none", "gap"), gap=(200, 512)),
    Case("hunyuan", 1, 24, 119056, 119056, 128, "HunyuanVideo, 720p, 129 frames: 118800 video, then 256 text tokens",
         masks=("none", "gap"), gap=(118900, 119056)),
    Case("qwen-image", 1, 24, 7401, 7401, 128, "Qwen-Image, 1328x1328: 512 text tokens (200 used), 6889 image tokens",
         masks=("none", "gap"), gap=(200, 512)),
    Case("ltx", 1, 32, 8064, 8064, 64, "LTX-Video, 768x512, 161 frames", masks=("none",)),
    Case("sdxl", 2, 10, 4096, 4096, 64, "SDXL, 1024x1024, 64x64 latent tokens, batch 2 for guidance", masks=("none",)),
    _square("d64-8k", 24, 8192, 64, "head_dim 64"),
    _square("d96-8k", 16, 8192, 96, "head_dim 96"),
    _square("d256-8k", 16, 8192, 256, "head_dim 256"),
    Case("causal-16k", 1, 24, 16384, 16384, 128, "language model prefill", is_causal=True, masks=("none",)),
    Case("cross-512", 1, 40, 32760, 512, 128, "Wan 2.1 14B cross attention: 512 text keys, 120 used",
         masks=("none", "gap"), gap=(120, 512)),
    *(Case(f"short-{n}", 1, 24, n, n, 128, "short sequences: launch cost", masks=("none", "fade", "dense"))
      for n in (256, 512, 1024)),
    Case("smoke", 1, 2, 70, 96, 64, "a tiny call for the CPU and Triton's interpreter",
         masks=("none", "fade", "half", "gap", "dense"), gap=(10, 40)),
    *(_square(f"crossover-d{d}-{n}", 24, n, d, "where the int8 route begins to pay")
      for d in (64, 128) for n in (256, 512, 1024, 1536, 2048, 3072, 4096, 6144)),
)  # fmt: skip

GROUPS = {
    "crossover": tuple(name for name in CASES if name.startswith("crossover-")),
    "short": tuple(name for name in CASES if name.startswith("short-")),
    "all": tuple(name for name in CASES if not name.startswith(("crossover-", "smoke"))),
}


def names_to_cases(names: str) -> list[Case]:
    """Cases of a comma-separated list of case and group names; ValueError names what is not known."""
    chosen: dict[str, Case] = {}
    for name in names.split(","):
        members = GROUPS.get(name, (name,))
        if unknown := [member for member in members if member not in CASES]:
            raise ValueError(f"unknown case {unknown[0]!r}; accepted: {', '.join([*GROUPS, *CASES])}")
        chosen.update({member: CASES[member] for member in members})
    return list(chosen.values())


def _fade(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """float32 [1, 1, 1, K]; its values fit `dtype`, so that rivals which need a mask in q's dtype lose nothing."""
    if case.name == "h3-window":
        bias = testing.banded_window(device=device).bias
    else:
        bias = testing.fade_bias(case.kv_len, device=device)
    return bias.to(dtype).float()


def _half(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """bool [1, 1, 1, K] that keeps the first half of the keys."""
    return (torch.arange(case.kv_len, device=device) < case.kv_len // 2).view(1, 1, 1, -1)


def _gap(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """bool [1, 1, 1, K] that hides the case's gap, or the second quarter of the keys where it has none."""
    start, stop = case.gap or (case.kv_len // 4, case.kv_len // 2)
    keys = torch.arange(case.kv_len, device=device)
    return ((keys < start) | (keys >= stop)).view(1, 1, 1, -1)


def _dense(case: Case, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, 1, Q, K] of N(0, 1) in `dtype`: a full mask."""
    if case.q_len * case.kv_len > _DENSE_LIMIT:
        raise ValueError(f"a dense mask of {case.q_len} x {case.kv_len} is over the accepted 2**32 elements")
    return torch.randn(1, 1, case.q_len, case.kv_len, dtype=dtype, device=device)


MASKS: dict[str, Callable[[Case, torch.dtype, torch.device], Tensor | None]] = {
    "none": lambda case, dtype, device: None,
    "fade": _fade,
    "half": _half,
    "gap": _gap,
    "dense": _dense,
}

INPUTS = {"gaussian": testing.gaussian, "outliers": testing.outliers}


@dataclass(frozen=True)
class Problem:
    """The arguments of one call, query [B, H, Q, D], key and value [B, H, K, D], all contiguous."""

    case: Case
    query: Tensor
    key: Tensor
    value: Tensor
    mask_name: str
    mask: Tensor | None
    lse: bool = False

    @property
    def is_causal(self) -> bool:
        return self.case.is_causal

    def mask_in_query_dtype(self) -> Tensor | None:
        """The mask for whoever needs q's dtype: a float32 mask is cast (exactly, see _fade), a bool one stays."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return self.mask
        return self.mask.to(self.query.dtype)


def draw(case: Case, inputs: str, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh query, key and value for a case."""
    make = INPUTS[inputs]
    return make(case.batch, case.heads, case.q_len, case.kv_len, case.head_dim, dtype=dtype, device=device, seed=seed)
