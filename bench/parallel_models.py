"""Steps of a Wan-like transformer on one GPU and sharded over all by diffusers' enable_parallelism."""

from __future__ import annotations

import copy
from typing import Any

import torch
from parallel_ranks import Bench, Way, diffusers_part, parallel_config

from sdpa_router import testing


def model_steps(bench: Bench) -> None:
    """A Wan-like transformer of a few layers through enable_parallelism: a step on one GPU and on all."""
    diffusers = diffusers_part()
    if diffusers is None:
        return
    from sdpa_router.integrations import diffusers as integration

    integration.register(min_kv=0)
    diffusers.utils.logging.set_verbosity_error()
    if not bench.cuda:
        torch.accelerator.device_count = lambda: bench.size  # type: ignore[attr-defined]
    model, inputs, tokens = wan(bench)
    wanted: list[tuple[str, tuple[int, int] | None, str]] = [
        ("native on one GPU", None, "native"),
        ("one GPU", None, "sdpa_router"),
        ("ring", (bench.size, 1), "sdpa_router"),
        ("ulysses", (1, bench.size), "sdpa_router"),
    ]
    if bench.cuda:  # torch's kernels with a log-sum-exp
        wanted.append(("diffusers ring, cuDNN", (bench.size, 1), "_native_cudnn"))
        wanted.append(("diffusers ulysses, cuDNN", (1, bench.size), "_native_cudnn"))
    made = {name: sharded_model(bench, model, degrees, backend) for name, degrees, backend in wanted}
    steps: dict[str, tuple[Way | None, bool]] = {
        name: (lambda one=one: one(**inputs)[0], "one GPU" in name) for name, one in made.items()
    }
    with torch.no_grad():
        native = made["native on one GPU"](**inputs)[0]
        errors = {
            name: bench.worst(0.0 if single and bench.rank else testing.relative_error(way(), native))
            for name, (way, single) in steps.items()
            if way is not None
        }
        times = bench.times(steps)
    for name, (ms, spread) in times.items():
        bench.write(
            case="wan-like, 40 heads x 128",
            layers=len(model.blocks),
            tokens=tokens,
            way=name,
            ms=round(ms, 2),
            spread=round(spread, 4),
            speedup=round(times["one GPU"][0] / ms, 3),
            output_error=round(errors[name], 6),
        )


def wan(bench: Bench) -> tuple[Any, dict[str, Any], int]:
    """Two layers of Wan 2.1 14B with random weights, and 65520 tokens: the model, its inputs, tokens."""
    diffusers = diffusers_part()
    tiny = bench.tiny
    dtype = torch.bfloat16 if bench.cuda else torch.float16
    frames, height, width = (2, 8, 8 * bench.size) if tiny else (42, 60, 104)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(bench.device):
        torch.manual_seed(5)
        model = diffusers.WanTransformer3DModel(
            num_attention_heads=4 if tiny else 40,
            attention_head_dim=32 if tiny else 128,
            ffn_dim=64 if tiny else 13824,
            num_layers=2,
        )
        inputs = {
            "hidden_states": torch.randn(1, 16, frames, height, width),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": torch.randn(1, 512 if not tiny else 24, 4096),
            "return_dict": False,
        }
    torch.set_default_dtype(default)
    model.eval().requires_grad_(False)
    kept = set(model._keep_in_fp32_modules or ())
    for path, parameter in model.named_parameters():
        if kept & set(path.split(".")):
            parameter.data = parameter.data.float()
    return model, inputs, frames * height * width // 4


def sharded_model(bench: Bench, model: Any, degrees: tuple[int, int] | None, backend: str) -> Any:
    """A copy that shares the weights, with a backend and, given degrees, sharded over the ranks."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    copied.set_attention_backend(backend)
    if degrees is not None:
        copied.enable_parallelism(config=parallel_config(bench, *degrees).context_parallel_config)
    return copied
