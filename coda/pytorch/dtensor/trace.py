"""What a function does to the local parts of DTensors, seen by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(frozen=True)
class Number:
    """A tensor in a trace: the operands come first, then what calls return."""

    index: int


@dataclass(frozen=True)
class Call:
    """An ATen call in a trace."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Number]

    @property
    def is_local(self) -> bool:
        """Whether it works on traced tensors alone, on one rank, and has the same result each time."""
        random = torch.Tag.nondeterministic_seeded in self.target.tags
        others = any(isinstance(x, Tensor) for x in tree_leaves((self.args, self.kwargs)))
        return self.target.namespace == "aten" and not (random or others)


@dataclass(frozen=True)
class Trace:
    """What a function did to some tensors, and what it returned: ``value``, and with numbers for tensors ``result``;
    whether it writes an operand."""

    calls: list[Call]
    result: Any
    value: Any
    writes: bool

    @property
    def is_local(self) -> bool:
        return all(call.is_local for call in self.calls)

    def does_the_same(self, other: Trace) -> bool:
        """Whether two traces differ in nothing; sizes are compared as expressions, which adds no guard."""
        return self._comparable() == other._comparable()

    def _comparable(self) -> Any:
        calls = [(c.target, c.args, c.kwargs, c.results) for c in self.calls]
        return tree_map_only(torch.SymInt, lambda s: s.node.expr, (calls, self.result))


class _Recorder(TorchDispatchMode):
    """Records what happens to some tensors, which are known by identity. DTensors are let through: their dispatch
    comes back with the local parts."""

    def __init__(self, operands: Sequence[Tensor]):
        super().__init__()
        self.known, self.calls, self.writes = list(operands), list[Call](), False
        self.memory = {_memory(x) for x in operands}

    def numbered(self, value: Any) -> Any:
        def number(x: Tensor) -> Any:
            return next((Number(i) for i, known in enumerate(self.known) if known is x), x)

        return tree_map_only(Tensor, number, value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            self.writes = self.writes or bool(self.memory & {_memory(x) for x in _written(func, args)})
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = self.numbered((tuple(args), kwargs))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if made and any(isinstance(x, Number) for x in tree_leaves(given)):
            numbers = [Number(len(self.known) + i) for i in range(len(made))]
            self.known += made
            self.calls.append(Call(func, given[0], given[1], numbers))
        return out


def _written(func: OpOverload, args: Sequence[Any]) -> list[Tensor]:
    """The operands that a call writes in place."""
    declared = zip(func._schema.arguments, args, strict=False)
    return [x for a, x in declared if a.is_write and isinstance(x, Tensor)]


def _memory(x: Tensor) -> Any:
    return local_of(x).untyped_storage()._cdata


def local_of(value: Any) -> Any:
    """Local parts in place of DTensors, what they will be in place of those that are still communicated."""
    return tree_map_only(DTensor, lambda x: x._local_tensor, _arrived(value))


def _arrived(value: Any) -> Any:
    value = tree_map_only(AsyncCollectiveTensor, lambda x: x.elem, value)
    return tree_map_only(DTensor, _with_arrived_part, value)


def _with_arrived_part(x: DTensor) -> DTensor:
    part = _arrived(x._local_tensor)
    return x if part is x._local_tensor else DTensor(part, x._spec, requires_grad=x.requires_grad)


def traced(function: Callable[..., Any], args: Any, kwargs: Any) -> Trace:
    """Run a function on DTensors or tensors, and see what it does to the local parts."""
    args, kwargs = _arrived((args, kwargs))
    operands = [x for x in tree_leaves(local_of((args, kwargs))) if isinstance(x, Tensor)]
    recorder, cache = _Recorder(operands), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # each run makes its casts
    try:
        with (
            torch.no_grad(),
            enable_python_dispatcher(),
            operands[0].fake_mode if operands else nullcontext(),
            recorder,
        ):
            value = function(*args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(cache)
    return Trace(recorder.calls, recorder.numbered(local_of(value)), value, recorder.writes)
