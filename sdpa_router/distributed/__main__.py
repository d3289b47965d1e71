"""The window of a long video, sharded: `torchrun --nproc_per_node 2 -m sdpa_router.distributed`.

With GPUs: NCCL and the size of the field. Without: gloo and a small size in Triton's interpreter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

# Draws of inputs without a GPU: what one draw's few hundred keys are rounded to moves the ratio of two errors by 3 %.
_DRAWS = 8
_REPEATS = 5

_Tensors = tuple[torch.Tensor, ...]


def main() -> None:
    """Attend by one process, ring and Ulysses; rank 0 prints the errors against float64 and, on GPUs, the times."""
    cuda = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    if not cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
        torch.set_num_threads(1)
    from sdpa_router import int8_attention
    from sdpa_router.demo_calls import FIELD, SMALL
    from sdpa_router.distributed import ring_attention, ulysses_attention
    from sdpa_router.testing import banded_window, gaussian

    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size, draws = (FIELD, 1) if cuda else (SMALL, _DRAWS)
    window = banded_window(**size.window, device=device)
    sizes = (1, size.heads, size.q_len, window.kv_len, size.head_dim)
    if rank == 0:
        where = f"{ranks} x {torch.cuda.get_device_name()}, NCCL" if cuda else f"{ranks} CPU processes, gloo"
        print(f"{where}: {sizes[2]} queries x {sizes[3]} keys, {sizes[1]} heads, head_dim {sizes[4]}, {draws} draws")
    bias = _part(window.bias, rank, ranks, 3)
    squares = dict.fromkeys(("one process", "ring", "ulysses"), torch.zeros((), dtype=torch.float64, device=device))
    times: dict[str, str] = {}
    for seed in range(draws):
        whole = gaussian(*sizes, dtype=size.dtype, device=device, seed=seed)
        mine = tuple(_part(tensor, rank, ranks) for tensor in whole)
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "one process": partial(int8_attention, mine[0], *whole[1:], window.bias),  # no query depends on another
            "ring": partial(ring_attention, *mine, bias),
            "ulysses": partial(ulysses_attention, *mine, bias),
        }
        for name, call in calls.items():
            squares[name] = squares[name] + _squares(call(), mine[0], whole, window.bias)
        if cuda:
            calls["one process"] = partial(int8_attention, *whole, window.bias)
            times = {name: f"  {_median_ms(call):.2f} ms" for name, call in calls.items()}
    errors = _over_all_ranks(squares)
    for name, error in errors.items() if rank == 0 else ():
        ratio = error / errors["one process"]
        print(f"{name:12} error {error:.4f}, {ratio:.3f} of one process's{times.get(name, '')}", flush=True)
    dist.destroy_process_group()


def _part(tensor: torch.Tensor, rank: int, ranks: int, axis: int = 2) -> torch.Tensor:
    """Return this rank's part of a sequence."""
    return tensor.tensor_split(ranks, axis)[rank].contiguous()


def _squares(out: torch.Tensor, query: torch.Tensor, whole: _Tensors, bias: torch.Tensor) -> torch.Tensor:
    """Sum the squares of an answer's error against float64 and of that itself, in the first heads: float64 [2]."""
    from sdpa_router.testing import sdpa_oracle

    heads = slice(0, 4)
    ref = sdpa_oracle(query[:, heads], whole[1][:, heads], whole[2][:, heads], bias)[0]
    return torch.stack([(out[:, heads].double() - ref).square().sum(), ref.square().sum()])


def _over_all_ranks(squares: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative errors over the queries of all ranks and all draws."""
    errors = {}
    for name, sums in squares.items():
        dist.all_reduce(sums)
        errors[name] = (sums[0] / sums[1]).sqrt().item()
    return errors


def _median_ms(call: Callable[[], torch.Tensor]) -> float:
    """Time a call on the slowest rank."""
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    median = torch.tensor(sorted(times)[_REPEATS // 2], device="cuda")
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return median.item() * 1e3


if __name__ == "__main__":
    main()
