"""transformers: an attention implementation named "sdpa_router", registered together with its mask.

Attention alone would not do: for a name without a mask function transformers makes no mask, and padding is attended.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..choose import choose
from ..context import inside_unless_routed
from ..decide import Call, reasons_against
from ..decision import Route
from ..settings import BACKENDS, OFF, Settings, active_name, intern, settings_of, traced_as_constant

NAME = "sdpa_router"
SUPPORTED = "5.0 or newer (tested: 5.0.0 and 5.24.0)"

_Attention = Callable[..., tuple[torch.Tensor, "torch.Tensor | None"]]


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
    """Make attn_implementation="sdpa_router" known to transformers; the settings are those of route().

    Models that use it send their attention through the router, other models stay as they are. Bidirectional padding
    stays one row for all queries, [B, 1, 1, K], which the int8 kernel takes; causal masks with padding and sliding
    windows are [B, 1, Q, K], which torch answers, as it does calls with a position bias.
    Some models do something of their own where the implementation is called "sdpa": DeepSeek V3.2 and its like mask
    what their indexer has not chosen, Gemma 4 keeps rows that a mask of None needs. Under another name their answers
    would be wrong, and they raise ValueError; enable(model) routes them.
    Inside route() or an enabled module their settings hold instead. Registering again replaces the settings.
    Raises ImportError for a transformers that can't be served.

    >>> register()
    >>> model = AutoModel.from_pretrained(path, attn_implementation="sdpa_router")
    """
    settings = Settings(
        on_unsupported, min_kv, pv, precision, skip, log, backends, allow_mask_blind, max_error, on_error, by_tile
    )
    parts = _parts()
    parts.attention_interface.register(NAME, _attention(intern(settings), parts.sdpa_attention_forward))
    parts.mask_interface.register(NAME, _mask(parts.sdpa_mask, parts.bidirectional_mask_function))


def unregister() -> None:
    """Undo register(). A model that still names "sdpa_router" raises KeyError until it gets another implementation."""
    parts = _parts()
    for interface in (parts.attention_interface, parts.mask_interface):
        interface._global_mapping.pop(NAME, None)


def attach(model: Any) -> None:
    """Switch a loaded model to "sdpa_router"; model.set_attn_implementation("sdpa") switches it back.

    set_attn_implementation("sdpa_router") does the same, but logs a warning at most where it has no effect.
    Raises TypeError for what is not a transformers model, RuntimeError before register(), and ValueError for a model
    whose attention transformers doesn't dispatch.
    """
    parts = _parts()
    if not isinstance(model, parts.pretrained_model):
        raise TypeError(f"attach() takes a transformers PreTrainedModel; given {type(model).__name__}")
    if NAME not in parts.attention_interface._global_mapping:
        raise RuntimeError(f'"{NAME}" is not registered; call sdpa_router.integrations.transformers.register() first')
    given = f"{type(model).__name__}, whose attention transformers does not dispatch"
    accepted = "models built on AttentionInterface with SDPA; for others, sdpa_router.enable(model)"
    for part in model.modules():
        _refuse_by_name(type(part).__module__)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise ValueError(f"given {given}; accepted: {accepted}") from error
    if model.config._attn_implementation != NAME or not _dispatches(model):
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
        raise ValueError(f"given {given}; accepted: {accepted}")


def _dispatches(model: torch.nn.Module) -> bool:
    """Whether some part of the model looks its attention up; transformers asks its files that, and of some nothing."""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    base = ("torch.", "builtins.", "transformers.modeling_utils.")
    own = [kind for kind in kinds if not f"{kind.__module__}.".startswith(base)]
    try:
        return any("ALL_ATTENTION_FUNCTIONS" in inspect.getsource(kind) for kind in own)
    except (OSError, TypeError):
        return True  # without the source nobody can tell


# As in `if self.config._attn_implementation in ("eager", "sdpa"):`.
_BY_NAME = re.compile(r"_attn_implementation\s*(?:==|!=|\bin\b|\bnot in\b)[^\n:]*[\"']sdpa[\"']")


def _refuse_by_name(module: str) -> None:
    """Raise ValueError if the models of `module`, or of the file beside a configuration, ask for the name "sdpa"."""
    module = module.replace(".configuration_", ".modeling_")
    if _asks_for_sdpa(module):
        raise ValueError(
            f'given a model of {module}, which compares _attn_implementation with "sdpa" and does something else under '
            f'another name, so that its answers under "{NAME}" would be wrong; accepted: models that leave all of the '
            'attention to AttentionInterface; for this one attn_implementation="sdpa" and sdpa_router.enable(model)'
        )


@traced_as_constant
def _asks_for_sdpa(module: str) -> bool:
    # Files of models have such names, also those that came with weights; a user's script may well look at the name.
    return ".modeling_" in module and module in sys.modules and _compares(module)


@functools.cache
def _compares(module: str) -> bool:
    try:
        return _BY_NAME.search(inspect.getsource(sys.modules[module])) is not None
    except (OSError, TypeError):
        return False  # without the source nobody can tell


def _attention(name: str, sdpa_attention_forward: _Attention) -> _Attention:
    def sdpa_router_attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Answer like transformers' sdpa_attention_forward: query [B, H, Q, D] in, [B, Q, H, D] out."""
        _refuse_by_name(type(module).__module__)
        grouping = getattr(module, "num_key_value_groups", 1) > 1 and query.shape[2] > 1
        plain = position_bias is None and kwargs.get("softcap") is None
        if grouping and plain and attention_mask is not None and _one_row(attention_mask):
            # Under a mask transformers repeats keys and values for each query head; the int8 kernel needs no copies.
            call = Call(query, key, value, attention_mask, dropout, False, scaling, True)
            settings = settings_of(name if active_name() == OFF else active_name())
            if _leaves_torch(call, settings):
                return inside_unless_routed(name, _grouped_attention, (call,), {})
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        arguments = (module, query, key, value, attention_mask)
        return inside_unless_routed(name, sdpa_attention_forward, arguments, kwargs)

    return sdpa_router_attention_forward


def _leaves_torch(call: Call, settings: Settings) -> bool:
    """Whether another one than torch answers `call`; False where it is not known before the call is made."""
    if settings.skip is not None:
        return False  # it is asked once for each call, about the one that is made
    if settings.only_int8:
        return not list(reasons_against(call, settings))
    return not torch.compiler.is_dynamo_compiling() and choose(call, settings).route is not Route.SDPA


def _grouped_attention(call: Call) -> tuple[torch.Tensor, None]:
    out = F.scaled_dot_product_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
    return out.transpose(1, 2).contiguous(), None


def _one_row(mask: torch.Tensor) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2] == 1


def _mask(sdpa_mask: Callable[..., Any], bidirectional: Callable[..., Any]) -> Callable[..., Any]:
    def sdpa_router_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Make the mask that transformers' sdpa_mask makes; of a bidirectional one only the first query's row."""
        _refuse_by_name(type(kwargs.get("config")).__module__)
        if not args and kwargs.get("mask_function") is bidirectional:
            # Padding hides a key from all queries alike. Older versions give the queries' places, not their number.
            if "q_length" in kwargs:
                kwargs["q_length"] = 1
            elif "cache_position" in kwargs:
                kwargs["cache_position"] = kwargs["cache_position"][:1]
        return sdpa_mask(*args, **kwargs)  # type: ignore[no-any-return]

    return sdpa_router_mask


class _Parts:
    """What is used of transformers."""

    def __init__(self) -> None:
        from transformers import AttentionInterface, PreTrainedModel
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, sdpa_mask

        self.attention_interface: Any = AttentionInterface
        self.mask_interface: Any = AttentionMaskInterface
        self.pretrained_model: Any = PreTrainedModel
        self.sdpa_attention_forward: _Attention = sdpa_attention_forward
        self.sdpa_mask: Callable[..., Any] = sdpa_mask
        self.bidirectional_mask_function: Callable[..., Any] = bidirectional_mask_function


def _parts() -> _Parts:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"found no transformers; supported: {SUPPORTED}") from error
    try:
        return _Parts()
    except ImportError as error:
        raise ImportError(f"found transformers {transformers.__version__}; supported: {SUPPORTED}") from error
