"""Check a rival against float64 before it is timed, on a random part of the heads and query rows and on all keys."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from cases import Case, Problem
from timing import Run
from torch import Tensor

from sdpa_router import testing

_HEADS = 4
_ROWS = 256


@dataclass(frozen=True)
class Sample:
    """The heads and query rows that are compared; the first and the last of both are always among them."""

    heads: list[int]
    rows: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """[B, H, Q, ...] cut to [B, heads, rows, ...]."""
        return tensor[:, self.heads].index_select(2, self.rows)


def choose_sample(case: Case, device: torch.device, seed: int) -> Sample:
    """Draw a sample of a case: everything if the case is small."""
    draw = random.Random(seed)

    def some(count: int, wanted: int) -> list[int]:
        return sorted({0, count - 1, *draw.sample(range(count), min(count, wanted))})

    return Sample(some(case.heads, _HEADS), torch.tensor(some(case.q_len, _ROWS), device=device))


def reference(problem: Problem, sample: Sample) -> tuple[Tensor, Tensor]:
    """The sample's output and log-sum-exp in float64."""
    mask = problem.mask
    if problem.is_causal:
        mask = torch.arange(problem.case.kv_len, device=sample.rows.device) <= sample.rows[:, None]
    elif problem.mask_name == "dense" and mask is not None:
        mask = mask.index_select(2, sample.rows)
    keys, values = problem.key[:, sample.heads], problem.value[:, sample.heads]
    return testing.sdpa_oracle(sample.of(problem.query), keys, values, mask)


@dataclass(frozen=True)
class Check:
    """error: rms(out - ref) / rms(ref).  lse_error, lse_max: rms and largest difference (natural log) over all rows.

    extra_mb: what one call allocated at its peak, its output included.
    """

    error: float
    lse_error: float | None
    lse_max: float | None
    extra_mb: float | None


def check(run: Run, problem: Problem, sample: Sample, truth: tuple[Tensor, Tensor]) -> Check:
    """Compare one call of a run with the truth; an output that is not finite everywhere has an infinite error."""
    cuda = problem.query.is_cuda
    with run.context():
        run.call()  # compiles, and tunes where a rival does
        # Freed memory goes to the next allocation of its size: what a call leaves unwritten is NaN.
        torch.full_like(problem.query, float("nan"))
        before = 0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        answer = run.call()
    extra = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else None
    out, lse = answer if isinstance(answer, tuple) else (answer, None)
    if not isinstance(out, Tensor) or out.shape != problem.query.shape or out.dtype != problem.query.dtype:
        raise TypeError(f"answered {getattr(out, 'dtype', type(out))} {tuple(getattr(out, 'shape', ()))}")
    error = testing.relative_error(sample.of(out), truth[0]) if bool(out.isfinite().all()) else float("inf")
    if lse is None:
        return Check(error, None, None, extra)
    return Check(error, *_lse_errors(sample.of(lse).double(), truth[1]), extra)


def _lse_errors(lse: Tensor, truth: Tensor) -> tuple[float, float]:
    """rms and largest difference; -inf, an empty row, equals only itself."""
    difference = torch.where(lse == truth, 0.0, (lse - truth).abs())
    return difference.square().mean().sqrt().item(), difference.max().item()
