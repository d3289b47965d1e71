"""`sdpa-router tune`: measure every usable backend on this GPU, times by call and errors by kind of inputs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import run
from .backends.base import TORCH, candidates, find_backend
from .call import Call, needs_mask_cast
from .cost_files import facts_of, table_path, tuned_table
from .costs import MASKS, Point, Size, Table
from .run_events import read_events
from .settings import Settings
from .stopwatch import Answer, Times, interleaved
from .testing import fade_bias, gaussian, outliers, relative_error, sdpa_oracle

_Value = TypeVar("_Value")
Progress = Callable[[list[Any]], Iterable[Any]]

# A backend that is farther off torch's answer than this is broken, not rough.
_BROKEN = 0.25
# The error of an answer with NaN or infinity, for which JSON has no number: no max_error is to accept it.
_NO_ANSWER = 1e9
_MOST_MASK = 2**28
# Padding hides three quarters of so many keys: image and video models pad prompts of some 100 tokens to 512.
_PROMPT = 512


class Shape(NamedTuple):
    """A call to be measured."""

    size: Size
    kv_heads: int
    dtype: torch.dtype = torch.bfloat16


def quick_grid() -> list[Shape]:
    """About 50 calls: square ones of two head_dims, some of two more, other heads, cross attention, causal ones.

    Two are those of models that many run, SDXL and Wan 14B: between measured numbers of heads an estimate errs by up to
    an eighth, because tiles fill the GPU's last round more or less well.
    """
    squares = itertools.product((512, 1024, 2048, 4096, 8192), (64, 128), ("none", "key"))
    sizes = [Size(1, 24, n, n, head_dim, mask) for n, head_dim, mask in squares]
    sizes += [Size(1, 24, 16384, 16384, 128, mask) for mask in ("none", "key")]
    wide = itertools.product((4096, 8192), (96, 256), ("none", "key"))
    sizes += [Size(1, 24, n, n, head_dim, mask) for n, head_dim, mask in wide]
    sizes += [Size(1, 16, n, n, head_dim) for n, head_dim in itertools.product((4096, 8192), (64, 96, 128, 256))]
    for q_len, kv_len in ((16384, 512), (16384, 2048), (32768, 512), (4096, 4096), (8192, 8192)):
        masks = ("none", "key", "padding") if q_len > kv_len else ("padding",)
        sizes += [Size(1, 24, q_len, kv_len, 128, mask) for mask in masks]
    sizes += [Size(1, 24, n, n, 128, "none", True) for n in (2048, 4096, 8192, 16384)]
    sizes += [Size(2, 10, 4096, 4096, 64), Size(1, 40, 32760, 512, 128)]
    return [Shape(size, size.heads) for size in sizes]


def full_grid() -> list[Shape]:
    """The quick grid, more lengths and head_dims, full masks."""
    squares = itertools.product((256, 1536, 3072, 6144, 12288, 32768), (64, 128), ("none", "key"))
    sizes = [Size(1, 24, n, n, head_dim, mask) for n, head_dim, mask in squares]
    wide = itertools.product((1024, 2048, 16384), (96, 256), ("none", "key"))
    sizes += [Size(1, 24, n, n, head_dim, mask) for n, head_dim, mask in wide]
    for kv_len, masks in ((256, MASKS[:3]), (1024, MASKS[:3]), (16384, MASKS[:2]), (33600, MASKS[:2])):
        sizes += [Size(1, 24, 4096, kv_len, 128, mask) for mask in masks]
    causal = ((1024, 128), *((n, 64) for n in (1024, 4096, 16384)))
    sizes += [Size(1, 24, n, n, head_dim, "none", True) for n, head_dim in causal]
    sizes += [Size(1, 24, n, n, 128, "full") for n in (512, 1024, 2048, 4096, 8192)]
    return quick_grid() + [Shape(size, size.heads) for size in sizes]


def recorded_shapes(path: Path) -> list[Shape]:
    """Return the different calls in a file that SDPA_ROUTER_JSONL named, of those that a backend could answer.

    Raises OSError, and ValueError for a line that is no JSON or a file without such a call.
    """
    events = (event for event in read_events(path) if event["event"] == "first")
    found = {shape: None for event in events if (shape := _shape_of(event)) is not None}
    if not found:
        raise ValueError(f"{path} holds no call of fp16 or bf16 tensors of four axes")
    return list(found)


def size_of_record(record: Mapping[str, Any]) -> Size | None:
    """Return what the costs of a recorded call depend on, None for one of unusual tensors."""
    signature = record["signature"]
    query, key = signature["query"], signature["key"]
    sizes, key_sizes = query.get("shape", ()), key.get("shape", ())
    if len(sizes) != 4 or len(key_sizes) != 4 or not all((*sizes, *key_sizes)):  # None: unknown
        return None
    batch, heads, q_len, head_dim = sizes
    of_keys = "padding" if record["mask"].get("dtype") == "bool" else "key"
    mask = {"none": "none", "per_key": of_keys, "full": "full"}.get(record["mask"]["kind"])
    if mask is None:
        return None
    return Size(batch, heads, q_len, key_sizes[2], head_dim, mask, signature["is_causal"] is True)


def _shape_of(record: Mapping[str, Any]) -> Shape | None:
    size = size_of_record(record)
    signature = record["signature"]
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    dtype = dtypes.get(signature["query"].get("dtype", ""))
    if size is None or dtype is None or (size.mask == "full" and size.q_len * size.kv_len > _MOST_MASK):
        return None
    batch, kv_heads, _, head_dim = signature["key"]["shape"]
    if (batch, head_dim) != (size.batch, size.head_dim) or size.heads % kv_heads:
        return None  # torch raised, or broadcast
    return Shape(size, kv_heads, dtype)


def tune(shapes: list[Shape], device: torch.device, progress: Progress = lambda items: items) -> Table:
    """Measure `shapes` and the errors of all backends on `device`.

    Keeps what the user's table knew of other calls, and of backends that nobody has registered here. A call that does
    not fit into memory, or a backend that fails, is left out.
    """
    tuned = tuned_table(device)
    points = {} if tuned is None else {point.size: point for point in tuned.points}
    host = {} if tuned is None else dict(tuned.host)
    with torch.no_grad():
        errors = _of_strangers({} if tuned is None else tuned.errors) | measure_errors(device)
        for shape in progress(shapes):
            try:
                times = measure(shape, device)
            except torch.OutOfMemoryError:
                continue
            finally:
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            known = points[shape.size].ms if shape.size in points else {}
            points[shape.size] = Point(shape.size, _of_strangers(known) | times.device)
            # Somebody else on the host can only make it slower.
            host |= {name: min(ms, host.get(name, ms)) for name, ms in times.host.items()}
    facts = facts_of(device)
    return Table(tuple(points.values()), errors, facts, str(table_path(facts)), host)


def _of_strangers(known: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return what is known of backends that can't be measured here, as another program registers them."""
    return {name: value for name, value in known.items() if name not in (*candidates(), TORCH)}


def measure(shape: Shape, device: torch.device) -> Times:
    """Return milliseconds a call by backend, quantisation included, in turns; torch among them."""
    call = _call(shape, device)
    answers = _answers(call)
    expected = answers[TORCH]().float()
    right: dict[str, Answer] = {}
    for name, answer in answers.items():
        try:
            if relative_error(answer(), expected) < _BROKEN:
                right[name] = answer
        except Exception:
            continue
    del expected
    return interleaved(right, device)


def measure_errors(device: torch.device) -> dict[str, dict[str, float]]:
    """Return the relative error against float64 by backend and kind of inputs: gaussian, outliers, smooth."""
    errors: dict[str, dict[str, float]] = {}
    makers: dict[str, Callable[..., tuple[Tensor, ...]]] = {
        "gaussian": gaussian,
        "outliers": outliers,
        "smooth": smooth,
    }
    for kind, make in makers.items():
        query, key, value = make(1, 4, 512, 2048, 128, dtype=torch.bfloat16, device=device)
        expected = sdpa_oracle(query, key, value)[0]
        for name, answer in _answers(Call(query, key, value)).items():
            try:
                error = relative_error(answer(), expected)
            except Exception:
                continue
            errors.setdefault(name, {})[kind] = round(error, 6) if error < _NO_ANSWER else _NO_ANSWER
    return errors


def smooth(batch: int, heads: int, q_len: int, kv_len: int, head_dim: int, **options: Any) -> tuple[Tensor, ...]:
    """Make inputs that vary slowly along the sequence, as those of video models: one drawn row in 64, and noise."""
    steps = max(q_len, kv_len) // 64 + 2
    coarse = gaussian(batch, heads, steps, steps, head_dim, **{**options, "dtype": torch.float32})
    fine = gaussian(batch, heads, q_len, kv_len, head_dim, **{**options, "dtype": torch.float32})
    made = []
    for rows, noise in zip(coarse, fine, strict=True):
        flat = rows.flatten(0, 1).transpose(1, 2)
        slow = torch.nn.functional.interpolate(flat, size=noise.shape[2], mode="linear").transpose(1, 2)
        made.append((slow.reshape(noise.shape) + 0.1 * noise).to(options["dtype"]).contiguous())
    return tuple(made)


def _call(shape: Shape, device: torch.device) -> Call:
    batch, heads, q_len, kv_len, head_dim, mask, is_causal = shape.size
    options: dict[str, Any] = {"kv_heads": shape.kv_heads, "dtype": shape.dtype, "device": device}
    query, key, value = gaussian(batch, heads, q_len, kv_len, head_dim, **options)
    bias: Tensor | None = None
    if mask == "key":
        bias = fade_bias(kv_len, device=device).to(shape.dtype)
    elif mask == "padding":
        hidden = 3 * min(_PROMPT, kv_len) // 4
        bias = (torch.arange(kv_len, device=device) < kv_len - hidden).view(1, 1, 1, -1)
    elif mask == "full":
        bias = torch.randn(1, 1, q_len, kv_len, device=device).to(shape.dtype)
    return Call(query, key, value, bias, 0.0, is_causal, None, heads != shape.kv_heads)


def _answers(call: Call) -> dict[str, Answer]:
    """Return a function for everyone who can answer the call, whatever the size."""
    settings = Settings(allow_mask_blind=True, min_kv=0)
    native = run.torch_attention()
    answers: dict[str, Answer] = {TORCH: lambda: run.native(call, native, cast_mask=needs_mask_cast(call))}
    for name in candidates():
        backend = find_backend(name)
        if not any(backend.reasons_against(call, settings)):
            answers[name] = functools.partial(run.backend, backend, call, settings, native)
    return answers
