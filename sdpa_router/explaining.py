"""`sdpa-router explain`: build a call out of meta tensors and print the decision on it."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor

from sdpa_router.call import Call
from sdpa_router.choose import choose
from sdpa_router.decision import Decision, Reason
from sdpa_router.settings import FASTEST, Settings

_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_MASK_DTYPES = {"bool": torch.bool, **_DTYPES}
_MAX_ELEMENTS = 2**56  # torch counts bytes in 63 bits
# Each kind as (expand to every query, sizes) in terms of B, H, Q, K.
_MASKS = {
    "none": "",
    "key": "1,1,1,K",
    "key-batch": "B,1,1,K",
    "key-head": "1,H,1,K",
    "expanded": "1,1,1,K",
    "full": "1,1,Q,K",
    "full-head": "B,H,Q,K",
}
MASK_HELP = (
    "none (default); key [1,1,1,K]; key-batch [B,1,1,K]; key-head [1,H,1,K]; expanded, a stride-0 view [B,H,Q,K] of "
    "[1,1,1,K]; full [1,1,Q,K]; full-head [B,H,Q,K]; or a shape like 1,1,1,512"
)


def shape(text: str) -> tuple[int, ...]:
    """Read `1,24,4096,128`."""
    sizes = text.replace("x", ",").split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(f"given {text!r}, accepted: whole numbers with commas, like 1,24,4096,128")
    # The digits first: Python refuses to read a number of thousands of them.
    if any(len(size.strip()) > len(str(_MAX_ELEMENTS)) for size in sizes) or math.prod(map(int, sizes)) > _MAX_ELEMENTS:
        shown = text if len(text) < 60 else text[:60] + "..."
        raise argparse.ArgumentTypeError(f"given {shown!r}, accepted: sizes whose product is at most 2**56")
    return tuple(int(size) for size in sizes)


def dtype(text: str) -> torch.dtype:
    """Read the name of a float dtype."""
    return _named(text, _DTYPES)


def mask_dtype(text: str) -> torch.dtype:
    """Read the name of a mask's dtype."""
    return _named(text, _MASK_DTYPES)


def _named(text: str, dtypes: dict[str, torch.dtype]) -> torch.dtype:
    names = dtypes | {str(value).removeprefix("torch."): value for value in dtypes.values()}
    if text not in names:
        raise argparse.ArgumentTypeError(f"given {text!r}, accepted: {', '.join(names)}")
    return names[text]


def mask(text: str) -> str | tuple[int, ...]:
    """Read the name of a mask kind, or a shape."""
    if text in _MASKS:
        return text
    if text[:1].isdecimal():
        return shape(text)
    raise argparse.ArgumentTypeError(f"given {text!r}, accepted: {', '.join(_MASKS)}, or a shape like 1,1,1,512")


def probability(text: str) -> float:
    """Read a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"given {text!r}, accepted: a number from 0 to 1")
    return value


def decide_for(arguments: argparse.Namespace) -> Decision:
    """Decide on the call that the arguments of `explain` describe; raises ValueError if they don't describe one."""
    key_shape = arguments.k or arguments.q
    query = torch.empty(arguments.q, dtype=arguments.dtype, device="meta", requires_grad=arguments.grad)
    key, value = (
        torch.empty(sizes, dtype=arguments.dtype, device="meta") for sizes in (key_shape, arguments.v or key_shape)
    )
    attn_mask = _make_mask(arguments.mask, arguments.mask_dtype, arguments.q, key_shape)
    names = tuple(name.strip() for name in arguments.backends.split(","))
    call = Call(query, key, value, attn_mask, arguments.dropout, arguments.causal, enable_gqa=arguments.gqa)
    return choose(call, Settings(backends=FASTEST if names == (FASTEST,) else names))


def _make_mask(
    kind: str | tuple[int, ...], dtype: torch.dtype, query: tuple[int, ...], key: tuple[int, ...]
) -> Tensor | None:
    if kind == "none":
        return None
    if isinstance(kind, tuple):
        return torch.empty(kind, dtype=dtype, device="meta")
    if len(query) != 4 or len(key) != 4:
        raise ValueError(
            f"given --mask {kind} with {len(query)} and {len(key)} sizes in --q and --k, accepted: 4 and 4"
        )
    sizes = dict(zip("BHQK", (*query[:3], key[2]), strict=True))
    if math.prod(sizes.values()) > _MAX_ELEMENTS:
        raise ValueError(f"given --mask {kind} for {math.prod(sizes.values())} elements, accepted: at most 2**56")
    made = torch.empty([sizes.get(name, 1) for name in _MASKS[kind].split(",")], dtype=dtype, device="meta")
    return made.expand(tuple(sizes.values())) if kind == "expanded" else made


def as_text(decision: Decision) -> str:
    """Return the decision's line, then a line on each reason's cure."""
    lines = [str(decision)]
    lines += dict.fromkeys(
        f"  {reason.code.value}: {reason.code.cure}" for reason in (*decision.reasons, *decision.notes)
    )
    return "\n".join([*lines, "(by shape alone: `sdpa-router info` tells what this machine can run)"])


def as_json(decision: Decision) -> dict[str, Any]:
    """Return the decision as plain data."""

    def plain(reason: Reason) -> dict[str, Any]:
        return {"code": reason.code.value, "detail": reason.detail, "cure": reason.code.cure}

    info = decision.mask
    return {
        "route": decision.route.value,
        "backend": decision.backend,
        "mask": {
            "kind": info.kind.value,
            "why": info.why,
            "per_batch": info.per_batch,
            "per_head": info.per_head,
            "is_bool": info.is_bool,
        },
        "reasons": [plain(reason) for reason in decision.reasons],
        "notes": [plain(note) for note in decision.notes],
        "passed_over": {name: [plain(reason) for reason in reasons] for name, reasons in decision.passed_over},
        "estimates": dict(decision.estimates),
    }
