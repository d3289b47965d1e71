"""Replaying what a call launched: with a stand-in for Triton's kernels, so that no GPU is needed."""

from __future__ import annotations

import dataclasses
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdpa_router.kernels.int8_attention import launch as launching
from sdpa_router.kernels.int8_attention import plan as planning
from sdpa_router.kernels.int8_attention.direct import passing_of
from sdpa_router.kernels.int8_attention.launch import empty, launch, replay, zeros


@dataclasses.dataclass
class Descriptor:
    base: Any
    shape: list[int]


class Kernel:
    """Adds `number` to every float of X into Y, through addresses alone; counts what went through Triton."""

    arg_names = ("X", "Y", "n", "number")

    def __init__(self):
        self.bound = 0
        self.ran = []
        self.compiled = SimpleNamespace(run=self.run, function=7, packed_metadata="packed")

    def __getitem__(self, grid):
        def bind(x, y, n, number, num_warps=4):
            self.bound += 1
            add(address(x), address(y), n, number)
            return self.compiled

        return bind

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *args):
        assert (function, metadata, launch_metadata, enter, leave) == (7, "packed", None, None, None)
        self.ran.append(((x, y, z), stream))
        add(address(args[0]), address(args[1]), *args[2:])


def address(value):
    value = getattr(value, "base", value)
    return value if isinstance(value, int) else value.data_ptr()


def add(source, target, n, number):
    import ctypes

    source, target = ((ctypes.c_float * n).from_address(place) for place in (source, target))
    for i in range(n):
        target[i] = source[i] + number


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "_plans", {})
    monkeypatch.setattr(launching, "_known", {})
    monkeypatch.setattr(launching, "_observed", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=99))
    return Kernel()


def call(kernel, x, out, number=1.0, scratch=empty):
    """out = x + 2 * number, by way of a workspace."""

    def run():
        between = scratch((len(x),), torch.float32, x.device)
        launch(kernel, (3,), x, between, len(x), number=number, num_warps=8)
        launch(kernel, (4, 5), Descriptor(between, [len(x)]), out, len(x), number=number)

    replay(number, (x, out, None), run)


def test_the_second_call_is_replayed_on_its_own_tensors(kernel):
    for repeat in range(3):
        x, out = torch.arange(5.0) + repeat, torch.empty(5)
        call(kernel, x, out)
        assert torch.equal(out, x + 2)
    assert kernel.bound == 2
    assert kernel.ran == [((3, 1, 1), 99), ((4, 5, 1), 99)] * 2


@pytest.mark.parametrize("other", ["length", "dtype of a tensor", "stride", "alignment", "number"])
def test_what_differs_is_launched_by_triton(kernel, other):
    x, number = torch.arange(5.0), 1.0
    call(kernel, x, torch.empty(5))
    if other == "length":
        x = torch.arange(6.0)
    elif other == "dtype of a tensor":
        x = x.int()
    elif other == "stride":
        x = torch.arange(10.0)[::2]
    elif other == "alignment":
        x = torch.arange(6.0)[1:]
    else:
        number = 2.0
    call(kernel, x, torch.empty(len(x)), number)
    assert kernel.bound == 4
    assert not kernel.ran


def test_zeros_are_zero_each_time(kernel):
    def run():
        state, plain = zeros((4,), torch.float32, x.device), empty((100,), torch.float32, x.device)
        launch(kernel, (1,), state, out, 4, number=1.0)
        launch(kernel, (1,), x, plain, 4, number=0.0)
        launch(kernel, (1,), out, state, 4, number=5.0)

    for _ in range(3):
        x, out = torch.randn(4), torch.empty(4)
        replay("zeros", (x, out), run)
        assert torch.equal(out, torch.ones(4))
    assert kernel.bound == 3


@pytest.mark.parametrize("fault", ["unknown tensor", "tensor left out", "same tensor twice", "interpreter", "argument"])
def test_calls_that_can_not_be_replayed_stay_right(kernel, fault):
    for _ in range(2):
        x, out = torch.randn(4), torch.empty(4)
        tensors = [x, out]
        if fault == "interpreter":
            kernel.compiled = None

        def run(x=x, out=out):
            between = torch.empty(4) if fault == "unknown tensor" else empty((4,), torch.float32, x.device)
            launch(kernel, (1,), x, between, 4, number=1.0)
            launch(kernel, (1,), between, out, 4, **({} if fault == "argument" else {"number": 1.0}))

        if fault == "tensor left out":
            tensors.append(torch.empty(1))
        elif fault == "same tensor twice":
            tensors.append(x)
        if fault == "argument":
            with pytest.raises(TypeError):
                replay(fault, tensors, run)
            continue
        replay(fault, tensors, run)
        assert torch.equal(out, x + 2)
    assert not kernel.ran
    assert not launching._plans


def test_a_call_that_raises_leaves_nothing(kernel):
    x, out = torch.randn(4), torch.empty(4)

    def run():
        launch(kernel, (1,), x, out, 4, number=1.0)
        raise MemoryError

    with pytest.raises(MemoryError):
        replay("raises", (x, out), run)
    assert not launching._plans
    assert launching._thread.tape is None


def test_a_profiler_sees_triton_launch(kernel, monkeypatch):
    x, out = torch.randn(4), torch.empty(4)
    call(kernel, x, out)
    monkeypatch.setattr(launching, "_observed", lambda: True)
    call(kernel, x, out)
    assert kernel.bound == 4
    assert not kernel.ran


def test_plans_are_bounded_and_threads_keep_apart(kernel, monkeypatch):
    monkeypatch.setattr(launching, "_MOST_PLANS", 3)
    for n in range(1, 9):
        call(kernel, torch.randn(n), torch.empty(n))
        assert len(launching._plans) <= 3
    results = []

    def work(seed):
        for _ in range(50):
            x, out = torch.full((7,), float(seed)), torch.empty(7)
            call(kernel, x, out)
            results.append(torch.equal(out, x + 2))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results)
    assert len(results) == 200


def test_triton_tells_whether_somebody_listens():
    assert launching._observed() is False
    hash(launching._settings())


def test_a_plan_holds_no_tensor(kernel):
    import gc

    x, out = torch.randn(4), torch.empty(4)
    call(kernel, x, out)
    (plan,) = launching._plans.values()
    found, seen = [plan], []
    while found:
        thing = found.pop()
        seen.append(thing)
        if isinstance(thing, (list, tuple)):
            found.extend(thing)
        elif isinstance(thing, Descriptor):
            found.append(thing.base)
    assert not any(isinstance(thing, torch.Tensor) for thing in seen)
    assert plan.size == 256
    assert math.isfinite(gc.collect())


class Function:
    """Stands for Triton's C function."""

    def __init__(self):
        self.ran = []

    def __call__(self, *args):
        self.ran.append(args)


class Launcher:
    """Like Triton's: turns descriptors into something else, then calls its C function."""

    def __init__(self, function, scratch=0):
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch_pdl = False
        self.called = 0

        def around(launcher):
            def inner(*args):
                return launcher(*[arg.base.data_ptr() if hasattr(arg, "base") else arg for arg in args])

            return inner

        self.launch = around(function)

    def __call__(self, x, y, z, stream, function, *args):
        self.called += 1
        self.launch(x, y, z, stream, function, self.launch_pdl, *args)


def test_addresses_that_come_again_go_to_the_c_function_at_once(kernel, monkeypatch):
    function = Function()
    launcher = kernel.compiled.run = Launcher(function)
    monkeypatch.setattr(planning, "_MOST_FILLED", 2)
    x, outs = torch.arange(5.0), [torch.empty(5) for _ in range(3)]
    call(kernel, x, outs[0])
    (plan,) = launching._plans.values()
    sequence = [0, 0, 1, 1, 0, 2, 2, 1, 0]
    for number in sequence:
        call(kernel, x, outs[number])
        assert len(plan.filled) <= 2
        first, second = function.ran[-2:]
        assert (first[:6], second[:6]) == ((3, 1, 1, 99, 7, False), (4, 5, 1, 99, 7, False))
        assert first[10] == x.data_ptr()
        assert second[10:12] == (first[11], outs[number].data_ptr())  # what the first wrote, the second reads
    assert len(function.ran) == 2 * len(sequence)
    assert launcher.called == 0
    assert kernel.bound == 2


def test_a_launcher_that_needs_memory_or_is_unknown_is_called_itself(kernel):
    assert passing_of(Launcher(Function(), scratch=8)) is None
    assert passing_of(kernel.run) is None
    unknown = Launcher(Function())
    unknown.launch = lambda *args: None
    assert passing_of(unknown) is None
    other_order = Launcher(Function())
    other_order.launch = lambda *args, launcher=None: None
    assert passing_of(other_order) is None
    launcher = kernel.compiled.run = Launcher(Function(), scratch=8)
    x, out = torch.arange(5.0), torch.empty(5)
    for _ in range(3):
        call(kernel, x, out)
    assert launcher.called == 4


@pytest.mark.parametrize("described", [False, True])
def test_what_the_installed_triton_passes_to_its_c_function(monkeypatch, described):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    descriptors = pytest.importorskip("triton.tools.tensor_descriptor", reason="Triton 3.4 or newer")
    from triton.runtime import driver as active

    def fill(*args):
        return ("map", *args)

    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    monkeypatch.setattr(active, "_active", SimpleNamespace(utils=utils))
    signature, metadata, args = {0: "*fp32"}, None, [4096]
    base = torch.empty(128, 64, dtype=torch.float16)
    if described:
        signature = {0: "*fp32", 1: "tensordesc<fp16[64, 64]>", 2: "i32"}
        metadata = [{"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [64, 64], "fp4_padded": False}]
        args += [descriptors.TensorDescriptor(base, [128, 64], [64, 1], [64, 64]), 5]
    function = Function()
    launcher = object.__new__(driver.CudaLauncher)
    vars(launcher).update(
        num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        launch_cooperative_grid=False, launch_pdl=False, gsan_enabled=False, arg_annotations=(), kernel_signature=b"",
        launch=driver.wrap_handle_tensordesc(function, signature, metadata),
    )  # fmt: skip
    given = (1, 2, 3, 99, 7, (4, 1, 0), None, None, None, *args)
    passing = passing_of(launcher)
    assert passing is not None
    for _ in range(2):
        found, noted = passing.call(given)
        assert found is function
    assert not function.ran
    launcher(*given)
    assert [noted] == function.ran
    assert ("map" in str(noted)) is described
    assert (str(base.data_ptr()) in str(noted)) is described


def test_a_call_is_recognised_by_what_matters():
    plan = object()
    x, y = torch.zeros(4, 4), torch.zeros(2)
    launching.forget()
    launching.remember(1, (x, None, y), plan, note="mine")
    known, addresses = launching.recall(1, (torch.ones(4, 4), None, y))
    assert (known.plan, known.note, addresses[1:]) == (plan, "mine", [0, y.data_ptr()])
    others = {
        "number": (2, (x, None, y)),
        "stride": (1, (x.T, None, y)),
        "shape": (1, (x.view(2, 8), None, y)),
        "dtype": (1, (x.int(), None, y)),
        "given": (1, (x, y, None, y)),
        "left out": (1, (x, None, None)),
        "alignment": (1, (torch.zeros(17)[1:].view(4, 4), None, y)),
        "gradient": (1, (torch.zeros(4, 4, requires_grad=True), None, y)),
        "negated": (1, (torch._neg_view(x), None, y)),
    }
    for name, (number, tensors) in others.items():
        assert launching.recall(number, tensors)[0] is None, name
    launching.forget()
    assert launching.recall(1, (x, None, y))[0] is None
