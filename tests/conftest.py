"""Without a GPU the kernels run in Triton's interpreter, which must be switched on before Triton is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def device() -> torch.device:
    """The device whose kernels are tested here."""
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _out_of_place() -> Iterator[None]:
    """Take the router out of F's place where a test traced a `with route()`, which leaves it there for good."""
    yield
    patch = sys.modules.get("sdpa_router.patch")
    if patch is not None and patch._stays:
        patch._stays = False
        patch.uninstall()


@pytest.fixture(autouse=True)
def _nothing_given_up() -> Iterator[None]:
    """Fail where a GPU's own kernel did not compile: calls go on with the portable one, and answer rightly."""
    yield
    for package in ("int8_attention", "sparse_attention"):
        configs = sys.modules.get(f"sdpa_router.kernels.{package}.configs")
        assert configs is None or not torch.cuda.is_available() or not configs._failures, configs._failures


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none, saying so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; torch.cuda.is_available() is False"))
