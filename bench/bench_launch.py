"""Time the host's part of a warm call: what Python, torch's dispatcher, Triton and the driver take to enqueue it.

Calls are enqueued back to back without waiting, on shapes whose work is shorter than the enqueuing, so that the host is
what is measured; medians of rounds in turns. `replayed` repeats the launches of the first call
(kernels/int8_attention/launch.py), `moved` those of tensors that lie elsewhere each time, `bound` lets Triton bind each
launch anew. --parts: what the parts of a replayed call take, and torch's own. Usage: python bench/bench_launch.py
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from records import RESULTS, Invocation, commit_here, the_gpu

import sdpa_router
from sdpa_router import int8_attention
from sdpa_router.decide import Call
from sdpa_router.kernels.int8_attention import launch, op
from sdpa_router.kernels.int8_attention import plan as planning
from sdpa_router.recent import answered_before
from sdpa_router.testing import relative_error, sdpa_oracle

CALLS, ROUNDS = 100, 9


def host_us(call: Callable[[], object]) -> float:
    """Microseconds a call until it returns, of one that was made before."""
    for _ in range(3):  # the first is bound, the second fills in, the third is recognised
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return took / CALLS * 1e6


def bound(call: Callable[[], object]) -> Callable[[], object]:
    """The call with every launch bound anew."""

    def again() -> object:
        launch.forget()
        return call()

    return again


def moved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor | None) -> Callable[[], object]:
    """The call on copies of the query, more than a plan keeps filled in arguments for."""
    copies = itertools.cycle([q.clone() for _ in range(150)])
    return lambda: int8_attention(next(copies), k, v, m)


def parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The parts of a replayed call without a mask, and torch's own functions that they use or replace."""
    numbers, scaled = (False, None, False, "auto", "auto"), (False, 1.0 / math.sqrt(q.shape[3]), "auto", "auto")
    for _ in range(3):
        int8_attention(q, k, v)
    out, call = torch.empty_like(q), Call(q, k, v, None, 0.0, False, None, False)
    known, addresses = launch.recall(numbers, (q, k, v, None))
    if known is None:
        raise RuntimeError("the call was not remembered")
    plan, addresses = known.plan, [*addresses, out.data_ptr(), 0]
    plan.run(addresses)
    ready = next(filled for at, filled in plan.filled.items() if at[1:7] == tuple(addresses))
    found: dict[str, Callable[[], object]] = {
        f"launch {number} of {launched.kernel.__name__}": functools.partial(function, *args)
        for number, (launched, (function, args)) in enumerate(zip(plan.launches, ready, strict=True))
    }
    return found | {
        "plan": lambda: plan.run(addresses),
        "recall": lambda: launch.recall(numbers, (q, k, v, None)),
        "replay": lambda: launch.replay(scaled, (q, k, v, None, out, None), bool),
        "attend": lambda: op.attend(q, k, v, None, *numbers),
        "answered_before": lambda: answered_before(call, "auto", "auto"),
        "torch.empty": lambda: torch.empty(q.shape, dtype=q.dtype, device=q.device),
        "torch.empty_like": lambda: torch.empty_like(q),
        "workspace": lambda: planning._raw_delete(planning._raw_alloc(1 << 20, 0)),
        "current_stream": torch.cuda.current_stream,
        "nothing": lambda: None,
    }


def kinds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor | None) -> dict[str, Callable[[], object]]:
    """The calls to compare, by name."""
    operator = torch.ops.sdpa_router.int8_attention

    @sdpa_router.route(min_kv=1, log=False)
    def routed() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, m)

    return {
        "replayed": lambda: int8_attention(q, k, v, m),
        "operator": lambda: operator(q, k, v, m, False, None, False, "auto", "auto"),
        "routed": routed,
        "moved": moved(q, k, v, m),
        "lse": lambda: int8_attention(q, k, v, m, return_lse=True),
        "fp8": lambda: int8_attention(q, k, v, m, pv="fp8"),
        "high": lambda: int8_attention(q, k, v, m, precision="high"),
        "bound": bound(lambda: int8_attention(q, k, v, m)),
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, m),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true", help="compare with float64 only, and so compile")
    parser.add_argument("--parts", action="store_true", help="time the parts of a call instead")
    parser.add_argument("--kinds", default="", help="the kinds of calls to time, separated by commas; default all")
    parser.add_argument("--commit", default=None, help="recorded where this is no git checkout")
    parser.add_argument("--out", type=Path, default=RESULTS / "launch.jsonl")
    options = parser.parse_args()
    invocation = Invocation(the_gpu(parser), options.out, options.commit or commit_here())
    torch.manual_seed(0)
    calls: dict[tuple[str, str], Callable[[], object]] = {}
    for head_dim, masked in itertools.product((64, 128), (False, True)):
        name = f"D{head_dim}{' masked' if masked else ''}"
        tensors = [torch.randn(1, 2, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (128, 256, 256)]
        mask = torch.randn(1, 1, 1, 256, device="cuda", dtype=torch.bfloat16) if masked else None
        if options.parts:
            calls |= {} if masked else {(name, part): call for part, call in parts(*tensors).items()}
            continue
        exact = sdpa_oracle(*tensors, mask)[0]
        for kind, call in kinds(*tensors, mask).items():
            if options.kinds and kind not in options.kinds.split(","):
                continue
            call()
            answer = call()  # a warm one
            error = relative_error(answer[0] if isinstance(answer, tuple) else answer, exact)
            if not error < (0.045 if kind == "fp8" else 0.0135):
                raise RuntimeError(f"{name} {kind}: error {error:.4f}")
            calls[name, kind] = call
    times: dict[tuple[str, str], list[float]] = {case: [] for case in calls}
    if options.check_only:
        return 0
    for _ in range(ROUNDS):
        for case, call in calls.items():
            times[case].append(host_us(call))
    for (name, kind), found in times.items():
        us = statistics.median(found[1:])
        print(f"{name} {kind}: {us:.1f} us", flush=True)
        invocation.write({"case": name, "impl": kind, "host_us": round(us, 2)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
