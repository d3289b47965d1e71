"""Route scaled dot-product attention to an int8 Triton kernel where that is right, to torch elsewhere, and say why."""

from .api import explain, int8_attention, is_available, scaled_dot_product_attention
from .audit import Audit, audit
from .backends.base import Backend, BackendLimits, register_backend, unregister_backend
from .context import disable, enable, route
from .decide import Call
from .decision import Code, Decision, MaskInfo, MaskKind, Reason, Route, UnsupportedError
from .linear_qk import QuantizedSide, int8_linear_qk, join_qk
from .mask import classify_mask
from .merge import merge_attention
from .qk import QuantizedQK
from .quantized import quantize_qk
from .record import record, reset_stats, stats
from .rope_qk import rms_rope_quantize
from .settings import Settings

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Backend",
    "BackendLimits",
    "Call",
    "Code",
    "Decision",
    "MaskInfo",
    "MaskKind",
    "QuantizedQK",
    "QuantizedSide",
    "Reason",
    "Route",
    "Settings",
    "UnsupportedError",
    "audit",
    "classify_mask",
    "disable",
    "enable",
    "explain",
    "int8_attention",
    "int8_linear_qk",
    "is_available",
    "join_qk",
    "merge_attention",
    "quantize_qk",
    "record",
    "register_backend",
    "reset_stats",
    "rms_rope_quantize",
    "route",
    "scaled_dot_product_attention",
    "stats",
    "unregister_backend",
]
