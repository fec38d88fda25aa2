"""Autocast, written out: a captured graph gets the casts that torch's autocast would make, and runs without it.

Tracing before autograd records each operation above autocast, so its casts are in no graph: only the dtypes of results
show them. Here each operation is run once more, on the fake tensors it was traced with, and what torch converts on the
way is written down. So torch's own tables decide, also those of later releases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from coda.pytorch.aten import operation

DEVICES = ("cuda", "cpu")
ATEN = torch.ops.aten
CONVERSIONS = ("to", "_to_copy", "type_as")


@dataclass(frozen=True)
class State:
    """What autocast does on each device: the dtype of products, or None where it is off."""

    dtypes: tuple[torch.dtype | None, ...] = (None,) * len(DEVICES)

    @classmethod
    def current(cls) -> State:
        return cls(tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in DEVICES))

    def entered(self, device: str, dtype: torch.dtype | None = None, enabled: bool = True, _cache: Any = None) -> State:
        """The state inside ``torch.autocast`` with these arguments."""
        new = (dtype or torch.get_autocast_dtype(device)) if enabled else None
        return State(tuple(new if d == device else old for d, old in zip(DEVICES, self.dtypes, strict=True)))

    @property
    def enabled(self) -> bool:
        return any(self.dtypes)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run what is inside with this state, and nothing remembered from one cast to the next."""
        before, cached = State.current(), torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._set()
        try:
            yield
        finally:
            before._set()
            torch.set_autocast_cache_enabled(cached)

    def _set(self) -> None:
        for device, dtype in zip(DEVICES, self.dtypes, strict=True):
            torch.set_autocast_enabled(device, dtype is not None)
            if dtype is not None:
                torch.set_autocast_dtype(device, dtype)


def enters_autocast(gm: fx.GraphModule) -> bool:
    """Whether any of a graph of Dynamo runs under autocast."""
    return State.current().enabled or any(n.target is _enter_autocast for n in gm.graph.nodes)


class Entering(TorchFunctionMode):
    """While a graph is traced: regions of autocast in it are entered. Tracing by itself only records that they are."""

    def __init__(self) -> None:
        super().__init__()
        self.outer: list[State] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _enter_autocast:
            self.outer.append(State.current())
            self.outer[-1].entered(*args)._set()
        elif function is _exit_autocast:
            self.outer.pop()._set()
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def entering() -> Iterator[None]:
    """Trace inside, whatever autocast the graph enters; the state is afterwards what it was."""
    with State.current().active(), Entering():
        yield


def write_casts(graph: fx.Graph, ambient: State) -> dict[fx.Node, State]:
    """Insert the casts that autocast would make, in place, and take its regions out. ``ambient`` is its state where the
    graph runs. Returns the state at each call of a higher-order operation, for the graphs that it runs."""
    stack, below = [ambient], dict[fx.Node, State]()
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is _enter_autocast:
            stack.append(stack[-1].entered(*node.args))
        elif node.target is _exit_autocast:
            stack.pop()
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            below[node] = stack[-1]
        elif (
            stack[-1].enabled and isinstance(node.target, torch._ops.OpOverload) and operation(node) not in CONVERSIONS
        ):
            _write_casts_of(node, stack[-1], casts)
            if node.target._schema.is_mutable:
                casts.clear()  # a cast before a write is no cast of what was written
    for target in (_exit_autocast, _enter_autocast):
        for node in graph.find_nodes(op="call_function", target=target):
            graph.erase_node(node)
    return below


def _write_casts_of(node: fx.Node, state: State, casts: dict[tuple[fx.Node, torch.dtype], fx.Node]) -> None:
    """Put casts before one operation."""
    wanted = _casts(node, state)
    operands = {a: a for a in node.all_input_nodes}
    for operand, dtype in wanted.items():
        if (operand, dtype) not in casts:
            with node.graph.inserting_before(node):
                cast = node.graph.call_function(ATEN.to.dtype, (operand, dtype))
            cast.meta["val"] = operand.meta["val"].to(dtype)
            casts[operand, dtype] = cast
        operands[operand] = casts[operand, dtype]
    if wanted:
        node.args = fx.map_arg(node.args, operands.__getitem__)
        node.kwargs = fx.map_arg(node.kwargs, operands.__getitem__)


def _casts(node: fx.Node, state: State) -> dict[fx.Node, torch.dtype]:
    """The operands that torch converts on the way into an operation, and to what."""
    fakes = {a: _constant(a) if a.op == "get_attr" else a.meta.get("val") for a in node.all_input_nodes}
    floats = {n: x for n, x in fakes.items() if isinstance(x, Tensor) and x.is_floating_point()}
    if not floats or node.target._schema.is_mutable or operation(node) in CONVERSIONS:
        return {}
    args, kwargs = fx.map_arg((node.args, node.kwargs), fakes.__getitem__)
    with state.active(), _Conversions(floats) as seen:
        result = node.target(*args, **kwargs)
    if seen.found:
        return seen.found
    with State().active():
        plain = node.target(*args, **kwargs)
    if not isinstance(result, Tensor) or result.dtype == plain.dtype:
        return {}
    return dict.fromkeys(floats, result.dtype)  # a sum that is told the dtype of its result adds up in it


def _constant(node: fx.Node) -> Any:
    """A constant of the graph as a fake tensor of its own: it was traced with another kind."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


class _Conversions(TorchDispatchMode):
    """Which of some tensors are converted, before anything else happens to them."""

    def __init__(self, tensors: dict[fx.Node, Tensor]):
        super().__init__()
        self.names = {id(x): n for n, x in tensors.items()}
        self.found: dict[fx.Node, torch.dtype] = {}
        self.converting = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        node = self.names.get(id(args[0])) if args else None
        if function is ATEN._to_copy.default and node is not None and self.converting:
            self.found[node] = result.dtype
        elif function.namespace == "aten":
            self.converting = False
        return result
