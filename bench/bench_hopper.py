"""Check and time the Hopper kernel and its variants beside the portable kernel and torch, on one sm_90 GPU.

Each head_dim is checked against float64 in a process of its own with a deadline, so that a hang or a broken context
costs one row; then the variants that were right are timed, interleaved, on quantised inputs (`kernel`), with the time
of quantisation and of the whole operator beside them.
Usage: python bench/bench_hopper.py [--out FILE.jsonl] [--seconds 280] [--only CASE ...] [--no-check]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sdpa_router.kernels.int8_attention import configs
from sdpa_router.testing import sdpa_oracle


class Variant(NamedTuple):
    """Of the Gluon kernel: ring stages, where the turn passes (0: never), emulated exp2, bound (None: its own)."""

    stages: int
    turn: int = 0
    emulated: bool = False
    limit: float | None = None
    warpgroups: int = 2
    block_n: int = 128
    q_reg: bool = False

    def __str__(self) -> str:
        text = f"{self.warpgroups}x64x{self.block_n} s{self.stages}"
        text += f" t{self.turn}" if self.turn else ""
        return text + " emu" * self.emulated + " online" * (self.limit is not None) + " qreg" * self.q_reg


# name: batch, heads, key heads, query length, key length, head_dim, causal, masks
CASES = {
    "h3-window": (1, 56, 56, 4096, 33600, 128, False, ("none", "fade", "half", "lse")),
    "d64-8k": (1, 24, 24, 8192, 8192, 64, False, ("none", "fade")),
    "d256-8k": (1, 16, 16, 8192, 8192, 256, False, ("none", "fade")),
    "causal-16k": (1, 24, 24, 16384, 16384, 128, True, ("none",)),
    "flux": (1, 24, 24, 4608, 4608, 128, False, ("none",)),
    "wan-14b": (1, 40, 40, 32760, 32760, 128, False, ("none",)),
}


def variants(head_dim: int) -> list[Variant]:
    """What is worth measuring: the base, the same with the online softmax, and what differs from it in one thing."""
    if head_dim > 128:
        base = Variant(2, block_n=64)
        return [base, base._replace(limit=-1.0), base._replace(turn=1), base._replace(turn=2), base._replace(stages=3)]
    base = Variant(3)
    found = [base, base._replace(limit=-1.0), base._replace(turn=1), base._replace(turn=2), base._replace(q_reg=True)]
    found += [base._replace(emulated=True), Variant(4, warpgroups=3, block_n=64)]
    if head_dim > 64:
        found += [Variant(4, warpgroups=3, block_n=64, q_reg=True), base._replace(stages=2)]
    return found


def config(head_dim: int, variant: Variant | None) -> configs.Config:
    if variant is None:
        return configs.config_for(90, head_dim)
    return configs.Config(64 * variant.warpgroups, variant.block_n, 4, variant.stages, True, True)


def run_kernel(quantized: Any, value: Any, variant: Variant | None, is_causal: bool, out: Any, lse: Any) -> None:
    settings = config(out.shape[3], variant)
    if variant is None:
        from sdpa_router.kernels.int8_attention import forward

        forward.attention(quantized, value, settings, is_causal=is_causal, out=out, lse=lse)
    else:
        from sdpa_router.kernels.int8_attention import hopper

        hopper.attention(
            quantized, value, settings, is_causal=is_causal, out=out, lse=lse, turn=variant.turn, emulated=variant.emulated,
            limit=variant.limit, q_reg=variant.q_reg,
        )  # fmt: skip


def quantized_for(q: Any, k: Any, mask: Any, scale: float, variant: Variant | None, lse: bool) -> Any:
    from sdpa_router.kernels.int8_attention.quantize import quantize

    return quantize(q, k, mask, scale, config(q.shape[3], variant), lse=lse)


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    if not torch.equal(out.isnan(), ref.isnan()):
        return math.nan
    kept = ~ref.isnan()
    difference = (out.double() - ref)[kept].pow(2).mean().sqrt()
    return (difference / ref[kept].pow(2).mean().sqrt().clamp(min=1e-30)).item()


def lse_difference(lse: torch.Tensor, ref: torch.Tensor) -> float:
    if not torch.equal(lse == -math.inf, ref == -math.inf):
        return math.nan
    kept = ref.isfinite()
    return (lse.double() - ref)[kept].abs().max().item() if kept.any() else 0.0


def small_problems(head_dim: int, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(name, (q, k, v, mask), options): odd tails, groups, strides and every kind of bias."""

    def draw(b: int, h: int, hk: int, m: int, n: int, bshd: bool = False) -> tuple[torch.Tensor, ...]:
        shapes = ((b, h, m), (b, hk, n), (b, hk, n))
        if bshd:
            made = (torch.randn(s[0], s[2], s[1], head_dim, device="cuda").to(dtype).transpose(1, 2) for s in shapes)
        else:
            made = (torch.randn(*s, head_dim, device="cuda").to(dtype) for s in shapes)
        q, k, v = made
        return q, k + 2 * torch.randn(head_dim, device="cuda").to(dtype), v

    for shape in (
        (1, 2, 2, 128, 128),
        (2, 4, 2, 300, 1000),
        (1, 3, 3, 129, 257),
        (1, 2, 2, 64, 4097),
        (1, 4, 1, 77, 383),
        (1, 1, 1, 1, 1),
    ):
        yield f"{shape}", (*draw(*shape), None), {}
        yield f"{shape} causal", (*draw(*shape), None), {"is_causal": True}
        yield f"{shape} bshd", (*draw(*shape, bshd=True), None), {"bshd": True}
    shape = (2, 4, 2, 200, 1000)
    n = shape[4]
    bias = {
        "randn": torch.randn(1, 1, 1, n),
        "batch head": torch.randn(2, 4, 1, n) * 2,
        "large": torch.randn(2, 1, 1, n) * 40,
        "absorbed": torch.full((1, 1, 1, n), -1e9),
        "first tile": torch.zeros(1, 1, 1, n).index_fill(3, torch.arange(128), -math.inf),
        "last tiles": torch.zeros(1, 1, 1, n).index_fill(3, torch.arange(500, n), -math.inf),
        "only one key": torch.full((1, 1, 1, n), -math.inf).index_fill(3, torch.tensor([391]), 3.0),
        "gaps": torch.where(torch.rand(2, 4, 1, n) < 0.5, -math.inf, 1.5),
        "nan": torch.zeros(1, 4, 1, n).index_put(
            (torch.tensor(0), torch.tensor(1), torch.tensor(0), torch.tensor(7)), torch.tensor(math.nan)
        ),
        "inf": torch.zeros(1, 4, 1, n).index_put(
            (torch.tensor(0), torch.tensor(2), torch.tensor(0), torch.tensor(900)), torch.tensor(math.inf)
        ),
    }
    bias["empty heads"] = bias["batch head"].clone()
    bias["empty heads"][0, 1] = -math.inf
    bias["empty heads"][1] = -math.inf
    for name, mask in bias.items():
        yield f"bias {name}", (*draw(*shape), mask.cuda()), {"ref_scale": 0.0} if name == "absorbed" else {}
    yield "bool", (*draw(*shape), torch.rand(2, 1, 1, n, device="cuda") < 0.3), {}
    yield "negative scale", (*draw(*shape), None), {"scale": -1 / math.sqrt(head_dim)}
    yield "scale 0", (*draw(*shape), None), {"scale": 0.0}
    q, k, v = draw(*shape)
    q[..., 0] *= 8
    k[..., 0] *= 8
    yield "outliers", (q, k, v, None), {"budget": 0.03}
    yield "outliers fade", (q, k, v, torch.linspace(0, -9, n, device="cuda").view(1, 1, 1, n)), {"budget": 0.03}
    q, k, v = draw(*shape)
    yield "sharp", (q * 20, k, v, None), {"budget": 0.4}
    q[0, 1, 5, 3] = math.nan
    yield "nan query", (q, k, v, None), {}


def check(head_dim: int, dtype: torch.dtype, index: int) -> None:
    """Print one line a failure; the last line says how many were tried. Index 0: portable, base and online; else one."""
    failed = tried = 0
    worst: dict[str, float] = {}
    for name, (q, k, v, mask), options in small_problems(head_dim, dtype):
        if index and not name.startswith(("(2, 4", "(1, 3", "bias gaps", "bias empty", "outliers")):
            continue
        causal, budget = options.get("is_causal", False), options.get("budget", 0.0145)
        scale = options.get("scale", 1 / math.sqrt(head_dim))
        ref, ref_lse = sdpa_oracle(
            q, k, v, None if mask is None else mask.expand(*q.shape[:3], k.shape[2]), is_causal=causal,
            scale=options.get("ref_scale", scale), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        cases: list[tuple[Variant | None, bool]] = [(variants(head_dim)[index], True)]
        if not index:
            cases += [(None, True), (variants(head_dim)[1], True)]
            cases += [(variants(head_dim)[0], False)] if name.startswith("(2, 4") else []
        for variant, wanted in cases:
            tried += 1
            problem = ""
            try:
                out = torch.full_like(q, 7.0)
                if options.get("bshd"):
                    out = torch.full_like(q.transpose(1, 2).contiguous(), 7.0).transpose(1, 2)
                lse = torch.full(q.shape[:3], 7.0, device="cuda") if wanted else None
                made = quantized_for(q, k, mask, scale, variant, wanted)
                run_kernel(made, v, variant, causal, out, lse)
                error = relative(out, ref)
                worst[str(variant)] = max(worst.get(str(variant), 0.0), error if budget < 0.02 else 0.0)
                if not error <= budget:
                    problem = f"error {error:.4f}"
                if (ref_lse == -math.inf).any() and (out[ref_lse == -math.inf] != 0).any():
                    problem += " empty rows not 0"
                tolerance = 3.0 if budget > 0.02 else 64.0 if "ref_scale" in options else 0.12
                if lse is not None and not lse_difference(lse, ref_lse) <= tolerance:
                    problem += f" lse {lse_difference(lse, ref_lse):.4f}"
            except Exception as error:
                problem = f"{type(error).__name__} {str(error)[:200]}"
            if problem:
                failed += 1
                print(f"  FAILED D{head_dim} {dtype} {name} [{variant}] lse {wanted}: {problem}", flush=True)
    text = ", ".join(f"{name} {error:.4f}" for name, error in worst.items())
    print(f"D{head_dim} {dtype}: {tried - failed} of {tried} right; largest errors: {text}", flush=True)


def median_ms(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Interleaved medians; the L2 cache holds what the call before left."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for r in range(rounds + 2):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            calls[name]()
            end.record()
            end.synchronize()
            if r >= 2:
                times[name].append(begin.elapsed_time(end))
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def mask_of(kind: str, n: int) -> torch.Tensor | None:
    if kind == "fade":
        ramp = torch.linspace(0, math.pi, int(0.2 * n), device="cuda").cos().add(1).div(2).clamp(min=1e-4).log()
        ramp[-1] = math.log(1e-4)
        return torch.cat([ramp.flip(0), torch.zeros(n - 2 * len(ramp), device="cuda"), ramp]).view(1, 1, 1, n)
    if kind == "half":
        return (torch.arange(n, device="cuda") < n // 2).view(1, 1, 1, n)
    return None


def time_case(name: str, kinds: tuple[str, ...], out_path: str | None, warm: bool) -> None:
    """Check at full size on a few rows, then time; a warm run (that fills Triton's cache) only checks."""
    batch, heads, kv_heads, m, n, d, causal, _ = CASES[name]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, h, x, d, device="cuda", dtype=torch.bfloat16)
        for h, x in ((heads, m), (kv_heads, n), (kv_heads, n))
    )
    flops = 4 * batch * heads * m * n * d * (0.5 if causal else 1)
    scale = 1 / math.sqrt(d)
    for kind in kinds:
        mask, wants = mask_of(kind, n), kind == "lse"
        rows = torch.linspace(0, m - 1, 64, device="cuda").long()
        if causal:
            s = q[:, :2, rows].double() @ k[:, :2].double().transpose(-1, -2) * scale
            s = s.masked_fill(torch.arange(n, device="cuda") > rows[:, None], -math.inf)
            ref = torch.softmax(s, -1) @ v[:, :2].double()
        else:
            ref, _ = sdpa_oracle(q[:, :2, rows], k[:, :2], v[:, :2], mask)
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, float] = {}
        tried: list[Variant | None] = [None, *(variants(d) if kind in ("none", "fade") else variants(d)[:1])]
        for variant in tried:
            label = "portable" if variant is None else str(variant)
            try:
                made = quantized_for(q, k, mask, scale, variant, wants)
                out = torch.empty_like(q)
                lse = torch.empty(q.shape[:3], device="cuda") if wants else None

                def call(made: Any = made, variant: Any = variant, out: Any = out, lse: Any = lse) -> None:
                    run_kernel(made, v, variant, causal, out, lse)

                call()
                errors[label] = relative(out[:, :2, rows], ref)
                if errors[label] <= 0.0135:
                    calls[label] = call
                else:
                    print(f"  {name} {kind} [{label}] error {errors[label]:.4f}: not timed", flush=True)
            except Exception as error:
                print(f"  {name} {kind} [{label}] {type(error).__name__} {str(error)[:160]}", flush=True)
        torch.cuda.synchronize()
        if warm:
            print(f"  warm {name} {kind}: " + ", ".join(f"{x} {e:.4f}" for x, e in errors.items()), flush=True)
            continue
        native = mask.to(q.dtype) if mask is not None and mask.is_floating_point() else mask
        calls["torch"] = lambda native=native: F.scaled_dot_product_attention(q, k, v, native, is_causal=causal)
        if kind != "lse":
            base = variants(d)[0]
            calls["quantise"] = lambda mask=mask, base=base: quantized_for(q, k, mask, scale, base, False)
            from sdpa_router.kernels.int8_attention import op  # noqa: F401

            calls["call"] = lambda mask=mask: torch.ops.sdpa_router.int8_attention(
                q, k, v, mask, causal, None, False, "auto"
            )
        times = median_ms(calls, 5 if name == "wan-14b" else 15)
        print(f"{name} {kind}: torch {times['torch']:.3f} ms", flush=True)
        for label, ms in times.items():
            row = {"case": name, "mask": kind, "impl": label, "ms": round(ms, 4), "tflops": round(flops / ms / 1e9, 1)}
            row |= {"error": errors.get(label), "device": torch.cuda.get_device_name(), "torch": torch.__version__}
            print(f"    {label:16s} {ms:8.3f} ms {row['tflops']:7.1f} TFLOPS  x{times['torch'] / ms:.2f}", flush=True)
            if out_path:
                with open(out_path, "a") as file:
                    file.write(json.dumps(row) + "\n")


def run_all(jobs: list[list[str]], at_once: int, each: float, deadline: float) -> None:
    """Run this script with each list of arguments, `at_once` together; print what they wrote, kill the late ones."""
    waiting, running = list(jobs), []
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            if time.monotonic() > deadline - 5:
                print(f"  no time for {' '.join(job)}", flush=True)
                continue
            log = tempfile.TemporaryFile("w+")
            process = subprocess.Popen([sys.executable, __file__, *job], stdout=log, stderr=subprocess.STDOUT)
            running.append((job, process, log, min(deadline, time.monotonic() + each)))
        time.sleep(0.1)
        for item in list(running):
            job, process, log, end = item
            late = time.monotonic() > end
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                process.kill()
                process.wait()
            running.remove(item)
            log.seek(0)
            print("\n".join(line[:300] for line in log.read().strip().splitlines()[-60:]), flush=True)
            if late or process.returncode:
                print(f"  {' '.join(job)}: {'KILLED, late (a deadlock?)' if late else process.returncode}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--seconds", type=float, default=280, help="when to stop, from the start")
    parser.add_argument("--check", nargs=3, metavar=("HEAD_DIM", "DTYPE", "INDEX"))
    parser.add_argument("--warm", nargs=2, metavar=("CASE", "MASK"))
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--no-check", action="store_true")
    options = parser.parse_args()
    if options.check:
        torch.manual_seed(0)
        check(int(options.check[0]), getattr(torch, options.check[1]), int(options.check[2]))
        return 0
    if options.warm or options.case:
        name = options.case or options.warm[0]
        time_case(name, CASES[name][-1] if options.case else (options.warm[1],), options.out, bool(options.warm))
        return 0
    begin = time.monotonic()
    print(f"gluon: {configs.hopper_unavailable() or 'available'}", flush=True)
    jobs = [["--warm", name, kind] for name in options.only for kind in CASES[name][-1]]
    if not options.no_check:
        jobs = [["--check", str(d), "bfloat16", "0"] for d in (128, 64, 256, 96)] + jobs
        jobs += [["--check", str(d), "bfloat16", str(i)] for d in (128, 64, 256) for i in range(2, len(variants(d)))]
        jobs += [["--check", "128", "float16", "0"]]
    run_all(jobs, at_once=16, each=110, deadline=begin + 0.55 * options.seconds)
    print(f"checked after {time.monotonic() - begin:.0f} s", flush=True)
    out = ["--out", options.out] if options.out else []
    cases = [["--case", name, *out] for name in options.only]
    run_all(cases, at_once=1, each=60, deadline=begin + options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
