"""The process group of a call, and what its ranks agree on before anything large moves.

A rank that raised alone would leave the others waiting, so each rank sends what it was given, or why it refuses, and
all of them judge the same table: every rank raises, or none does.
"""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist

_BYTES = 8192  # of a rank's facts as JSON
_REFUSAL = 1200  # characters of a refusal; JSON may take six bytes for one
# Backends that send and receive tensors, by the device that these lie on.
SENDS = {"nccl": ("cuda",), "gloo": ("cpu",), "ucc": ("cpu", "cuda"), "mpi": ("cpu", "cuda"), "xccl": ("xpu",)}
# What may differ from rank to rank.
_OWN = ("q_len", "kv_len", "mask_len", "mask_rows", "host", "refusal")


@dataclass(frozen=True)
class Facts:
    """What a rank was given: sizes of its shard, settings, and why it refuses the call, if it does.

    mask_len: keys that its mask covers, 0 to all, or None without a mask.  mask_rows: the sizes of the mask's batch and
    head axes.  kernel: name and tile of the kernel.  host: name of the machine.  even: whether all ranks must hold as
    many queries and keys.
    """

    function: str
    batch: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""
    causal: bool = False
    scale: float | None = None
    return_lse: bool = False
    mask: str = "no mask"
    value_bits: int = 0
    quantize: str = ""
    kernel: str = ""
    q_len: int = 0
    kv_len: int = 0
    mask_len: int = 0
    mask_rows: tuple[int, int] = (1, 1)
    host: str = ""
    even: bool = False
    refusal: str = ""


@dataclass(frozen=True)
class Group:
    """A process group as ranks 0 to size - 1 of itself."""

    handle: dist.ProcessGroup | None
    rank: int
    size: int
    backends: dict[str, str]  # by device type

    def refusal(self, device: torch.device) -> str:
        """Say why tensors on `device` can't be sent from rank to rank here, or nothing if they can."""
        backend = self.backends.get(device.type)
        if backend is None:
            served = ", ".join(f"{name} for {kind}" for kind, name in self.backends.items())
            return f"the tensors are on {device.type}, and the group has a backend only for: {served}"
        if device.type not in SENDS.get(backend, ()):
            known = ", ".join(f"{name} ({' and '.join(kinds)})" for name, kinds in SENDS.items())
            return f"backend {backend} does not send {device.type} tensors from rank to rank; accepted: {known}"
        return ""


def open_group(handle: dist.ProcessGroup | None, function: str) -> Group:
    """Look the group up, by default the one of all processes; RuntimeError without one, ValueError outside of it."""
    if not dist.is_available():
        raise RuntimeError(f"{function} needs torch.distributed, which this build of torch lacks")
    if not dist.is_initialized():
        raise RuntimeError(
            f"{function} needs a process group, and none is initialised: start the program with torchrun and call "
            "torch.distributed.init_process_group()"
        )
    if not (handle is None or isinstance(handle, dist.ProcessGroup) or handle is dist.GroupMember.NON_GROUP_MEMBER):
        raise ValueError(
            f"{function} was given group as a {type(handle).__name__}; expected a ProcessGroup, as from "
            "new_group() or DeviceMesh.get_group(), or None"
        )
    rank = dist.get_rank(handle)
    if rank < 0:
        ranks = dist.get_process_group_ranks(handle) if isinstance(handle, dist.ProcessGroup) else []
        raise ValueError(f"rank {dist.get_rank()} called {function} with a group it is not in; its ranks are {ranks}")
    pairs = (part.split(":") for part in dist.get_backend_config(handle).split(","))
    return Group(handle or dist.group.WORLD, rank, dist.get_world_size(handle), {pair[0]: pair[-1] for pair in pairs})


def agree(group: Group, facts: Facts, query: torch.Tensor, cause: Exception | None) -> list[Facts]:
    """Exchange the facts of all ranks and check them; returns them by rank, or raises on every rank.

    cause: why this rank refuses, if it does; what is no ValueError is raised as it is, with a note.
    Takes one all_gather of 8 KiB a rank, on the CPU where the group has a backend for it, so that no GPU is waited for.
    """
    there = torch.device("cpu") if "cpu" in group.backends else getattr(query, "device", torch.device("meta"))
    if there.type not in group.backends:  # gather where the group can: the refusal is what must arrive
        there = torch.device(next(iter(group.backends)), torch.cuda.current_device() if "cuda" in group.backends else 0)
    with torch._C._DisableFuncTorch(), naming(group, "the exchange of shapes"):  # a transform is refused, but told of
        mine = torch.frombuffer(bytearray(_as_bytes(facts)), dtype=torch.uint8).to(there)
        table = mine.new_empty((group.size, _BYTES))
        dist.all_gather(list(table), mine, group=group.handle)
        heard = table.cpu().numpy().tobytes()
    everyone, trouble = _read(tuple(heard[start : start + _BYTES].rstrip() for start in range(0, len(heard), _BYTES)))
    if trouble:
        where = f"{facts.function} on rank {group.rank} of {group.size}"
        if cause is None or type(cause) is ValueError:
            raise ValueError(f"{where}: {trouble}") from cause
        notes = [*getattr(cause, "__notes__", []), f"{where}: the other ranks raise too"]
        cause.__notes__ = notes  # type: ignore[attr-defined]
        raise cause
    return list(everyone)


# A model repeats its few kinds of calls, while the GPU may wait for the host.
@functools.lru_cache(maxsize=256)
def _as_bytes(facts: Facts) -> bytes:
    return json.dumps({**asdict(facts), "refusal": facts.refusal[:_REFUSAL]}).encode().ljust(_BYTES)


@functools.lru_cache(maxsize=256)
def _read(heard: tuple[bytes, ...]) -> tuple[tuple[Facts, ...], str]:
    """Return the facts of all ranks, and what is wrong with them or nothing."""
    found = [json.loads(part) for part in heard]
    everyone = tuple(Facts(**{**one, "mask_rows": tuple(one["mask_rows"])}) for one in found)
    return everyone, disagreement(everyone)


def disagreement(everyone: Sequence[Facts]) -> str:
    """Say what is wrong with a call given these facts by rank, or nothing if all is well; the same on all ranks."""
    refusals = [f"rank {rank} refuses: {facts.refusal}" for rank, facts in enumerate(everyone) if facts.refusal]
    if refusals:
        return "; ".join(refusals)
    first = everyone[0]
    for field in fields(Facts):
        values = [getattr(facts, field.name) for facts in everyone]
        if field.name not in _OWN and any(value != values[0] for value in values):
            rank = next(rank for rank, value in enumerate(values) if value != values[0])
            return (
                f"rank {rank} gives {field.name} {values[rank]!r}, expected {values[0]!r} as on rank 0: "
                "all ranks must give the same"
            )
    if first.even and (uneven := [n for n, facts in enumerate(everyone) if _lengths(facts) != _lengths(first)]):
        rank = uneven[0]
        return (
            f"rank {rank} gives {everyone[rank].q_len} queries and {everyone[rank].kv_len} keys, expected "
            f"{first.q_len} and {first.kv_len} as on rank 0"
        )
    total = sum(facts.kv_len for facts in everyone)
    for rank, facts in enumerate(everyone):
        if first.mask != "no mask" and facts.mask_len not in (1, facts.kv_len, total):
            return (
                f"rank {rank} gives a mask over {facts.mask_len} keys, expected {facts.kv_len} (its shard), "
                f"{total} (all keys) or 1"
            )
        if first.function == "ring_attention" and first.causal and facts.q_len != facts.kv_len:
            return (
                f"rank {rank} gives {facts.q_len} queries and {facts.kv_len} keys with causal=True, "
                "expected as many of one as of the other"
            )
    return ""


def _lengths(facts: Facts) -> tuple[int, int]:
    return facts.q_len, facts.kv_len


class naming:  # noqa: N801 (used like a function)
    """A context in which what the communication raises gets the rank and what was under way; RuntimeError."""

    def __init__(self, group: Group, what: str) -> None:
        self.text = f"rank {group.rank} of {group.size}: {what} failed"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(f"{self.text}: another rank died, left or timed out ({error})") from error


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()[:64]
