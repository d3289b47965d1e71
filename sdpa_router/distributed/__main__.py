"""The window of a long video, sharded: `torchrun --nproc_per_node 2 -m sdpa_router.distributed`.

With GPUs: NCCL and the size of the field. Without: gloo and a small size in Triton's interpreter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    """Attend by one process, ring and Ulysses; rank 0 prints the errors against float64 and, on GPUs, the times."""
    cuda = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
        torch.set_num_threads(1)
    from sdpa_router.demo_calls import FIELD, SMALL
    from sdpa_router.distributed import ring_attention, ulysses_attention
    from sdpa_router.testing import banded_window, gaussian

    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = FIELD if cuda else SMALL
    window = banded_window(**size.window, device=device)
    whole = gaussian(1, size.heads, size.q_len, window.kv_len, size.head_dim, dtype=size.dtype, device=device)
    if rank == 0:
        where = f"{ranks} x {torch.cuda.get_device_name()}, NCCL" if cuda else f"{ranks} CPU processes, gloo"
        print(f"{where}: {size.q_len} queries x {window.kv_len} keys, {size.heads} heads, head_dim {size.head_dim}")
    mine = tuple(_part(tensor, rank, ranks) for tensor in whole)
    bias = _part(window.bias, rank, ranks, 3)
    _report("one process", whole, window.bias, _one_process(whole, window.bias), 0, 1, cuda)
    for name, attend in (("ring", ring_attention), ("ulysses", ulysses_attention)):
        _report(name, whole, window.bias, _sharded(attend, mine, bias), rank, ranks, cuda)
    dist.destroy_process_group()


_Tensors = tuple[torch.Tensor, ...]


def _one_process(whole: _Tensors, bias: torch.Tensor) -> Callable[[], torch.Tensor]:
    from sdpa_router import int8_attention

    query, key, value = whole
    return lambda: int8_attention(query, key, value, bias)


def _sharded(attend: Any, mine: _Tensors, bias: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: attend(*mine, bias)


def _part(tensor: torch.Tensor, rank: int, ranks: int, axis: int = 2) -> torch.Tensor:
    """Return this rank's part of a sequence."""
    return tensor.tensor_split(ranks, axis)[rank].contiguous()


def _report(
    name: str, whole: _Tensors, bias: torch.Tensor, call: Callable[[], torch.Tensor], rank: int, ranks: int, timed: bool
) -> None:
    """Print a way's error over all ranks, and the median time of the slowest."""
    from sdpa_router.testing import sdpa_oracle

    query, key, value = whole
    out, heads = call(), slice(0, 4)
    ref = sdpa_oracle(_part(query, rank, ranks)[:, heads], key[:, heads], value[:, heads], bias)[0]
    squares = torch.stack([(out[:, heads].double() - ref).square().sum(), ref.square().sum()])
    dist.all_reduce(squares)
    times = []
    for _ in range(5 if timed else 0):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    median = torch.tensor(sorted(times)[2] if times else 0.0, device=out.device)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        error = (squares[0] / squares[1]).sqrt().item()
        print(f"{name:12} error {error:.4f}" + (f"  {median.item() * 1e3:.2f} ms" if timed else ""), flush=True)


if __name__ == "__main__":
    main()
