"""The command `sdpa-router`: info, explain, check, tune, report, demo, mask, comfyui-node.

Exit 0: all well, 1: a check failed, 2: bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sdpa_router import __version__, commands

if TYPE_CHECKING:
    from sdpa_router.terminal import Stdout


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        """Exit 2 with the message alone, without the usage text."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if sys.stdout is None:  # closed by the shell: nobody reads
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # of an encoding that lacks the characters of a table or a name
        sys.stdout.reconfigure(errors="replace")
    usual, warnings.formatwarning = warnings.formatwarning, _formatted
    try:
        try:
            arguments = _parser().parse_args(argv)
            return int(arguments.run(arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()  # the reader (`| head`) left: nothing to report
        return 0
    except OSError as error:
        _drop_output()
        print(f"sdpa-router: can't write: {error}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = usual


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return a warning of ours as one line like the complaints, and others with what says whose they are."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"sdpa-router: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _drop_output() -> None:
    """Let what is still to be flushed at exit go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> _Parser:
    parser = _Parser(
        prog="sdpa-router", description="Route scaled_dot_product_attention to int8 kernels, or say why not."
    )
    parser.add_argument("--version", action="version", version=f"sdpa-router {__version__}")
    subparsers = parser.add_subparsers(metavar="info|explain|check|tune|report|demo|mask|comfyui-node", required=True)

    info = subparsers.add_parser("info", help="versions, GPUs, what works here, who patched SDPA")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=commands.info)

    explain = subparsers.add_parser(
        "explain",
        help="how one call would be routed, from its shapes alone",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  sdpa-router explain --q 1,24,4096,128 --k 1,24,512,128 --dtype bf16 --mask key",
    )
    _add_explain_arguments(explain)
    explain.set_defaults(run=commands.explain, parser=explain)

    check = subparsers.add_parser("check", help="test the kernel on this GPU against float64; exit 1 if it errs")
    check.set_defaults(run=commands.check)

    tune = subparsers.add_parser("tune", help="measure all backends on this GPU, for route(backends='fastest')")
    grid = tune.add_mutually_exclusive_group()
    grid.add_argument("--quick", action="store_true", help="about 50 calls instead of 110: under a minute on an H200")
    grid.add_argument(
        "--shapes", type=_file, metavar="RUN.jsonl", help="the calls of a run that SDPA_ROUTER_JSONL recorded"
    )
    tune.set_defaults(run=commands.tune, parser=tune)

    report = subparsers.add_parser("report", help="what a recorded run called: a page, or --text")
    report.add_argument("run_file", type=_file, metavar="RUN.jsonl", help="what SDPA_ROUTER_JSONL named")
    report.add_argument("-o", "--output", type=_new_file, metavar="FILE.html", help="one page that needs no network")
    report.add_argument("--text", action="store_true", help="print it instead")
    report.set_defaults(run=commands.report, parser=report)

    demo = subparsers.add_parser("demo", help="ten attention calls of a video model through the router, measured")
    demo.add_argument("--model", action="store_true", help="a real model on real text instead (extra `demo`)")
    demo.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: the GPU if there is one")
    demo.add_argument("--json", type=_json_target, metavar="FILE", help="write all figures to FILE; -: to stdout")
    demo.add_argument(
        "--plot", type=_new_picture, metavar="FILE.png", help="draw mask, errors and times (extra `plot`)"
    )
    demo.set_defaults(run=commands.demo, parser=demo)

    mask = subparsers.add_parser("mask", help="what the 64x64 tiles of a saved mask hold, and what they cost")
    mask.add_argument("file", type=Path, metavar="FILE.pt", help="a tensor [.., Q, K] written by torch.save")
    mask.add_argument("--plot", type=_new_picture, metavar="FILE.png", help="draw the tiles (extra `plot`)")
    mask.add_argument("--heads", type=int, default=1, help="heads times batch of the attention (default: 1)")
    mask.add_argument("--head-dim", type=int, default=128, help="its head_dim (default: 128)")
    mask.add_argument("--tiles", action="store_true", help="the tensor is a bool mask of tiles already")
    mask.set_defaults(run=commands.mask, parser=mask)

    node = subparsers.add_parser("comfyui-node", help="write the ComfyUI node `SDPA Router` into a new folder")
    node.add_argument("folder", type=Path, metavar="DIR", help="such as ComfyUI/custom_nodes/sdpa_router")
    node.set_defaults(run=commands.comfyui_node, parser=node)
    return parser


def _add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    from sdpa_router import explaining

    add = parser.add_argument
    add("--q", type=explaining.shape, required=True, metavar="B,H,Q,D", help="shape of query")
    add("--k", type=explaining.shape, metavar="B,H,K,D", help="shape of key (default: as --q)")
    add("--v", type=explaining.shape, metavar="B,H,K,D", help="shape of value (default: as --k)")
    add("--dtype", type=explaining.dtype, default="bf16", help="fp16, bf16 (default), fp32 or fp64")
    add("--mask", type=explaining.mask, default="none", help=explaining.MASK_HELP)
    add("--mask-dtype", type=explaining.mask_dtype, default="bool", help="bool (default), fp16, bf16, fp32 or fp64")
    add("--causal", action="store_true", help="is_causal=True")
    add("--gqa", action="store_true", help="enable_gqa=True")
    add("--dropout", type=explaining.probability, default=0.0, metavar="P", help="dropout_p (default: 0)")
    add("--grad", action="store_true", help="query requires a gradient")
    add("--backends", default="int8,torch", metavar="NAMES", help="in order of preference, with commas; or fastest")
    add("--json", action="store_true", help="print JSON")


def _json_target(text: str) -> Path | Stdout:
    from sdpa_router.terminal import Stdout

    return Stdout() if text == "-" else _new_file(text)


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"given {text!r}, accepted: a file name in a folder that exists")
    return path


def _file(text: str) -> Path:
    if not os.path.isfile(text) or not os.access(text, os.R_OK):
        raise argparse.ArgumentTypeError(f"given {text!r}, accepted: a file that exists and can be read")
    return Path(text)


def _new_picture(text: str) -> Path:
    path = _new_file(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"given {text!r}, accepted: a name that ends in .png, .svg or .pdf")
    return path
