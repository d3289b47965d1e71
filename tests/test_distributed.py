"""Ring and Ulysses attention on 2 and 4 real processes (ranks.py): answers, errors on every rank, bytes, no leaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import start

import sdpa_router
from sdpa_router import Code, UnsupportedError, int8_attention, merge_attention, record, reset_stats, stats
from sdpa_router.distributed import decide, exchange, explain, group, ring, ring_attention, ulysses_attention, wire
from sdpa_router.kernels.int8_attention import shards as kernels
from sdpa_router.kernels.int8_attention.configs import HOPPER_GLUON, config_for
from sdpa_router.testing import BUDGET, gaussian, relative_error

SCRIPT = Path(__file__).with_name("ranks.py")
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="runs without a GPU, in Triton's interpreter")
WORLDS = [
    *(pytest.param((size, "gloo"), marks=ON_CPU, id=f"{size}-gloo") for size in (2, 4)),
    pytest.param((2, "nccl"), marks=[pytest.mark.gpu, NEEDS_TWO], id="2-nccl"),
]
MASKS = ("none", "bool by head", "left padding", "gap", "nothing", "bias", "bias by head", "constant", "absorbing")


@pytest.fixture(scope="module")
def by_size(tmp_path_factory):
    """What each rank found, by size of its world: one process starts all."""
    backend, sizes = ("nccl", [2]) if torch.cuda.is_available() else ("gloo", [2, 4])
    return start(SCRIPT, backend, tmp_path_factory.mktemp("ranks"), sizes)


@pytest.fixture(scope="module", params=WORLDS)
def found(request, by_size):
    """What each rank of a world found."""
    return by_size[request.param[0]]


def here(found, check):
    """The ranks' findings, if this world runs the check: each runs in one world at least."""
    if not any(name == check or name.startswith(f"{check}:") for name in found[0]):
        pytest.skip("runs on another number of processes")
    return found


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_with_grouped_heads_and_uneven_shards(found, mask):
    for rank in here(found, f"answers: {mask}"):
        checks = rank[f"answers: {mask}"]
        for name, check in checks.items():
            assert check["error"] <= max(1.5 * checks["one"]["error"], 0.004), (name, check)  # a few hundred numbers
            assert check["lse"] <= BUDGET.lse, (name, check)
            assert check.get("shape", True), name
            assert check.get("zero", True) or mask != "nothing", name
        assert checks.get("ulysses", {}).get("same", True)
    assert "ulysses" in rank["answers: bias by head"]


def test_the_ring_is_the_merge_of_its_shards(found):
    cases = [name for name in found[0] if name.startswith("merged")]
    assert len(cases) == (4 if len(found) == 2 else 1)
    for rank in found:
        for case in cases:
            assert rank[case]["out"] <= 1.01, (case, rank[case])
            assert rank[case].get("mean", 0) <= 3e-5, (case, rank[case])
            assert rank[case]["lse"] <= 1e-6, (case, rank[case])


def test_error_is_that_of_one_process(found):
    ranks = here(found, "accuracy")
    one, ring_, size = (sum(rank["accuracy"][name] for rank in ranks) for name in ("one", "ring", "size"))
    assert (ring_ / size) ** 0.5 <= BUDGET.gaussian
    assert (ring_ / one) ** 0.5 <= 1.05


def test_inputs_that_are_hard_to_quantise(found):
    for rank in here(found, "outliers"):
        assert rank["outliers"]["error"] <= BUDGET.outliers
        assert rank["outliers"]["lse"] <= 2 * rank["outliers"]["one lse"]


@pytest.mark.parametrize("attend", ["ring", "ulysses"])
def test_causal(found, attend):
    for rank in here(found, "causal"):
        assert rank[f"causal: {attend}"]["error"] <= 0.0125
        assert rank[f"causal: {attend}"]["lse"] <= BUDGET.lse


def test_layouts(found):
    cases = [name for name in here(found, "layouts")[0] if name.startswith("layouts")]
    assert len(cases) == 6
    for rank in found:
        for case in cases:
            assert rank[case]["error"] <= 0.025, case  # scores are 2.3 times as large as usual
            assert rank[case]["lse"] <= 0.02, case
            assert rank[case]["strides"], case


def test_dtensors(found):
    for rank in here(found, "dtensors"):
        for attend in ("ring", "ulysses"):
            check = rank[f"dtensors: {attend}"]
            assert check["placed"]
            assert check["error"] <= BUDGET.gaussian
            assert check["lse"] <= BUDGET.lse
        assert "query is a DTensor placed [S(1)]; expected Shard(2)" in rank["dtensors: heads"]["text"]
        assert "value is a DTensor placed [R]; expected Shard(2)" in rank["dtensors: replicated"]["text"]
        assert "value is a Tensor; expected a DTensor" in rank["dtensors: mixed"]["text"]
        assert rank["dtensors: two axes"] <= BUDGET.gaussian
    last = len(found) - 1
    for number, rank in enumerate(found):
        for case, text in {
            "replicated on one": "value is a DTensor placed [R]; expected Shard(2)",
            "plain on one": "query is a Tensor; expected a DTensor, as other arguments are",
            "group on one": "given a group and DTensors; expected one of them",
            "mask on one": "attn_mask is a DTensor placed [S(1)]; expected Shard(3)",
            "only the mask on one": "query is a Tensor; expected a DTensor, as other arguments are",
        }.items():
            said = f"ring_attention on rank {number} of {len(found)}: rank {last} refuses: "
            assert rank[f"dtensors: {case}"]["text"].startswith(said + text)
            assert rank[f"dtensors: {case}"]["seconds"] < 60


TEXTS = {
    "head_dim": "rank {last} gives head_dim {wide}, expected {width} as on rank 0",
    "heads": "rank {last} gives heads 1, expected 2 as on rank 0",
    "dtype": "rank {last} gives dtype 'torch.bfloat16', expected 'torch.float16' as on rank 0",
    "scale": "rank {last} gives scale 0.5, expected 0.25 as on rank 0",
    "mask on one rank": "rank {last} gives mask 'a mask of float32', expected 'no mask' as on rank 0",
    "mask dtype on one rank": "rank {last} gives mask 'a mask of float16', expected 'a mask of float32' as on rank 0",
    "mask length": "rank {last} gives a mask over 5 keys, expected 8 (its shard), {all} (all keys) or 1",
    "full mask": "rank {last} refuses: sdpa because full_mask",
    "float64": "rank {last} refuses: sdpa because dtype: query is float64",
    "tensor of causal": "rank {last} refuses: sdpa because argument: given is_causal of type Tensor",
    "value_bits": "rank {last} refuses: gives value_bits 7, expected one of 8, 9, 16",
    "causal": "rank {last} gives 8 queries and 5 keys with causal=True, expected as many of one as of the other",
    "function": "rank {last} gives function 'ulysses_attention', expected 'ring_attention' as on rank 0",
    "quantised causal": "rank {last} refuses: gives quantize=True with causal",
    "gradient": "rank {last} refuses: sdpa because requires_grad",
    "transform": "rank {last} refuses: sdpa because requires_grad: query requires a gradient; the kernel takes tensors "
    "without, or no_grad(); functorch: called under a torch.func transform",
    "no tensor": "rank {last} refuses: sdpa because tensor_subclass: given NoneType",
    "no mask": "rank {last} refuses: sdpa because invalid_mask: the mask is int",
    "rowless mask": "rank {last} refuses: sdpa because invalid_mask: the mask is [1, 1, 0, 8]",
    "return_lse": "rank {last} refuses: gives return_lse tensor(True), expected True or False",
    "tensor of bits": "rank {last} refuses: gives value_bits tensor([8, 9]), expected one of 8, 9, 16",
    "quantize": "rank {last} refuses: gives quantize 1, expected True, False or None",
    "any error": "rank {last} refuses: a size that fails",
}


@pytest.mark.parametrize("case", TEXTS)
def test_bad_input_raises_on_every_rank(found, case):
    last = len(found) - 1
    width = 128 if torch.cuda.is_available() else 32
    text = TEXTS[case].format(last=last, all=8 * len(found), width=width, wide=2 * width)
    for number, rank in enumerate(found):
        error = rank[f"refusals: {case}"]
        if number == last and ("because" in text or case == "any error"):
            assert error["kind"] == ("OSError" if case == "any error" else "UnsupportedError")
            assert text.partition("refuses: ")[2] in error["text"]
            assert f"on rank {number} of {len(found)}: the other ranks raise too" in error["text"]
        else:
            assert error["kind"] == "ValueError"
            assert f"on rank {number} of {len(found)}: " in error["text"]
            assert text in error["text"]
        assert error["seconds"] < 60
        assert rank["refusals: afterwards"]


def test_a_group_of_some_ranks(found):
    for number, rank in enumerate(here(found, "subgroup")):
        if number % 2:
            assert rank["subgroup: ring"] <= BUDGET.gaussian
            assert rank["subgroup: ulysses"] <= BUDGET.gaussian
        else:
            assert f"rank {number} called ring_attention with a group it is not in" in rank["subgroup"]["text"]


@pytest.mark.parametrize("attend", ["ring", "ulysses"])
def test_compiled_models(found, attend):
    assert all(rank[f"compiled: {attend}"] for rank in here(found, "compiled"))


def test_repeated_calls_leak_no_handles(found):
    for rank in here(found, "leaks"):
        assert rank["leaks: after 3"] == rank["leaks: after 2"]


@pytest.mark.parametrize(("way", "code"), [("ring", Code.RING), ("ulysses", Code.ULYSSES)])
def test_each_call_is_counted_with_the_bytes_that_leave_the_rank(found, way, code):
    names = [name for name in here(found, "traffic")[0] if name.startswith(f"traffic: {way}")]
    assert len(names) == (1 if way == "ring" else 2)
    for number, rank in enumerate(found):
        for name in names:
            (record,) = rank[name]["records"]
            assert (record["count"], record["backend"], record["notes"]) == (1, "int8", [code.value])
            what = f"rank {number} of {len(found)} with its part of 24 queries and 40 keys"
            assert f"({code}: {what}; {rank[name]['bytes']} bytes leave it)" in record["detail"]


def test_a_rank_that_dies_is_an_error_on_the_others(found):
    for number, rank in enumerate(here(found, "death")[:-1]):
        assert rank["death"]["kind"] == "RuntimeError"
        assert f"rank {number} of 4: a hop of the ring (to rank {number + 1}" in rank["death"]["text"]
        assert rank["death"]["seconds"] < 120


def test_a_rank_that_stays_away_is_an_error_after_the_timeout(found):
    error = here(found, "stray")[0]["stray"]
    assert "rank 0 of 2: the exchange of shapes failed" in error["text"]
    assert error["seconds"] < 10


@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
def test_no_process_group(attend):
    q, k, v = gaussian(1, 1, 4, 4, 32)
    with pytest.raises(RuntimeError, match="needs a process group, and none is initialised: start the program with"):
        attend(q, k, v)


@pytest.fixture
def alone(tmp_path, device):
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
def test_one_rank_is_one_process(attend, device):
    q, k, v = (x.to(device) for x in gaussian(1, 4, 9, 70, 32, kv_heads=2))
    mask = (torch.arange(70, device=device) > 20).view(1, 1, 1, 70)
    out, lse = attend(q, k, v, mask, return_lse=True)
    one, one_lse = int8_attention(q, k, v, mask, enable_gqa=True, return_lse=True)
    assert torch.equal(out, one)
    assert torch.equal(lse, one_lse)
    with record() as seen:
        attend(q, k, v, mask)
    (call,) = seen.records
    assert (call["count"], call["backend"], call["caller"].split()[-1]) == (1, "int8", "test_one_rank_is_one_process")
    assert "rank 0 of 1 with its part of 9 queries and 70 keys; 0 bytes leave it" in call["detail"]
    with pytest.raises(UnsupportedError, match="dtype"):
        attend(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match="rank 0 gives a mask over 60 keys, expected 70"):
        attend(q, k, v, mask[..., :60])
    with pytest.raises(ValueError, match="rank 0 gives value_bits 7, expected one of 8, 9, 16"):
        attend(q, k, v, value_bits=7)
    with pytest.raises(ValueError, match="rank 0 gives quantize=True with causal, expected one of them"):
        ulysses_attention(q, k, v, causal=True, quantize=True)
    out, lse = attend(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
def test_one_rank_judges_a_kind_of_call_once(attend, device, monkeypatch):
    """Judging and gathering facts took 1.4 % of a call of 20 ms on an H200, whose host is slow."""
    q, k, v = (x.to(device) for x in gaussian(1, 2, 9, 71, 32))
    mask = torch.zeros(1, 1, 1, 71, device=device)
    reset_stats()
    first = attend(q, k, v, mask)
    for name in ("judge", "facts_of"):
        monkeypatch.setattr(decide, name, lambda *given: pytest.fail("judged again"))
    assert torch.equal(attend(q, k, v, mask), first)
    (sighting,) = stats()["signatures"]
    assert sighting["count"] == 2
    monkeypatch.undo()
    assert len(attend(q, k, v, mask, return_lse=True)) == 2
    attend(q, k, v, mask, scale=0.5)
    assert [sighting["count"] for sighting in stats()["signatures"]] == [2, 1, 1]
    for wrong in ((None, k, v, mask), (q, k, v, 3), (q, k, v, mask.double()), (q.double(), k, v, mask)):
        with pytest.raises(UnsupportedError):
            attend(*wrong)
    with pytest.raises(UnsupportedError, match="requires_grad"):
        attend(q, k, v, mask.clone().requires_grad_())
    with pytest.raises(ValueError, match="rank 0 gives value_bits 7"):
        attend(q, k, v, mask, value_bits=7)


@pytest.mark.parametrize(("attend", "settings"), [(ring_attention, {}), (ulysses_attention, {"quantize": True})])
def test_explaining_needs_no_group(attend, settings):
    reset_stats()
    query = torch.empty(1, 8, 512, 128, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(1, 1, 1, 512, device="meta")
    decision = explain(attend, query, query, query, mask, ranks=4, rank=1, **settings)
    (note,) = decision.notes
    assert decision.routed
    assert note.given == "rank 1 of 4 with its part of 2048 queries and 2048 keys"
    bf16 = 2 * query.numel() * 2 * 3
    if attend is ring_attention:
        assert 0.53 < note.accepted / bf16 < 0.55
        hops = explain(attend, query, query, query, mask, ranks=2, **settings)
        assert note.accepted == 3 * hops.notes[0].accepted
    refused = explain(attend, query, query, query, torch.empty(1, 1, 512, 512, device="meta"), ranks=4, **settings)
    assert [reason.code for reason in refused.reasons] == [Code.FULL_MASK]
    with pytest.raises(ValueError, match="rank 0 gives a mask over 60 keys, expected 512"):
        explain(attend, query, query, query, mask[..., :60], ranks=4, **settings)
    with pytest.raises(ValueError, match="value_bits 7, expected one of 8, 9, 16"):
        explain(attend, query, query, query, ranks=4, value_bits=7, **settings)
    with pytest.raises(ValueError, match="given rank 4 of 4 ranks; accepted: 0 to 3"):
        explain(attend, query, query, query, ranks=4, rank=4)
    with pytest.raises(ValueError, match="accepted: ring_attention and ulysses_attention"):
        explain(int8_attention, query, query, query, ranks=4)
    assert stats()["calls"] == 0


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
def test_what_is_no_group(attend, device):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (1,))
    for wrong in (mesh, "world", 0, [0]):
        with pytest.raises(ValueError, match=f"given group as a {type(wrong).__name__}; expected a ProcessGroup"):
            attend(*gaussian(1, 1, 4, 4, 32), group=wrong)
    attend(*(x.to(device) for x in gaussian(1, 1, 4, 4, 32)), group=mesh.get_group())


@pytest.mark.usefixtures("alone")
def test_a_group_without_this_rank(monkeypatch):
    monkeypatch.setattr(group.dist, "get_rank", lambda handle=None: -1 if handle else 3)
    with pytest.raises(ValueError, match="rank 3 called ring_attention with a group it is not in"):
        ring_attention(*gaussian(1, 1, 4, 4, 32), group=torch.distributed.group.WORLD)


def test_backends_that_do_not_send_from_rank_to_rank():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert not group.Group(None, 0, 2, {"cpu": "gloo", "cuda": "nccl"}).refusal(cuda)
    assert not group.Group(None, 0, 2, {"cpu": "gloo"}).refusal(cpu)
    assert "tensors are on cpu, and the group has a backend only for: nccl for cuda" in group.Group(
        None, 0, 2, {"cuda": "nccl"}
    ).refusal(cpu)
    assert "backend gloo does not send cuda tensors" in group.Group(None, 0, 2, {"cuda": "gloo"}).refusal(cuda)
    assert "backend fake does not send cpu tensors" in group.Group(None, 0, 2, {"cpu": "fake"}).refusal(cpu)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("config", [HOPPER_GLUON[128], config_for(80, 128)])
def test_a_hop_moves_about_half_of_the_bytes(head_dim, config):
    keys, ratios = 8190, {}
    for bits in wire.VALUE_BITS:
        spec = wire.Spec(1, 8, head_dim, torch.bfloat16, config, (1, 1), bits)
        ratios[bits] = wire.layout(spec, keys).size / (2 * 8 * keys * head_dim * 2)
    assert ratios[8] < ratios[9] <= 0.55 < ratios[16] <= 0.76


def test_the_layout_is_that_of_the_quantised_key(device):
    from sdpa_router.distributed import tile

    q, k, v = (x.to(device) for x in gaussian(2, 4, 5, 130, 40, kv_heads=2))
    mask = torch.randn(2, 4, 1, 130, device=device)
    config = tile.config_for_shards(q)[0]
    spec = wire.Spec(2, 2, 40, q.dtype, config, (2, 4), 9)
    shard = tile.quantize_shard(k, v, mask, None, spec, 2)
    there = wire.layout(spec, 130)
    buffer = torch.empty(there.size, dtype=torch.uint8, device=device)
    tile.pack(shard, there, buffer)
    arrived = tile.unpack(buffer, there, spec)
    for one, other in zip(shard.key, arrived.key, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert relative_error(arrived.value, v) < 0.0035


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 9))
def test_every_head_is_dealt_once(kv_heads, group_size, ranks):
    dealt = exchange.deal(kv_heads * group_size, kv_heads, ranks)
    assert [h for part in dealt.queries for h in range(part.start, part.stop)] == list(range(kv_heads * group_size))
    counts = [part.stop - part.start for part in dealt.keys]
    assert sum(counts) == kv_heads
    assert max(counts) - min(counts) <= 1
    assert [part.stop - part.start for part in dealt.queries] == [count * group_size for count in counts]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=5), st.booleans())
def test_every_pair_of_shards_is_attended_to_once(lengths, causal):
    everyone = [
        group.Facts("ring_attention", 1, 2, 2, 32, "", causal, q_len=n, kv_len=n, value_bits=9) for n in lengths
    ]
    assert not group.disagreement(everyone)
    query = torch.empty(1, 2, 1, 32, dtype=torch.float16)
    seen = 0
    for rank, mine in enumerate(lengths):
        for source, diagonal in ring.plan(query, query, rank, everyone).visible.items():
            assert diagonal == (causal and source == rank)
            seen += mine * (mine + 1) // 2 if diagonal else mine * lengths[source]
    total = sum(lengths)
    assert seen == (total * (total + 1) // 2 if causal else total * total)


@pytest.mark.parametrize("head_dim", [12, 64, 128, 256])
@pytest.mark.parametrize(("bits", "most"), [(8, 0.0072), (9, 0.0036)])
def test_values_survive_the_wire(head_dim, bits, most, device):
    value = torch.randn(2, 35, 2, head_dim, dtype=torch.float16, device=device).transpose(1, 2)
    value[0, 0, 3] = 0
    value[0, 1, 5] *= 1000
    code = torch.empty(value.shape, dtype=torch.int8, device=device)
    low = torch.empty(2, 2, 35, -(-head_dim // 8), dtype=torch.uint8, device=device) if bits == 9 else None
    scale = torch.empty(2, 2, 35, dtype=torch.bfloat16, device=device)
    kernels.encode_value(value, code, low, scale)
    back = torch.full(value.shape, 7.0, dtype=torch.float16, device=device)
    kernels.decode_value(code, low, scale, back)
    errors = [relative_error(one, other) for one, other in zip(back.flatten(0, 2), value.flatten(0, 2), strict=True)]
    assert max(errors) < 2 * most
    assert sum(errors) / len(errors) < most
    value[1, 0, 2, 1] = torch.inf
    kernels.encode_value(value, code, low, scale)
    kernels.decode_value(code, low, scale, back)
    assert back[1, 0, 2].isnan().all()
    assert back.isnan().sum() == head_dim


def test_values_of_several_threads(device):
    """As where each thread has a group of its own: Triton's interpreter alone can't do that."""
    values = [torch.randn(1, 1, 40 * n, 32, device=device).half() for n in (1, 2, 3)] * 3

    def there_and_back(value):
        code = torch.empty(value.shape, dtype=torch.int8, device=device)
        scale = torch.empty(value.shape[:3], dtype=torch.bfloat16, device=device)
        back = torch.empty_like(value)
        kernels.encode_value(value, code, None, scale)
        kernels.decode_value(code, None, scale, back)
        return relative_error(back, value)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(there_and_back, values)) < 0.0075


@pytest.mark.parametrize("bits", [8, 9])
def test_the_largest_values_stay_finite(bits, device):
    value = torch.randn(1, 1, 9, 40, dtype=torch.float16, device=device)
    value[0, 0, :8] *= 60000 / value[0, 0, :8].abs().amax(-1, keepdim=True)
    value[0, 0, 1, 3], value[0, 0, 2, 7], value[0, 0, 3] = 65504, -65504, 65504
    value[0, 0, 8, 0] = -torch.inf
    code = torch.empty(value.shape, dtype=torch.int8, device=device)
    low = torch.empty(1, 1, 9, 5, dtype=torch.uint8, device=device) if bits == 9 else None
    scale = torch.empty(1, 1, 9, dtype=torch.bfloat16, device=device)
    back = torch.empty_like(value)
    kernels.encode_value(value, code, low, scale)
    kernels.decode_value(code, low, scale, back)
    assert relative_error(back[0, 0, :8], value[0, 0, :8]) < 0.0075
    assert back[0, 0, 8].isnan().all()


def test_merging_in_place_is_merge_attention(device):
    outs = torch.randn(2, 2, 3, 37, 40, device=device)
    lses = torch.randn(2, 2, 3, 37, device=device) * 30
    lses[0, 0, 0, :5], lses[1, 0, 0, 3:9], lses[0, 1, 1, 1] = -torch.inf, -torch.inf, torch.nan
    outs[0, 0, 0, :5] = torch.nan  # an empty part counts for nothing, whatever it holds
    expected = merge_attention(list(outs), list(lses))
    kernels.merge_parts(outs[0], lses[0], outs[1], lses[1], outs[0], lses[0])
    torch.testing.assert_close(outs[0], expected[0], equal_nan=True)
    torch.testing.assert_close(lses[0], expected[1], equal_nan=True)


@pytest.mark.parametrize("chip", ["sm_90"])
def test_kernels_compile_without_spills(chip):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT.with_name("aot_shards.py")), chip]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 16
    assert not [row for row in rows if row["spills"] or row["shared"] > 65_536]


def test_importing_the_package_imports_no_distributed():
    code = "import sys, sdpa_router; sys.exit('sdpa_router.distributed' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert sdpa_router.__version__
