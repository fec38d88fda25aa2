"""What opaque functions do: the torch functions behind the externs of programs.

    @coda.register("scan")
    def scan(x, a): ...

A function is called with operands by the names that the extern declares, each with one dim for each declared dim, and
returns one tensor for each result (a tuple where there are several). Where no NAME_backward is registered, the
gradients are those that torch's autograd finds for NAME.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coda.errors import CodaError, did_you_mean
from coda.ops.calls import Extern

SUFFIX = "_backward"
Function = Callable[..., Any]
_REGISTERED: dict[str, Function] = {}


def register(name: str, function: Function | None = None) -> Any:
    """Say what an extern does, as a call or as a decorator; a name that is known already gets a new meaning."""
    if function is None:
        return lambda decorated: register(name, decorated)
    _REGISTERED[name] = function
    return function


def call(callee: Extern, operands: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """The results of an opaque function. ``shapes`` are those that they must have, up to grouping of dims.

    Raises CodaError where nothing is registered under the name, or it returns something else than was declared.
    """
    named = {name: x for (name, _), x in zip(callee.params, operands, strict=True)}
    returned = _function(callee)(**named)
    results = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    if len(results) != len(shapes):
        raise CodaError.of(f"extern '{callee.name}' returned {len(results)} tensors, declared are {len(shapes)}")
    for (name, type_), x, shape in zip(callee.results, results, shapes, strict=True):
        if x.numel() != _product(shape):
            raise CodaError.of(
                f"extern '{callee.name}' returned '{name}' of shape {list(x.shape)}; declared is {type_}, "
                f"here {list(shape)}"
            )
    return tuple(x.reshape(tuple(shape)) for x, shape in zip(results, shapes, strict=True))


def _function(callee: Extern) -> Function:
    if callee.name in _REGISTERED:
        return _REGISTERED[callee.name]
    of = callee.name.removesuffix(SUFFIX)
    if of != callee.name and of in _REGISTERED:
        return lambda **operands: _gradients(callee, _REGISTERED[of], operands)
    hint = did_you_mean(callee.name, set(_REGISTERED)) or f"coda.register('{callee.name}', function)"
    raise CodaError.of(f"nothing is registered for extern '{callee.name}'", hint)


def _gradients(callee: Extern, forward: Function, operands: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The results d_NAME of a derivative, by autograd through the function itself."""
    names = list(inspect.signature(forward).parameters)
    seeds = [x for name, x in operands.items() if name.startswith("d_") and name not in names]
    wanted = [name.removeprefix("d_") for name, _ in callee.results]
    if len(seeds) != 1 or not set(names) <= operands.keys():
        raise CodaError.of(
            f"extern '{callee.name}' cannot be computed from '{callee.name.removesuffix(SUFFIX)}', which must have "
            "one result, and all operands among those of its derivative",
            f"coda.register('{callee.name}', function)",
        )
    with torch.enable_grad():
        leaves = {name: operands[name].detach().requires_grad_(name in wanted) for name in names}
        result = forward(**leaves)
        return torch.autograd.grad(result, [leaves[name] for name in wanted], seeds[0].reshape(result.shape))


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


# What ships with coda. Queries [B, H, T, d] in groups that share one of the G heads of keys and values.


@register("attention")
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q @ k.T / sqrt(d)) @ v, as [B, T, H, d]."""
    return _attention(q, k, v, False)


@register("causal_attention")
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As ``attention``, each position sees itself and those before."""
    return _attention(q, k, v, True)


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return result.transpose(1, 2)
