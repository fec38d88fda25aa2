"""Operands for tests, ``coda run`` and the tuner: fresh random values, small sizes, poisoned outputs.

Random values are never zero (a kernel that writes nothing would pass on zeros) and are scaled so that products stay
of order one. Integers that select along an axis stay inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import sympy
import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.errors import CodaError
from coda.ir import Axis, Node, Param, Partial, Program, Size, nominal
from coda.runtime.binding import evaluate_size, type_shape

Device: TypeAlias = "torch.device | str | None"

EPS = 1e-5
POISON = {"float": float("nan"), "int": -77, "bool": True}
_SMALL = (5, 7, 9, 11, 13, 3, 1, 6, 10, 12, 8, 16, 2, 4, 32, 64, 24, 48, 128)


def random_inputs(
    program: Program, sizes: Mapping[str, int], seed: int = 0, device: Device = None, *, optional: bool = True
) -> dict[str, Tensor | float | int | None]:
    """An operand for each parameter, reproducible from ``seed``, in the declared dtypes.

    Right operands of products are scaled by 1/sqrt(K). Scalars keep their default; without one, ``eps`` is 1e-5 and
    other float scalars lie in (0, 1). With ``optional=False`` optional operands are absent.
    """
    device = torch.device(device or "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    scalars = torch.Generator().manual_seed(seed)
    scales, ranges = _weight_scales(program, sizes), _index_ranges(program, sizes)
    inputs: dict[str, Tensor | float | int | None] = {}
    for param in program.params:
        if param.optional and not optional:
            inputs[param.name] = None
        elif param.is_scalar:
            inputs[param.name] = _scalar(param, scalars)
        else:
            shape = type_shape(param.type, sizes)
            scale, limit = scales.get(param.name, 1.0), ranges.get(param.name, 100)
            if param.type.partial:
                inputs[param.name] = _partials(param.type.partial, shape, sizes, generator)
            else:
                inputs[param.name] = _tensor(param, shape, scale, limit, generator)
    return inputs


def _partials(partial: Partial, shape: tuple[int, ...], sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """Partial results as reductions of squares leave them: positive, sums of as many elements as they are parts of."""
    elements = nominal(sympy.Mul(*(sizes.get(a.name, a.size) for a in partial.axes)))
    count = min(2, max(elements, 1))
    values = torch.rand((count, *shape), generator=generator, device=generator.device) + 0.5
    return values * (elements / count) if partial.kind == "sum" else values


def _scalar(param: Param, generator: torch.Generator) -> float | int:
    if param.default is not None:
        return param.default
    if param.type.dtype.kind == "int":
        return int(torch.randint(1, 2**31, (), generator=generator))
    if param.name == "eps":
        return EPS
    return 0.1 + 0.8 * float(torch.rand((), generator=generator))


def _tensor(param: Param, shape: tuple[int, ...], scale: float, limit: int, generator: torch.Generator) -> Tensor:
    dtype, device = torch_dtype(param.type.dtype), generator.device
    if param.type.dtype.kind != "float":
        high = 2 if param.type.dtype.kind == "bool" else max(limit, 1)
        return torch.randint(0, high, shape, generator=generator, device=device).to(dtype)
    drawn = torch.float32 if param.type.dtype.bits == 8 else dtype  # torch draws no fp8
    values = torch.randn(shape, generator=generator, device=device, dtype=drawn).mul_(scale)
    return values.masked_fill_(values.to(dtype).float() == 0, 0.5 * scale).to(dtype)


def poisoned_outputs(program: Program, sizes: Mapping[str, int], device: Device = None) -> dict[str, Tensor]:
    """Output tensors full of NaN (-77 for integers): what a kernel forgets to write shows."""
    outputs = {}
    for output in program.outputs:
        outputs[output.name] = torch.full(
            type_shape(output.type, sizes),
            POISON[output.type.dtype.kind],
            dtype=torch_dtype(output.type.dtype),
            device=device,
        )
    return outputs


def source_of(node: Node) -> Node:
    """The value behind operations that move, cut or convert it."""
    while node.args and node.op in ("transpose", "layout", "cast", "part", "slice", "default"):
        node = node.args[0]
    return node


def _weight_scales(program: Program, sizes: Mapping[str, int]) -> dict[str, float]:
    """1/sqrt(K) for each parameter that is the right operand of a product."""
    scales = {}
    for node in program.nodes():
        if node.op == "dot" and (weight := source_of(node.args[1])).op == "input":
            k = type_shape(node.args[1].type, sizes)[-2]
            scales[weight.attr("name")] = max(k, 1) ** -0.5
    return scales


def _index_ranges(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """How far each integer parameter may point: the size of the axis it gathers from, picks or is compared with."""
    ranges: dict[str, int] = {}

    def limit(index: Node, axis: Axis | None) -> None:
        name = index.attr("name") if index.op == "input" else None
        if name is not None and axis is not None:
            size = evaluate_size(axis.size, sizes)
            ranges[name] = min(size, ranges.get(name, size))

    for node in program.nodes():
        if node.op in ("gather", "pick"):
            limit(source_of(node.args[1]), node.args[0].type.axis(node.attr("axis")))
        elif node.op in ("eq", "ne"):
            for one, other in (node.args, node.args[::-1]):
                if one.op == "index":
                    limit(source_of(other), one.attr("axis"))
    return ranges


def small_sizes(program: Program, dims: Mapping[str, int] | None = None) -> dict[str, int]:
    """Small sizes, odd where the program allows it, for which every axis has a valid size.

    ``dims`` fixes some. Raises CodaError where none of the sizes tried fits.
    """
    wanted = _all_sizes(program)
    symbols = sorted({s.name for size in wanted for s in size.free_symbols} - set(dims or {}))
    for chosen in _assignments(symbols, wanted, dict(dims or {})):
        axes = {a.name: evaluate_size(a.size, chosen) for a in _all_axes(program)}
        return {**axes, **chosen}
    raise CodaError.of(f"no small sizes fit program '{program.name}'", "give them, as in --dims M=16,N=256")


def _assignments(symbols: list[str], wanted: list[Size], chosen: dict[str, int]) -> Iterator[dict[str, int]]:
    """Depth-first: one more symbol gets a size, and every expression that is thereby complete must be a size >= 1."""
    if not _possible(wanted, chosen):
        return
    if not symbols:
        yield dict(chosen)
        return
    first, rest = symbols[0], symbols[1:]
    unused = [s for s in _SMALL if s not in chosen.values()]  # distinct sizes show a swapped axis
    for size in unused:
        yield from _assignments(rest, wanted, {**chosen, first: size})


def _possible(wanted: list[Size], chosen: Mapping[str, int]) -> bool:
    for size in wanted:
        if all(s.name in chosen for s in size.free_symbols):
            value = size.subs({s: chosen[s.name] for s in size.free_symbols})
            if not value.is_Integer or value < 0:
                return False
    return True


def _all_axes(program: Program) -> list[Axis]:
    types = [p.type for p in program.params] + [o.type for o in program.outputs] + [n.type for n in program.nodes()]
    return list(dict.fromkeys([*program.axes, *(a for t in types for a in t.axes)]))


def _all_sizes(program: Program) -> list[Size]:
    starts = [n.attr("start") for n in program.nodes() if n.op == "part"]
    return list(dict.fromkeys([a.size for a in _all_axes(program)] + starts))
