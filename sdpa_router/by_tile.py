"""Calls with a dense mask that the router answers by tile, where the mask's tiles say that this is faster.

Deciding reads no value. Which tiles a mask has is found out once for each piece of memory, in eager mode, before the
call is decided: that launches one pass over the mask and waits for its four counts. Neither happens under torch.compile
or while a CUDA graph is captured (a graph would keep the tiles of a mask that is written to later). Once a kind of call
has shown a new mask eight times in a row, only masks that are met twice running are looked at.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .decision import Code, Decision, Reason, Route, TileCounts
from .kernels.sparse_attention.configs import config_of
from .kernels.sparse_attention.limits import ELSEWHERE, H200, H200_WORDS, TileCost, estimate_ms, torch_ms
from .mask_summary import full_view, recall, summarised

if TYPE_CHECKING:
    from .decide import Call

PATIENCE = 8  # masks of one kind of call that are summarised without meeting one of them again
_TILE = 64
_BROUGHT = (torch.float16, torch.bfloat16)  # masks whose tiles TMA brings there
_PAYS = 0.95  # of torch's estimated time


def worth_a_look(decision: Decision, call: Call) -> bool:
    """Whether only the mask's row for each query speaks against the int8 route, and skipping tiles could pay for it.

    Where other backends are named as well, int8 must be among them, and torch's turn.
    """
    if [reason.code for reason in _against_int8(decision)] != [Code.FULL_MASK]:
        return False
    batch, heads, q_len, head_dim = call.query.shape
    tiles = batch * heads * -(-q_len // _TILE) * -(-call.key.shape[2] // _TILE)
    cost = _cost(call)
    return cost.fixed_ms < _PAYS * torch_ms(cost, tiles, head_dim)


def _against_int8(decision: Decision) -> tuple[Reason, ...]:
    if decision.route is not Route.SDPA:
        return ()
    return dict(decision.passed_over).get("int8", ()) if decision.passed_over else decision.reasons


def _told(decision: Decision, *against_int8: Reason, **changes: Any) -> Decision:
    """Return `decision` with other reasons against int8, which answers if there are none."""
    passed = [(name, against_int8 if name == "int8" else theirs) for name, theirs in decision.passed_over]
    passed = [(name, theirs) for name, theirs in passed if theirs]
    reasons = tuple(reason for _, theirs in passed for reason in theirs) if decision.passed_over else against_int8
    return replace(decision, reasons=reasons, passed_over=tuple(passed), **changes)


def counts_of(call: Call, may_summarise: bool) -> tuple[TileCounts | None, bool]:
    """Counts of the tiles of the call's mask if they are known or can be found out now; whether the mask was known."""
    mask = call.attn_mask
    if mask is None or mask.is_inference() or _capturing(mask):
        return None, False
    mask = full_view(mask, call.key.shape[2])
    found = recall(mask)
    if found is None:
        return (summarised(mask).counts() if may_summarise else None), False
    return (found.counts() if may_summarise else found.counted), True


def refine(decision: Decision, call: Call, counts: TileCounts) -> Decision:
    """Decide by the tiles of a mask that was all that spoke against the int8 route: a pure function."""
    mask, (batch, heads, _, head_dim) = call.attn_mask, call.query.shape
    assert mask is not None
    rows = 1  # that share the tiles that were counted
    for axis, size in ((-4, batch), (-3, heads)):
        varies = mask.dim() >= -axis and mask.shape[axis] > 1 and mask.stride(axis) != 0
        rows *= 1 if varies else size
    cost = _cost(call)
    ours = estimate_ms(cost, rows * (counts.kept + counts.constant), rows * counts.mixed, head_dim)
    theirs = torch_ms(cost, rows * counts.total, head_dim)
    if ours < _PAYS * theirs:
        return _told(decision, route=Route.INT8, mask=replace(decision.mask, tiles=counts), notes=(), estimates=())
    accepted = f"where the estimate, {ours:.2f} ms, is under {_PAYS:g} of torch's, {theirs:.2f} ms"
    return _told(decision, Reason(Code.TILES, str(counts), accepted))


def unknown(decision: Decision, call: Call, looking: bool) -> Decision:
    """Tell why the tiles of a call's mask, which alone speaks against the int8 route, are not known: a pure function.

    looking: whether new masks of such calls are still looked at.
    """
    if call.attn_mask is not None and call.attn_mask.is_inference():
        given, accepted = "been made in inference mode", "where a later write to it can be seen: make it outside"
    elif not looking:
        given, accepted = f"been a new one {PATIENCE} times in a row", "where one is kept: from its second call on"
    else:
        return decision
    return _told(decision, Reason(Code.TILES, given, accepted))


def _cost(call: Call) -> TileCost:
    mask = call.attn_mask
    if mask is None or not config_of(call.query, call.value, full_view(mask, call.key.shape[2])).gluon:
        return ELSEWHERE
    return H200 if mask.dtype in _BROUGHT else H200_WORDS


def _capturing(mask: torch.Tensor) -> bool:
    return mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
