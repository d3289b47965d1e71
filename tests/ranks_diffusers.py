"""The ranks of the tests of diffusers' context parallelism: `python ranks_diffusers.py BACKEND FOLDER SIZE...`."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time

import torch
from torch.distributed.device_mesh import init_device_mesh

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import diffusers
import worlds
from diffusers.models.attention_dispatch import dispatch_attention_fn

import sdpa_router
from sdpa_router.integrations import diffusers as integration
from sdpa_router.testing import gaussian, lse_error, relative_error, sdpa_oracle

TIMEOUT = 100  # seconds until a group gives a rank up
WIDTH = 128 if torch.cuda.is_available() else 32  # on a GPU the kernel that models get


def parallel(ring: int, ulysses: int, device: torch.device, **settings):
    mesh = init_device_mesh(device.type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    return diffusers.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh, **settings)


def models(rank: int, size: int, device: torch.device, found: dict) -> None:
    """A small Wan through enable_parallelism, by backend and by enable(), against one native process."""
    torch.manual_seed(0)
    wan = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=WIDTH, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=1
    )
    wan = wan.half().to(device).eval().requires_grad_(False)
    inputs = {
        "hidden_states": torch.randn(1, 16, 2, 8, 8 * size, dtype=torch.float16).to(device),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": torch.randn(1, 24, 32, dtype=torch.float16).to(device),
        "return_dict": False,
    }
    native = wan(**inputs)[0]

    def step(name: str, model) -> None:
        sdpa_router.reset_stats()
        out = model(**inputs)[0]
        counts = {**sdpa_router.stats()["routes"], **sdpa_router.stats()["reasons"]}
        found[f"model: {name}"] = {"error": relative_error(out, native), **counts}

    ways = {"ring": (size, 1), "ulysses": (1, size)} if size == 2 else {"both": (2, 2)}
    for name, degrees in ways.items():
        model = copy.deepcopy(wan)
        model.set_attention_backend("sdpa_router")
        model.enable_parallelism(config=parallel(*degrees, device))
        step(name, model)
    for name, degrees in ways.items():
        # What a program has that names no backend; in either order.
        model = copy.deepcopy(wan)
        model.set_attention_backend("native")
        if name == "ring":
            sdpa_router.enable(model, min_kv=0)
        model.enable_parallelism(config=parallel(*degrees, device))
        sdpa_router.enable(model, min_kv=0)
        step(f"{name}, enabled", model)
    if size > 2:
        return
    model.set_attention_backend("_native_cudnn")  # which calls no SDPA there
    step("cudnn, enabled", model)
    model.set_attention_backend("native")
    sdpa_router.enable(model, min_kv=0, exclude="blocks.0")
    step("excluded", model)
    sdpa_router.disable(model)
    step("disabled", model)
    model = copy.deepcopy(wan)
    model.set_attention_backend("native")
    model.enable_parallelism(config=parallel(size, 1, device))
    sdpa_router.enable(model, min_kv=0, exclude="blocks.0")
    step("excluded ring", model)
    sdpa_router.disable(model)
    found["native ring"] = text_of(model, **inputs)


def calls(rank: int, size: int, device: torch.device, found: dict) -> None:
    """Masks, the LSE, refusals, gradients: calls as a model makes them."""
    q, k, v = (x.to(device) for x in gaussian(1, 4, 8 * size, 20 * size, WIDTH))
    q_cut, k_cut = slice(rank * 8, rank * 8 + 8), slice(rank * 20, rank * 20 + 20)
    mine = [q[:, :, q_cut], k[:, :, k_cut], v[:, :, k_cut]]
    mine = [x.transpose(1, 2).contiguous() for x in mine]
    generator = torch.Generator().manual_seed(1)
    masks = {
        "none": None,
        "bool": torch.rand(1, 1, 1, k.shape[2], generator=generator) > 0.4,
        "by head": torch.randn(1, 4, 1, k.shape[2], generator=generator).half(),
        "two axes": torch.rand(1, k.shape[2], generator=generator) > 0.4,
    }
    configs = {}
    for way, degrees in {"ring": (size, 1), "ulysses": (1, size)}.items():
        parallel_config = parallel(*degrees, device)
        configs[way] = diffusers.ParallelConfig(context_parallel_config=parallel_config)
        configs[way].setup(rank, size, device, mesh=parallel_config.mesh)

    def attend(way, mask=None, tensors=mine, **settings):
        return dispatch_attention_fn(
            *tensors, attn_mask=mask, backend="sdpa_router", parallel_config=configs[way], **settings
        )

    for way in configs:
        for name, mask in masks.items():
            mask = mask if mask is None else mask.to(device)
            whole = mask if mask is None or mask.dim() == 4 else mask[:, None, None]
            ref, ref_lse = (x[:, :, q_cut] for x in sdpa_oracle(q, k, v, whole))
            sharded = mask if mask is None or name == "bool" else mask[..., k_cut]
            out, lse = attend(way, sharded, attention_kwargs={"return_lse": True})
            found[f"calls: {way}, {name}"] = {
                "error": relative_error(out.transpose(1, 2), ref),
                "lse": lse_error(lse.transpose(1, 2), ref_lse),
                "dtype": str(lse.dtype),
                "shape": [*out.shape] == [1, 8, 4, WIDTH] and [*lse.shape] == [1, 8, 4],
            }
        last = rank == size - 1
        odd = mine[0].bfloat16() if last else mine[0]
        for name, given, settings in (
            ("mask on one", (sharded if last else None), {}),
            ("short on one", (sharded[..., :7] if last else sharded), {}),
            ("full on one", (sharded.expand(1, 4, 8, 20).contiguous() if last else sharded), {}),
            ("length on one", None, {"tensors": [x[:, : 12 if last else 8] for x in mine]}),
            ("dtype on one", None, {"tensors": [odd, *(x.to(odd.dtype) for x in mine[1:])]}),
            ("causal on one", None, {"is_causal": last}),
        ):
            began = time.monotonic()
            text = text_of(attend, way, given, **settings)
            found[f"refused: {way}, {name}"] = {"text": text, "seconds": time.monotonic() - began}
        full = torch.zeros(1, 1, 8, 20, device=device)
        short = torch.zeros(1, 1, 1, 7, device=device)
        for name, mask in {"full": full, "short": short}.items():
            found[f"refused: {way}, {name}"] = text_of(attend, way, mask)
        found[f"refused: {way}, causal"] = text_of(attend, way, is_causal=True)
        tensors = [x[:, :8].clone().requires_grad_() for x in mine]  # diffusers' backward wants equal lengths
        found[f"refused: {way}, gradient"] = text_of(attend, way, tensors=tensors)
    attend("ulysses", tensors=tensors).float().sum().backward()
    found["gradient"] = bool(tensors[0].grad.abs().sum() > 0)
    found["refused: ring, dropout"] = text_of(attend, "ring", masks["bool"].to(device), dropout_p=0.5)


def text_of(function, *given, **settings) -> str:
    try:
        function(*given, **settings)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def both(rank: int, size: int, device: torch.device, found: dict) -> None:
    """A mask under a ring of Ulysses groups."""
    q, k, v = (x.to(device) for x in gaussian(1, 8, 2, 2, WIDTH))
    config = diffusers.ParallelConfig(context_parallel_config=parallel(2, 2, device))
    config.setup(rank, size, device, mesh=config.context_parallel_config.mesh)
    mask = torch.zeros(1, 1, 1, 8, device=device) if rank == 1 else None
    found["refused: both"] = text_of(
        dispatch_attention_fn, q, k, v, attn_mask=mask, backend="sdpa_router", parallel_config=config
    )


def run(world: worlds.World) -> None:
    """Run the checks on this rank."""
    rank, size, _, _ = world
    diffusers.utils.logging.set_verbosity_error()
    if not hasattr(logging.Logger, "warning_once"):  # diffusers calls it; transformers, where installed, adds it
        logging.Logger.warning_once = logging.Logger.warning
    if world.backend == "gloo":
        torch.accelerator.device_count = lambda: size  # diffusers counts accelerators, and a CPU is none
    integration.register(min_kv=0)
    found: dict[str, object] = {}
    for check in (models, calls) if size == 2 else (models, both):
        start = time.monotonic()
        with torch.no_grad() if check is models else contextlib.nullcontext():
            check(rank, size, world.device, found)
        world.write(found, f"{check.__name__} took {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    worlds.main(run, TIMEOUT)
