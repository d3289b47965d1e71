"""diffusers pipelines of small random configurations: the real forward code of each model, its masks and its VAE.

Widths, depths and sizes are cut down until Triton's interpreter answers in seconds; head counts and dims too, except
where a model's own head_dim matters (Sana's 112 in cross-attention, PixArt's 72). Prompts are random embeddings with
padding, as text encoders would return them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

diffusers: Any = importlib.import_module("diffusers")  # without types

_TEXT = 24  # tokens of a prompt, of which the last _PADDED are padding
_PADDED = 9


@dataclass(frozen=True)
class Small:
    """A pipeline, the name of the model in it that attends, and the arguments of a call."""

    pipe: Any
    part: str
    call: dict[str, Any]

    @property
    def model(self) -> Any:
        return getattr(self.pipe, self.part)


Build = Callable[[torch.dtype], Small]


def _embeds(width: int, dtype: torch.dtype, tokens: int = _TEXT) -> torch.Tensor:
    return torch.randn(1, tokens, width, dtype=dtype)


def _mask() -> torch.Tensor:
    mask = torch.ones(1, _TEXT, dtype=torch.int64)
    mask[:, -_PADDED:] = 0
    return mask


def _flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


def _image_vae(channels: int, **config: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        norm_num_groups=8,
        **config,
    )


def wan(dtype: torch.dtype) -> Small:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2
    )
    vae = diffusers.AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    pipe = diffusers.WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=_flow(), transformer=model)
    call = {"height": 64, "width": 64, "num_frames": 5, "guidance_scale": 1.0, "prompt_embeds": _embeds(32, dtype)}
    return Small(pipe, "transformer", call)


def flux(dtype: torch.dtype) -> Small:
    model = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
    )
    pipe = diffusers.FluxPipeline(
        scheduler=_flow(),
        vae=_image_vae(4, shift_factor=0.0),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=model,
    )
    prompt = {"prompt_embeds": _embeds(32, dtype), "pooled_prompt_embeds": torch.randn(1, 32, dtype=dtype)}
    return Small(pipe, "transformer", {"height": 32, "width": 32, **prompt})


def sd3(dtype: torch.dtype) -> Small:
    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        pos_embed_max_size=64,
    )
    nothing = dict.fromkeys([f"{kind}{n}" for kind in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")])
    vae = _image_vae(4, shift_factor=0.0)
    pipe = diffusers.StableDiffusion3Pipeline(transformer=model, scheduler=_flow(), vae=vae, **nothing)
    prompt = {"prompt_embeds": _embeds(32, dtype), "pooled_prompt_embeds": torch.randn(1, 32, dtype=dtype)}
    return Small(pipe, "transformer", {"height": 32, "width": 32, "guidance_scale": 1.0, **prompt})


def hunyuan_video(dtype: torch.dtype) -> Small:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=32,
        pooled_projection_dim=32,
        rope_axes_dim=(8, 12, 12),
    )
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    pipe = diffusers.HunyuanVideoPipeline(
        text_encoder=None,
        tokenizer=None,
        transformer=model,
        vae=vae,
        scheduler=_flow(),
        text_encoder_2=None,
        tokenizer_2=None,
    )
    prompt = {"prompt_embeds": _embeds(32, dtype), "prompt_attention_mask": _mask()}
    pooled = {"pooled_prompt_embeds": torch.randn(1, 32, dtype=dtype)}
    return Small(pipe, "transformer", {"height": 64, "width": 64, "num_frames": 5, **prompt, **pooled})


def qwen_image(dtype: torch.dtype) -> Small:
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(8, 12, 12),
    )
    latents = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = diffusers.AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **latents)
    pipe = diffusers.QwenImagePipeline(scheduler=_flow(), vae=vae, text_encoder=None, tokenizer=None, transformer=model)
    # The image follows the padded text: the joint mask has a gap in the middle.
    prompt = {"prompt_embeds": _embeds(32, dtype), "prompt_embeds_mask": _mask()}
    return Small(pipe, "transformer", {"height": 64, "width": 64, "true_cfg_scale": 1.0, **prompt})


def ltx(dtype: torch.dtype) -> Small:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=32,
        cross_attention_dim=64,
        num_layers=2,
        caption_channels=32,
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    pipe = diffusers.LTXPipeline(scheduler=_flow(), vae=vae, text_encoder=None, tokenizer=None, transformer=model)
    prompt = {"prompt_embeds": _embeds(32, dtype), "prompt_attention_mask": _mask()}
    return Small(pipe, "transformer", {"height": 128, "width": 128, "num_frames": 17, "guidance_scale": 1.0, **prompt})


def sana(dtype: torch.dtype) -> Small:
    model = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=28,
        num_layers=2,
        num_cross_attention_heads=1,
        cross_attention_head_dim=112,
        cross_attention_dim=112,
        caption_channels=32,
        sample_size=8,
    )
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
    )
    pipe = diffusers.SanaPipeline(tokenizer=None, text_encoder=None, vae=vae, transformer=model, scheduler=_flow())
    prompt = {"prompt_embeds": _embeds(32, dtype), "prompt_attention_mask": _mask(), "negative_prompt": None}
    size = {"height": 32, "width": 32, "use_resolution_binning": False}
    return Small(pipe, "transformer", {**size, "guidance_scale": 1.0, **prompt})


def pixart(dtype: torch.dtype) -> Small:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=72,
        num_layers=2,
        cross_attention_dim=144,
        sample_size=16,
        caption_channels=32,
        use_additional_conditions=False,
    )
    pipe = diffusers.PixArtSigmaPipeline(
        tokenizer=None, text_encoder=None, vae=_image_vae(4), transformer=model, scheduler=diffusers.DDIMScheduler()
    )
    prompt = {"prompt_embeds": _embeds(32, dtype), "prompt_attention_mask": _mask(), "negative_prompt": None}
    size = {"height": 32, "width": 32, "use_resolution_binning": False}
    return Small(pipe, "transformer", {**size, "guidance_scale": 1.0, **prompt})


def sdxl(dtype: torch.dtype) -> Small:
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=32,
        norm_num_groups=8,
    )
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=_image_vae(4, force_upcast=False),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        unet=model,
        scheduler=diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
    )
    prompt = {"prompt_embeds": _embeds(32, dtype), "pooled_prompt_embeds": torch.randn(1, 32, dtype=dtype)}
    return Small(pipe, "unet", {"height": 32, "width": 32, "guidance_scale": 1.0, **prompt})


BUILDS: dict[str, Build] = {
    "Wan": wan,
    "Flux": flux,
    "SD3": sd3,
    "HunyuanVideo": hunyuan_video,
    "Qwen-Image": qwen_image,
    "LTX": ltx,
    "Sana": sana,
    "PixArt": pixart,
    "SDXL U-Net": sdxl,
}


def build(
    name: str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float16, larger: int = 1, seed: int = 0
) -> Small:
    """Make a pipeline with random weights, for images that are `larger` times; equal arguments give equal ones."""
    torch.manual_seed(seed)
    small = BUILDS[name](dtype)
    small.call.update({side: small.call[side] * larger for side in ("height", "width")})
    small.pipe.to(device, dtype)
    small.pipe.set_progress_bar_config(disable=True)
    fixed = {"num_inference_steps": 1, "output_type": "pt"}
    call = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in small.call.items()}
    return Small(small.pipe, small.part, {**call, **fixed})


def images(small: Small, seed: int = 0) -> torch.Tensor:
    """Run the pipeline and return its images or video."""
    generator = torch.Generator(small.model.device).manual_seed(seed)
    made: torch.Tensor = small.pipe(**small.call, generator=generator)[0]
    return made


class _Stopped(Exception):  # noqa: N818 (nothing is wrong)
    """Ends a pipeline before its model's first forward."""


def first_inputs(small: Small) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run the pipeline up to its model's first forward and return the arguments of that."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop(_: Any, *given: Any) -> None:
        seen.append(given)  # type: ignore[arg-type]
        raise _Stopped

    hook = small.model.register_forward_pre_hook(stop, with_kwargs=True)
    with contextlib.suppress(_Stopped):
        images(small)
    hook.remove()
    return seen[0]
