"""diffusers: attention processors that norm, rotate and quantise query and key in one pass; enable(..., fuse_qk=True).

A fused processor keeps the one that it replaces and hands it every call that it does not answer itself: what the router
would leave to torch, and what depends on more than the projections. It imports nothing of diffusers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from .fused_processor import FusedProcessor
from .fused_processors import FusedFlux, FusedLTX, FusedQwenImage, FusedWan

_LOG = logging.getLogger("sdpa_router.dispatch")
# By the attention block and the processor that are replaced.
_KNOWN: dict[tuple[str, str], type[FusedProcessor]] = {
    ("WanAttention", "WanAttnProcessor"): FusedWan,
    ("FluxAttention", "FluxAttnProcessor"): FusedFlux,
    ("Attention", "QwenDoubleStreamAttnProcessor2_0"): FusedQwenImage,
    ("LTXAttention", "LTXVideoAttnProcessor"): FusedLTX,
}


def fuse(module: nn.Module, log: bool = True) -> dict[str, str | None]:
    """Give every attention block in `module` that is known here a fused processor; undone by unfuse().

    Returns the blocks by qualified name: None where it was fused, else why it stays as it is, which is also logged.
    """
    found: dict[str, str | None] = {}
    for name, block in _blocks(module):
        if isinstance(block.processor, FusedProcessor):
            found[name] = None
            continue
        known = _KNOWN.get((type(block).__name__, type(block.processor).__name__))
        if not type(block).__module__.startswith("diffusers.") or known is None:
            names = ", ".join(f"{attention} with {processor}" for attention, processor in _KNOWN)
            found[name] = f"{type(block).__name__} with {type(block.processor).__name__} is not one of {names}"
        else:
            found[name] = known.why_not(block)
            if found[name] is None:
                block.processor = known(block.processor)
        if log and found[name] is not None:
            _LOG.info("fuse_qk leaves %s as it is: %s", name or type(module).__name__, found[name])
    if log and not found:
        _LOG.info("fuse_qk found no attention block with a processor in %s", type(module).__name__)
    return found


def unfuse(module: nn.Module) -> None:
    """Give the blocks back the processors that they had before fuse()."""
    for _, block in _blocks(module):
        if isinstance(block.processor, FusedProcessor):
            block.processor = block.processor.plain


def _blocks(module: nn.Module) -> Iterable[tuple[str, Any]]:
    return [(name, block) for name, block in module.named_modules() if hasattr(block, "processor")]
