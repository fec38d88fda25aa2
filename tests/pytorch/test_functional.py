"""coda.nn.functional against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as torch_functional

from coda.errors import CodaError
from coda.nn import functional


def agrees(function, reference, *leaves, factor=2.0):
    """Result and gradients are within twice torch's error against float64."""
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in leaves]
    wanting = [x for x in leaves if x.requires_grad]
    got = function(*leaves)
    seed = torch.randn(got.shape, dtype=torch.float64)
    mine = [got, *torch.autograd.grad(got, wanting, seed.to(got.dtype))]

    def torch_gives(dtype):
        copies = [x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x for x in leaves]
        y = reference(*copies)
        return [y, *torch.autograd.grad(y, [c for c in copies if c.requires_grad], seed.to(y.dtype))]

    for ours, eager, exact in zip(mine, torch_gives(leaves[0].dtype), torch_gives(torch.float64), strict=True):
        bound = factor * (eager.double() - exact).norm() + torch.finfo(leaves[0].dtype).eps * exact.norm()
        assert (ours.double() - exact).norm() <= bound
        assert ours.shape == exact.shape


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_linear(dtype, offset):
    torch.manual_seed(0)
    x, gamma, w, b = torch.randn(3, 5, 32), torch.randn(32), torch.randn(48, 32) / 6, torch.randn(48)

    def reference(x, gamma, w, b):
        return torch_functional.linear(torch_functional.rms_norm(x, (32,), offset + gamma, 1e-5), w, b)

    def ours(x, gamma, w, b):
        return functional.rms_norm_linear(x, gamma, w, b, eps=1e-5, offset=offset)

    agrees(ours, reference, *(t.to(dtype) for t in (x, gamma, w, b)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_swiglu(dtype):
    torch.manual_seed(0)
    x, w, v = torch.randn(2, 7, 32), torch.randn(48, 32) / 6, torch.randn(48, 32) / 6
    reference = lambda x, w, v: torch_functional.silu(x @ w.T) * (x @ v.T)  # noqa: E731
    agrees(functional.linear_swiglu, reference, *(t.to(dtype) for t in (x, w, v)))


X, W, V, B = (3, 5, 32), (48, 32), (48, 32), (48,)  # shapes
T = torch_functional
OTHERS = {
    "linear_act": (
        lambda x, w, b: functional.linear_act(x, w, b, activation="gelu_tanh"),
        lambda x, w, b: T.gelu(T.linear(x, w, b), approximate="tanh"), (X, W, B),
    ),
    "linear_act_without_bias": (
        lambda x, w: functional.linear_act(x, w, activation="silu"), lambda x, w: T.silu(x @ w.T), (X, W),
    ),
    "linear_add": (
        lambda x, w, r, b: functional.linear_add(x, w, r, b), lambda x, w, r, b: r + T.linear(x, w, b),
        (X, W, (3, 5, 48), B),
    ),
    "linear_geglu": (functional.linear_geglu, lambda x, w, v: T.gelu(x @ w.T) * (x @ v.T), (X, W, V)),
    "layer_norm_linear": (
        lambda x, g, c, w, b: functional.layer_norm_linear(x, g, c, w, b, eps=1e-5),
        lambda x, g, c, w, b: T.linear(T.layer_norm(x, (32,), g, c, 1e-5), w, b), (X, (32,), (32,), W, B),
    ),
    "layer_norm_linear_without_bias": (
        lambda x, g, w: functional.layer_norm_linear(x, g, None, w),
        lambda x, g, w: T.layer_norm(x, (32,), g) @ w.T, (X, (32,), W),
    ),
    "rms_norm_swiglu": (
        lambda x, g, w, v: functional.rms_norm_swiglu(x, g, w, v, eps=1e-6),
        lambda x, g, w, v: T.silu((n := T.rms_norm(x, (32,), g, 1e-6)) @ w.T) * (n @ v.T), (X, (32,), W, V),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_others(name, dtype):
    torch.manual_seed(0)
    ours, reference, shapes = OTHERS[name]
    leaves = [torch.randn(s) / (6 if s == W else 1) for s in shapes]
    agrees(ours, reference, *(x.to(dtype) for x in leaves))


def test_under_autocast():
    x, w, v, g = torch.randn(4, 32), torch.randn(48, 32), torch.randn(48, 32), torch.randn(32)
    want = functional.rms_norm_swiglu(x.bfloat16(), g, w.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(functional.rms_norm_swiglu(x, g, w, v), want)


def test_what_does_not_fit_is_refused():
    x, w = torch.randn(4, 32), torch.randn(48, 32)
    with pytest.raises(CodaError, match=r"no activation is called 'gelu_tan'\n.*did you mean 'gelu_tanh'"):
        functional.linear_act(x, w, activation="gelu_tan")
    with pytest.raises(CodaError, match=r"the residual is \[4, 32\], the product \[4, 48\]"):
        functional.linear_add(x, w, torch.randn(4, 32))
    with pytest.raises(CodaError, match=r"the weight \[48, 31\] takes 31"):
        functional.linear_swiglu(x, w, torch.randn(48, 31))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_linear_cross_entropy(dtype, reduction):
    torch.manual_seed(0)
    x, w, target = torch.randn(9, 32), torch.randn(50, 32) / 6, torch.randint(0, 50, (9,))
    target[3] = -100

    def reference(x, w, target):
        logits = x @ w.T
        logits = logits if x.dtype is torch.float64 else logits.float()
        return torch_functional.cross_entropy(logits, target, reduction=reduction)

    def ours(x, w, target):
        return functional.linear_cross_entropy(x, w, target, reduction=reduction)

    agrees(ours, reference, x.to(dtype), w.to(dtype), target)


def test_h2_all_labels_ignored():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    loss = functional.linear_cross_entropy(x, w, torch.full((4,), -100))
    assert loss.isnan()
    assert all(not g.any() for g in torch.autograd.grad(loss, (x, w)))


def test_o1_a_flat_shard_is_refused():
    with pytest.raises(CodaError, match=r"1 dims, not a matrix\n.*under FSDP"):
        functional.linear_swiglu(torch.randn(2, 8), torch.randn(48), torch.randn(48))


def test_mixed_dtypes_are_refused():
    with pytest.raises(CodaError, match=r"'w_up' is torch.float32, the operand torch.bfloat16"):
        functional.linear_swiglu(torch.randn(2, 8).bfloat16(), torch.randn(4, 8).bfloat16(), torch.randn(4, 8))


def test_f4_the_norm_weight_may_have_another_dtype():
    y = functional.rms_norm_linear(torch.randn(2, 8).bfloat16(), torch.randn(8), torch.randn(4, 8).bfloat16())
    assert y.dtype is torch.bfloat16


def test_inside_torch_compile():
    x, w, v = torch.randn(4, 32, requires_grad=True), torch.randn(48, 32), torch.randn(48, 32)
    call = torch.compile(lambda x: functional.linear_swiglu(x, w, v) * 2, backend="aot_eager", fullgraph=True)
    want = functional.linear_swiglu(x, w, v) * 2
    torch.testing.assert_close(call(x), want)
    for a, b in zip(torch.autograd.grad(call(x).sum(), x), torch.autograd.grad(want.sum(), x), strict=True):
        torch.testing.assert_close(a, b)
