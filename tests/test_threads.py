"""Several threads at once: Triton's interpreter alone can't do that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

import sdpa_router


class Attention(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_one_enabled_module_in_many_threads(device):
    model = Attention()
    sdpa_router.enable(model, min_kv=0, log=False)
    inputs = [torch.randn(1, 1, 16 + 16 * length, 16, device=device).half() for length in range(3)] * 4
    with ThreadPoolExecutor(4) as pool, sdpa_router.record() as seen:
        answers = list(pool.map(model, inputs))
    assert {entry["backend"] for entry in seen.records} == {"int8"}
    assert all(map(torch.equal, answers, map(model, inputs)))
