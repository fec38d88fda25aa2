"""Axis sizes from operand shapes, and the checks every call starts with.

``check_operands`` looks at presence, dtype, rank and device; ``bind`` solves the axis sizes. Both speak in axis
names: an error says which operand, the shape it should have, the shape it has, and which operand fixed the size.
No torch is imported here: tensors are only asked for ``shape``, ``dtype`` and ``device``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy

from coda.dtypes import from_torch
from coda.errors import CodaError, did_you_mean
from coda.ir import Axis, Dim, Param, Program, Size, Type, dim_size, size_symbol

Shape = tuple[int, ...]


def shapes_of(inputs: Mapping[str, Any]) -> dict[str, Shape | None]:
    """The shape of each operand: None where it is absent, () for a Python number."""
    return {name: None if x is None else tuple(getattr(x, "shape", ())) for name, x in inputs.items()}


def evaluate_size(size: Size, sizes: Mapping[str, int]) -> int:
    """A symbolic size as a number. Raises CodaError where a symbol has none."""
    if size.is_Symbol and size.name in sizes:  # nearly always: this is on the path of every call
        return sizes[size.name]
    if size.is_Integer:
        return int(size)
    missing = sorted(s.name for s in size.free_symbols if s.name not in sizes)
    if missing:
        raise CodaError.of(f"the size of {_listed(missing)} is not known", _pass_dims(missing))
    value = size.subs({s: sizes[s.name] for s in size.free_symbols})
    if not value.is_Integer or value < 0:
        raise CodaError.of(f"the size {size} would be {value} with {_values(size, sizes)}, which is not a size")
    return int(value)


def type_shape(type: Type, sizes: Mapping[str, int]) -> Shape:
    """One size for each dim of the type (groups flattened)."""
    return tuple(_product(evaluate_size(a.size, sizes) for a in dim) for dim in type.dims)


def bind(
    program: Program, shapes: Mapping[str, Sequence[int] | None], dims: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Solve the axis sizes from operand shapes.

    ``shapes`` has one entry for each operand, None where an optional one is absent. A shape has one size for each dim
    of the parameter, or one for each axis (all groups opened), or, for a float vector, the single element that
    broadcasts. ``dims`` gives sizes the shapes cannot tell. Returns name -> size for every axis and size symbol.
    """
    solver = _Solver(program, dict(dims or {}))
    for param in program.params:
        shape = shapes.get(param.name)
        if shape is not None:
            solver.add(param, tuple(shape))
    return solver.solve()


def is_broadcast_vector(param: Param, shape: Sequence[int]) -> bool:
    """Whether one element stands for a whole float vector: the scale that is per tensor in one call, per row in
    the next."""
    vector = len(param.type.dims) == 1 and param.type.dtype.kind == "float"
    vector = vector and not param.inout and not param.type.partial
    return vector and tuple(shape) in ((), (1,))


class _Solver:
    """Sizes known so far, who fixed them, and the equations (operand, dim, size) still open."""

    def __init__(self, program: Program, dims: dict[str, int]):
        self.program = program
        self.sizes: dict[str, int] = {}
        self.fixed_by: dict[str, str] = {}
        self.shapes: dict[str, Shape] = {}
        self.open: list[tuple[Param, int, Dim, int]] = []
        self.soft: list[tuple[Param, int, Dim, int]] = []  # vectors of one element: they fix a size only if nobody else
        self.derived: list[tuple[Axis, int]] = []  # given sizes of axes that are computed from others
        symbols, axes = _symbols(program), {a.name: a for a in _axes(program)}
        for name, size in dims.items():
            if name in symbols or (name not in axes and name in _computed_with(program)):
                self._fix(name, int(size), f"{name}={size}")
            elif name in axes:
                self.derived.append((axes[name], int(size)))
            else:
                hint = did_you_mean(name, symbols | axes.keys())
                raise CodaError.of(f"program '{program.name}' has no axis '{name}'", hint)

    def add(self, param: Param, shape: Shape) -> None:
        self.shapes[param.name] = shape
        dims = param.type.dims
        if param.type.partial:
            shape = self._of_one(param, shape)
        if is_broadcast_vector(param, shape):
            if shape:
                self.soft.append((param, 0, dims[0], 1))
            return
        if param.is_scalar and _product(shape) == 1:
            return
        if len(shape) == len(param.type.axes) != len(dims):
            dims = tuple((axis,) for axis in param.type.axes)
        elif len(shape) != len(dims):
            raise CodaError.of(
                f"operand '{param.name}' has {len(shape)} dims (shape {list(shape)}); {param.type} has {len(dims)}"
            )
        self.open += [(param, i, dim, size) for i, (dim, size) in enumerate(zip(dims, shape, strict=True))]

    def _of_one(self, param: Param, shape: Shape) -> Shape:
        """The shape of one of the partial results that an operand holds."""
        if len(shape) != len(param.type.dims) + 1:
            raise CodaError.of(
                f"operand '{param.name}' has {len(shape)} dims (shape {list(shape)}); {param.type} has "
                f"{len(param.type.dims) + 1}: partial results, as many as there are, lie in front",
                "pass what a program has returned as partial(...), as it is",
            )
        return shape[1:]

    def solve(self) -> dict[str, int]:
        for axis, size in self.derived:
            self._solve_given(axis, size)
        self._exhaust()
        for param, index, dim, size in self.soft:
            if self._unknown(dim):
                self.open.append((param, index, dim, size))
        self._exhaust()
        if self.open:
            names = sorted({name for _, _, dim, _ in self.open for name in self._unknown(dim)})
            where = ", ".join(dict.fromkeys(f"'{p.name}'" for p, _, _, _ in self.open))
            raise CodaError.of(f"the shapes do not tell the sizes of {_listed(names)} apart (operand {where})",
                               _pass_dims(names))  # fmt: skip
        for axis in _axes(self.program):
            if not {s.name for s in axis.size.free_symbols} - self.sizes.keys():
                self.sizes[axis.name] = evaluate_size(axis.size, self.sizes)
        for axis, size in self.derived:
            if self.sizes.get(axis.name, size) != size:
                raise CodaError.of(
                    f"{axis.name}={size} was given, but {axis.name} = {axis.size} is {self.sizes[axis.name]}"
                )
        for param in self.program.params:
            if param.type.partial and param.name in self.shapes:
                self._check_count(param, self.shapes[param.name][0], param.type.partial.axes)
        return self.sizes

    def _check_count(self, param: Param, count: int, over: Dim) -> None:
        """Each partial result is of one element at least; how many there are is told only by other operands."""
        if self._unknown(over):
            return
        most = evaluate_size(dim_size(over), self.sizes)
        if not 1 <= count <= most:
            raise CodaError.of(
                f"operand '{param.name}' has shape {list(self.shapes[param.name])}: dim 0 counts partial results of "
                f"{param.type.partial}: there are 1 to {most}"
            )

    def _solve_given(self, axis: Axis, size: int) -> None:
        """Use the given size of a computed axis where it tells a symbol, as A=64 does where A = D."""
        unknown = self._unknown((axis,))
        if len(unknown) == 1:
            (name,) = unknown
            value = self._solve_for(name, (axis,), size)
            if value is not None and value.is_Integer and value >= 0:
                self._fix(name, int(value), f"{axis.name}={size}")

    def _exhaust(self) -> None:
        """Solve open equations until none makes progress."""
        progress = True
        while self.open and progress:
            pending = [equation for equation in self.open if not self._try(*equation)]
            progress, self.open = len(pending) < len(self.open), pending

    def _try(self, param: Param, index: int, dim: Dim, size: int) -> bool:
        """Check the equation, or solve it for its only unknown. False where it has to wait."""
        unknown = self._unknown(dim)
        if not unknown:
            if _product(evaluate_size(a.size, self.sizes) for a in dim) != size:
                raise self._mismatch(param, index, dim, size)
            return True
        if len(unknown) > 1:
            return False
        (name,) = unknown
        value = self._solve_for(name, dim, size)
        if value is None:
            return False
        if value.is_Integer and value >= 0:
            self._fix(name, int(value), f"operand '{param.name}' (dim {index}, size {size})")
            return True
        raise self._mismatch(param, index, dim, size)

    def _solve_for(self, name: str, dim: Dim, size: int) -> sympy.Expr | None:
        """The value of the symbol for which the dim has this size; None where any would do (0 = 0 * T)."""
        symbol = size_symbol(name)
        if dim[0].size == symbol and len(dim) == 1:
            return sympy.Integer(size)
        product = dim_size(dim).subs(self._known(dim))
        if product == 0:
            return None
        constant = product.subs(symbol, 0)
        slope = sympy.expand(product - constant) / symbol
        if slope.free_symbols:
            raise CodaError.of(f"the size {product} is not linear in {name}", _pass_dims([name]))
        return (size - constant) / slope

    def _known(self, dim: Dim) -> dict[sympy.Symbol, int]:
        symbols = {s for a in dim for s in a.size.free_symbols}
        return {s: self.sizes[s.name] for s in symbols if s.name in self.sizes}

    def _unknown(self, dim: Dim) -> set[str]:
        return {s.name for a in dim for s in a.size.free_symbols if s.name not in self.sizes}

    def _fix(self, name: str, size: int, by: str) -> None:
        self.sizes[name], self.fixed_by[name] = size, by

    def _mismatch(self, param: Param, index: int, dim: Dim, size: int) -> CodaError:
        before = ["partials"] if param.type.partial else []
        index += len(before)
        wanted = ", ".join([*before, *(self._wanted(d) for d in param.type.dims)])
        message = (
            f"operand '{param.name}' has shape {list(self.shapes[param.name])}, expected {param.type} = [{wanted}]: "
            f"dim {index} is {size}"
        )
        if self._unknown(dim):
            return CodaError.of(f"{message}, which does not fit {dim_size(dim)}")
        names = sorted({s.name for a in dim for s in a.size.free_symbols})
        fixed = "; ".join(f"{name} = {self.sizes[name]} was fixed by {self.fixed_by[name]}" for name in names)
        return CodaError.of(f"{message}, not {self._wanted(dim)}", fixed or None)

    def _wanted(self, dim: Dim) -> str:
        """The size of a dim as far as it is known."""
        return str(dim_size(dim).subs(self._known(dim)))


def check_operands(program: Program, inputs: Mapping[str, Any]) -> None:
    """Names, presence, dtypes and devices. Raises CodaError naming the operand.

    A scalar may be a Python number or a tensor of one element; every tensor lives on one device, except that a scalar
    may be on the CPU.
    """
    known = {p.name for p in program.params}
    for name in inputs:
        if name not in known:
            raise CodaError.of(f"program '{program.name}' has no parameter '{name}'", did_you_mean(name, known))
    home: tuple[str, Any] | None = None
    for param in program.params:
        value = inputs.get(param.name)
        if value is None:
            if not param.optional and param.default is None:
                raise CodaError.of(f"operand '{param.name}': {param.type} is missing")
            continue
        if isinstance(value, (bool, int, float)):
            _check_number(param, value)
            continue
        _check_dtype(param, value)
        if param.is_scalar and value.device.type == "cpu":
            continue
        if home is not None and value.device != home[1]:
            raise CodaError.of(f"operand '{param.name}' is on {value.device}, operand '{home[0]}' on {home[1]}",
                               "all tensors of a call live on one device")  # fmt: skip
        home = home or (param.name, value.device)


def _check_number(param: Param, value: float) -> None:
    if not param.is_scalar and not is_broadcast_vector(param, ()):
        raise CodaError.of(f"operand '{param.name}' is the number {value}, but {param.type} is a tensor")
    if param.type.dtype.kind == "int" and isinstance(value, float):
        raise CodaError.of(f"operand '{param.name}' is the number {value}, but {param.type} takes integers")


def _check_dtype(param: Param, value: Any) -> None:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise CodaError.of(f"operand '{param.name}' is a {type(value).__name__}, not a tensor or number")
    if from_torch(value.dtype) != param.type.dtype:
        raise CodaError.of(
            f"operand '{param.name}' is {value.dtype}, the program declares {param.type}",
            f"pass {param.name}.to(torch.{param.type.dtype.torch}), or declare another dtype",
        )
    if param.is_scalar and _product(value.shape) != 1:
        raise CodaError.of(f"operand '{param.name}' has shape {list(value.shape)}, but {param.type} is a scalar")


def _axes(program: Program) -> list[Axis]:
    """Every axis a size is wanted for: declared, of parameters and of outputs."""
    types = [p.type for p in program.params] + [o.type for o in program.outputs]
    return list(dict.fromkeys([*program.axes, *(a for t in types for a in t.axes)]))


def _symbols(program: Program) -> set[str]:
    return {s.name for a in _axes(program) for s in a.size.free_symbols}


def _computed_with(program: Program) -> set[str]:
    """Sizes that no axis has but values are computed from, as in ``x / size(D)`` where only x is left of D."""
    return {s.name for n in program.nodes() if n.op == "size" for s in n.attr("expr").free_symbols}


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


def _pass_dims(names: Sequence[str]) -> str:
    return "pass " + ", ".join(f"{n}=..." for n in names) + ", or an operand with its groups opened"


def _values(size: Size, sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{s.name} = {sizes[s.name]}" for s in sorted(size.free_symbols, key=str))
