"""Full-width diffusers transformers with random weights, and the steps of a denoising loop with them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import torch.nn.functional as functional


@dataclass(frozen=True)
class Full:
    """A model, its noise, the name under which it takes latents, and everything else it takes."""

    name: str
    model: Any
    noise: torch.Tensor
    inputs: dict[str, torch.Tensor]
    tokens: int

    def velocity(self, latents: torch.Tensor, sigma: float) -> torch.Tensor:
        """One call of the model: what a step costs."""
        timestep = torch.full((1,), sigma * (1 if self.name == "flux" else 1000), device=latents.device)
        out = self.model(hidden_states=latents, timestep=timestep.to(latents.dtype), **self.inputs, return_dict=False)
        answer: torch.Tensor = out[0]
        return answer

    def denoise(self, steps: int) -> torch.Tensor:
        """Euler's method from the noise at sigma 1 to sigma 0."""
        latents = self.noise.float()
        for step in range(steps):
            sigma = 1 - step / steps
            latents = latents - self.velocity(latents.to(self.noise.dtype), sigma).float() / steps
        return latents


def wan(tiny: bool) -> Full:
    """Wan 2.1 1.3B: 81 frames of 480x832, 32760 tokens, 512 of text."""
    heads, dim, layers, frames, height, width, text = (
        (2, 32, 2, 2, 8, 8, 16) if tiny else (12, 128, 30, 21, 60, 104, 512)
    )
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=dim,
        text_dim=64 if tiny else 4096,
        ffn_dim=128 if tiny else 8960,
        num_layers=layers,
    )
    inputs = {"encoder_hidden_states": torch.randn(1, text, 64 if tiny else 4096)}
    return Full("wan", model, torch.randn(1, 16, frames, height, width), inputs, frames * height * width // 4)


def flux(tiny: bool) -> Full:
    """FLUX.1 dev: 1024x1024, 4096 tokens and 512 of text."""
    heads, dim, double, single, side, text = (2, 32, 1, 2, 6, 16) if tiny else (24, 128, 19, 38, 64, 512)
    width, axes = (64, (8, 12, 12)) if tiny else (4096, (16, 56, 56))
    model = diffusers.FluxTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=dim,
        num_layers=double,
        num_single_layers=single,
        joint_attention_dim=width,
        axes_dims_rope=axes,
        guidance_embeds=True,
    )
    places = torch.zeros(side, side, 3)
    places[..., 1] = torch.arange(side)[:, None]
    places[..., 2] = torch.arange(side)
    inputs = {
        "encoder_hidden_states": torch.randn(1, text, width),
        "pooled_projections": torch.randn(1, 768),
        "guidance": torch.full((1,), 3.5),
        "img_ids": places.view(-1, 3),
        "txt_ids": torch.zeros(text, 3),
    }
    return Full("flux", model, torch.randn(1, side * side, 64), inputs, side * side + text)


FULL: dict[str, Callable[[bool], Full]] = {"wan": wan, "flux": flux}


def build(name: str, device: torch.device, dtype: torch.dtype, tiny: bool, seed: int = 0) -> Full:
    """Make a model on the device, with the modules that diffusers keeps in float32 in float32."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(seed)
            full = FULL[name](tiny)
    finally:
        torch.set_default_dtype(default)
    kept = set(full.model._keep_in_fp32_modules or ())
    for path, parameter in full.model.named_parameters():
        if kept & set(path.split(".")):
            parameter.data = parameter.data.float()
    full.model.eval().requires_grad_(False)
    return full


def attention_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds that `call` spends inside F.scaled_dot_product_attention; route() must be open, if at all.

    CUDA events round each attention call: the device's time, and the host's where the device waits for it.
    """
    inner = functional.scaled_dot_product_attention
    marks: list[Any] = []

    def now() -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def timed(*args: Any, **kwargs: Any) -> torch.Tensor:
        began = now()
        out = inner(*args, **kwargs)
        marks.append((began, now()))
        return out

    totals = []
    functional.scaled_dot_product_attention = timed
    try:
        for _ in range(3):
            marks.clear()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            totals.append(sum(a.elapsed_time(b) if device.type == "cuda" else (b - a) * 1e3 for a, b in marks))
    finally:
        functional.scaled_dot_product_attention = inner
    return statistics.median(totals)


def psnr(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB; the peak is the range of `theirs`."""
    mse = (ours.double() - theirs.double()).square().mean()
    return float(10 * torch.log10((theirs.max() - theirs.min()).double() ** 2 / mse))
