"""What callers do with a compiled module: gradients of any layout, writes, views, freezing, copies, other dtypes.

Cases I, K and L, and other members of their kinds. Everything is compared with the module as it was.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coda
from tests.pytorch.models import compiled

WIDTH, INNER, CLASSES = 16, 24, 40
Use = Callable[[Callable[..., Tensor], Tensor], Tensor]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, INNER)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


def close(got: Tensor | None, want: Tensor | None) -> None:
    assert (got is None) == (want is None)
    if got is not None:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def agree(use: Use, model: nn.Module, x: Tensor | None = None, **options) -> None:
    """``use`` calls a module and then backward: results and gradients are the same, compiled and not."""
    x = torch.randn(3, 5, WIDTH, requires_grad=True) if x is None else x
    found = []
    for call in (model, compiled(model, **options)):
        model.zero_grad()
        x.grad = None
        y = use(call, x).detach().clone()
        found.append([y, x.grad, *(p.grad for p in model.parameters())])
    for want, got in zip(*found, strict=True):
        close(got, want)


def squares(call: Callable[..., Tensor], x: Tensor) -> Tensor:
    y = call(x)
    y.square().sum().backward()
    return y


# Gradients and writes.


def twice(call, x):
    y = call(x)
    y.square().sum().backward(retain_graph=True)
    y.sum().backward()
    return y


def accumulated(call, x):
    for i in range(3):
        y = squares(call, x * (i + 1))
    return y


def turned(call, x):
    y = call(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(*reversed(y.shape)).permute(2, 1, 0))
    return y


def expanded(call, x):
    y = call(x)
    y.backward(torch.tensor(2.0).expand(y.shape))
    return y


def written(call, x):
    y = call(x)
    y.add_(1)
    y[0].mul_(2)
    y.square().sum().backward()
    return y


@pytest.mark.parametrize("use", [twice, accumulated, turned, expanded, written])
def test_i1_gradients_of_any_layout_and_as_often_as_wanted(use):
    agree(use, Mlp())


@pytest.mark.parametrize("what", ["the operand", "a weight", "a result that the backward reads"])
def test_i1_what_the_backward_reads_is_not_written_unnoticed(what):
    model = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
    x = torch.randn(3, WIDTH, requires_grad=True) * 1
    y = compiled(model)(x)
    with torch.no_grad():
        {"the operand": x, "a weight": model[1].weight, "a result that the backward reads": y}[what].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Views(Mlp):
    def forward(self, x):
        y = super().forward(x)
        return y, y.transpose(0, 1), y[:, :2], y, y.view(-1, WIDTH), x, y.detach()


def test_i1_views_of_results_and_operands_are_returned():
    def use(call, x):
        *results, detached = call(x)
        assert not detached.requires_grad and results[5] is x
        sum((i + 1) * y.square().sum() for i, y in enumerate(results)).backward()
        return results[2]

    agree(use, Views())


# Which gradients are wanted.


@pytest.mark.parametrize("wanted", product((False, True), repeat=3))
def test_i4_parameters_are_frozen_in_all_subsets(wanted):
    model = Mlp()
    for parameter, wants in zip((model.norm.weight, model.gate.weight, model.down.weight), wanted, strict=True):
        parameter.requires_grad_(wants)
    agree(squares, model, torch.randn(3, 5, WIDTH))


def test_i4_what_is_frozen_changes_after_compiling():
    model, x = Mlp(), torch.randn(3, 5, WIDTH)
    call = compiled(model)
    for frozen, other in ((model.gate, model.down), (model.down, model.gate)):
        frozen.weight.requires_grad_(False), other.weight.requires_grad_(True)
        model.zero_grad()
        squares(call, x)
        got = other.weight.grad.clone()
        assert frozen.weight.grad is None
        model.zero_grad()
        squares(model, x)
        close(got, other.weight.grad)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(CLASSES, WIDTH), Mlp()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.tokens(ids))).flatten(0, 1).float(), ids.flatten())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_i4_a_tied_head_with_its_loss(memory, frozen):
    def use(call, ids):
        loss = call(ids)
        (loss * 3).backward(retain_graph=True)
        loss.backward()
        return loss

    model = Tied()
    model.tokens.weight.requires_grad_(not frozen)
    agree(use, model, torch.randint(CLASSES, (2, 6)), fuse_loss=memory)


# Weights.


class Sliced(nn.Module):
    """Halves of one parameter, a parameter stored the other way, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(2 * INNER, WIDTH))
        self.turned = nn.Parameter(torch.randn(WIDTH, INNER).t())
        self.register_buffer("fixed", torch.randn(WIDTH, INNER))

    def forward(self, x):
        gate, up = self.both.chunk(2)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up) + F.linear(x, self.turned), self.fixed)


class Repeated(Mlp):
    def forward(self, x):
        for _ in range(3):
            x = super().forward(x)
        return x


@pytest.mark.parametrize("model", [Sliced(), Repeated()], ids=["sliced", "repeated"])
def test_weights_that_are_slices_or_are_used_again(model):
    agree(squares, model)


def test_weights_are_those_of_the_call():
    model, x = Mlp(), torch.randn(3, 5, WIDTH)
    call = compiled(model)
    close(call(x), model(x))
    model.load_state_dict(Mlp().state_dict())
    close(call(x), model(x))
    model.gate.weight = nn.Parameter(torch.randn(INNER, WIDTH))
    close(call(x), model(x))
    model.gate.weight.data = torch.randn(INNER, WIDTH)
    close(call(x), model(x))


def test_two_models_of_one_class():
    first, second, x = Mlp(), Mlp(), torch.randn(3, 5, WIDTH)
    calls = compiled(first), compiled(second)
    for call, model in zip(calls, (first, second), strict=True):
        close(call(x), model(x))


def test_another_dtype_after_compiling():
    model, x = Mlp(), torch.randn(3, 5, WIDTH)
    call = compiled(model)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):
        model.to(dtype)
        got, want = call(x.to(dtype)), model(x.to(dtype))
        assert got.dtype is dtype
        torch.testing.assert_close(got, want, rtol=5e-2, atol=5e-2) if dtype is torch.bfloat16 else close(got, want)


# Shapes, and copies of modules.


@pytest.mark.parametrize("dynamic", [True, False])
def test_l1_operands_of_any_rank(dynamic):
    model = Mlp()
    call = compiled(model, dynamic=dynamic)
    for shape in ((3, 5), (1, 5), (0, 5), (7,), (), (2, 2, 2)):
        x = torch.randn(*shape, WIDTH, requires_grad=True)
        found = [(y := run(x), torch.autograd.grad(y.square().sum(), x)[0]) for run in (call, model)]
        for got, want in zip(*found, strict=True):
            close(got, want)


@pytest.mark.parametrize("how", ["compile", "optimize"])
def test_l4_optimized_modules_are_copied_and_stored(how):
    model, x = Mlp(), torch.randn(3, 5, WIDTH)
    if how == "compile":
        model.compile(backend="coda", options={"inductor": False})
    else:
        coda.optimize(model, x, options={"inductor": False})
    want, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        close(twin(x), want)
        with torch.no_grad():
            twin.down.bias.add_(1)
        close(twin(x), want + 1)
    close(model(x), want)
