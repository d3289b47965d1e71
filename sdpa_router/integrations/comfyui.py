"""ComfyUI: an attention function with its signature, and the node "SDPA Router", which patches one model.

A patch is transformer_options["optimized_attention_override"] of a model: a function (func, *args, **kwargs) that
ComfyUI's wrap_attn() calls instead of the attention `func`. There is one per model, and the last writer wins.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..context import inside, inside_unless_routed
from ..decide import Call
from ..settings import BACKENDS, ON_UNSUPPORTED, Settings, intern

NAME = "sdpa_router"
SUPPORTED = "a ComfyUI whose comfy.ldm.modules.attention has wrap_attn and attention_pytorch (September 2025 or newer)"
OVERRIDE = "optimized_attention_override"

Attention = Callable[..., torch.Tensor]


def attention_function(
    *,
    on_unsupported: str = "fallback",
    min_kv: int | None = None,
    pv: str = "auto",
    precision: str = "auto",
    skip: Callable[[Call], bool] | None = None,
    log: bool = True,
    backends: str | Sequence[str] = BACKENDS,
    allow_mask_blind: bool = False,
    max_error: float | None = None,
    on_error: str = "raise",
    by_tile: bool = True,
) -> Attention:
    """Make an attention function with ComfyUI's signature; the settings are those of route().

    It is ComfyUI's attention_pytorch under route(): q, k, v are [B, S, H * D], or [B, H, S, D] with skip_reshape; masks
    of rank 2 get a batch and those of rank 3 a head axis; the result is [B, S, H * D], or [B, H, S, D] with
    skip_output_reshape. Calls with low_precision_attention=False stay with torch: their models break in int8. Inside
    route() or an enabled module their settings hold for the other calls.
    Raises ImportError where there is no ComfyUI, or one that can't be served.
    """
    settings = Settings(
        on_unsupported, min_kv, pv, precision, skip, log, backends, allow_mask_blind, max_error, on_error, by_tile
    )
    return _attention_function(settings)


def register(
    *,
    on_unsupported: str = "fallback",
    min_kv: int | None = None,
    pv: str = "auto",
    precision: str = "auto",
    skip: Callable[[Call], bool] | None = None,
    log: bool = True,
    backends: str | Sequence[str] = BACKENDS,
    allow_mask_blind: bool = False,
    max_error: float | None = None,
    on_error: str = "raise",
    by_tile: bool = True,
) -> None:
    """Put attention_function() among ComfyUI's attention functions as "sdpa_router", where other nodes can choose it.

    No model uses it by itself. Registering again replaces the settings.
    """
    comfy = _comfy_attention()
    settings = Settings(
        on_unsupported, min_kv, pv, precision, skip, log, backends, allow_mask_blind, max_error, on_error, by_tile
    )
    comfy.REGISTERED_ATTENTION_FUNCTIONS.pop(NAME, None)
    comfy.register_attention_function(NAME, comfy.wrap_attn(_attention_function(settings)))


def unregister() -> None:
    """Undo register()."""
    _comfy_attention().REGISTERED_ATTENTION_FUNCTIONS.pop(NAME, None)


def patch_model(
    model: Any,
    *,
    on_unsupported: str = "fallback",
    min_kv: int | None = None,
    pv: str = "auto",
    precision: str = "auto",
    skip: Callable[[Call], bool] | None = None,
    log: bool = True,
    backends: str | Sequence[str] = BACKENDS,
    allow_mask_blind: bool = False,
    max_error: float | None = None,
    on_error: str = "raise",
    by_tile: bool = True,
) -> Any:
    """Return a clone of a ComfyUI model (a ModelPatcher) whose attention is routed; `model` itself stays as it is.

    Another override that the model has is kept and called with the routed attention in the place of ComfyUI's: one
    that changes arguments works as before. One that answers by itself wins, and a warning says so, once.
    Patching again replaces the settings.  Raises TypeError for what is not a ModelPatcher.
    """
    if not callable(getattr(model, "clone", None)) or not isinstance(getattr(model, "model_options", None), dict):
        raise TypeError(f"given {type(model).__name__}; accepted: a ComfyUI model (ModelPatcher)")
    settings = Settings(
        on_unsupported, min_kv, pv, precision, skip, log, backends, allow_mask_blind, max_error, on_error, by_tile
    )
    attention = _attention_function(settings)
    patched = model.clone()
    options = dict(patched.model_options.get("transformer_options", {}))
    found = options.get(OVERRIDE)
    previous = getattr(found, "sdpa_router_previous", found)
    options[OVERRIDE] = _override(attention) if previous is None else _chained(attention, previous)
    options[OVERRIDE].sdpa_router_previous = previous
    patched.model_options["transformer_options"] = options
    return patched


def _attention_function(settings: Settings) -> Attention:
    torch_attention: Attention = _comfy_attention().attention_pytorch
    name, native = intern(settings), intern(Settings(skip=_always, log=settings.log))

    def attention_sdpa_router(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        # Without this key attention_pytorch would ask the model's override, which may be the caller, again.
        kwargs |= {"_inside_attn_wrapper": True, "mask": mask, "attn_precision": attn_precision}
        kwargs |= {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
        if kwargs.get("low_precision_attention", True) is False:
            return inside(native, torch_attention, (q, k, v, heads), kwargs)
        return inside_unless_routed(name, torch_attention, (q, k, v, heads), kwargs)

    return attention_sdpa_router


def _override(attention: Attention) -> Any:
    def sdpa_router_override(func: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(*args, **kwargs)

    return sdpa_router_override


def _chained(attention: Attention, previous: Callable[..., torch.Tensor]) -> Any:
    warned = False

    def sdpa_router_override(func: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal warned
        if warned or torch.compiler.is_compiling():
            return previous(attention, *args, **kwargs)
        called = False

        @functools.wraps(attention)
        def below(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal called
            called = True
            return attention(*args, **kwargs)

        out = previous(below, *args, **kwargs)
        if not called:
            warned = True
            warnings.warn(
                f"the attention override {_name(previous)}, which the model had before SDPA Router, answers calls by "
                "itself; those are not routed",
                stacklevel=2,
            )
        return out

    return sdpa_router_override


def _name(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


def _always(call: Call) -> bool:
    return True


def _comfy_attention() -> Any:
    try:
        module = importlib.import_module("comfy.ldm.modules.attention")
    except ImportError as error:
        raise ImportError(f"found no ComfyUI ({error}); supported: {SUPPORTED}") from error
    missing = [name for name in ("wrap_attn", "attention_pytorch") if not hasattr(module, name)]
    if missing:
        raise ImportError(f"found a ComfyUI without {' and '.join(missing)}; supported: {SUPPORTED}")
    return module


class SdpaRouterNode:
    """The node: a model in, a routed clone of it out."""

    CATEGORY = "model_patches/attention"
    DESCRIPTION = "Sends the attention of this model through int8 kernels where that is right, and to torch elsewhere."
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, tuple[Any, ...]]]:  # noqa: N802 (ComfyUI's name)
        """Say what the node takes."""
        least = {"default": 0, "min": 0, "max": 1 << 20, "tooltip": "fewest keys to route; 0: measured crossover"}
        unsupported = {"default": "fallback", "tooltip": "what to do with calls that int8 can't answer"}
        return {
            "required": {
                "model": ("MODEL",),
                "enabled": ("BOOLEAN", {"default": True}),
                "on_unsupported": (list(ON_UNSUPPORTED), unsupported),
                "min_kv": ("INT", least),
            }
        }

    def patch(self, model: Any, enabled: bool, on_unsupported: str, min_kv: int) -> tuple[Any]:
        """Return the routed clone, or `model` itself if not enabled."""
        if not enabled:
            return (model,)
        return (patch_model(model, on_unsupported=on_unsupported, min_kv=min_kv or None),)


NODE_CLASS_MAPPINGS = {"SDPARouter": SdpaRouterNode}
NODE_DISPLAY_NAME_MAPPINGS = {"SDPARouter": "SDPA Router"}

_NODE_FILE = '''\
"""The node "SDPA Router", written by `sdpa-router comfyui-node`; sdpa-router must be installed in ComfyUI's Python."""

from sdpa_router.integrations.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
'''


def write_node(folder: Path) -> Path:
    """Write the custom-node folder, such as ComfyUI/custom_nodes/sdpa_router, and return its one file.

    An earlier one is replaced. Raises ValueError if the folder holds anything else or its parent doesn't exist.
    """
    file = folder / "__init__.py"
    if not folder.absolute().parent.is_dir():
        raise ValueError(f"given {str(folder)!r}, accepted: a new folder inside one that exists")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"given {str(folder)!r}, a file; accepted: a new or empty folder")
    others = [entry.name for entry in folder.iterdir() if entry.name != "__pycache__"] if folder.is_dir() else []
    if others and not (others == [file.name] and "sdpa-router comfyui-node" in file.read_text(encoding="utf-8")):
        raise ValueError(
            f"given {str(folder)!r}, which holds {', '.join(sorted(others)[:3])}; accepted: a new or empty folder such "
            "as ComfyUI/custom_nodes/sdpa_router"
        )
    folder.mkdir(exist_ok=True)
    file.write_text(_NODE_FILE, encoding="utf-8")
    return file
