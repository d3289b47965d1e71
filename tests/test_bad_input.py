"""Whatever torch raises, a routed call raises: the same type with the same message."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sdpa_router
from sdpa_router import UnsupportedError, int8_attention, route

H = torch.randn(2, 4, 8, 16).half()
X = H.float()


def sdpa(*args, **kwargs):
    return F.scaled_dot_product_attention(*args, **kwargs)


CASES = {
    "nothing": lambda: sdpa(),
    "two arguments": lambda: sdpa(X, X),
    "unknown keyword": lambda: sdpa(X, X, X, window=3),
    "scale by position": lambda: sdpa(X, X, X, None, 0.0, False, 0.5),
    "query twice": lambda: sdpa(X, X, X, query=X),
    "missing value by keyword": lambda: sdpa(query=X, key=X),
    "list": lambda: sdpa([1.0], X, X),
    "None": lambda: sdpa(None, X, X),
    "mask list": lambda: sdpa(H, H, H, [[True] * 8] * 8),
    "array": lambda: sdpa(X.numpy(), X, X),
    "scale text": lambda: sdpa(H, H, H, scale="0.5"),
    "scale complex": lambda: sdpa(H, H, H, scale=1j),
    "scale list": lambda: sdpa(H, H, H, scale=[0.5]),
    "dropout None": lambda: sdpa(H, H, H, dropout_p=None),
    "dropout None by position": lambda: sdpa(H, H, H, None, None),
    "dropout over 1": lambda: sdpa(H, H, H, dropout_p=1.5),
    "dropout under 0": lambda: sdpa(X, X, X, dropout_p=-0.5),
    "is_causal number": lambda: sdpa(H, H, H, is_causal=1),
    "is_causal None": lambda: sdpa(H, H, H, is_causal=None),
    "is_causal tensor": lambda: sdpa(H, H, H, is_causal=torch.tensor(True)),
    "enable_gqa number": lambda: sdpa(H, H, H, enable_gqa=1),
    "one axis": lambda: sdpa(H[0, 0, 0], H[0, 0, 0], H[0, 0, 0]),
    "no axis": lambda: sdpa(H[0, 0, 0, 0], H, H),
    "mixed ranks": lambda: sdpa(H, H[0], H),
    "mixed dtypes": lambda: sdpa(H, H.bfloat16(), H),
    "integers": lambda: sdpa(H.int(), H.int(), H.int()),
    "mixed devices": lambda: sdpa(H, H.to("meta"), H),
    "head_dims": lambda: sdpa(H, H[..., :8], H),
    "lengths": lambda: sdpa(H, H, H[:, :, :5]),
    "batches": lambda: sdpa(H, torch.cat([H, H[:1]]), torch.cat([H, H[:1]])),
    "three heads for two": lambda: sdpa(H[:, :3], H[:, :2], H[:, :2]),
    "three heads for two, gqa": lambda: sdpa(H[:, :3], H[:, :2], H[:, :2], enable_gqa=True),
    "four heads for two": lambda: sdpa(H, H[:, :2], H[:, :2]),
    "mask of one axis": lambda: sdpa(H, H, H, torch.zeros(8).half()),
    "mask of five axes": lambda: sdpa(H, H, H, torch.zeros(1, 1, 1, 1, 8).half()),
    "mask of another length": lambda: sdpa(H, H, H, torch.zeros(1, 1, 1, 7).half()),
    "mask of another batch": lambda: sdpa(H, H, H, torch.zeros(3, 1, 1, 8).half()),
    "mask of other queries": lambda: sdpa(H, H, H, torch.zeros(9, 8).half()),
    "integer mask": lambda: sdpa(H, H, H, torch.zeros(1, 1, 1, 8, dtype=torch.int32)),
    "double mask": lambda: sdpa(H, H, H, torch.zeros(1, 1, 1, 8, dtype=torch.float64)),
    "bfloat16 mask": lambda: sdpa(H, H, H, torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)),
    "half mask for float": lambda: sdpa(X, X, X, torch.zeros(1, 1, 1, 8).half()),
    "sparse": lambda: sdpa(X.to_sparse(), X, X),
    "complex": lambda: sdpa(X + 0j, X + 0j, X + 0j),
}


def outcome(function):
    try:
        return function()
    except Exception as error:  # whatever torch raises
        return type(error), str(error)


@pytest.mark.parametrize("name", CASES)
def test_routed_calls_answer_or_complain_as_torch_does(name):
    expected = outcome(CASES[name])
    with route(log=False):
        found = outcome(CASES[name])
        again = outcome(CASES[name])
    if torch.is_tensor(expected):  # some torch releases take it
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(again, expected, equal_nan=True, rtol=0, atol=0)
    else:
        assert found == expected
        assert again == expected


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"attn_mask": torch.zeros(1, 1, 1, 7)}, "invalid_mask"),
        ({"attn_mask": torch.zeros(1, 1, 1, 8, dtype=torch.int32)}, "mask_dtype"),
        ({"attn_mask": torch.zeros(8, 8)}, "full_mask"),
        ({"attn_mask": "all"}, "tensor_subclass"),
        ({"scale": float("nan")}, "argument"),
        ({"scale": "1"}, "argument"),
        ({"is_causal": 1}, "argument"),
        ({"pv": None}, "pv"),
        ({"precision": "fp32"}, "precision"),
    ],
)
def test_int8_attention_refuses(arguments, code):
    with pytest.raises(UnsupportedError) as caught:
        int8_attention(H, H, H, **arguments)
    assert code in [reason.code for reason in caught.value.decision.reasons]


@pytest.mark.parametrize(
    "arguments",
    [{"is_causal": 1}, {"enable_gqa": 1}, {"scale": torch.tensor(1.0)}, {"scale": torch.tensor([1.0, 2.0])}],
)
def test_int8_attention_refuses_what_equals_an_argument_that_it_answered(device, arguments):
    tensors = tuple(torch.randn(1, 2, 8, 16, dtype=torch.float16, device=device) for _ in range(3))
    for known in ({}, {"is_causal": True}, {"enable_gqa": True}):
        int8_attention(*tensors, scale=1.0, **known)
    with pytest.raises(UnsupportedError) as caught:
        int8_attention(*tensors, **{"scale": 1.0, **arguments})
    assert [reason.code for reason in caught.value.decision.reasons] == ["argument"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: int8_attention(H, H),
        lambda: int8_attention(H, H, H, None, True),
        lambda: int8_attention(H, H, H, dropout_p=0.1),
        lambda: sdpa_router.scaled_dot_product_attention(H, H, H, None, 0.0, False, 0.5),
        lambda: route(True),
    ],
)
def test_wrong_arguments_are_type_errors(call):
    with pytest.raises(TypeError):
        call()


def test_inputs_are_never_changed(device):
    tensors = [torch.randn(1, 2, 9, 16, device=device).half() for _ in range(3)]
    mask = torch.randn(1, 1, 1, 9, device=device)
    before = [tensor.clone() for tensor in (*tensors, mask)]
    with route(min_kv=1):
        first = sdpa(*tensors, mask)
        second = sdpa(*tensors, mask)
    assert torch.equal(first, second)
    for tensor, copy in zip((*tensors, mask), before, strict=True):
        assert torch.equal(tensor, copy)


def test_nan_in_a_mask_is_nan_in_the_rows_that_see_it(device):
    q, k, v = (torch.randn(2, 1, 9, 16, device=device).half() for _ in range(3))
    for poison in (float("nan"), float("inf")):
        mask = torch.zeros(2, 1, 1, 9, device=device)
        mask[1, 0, 0, 4] = poison
        with route(min_kv=1, on_unsupported="raise"):
            out = sdpa(q, k, v, mask)
        assert out[1].isnan().all()
        assert not out[0].isnan().any()
