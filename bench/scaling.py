"""Step time of one attention call on 1 to 64 GPUs: a model of ring, Ulysses and both, with 16-bit or quantised traffic.

    python bench/scaling.py            # table on stdout, bench/results/scaling.jsonl and scaling.png

Measured: the int8 kernel on one H200 (bench/results/attention.jsonl), fitted as flops / rate + rows * prologue, and
the copy bandwidth. By bench_parallel.py on two H200s (medians of the runs in parallel.jsonl): the bandwidth of their
link, the bytes of a hop, the rate of a long call on one GPU, which is lower, as power limits it, and how long no kernel
ran beside a hop (in a profile, where the host is slower): taken for the start, while the host launches the first
kernels, which every way pays once. The other times of two GPUs are set beside the model's.
Assumed: the other links below (what is left of their nominal rate after protocol); a hop or an all-to-all costs 30 us
besides its bytes; but for that start a ring's transfer hides under attention wholly, an all-to-all not at all;
element-wise passes run at 0.8 of the copy bandwidth; GPUs don't slow each other down; one call waits for the slowest
rank, and all are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records

GPUS = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072, 262_144)
HEADS, HEAD_DIM = 40, 128
PASS_BYTES_S = 0.8 * 4.27e12
LATENCY_S = 30e-6
EXCHANGE_S = 100e-6  # of shapes, before anything else
BYTES = {"16-bit": 4.0, "quantised": 2.142}  # of a key and a value, for each channel: hop_bytes in parallel.jsonl
WAYS = ("ring", "ulysses", "ulysses x ring")

Measured = dict[tuple[str, str], dict[str, Any]]  # lines of parallel.jsonl by case and way
_MEDIANS = ("ms", "hidden", "sending_ms", "link_gb_s")


@dataclass(frozen=True)
class Link:
    """bytes/s that a GPU sends, to GPUs of its host and to those of others; GPUs a host."""

    name: str
    inside: float
    across: float
    host: int

    def slowest(self, gpus: int) -> float:
        """The slowest hop of a ring over so many GPUs."""
        return self.inside if gpus <= self.host else self.across

    def all_to_all(self, sent: float, gpus: int) -> float:
        """Seconds in which every GPU sends `sent` bytes, in equal parts, one of which stays."""
        near = min(gpus, self.host)
        return LATENCY_S + max(sent * (near - 1) / gpus / self.inside, sent * (gpus - near) / gpus / self.across)


@dataclass(frozen=True)
class Kernel:
    """The measured kernel: flops/s, seconds a query row of a head, seconds until all is launched in a sharded call."""

    rate: float
    row: float
    start: float = 0.0

    def seconds(self, heads: float, queries: float, keys: float) -> float:
        """Attention of one tile."""
        return 4 * heads * queries * keys * HEAD_DIM / self.rate + heads * queries * self.row


def fit(rows: Iterable[dict[str, Any]]) -> Kernel:
    """Fit the kernel's two numbers to its measured times, by least squares of the relative error."""
    aa = ab = bb = a1 = b1 = 0.0
    for row in rows:
        wanted = ("int8", "kernel", "none", False, HEAD_DIM)
        if (row["impl"], row["variant"], row["mask"], row["lse"], row["shape"][4]) != wanted or "causal" in row["case"]:
            continue
        batch, heads, queries, keys, _ = row["shape"]
        seconds = row["ms"] / 1e3
        a, b = 4 * batch * heads * queries * keys * HEAD_DIM / seconds, batch * heads * queries / seconds
        aa, ab, bb, a1, b1 = aa + a * a, ab + a * b, bb + b * b, a1 + a, b1 + b
    determinant = aa * bb - ab * ab
    if not determinant:
        raise SystemExit("bench/results/attention.jsonl holds too few measurements of the int8 kernel")
    return Kernel(determinant / (a1 * bb - b1 * ab), (aa * b1 - ab * a1) / determinant)


def at_length(kernel: Kernel, measured: Measured) -> Kernel:
    """Correct the rate by the long call that bench_parallel.py measured on one GPU, and the start by its ring."""
    row, parts = measured.get(("wan-65k", "one GPU")), measured.get(("wan-65k", "ring, in parts"))
    if row is None or parts is None:
        return kernel
    _, heads, queries, keys, _ = row["shape"]
    seconds = row["ms"] / 1e3 - 6 * elements(queries, heads) / PASS_BYTES_S - heads * queries * kernel.row
    bare = (1 - parts["hidden"]) * parts["sending_ms"] / 1e3
    return Kernel(4 * heads * queries * keys * HEAD_DIM / seconds, kernel.row, bare)


def elements(tokens: float, heads: float = HEADS) -> float:
    return tokens * heads * HEAD_DIM


def one_gpu(kernel: Kernel, tokens: float, heads: float = HEADS) -> float:
    """Quantisation of query and key, and attention."""
    return 6 * elements(tokens, heads) / PASS_BYTES_S + kernel.seconds(heads, tokens, tokens)


def ring(kernel: Kernel, link: Link, gpus: int, tokens: float, traffic: str, heads: float = HEADS) -> float:
    """Seconds of a ring; its bytes pass between GPUs as far apart as `link` says, under attention."""
    if gpus == 1:
        return one_gpu(kernel, tokens, heads)
    mine = tokens / gpus
    part = elements(mine, heads)
    hop = LATENCY_S + BYTES[traffic] * part / link.slowest(gpus)
    packing, unpacking = (8 * part, 3 * part) if traffic == "quantised" else (4 * part, 3 * part)
    # A tile: the LSE term reads the query, the partial answer is float32, and merging reads two and writes one.
    tile = kernel.seconds(heads, mine, mine) + (2 + 4) * part / PASS_BYTES_S
    before = (6 * part + packing) / PASS_BYTES_S
    merges = (gpus - 1) * (12 * part + unpacking) / PASS_BYTES_S
    return EXCHANGE_S + kernel.start + before + (gpus - 1) * max(tile, hop) + tile + merges


def ulysses(kernel: Kernel, link: Link, gpus: int, tokens: float, traffic: str) -> float | None:
    """Seconds of Ulysses; None where there are fewer heads than GPUs."""
    if gpus > HEADS:
        return None
    if gpus == 1:
        return one_gpu(kernel, tokens)
    part, most = elements(tokens / gpus), -(-HEADS // gpus)
    exchange = link.all_to_all((2 + BYTES[traffic]) * part, gpus) + link.all_to_all(2 * part, gpus)
    exchange += (2 if traffic == "16-bit" else 1) * LATENCY_S  # query, key and value go one by one
    copies = 4 * 4 * part / PASS_BYTES_S
    if traffic == "16-bit":
        return EXCHANGE_S + kernel.start + exchange + copies + one_gpu(kernel, tokens, most)
    merges = gpus * (12 + 6 + 3) * elements(tokens, most) / PASS_BYTES_S
    tiles = gpus * kernel.seconds(most, tokens, tokens / gpus)
    return EXCHANGE_S + kernel.start + exchange + copies + tiles + merges + 14 * part / PASS_BYTES_S


def both(kernel: Kernel, link: Link, gpus: int, tokens: float, traffic: str) -> float | None:
    """Seconds of Ulysses inside of each host and a ring over the hosts; None where that is one of the two alone."""
    hosts = gpus // link.host
    if hosts < 2 or link.host > HEADS:
        return None
    part = elements(tokens / gpus)
    exchange = link.all_to_all(6 * part, link.host) + link.all_to_all(2 * part, link.host)
    copies = 4 * 4 * part / PASS_BYTES_S
    between = Link(link.name, link.across, link.across, hosts)
    return exchange + copies + ring(kernel, between, hosts, tokens, traffic, HEADS / link.host)


MODEL: dict[str, Callable[..., float | None]] = {"ring": ring, "ulysses": ulysses, "ulysses x ring": both}


def links(measured: Measured) -> tuple[Link, ...]:
    """NVLink as measured, if it was, and the assumed others."""
    speeds = [row["link_gb_s"] for row in measured.values() if row.get("link_gb_s")]
    nvlink = (max(speeds) if speeds else 360.0) * 1e9
    return (
        Link("NVLink everywhere", nvlink, nvlink, 64),
        Link("8 GPUs by NVLink, hosts by 400G a GPU", nvlink, 45e9, 8),
        Link("PCIe 5.0 x16", 50e9, 45e9, 8),
    )


def read(name: str) -> list[dict[str, Any]]:
    path = records.RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def medians(rows: list[dict[str, Any]]) -> Measured:
    """A line for each case and way on two GPUs: numbers are medians over the runs, which differ by 3 % and more."""
    kept: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["gpus"] == 2:
            kept.setdefault((row["case"], row["way"]), []).append(row)
    found = {}
    for key, lines in kept.items():
        numbers = {name: [line[name] for line in lines if line.get(name) is not None] for name in _MEDIANS}
        found[key] = {**lines[-1], **{name: statistics.median(seen) for name, seen in numbers.items() if seen}}
    return found


def step_times(kernel: Kernel, all_links: tuple[Link, ...]) -> list[dict[str, Any]]:
    """Every way over every link, number of GPUs and length."""
    rows = []
    for link in all_links:
        for tokens in LENGTHS:
            for gpus in GPUS:
                for way in WAYS:
                    for traffic in BYTES:
                        seconds = MODEL[way](kernel, link, gpus, tokens, traffic)
                        if seconds is not None:
                            speedup = one_gpu(kernel, tokens) / seconds
                            found = {"link": link.name, "tokens": tokens, "gpus": gpus, "way": way, "traffic": traffic}
                            rows.append({**found, "ms": round(seconds * 1e3, 4), "speedup": round(speedup, 3)})
    return rows


def crossovers(kernel: Kernel, all_links: tuple[Link, ...]) -> list[dict[str, Any]]:
    """The shortest sequence on a fine grid whose ring hides its transfers, and from which the ring beats Ulysses."""
    grid = [1024 * 2 ** (step / 8) for step in range(90)]
    rows = []
    for link in all_links:
        for gpus in GPUS[1:]:
            for traffic in BYTES:
                hidden = [
                    tokens
                    for tokens in grid
                    if LATENCY_S + BYTES[traffic] * elements(tokens / gpus) / link.slowest(gpus)
                    <= kernel.seconds(HEADS, tokens / gpus, tokens / gpus)
                ]
                better = [
                    tokens
                    for tokens in grid
                    if ring(kernel, link, gpus, tokens, traffic)
                    < (ulysses(kernel, link, gpus, tokens, "16-bit") or 0.0)
                ]
                note = "at every length" if better[:1] == grid[:1] else "" if better else "at no length"
                rows.append(
                    {
                        "link": link.name,
                        "gpus": gpus,
                        "traffic": traffic,
                        "hidden_from": round(hidden[0]) if hidden else None,
                        "ring_beats_ulysses_from": round(better[0]) if better else None,
                        "note": f"{HEADS} heads: no Ulysses" if gpus > HEADS else note,
                    }
                )
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed-up over one GPU against the number of GPUs, a panel for each link and two lengths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["link"] for row in rows))
    lengths = (32_768, 262_144)
    figure, axes = pyplot.subplots(len(lengths), len(names), figsize=(13, 8), sharex=True, sharey=True)
    colours = dict(zip(WAYS, ("#1f6fb4", "#d1603d", "#3a8f5c"), strict=True))
    for line, tokens in zip(axes, lengths, strict=True):
        for axis, name in zip(line, names, strict=True):
            for way in WAYS:
                for traffic, style in (("quantised", "-"), ("16-bit", ":")):
                    points = [
                        (row["gpus"], row["speedup"])
                        for row in rows
                        if (row["link"], row["tokens"], row["way"], row["traffic"]) == (name, tokens, way, traffic)
                    ]
                    label = f"{way}, {traffic} traffic"
                    if points:
                        xs, ys = zip(*points, strict=True)
                        axis.plot(xs, ys, style, marker="o", ms=3, color=colours[way], label=label)
            axis.plot(GPUS, GPUS, color="#999999", lw=0.8, label="ideal")
            axis.set(xscale="log", yscale="log", xticks=GPUS, yticks=GPUS, xlim=(0.9, 75), ylim=(0.5, 75))
            axis.set_xticklabels(GPUS)
            axis.set_yticklabels(GPUS)
            axis.minorticks_off()
            axis.grid(alpha=0.25)
            axis.set_title(f"{name}\n{tokens:,} tokens", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("GPUs")
    for line in axes:
        line[0].set_ylabel("times as fast as one GPU")
    handles = {
        text: handle for axis in axes.flat for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"Model: one attention call, {HEADS} heads x {HEAD_DIM}, int8 kernel of an H200", fontsize=11)
    figure.tight_layout(rect=(0, 0.07, 1, 0.98))
    figure.savefig(path, dpi=110)


def against_measurement(kernel: Kernel, link: Link, measured: Measured) -> list[dict[str, Any]]:
    """What the model says of the two-GPU calls that were measured."""
    rows = []
    for name, way, traffic in (
        ("ring", "ring", "quantised"),
        ("ulysses", "ulysses", "16-bit"),
        ("ulysses, quantised", "ulysses", "quantised"),
    ):
        row = measured.get(("wan-65k", name), {})
        if row.get("ms"):
            model = (MODEL[way](kernel, link, 2, row["shape"][2], traffic) or 0.0) * 1e3
            ratio = round(model / row["ms"], 4)
            rows.append(
                {
                    "way": name,
                    "gpus": 2,
                    "measured_ms": round(row["ms"], 2),
                    "model_ms": round(model, 2),
                    "ratio": ratio,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=records.RESULTS / "scaling.jsonl")
    arguments = parser.parse_args()
    measured = medians(read("parallel.jsonl"))
    kernel, all_links = at_length(fit(read("attention.jsonl")), measured), links(measured)
    rows, lengths = step_times(kernel, all_links), crossovers(kernel, all_links)
    checks = against_measurement(kernel, all_links[0], measured)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in (*rows, *lengths, *checks)))
    plot(rows, arguments.out.with_suffix(".png"))
    print(
        f"kernel: {kernel.rate / 1e12:.0f} TFLOPS, {kernel.row * 1e9:.2f} ns a query row; "
        f"start of a sharded call: {kernel.start * 1e6:.0f} us"
    )
    how = "measured" if any(row.get("link_gb_s") for row in measured.values()) else "assumed"
    print(f"NVLink: {all_links[0].inside / 1e9:.0f} GB/s {how}\n")
    shown = [row for row in rows if row["tokens"] in (32_768, 262_144) and row["gpus"] in (2, 8, 64)]
    for part in (shown, lengths, checks):
        if part:
            print(records.table(list(part[0]), [list(row.values()) for row in part]), end="\n\n")


if __name__ == "__main__":
    main()
