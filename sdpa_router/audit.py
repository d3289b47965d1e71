"""Say what int8 attention costs in accuracy, attention call by attention call, so that a user knows what to exclude."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import run
from .context import route
from .decide import Call, decide, needs_mask_cast
from .enable import suspended
from .selection import Patterns, Switch, by_first_name, check_module, plain_name, switches
from .settings import Settings
from .testing import relative_error

_WORST = 5


@dataclass(frozen=True)
class AuditRow:
    """One attention call of the forward.

    module: qualified name of the module that made it.  query, key: shapes.  mask: its kind.  reasons: codes of what
    speaks against int8.  error: rms(int8 - native) / rms(native) of this call's output on the inputs of the native
    forward, and peak: its largest difference over the same rms; None where torch answers.
    """

    number: int
    module: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    mask: str
    reasons: tuple[str, ...]
    error: float | None
    peak: float | None


@dataclass(frozen=True)
class Audit:
    """What audit() found: a row for each call in their order, and the relative error of the module's output.

    output_error is None if no floating-point tensor was returned.
    """

    rows: tuple[AuditRow, ...]
    output_error: float | None

    def worst(self, count: int = _WORST) -> list[tuple[str, float]]:
        """Return the modules with the largest errors, as (qualified name, error of its worst call), worst first."""
        worst: dict[str, float] = {}
        for row in self.rows:
            if row.error is not None:
                worst[row.module] = max(worst.get(row.module, 0.0), _nan_first(row.error))
        return sorted(worst.items(), key=lambda item: -item[1])[:count]

    def table(self) -> str:
        """Return all calls and the worst modules as text."""
        from .terminal import console, number, table

        columns = ("call", "module", "query", "key", "mask", "error", "peak", "reasons")
        calls = table(*columns, numbers=("call", "error", "peak"))
        for row in self.rows:
            figures = ["-" if figure is None else number(figure) for figure in (row.error, row.peak)]
            shapes = [str(list(shape)) for shape in (row.query, row.key)]
            calls.add_row(str(row.number), row.module, *shapes, row.mask, *figures, ", ".join(row.reasons))
        screen = console()
        with screen.capture() as captured:
            screen.print(calls)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        worst = [f"  {name}: {number(error)}" for name, error in self.worst()] or ["  none: no call goes to int8"]
        routed = sum(row.error is not None for row in self.rows)
        output = "-" if self.output_error is None else number(self.output_error)
        text = f"{routed} of {len(self.rows)} calls on int8; error of the output {output}; worst modules:"
        return "\n".join([*lines, text, *worst])


def audit(
    module: torch.nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    settings: Settings | None = None,
    show: bool = True,
) -> Audit:
    """Run module(*inputs, **kwargs) natively and routed, and print what int8 changes: each attention call, the output.

    In the native run every call that would be routed is answered a second time by the int8 kernel, on the same inputs;
    the routed run gives the error of the module's output, with what adds up along the way. Both run eagerly, without
    gradients, on copies of the inputs (a cache is filled once), from the same state of torch's random numbers; put the
    module into eval() if it has dropout.
    include, exclude: as for enable(), whose own choice for this module is set aside meanwhile.  settings: min_kv, pv,
    precision and skip count.  show: whether the table is printed.
    Raises ValueError if no call of F.scaled_dot_product_attention was seen, TypeError for what is not a module.

    >>> worst = audit(pipe.transformer, kwargs=inputs).worst()
    >>> enable(pipe.transformer, exclude=[name for name, error in worst if error > 0.03])
    """
    check_module("audit", module)
    if not isinstance(kwargs, (Mapping, type(None))):
        raise TypeError(f"kwargs is of type {type(kwargs).__name__}; accepted: a mapping of the module's arguments")
    if not isinstance(settings, (Settings, type(None))):
        raise TypeError(f"settings is of type {type(settings).__name__}; accepted: sdpa_router.Settings")
    chosen = by_first_name(module, switches(module, include, exclude))
    probe = _Probe(chosen, replace(settings or Settings(), on_unsupported="fallback"))
    with suspended(module), probe.following(module):
        native = probe.forward(module, inputs, kwargs or {})
        if not probe.rows:
            raise ValueError(
                f"the forward of {type(module).__name__} made no call of torch.nn.functional."
                "scaled_dot_product_attention where it is to be routed; accepted: a module that does, with the native "
                "attention backend of its library"
            )
        probe.measuring = False
        routed = probe.forward(module, inputs, kwargs or {})
    found = Audit(tuple(probe.rows), _output_error(routed, native))
    if show:
        print(found.table())
    return found


_thread = threading.local()


def _ask_probe(call: Call) -> bool:
    """Be the `skip` of an audit; always the same function, as settings are kept for the life of the process."""
    probe: _Probe = _thread.probe
    return probe.skips(call)


class _Probe:
    """Sees every call of a forward; measuring, it lets torch answer all of them."""

    def __init__(self, chosen: dict[str, Switch | None], settings: Settings) -> None:
        self.rows: list[AuditRow] = []
        self.measuring = True
        self._chosen = chosen
        self._settings = settings
        self._inside = [""]

    def forward(self, module: torch.nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module with all of its calls seen."""
        devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
        settings = self._settings
        routed = route(min_kv=settings.min_kv, pv=settings.pv, precision=settings.precision, skip=_ask_probe, log=False)
        _thread.probe = self
        try:
            with torch.no_grad(), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"), routed:
                return module(*map(_copied, inputs), **{name: _copied(value) for name, value in kwargs.items()})
        finally:
            del _thread.probe

    @contextlib.contextmanager
    def following(self, module: torch.nn.Module) -> Iterator[None]:
        """Know which module a call comes from."""
        handles: list[Any] = []
        for name, submodule in module.named_modules():
            handles.append(submodule.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)))
            handles.append(submodule.register_forward_hook(self._left, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _left(self, *_: object) -> None:
        self._inside.pop()

    def skips(self, call: Call) -> bool:
        """Say whether torch shall answer; measure the call first, in the native run."""
        name = self._inside[-1]
        if self._chosen[name] != "on":
            return True
        decision = decide(call, self._settings)
        if not self.measuring:
            return not decision.routed
        error = peak = None
        if decision.routed:
            native = run.native(call, run.torch_attention(), cast_mask=needs_mask_cast(call))
            modes = self._settings.pv, self._settings.precision
            error, peak = _errors(run.int8(*call[:4], call.is_causal, call.scale, *modes)[0], native)
        reasons = tuple(reason.code.value for reason in decision.reasons)
        self.rows.append(
            AuditRow(
                number=len(self.rows),
                module=plain_name(name),
                query=tuple(call.query.shape),
                key=tuple(call.key.shape),
                mask=decision.mask.kind.value,
                reasons=reasons,
                error=error,
                peak=peak,
            )
        )
        return True


def _copied(value: Any) -> Any:
    """Copy an input of the module, so that a cache in it, or a buffer, is what it was for the other run too."""
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            memo[id(leaf)] = _cloned(leaf)  # deepcopy refuses what has a gradient function
        elif isinstance(leaf, torch.nn.Module):
            memo[id(leaf)] = leaf
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, copy.Error):
        return value  # generators of numbers, locks and the like


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_nested:
        return tensor.detach().clone()
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor  # clone() would give an expanded mask a row for each query
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _errors(out: torch.Tensor, native: torch.Tensor) -> tuple[float, float]:
    out, native = out.double(), native.double()
    rms = native.square().mean().sqrt()
    return relative_error(out, native), float((out - native).abs().max() / rms)


def _output_error(routed: Any, native: Any) -> float | None:
    ours, theirs = _numbers(routed), _numbers(native)
    return None if ours is None or theirs is None else relative_error(ours, theirs)


def _numbers(output: Any) -> torch.Tensor | None:
    """Return all floating-point numbers of a module's output in one vector."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    parts = [leaf.double().flatten() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.cat(parts) if parts else None


def _nan_first(error: float) -> float:
    return math.inf if math.isnan(error) else error
