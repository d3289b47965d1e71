"""Cost tables: interpolation, files, what "fastest" makes of them, and tune."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import sdpa_router
from sdpa_router import Backend, BackendLimits, Code, Settings, cli, costs, route, stats, tune, tuning
from sdpa_router.backends import base
from sdpa_router.choose import choose
from sdpa_router.costs import Point, Size, Table
from sdpa_router.decide import Call, decide
from sdpa_router.kernels.int8_attention.limits import Crossover

LENGTHS = (512, 1024, 2048, 4096, 8192)


def law(name, size):
    """Milliseconds of two made-up backends: int8 computes twice as fast and pays a fixed price."""
    return size.operations / 1e12 + (1.0 if name == "int8" else 0.0) if name != "torch" else size.operations / 0.5e12


def table(names=("int8", "torch"), lengths=LENGTHS, head_dims=(64, 128), masks=("none", "key"), errors=None):
    sizes = [Size(1, 24, n, n, d, mask) for n, d, mask in itertools.product(lengths, head_dims, masks)]
    points = tuple(Point(size, {name: law(name, size) for name in names}) for size in sizes)
    return Table(points, errors or {}, {"device": "a GPU"}, "somewhere")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache folder of its own, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs.forget()
    yield tmp_path / "sdpa-router"
    costs.forget()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU by name, with facts that a table can be keyed by."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(name="a GPU"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def holds(monkeypatch, found):
    monkeypatch.setattr("sdpa_router.choose.table_for", lambda device: found)


def fake_call(q_len=8192, kv_len=None, head_dim=128, mask=False, **arguments):
    with FakeTensorMode():
        query = torch.empty(1, 24, q_len, head_dim, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(1, 24, kv_len or q_len, head_dim, dtype=torch.bfloat16, device="cuda")
        bias = torch.empty(1, 1, 1, key.shape[2], dtype=torch.bfloat16, device="cuda") if mask else None
    return Call(query, key, key, bias, **arguments)


fake_call()  # torch 2.7 looks for a driver at the first one, unless there is no GPU


# --- interpolation


def test_a_measured_call_gives_what_was_measured():
    for point in table().points:
        estimate = table().estimate(point.size)
        assert estimate == pytest.approx(dict(point.ms), rel=1e-6)


@given(st.integers(512, 8192), st.integers(512, 8192), st.integers(1, 64))
def test_estimates_lie_between_the_efficiencies_around(q_len, kv_len, heads):
    size = Size(1, heads, q_len, kv_len, 128)
    for name, ms in table().estimate(size).items():
        rates = [point.ms[name] / point.size.operations for point in table().points]
        assert min(rates) * (1 - 1e-9) <= ms / size.operations <= max(rates) * (1 + 1e-9)


@given(st.floats(9, 13))
def test_the_fixed_price_is_found_between_lengths(octaves):
    length = round(2**octaves)
    size = Size(1, 24, length, length, 128)
    assert table().estimate(size)["int8"] == pytest.approx(law("int8", size), rel=0.25)
    assert table().estimate(size)["torch"] == pytest.approx(law("torch", size), rel=1e-6)


def test_far_from_all_that_was_measured_nothing_is_known():
    known = table()
    assert known.estimate(Size(1, 24, 64, 64, 128)) == {}
    assert known.estimate(Size(1, 24, 8192, 77, 128)) == {}
    assert known.estimate(Size(1, 24, 4096, 4096, 128, "full")) == {}
    assert known.estimate(Size(1, 24, 4096, 4096, 128, "none", True)) == {}
    assert known.estimate(Size(1, 24, 4096, 4096, 256)) == {}
    assert Table(()).estimate(Size(1, 1, 1, 1, 1)) == {}


def test_longer_calls_are_as_efficient_as_the_longest():
    longest, longer = Size(1, 24, 8192, 8192, 128), Size(4, 24, 32768, 32768, 128)
    known = table()
    for name, ms in known.estimate(longer).items():
        assert ms / longer.operations == pytest.approx(known.estimate(longest)[name] / longest.operations)


def test_a_head_dim_in_between_is_padded_to_the_next():
    known = table()
    assert known.estimate(Size(1, 24, 4096, 4096, 72)) == known.estimate(Size(1, 24, 4096, 4096, 128))
    assert known.estimate(Size(1, 24, 4096, 4096, 40)) == known.estimate(Size(1, 24, 4096, 4096, 64))


def test_the_crossover_is_where_the_curves_cross():
    crossover = table(lengths=(1024, 2048, 4096, 8192, 16384, 32768)).crossover(128)
    exact = math.sqrt(1e12 / (4 * 24 * 128))  # 1e12 operations save the fixed price
    assert exact <= crossover.unmasked <= exact * 2**0.5
    assert crossover.masked == crossover.unmasked
    assert table(names=("torch",)).crossover(128) is None
    assert table(masks=("none",)).crossover(128) is None


# --- files


def test_a_table_survives_its_file(gpu):
    known = table(errors={"int8": {"gaussian": 0.011, "outliers": 0.007}})
    path = costs.write_table(Table(known.points, known.errors, costs.facts_of(torch.device("cuda"))))
    found = costs.tuned_table(torch.device("cuda"))
    assert found.points == known.points
    assert found.error_class("int8") == 0.011
    assert found.error_class("sage") is None
    assert found.source == str(path)
    assert costs.table_for(torch.device("meta")) == found


def test_other_versions_have_another_file(gpu, monkeypatch):
    costs.write_table(Table(table().points, {}, costs.facts_of(torch.device("cuda"))))
    monkeypatch.setattr(costs, "_driver", lambda: "999.1")
    costs.forget()
    assert costs.tuned_table(torch.device("cuda")) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 0, "facts": {}, "errors": {}, "points": []}',
        '{"format": 1, "facts": {}, "errors": {}, "points": [{}]}',
        '{"format": 1, "facts": {}, "errors": {"int8": 3}, "points": []}',
        '{"format": 1, "facts": {}, "errors": {}, "points": 7}',
        json.dumps({**table().as_json(), "points": [{**Size(1, 1, 0, 1, 1)._asdict(), "ms": {}}]}),
        json.dumps({**table().as_json(), "points": [{**Size(1, 1, 1, 1, 1)._asdict(), "ms": {"int8": -1}}]}),
        json.dumps({**table().as_json(), "points": [{**Size(1, 1, 1, 1, 1, "odd")._asdict(), "ms": {}}]}),
        json.dumps({**table().as_json(), "errors": {"int8": {"gaussian": float("nan")}}}),
        json.dumps({**table().as_json(), "errors": {"int8": {"gaussian": -1}}}),
        json.dumps({**table().as_json(), "errors": {"int8": {"gaussian": 10**400}}}),
        json.dumps({**table().as_json(), "errors": {"int8": {}}}),
        json.dumps({**table().as_json(), "facts": {"device": "another GPU"}}),
        "[" * 10**5,
        "\xff\x00",
    ],
)
def test_a_corrupt_file_is_ignored_with_one_warning_and_rewritten(gpu, text):
    facts = costs.facts_of(torch.device("cuda"))
    path = costs.table_path(facts)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    costs.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [costs.tuned_table(torch.device("cuda")) for _ in range(3)]
    assert found == [None] * 3
    (warning,) = caught
    assert "is ignored, `sdpa-router tune` rewrites it" in str(warning.message)
    costs.write_table(Table(table().points, {}, facts))
    assert costs.tuned_table(torch.device("cuda")).points == table().points


def test_without_a_home_nothing_is_tuned(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(costs, "folder", no_home)
    costs.forget()
    assert costs.tuned_table(torch.device("cuda")) is None


def test_the_shipped_table_is_sound():
    shipped = costs.shipped_table("NVIDIA H200")
    assert {"int8", "torch", "fa3"} <= shipped.errors.keys()
    assert costs.shipped_table("NVIDIA GeForce") is None
    h3 = shipped.estimate(Size(1, 56, 4096, 33600, 128, "key"))
    assert h3["int8"] < h3["torch"]
    crossover = shipped.crossover(128)
    assert crossover.masked <= crossover.unmasked


# --- decisions


def decided(call, **settings):
    return choose(call, Settings(backends="fastest", **settings))


@pytest.fixture
def only_int8(monkeypatch, gpu):
    monkeypatch.setattr("sdpa_router.choose.candidates", lambda: ("int8",))
    monkeypatch.setattr("sdpa_router.decide._unavailable", lambda device: None)
    monkeypatch.setattr("sdpa_router.decide.crossover", lambda device, head_dim: Crossover(2048, 3072, 4608))


def test_the_fastest_is_chosen_and_the_slower_told(monkeypatch, only_int8):
    holds(monkeypatch, table(lengths=(512, 1024, 2048, 4096, 8192, 16384, 32768)))
    long, brief = decided(fake_call(32768)), decided(fake_call(2048))
    assert (long.backend, long.reasons) == ("int8", ())
    assert dict(long.estimates)["int8"] < dict(long.estimates)["torch"]
    assert brief.backend == "sdpa"
    assert [reason.code for reason in brief.reasons] == [Code.SLOWER]
    assert "the choice is torch with" in str(brief)
    assert decided(fake_call(32768), min_kv=40000).reasons[0].code is Code.SHORT


def test_torch_is_taken_where_there_is_no_difference(monkeypatch, only_int8):
    size = Size(1, 24, 8192, 8192, 128)
    for ms, expected in ((1.0, "sdpa"), (0.99, "sdpa"), (0.9, "int8")):
        holds(monkeypatch, Table((Point(size, {"torch": 1.0, "int8": ms}),)))
        assert decided(fake_call()).backend == expected


def test_without_a_table_rules_decide(monkeypatch, only_int8):
    holds(monkeypatch, None)
    for call in (fake_call(512), fake_call(16384, mask=True)):
        assert decided(call).backend == decide(call, Settings()).backend


def test_the_interpreter_is_never_the_fastest(monkeypatch):
    holds(monkeypatch, None)
    x = torch.zeros(1, 1, 8, 16, dtype=torch.float16)
    decision = decided(Call(x, x, x))
    assert decision.backend == "sdpa"
    assert [reason.code for reason in dict(decision.passed_over)["int8"]] in ([Code.NOT_MEASURED], [Code.DEVICE])


def test_who_was_not_measured_is_not_chosen(monkeypatch, only_int8):
    free = Backend("free", BackendLimits(), lambda call, settings: iter(()), lambda *arguments: None)
    base.register_backend(free)
    monkeypatch.setattr("sdpa_router.choose.candidates", lambda: ("int8", "free"))
    try:
        for found in (table(), None):
            holds(monkeypatch, found)
            told = dict(decided(fake_call(16384, mask=True)).passed_over)
            assert [reason.code for reason in told["free"]] == [Code.NOT_MEASURED]
    finally:
        base.unregister_backend("free")


def test_the_measured_error_counts_before_the_known_one(monkeypatch, only_int8):
    holds(monkeypatch, table(lengths=(8192, 32768), errors={"int8": {"gaussian": 0.011, "outliers": 0.03}}))
    assert decided(fake_call(32768), max_error=0.03).backend == "int8"
    strict = decided(fake_call(32768), max_error=0.02)
    assert [reason.code for reason in strict.reasons] == [Code.ERROR_CLASS]
    assert "0.03" in str(strict)


def test_a_tuned_table_moves_the_crossover(monkeypatch, gpu):
    monkeypatch.setattr("sdpa_router.decide._unavailable", lambda device: None)
    monkeypatch.setattr("sdpa_router.decide.crossover", lambda device, head_dim: Crossover(1, 1, 1))
    call = fake_call(4096, mask=True)
    assert decide(call, Settings()).routed
    costs.write_table(Table(table().points, {}, costs.facts_of(torch.device("cuda"))))
    assert [reason.code for reason in decide(call, Settings()).reasons] == [Code.SHORT]


def test_fastest_in_a_whole_graph(monkeypatch):
    torch._dynamo.reset()
    sdpa_router.reset_stats()
    x = torch.randn(1, 2, 32, 16)
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend="aot_eager", fullgraph=True)
    with torch.no_grad(), route(backends="fastest"):
        torch.testing.assert_close(compiled(x), F.scaled_dot_product_attention(x, x, x))
    assert stats()["calls"] == 2
    assert {signature["phase"] for signature in stats()["signatures"]} == {"eager"}


# --- tune


def test_measured_times_are_of_who_answers_right(monkeypatch):
    def wrong(call, settings, attention):
        return torch.zeros_like(call.query)

    def broken(call, settings, attention):
        raise RuntimeError("no kernel image is available")

    def right(call, settings, attention):
        return attention(*call[:6])

    names = []
    for name, run in (("wrong", wrong), ("broken", broken), ("right", right)):
        base.register_backend(Backend(name, BackendLimits(), lambda call, settings: iter(()), run))
        names.append(name)
    monkeypatch.setattr(tune, "candidates", lambda: tuple(names))
    try:
        for mask in ("none", "key", "full"):
            shape = tune.Shape(Size(1, 2, 64, 96, 32, mask), 2, torch.float16)
            ms = tune.measure(shape, torch.device("cpu"))
            assert ms.keys() == {"torch", "right"}
            assert all(0 < value < 1000 for value in ms.values())
        monkeypatch.setattr(tune, "gaussian", lambda *sizes, **options: _small(options))
        errors = tune.measure_errors(torch.device("cpu"))
        assert errors["right"] == errors["torch"]
        assert 0 < errors["torch"]["outliers"] < 0.05
        assert errors["wrong"]["smooth"] == 1.0
        assert "broken" not in errors
    finally:
        for name in names:
            base.unregister_backend(name)


def _small(options):
    return sdpa_router.testing.gaussian(1, 2, 64, 128, 32, **options)


def test_smooth_inputs_vary_slowly():
    query, _, _ = tune.smooth(1, 2, 1000, 500, 32, dtype=torch.float32, device="cpu")
    assert query.shape == (1, 2, 1000, 32)
    assert query.is_contiguous(), "else nobody but torch takes them"
    steps = (query[:, :, 1:] - query[:, :, :-1]).std() / query.std()
    assert steps < 0.3


def record_lines(*events):
    return "\n".join(json.dumps(event) for event in events) + "\n"


def first(query, key, mask="none", dtype="bfloat16", **arguments):
    tensor = {"strides": [], "dtype": dtype, "device": "cuda:0"}
    signature = {"query": {"shape": query, **tensor}, "key": {"shape": key, **tensor}, "is_causal": False, **arguments}
    said = {"backend": "int8", "phase": "eager", "detail": "", "caller": "", "reasons": [], "notes": []}
    return {"event": "first", "signature": signature, "mask": {"kind": mask}, **said}


def test_shapes_of_a_recorded_run(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        record_lines(
            first([1, 8, 64, 32], [1, 2, 77, 32], "per_key"),
            first([1, 8, 64, 32], [1, 2, 77, 32], "per_key"),
            first([1, 8, 64, 32], [1, 8, 64, 32], dtype="float16", is_causal=True),
            first([1, 8, 64, 32], [1, 8, 64, 32], dtype="float32"),
            first([8, 64, 32], [8, 64, 32]),
            first([1, 8, 64, 32], [1, 3, 64, 32]),
            first([1, 8, None, 32], [1, 8, None, 32]),
            first([1, 1, 2**15, 32], [1, 1, 2**15, 32], "full"),
            {"event": "totals", "calls": 7},
        )
    )
    assert tune.recorded_shapes(path) == [
        tune.Shape(Size(1, 8, 64, 77, 32, "key"), 2),
        tune.Shape(Size(1, 8, 64, 64, 32, "none", True), 8, torch.float16),
    ]


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "nonsense\n", '{"event": "first"}\n', record_lines({"event": 3})])
def test_a_file_without_calls_is_refused(tmp_path, capsys, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        cli.main(["tune", "--shapes", str(path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_tune_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune", "--quick"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().out


def read_only(*arguments, **options):
    raise OSError("Read-only file system")


def test_tune_writes_a_table_that_holds_from_then_on(monkeypatch, gpu, capsys):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tune, "measure_errors", lambda device: {"int8": {"gaussian": 0.011}})
    monkeypatch.setattr(tune, "measure", lambda shape, device: {"torch": 2.0, "int8": 1.0})
    assert cli.main(["tune", "--quick"]) == 0
    found = costs.tuned_table(torch.device("cuda"))
    assert len(found.points) == len(tune.quick_grid())
    captured = capsys.readouterr()
    assert "costs-a-gpu-" in captured.out
    assert "measuring" in captured.err, "the progress bar"
    # What can't be written is shown all the same.
    with monkeypatch.context() as patch:
        patch.setattr(costs.Path, "mkdir", read_only)
        assert cli.main(["tune", "--quick"]) == 2
    captured = capsys.readouterr()
    assert "head_dim" in captured.out
    assert "can't write" in captured.err
    # What a later run measures is added to what was known.
    path = costs.folder() / "run.jsonl"
    path.write_text(record_lines(first([1, 8, 64, 32], [1, 8, 77, 32])))
    assert cli.main(["tune", "--shapes", str(path)]) == 0
    assert len(costs.tuned_table(torch.device("cuda")).points) == len(found.points) + 1


def test_calls_that_do_not_fit_are_left_out(monkeypatch, gpu):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tune, "measure_errors", lambda device: {})

    def measure(shape, device):
        if shape.size.q_len > 1000:
            raise torch.OutOfMemoryError
        return {"torch": 1.0}

    monkeypatch.setattr(tune, "measure", measure)
    shapes = [tune.Shape(Size(1, 1, length, 8, 8), 1) for length in (10, 2000)]
    assert [point.size.q_len for point in tune.tune(shapes, torch.device("cuda")).points] == [10]


def test_info_names_the_table(gpu, monkeypatch):
    from sdpa_router import info

    assert "rules decide" in info._costs(torch.device("cuda"))
    costs.write_table(
        Table(table(errors={"int8": {"gaussian": 0.011}}).points, {}, costs.facts_of(torch.device("cuda")))
    )
    text = info._costs(torch.device("cuda"))
    assert text.startswith(f"tuned, {len(table().points)} calls (")
    assert info._costs(torch.device("cpu")) is None


def test_grids_are_what_they_say():
    assert 20 <= len(tune.quick_grid()) <= 40
    assert {*tune.quick_grid()} <= {*tune.full_grid()}
    assert len({*tune.full_grid()}) == len(tune.full_grid())


def test_the_progress_bar_passes_everything_on(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(tuning._bar([1, 2, 3])) == [1, 2, 3]
