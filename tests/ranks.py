"""The ranks of the tests of sharded attention: `python ranks.py BACKEND FOLDER SIZE...` (see worlds.py)."""

from __future__ import annotations

import math
import os
import time
from datetime import timedelta

import torch
import torch._dynamo  # here, so that it is imported once for all ranks
import torch.distributed as dist
import torch.distributed.tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import worlds

from sdpa_router import int8_attention, merge_attention, record
from sdpa_router.distributed import ring_attention, start, ulysses_attention
from sdpa_router.kernels.int8_attention import shards
from sdpa_router.testing import gaussian, lse_error, outliers, relative_error, sdpa_oracle

INF = math.inf
TIMEOUT = 120  # seconds until a group gives a rank up
FACTOR = 4 if torch.cuda.is_available() else 1  # a GPU's tiles are larger than the interpreter's
WIDTH = 128 if torch.cuda.is_available() else 32  # on a GPU one head_dim, because its kernels take long to compile


class Rank:
    """This process, its shards, and what it found."""

    def __init__(self, world: worlds.World) -> None:
        self.rank, self.size, self.device = world.rank, world.size, world.device
        self.found: dict[str, object] = {}

    def deal_out(self, jobs):
        """The answers of all jobs, each done by one rank: the interpreter is slow."""
        mine = [job() for job in jobs[self.rank :: self.size]]
        everyone = [None] * self.size
        dist.all_gather_object(everyone, mine)
        whole = [everyone[n % self.size][n // self.size] for n in range(len(jobs))]
        return [tuple(tensor.to(self.device) for tensor in answer) for answer in whole]

    def cuts(self, length: int, kind: str = "uneven") -> list[int]:
        """Edges of the shards: uneven ones, of which one is empty where there are more than two, or even ones."""
        if kind == "even":
            return [length * i // self.size for i in range(self.size + 1)]
        return [0, *sorted(length * i * i // self.size**2 for i in range(1, self.size - 1)), length // 2, length]

    def shard(self, tensor, cuts, axis=2):
        return tensor.narrow(axis, cuts[self.rank], cuts[self.rank + 1] - cuts[self.rank])

    def draw(self, make, *shape, **arguments):
        return [tensor.to(self.device) for tensor in make(*shape, **arguments)]

    def mask(self, kind: str, heads: int, keys: int):
        generator = torch.Generator().manual_seed(7)
        if kind == "none":
            return None
        if kind == "bool by head":
            mask = torch.rand(1, heads, 1, keys, generator=generator) > 0.3
        elif kind == "left padding":
            mask = (torch.arange(keys) >= keys * 3 // 5).view(1, 1, 1, keys)
        elif kind == "gap":
            mask = ((torch.arange(keys) < keys // 4) | (torch.arange(keys) > keys // 2)).view(1, 1, 1, keys)
        elif kind == "nothing":
            mask = torch.zeros(1, 1, 1, keys, dtype=torch.bool)
        elif kind == "bias":
            mask = torch.randn(1, 1, 1, keys, generator=generator) * 2
            mask[..., : keys // 5] = -INF
        elif kind == "bias by head":
            mask = (torch.randn(1, heads, 1, keys, generator=generator) * 2).half()
        elif kind == "constant":
            mask = torch.full((1, 1, 1, keys), -65504.0)
        elif kind == "absorbing":
            mask = torch.full((1, 1, 1, keys), torch.finfo(torch.float32).min)
        return mask.to(self.device)


MASKS = ("none", "bool by head", "left padding", "gap", "nothing", "bias", "bias by head", "constant", "absorbing")
MASKS_OF_FOUR = ("left padding", "bias by head")
# Ulysses deals out masks that differ by head, and others not; the rest of a mask is one process's to deal with.
WITH_ULYSSES = ("none", "bool by head", "bias", "bias by head")
QUANTISED = ("bias by head", "absorbing")


def answers(me: Rank) -> None:
    """Every mask kind, with grouped heads and uneven shards, against float64 and against one process."""
    kinds = MASKS if me.size == 2 else MASKS_OF_FOUR
    cases = [(kind, *((4, 2) if kind in WITH_ULYSSES else (2, 1))) for kind in kinds]
    given, jobs = [], []
    for kind, heads, kv_heads in cases:
        tensors = me.draw(gaussian, 1, heads, 20 * FACTOR, 90 * FACTOR, WIDTH, kv_heads=kv_heads)
        given.append((*tensors, me.mask(kind, heads, 90 * FACTOR)))
        jobs.append(lambda given=given[-1]: sdpa_oracle(*given, enable_gqa=True))
        jobs.append(lambda given=given[-1]: int8_attention(*given, enable_gqa=True, return_lse=True))
    done = me.deal_out(jobs)
    for number, (kind, heads, _) in enumerate(cases):
        q, k, v, mask = given[number]
        q_cuts, k_cuts = me.cuts(q.shape[2]), me.cuts(k.shape[2])
        (ref, ref_lse), (one, one_lse) = ([me.shard(x, q_cuts) for x in pair] for pair in done[2 * number :][:2])
        mine = [me.shard(q, q_cuts), me.shard(k, k_cuts), me.shard(v, k_cuts)]
        whole = number % 2 == 0  # masks are given whole or in shards, in turns
        part = mask if mask is None or whole else me.shard(mask, k_cuts, 3)
        found = {"one": {"error": relative_error(one, ref), "lse": lse_error(one_lse, ref_lse)}}
        for name, attend, settings, among in (
            ("ring", ring_attention, {}, kinds),
            ("ulysses", ulysses_attention, {"quantize": False}, WITH_ULYSSES),
            ("ulysses, quantised", ulysses_attention, {"quantize": True}, QUANTISED),
        ):
            if kind not in among:
                continue
            out, lse = attend(*mine, part, return_lse=True, **settings)
            found[name] = {
                "error": relative_error(out, ref),
                "lse": lse_error(lse, ref_lse) if kind != "absorbing" else lse_error(lse, one_lse),
                "same": bool(torch.equal(out, one) and torch.equal(lse, one_lse)),
                "zero": not bool(out.any()),
                "shape": [*out.shape] == [1, heads, mine[0].shape[2], WIDTH] and lse.dtype == torch.float32,
            }
        me.found[f"answers: {kind}"] = found


def merged(me: Rank) -> None:
    """The ring against the same shards in one process, merged by merge_attention: equal but for float32's rounding."""
    from sdpa_router.distributed import ring, tile

    q, k, v = me.draw(gaussian, 2, 1, 30 * FACTOR, 90 * FACTOR, WIDTH)
    bias = me.mask("bias", 1, k.shape[2])
    q_cuts, k_cuts = me.cuts(q.shape[2]), me.cuts(k.shape[2])
    cases = ((False, bias, 9), (True, None, 9), (False, None, 8), (False, None, 16))
    for causal, mask, bits in cases if me.size == 2 else cases[:1]:
        cuts = q_cuts if causal else k_cuts
        key, value = (x[:, :, : q.shape[2]] if causal else x for x in (k, v))
        mine = [me.shard(q, q_cuts), me.shard(key, cuts), me.shard(value, cuts)]
        given = None if mask is None else me.shard(mask, cuts, 3)
        out, lse = ring_attention(*mine, given, causal=causal, return_lse=True, value_bits=bits)
        parts, query = [], tile.quantize_query(mine[0], WIDTH**-0.5, tile.config_for_shards(q)[0])
        top = 0.0 if mask is None else mask[mask.isfinite()].max()
        for source in range(me.size):
            a, b = cuts[source], cuts[source + 1]
            if a == b or mine[0].shape[2] == 0 or (causal and source > me.rank):
                continue
            there = value[:, :, a:b]
            if source != me.rank and bits < 16:
                there = rounded(there.contiguous(), bits)
            spec = ring.Spec(2, 1, WIDTH, q.dtype, tile.config_for_shards(q)[0], None, bits)
            part_mask = None if mask is None else mask[..., a:b] - top
            shard = tile.quantize_shard(key[:, :, a:b], there, part_mask, None, spec, 1)
            part = torch.empty(mine[0].shape, device=q.device), torch.empty(mine[0].shape[:3], device=q.device)
            tile.attend(query, shard, spec.config, causal and source == me.rank, *part)
            parts.append(part)
        name = f"merged: causal={causal}, mask={mask is not None}, bits={bits}"
        if not parts:
            me.found[name] = {"out": 0.0 if not out.any() else 1.0, "lse": 0.0}
            continue
        whole, whole_lse = merge_attention(*zip(*parts, strict=True))
        # Rounding to float16 turns a difference of 1e-7 into one of a unit, now and then: that much is allowed.
        units = (out.float() - whole.half().float()).abs() / (whole.abs() * 2**-10).clamp(min=2**-24)
        me.found[name] = {
            "out": units.max().item() if out.numel() else 0.0,
            "mean": relative_error(out, whole.half()) if out.numel() else 0.0,
            "lse": ((lse - whole_lse - top).abs() / (1 + whole_lse.abs())).max().item() if out.numel() else 0.0,
        }


def rounded(value, bits):
    """Values as they arrive: ties round as this device's reciprocals tell, so the kernels of the wire are asked."""
    code, back = torch.empty_like(value, dtype=torch.int8), torch.empty_like(value)
    low = code.new_empty(*value.shape[:3], -(-value.shape[3] // 8), dtype=torch.uint8) if bits == 9 else None
    scale = torch.empty(value.shape[:3], dtype=torch.bfloat16, device=value.device)
    shards.encode_value(value, code, low, scale)
    shards.decode_value(code, low, scale, back)
    return back


def accuracy(me: Rank) -> None:
    """Squared errors on N(0, 1) of the ring and of one process, and on inputs that are hard to quantise."""
    q, k, v = me.draw(gaussian, 1, 1, 64 * me.size, 192 * me.size * FACTOR, 128, seed=3)
    cuts, k_cuts = me.cuts(q.shape[2], "even"), me.cuts(k.shape[2], "even")
    ref = me.shard(sdpa_oracle(q, k, v)[0], cuts)
    one = int8_attention(me.shard(q, cuts), k, v)  # a query's answer depends on no other query
    out = ring_attention(me.shard(q, cuts), me.shard(k, k_cuts), me.shard(v, k_cuts))
    squares = [(x.double() - ref).square().sum().item() for x in (one, out)]
    me.found["accuracy"] = {"one": squares[0], "ring": squares[1], "size": ref.square().sum().item()}
    q, k, v = me.draw(outliers, 1, 1, 32, 128 * FACTOR, max(64, WIDTH))
    cuts, k_cuts = me.cuts(q.shape[2], "even"), me.cuts(k.shape[2], "even")
    ref, ref_lse = (me.shard(x, cuts) for x in sdpa_oracle(q, k, v))
    out, lse = ring_attention(me.shard(q, cuts), me.shard(k, k_cuts), me.shard(v, k_cuts), return_lse=True)
    one, one_lse = int8_attention(me.shard(q, cuts), k, v, return_lse=True)
    me.found["outliers"] = {
        "error": relative_error(out, ref),
        "one": relative_error(one, ref),
        "lse": lse_error(lse, ref_lse),
        "one lse": lse_error(one_lse, ref_lse),
    }


def causal(me: Rank) -> None:
    q, k, v = me.draw(gaussian, 1, 1, 130 * FACTOR, 130 * FACTOR, 128 if WIDTH == 128 else 40)
    cuts = me.cuts(q.shape[2])
    mine = [me.shard(x, cuts) for x in (q, k, v)]
    ref, ref_lse = (me.shard(x, cuts) for x in sdpa_oracle(q, k, v, is_causal=True))
    for name, attend in (("ring", ring_attention), ("ulysses", ulysses_attention)):
        out, lse = attend(*mine, causal=True, return_lse=True)
        me.found[f"causal: {name}"] = {"error": relative_error(out, ref), "lse": lse_error(lse, ref_lse)}


def layouts(me: Rank) -> None:
    """Strides of models, more ranks than key heads, scale, several batches, every query or every key on one rank."""
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in me.draw(gaussian, 2, 2, 40, 90, WIDTH, kv_heads=1)
    )
    scale = -2.26 * WIDTH**-0.5
    ref = sdpa_oracle(q, k, v, scale=scale, enable_gqa=True)
    ends = {"spread": me.cuts(40), "first": [0] + [40] * me.size, "last": [0] * me.size + [40]}
    for name, cuts in ends.items():
        k_cuts = [cut * 90 // 40 for cut in (ends["last"] if name == "first" else cuts)]
        mine = [me.shard(q, cuts), me.shard(k, k_cuts), me.shard(v, k_cuts)]
        if name == "spread":
            mine = [torch._neg_view(x.neg()) for x in mine]  # as the imaginary part of a conjugate is
        for way, attend in (("ring", ring_attention), ("ulysses", ulysses_attention)):
            out, lse = attend(*mine, scale=scale, return_lse=True)
            me.found[f"layouts: {name}, {way}"] = {
                "error": relative_error(out, me.shard(ref[0], cuts)),
                "lse": lse_error(lse, me.shard(ref[1], cuts)),
                "strides": out.stride() == mine[0].contiguous().stride() or out.stride(1) < out.stride(2),
            }


def dtensors(me: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(me.device.type, (me.size,))
    q, k, v = me.draw(gaussian, 1, 2, 30, 70, WIDTH)
    bias = me.mask("bias", 2, 70)
    ref, ref_lse = sdpa_oracle(q, k, v, bias)
    split = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    for name, attend in (("ring", ring_attention), ("ulysses", ulysses_attention)):
        out, lse = attend(*split, distribute_tensor(bias, mesh, [Shard(3)]), return_lse=True)
        me.found[f"dtensors: {name}"] = {
            "error": relative_error(out.full_tensor(), ref),
            "lse": lse_error(lse.full_tensor(), ref_lse),
            "placed": str(out.placements) == str(split[0].placements) and out.shape == q.shape,
        }
    for name, wrong in {
        "heads": [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)],
        "replicated": [split[0], split[1], distribute_tensor(v, mesh, [Replicate()])],
        "mixed": [split[0], split[1], v],
    }.items():
        me.found[f"dtensors: {name}"] = error_of(ring_attention, *wrong)
    out = ring_attention(*split, distribute_tensor(bias[0, 0], mesh, [Shard(1)]))
    me.found["dtensors: two axes"] = relative_error(out.full_tensor(), ref)
    by_head = DTensor.from_local(me.mask("bool by head", 2, 70), mesh, [Shard(1)], run_check=False)
    for name, wrong, settings in (
        ("replicated on one", [*split[:2], DTensor.from_local(v, mesh, [Replicate()], run_check=False)], {}),
        ("plain on one", [q, *split[1:]], {}),
        ("group on one", split, {"group": dist.group.WORLD}),
        ("mask on one", [*split, by_head], {}),
    ):
        given = (wrong, settings) if me.rank == me.size - 1 else (split, {})
        me.found[f"dtensors: {name}"] = error_of(ring_attention, *given[0], **given[1])
    plain, mask = [part.to_local() for part in split], by_head if me.rank == me.size - 1 else None
    me.found["dtensors: only the mask on one"] = error_of(ring_attention, *plain, mask)


def refusals(me: Rank) -> None:
    """What must raise on every rank at once, with a text that names the rank, what it gave and what was expected."""
    last = me.rank == me.size - 1
    q, k, v = me.draw(gaussian, 1, 2, 8, 8, WIDTH)
    other = me.draw(gaussian, 1, 2, 8, 8, 2 * WIDTH)
    bias = torch.zeros(1, 1, 1, 8, device=me.device)
    for name, attend, given, settings in (
        ("head_dim", ring_attention, other if last else (q, k, v), {}),
        ("heads", ulysses_attention, (q[:, :1], k[:, :1], v[:, :1]) if last else (q, k, v), {}),
        ("dtype", ring_attention, [x.bfloat16() if last else x for x in (q, k, v)], {}),
        ("scale", ring_attention, (q, k, v), {"scale": 0.5 if last else 0.25}),
        ("mask on one rank", ring_attention, (q, k, v, bias if last else None), {}),
        ("mask dtype on one rank", ulysses_attention, (q, k, v, bias.half() if last else bias), {}),
        ("mask length", ring_attention, (q, k, v, bias[..., :5] if last else bias), {}),
        ("full mask", ring_attention, (q, k, v, torch.zeros(1, 1, 8, 8, device=me.device) if last else bias), {}),
        ("float64", ring_attention, [x.double() if last else x for x in (q, k, v)], {}),
        ("tensor of causal", ring_attention, (q, k, v), {"causal": torch.tensor([True, False]) if last else False}),
        ("value_bits", ring_attention, (q, k, v), {"value_bits": 7 if last else 9}),
        ("causal", ring_attention, (q, k[:, :, :5], v[:, :, :5]) if last else (q, k, v), {"causal": True}),
        ("function", ulysses_attention if last else ring_attention, (q, k, v), {}),
        ("quantised causal", ulysses_attention, (q, k, v), {"causal": True, "quantize": True}),
        ("gradient", ring_attention, (q.clone().requires_grad_(last), k, v), {}),
        ("no tensor", ring_attention, (None if last else q, k, v), {}),
        ("no mask", ulysses_attention, (q, k, v, 3 if last else bias), {}),
        ("rowless mask", ring_attention, (q[:, :, :0], k, v, bias.expand(1, 1, 0, 8)) if last else (q, k, v, bias), {}),
        ("return_lse", ring_attention, (q, k, v), {"return_lse": torch.tensor(True) if last else True}),
        ("tensor of bits", ring_attention, (q, k, v), {"value_bits": torch.tensor([8, 9]) if last else 9}),
        ("transform", under_grad if last else ring_attention, (q, k, v), {}),
        ("quantize", ulysses_attention, (q, k, v), {"causal": True, "quantize": 1 if last else False}),
    ):
        me.found[f"refusals: {name}"] = error_of(attend, *given, **settings)
    require = start.require
    if last:
        start.require = failing
    me.found["refusals: any error"] = error_of(ring_attention, q, k, v)
    start.require = require
    out = ring_attention(q, k, v)  # all is well afterwards
    me.found["refusals: afterwards"] = bool(out.isfinite().all())


def under_grad(query, key, value):
    return torch.func.grad(lambda x: ring_attention(x, key, value).sum())(query)


def failing(*arguments):
    raise OSError("a size that fails")


def error_of(function, *given, **settings):
    start = time.monotonic()
    try:
        function(*given, **settings)
    except (RuntimeError, ValueError, OSError) as error:
        text = "; ".join((str(error), *getattr(error, "__notes__", [])))
        return {"kind": type(error).__name__, "text": text, "seconds": time.monotonic() - start}
    return {"kind": "", "text": "", "seconds": time.monotonic() - start}


def subgroup(me: Rank) -> None:
    """The odd ranks of four among themselves, in which they are ranks 0 and 1."""
    group = dist.new_group([1, 3])
    q, k, v = me.draw(gaussian, 1, 2, 20, 40, WIDTH)
    if me.rank % 2 == 0:
        me.found["subgroup"] = error_of(ring_attention, q, k, v, group=group)
        return
    half = slice(10 * (me.rank // 2), 10 * (me.rank // 2) + 10)
    keys = slice(20 * (me.rank // 2), 20 * (me.rank // 2) + 20)
    ref = sdpa_oracle(q, k, v)[0][:, :, half]
    for name, attend in (("ring", ring_attention), ("ulysses", ulysses_attention)):
        out = attend(q[:, :, half], k[:, :, keys], v[:, :, keys], group=group)
        me.found[f"subgroup: {name}"] = relative_error(out, ref)


def compiled(me: Rank) -> None:
    """torch.compile breaks its graph at the calls and gives the same answers."""
    q, k, v = me.draw(gaussian, 1, 2, 10, 20, WIDTH)
    for name, attend in (("ring", ring_attention), ("ulysses", ulysses_attention)):

        def step(q, k, v, attend=attend):
            return attend(q * 2, k, v) + 1

        with torch.no_grad():
            same = torch.equal(torch.compile(step, backend="eager")(q, k, v), step(q, k, v))
        me.found[f"compiled: {name}"] = same


def leaks(me: Rank) -> None:
    """Open files and threads before and after many calls."""
    q, k, v = me.draw(gaussian, 1, 1, 4, 4, WIDTH)

    def handles():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for count in (2, 3):
        for _ in range(count):
            ring_attention(q, k, v)
            ulysses_attention(q, k, v)
        me.found[f"leaks: after {count}"] = handles()


def death(me: Rank) -> None:
    """The last rank leaves in the middle of a ring: the others must hear of it within the group's timeout."""
    from sdpa_router.distributed import ring

    q, k, v = me.draw(gaussian, 1, 1, 8, 8, WIDTH)
    if me.rank == me.size - 1:
        ring.link_of = lambda ranks: os._exit(0)
    me.found["death"] = error_of(ring_attention, q, k, v)


def stray(me: Rank) -> None:
    """The last rank stays away for longer than the timeout of the group."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    q, k, v = me.draw(gaussian, 1, 1, 8, 8, WIDTH)
    if me.rank == me.size - 1:
        time.sleep(2)
    else:
        me.found["stray"] = error_of(ring_attention, q, k, v, group=group)


def traffic(me: Rank) -> None:
    """What a call's record says that leaves this rank, and what was handed to the process group."""
    sent: list[int] = []
    operation, exchange = dist.P2POp, dist.all_to_all_single

    def counted(op, data, **settings):
        sent.append(len(data) if op is dist.isend else 0)
        return operation(op, data, **settings)

    def exchanged(received, given, arriving, sizes, group):
        sent.append(sum(sizes) - sizes[me.rank])
        return exchange(received, given, arriving, sizes, group=group)

    q, k, v = me.draw(gaussian, 1, 2, 24, 40, WIDTH)
    mask = me.mask("bias by head", 2, 40)
    q_cuts, k_cuts = me.cuts(24), me.cuts(40)
    given = [me.shard(q, q_cuts), me.shard(k, k_cuts), me.shard(v, k_cuts), mask]
    dist.P2POp, dist.all_to_all_single = counted, exchanged
    try:
        for name, attend, settings in (
            ("ring", ring_attention, {"value_bits": 8}),
            ("ulysses", ulysses_attention, {"return_lse": True}),
            ("ulysses, quantised", ulysses_attention, {"quantize": True}),
        ):
            sent.clear()
            with record() as seen:
                attend(*given, **settings)
            me.found[f"traffic: {name}"] = {"bytes": sum(sent), "records": seen.records}
    finally:
        dist.P2POp, dist.all_to_all_single = operation, exchange


def suite_of(me: Rank):
    """The checks of this world; what breaks the group comes last."""
    if me.device.type == "cuda":
        return [answers, merged, accuracy, causal, layouts, dtensors, refusals, compiled, leaks, traffic]
    # Each on one world, because the interpreter is slow.
    if me.size == 2:
        return [answers, merged, refusals, dtensors, leaks, causal, compiled, traffic, stray]
    return [answers, merged, refusals, accuracy, layouts, subgroup, death]


def run(world: worlds.World) -> None:
    """Run the checks on this rank."""
    me = Rank(world)
    for check in suite_of(me):
        start, busy = time.monotonic(), time.process_time()
        check(me)
        took = time.monotonic() - start, time.process_time() - busy
        world.write(me.found, f"{check.__name__} took {took[0]:.1f} s, {took[1]:.1f} of them busy")


if __name__ == "__main__":
    worlds.main(run, TIMEOUT)
