"""From the arguments of a Python call to operands in the shapes a program declares.

A call may pass operands by position or name, and with the leading dims of ordinary PyTorch code: where the program
says ``x: bf16[M, D]``, a tensor [B, T, D] is taken as B*T rows, and outputs whose first dim is M come back as
[B, T, ...]. The same holds for a group: ``h: bf16[(B T), D]`` may be given as [B, T, D], which also tells B from T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from coda.errors import CodaError, did_you_mean
from coda.ir import Dim, Param, Program
from coda.runtime.binding import bind, check_operands, is_broadcast_vector, type_shape

Shape = tuple[int, ...]


@dataclass
class Operands:
    """Operands by parameter name, each with one dim for each declared dim, and what the call's shapes told.

    ``lead`` maps a first dim of the program to the leading sizes it was given as.
    """

    values: dict[str, Any]
    sizes: dict[str, int]
    lead: dict[Dim, Shape] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.values.items() if isinstance(x, Tensor)}


def keywords(program: Program, out: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The keyword ``out`` of a call, and the others: of a program with a parameter ``out`` it is one of these."""
    if out is None or all(p.name != "out" for p in program.params):
        return out, given
    return None, {**given, "out": out}


def named(program: Program, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter name, in parameter order; None for those not given."""
    names = [p.name for p in program.params]
    if len(args) > len(names):
        raise CodaError.of(
            f"program '{program.name}' takes {len(names)} operands ({', '.join(names)}), got {len(args)}"
        )
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise CodaError.of(f"program '{program.name}' has no parameter '{name}'", did_you_mean(name, set(names)))
        if name in given:
            raise CodaError.of(f"operand '{name}' is given twice, by position and by name")
        given[name] = value
    return {name: given.get(name) for name in names}


def resolve(program: Program, values: Mapping[str, Any], dims: Mapping[str, int]) -> Operands:
    """Check operands, flatten leading dims and solve the sizes. No tensor is copied unless a leading dim cannot be
    flattened as a view. Raises CodaError naming the operand at fault."""
    check_operands(program, values)
    lead: dict[Dim, Shape] = {}
    flat: dict[str, Any] = {}
    opened: dict[str, Shape | None] = {}
    for param in program.params:
        value = values[param.name]
        if not isinstance(value, Tensor):
            flat[param.name], opened[param.name] = value, None if value is None else ()
            continue
        flat[param.name], opened[param.name] = _flatten(program, param, value, lead)
    sizes = bind(program, opened, dims)
    for name, value in flat.items():
        if isinstance(value, Tensor):
            flat[name] = _declared(program.param(name), value, sizes, values[name])
    return Operands(flat, sizes, lead)


def _flatten(program: Program, param: Param, x: Tensor, lead: dict[Dim, Shape]) -> tuple[Tensor, Shape]:
    """The tensor without extra leading dims, and the shape that ``bind`` is to see."""
    dims = param.type.dims
    extra = x.dim() - len(dims)
    if not dims or extra <= 0 or param.type.partial or is_broadcast_vector(param, x.shape):
        return x, tuple(x.shape)
    first, sizes = dims[0], tuple(x.shape[: extra + 1])
    if x.dim() == len(param.type.axes):  # every group is opened: the reference and the kernel both see it flattened
        if len(first) == len(sizes):
            _remember(param, first, sizes, lead)
        return x, tuple(x.shape)
    if all(o.type.dims[:1] != (first,) for o in program.outputs):
        return x, tuple(x.shape)  # not a dim of rows: `bind` reports the rank
    _remember(param, first, sizes, lead)
    x = x.flatten(0, extra)
    return x, tuple(x.shape)


def _remember(param: Param, first: Dim, sizes: Shape, lead: dict[Dim, Shape]) -> None:
    if lead.setdefault(first, sizes) != sizes:
        raise CodaError.of(
            f"operand '{param.name}' has leading sizes {list(sizes)}, another operand has {list(lead[first])}",
            "operands that share their rows have the same leading dims, or are given flat",
        )


def _declared(param: Param, x: Tensor, sizes: Mapping[str, int], original: Tensor) -> Tensor:
    """One dim for each declared dim; a single element stands for a whole vector with stride 0."""
    shape = type_shape(param.type, sizes)
    if is_broadcast_vector(param, x.shape):
        return x.reshape(1).expand(shape)
    declared = x if param.type.partial else x.reshape(shape)
    if param.inout and declared.data_ptr() != original.data_ptr():
        raise CodaError.of(
            f"operand '{param.name}' is accumulated into, but {list(original.shape)} with strides "
            f"{list(original.stride())} is no view of {list(shape)}",
            "pass it contiguous",
        )
    return declared


def with_defaults(program: Program, values: Mapping[str, Any]) -> dict[str, Any]:
    """The operands in parameter order, the default in the place of a scalar that was not given."""
    return {p.name: p.default if values[p.name] is None else values[p.name] for p in program.params}
