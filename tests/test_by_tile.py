"""Dense masks through the router: who answers, how often a mask is looked at, and what the decision tells."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import sdpa_router
from sdpa_router import (
    Backend,
    BackendLimits,
    Code,
    MaskKind,
    Route,
    by_tile,
    mask_summary,
    register_backend,
    run,
    unregister_backend,
)
from sdpa_router.kernels.sparse_attention.limits import TileCost
from sdpa_router.testing import gaussian, relative_error, sdpa_oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHEAP = TileCost(kept=1.0, read=1.5, torch=2.0, fixed_ms=0.0)  # skipping half of the tiles pays whatever the size


def at_cost(monkeypatch, cost):
    for name in ("H200", "H200_WORDS", "ELSEWHERE"):
        monkeypatch.setattr(by_tile, name, cost)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch):
    at_cost(monkeypatch, CHEAP)
    mask_summary.forget()
    sdpa_router.reset_stats()


@pytest.fixture
def summaries(monkeypatch):
    """How many masks were summarised, as a list of their shapes."""
    made, init = [], mask_summary.Summarised.__init__

    def counted(self, mask):
        made.append(tuple(mask.shape))
        init(self, mask)

    monkeypatch.setattr(mask_summary.Summarised, "__init__", counted)
    return made


def inputs(q_len=130, kv_len=200):
    return gaussian(1, 2, q_len, kv_len, 64, device=DEVICE)


def banded(q_len=130, kv_len=200):
    rows, columns = torch.arange(q_len, device=DEVICE)[:, None], torch.arange(kv_len, device=DEVICE)
    return (rows - columns).abs() < 40


def read_everywhere(q_len=130, kv_len=200):
    return torch.rand(q_len, kv_len, device=DEVICE) < 0.5


def routed(*arguments, **settings):
    with sdpa_router.route(min_kv=0, **settings), torch.no_grad():
        return F.scaled_dot_product_attention(*arguments)


def test_a_banded_mask_is_answered_by_tile_and_looked_at_once(summaries):
    query, key, value = inputs()
    mask = banded()
    for _ in range(3):
        out = routed(query, key, value, mask.view(1, 1, 130, 200))
    assert relative_error(out, sdpa_oracle(query, key, value, mask)[0]) < 0.0135
    assert summaries == [(1, 1, 130, 200)]
    assert sdpa_router.stats()["routes"]["int8"] == 3


def test_a_mask_that_must_be_read_everywhere_goes_to_torch(summaries, monkeypatch):
    query, key, value = inputs()
    mask = read_everywhere()
    at_cost(monkeypatch, CHEAP._replace(read=3.0))
    out = routed(query, key, value, mask)
    assert torch.equal(out, F.scaled_dot_product_attention(query, key, value, mask))
    assert len(summaries) == 1
    with sdpa_router.route(min_kv=0), torch.no_grad():
        decision = sdpa_router.explain(query, key, value, mask)
    assert [reason.code for reason in decision.reasons] == [Code.TILES]
    assert "the mask has 12 tiles: 0 kept, 0 of one number, 12 read, 0 skipped" in str(decision)


def test_explain_launches_nothing_and_tells_what_is_known(summaries):
    query, key, value = inputs()
    mask = banded()
    with sdpa_router.route(min_kv=0), torch.no_grad():
        before = sdpa_router.explain(query, key, value, mask)
        assert [reason.code for reason in before.reasons] == [Code.FULL_MASK]
        assert summaries == []
        F.scaled_dot_product_attention(query, key, value, mask)
        after = sdpa_router.explain(query, key, value, mask)
    assert after.route is Route.INT8
    assert after.mask.tiles.total == 12
    assert str(after) == f"int8 (mask: full, bool [130, 200], {after.mask.tiles})"


def test_a_mask_that_is_written_to_is_looked_at_again(summaries):
    query, key, value = inputs()
    mask = banded()
    routed(query, key, value, mask)
    mask[:, 150:] = True
    out = routed(query, key, value, mask)
    assert relative_error(out, sdpa_oracle(query, key, value, mask)[0]) < 0.0135
    assert len(summaries) == 2


def test_masks_that_are_always_new_are_no_longer_looked_at(summaries):
    query, key, value = inputs()
    for _ in range(by_tile.PATIENCE + 5):
        mask = banded()
        out = routed(query, key, value, mask)
        assert relative_error(out, sdpa_oracle(query, key, value, mask)[0]) < 0.0135
    assert len(summaries) == by_tile.PATIENCE
    assert sdpa_router.stats()["reasons"] == {"tiles": 5}


def test_a_mask_that_is_kept_after_many_new_ones_is_looked_at(summaries):
    query, key, value = inputs()
    for _ in range(by_tile.PATIENCE):
        routed(query, key, value, banded())
    mask = banded()
    with sdpa_router.route(min_kv=0), torch.no_grad():
        for _ in range(5):
            out = F.scaled_dot_product_attention(query, key, value, mask)
    assert sdpa_router.stats()["routes"] == {"sdpa": 1, "int8": by_tile.PATIENCE + 4}
    assert relative_error(out, sdpa_oracle(query, key, value, mask)[0]) < 0.0135
    assert len(summaries) == by_tile.PATIENCE + 1


def test_a_mask_of_inference_mode_says_why_it_is_not_looked_at():
    query, key, value = inputs()
    with torch.inference_mode():
        mask = banded()
    with sdpa_router.route(min_kv=0):
        decision = sdpa_router.explain(query, key, value, mask)
    assert decision.reasons[0].code is Code.TILES
    assert "inference mode" in str(decision)


def test_additive_float32_masks_and_raise(summaries):
    query, key, value = inputs()
    mask = torch.where(banded(), 1.0, -torch.inf)
    out = routed(query, key, value, mask, on_unsupported="raise")
    assert relative_error(out, sdpa_oracle(query, key, value, mask)[0]) < 0.0135


@pytest.mark.parametrize("why", ["inference", "small", "compiled"])
def test_where_a_mask_is_not_looked_at(why, summaries, monkeypatch):
    query, key, value = inputs()
    mask = banded()
    if why == "inference":
        with torch.inference_mode():
            mask = banded()
    elif why == "small":
        at_cost(monkeypatch, CHEAP._replace(fixed_ms=1.0))
    if why == "compiled":
        compiled = torch.compile(sdpa_router.scaled_dot_product_attention, backend="eager", fullgraph=True)
        with torch.no_grad():
            out = compiled(query, key, value, mask)
    else:
        out = routed(query, key, value, mask)
    assert torch.equal(out, F.scaled_dot_product_attention(query, key, value, mask))
    assert summaries == []


def test_a_first_warning_tells_what_the_tiles_decided(summaries, monkeypatch):
    query, key, value = inputs()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's, of old interpreters
        routed(query, key, value, banded(), on_unsupported="warn")
    assert [str(warning.message) for warning in warned] == []
    at_cost(monkeypatch, CHEAP._replace(read=3.0))
    with pytest.warns(UserWarning, match="tiles: the mask has 12 tiles") as warned:
        routed(query, key, value, read_everywhere(), on_unsupported="warn")
    assert sum(warning.category is UserWarning for warning in warned) == 1
    with torch.inference_mode():
        unseen = read_everywhere()  # counts no versions, so nothing is remembered of it
    shorter = query, key[:, :, :199], value[:, :, :199], unseen[:, :199]
    with pytest.warns(UserWarning, match="tiles: the mask has been made in inference mode"):
        routed(*shorter, on_unsupported="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        routed(*shorter, on_unsupported="warn")


@pytest.mark.parametrize("on_error", ["raise", "fallback"])
def test_a_kernel_that_fails_is_an_error_of_the_backend(on_error, monkeypatch):
    def by_tile(*arguments):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(run, "by_tile", by_tile)
    query, key, value, mask = *inputs(), banded()
    if on_error == "raise":
        with pytest.raises(RuntimeError, match="no kernel image") as caught:
            routed(query, key, value, mask, on_error=on_error)
        assert caught.value.decision.mask.tiles.skipped > 0
        return
    for _ in range(2):
        out = routed(query, key, value, mask, on_error=on_error)
        assert relative_error(out, sdpa_oracle(query, key, value, mask)[0]) < 0.005
    assert sdpa_router.stats()["routes"] == {"int8": 0, "sdpa": 2}
    assert sdpa_router.stats()["reasons"] == {Code.FULL_MASK: 2, Code.BACKEND_FAILED: 2}


def test_the_route_can_be_turned_off(summaries):
    query, key, value = inputs()
    mask = banded()
    out = routed(query, key, value, mask, by_tile=False)
    assert torch.equal(out, F.scaled_dot_product_attention(query, key, value, mask))
    assert summaries == []
    with sdpa_router.route(min_kv=0, by_tile=False), torch.no_grad():
        assert [reason.code for reason in sdpa_router.explain(query, key, value, mask).reasons] == [Code.FULL_MASK]
    with pytest.raises(TypeError, match="by_tile is 1; accepted: True or False"):
        sdpa_router.route(by_tile=1)


@pytest.fixture
def others():
    """Two more backends: one that takes no dense masks, one that fails."""

    def fail(call, settings, attention):
        raise RuntimeError("no kernel image")

    kinds = {"keys-only": (MaskKind.PER_KEY,), "failing": (MaskKind.FULL,)}
    for name, masks in kinds.items():
        register_backend(Backend(name, BackendLimits(masks=masks), lambda call, settings: iter(()), fail))
    yield
    for name in kinds:
        unregister_backend(name)


def test_int8_answers_by_tile_only_where_it_is_named(others, summaries):
    query, key, value, mask = *inputs(), banded()
    out = routed(query, key, value, mask, backends=("keys-only", "torch"))
    assert torch.equal(out, F.scaled_dot_product_attention(query, key, value, mask))
    routed(query, key, value, mask, backends=("keys-only", "torch", "int8"))
    assert sdpa_router.stats()["routes"] == {"int8": 0, "sdpa": 2}
    assert summaries == []


@pytest.mark.parametrize("backends", [("keys-only", "int8"), ("int8", "keys-only", "torch")])
def test_int8_answers_by_tile_beside_other_backends(others, backends, monkeypatch):
    query, key, value, mask = *inputs(), banded()
    routed(query, key, value, mask, backends=backends)
    found = sdpa_router.stats()["signatures"][0]
    assert (found["backend"], found["passed_over"]) == ("int8", {"keys-only": ["full_mask"]})
    at_cost(monkeypatch, CHEAP._replace(read=3.0))
    routed(query, key, value, read_everywhere(), backends=backends)
    found = sdpa_router.stats()["signatures"][1]
    assert (found["backend"], found["passed_over"]) == ("sdpa", {"keys-only": ["full_mask"], "int8": ["tiles"]})
    assert "0 skipped; by tile it pays" in found["detail"]


def test_int8_answers_by_tile_after_a_backend_that_failed(others, caplog):
    query, key, value, mask = *inputs(), banded()
    with caplog.at_level("INFO", logger="sdpa_router.dispatch"):
        for _ in range(2):
            routed(query, key, value, mask, backends=("failing", "int8", "torch"), on_error="fallback")
    assert sdpa_router.stats()["routes"] == {"int8": 2, "sdpa": 0}
    assert sdpa_router.stats()["reasons"] == {Code.BACKEND_FAILED: 2}
    assert sum("int8 (mask: full" in line for line in caplog.messages) == 1


def test_no_mask_of_a_graph_is_looked_at(summaries):
    # A graph of inductor writes several masks into one piece of memory, which leaves no trace.
    def attend(query, key, value, distance):
        near = F.scaled_dot_product_attention(query, key, value, distance < 40)
        return F.scaled_dot_product_attention(near, key, value, distance > 20)

    arguments = *inputs(), (torch.arange(130, device=DEVICE)[:, None] - torch.arange(200, device=DEVICE)).abs()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), sdpa_router.route(min_kv=0, on_error="fallback"):
        out = compiled(*arguments)
    assert torch.equal(out, attend(*arguments))
    assert summaries == []
