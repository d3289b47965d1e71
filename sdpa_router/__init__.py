"""Route scaled dot-product attention to an int8 Triton kernel where that is right, to torch elsewhere, and say why."""

from .api import explain, int8_attention, is_available, scaled_dot_product_attention
from .audit import Audit, audit
from .backends.base import Backend, BackendLimits, register_backend, unregister_backend
from .banded import KeyRange, Window, banded_attention, video_windows
from .block_sparse import block_sparse_attention, sparse_sm89_attention
from .context import route
from .decide import Call
from .decision import Code, Decision, MaskInfo, MaskKind, Reason, Route, UnsupportedError
from .dense_mask import dense_mask_attention
from .enable import disable, enable
from .linear_qk import QuantizedSide, int8_linear_qk, join_qk
from .mask import classify_mask
from .mask_picture import plot_mask
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
    "KeyRange",
    "MaskInfo",
    "MaskKind",
    "QuantizedQK",
    "QuantizedSide",
    "Reason",
    "Route",
    "Settings",
    "UnsupportedError",
    "Window",
    "audit",
    "banded_attention",
    "block_sparse_attention",
    "classify_mask",
    "dense_mask_attention",
    "disable",
    "enable",
    "explain",
    "int8_attention",
    "int8_linear_qk",
    "is_available",
    "join_qk",
    "merge_attention",
    "plot_mask",
    "quantize_qk",
    "record",
    "register_backend",
    "reset_stats",
    "rms_rope_quantize",
    "route",
    "scaled_dot_product_attention",
    "sparse_sm89_attention",
    "stats",
    "unregister_backend",
    "video_windows",
]
