"""torch.compile of routed modules, whole and block by block: one graph, no breaks, recompiled for settings alone.

Everything goes through inductor: with backend="eager" dynamo hides mistakes that it makes elsewhere.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.compile_fx import compile_fx

import sdpa_router
from sdpa_router import disable, enable, route, testing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = {"min_kv": 1, "log": False}
BUDGET = testing.BUDGET.gaussian
LENGTHS = (40, 56, 72, 104, 88)
# Torch 2.7 ties the graph of an enabled module to the very method that enable() found.
BY_METHOD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8)


class Block(nn.Module):
    """Attention and a linear layer, each added to the stream."""

    def __init__(self, heads, head_dim):
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        query, key, value = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A stack of blocks."""

    def __init__(self, depth=2, heads=2, head_dim=32):
        super().__init__()
        self.blocks = nn.ModuleList(Block(heads, head_dim) for _ in range(depth))

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        return x


class Inductor:
    """The backend inductor; counts graphs and the int8 calls in them."""

    def __init__(self):
        self.graphs, self.routed = 0, 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        self.routed += sum("sdpa_router.int8_attention" in str(node.target) for node in graph.graph.nodes)
        return compile_fx(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    sdpa_router.reset_stats()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def inductor():
    return Inductor()


def model(**sizes):
    torch.manual_seed(0)
    return Model(**sizes).eval().to(DEVICE, torch.float16)


def stream(length=40, width=64, batch=2):
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, width, generator=generator).to(DEVICE, torch.float16)


def key_mask(length):
    return (torch.arange(length, device=DEVICE) % 3 != 0).view(1, 1, 1, length)


def enabled(module):
    enable(module, **SETTINGS)
    return module


def outside(compiled):
    """The context is entered by the caller of the compiled function."""

    def call(*args):
        with route(**SETTINGS):
            return compiled(*args)

    return call


def inside(module):
    """The context is entered in the function that is compiled."""

    def call(*args):
        with route(**SETTINGS):
            return module(*args)

    return call


def compile_each_way(way, module, backend, **options):
    options = {"fullgraph": True, "backend": backend} | options
    if way == "enabled":
        return torch.compile(enabled(module), **options)
    if way == "outside":
        return outside(torch.compile(module, **options))
    return torch.compile(inside(module), **options)


def routed(module, *args):
    """What the module answers routed, in eager mode."""
    with route(**SETTINGS, on_unsupported="raise"):
        return module(*args)


WAYS = pytest.mark.parametrize("way", ["enabled", "outside", "inside"])


@WAYS
@pytest.mark.parametrize("masked", [False, True])
def test_one_graph_that_answers_like_eager(way, masked, inductor):
    x = stream()
    inputs = (x, key_mask(40)) if masked else (x,)
    expected = routed(model(), *inputs)
    compiled = compile_each_way(way, model(), inductor)
    with sdpa_router.record() as seen:
        for _ in range(5):
            out = compiled(*inputs)
    assert (inductor.graphs, inductor.routed) == (1, 2)
    assert [(record["backend"], record["phase"], record["count"]) for record in seen.records] == [("int8", "trace", 2)]
    assert testing.relative_error(out, expected) < testing.BUDGET.sdpa
    assert not torch.equal(out, model()(*inputs))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("masked", [False, True])
def test_case_16_head_dims(head_dim, masked, inductor):
    x = stream(width=2 * head_dim)
    inputs = (x, key_mask(40)) if masked else (x,)
    module = model(depth=1, head_dim=head_dim)
    expected = routed(module, *inputs)
    out = torch.compile(enabled(module), fullgraph=True, backend=inductor)(*inputs)
    assert (inductor.graphs, inductor.routed) == (1, 1)
    assert testing.relative_error(out, expected) < testing.BUDGET.sdpa


@WAYS
@pytest.mark.parametrize("masked", [False, True])
def test_five_lengths_make_two_graphs_at_most(way, masked, inductor):
    module = model(depth=1)
    expected = {length: routed(module, stream(length), key_mask(length) if masked else None) for length in LENGTHS}
    compiled = compile_each_way(way, module, inductor)
    for length in LENGTHS * 2:
        out = compiled(stream(length), key_mask(length) if masked else None)
        assert testing.relative_error(out, expected[length]) < testing.BUDGET.sdpa, length
    assert inductor.graphs <= 2


def test_calls_that_fall_back_are_one_graph_too(inductor):
    module = model().float()
    native = torch.compile(model().float(), fullgraph=True)(stream().float())
    compiled = torch.compile(enabled(module), fullgraph=True, backend=inductor)
    with sdpa_router.record() as seen:
        for length in LENGTHS:
            compiled(stream(length).float())
        out = compiled(stream().float())
    assert inductor.graphs <= 2
    assert inductor.routed == 0
    assert {tuple(record["reasons"]) for record in seen.records} == {("dtype",)}
    assert testing.relative_error(out, native) < 1e-6


def test_changed_settings_recompile_once(inductor):
    module, x = model(), stream()
    compiled = torch.compile(enabled(module), fullgraph=True, backend=inductor)
    graphs = []

    def call():
        compiled(x)
        graphs.append(inductor.graphs)

    call()
    enable(module, min_kv=10**6, log=False)
    call()
    call()
    enable(module, **SETTINGS)  # equal to the first ones, whose graph is still there
    call()
    disable(module)
    call()
    call()
    enable(module, **SETTINGS)
    call()
    assert graphs == [1, 2, 2, 2, 3, 3, 4 if BY_METHOD else 3]
    assert inductor.routed == (4 if BY_METHOD else 2)


def test_equal_settings_share_a_graph_and_the_outside_is_native(inductor):
    module, x = model(), stream()
    compiled = torch.compile(module, fullgraph=True, backend=inductor)
    native = compiled(x)
    for _ in range(3):
        with route(**SETTINGS):
            inner = compiled(x)
        with route(log=False, min_kv=1):
            assert torch.equal(compiled(x), inner)
        assert torch.equal(compiled(x), native)
    assert (inductor.graphs, inductor.routed) == (2, 2)
    assert not torch.equal(inner, native)


def test_regional_compilation_of_an_enabled_model(inductor):
    """Blocks compiled by hand, one by one, as compile_repeated_blocks() does: they share one graph."""
    module, x = model(depth=4), stream()
    expected = routed(module, x)
    for block in module.blocks:
        block.compile(fullgraph=True, backend=inductor)
    enable(module, **SETTINGS)
    for length in LENGTHS:
        module(stream(length))
    out = module(x)
    assert inductor.graphs <= 2
    assert inductor.routed == inductor.graphs
    assert testing.relative_error(out, expected) < testing.BUDGET.sdpa
    disable(module)
    graphs = inductor.graphs
    native = module(x)
    assert (inductor.graphs, inductor.routed) == (graphs + 1, graphs)
    with torch.compiler.set_stance("force_eager"):
        assert testing.relative_error(module(x), native) < testing.BUDGET.sdpa
    assert not torch.equal(native, out)


def test_regional_compilation_of_enabled_blocks(inductor):
    module, x = model(depth=4), stream()
    expected = routed(module, x)
    for block in module.blocks[1:]:
        enable(block, **SETTINGS)
    for block in module.blocks:
        block.compile(fullgraph=True, backend=inductor)
    with sdpa_router.record() as seen:
        out = module(x)
        module(x)
    # The first block, native; the others; the first once more, when tracing them has put the router in place for good.
    graphs = 5 if BY_METHOD else 3
    assert inductor.graphs == graphs
    module(x)
    assert inductor.graphs == graphs
    assert {record["backend"] for record in seen.records} == {"int8"}
    assert testing.relative_error(out, expected) < BUDGET


def test_compile_repeated_blocks_of_diffusers(inductor):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12),
    ).eval().to(DEVICE, torch.float16)  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 48, 4),
        "encoder_hidden_states": torch.randn(1, 16, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
    }
    inputs = {name: value.to(DEVICE, torch.float16) for name, value in inputs.items()}
    inputs |= {"txt_ids": torch.zeros(16, 3, device=DEVICE), "img_ids": torch.zeros(48, 3, device=DEVICE)}
    expected = routed(functools.partial(transformer, **inputs)).sample
    transformer.compile_repeated_blocks(fullgraph=True, backend=inductor)
    native = transformer(**inputs).sample
    graphs = inductor.graphs
    enable(transformer, **SETTINGS)
    for _ in range(3):
        out = transformer(**inputs).sample
    # Two kinds of block, one of them in two memory layouts; routed there are as many again, or fewer general ones.
    assert graphs <= 3
    assert 2 <= inductor.routed <= graphs
    assert inductor.graphs == graphs + inductor.routed
    assert testing.relative_error(out, expected) < testing.BUDGET.sdpa
    disable(transformer)
    assert torch.equal(transformer(**inputs).sample, native)
    assert inductor.graphs == graphs + inductor.routed


def test_unsupported_calls_raise_under_compile():
    module = model().float()
    enable(module, on_unsupported="raise", **SETTINGS)
    # Torch 2.7 refuses any break inside of the context of an enabled module, with words of its own.
    with pytest.raises(Exception, match=r"UnsupportedError: .*dtype|GenericContextWrappingVariable"):
        torch.compile(module, fullgraph=True)(stream().float())
    torch._dynamo.reset()
    with pytest.raises(sdpa_router.UnsupportedError, match="dtype"):
        torch.compile(module)(stream().float())


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@WAYS
def test_reduce_overhead_equals_eager(way, masked):
    module = model(head_dim=64)
    inputs = [(stream(512, width=128) + step, key_mask(512) if masked else None) for step in range(4)]
    expected = [routed(module, *each) for each in inputs]
    compiled = compile_each_way(way, module, "inductor", mode="reduce-overhead")
    for _ in range(3):  # the first calls warm up and record, later ones replay
        for each, wanted in zip(inputs, expected, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            assert testing.relative_error(compiled(*each), wanted) < testing.BUDGET.sdpa


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_graph_replays_what_it_captured(masked):
    """Replaying on new values in the same buffers gives what eager mode gives for them, to the bit."""
    module = model(head_dim=64)
    enable(module, **SETTINGS)
    x, mask = stream(512, width=128), key_mask(512) if masked else None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            module(x, mask)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with sdpa_router.record() as seen, torch.cuda.graph(graph):
        out = module(x, mask)
    assert {record["backend"] for record in seen.records} == {"int8"}
    for step in range(3):
        x.copy_(stream(512 + step, width=128)[:, :512])
        if masked:
            mask.copy_((torch.arange(512, device=DEVICE) % (2 + step) != 0).view(1, 1, 1, 512))
        graph.replay()
        assert torch.equal(out, module(x, mask))


@pytest.mark.gpu
def test_inductor_on_the_gpu_equals_eager_at_full_size(inductor):
    module = model(depth=2, heads=8, head_dim=128)
    x = stream(4096, width=1024, batch=1)
    expected = routed(module, x)
    out = torch.compile(enabled(module), fullgraph=True, backend=inductor)(x)
    assert (inductor.graphs, inductor.routed) == (1, 2)
    assert testing.relative_error(out, expected) < testing.BUDGET.sdpa
