"""Time the host's part of a warm call: what Python, torch's dispatcher, Triton and the driver take to enqueue it.

Calls are enqueued back to back without waiting, on shapes whose work is shorter than the enqueuing, so that the host is
what is measured; medians of rounds in turns. `replayed` repeats the launches of the first call
(kernels/int8_attention/launch.py), `bound` lets Triton bind each launch anew. Usage: python bench/bench_launch.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import sdpa_router
from sdpa_router import int8_attention
from sdpa_router.kernels.int8_attention import launch

CALLS, ROUNDS = 100, 9


def host_us(call: Callable[[], object]) -> float:
    """Microseconds a call until it returns."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=argparse.FileType("a"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    calls: dict[str, Callable[[], object]] = {}
    for head_dim, masked in itertools.product((64, 128), (False, True)):
        query, key, value = (
            torch.randn(1, 2, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (128, 256, 256)
        )
        mask = torch.randn(1, 1, 1, 256, device="cuda", dtype=torch.bfloat16) if masked else None
        name = f"D{head_dim}{' masked' if masked else ''}"
        ours = lambda q=query, k=key, v=value, m=mask: int8_attention(q, k, v, m)  # noqa: E731
        lse = lambda q=query, k=key, v=value, m=mask: int8_attention(q, k, v, m, return_lse=True)  # noqa: E731
        fp8 = lambda q=query, k=key, v=value, m=mask: int8_attention(q, k, v, m, pv="fp8")  # noqa: E731
        op = lambda q=query, k=key, v=value, m=mask: torch.ops.sdpa_router.int8_attention(  # noqa: E731
            q, k, v, m, False, None, False, "auto", "auto"
        )
        calls |= {f"{name} replayed": ours, f"{name} operator": op, f"{name} lse": lse, f"{name} fp8": fp8}
        calls[f"{name} bound"] = bound(ours)
        calls[f"{name} torch"] = lambda q=query, k=key, v=value, m=mask: F.scaled_dot_product_attention(q, k, v, m)

        def routed(q=query, k=key, v=value, m=mask):
            return F.scaled_dot_product_attention(q, k, v, m)

        calls[f"{name} routed"] = sdpa_router.route(min_kv=1, log=False)(routed)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(host_us(call))
    for name, found in times.items():
        us = statistics.median(found[1:])
        print(f"{name}: {us:.1f} us", flush=True)
        if arguments.out:
            row = {"case": name, "host_us": us, "device": torch.cuda.get_device_name()}
            arguments.out.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
