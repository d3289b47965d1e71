"""Ratios of measurements of one run: ours against every rival, and what a mask or the log-sum-exp costs us."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def ratios(rows: list[Row]) -> list[str]:
    """One line a (case, mask) and pv mode of ours, then lines for our own overheads; only rows of the same inputs."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        for mask in dict.fromkeys(row["mask"] for row in of_case):
            lines += _against_rivals(case, mask, [row for row in of_case if row["mask"] == mask and not row["lse"]])
        lines += _own_overheads(case, [row for row in of_case if row["impl"] == "int8"])
    return lines


def best_of_torch(rows: list[Row]) -> Row | None:
    """The fastest of torch's backends: what a user could get from torch alone."""
    return min((r for r in rows if r["impl"].startswith("torch") and r["variant"] == "call"), key=_ms, default=None)


def _ms(row: Row) -> float:
    return float(row["ms"])


def _against_rivals(case: str, mask: str, rows: list[Row]) -> list[str]:
    best = best_of_torch(rows)
    rivals = [r for r in rows if not r["impl"].startswith(("int8", "torch")) and r["variant"] == "call"]
    if best is None and not rivals:
        return []
    ours = [row for row in rows if row["impl"] == "int8" and row["variant"] == "call"]
    if not ours:
        return [f"{case} {mask}: torch's best {best['ms']:.4f} ms ({best['impl']})"] if best else []
    lines = []
    for our in ours:
        parts = [f"{case} {mask}: int8 {our['pv']} call {our['ms']:.4f} ms"]
        if best:
            parts.append(f"torch's best {best['ms']:.4f} ({best['impl']}): {best['ms'] / our['ms']:.2f}x faster")
        parts += [f"{r['impl']} {r['pv']} {r['ms']:.4f}: {r['ms'] / our['ms']:.2f}x" for r in rivals]
        lines.append("; ".join(parts))
    return lines


def _own_overheads(case: str, rows: list[Row]) -> list[str]:
    """Times of ours over ours without mask and LSE, and the quantisation as the difference of the two variants."""
    by_key = {(r["pv"], r["variant"], r["mask"], r["lse"]): _ms(r) for r in rows}
    lines = []
    for pv, variant in dict.fromkeys((pv, variant) for pv, variant, _, _ in by_key):
        plain = by_key.get((pv, variant, "none", False))
        parts = []
        for (other_pv, other, mask, lse), ms in by_key.items():
            if plain and (other_pv, other) == (pv, variant) and (mask, lse) != ("none", False):
                parts.append(f"{mask}{' +lse' if lse else ''} {ms / plain:.3f}x")
        kernel = by_key.get((pv, "kernel", "none", False))
        if variant == "call" and plain and kernel:
            parts.append(f"quantisation (call - kernel) {plain - kernel:.4f} ms")
        if parts:
            lines.append(f"{case}: int8 {pv} {variant} against none: " + ", ".join(parts))
    return lines
