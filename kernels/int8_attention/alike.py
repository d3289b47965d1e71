"""Whether tensors are like others in all but their data, by torch's own test in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # private to torch: without it nothing is recognised by this test
    TensorGuards = None  # type: ignore[assignment, misc]


def check_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return the test for tensors like these, or None: torch refuses a tensor that comes twice.

    It looks at types, dtypes, devices, shapes, strides and requires_grad, and fails in another dispatch state: under
    autocast, inference mode, a torch.func transform or a mode, or below a level of the dispatcher.
    """
    if TensorGuards is None or len({*map(id, tensors)}) != len(tensors):
        return None
    shapes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return check
