"""The product of a kernel: what the tensor cores multiply, how it lies in memory, and what they accumulate.

The accumulators hold one product; or two that share their left operand, as two lanes; or a sum of products with equal
result axes, over all their contracted axes one after the other: ``dg @ wg + du @ wu`` is one product whose contracted
axis is the two, concatenated. Label of the sum: algebraic (f32 additions in the order of the one accumulation).

Operands of three dims have the batch first: each of its elements is such a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coda.dtypes import BF16, F16, DType
from coda.errors import CodaError, Diagnostic
from coda.ir import Axis, Dim, Node, Param, Program, dim_size, topological
from coda.ops import build
from coda.passes.merge import batched_view
from coda.target.plan import Lanes, Major, Term

MAX_TERMS = 4  # each brings a pair of tensor maps into the parameters of a kernel


@dataclass(frozen=True)
class Product:
    """What ``find_product`` finds: the fields of ``Plan`` that describe the product."""

    terms: tuple[Term, ...]
    a_major: Major
    b_major: Major
    rows: Dim
    columns: Dim  # of one lane
    lane_axis: Axis | None
    b_lanes: Lanes
    accumulators: tuple[Node, ...]  # of each lane
    joined: tuple[int, ...] = ()  # first column of each term, where they lie side by side
    batch: Dim = ()


def fail(message: str, node: Node | Param | None = None, hint: str | None = None) -> CodaError:
    """The error of a program that does not fit one kernel, at the place of a value or a parameter."""
    return CodaError([Diagnostic(message, node.span if node else None, hint)])


def find_product(program: Program, axes: Sequence[Axis]) -> Product:
    """The product of an epilogue program whose lanes, over ``axes``, are unrolled. Raises CodaError where one kernel
    cannot compute all products, or cannot read an operand."""
    sums = _sums(program)
    if not sums:
        raise fail("the program has no product '@', so there is no GEMM to fuse into")
    dots = [dot for terms in sums.values() for dot in terms]
    if any(d in topological(other.args) for d in dots for other in dots if d is not other):
        raise fail("one product feeds another: this is a block program, which is lowered in a later release", dots[-1])
    if len(sums) > 2 or (len(sums) == 2 and (len(dots) > 2 or dots[0].args[0] is not dots[1].args[0])):
        raise fail(
            f"the program has {len(dots)} products; one kernel takes one, two that share their left operand, or a sum "
            "of products", dots[-1], "put the others into programs of their own; a sum stands together, as in "
            "c + (x @ v.T + y @ w.T)",
        )  # fmt: skip
    first = dots[0]
    if (weights := _joined_weights(first)) is not None:
        return _joined(first, weights)
    operands = [(_stored(d.args[0], "left"), _stored(d.args[1], "right")) for d in dots]
    (a, b), *_ = operands
    for other_a, other_b in operands[1:]:
        _check_alike(a, other_a)
        _check_alike(b, other_b)
    *batch, rows, columns = first.type.dims
    lane_axis, b_lanes, accumulators = _lanes(program, list(sums), columns, axes)
    if len(accumulators) == 2:
        _check_lanes(dots, sums[next(iter(sums))], b)
    contractions = [d.args[0].type.dims[-1] for d in dots]
    _check_views([x for pair in operands for x in pair])
    if len(sums) == 2:
        terms = [Term(a.name, (b.name, operands[1][1].name), contractions[0], a.at, b.at)]
    else:
        terms = [Term(x.name, (w.name,), k, x.at, w.at) for (x, w), k in zip(operands, contractions, strict=True)]
    if len(terms) > MAX_TERMS:
        raise fail(f"a sum of {len(terms)} products; one kernel takes up to {MAX_TERMS}", dots[-1])
    columns = tuple(axis for axis in columns if b_lanes is Lanes.NONE or axis != lane_axis)
    whole = sum(batch, ())
    return Product(tuple(terms), a.major, b.major, rows, columns, lane_axis, b_lanes, accumulators, batch=whole)


def _sums(program: Program) -> dict[Node, tuple[Node, ...]]:
    """Each value to accumulate and the products that it is the sum of. Products are added up in the accumulators where
    nothing else reads them."""
    users, results = program.users(), {o.value for o in program.outputs}
    sums: dict[Node, tuple[Node, ...]] = {}
    for node in program.nodes():
        if node.op == "dot":
            sums[node] = (node,)
        elif node.op == "add" and all(arg in sums for arg in node.args):
            one, other = node.args
            alone = all(users[arg] == [node] and arg not in results for arg in node.args)
            if alone and one is not other and one.type.dims == other.type.dims:
                sums[node] = sums.pop(one) + sums.pop(other)
    return sums


# -- products side by side -------------------------------------------------------------------------------------------


def _joined_weights(dot: Node) -> tuple[Node, ...] | None:
    """The weights whose concatenation a product multiplies by (``join_products``)."""
    right = dot.args[1]
    joined = right.op == "transpose" and right.args[0].op == "concat"
    return right.args[0].args if joined else None


def _joined(dot: Node, weights: Sequence[Node]) -> Product:
    """A product whose columns come from several weights: a tile of columns reads the one it lies in."""
    a = _stored(dot.args[0], "left")
    stored = [_stored(build("transpose", w), "right") for w in weights]
    for other in (a, *stored[1:]):
        if other.dtype is not stored[0].dtype:
            _check_alike(stored[0], other)
    contraction = dot.args[0].type.dims[1]
    first, begins = 0, []
    for weight in weights:
        size = dim_size(weight.type.dims[0])
        if not size.is_Integer:
            raise fail(
                f"the columns of '{weight.attr('name')}' are {size}, but where weights lie side by side their sizes "
                "are numbers", weight, "declare them, as in w: bf16[(HQ d=128), D] with a value for const HQ",
            )  # fmt: skip
        begins.append(first)
        first += int(size)
    terms = tuple(Term(a.name, (w.name,), contraction) for w in stored)
    rows, columns = dot.type.dims
    return Product(terms, a.major, stored[0].major, rows, columns, None, Lanes.NONE, (dot,), tuple(begins))


# -- operands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A parameter that is an operand of '@'. ``at``: as in ``Term``."""

    name: str
    dtype: DType
    major: Major
    node: Node
    at: tuple[int, int] | None = None

    @property
    def order(self) -> str:
        return _order(self.node.type.dims)

    @property
    def transposed_order(self) -> str:
        *batch, rows, columns = self.node.type.dims
        return _order([*batch, columns, rows])


def _order(dims: Sequence[Dim]) -> str:
    groups = (" ".join(a.name for a in dim) for dim in dims)
    return "[" + ", ".join(f"({group})" if " " in group else group for group in groups) + "]"


def _stored(node: Node, side: str) -> _Stored:
    """The parameter behind an operand of '@', as it is, transposed, or of a batch in another order."""
    transposed = node.op == "transpose"
    stored = node.args[0] if transposed else node
    view = batched_view(stored) if stored.op == "layout" else None
    stored = stored.args[0] if view is not None else stored
    if stored.op != "input":
        raise fail(
            f"the {side} operand of '@' is computed ('{stored.op}'); a kernel reads it from memory", stored,
            "compute it in the program before, or pass it as a parameter",
        )  # fmt: skip
    if stored.dtype not in (BF16, F16):
        hint = "bf16 and f16 are the operand dtypes of this release"
        raise fail(f"the {side} operand '{stored.attr('name')}' of '@' is {stored.dtype}", stored, hint)
    last_is_k = transposed == (side == "right")  # x and w.T
    at = None
    if view is not None:
        batch, row, column = view
        if column != len(stored.type.dims) - 1:
            row, last_is_k = column, not last_is_k
        at = (batch, row)
    return _Stored(stored.attr("name"), stored.dtype, Major.K if last_is_k else Major.MN, stored, at)


def _check_views(operands: Sequence[_Stored]) -> None:
    for one in operands:
        if any(other.name == one.name and other.at != one.at for other in operands):
            raise fail(f"'{one.name}' is read in two orders by one kernel", one.node, "pass it twice")


def _check_alike(one: _Stored, other: _Stored) -> None:
    """Operands on one side of a sum share instruction and shared-memory layout."""
    if one.dtype is not other.dtype:
        raise fail(
            f"'{one.name}' is {one.dtype} and '{other.name}' is {other.dtype}; products in one kernel have operands of "
            "one dtype", other.node,
        )  # fmt: skip
    if one.major is not other.major:
        raise fail(
            f"'{one.name}' is stored {one.order} and '{other.name}' {other.order}, the contracted axis last in one "
            "only; products in one kernel have operands stored alike", other.node,
            f"store '{other.name}' transposed",
        )  # fmt: skip


# -- lanes ----------------------------------------------------------------------------------------------------------


def lane_order(dim: Dim, axis: Axis, node: Node | None) -> Lanes:
    """How a dim that groups the lane axis with others holds the lanes."""
    position = dim.index(axis)
    if position == 0:
        return Lanes.OUTER
    if position == len(dim) - 1:
        return Lanes.INNER
    raise fail(
        f"axis '{axis}' must be first or last in its group ({' '.join(a.name for a in dim)})", node,
        "first keeps the lanes apart, last interleaves them",
    )  # fmt: skip


def _lanes(
    program: Program, values: Sequence[Node], columns: Dim, axes: Sequence[Axis]
) -> tuple[Axis | None, Lanes, tuple[Node, ...]]:
    """The lane axis, how the weight holds its lanes, and the value that each lane accumulates."""
    first = values[0]
    inside = [a for a in axes if a in columns]
    if len(values) == 2 or not inside:
        if len(values) == 2 and values[0].type.dims != values[1].type.dims:
            one, other = (", ".join(a.name for a in value.type.axes) for value in values)
            raise fail(
                f"two products in one kernel need the same result axes; these have [{one}] and [{other}]", values[1]
            )
        return next((a for a in axes if a.static == 2), None), Lanes.NONE, tuple(values)
    axis, *more = inside
    if more:
        raise fail(f"the columns of a product split once: over '{axis}' or over '{more[0]}'", first)
    if axis.static != 2:
        raise fail(f"axis '{axis}' has size {axis.size}; the columns of a product split in two", first)
    order = lane_order(columns, axis, first)
    slices = {n.attr("index"): n for n in program.nodes() if n.op == "slice" and n.args[0] is first}
    if missing := {0, 1} - slices.keys():
        raise fail(
            f"lane {min(missing)} of axis '{axis}' is never used, half of the product is wasted", first,
            "pass the half of the weight that is used",
        )  # fmt: skip
    return axis, order, (slices[0], slices[1])


def _check_lanes(dots: Sequence[Node], terms: Sequence[Node], b: _Stored) -> None:
    """Lanes are interleaved along N while they are fetched, in groups of eight rows."""
    if b.at is not None:
        message = f"'{b.name}' is stored {b.order}; two products in one kernel take weights with the batch first"
        raise fail(message, b.node, "pass it so, a transposed view for instance")
    if len(terms) > 1:
        raise fail("a sum of products with two lanes is two kernels", dots[-1])
    if b.major is Major.MN:
        raise fail(
            f"'{b.name}' is stored {b.order}; two products in one kernel take weights whose last dim is contracted",
            b.node, f"store it as {b.transposed_order} and write {b.name}.T",
        )  # fmt: skip
