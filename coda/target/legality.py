"""``can_lower``: whether given tensors can run on a kernel, asked by CLI, tuner, callable and launcher alike.

``checks(plan)`` lists everything the kernels of a plan ask of their arguments, in the order in which a user would
want to hear it: presence, dtype, rank; then sizes; then memory layout. The reasons behind the layout rules: operands
of the product and [M, N] operands are fetched by TMA, which wants a unit inner stride and 16-byte aligned bases and
row pitches; all index arithmetic beside them is 64-bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy

from coda.errors import OK, Ok, Reason
from coda.ir import Size, dim_size
from coda.target import plan as p
from coda.target.requirements import MAX_RANK, Arg, Binding, Checks, Extent, Kind, Requirement, View, failure

TMA_ALIGN = 16
TMA_PITCH = 1 << 40  # strides of a tensor map are below this many bytes
INT32 = (1 << 31) - 1
DESIGN_SMS = 132  # the variant is chosen for this many multiprocessors, so that a program's partial sums, and with
#                   them its bits, do not depend on which Hopper board it runs


def can_lower(plan: p.Plan, tensors: Sequence[Any], tiles: p.Tile | Sequence[p.Tile]) -> Ok | Reason:
    """Whether the kernels of ``plan`` built for these tiles take these arguments (in ABI order: parameters, then
    outputs; None for absent ones, Python numbers for scalars)."""
    variants = tuple(p.Variant(plan, t, "") for t in ([tiles] if isinstance(tiles, p.Tile) else tiles))
    for variant in variants:
        legal = legal_tile(variant.tile)
        if not legal:
            return legal
    if len(tensors) != len(plan.args):
        return Reason(argument_count(plan, len(tensors)))
    views = [View.of(t, arg.dtype) for t, arg in zip(tensors, plan.args, strict=True)]
    text = failure(Binding(checks(plan), views, partial_counts(variants)))
    return OK if text is None else Reason(text)


def legal_tile(tile: p.Tile) -> Ok | Reason:
    """Only tiles from the proven list are offered (cases B7, B10, M4)."""
    known = {(t.m, t.n, t.schedule, t.k): t.name for t in p.TILES}
    if (tile.m, tile.n, tile.schedule, tile.k) not in known:
        return Reason(f"tile {tile.name} is not one of {', '.join(known.values())}")
    if (tile.cluster_m, tile.cluster_n) not in ((1, 1), (2, 1)):
        return Reason(f"cluster {tile.cluster_m}x{tile.cluster_n} is not one of 1x1, 2x1")
    return OK


def argument_count(plan: p.Plan, got: int) -> str:
    names = ", ".join(a.name for a in plan.args)
    return f"'{plan.name}' takes {len(plan.args)} arguments ({names}), got {got}"


def select(variants: Sequence[p.Variant], rows: int, columns: int) -> p.Variant:
    """The variant with the least waves x tile area; the first of equals."""

    def cost(variant: p.Variant) -> int:
        tiles = -(-rows // variant.tile.m) * -(-columns // variant.columns)
        return -(-tiles // DESIGN_SMS) * variant.tile.m * variant.tile.n

    return min(variants, key=cost)


def partial_counts(variants: Sequence[p.Variant]) -> Callable[[int, int], tuple[int, int]]:
    def counts(rows: int, columns: int) -> tuple[int, int]:
        variant = select(variants, rows, columns)
        return variant.row_partials(columns), variant.column_partials(rows)

    return counts


@lru_cache(maxsize=256)
def checks(plan: p.Plan) -> Checks:
    """Everything the kernels of a plan ask of their arguments."""
    return _Derivation(plan).derive()


def partial_outputs(plan: p.Plan) -> dict[str, p.Store]:
    """Outputs that are unfinished reductions: tensors [count, length]."""
    return {s.arg: s for s in plan.stores if s.kind != "tile" and s.arg is not None and not s.finished}


@dataclass
class _Derivation:
    plan: p.Plan
    variables: list[Size] = field(default_factory=list)
    found: list[Requirement] = field(default_factory=list)

    def derive(self) -> Checks:
        plan = self.plan
        self.partials = partial_outputs(plan)
        rows, columns, contraction = (self._extent(dim_size(d)) for d in (plan.rows, plan.columns, plan.contraction))
        for index, arg in enumerate(plan.args):
            self._signature(index, arg)
        for index, arg in enumerate(plan.args):
            self._shape(index, arg)
        self._products()
        self._sizes(rows, columns, contraction)
        self._layouts(columns)
        args = tuple(Arg(a.name, a.optional or a.default is not None, self._is_vector(a)) for a in plan.args)
        names = tuple(_text(v) for v in self.variables)
        return Checks(args, names, tuple(self.found), rows, columns, contraction)

    def _need(self, kind: Kind, sentence: str, **fields: Any) -> None:
        self.found.append(Requirement(kind, sentence, **fields))

    # -- presence, dtype, rank --

    def _signature(self, index: int, arg: p.Arg) -> None:
        who, rank = _who(arg), self._rank(arg)
        if not arg.optional and arg.default is None:
            self._need(Kind.PRESENT, f"{who} is missing: {self._type(arg)} is not optional", arg=index)
        code, bits = arg.dtype.dlpack
        self._need(
            Kind.DTYPE, f"{who} is {{dtype}}, the program declares {self._type(arg)}", arg=index, value=code << 8 | bits
        )
        self._need(
            Kind.RANK,
            f"{who} has {{got}} dims (shape {{shape}}), the program declares {self._type(arg)}",
            arg=index,
            value=rank,
        )

    def _rank(self, arg: p.Arg) -> int:
        rank = 2 if arg.name in self.partials else len(arg.dims)
        if rank > MAX_RANK:
            raise ValueError(f"{arg.name}: more than {MAX_RANK} dims")
        return rank

    def _type(self, arg: p.Arg) -> str:
        axes = arg.axes
        if arg.name in self.partials:
            length = axes[0] if axes else "1"
            axes = ("partials", length)
        return f"{arg.dtype}[{', '.join(axes)}]"

    def _is_vector(self, arg: p.Arg) -> bool:
        product = {self.plan.a, *self.plan.b}
        plain = not arg.is_output and not arg.inout and arg.name not in product
        return plain and len(arg.dims) == 1 and arg.dtype.kind == "float"

    # -- sizes --

    def _extent(self, size: Size) -> Extent:
        """``coefficient * variable + offset``: whatever is left of the size is a variable of its own."""
        offset, rest = sympy.sympify(size).as_coeff_Add()
        coefficient, rest = rest.as_coeff_Mul()
        if rest == 1:
            return Extent(str(int(offset + coefficient)), 0, None, int(offset + coefficient))
        if rest == 0:
            return Extent(str(int(offset)), 0, None, int(offset))
        if not (offset.is_Integer and coefficient.is_Integer and coefficient > 0):
            rest, coefficient, offset = sympy.sympify(size), sympy.Integer(1), sympy.Integer(0)
        if rest not in self.variables:
            self.variables.append(rest)
        return Extent(_text(size), int(coefficient), self.variables.index(rest), int(offset))

    def _shape(self, index: int, arg: p.Arg) -> None:
        if arg.name in self.partials:
            return self._partial_shape(index, arg)
        for dim, size in enumerate(arg.dims):
            extent = self._extent(size)
            where = f"{_who(arg)} has shape {{shape}}: dim {dim} must be"
            if extent.variable is not None and (extent.coefficient > 1 or extent.offset):
                self._need(Kind.DIVISIBLE, f"{where} {extent.text}, not {{got}}", arg=index, dim=dim, extent=extent)
            why = f"{{want}} ({extent.text}, fixed by '{{by}}')" if extent.variable is not None else "{want}"
            self._need(Kind.SIZE, f"{where} {why}", arg=index, dim=dim, extent=extent)
        return None

    def _partial_shape(self, index: int, arg: p.Arg) -> None:
        store = self.partials[arg.name]
        length = self._extent(dim_size(self.plan.rows if store.kind == "row" else self.plan.columns))
        self._need(
            Kind.SIZE,
            f"{_who(arg)} has shape {{shape}}: dim 1 must be {{want}} ({length.text}, fixed by '{{by}}')",
            arg=index,
            dim=1,
            extent=length,
        )
        over = "tile column" if store.kind == "row" else "band of 16 rows"
        self._need(
            Kind.PARTIALS,
            f"{_who(arg)} has shape {{shape}}: dim 0 must be {{want}}, one partial result for each {over}",
            arg=index,
            dim=0,
            value=0 if store.kind == "row" else 1,
        )

    def _products(self) -> None:
        """A variable like B*T must be the product of B and T where those are sizes of dims, too."""
        for index, variable in enumerate(self.variables):
            factors = variable.args if variable.is_Mul else ()
            if factors and all(f in self.variables for f in factors):
                mask = sum(1 << self.variables.index(f) for f in factors)
                text = f"{_text(variable)} is {{want}} by the sizes of {', '.join(map(_text, factors))}, but {{got}}"
                self._need(Kind.PRODUCT, text + " elsewhere", dim=index, value=mask)

    def _sizes(self, rows: Extent, columns: Extent, contraction: Extent) -> None:
        plan = self.plan
        self._need(
            Kind.AT_LEAST,
            f"the contracted axis {contraction.text} is empty: there is no product to compute",
            extent=contraction,
            value=1,
        )
        for extent, limit in ((rows, INT32), (columns, INT32 // plan.lanes), (contraction, INT32)):
            self._need(
                Kind.AT_MOST,
                f"{extent.text} = {{got}} is too large: a kernel counts up to {limit}",
                extent=extent,
                value=limit,
            )
        if plan.lanes == 2:
            self._need(
                Kind.MULTIPLE,
                f"{columns.text} = {{got}} is not a multiple of 8, the columns paired at a time",
                extent=columns,
                value=8,
            )
        for operand in plan.tile_operands:
            step = TMA_ALIGN // operand.dtype.bytes
            if operand.lanes is p.Lanes.OUTER and step > 8:
                self._need(
                    Kind.MULTIPLE,
                    f"{columns.text} = {{got}} is not a multiple of {step}, as the halves of "
                    f"'{operand.arg}' need to start at multiples of {TMA_ALIGN} bytes",
                    extent=columns,
                    value=step,
                )

    # -- layout --

    def _layouts(self, columns: Extent) -> None:
        plan = self.plan
        index = {a.name: i for i, a in enumerate(plan.args)}
        tma = {plan.a: (0, 1, TMA_PITCH)}
        weight_rows = 1 if plan.lanes == 1 else 16  # the map over paired weights steps up to 16 rows at a time
        tma |= {b: (0, 1, TMA_PITCH // weight_rows) for b in plan.b}
        for operand in plan.tile_operands:
            tma.setdefault(operand.arg, (operand.row_dim or 0, operand.column_dim or 0, TMA_PITCH))
        for i, arg in enumerate(plan.args):
            if arg.name in tma:
                self._tma(i, arg, *tma[arg.name])
            else:
                self._element_aligned(i, arg)
        if len(plan.b) == 2:
            self._two_weights(index[plan.b[0]], index[plan.b[1]])
        for i, arg in enumerate(plan.args):
            if arg.is_output:
                self._output(i, arg)

    def _tma(self, index: int, arg: p.Arg, row: int, column: int, limit: int) -> None:
        who, inner = _who(arg), arg.axes[column]
        self._need(
            Kind.UNIT,
            f"{who} has stride {{got}} along {inner} (dim {column}); TMA reads it with stride 1: "
            f"pass a contiguous copy",
            arg=index,
            dim=column,
        )
        self._need(
            Kind.ALIGNED,
            f"{who} starts {{got}} bytes past a multiple of {TMA_ALIGN}; TMA needs an aligned base",
            arg=index,
            value=TMA_ALIGN,
        )
        self._need(
            Kind.PITCH_BYTES,
            f"{who} has rows {{got}} bytes apart; TMA needs a multiple of {TMA_ALIGN}",
            arg=index,
            dim=row,
            value=TMA_ALIGN,
        )
        self._need(
            Kind.PITCH_MIN,
            f"{who} has overlapping rows: {{got}} elements apart, {{want}} wide",
            arg=index,
            dim=row,
            other=column,
        )
        self._need(
            Kind.PITCH_MAX,
            f"{who} has rows {{got}} bytes apart; TMA takes less than {limit}",
            arg=index,
            dim=row,
            value=limit,
        )

    def _element_aligned(self, index: int, arg: p.Arg) -> None:
        size = arg.dtype.bytes
        if size > 1:
            self._need(
                Kind.ALIGNED,
                f"{_who(arg)} starts {{got}} bytes past a multiple of its element size {size}",
                arg=index,
                value=size,
            )

    def _two_weights(self, first: int, second: int) -> None:
        a, b = self.plan.args[first].name, self.plan.args[second].name
        self._need(
            Kind.SAME_PITCH,
            f"the rows of '{a}' are {{got}} elements apart, those of '{b}' {{want}}; one tensor map "
            "over both weights needs equal row strides",
            arg=first,
            other=second,
            dim=0,
        )
        self._need(
            Kind.LANES,
            f"'{a}' and '{b}' are {{got}} bytes apart; one tensor map over both weights needs a nonzero "
            f"multiple of {TMA_ALIGN} below {{want}}",
            arg=first,
            other=second,
        )

    def _output(self, index: int, arg: p.Arg) -> None:
        self._need(Kind.DISTINCT, f"{_who(arg)} has overlapping elements", arg=index)
        for other, peer in enumerate(self.plan.args):
            if other == index or (peer.is_output and other > index):
                continue
            word = "overlaps" if self._in_place(arg, peer) else "shares memory with"
            self._need(
                Kind.APART,
                f"{_who(arg)} {word} {_who(peer)}",
                arg=index,
                other=other,
                value=int(self._in_place(arg, peer)),
            )

    def _in_place(self, output: p.Arg, operand: p.Arg) -> bool:
        """Whether the output may be the operand: each element is read just before it is overwritten, by one thread."""
        plan = self.plan
        stores = [s for s in plan.stores if s.arg == output.name and s.kind == "tile"]
        reads = [o for o in plan.operands if o.arg == operand.name]
        if len(stores) != 1 or len(reads) != 1 or operand.name in (plan.a, *plan.b):
            return False
        if any(o.arg == operand.name for f in plan.finishings for o in f.operands):
            return False
        (store,), (read,) = stores, reads
        return (store.row_dim, store.column_dim, store.lanes) == (read.row_dim, read.column_dim, read.lanes)


def _who(arg: p.Arg) -> str:
    return f"{'output' if arg.is_output else 'operand'} '{arg.name}'"


def _text(size: Size) -> str:
    return str(size).replace(" ", "")
