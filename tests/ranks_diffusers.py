"""One rank of the tests of diffusers' context parallelism: `python ranks_diffusers.py RANK SIZE BACKEND FILE`."""

from __future__ import annotations

import copy
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import diffusers
from diffusers.models.attention_dispatch import dispatch_attention_fn

import sdpa_router
from sdpa_router.integrations import diffusers as integration
from sdpa_router.testing import gaussian, lse_error, relative_error, sdpa_oracle

WIDTH = 128 if torch.cuda.is_available() else 32  # on a GPU the kernel that models get


def parallel(ring: int, ulysses: int, device: torch.device, **settings):
    mesh = init_device_mesh(device.type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    return diffusers.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh, **settings)


def models(rank: int, size: int, device: torch.device, found: dict) -> None:
    """A small Wan through enable_parallelism, by backend and by enable(), against one native process."""
    torch.manual_seed(0)
    wan = diffusers.WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=WIDTH, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2
    )
    wan = wan.half().to(device).eval().requires_grad_(False)
    inputs = {
        "hidden_states": torch.randn(1, 16, 2, 8, 8 * size, dtype=torch.float16).to(device),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": torch.randn(1, 24, 32, dtype=torch.float16).to(device),
        "return_dict": False,
    }
    native = wan(**inputs)[0]
    ways = {"ring": (size, 1), "ulysses": (1, size)}
    if size == 4:
        ways = {"both": (2, 2)}
    for name, degrees in ways.items():
        model = copy.deepcopy(wan)
        model.set_attention_backend("sdpa_router")
        model.enable_parallelism(config=parallel(*degrees, device))
        sdpa_router.reset_stats()
        out = model(**inputs)[0]
        found[f"model: {name}"] = {"error": relative_error(out, native), **sdpa_router.stats()["routes"]}
    model = copy.deepcopy(wan)
    model.set_attention_backend("native")
    model.enable_parallelism(config=parallel(1, size, device))
    sdpa_router.enable(model, min_kv=0)
    sdpa_router.reset_stats()
    out = model(**inputs)[0]
    found["model: enable"] = {"error": relative_error(out, native), **sdpa_router.stats()["routes"]}
    sdpa_router.disable(model)


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
        full = torch.zeros(1, 1, 8, 20, device=device)
        short = torch.zeros(1, 1, 1, 7, device=device)
        for name, mask in {"full": full, "short": short}.items():
            found[f"refused: {way}, {name}"] = text_of(attend, way, mask)
        found[f"refused: {way}, causal"] = text_of(attend, way, is_causal=True)
        tensors = [x[:, :8].clone().requires_grad_() for x in mine]  # diffusers' backward wants equal lengths
        found[f"refused: {way}, gradient"] = text_of(attend, way, tensors=tensors)
    attend("ulysses", tensors=tensors).float().sum().backward()
    found["gradient"] = bool(tensors[0].grad.abs().sum() > 0)
    if size == 4:
        return
    found["refused: ring, dropout"] = text_of(attend, "ring", masks["bool"].to(device), dropout_p=0.5)


def text_of(function, *given, **settings) -> str:
    try:
        function(*given, **settings)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def main() -> None:
    rank, size, backend, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    else:
        torch.accelerator.device_count = lambda: size  # diffusers counts accelerators, and a CPU is none
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=100)
    )
    integration.register(min_kv=0)
    found: dict[str, object] = {}
    with torch.no_grad():
        models(rank, size, device, found)
    if size == 2:
        calls(rank, size, device, found)
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
