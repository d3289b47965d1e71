"""route() and enable(): who is routed, and what is left behind."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import sdpa_router
from sdpa_router import UnsupportedError, disable, enable, route, stats

X = torch.randn(1, 2, 8, 16)


@pytest.fixture(autouse=True)
def native():
    """Torch's own function, which every test must leave in place."""
    before = F.scaled_dot_product_attention
    sdpa_router.reset_stats()
    yield before
    assert F.scaled_dot_product_attention is before


def attend(x=X):
    return F.scaled_dot_product_attention(x, x, x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, *, times=1):
        """Attend."""
        return attend(x) * self.scale.detach() * times


def calls():
    return stats()["calls"]


def test_only_calls_inside_are_routed(native):
    expected = attend()
    with route():
        assert F.scaled_dot_product_attention is not native
        assert torch.equal(attend(), expected)
    attend()
    assert calls() == 1


def test_an_exception_restores(native):
    with pytest.raises(KeyError), route():
        raise KeyError
    assert F.scaled_dot_product_attention is native
    attend()
    assert calls() == 0


def test_the_replacement_looks_like_sdpa():
    with route():
        signature = inspect.signature(F.scaled_dot_product_attention)
        assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
    assert list(signature.parameters) == [
        *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    ]


def test_nested_contexts_take_the_inner_settings_and_give_back_the_outer():
    with route(log=False):
        with route(on_unsupported="raise"):
            with pytest.raises(UnsupportedError):
                attend()
            with route():
                attend()
        attend()
    assert calls() == 3


def test_one_context_can_be_entered_again_and_again(native):
    context = route()
    with context, context:
        with context:
            attend()
        attend()
    with context:
        attend()
    assert F.scaled_dot_product_attention is native
    assert calls() == 3


def test_one_context_in_many_threads():
    context, barrier, seen = route(), threading.Barrier(4), []

    def work(routed):
        barrier.wait()
        for _ in range(50):
            if routed:
                with context:
                    attend()
            else:
                attend()
        seen.append(sdpa_router.settings.active_name())

    threads = [threading.Thread(daemon=True, target=work, args=(index % 2 == 0,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls() == 100
    assert seen == ["off"] * 4


def test_other_threads_are_not_routed(native):
    inside, done, found = threading.Event(), threading.Event(), []

    def work():
        with route():
            inside.set()
            done.wait()
            found.append(F.scaled_dot_product_attention)

    thread = threading.Thread(daemon=True, target=work)
    thread.start()
    inside.wait()
    attend()
    with route():
        attend()
    attend()
    assert F.scaled_dot_product_attention is not native, "the other thread still needs it"
    done.set()
    thread.join()
    assert calls() == 1
    assert found[0] is not native


def test_as_a_decorator():
    @route(on_unsupported="raise")
    def require(x):
        """Docstring."""
        return attend(x)

    with pytest.raises(UnsupportedError):
        require(X)
    assert require.__doc__ == "Docstring."
    attend()
    assert calls() == 1


def test_a_decorator_refuses_what_it_can_not_surround():
    def generator():
        yield

    async def coroutine():
        pass

    async def steps():
        yield

    class Callable:
        def __call__(self):
            yield

    functions = (
        generator,
        coroutine,
        steps,
        Callable,
        Callable(),
        functools.partial(steps),
        staticmethod(generator),
        3,
    )
    for function in functions:
        with pytest.raises(TypeError, match="plain functions"):
            route()(function)


def test_a_generator_that_is_closed_early_restores(native):
    def generator():
        with route():
            yield attend()

    steps = generator()
    next(steps)
    steps.close()
    assert F.scaled_dot_product_attention is native
    assert calls() == 1


@pytest.mark.parametrize("enter", [route, functools.partial(enable, nn.Identity())])
def test_settings_are_checked(enter):
    with pytest.raises(ValueError, match="on_unsupported is 'x'; accepted: fallback, warn, raise"):
        enter(on_unsupported="x")
    with pytest.raises(TypeError):
        enter(unknown=1)


def test_early_bound_references_are_beyond_reach(native):
    with route():
        native(X, X, X)
        inside = F.scaled_dot_product_attention
    inside(X, X, X)
    assert calls() == 0


# Somebody else's patches


FORMS = {
    "by name": ((), {"attn_mask": None, "dropout_p": 0.0, "is_causal": True}),
    "scale": ((), {"scale": 0.3}),
    "groups": ((), {"enable_gqa": True}),
    "by place": ((None, 0.0, True), {}),
    "mask": ((torch.zeros(8, 8),), {}),
    "nothing more": ((), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_foreign_function_gets_the_arguments_as_they_were_given(form, monkeypatch):
    seen = []

    def theirs(*args, **kwargs):
        seen.append((args, kwargs))
        return args[0]

    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    tensors, (rest, named) = torch.randn(3, 1, 2, 8, 16).unbind(), FORMS[form]
    with route(min_kv=10**9):
        for _ in range(2):
            assert F.scaled_dot_product_attention(*tensors, *rest, **named) is tensors[0]
    assert all(list(map(id, args)) == list(map(id, (*tensors, *rest))) for args, _ in seen)
    assert [kwargs for _, kwargs in seen] == [named] * 2


@pytest.mark.parametrize("form", FORMS)
def test_torchs_function_answers_alike_however_it_is_called(form):
    query, key, value = torch.randn(3, 1, 4, 8, 16).unbind()
    tensors = (query, key[:, :2], value[:, :2]) if form == "groups" else (query, key, value)
    rest, named = FORMS[form]
    expected = F.scaled_dot_product_attention(*tensors, *rest, **named)
    with route(min_kv=10**9):
        for _ in range(2):
            assert torch.equal(F.scaled_dot_product_attention(*tensors, *rest, **named), expected)


def foreign(previous):
    def patched(*args, **kwargs):
        patched.calls += 1
        return previous(*args, **kwargs)

    patched.calls = 0
    return patched


def test_a_patch_that_was_there_before_answers_and_survives(monkeypatch):
    theirs = foreign(F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with route():
        attend()
        sdpa_router.scaled_dot_product_attention(X, X, X)
    assert F.scaled_dot_product_attention is theirs
    assert (theirs.calls, calls()) == (2, 2)
    monkeypatch.undo()


def test_a_patch_made_meanwhile_is_left_alone_with_one_warning(native):
    context = route()
    context.__enter__()
    F.scaled_dot_product_attention = theirs = foreign(F.scaled_dot_product_attention)
    attend()
    assert (theirs.calls, calls()) == (1, 1)
    with pytest.warns(UserWarning, match="left there"):
        context.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is theirs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend()
        with route():  # over theirs, which still calls our first replacement: counted once
            attend()
    assert (theirs.calls, calls()) == (3, 2)
    assert F.scaled_dot_product_attention is theirs
    F.scaled_dot_product_attention = native


def test_a_patch_made_and_undone_between_contexts_counts_each_call_once(native):
    with route():
        theirs = foreign(F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = theirs
        with route():
            attend()
            sdpa_router.scaled_dot_product_attention(X, X, X)
        attend()
        assert (theirs.calls, calls()) == (3, 3)
        F.scaled_dot_product_attention = native
        with route():
            attend()
        attend()
    assert (theirs.calls, calls()) == (3, 5)
    assert F.scaled_dot_product_attention is native


def test_a_replacement_that_somebody_put_back_is_adopted(native):
    with route():
        ours = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = ours
    attend()
    with route():
        assert F.scaled_dot_product_attention is ours
        attend()
    assert F.scaled_dot_product_attention is native
    assert calls() == 1


class Late(torch.Tensor):
    """Asks, as torch's CausalBias does, whether it is being called for SDPA."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return "asked"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_recognise_the_call_routed_or_passed_through():
    late = X.as_subclass(Late)
    with route():
        assert F.scaled_dot_product_attention(late, X, X) == "asked"
        assert F.scaled_dot_product_attention(X, X, X, attn_mask=late) == "asked"
        assert sdpa_router.scaled_dot_product_attention(X, X, X, attn_mask=late) == "asked"
        with PassingThrough():
            assert F.scaled_dot_product_attention(X, X, X, attn_mask=late) == "asked"
    assert calls() == 3


def test_modes_recognise_the_call_routed_or_passed_through():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.scaled_dot_product_attention:
                return "asked"
            return func(*args, **(kwargs or {}))

    with route():
        with Mode():
            assert attend() == "asked"
            with PassingThrough():
                assert attend() == "asked"
        with torch.device("cpu"):
            assert torch.is_tensor(attend())
    assert calls() == 2


class Watching(TorchFunctionMode):
    """Answer every call of SDPA, and let the others pass."""

    def __init__(self, answer=None):
        super().__init__()
        self.answer, self.seen = answer, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.seen.append(args)
            if self.answer is not None:
                return self.answer
        return func(*args, **(kwargs or {}))


def test_a_mode_gets_the_calls_that_int8_would_have_answered(device):
    half = X.half().to(device)
    with route(min_kv=1):
        routed = attend(half)
        for _ in range(2):
            with Watching("asked") as mode:
                assert attend(half) == "asked"
                assert sdpa_router.scaled_dot_product_attention(half, half, half) == "asked"
            assert len(mode.seen) == 2
        with Watching() as mode, Watching() as inner:
            assert torch.is_tensor(attend(half))
            assert len(mode.seen) == len(inner.seen) == 1
        with torch.device("cpu"):
            assert torch.equal(attend(half), routed)
    assert stats()["routes"] == {"int8": 2, "sdpa": 5}
    assert stats()["reasons"] == {"functorch": 5}
    refused = pytest.raises(UnsupportedError, match="TorchFunctionMode")
    with refused, route(min_kv=1, on_unsupported="raise"), Watching():
        attend(half)


class PassingThrough:
    """What another thread sees while this one is inside route()."""

    def __enter__(self):
        self.name = sdpa_router.settings.active_name()
        sdpa_router.settings.activate(sdpa_router.settings.OFF)

    def __exit__(self, *error):
        sdpa_router.settings.activate(self.name)


# Modules


def test_enable_routes_one_module_and_no_other(native):
    one, other = Attention(), Attention()
    enable(one)
    assert torch.equal(one(X), other(X))
    assert calls() == 1
    assert F.scaled_dot_product_attention is native
    disable(one)
    one(X)
    assert calls() == 1


def test_nothing_leaks_after_an_exception(native):
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError

    broken = Broken()
    enable(broken)
    with pytest.raises(KeyError):
        broken(X)
    assert F.scaled_dot_product_attention is native
    Attention()(X)
    assert calls() == 0


def test_disable_restores_exactly():
    module = Attention()
    before = dict(module.__dict__)
    enable(module)
    disable(module)
    assert module.__dict__ == before
    module.forward = own = functools.partial(Attention.forward, module)
    enable(module)
    module(X)
    disable(module)
    assert module.forward is own
    disable(module)
    assert module.forward is own
    assert calls() == 1


def test_enabling_again_replaces_the_settings():
    module = Attention()
    enable(module, on_unsupported="raise")
    enable(module)
    module(X)
    enable(module, on_unsupported="raise")
    with pytest.raises(UnsupportedError):
        module(X)
    disable(module)
    module(X)
    assert calls() == 2


def test_the_forward_looks_the_same():
    module = Attention()
    signature = inspect.signature(module.forward)
    enable(module)
    assert inspect.signature(module.forward) == signature
    assert module.forward.__doc__ == "Attend."
    assert torch.equal(module(X, times=2), attend() * 2)
    assert list(module.state_dict()) == ["scale"]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_runs_its_own_weights_and_is_disabled_by_itself(duplicate):
    module = Attention()
    enable(module, min_kv=3)
    twin = duplicate(module)
    with torch.no_grad():
        twin.scale.fill_(2)
    assert torch.equal(twin(X), module(X) * 2)
    assert calls() == 2
    disable(twin)
    twin(X)
    module(X)
    assert calls() == 3


def test_a_wrapper_put_over_an_enabled_forward_stays():
    module = Attention()
    enable(module)
    ours = module.forward
    module.forward = theirs = lambda x: ours(x)
    module(X)
    disable(module)
    assert module.forward is theirs
    module(X)
    assert calls() == 1
    enable(module)
    module(X)
    assert calls() == 2


def test_enabling_again_after_somebody_replaced_the_forward():
    """As hooks of accelerate do: they wrap a forward, and put back the one that they had found."""
    module = Attention()
    found = module.forward
    module.forward = functools.partial(lambda module, x: found(x), module)
    enable(module)
    module.forward = found
    module(X)
    assert calls() == 0
    enable(module)
    module(X)
    assert calls() == 1
    ours = module.forward
    module.forward = theirs = lambda x: ours(x)
    enable(module, on_unsupported="raise")
    with pytest.raises(UnsupportedError):
        module(X)
    assert calls() == 2
    disable(module)
    assert module.forward is theirs
    module(X)
    assert calls() == 2


class Pipeline:
    def __init__(self):
        self.transformer, self.vae, self.scheduler = Attention(), nn.Linear(1, 1), None


@pytest.mark.parametrize("function", [enable, disable, sdpa_router.audit])
def test_of_a_pipeline_its_modules_are_named(function):
    with pytest.raises(TypeError, match=r"given Pipeline, whose modules are \.transformer, \.vae$"):
        function(Pipeline())


class Plain(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
def test_enable_refuses_what_can_not_attend():
    layers = [nn.Linear(1, 1), nn.Sequential(nn.Conv1d(1, 1, 1), nn.ModuleList([nn.ReLU()]))]
    graphs = [torch.jit.script(Plain()), torch.jit.trace(Plain(), X), torch.export.export(Plain(), (X,)).module()]
    for module in layers + graphs:
        with pytest.raises(
            ValueError, match=r"given \w+, which can't make an attention call that Python sees; accepted"
        ):
            enable(module)
    linear = nn.Linear(16, 16)
    linear.forward = attend
    attending = [nn.MultiheadAttention(2, 1), nn.Transformer(2, 1, 1, 1)]
    for module in (*attending, nn.Sequential(linear), nn.ModuleList([linear])):
        enable(module)
        disable(module)


def test_an_inner_module_may_have_settings_of_its_own():
    outer = nn.Sequential(Attention(), Attention())
    enable(outer)
    enable(outer[1], on_unsupported="raise")
    with pytest.raises(UnsupportedError):
        outer(X)
    assert calls() == 2
    attend()
    assert calls() == 2


def test_train_mode_multihead_attention_is_reached():
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    enable(module)
    module(X[0], X[0], X[0], need_weights=False)
    assert calls() == 1
    assert stats()["reasons"]["requires_grad"] == 1


@pytest.mark.parametrize("thing", [None, "model", Attention])
def test_enable_takes_modules(thing):
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        enable(thing)


@pytest.mark.parametrize("enter", ["route", "enable"])
def test_the_kill_switch_is_read_on_entering(monkeypatch, enter):
    module = Attention()
    enable(module)

    def run():
        if enter == "route":
            with route():
                attend()
        else:
            module(X)

    run()
    monkeypatch.setenv("SDPA_ROUTER", "0")
    run()
    assert stats()["reasons"]["disabled"] == 1
    monkeypatch.delenv("SDPA_ROUTER")
    run()
    assert stats()["reasons"]["disabled"] == 1
    assert calls() == 3


@pytest.mark.parametrize("value", ["0", "off", "False", "NO", " false "])
def test_values_that_switch_routing_off(monkeypatch, value):
    monkeypatch.setenv("SDPA_ROUTER", value)
    with route(log=False):
        attend()
    assert stats()["reasons"]["disabled"] == 1
    assert f"SDPA_ROUTER={value}" in stats()["signatures"][0]["detail"]


@pytest.mark.parametrize("value", ["", "1", "on", "true"])
def test_values_that_do_not(monkeypatch, value):
    monkeypatch.setenv("SDPA_ROUTER", value)
    with route(log=False):
        attend()
    assert "disabled" not in stats()["reasons"]


@pytest.mark.parametrize("thing", [3, None, "model", Attention])
def test_disable_takes_modules(thing):
    with pytest.raises(TypeError, match=r"disable\(\) takes a torch\.nn\.Module"):
        disable(thing)


@pytest.mark.parametrize("enter", [route, functools.partial(enable, nn.Identity())])
def test_a_skip_that_can_not_be_hashed_is_named(enter):
    class Skip:
        __hash__ = None

        def __call__(self, call):
            return False

    with pytest.raises(TypeError, match=r"skip is .*; accepted: None or a function of a Call that is hashable"):
        enter(skip=Skip())


def test_enable_refuses_a_forward_that_runs_later():
    class Steps(nn.Module):
        def forward(self, x):
            yield attend(x)

    with pytest.raises(TypeError, match="plain function"):
        enable(Steps())


def test_a_shallow_copy_has_a_switch_of_its_own_once_it_is_used():
    module = Attention()
    enable(module)
    twin = copy.copy(module)
    disable(twin)
    assert "forward" not in twin.__dict__
    twin(X)
    module(X)
    assert calls() == 1
    twin = copy.copy(module)
    enable(twin, min_kv=3)
    disable(module)
    module(X)
    assert calls() == 1
    twin(X)
    assert calls() == 2
    disable(twin)


def skip_none(call):
    return False


def test_an_enabled_module_with_a_named_skip_can_be_pickled():
    module = Attention()
    enable(module, skip=skip_none)
    twin = pickle.loads(pickle.dumps(module))
    twin(X)
    assert calls() == 1


class _Accelerate:
    """What accelerate's add_hook_to_module() and remove_hook_from_module() do to a module."""

    @staticmethod
    def add(module):
        module._hf_hook, module._old_forward = object(), module.forward
        new_forward = functools.partial(lambda hooked, *args: hooked._old_forward(*args), module)
        module.forward = functools.update_wrapper(new_forward, module._old_forward)

    @staticmethod
    def remove(module):
        module.forward = module._old_forward
        del module._hf_hook, module._old_forward


class _Diffusers:
    """What diffusers' HookRegistry does to a module, with one hook."""

    @staticmethod
    def add(module, own=False):
        found = module.forward
        reference = types.SimpleNamespace(forward=found, original_forward=found if own else None)
        if own:
            reference.forward = lambda *args: reference.original_forward(*args)
        module._diffusers_hook = types.SimpleNamespace(_module_ref=module, _fn_refs=[reference])
        new_forward = functools.partial(lambda hooked, *args: reference.forward(*args), module)
        module.forward = functools.update_wrapper(new_forward, found)

    @staticmethod
    def remove(module):
        reference = module._diffusers_hook._fn_refs.pop()
        module.forward = reference.original_forward or reference.forward


class _DiffusersOwn(_Diffusers):
    @staticmethod
    def add(module):
        _Diffusers.add(module, own=True)


@pytest.mark.parametrize("hooks", [_Accelerate, _Diffusers, _DiffusersOwn])
@pytest.mark.parametrize("hooked_first", [True, False])
def test_hooks_that_put_back_the_forward_they_found_take_nothing_with_them(hooks, hooked_first):
    module = Attention()

    def routed():
        before = calls()
        module(X)
        return calls() - before == 1

    if hooked_first:
        hooks.add(module)
        enable(module)
    else:
        enable(module)
        hooks.add(module)
    assert routed()
    hooks.remove(module)  # as diffusers does after each run of a pipeline whose models are offloaded
    assert routed()
    hooks.add(module)
    assert routed()
    enable(module, on_unsupported="raise")
    with pytest.raises(UnsupportedError):
        module(X)
    disable(module)
    assert not routed()
    hooks.remove(module)
    assert not routed()
    assert module.forward.__func__ is Attention.forward
