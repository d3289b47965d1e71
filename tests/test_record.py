"""What was decided is counted, logged once, written down and shown."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

import sdpa_router
from sdpa_router import UnsupportedError, record, reset_stats, route, stats
from sdpa_router.settings import Settings

X = torch.randn(1, 2, 8, 16)
HALF = X.half()


@pytest.fixture(autouse=True)
def _fresh():
    reset_stats()


def attend(x=X, *arguments):
    return F.scaled_dot_product_attention(x, x, x, *arguments)


def test_stats_count_calls_routes_and_reasons():
    assert stats() == {"calls": 0, "routes": {"int8": 0, "sdpa": 0}, "reasons": {}, "signatures": []}
    with route():
        attend()
        attend()
        attend(X[:, :, :4], torch.zeros(4, 4))
    found = stats()
    assert found["calls"] == 3
    assert found["routes"] == {"int8": 0, "sdpa": 3}
    assert found["reasons"]["dtype"] == 3
    assert found["reasons"]["full_mask"] == 1
    assert [signature["count"] for signature in found["signatures"]] == [2, 1]
    assert stats() == found, "reading counts nothing"
    reset_stats()
    assert stats()["calls"] == 0


def test_a_record_holds_everything_as_json():
    mask = torch.zeros(1, 1, 1, 8).expand(1, 2, 8, 8)
    with record() as seen, route():
        F.scaled_dot_product_attention(X.transpose(1, 2).contiguous().transpose(1, 2), X, X, mask, is_causal=False)
    (found,) = seen.records
    assert json.loads(json.dumps(found)) == found
    assert found["phase"] == "eager"
    assert found["backend"] == "sdpa"
    assert "dtype" in found["reasons"]
    assert "float32" in found["detail"]
    assert found["signature"]["query"] == {
        "shape": [1, 2, 8, 16],
        "strides": [256, 16, 32, 1],
        "dtype": "float32",
        "device": "cpu",
    }
    assert found["signature"]["is_causal"] is False
    assert found["mask"] == {
        "kind": "per_key",
        "shape": [1, 2, 8, 8],
        "strides": [8, 0, 0, 1],
        "dtype": "float32",
        "device": "cpu",
    }
    assert "test_record.py" in found["caller"]
    assert "test_a_record_holds_everything" in found["caller"]
    assert found["count"] == 1
    assert found["pid"] > 0
    assert found["time"] > 0


def test_a_recording_sees_only_its_own_time():
    with route():
        attend()
        with record() as seen:
            attend()
            attend()
            assert [found["count"] for found in seen.records] == [2]
        attend()
    assert [found["count"] for found in seen.records] == [2]
    with record() as nothing:
        pass
    assert nothing.records == []


def test_the_table_names_route_reasons_and_caller():
    with record() as seen, route():
        attend()
        attend(X, torch.zeros(8, 8))
    table = seen.table()
    assert "sdpa" in table
    assert "full_mask" in table
    assert "[1, 2, 8, 16]" in table
    assert "float32" in table


def test_unusual_tensors_are_recorded_too():
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(4, 2, 8)], layout=torch.jagged).transpose(
        1, 2
    )
    with record() as seen, route():
        attend(nested)
        attend(nested)
    (found,) = seen.records
    assert found["count"] == 2
    assert found["reasons"] == ["tensor_subclass"]
    assert found["signature"]["query"] == {"type": "NestedTensor"}
    assert "NestedTensor" in seen.table()


@pytest.mark.filterwarnings("ignore:sdpa because")
def test_signatures_are_told_apart_by_all_that_decides():
    grad = X.clone().requires_grad_()
    with route():
        attend()
        attend(X.double())
        attend(X.transpose(2, 3))
        attend(X[..., :8])
        attend(X, None, 0.1)
        attend(X, None, 0.0, True)
        attend(X, torch.zeros(8, 8))
        attend(X, torch.zeros(8, 8, dtype=torch.bool))
        attend(grad)
        with torch.no_grad():
            attend(grad)
        with torch.autocast("cpu", torch.bfloat16):
            attend()
        F.scaled_dot_product_attention(X, X, X, enable_gqa=True)
    with route(min_kv=9):
        attend()
    found = stats()["signatures"]
    assert sum(signature["count"] for signature in found) == 13
    assert len(found) == 12, "without grad mode requires_grad is nothing"


def test_counts_are_exact_over_threads():
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        with route(log=False):
            for _ in range(200):
                attend()

    threads = [threading.Thread(daemon=True, target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        stats()
    for thread in threads:
        thread.join()
    assert stats()["calls"] == 1600
    assert len(stats()["signatures"]) == 1


def test_many_signatures_are_folded_into_the_totals(monkeypatch):
    monkeypatch.setattr(sys.modules["sdpa_router.record"], "MAX_SIGHTINGS", 4)
    with route(log=False):
        for length in range(1, 12):
            attend(X[:, :, :1].expand(1, 2, length, 16))
    assert stats()["calls"] == 11
    assert stats()["reasons"]["dtype"] == 11
    assert len(stats()["signatures"]) <= 4


def test_a_failing_call_is_counted_and_its_error_is_torchs():
    with route(), pytest.raises(RuntimeError, match="dropout"):
        attend(X, None, 2.0)
    assert stats()["reasons"]["dropout"] == 1


def test_one_log_line_at_the_first_sight(caplog):
    with caplog.at_level(logging.INFO, logger="sdpa_router.dispatch"), route():
        attend()
        attend()
        attend(X[:, :, :4])
    lines = [line.getMessage() for line in caplog.records if line.name == "sdpa_router.dispatch"]
    assert len(lines) == 2
    assert "sdpa because" in lines[0]
    assert "test_record.py" in lines[0]


def test_log_false_is_silent(caplog):
    with caplog.at_level(logging.DEBUG), route(log=False):
        attend()
    assert caplog.records == []
    assert stats()["calls"] == 1


def test_warn_once_a_signature_at_the_users_line():
    with route(on_unsupported="warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend()
        attend()
        attend(X[:, :, :4])
    assert len(caught) == 2
    assert str(caught[0].message).startswith("sdpa because ")
    assert caught[0].filename == __file__


def test_raise_names_every_reason_each_time_and_counts():
    with route(on_unsupported="raise"):
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"dtype: .*full_mask: ") as caught:
                attend(X, torch.zeros(8, 8))
            assert "full_mask" in [reason.code for reason in caught.value.decision.reasons]
    assert stats()["calls"] == 2


def test_skip_is_asked_once_a_call():
    asked = []

    def skip(call):
        asked.append(call)
        return len(asked) % 2 == 0

    with route(skip=skip):
        for _ in range(4):
            attend()
    assert len(asked) == 4
    assert stats()["reasons"]["skipped"] == 2
    assert sorted(signature["count"] for signature in stats()["signatures"]) == [2, 2]


def test_an_error_in_skip_is_the_users():
    def skip(call):
        return call.nothing

    with route(skip=skip), pytest.raises(AttributeError):
        attend()


def test_equal_settings_share_their_counts():
    for _ in range(3):
        with route(min_kv=5):
            attend()
    assert [signature["count"] for signature in stats()["signatures"]] == [3]
    assert hash(Settings(min_kv=5)) == hash(Settings(min_kv=5))


SCRIPT = """
import torch, torch.nn.functional as F, sdpa_router
x = torch.randn(1, 2, 8, 16)
with sdpa_router.route():
    for _ in range(3):
        F.scaled_dot_product_attention(x, x, x)
"""


def run_script(path):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"SDPA_ROUTER_JSONL": str(path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )


def test_json_lines_at_the_first_sight_and_totals_at_exit(tmp_path):
    path = tmp_path / "calls.jsonl"
    run_script(path)
    first, totals = (json.loads(line) for line in path.read_text().splitlines())
    assert first["event"] == "first"
    assert "dtype" in first["reasons"]
    assert first["mask"] == {"kind": "none"}
    assert totals["event"] == "totals"
    assert totals["calls"] == 3
    assert totals["routes"] == {"int8": 0, "sdpa": 3}


def test_a_program_that_changes_its_folder_has_one_file(tmp_path):
    (tmp_path / "inner").mkdir()
    script = SCRIPT.replace("with sdpa", "import os; os.chdir('inner')\nwith sdpa")
    environment = {"SDPA_ROUTER_JSONL": "calls.jsonl", "PATH": ""}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, check=True, timeout=120)
    assert [json.loads(line)["event"] for line in (tmp_path / "calls.jsonl").open()] == ["first", "totals"]
    assert not list((tmp_path / "inner").iterdir())


def test_a_file_that_can_not_be_written_warns_once_and_disturbs_nothing(tmp_path):
    done = run_script(tmp_path / "no" / "folder")
    assert done.stderr.count("can't be written") == 1


def test_an_int8_call_is_counted_as_such(device):
    half = HALF.to(device)
    with route(min_kv=1):
        attend(half)
    assert stats()["routes"] == {"int8": 1, "sdpa": 0}
    assert stats()["signatures"][0]["detail"] == "int8 (mask: none)"


def test_direct_calls_count_and_int8_attention_does_not(device):
    sdpa_router.scaled_dot_product_attention(X, X, X)
    sdpa_router.int8_attention(*[HALF.to(device)] * 3)
    assert stats()["calls"] == 1


INVALID = {
    "number as a mask": {"attn_mask": 1.0},
    "text as a mask": {"attn_mask": "all"},
    "number of many digits": {"dropout_p": 10**5000},
    "nan": {"dropout_p": float("nan")},
    "infinite scale": {"scale": float("inf")},
}


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_call_gets_torchs_answer_and_leaves_the_reports_intact(name, monkeypatch, tmp_path):
    def outcome():
        try:
            return F.scaled_dot_product_attention(X, X, X, **INVALID[name])
        except Exception as error:
            return type(error), str(error)

    expected = outcome()
    monkeypatch.setenv("SDPA_ROUTER_JSONL", str(tmp_path / "calls.jsonl"))
    with record() as seen, route():
        found = outcome()
        attend()
    if torch.is_tensor(expected):
        torch.testing.assert_close(found, expected, equal_nan=True)
    else:
        assert found == expected
    assert stats()["calls"] == 2
    assert len(seen.records) == 2
    assert "sdpa" in seen.table()
    assert [strict(json.dumps(line)) for line in seen.records] == seen.records
    lines = [strict(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [line["backend"] for line in lines] == ["sdpa", "sdpa"]


def test_no_trouble_with_reports_reaches_the_call(monkeypatch, tmp_path):
    def broken(line):
        raise RuntimeError

    expected = attend()
    monkeypatch.setenv("SDPA_ROUTER_JSONL", str(tmp_path))
    monkeypatch.setattr(sys.modules["sdpa_router.record"], "_json_broken", False)
    logger = logging.getLogger("sdpa_router.dispatch")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.addFilter(broken)
    try:
        with route(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(attend(), expected)
    finally:
        logger.removeFilter(broken)


def test_the_warning_about_a_file_points_at_the_users_line(monkeypatch, tmp_path):
    monkeypatch.setenv("SDPA_ROUTER_JSONL", str(tmp_path))
    monkeypatch.setattr(sys.modules["sdpa_router.record"], "_json_broken", False)
    with route(), pytest.warns(UserWarning, match="can't be written") as caught:
        attend()
    assert caught[0].filename == __file__


def test_the_table_is_plain_text(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with record() as seen, route():
        attend()
        exec(compile("F.scaled_dot_product_attention(X, X, X, None, 0.0, True)", "/a[bold]b[/bold].py", "exec"))
    table = seen.table()
    assert "\x1b" not in table
    assert "/a[bold]b[/bold].py" in table


def test_a_reset_inside_a_recording_loses_and_mixes_nothing():
    with route():
        attend()
        with record() as seen:
            attend()
            attend(X[:, :, :4])
            reset_stats()
            attend()
            attend()
            assert [found["count"] for found in seen.records] == [3, 1]
    assert stats()["calls"] == 2
    reset_stats()
    assert [found["count"] for found in seen.records] == [3, 1]


def test_a_recording_outlives_the_folding_of_many_signatures(monkeypatch):
    monkeypatch.setattr(sys.modules["sdpa_router.record"], "MAX_SIGHTINGS", 4)
    with record() as seen, route(log=False):
        for length in range(1, 12):
            attend(X[:, :, :1].expand(1, 2, length, 16))
    assert [found["count"] for found in seen.records] == [1] * 11


def test_a_recording_that_was_never_entered_has_no_records():
    with route():
        attend()
    assert record().records == []


def test_skip_may_call_attention_itself():
    asked = []

    def skip(call):
        asked.append(call)
        attend()
        return True

    with route(skip=skip):
        attend()
        attend()
        sdpa_router.explain(X, X, X)
    assert len(asked) == 3
    assert stats()["reasons"]["skipped"] == 2
    assert stats()["calls"] == 2


def test_a_skip_that_raises_leaves_routing_on():
    def skip(call):
        raise KeyError

    with route(skip=skip):
        for _ in range(2):
            with pytest.raises(KeyError):
                attend()
