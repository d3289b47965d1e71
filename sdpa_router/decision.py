"""The vocabulary of a decision: routes, mask kinds, reason codes and their sentences. No logic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class Route(_Text):
    """Who answers a call: our int8 kernel, torch, or another backend, which `Decision.backend` names."""

    INT8 = "int8"
    SDPA = "sdpa"
    PEER = "peer"


class MaskKind(_Text):
    """What a mask's metadata says: absent, constant along the queries, one row per query, or not a mask at all."""

    NONE = "none"
    PER_KEY = "per_key"
    FULL = "full"
    INVALID = "invalid"


class Code(_Text):
    """Stable names of the reasons; `text` is the sentence of a Reason and `cure` says what the user can do."""

    text: str
    cure: str

    def __new__(cls, value: str, text: str = "", cure: str = "") -> Code:
        """Make the member `value` with its two texts."""
        code = str.__new__(cls, value)
        code._value_, code.text, code.cure = value, text, cure
        return code

    DISABLED = (
        "disabled",
        "{given} is set in the environment, {accepted}",
        "Unset `SDPA_ROUTER` in the environment.",
    )
    SKIPPED = (
        "skipped",
        "the setting skip answered {given}, {accepted}",
        "Change the `skip` predicate of `route()` or `enable()`.",
    )
    DEVICE = (
        "device",
        "given {given}; the kernel takes {accepted}",
        "Move the tensors to a GPU.",
    )
    CAPABILITY = (
        "capability",
        "the GPU is {given}; the kernel takes {accepted}",
        "None on this GPU: torch answers.",
    )
    KERNEL = (
        "kernel",
        "found {given}; the kernel needs {accepted}",
        "Install a Triton (for the interpreter also a numpy) of the version that the sentence names.",
    )
    ARGUMENT = (
        "argument",
        "given {given}; the router takes {accepted}",
        "Pass plain Python numbers and bools; torch decides about anything else.",
    )
    TENSOR_SUBCLASS = (
        "tensor_subclass",
        "given {given}; the kernel takes {accepted}",
        "Pass plain dense tensors; nested, sparse and wrapper tensors stay with torch.",
    )
    RANK = (
        "rank",
        "query, key and value have {given} axes; the kernel takes {accepted}",
        "Reshape to `[batch, heads, length, head_dim]`.",
    )
    SHAPE = (
        "shape",
        "given {given}; the kernel takes {accepted}",
        "Give key and value the batch of the query and one length; expand them where torch would broadcast.",
    )
    EMPTY = (
        "empty",
        "given {given}; the kernel takes {accepted}",
        "None needed: torch answers an empty call at once.",
    )
    HEADS = (
        "heads",
        "query has {given} heads of key and value; the kernel takes {accepted}",
        "Pass `enable_gqa=True` with a multiple of the key heads.",
    )
    HEAD_DIM = (
        "head_dim",
        "head_dim is {given}; the kernel takes {accepted}",
        "None: another backend or torch answers heads of this size.",
    )
    VALUE_HEAD_DIM = (
        "value_head_dim",
        "value has head_dim {given}; the kernel takes {accepted}",
        "Pad value to the query's head_dim and cut the output.",
    )
    LAST_STRIDE = (
        "last_stride",
        "the last axis has stride {given}; the kernel takes {accepted}",
        "Lay tensors out so that head_dim is contiguous.",
    )
    DTYPE = (
        "dtype",
        "query is {given}; the kernel takes {accepted}",
        "Run the model in bfloat16 or float16.",
    )
    MIXED_DTYPE = (
        "mixed_dtype",
        "query, key and value are {given}; the kernel takes {accepted}",
        "Cast the three to one dtype; torch raises on such calls too.",
    )
    MIXED_DEVICE = (
        "mixed_device",
        "the tensors are on {given}; the kernel takes {accepted}",
        "Move all tensors, the mask too, to one device.",
    )
    REQUIRES_GRAD = (
        "requires_grad",
        "{given} requires a gradient; the kernel takes {accepted}",
        "Run inference under `torch.no_grad()` or `torch.inference_mode()`.",
    )
    FUNCTORCH = (
        "functorch",
        "called under {given}; the kernel takes {accepted}",
        "Call outside of `torch.func` transforms, forward-mode AD and `torch.jit.trace`.",
    )
    AUTOCAST = (
        "autocast",
        "autocast would cast to {given}; the kernel takes {accepted}",
        "Cast the model to autocast's dtype, or leave autocast.",
    )
    DROPOUT = (
        "dropout",
        "dropout_p is {given}; the kernel takes {accepted}",
        "Call `model.eval()`.",
    )
    CAUSAL_WITH_MASK = (
        "causal_with_mask",
        "given {given}; the kernel takes {accepted}",
        "Pass one of the two, or put the causal pattern into the mask (torch answers full masks).",
    )
    FULL_MASK = (
        "full_mask",
        "the mask {given} has a row for each query; the kernel takes {accepted}",
        "If all rows are equal, pass one: `mask[..., :1, :]`.",
    )
    TILES = (
        "tiles",
        "the mask has {given}; by tile it pays {accepted}",
        "None where torch is faster with this mask; keep a mask for as long as it is used, instead of making it anew.",
    )
    INVALID_MASK = (
        "invalid_mask",
        "the mask is {given}; SDPA takes {accepted}",
        "Pass a mask that broadcasts to `[batch, heads, queries, keys]`; torch raises on such calls too.",
    )
    MASK_DTYPE = (
        "mask_dtype",
        "the mask is {given}; SDPA takes {accepted}",
        "Use a bool mask, or cast it to the query's dtype; torch raises on such calls too.",
    )
    SHORT = (
        "short",
        "{given} queries and keys; the int8 route pays from {accepted}",
        "Set `min_kv` to route by the number of keys alone.",
    )
    PV = (
        "pv",
        "pv is {given}; the kernel takes {accepted}",
        "Choose another `pv`.",
    )
    PRECISION = (
        "precision",
        "precision is {given}; the kernel takes {accepted}",
        "Choose another `precision`.",
    )
    PACKAGE = (
        "package",
        "{given}; the backend needs {accepted}",
        "Install what the sentence names, or leave the backend out of `backends`.",
    )
    DRIVER = (
        "driver",
        "the driver knows CUDA {given}; the backend needs {accepted}",
        "Update the GPU's driver.",
    )
    MASK = (
        "mask",
        "the mask is {given}; the backend takes {accepted}",
        "Name a backend that takes masks, such as `int8`.",
    )
    MASK_BLIND = (
        "mask_blind",
        "the backend scales keys by {given}; the router takes {accepted}",
        "Set `allow_mask_blind=True` where masked keys hold ordinary values.",
    )
    CAUSAL = (
        "causal",
        "is_causal with {given}; the backend takes {accepted}",
        "Name a backend that knows this causal mask, such as `int8`.",
    )
    SCALE = (
        "scale",
        "the scale is {given}; the backend takes {accepted}",
        "Give query the sign, or leave the call to another backend.",
    )
    KV_LENGTH = (
        "kv_length",
        "given {given} keys; the backend takes {accepted}",
        "None needed: another backend answers.",
    )
    STRIDES = (
        "strides",
        "given strides {given}; the backend takes {accepted}",
        "Lay out the tensors in rows of a multiple of 4 elements, without axes of stride 0.",
    )
    STREAM = (
        "stream",
        "the current stream is {given}; the backend launches on {accepted}",
        "Call on the default stream, outside of CUDA graph capture.",
    )
    TORCH_REFUSES = (
        "torch_refuses",
        "torch refuses {given} here; the backend needs {accepted}",
        "Name another of torch's backends, or `torch` for its own choice.",
    )
    NOT_MEASURED = (
        "not_measured",
        "nothing was measured of {given}; costs are known for {accepted}",
        "Run `sdpa-router tune`, with `--shapes` for the calls of a recorded run.",
    )
    SLOWER = (
        "slower",
        "estimated to take {given}; the choice is {accepted}",
        "None needed: a faster backend answers.",
    )
    ERROR_CLASS = (
        "error_class",
        "the error class is {given}; max_error accepts {accepted}",
        "Raise `max_error`, or measure the backend with `sdpa-router tune`.",
    )
    NOT_NAMED = (
        "not_named",
        "backends is {given}; the log-sum-exp comes from {accepted} or from torch",
        "Name `int8` among `backends`.",
    )
    BACKEND_FAILED = (
        "backend_failed",
        "it raised {given}; the router takes {accepted}",
        "See the log line and what the backend says; leave it out of `backends`.",
    )
    MASK_CAST = (
        "mask_cast",
        "the {given} mask was cast to {accepted}, because torch answers wrongly on a GPU without it",
        "Pass the mask in the query's dtype.",
    )
    PORTABLE = (
        "portable",
        "{accepted} answers, because {given}",
        "None needed; where the sentence names Triton, install one that it would take.",
    )
    RING = (
        "ring",
        "{given}; {accepted} bytes leave it",
        "None needed: `ring_attention()` shared the call.",
    )
    ULYSSES = (
        "ulysses",
        "{given}; {accepted} bytes leave it",
        "None needed: `ulysses_attention()` shared the call.",
    )


class TileCounts(NamedTuple):
    """Tiles of 64 queries and 64 keys of a mask: nothing added, one number added, to be read, and not to be visited."""

    kept: int
    constant: int
    mixed: int
    skipped: int

    @property
    def total(self) -> int:
        """Number of tiles."""
        return sum(self)

    def __str__(self) -> str:
        return (
            f"{self.total} tiles: {self.kept} kept, {self.constant} of one number, {self.mixed} read, "
            f"{self.skipped} skipped"
        )


class Reason(NamedTuple):
    """Why a backend does not answer a call, or a note about how torch was called.

    `given` and `accepted` are formatted only when `detail` is read: under torch.compile they may be symbolic.
    """

    code: Code
    given: object
    accepted: object

    @property
    def detail(self) -> str:
        """One sentence with what was given and what would have been accepted."""
        return self.code.text.format(given=show(self.given), accepted=show(self.accepted))

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


@dataclass(frozen=True)
class MaskInfo:
    """What the metadata of a mask says.

    why: one sentence for the kind.  per_batch, per_head: whether the mask varies along these axes.
    is_bool: True keeps a key; otherwise the mask is added.  tiles: of a full mask that is answered by tile.
    """

    kind: MaskKind
    why: str
    per_batch: bool = False
    per_head: bool = False
    is_bool: bool = False
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    tiles: TileCounts | None = None

    def __str__(self) -> str:
        name = self.kind.value.replace("_", " ")
        text = name if self.dtype is None else f"{name}, {show(self.dtype)} {show(self.shape)}"
        return text if self.tiles is None else f"{text}, {self.tiles}"


@dataclass(frozen=True)
class Decision:
    """The answer to "who computes this call, and why"; holds no tensors.

    reasons: all reasons against whoever was asked before and does not answer; empty if the first one does.
    notes: what was done besides.  peer: the backend's name where another one than int8 and torch answers.
    passed_over: (name, reasons) of everyone who was asked and does not answer, where more than int8 and torch could.
    estimates: (name, milliseconds) by the cost table, where it decided.

    >>> print(explain(query, key, value, mask))
    sdpa because full_mask: the mask [1, 1, 4096, 512] has a row for each query; the kernel takes ...
    """

    route: Route
    mask: MaskInfo
    reasons: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()
    peer: str | None = None
    passed_over: tuple[tuple[str, tuple[Reason, ...]], ...] = ()
    estimates: tuple[tuple[str, float], ...] = ()

    @property
    def routed(self) -> bool:
        """Whether the int8 kernel answers."""
        return self.route is Route.INT8

    @property
    def backend(self) -> str:
        """Who answers: "int8", "sdpa" (torch) or the name of another backend."""
        return self.peer or self.route.value

    def __str__(self) -> str:
        if self.passed_over:
            others = (f"not {name} because {'; '.join(map(str, reasons))}" for name, reasons in self.passed_over)
            why = ", ".join((f"(mask: {self.mask})", *others))
        elif self.reasons:
            why = f"because {'; '.join(map(str, self.reasons))}"
        else:
            why = f"(mask: {self.mask})"
        return " ".join((f"{self.backend} {why}", *(f"({note})" for note in self.notes)))


class UnsupportedError(RuntimeError):
    """A backend other than torch was required and none can answer; `decision` holds every reason."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision


def show(value: object) -> str:
    """Text of a dtype, shape or plain value without its class name: `bfloat16`, `[1, 8, 64]`."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(show, value))}]"
    try:
        return str(value)
    except ValueError:  # an int of more digits than Python prints
        return f"a huge {type(value).__name__}"
    except Exception:  # what a registered backend gives may say anything
        return f"a {type(value).__name__}"
