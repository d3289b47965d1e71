"""`int8`: our own kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .. import run
from ..call import Call
from ..decide import INT8_LIMITS, kernel_against
from ..decision import Reason
from ..settings import Settings
from .base import Backend


def _reasons_against(call: Call, settings: Settings) -> Iterator[Reason]:
    yield from kernel_against(call, settings.pv, settings.precision)


def _run(call: Call, settings: Settings, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
    query, key, value, mask, _, is_causal, scale, _ = call
    return run.int8(query, key, value, mask, is_causal, scale, settings.pv, settings.precision)[0]


BACKENDS = (Backend("int8", INT8_LIMITS, _reasons_against, _run),)
