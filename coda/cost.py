"""What a program costs: operations, bytes, and the time below which a GPU cannot run it.

Costs are sympy expressions over the axis sizes, so one formula serves every shape and can be printed as it is. Bytes
are counted three ways, because the comparison is the point:

* ``fused``: one kernel. Each operand is read once, each output written once.
* ``two_kernels``: a product, then one kernel for all the rest (what torch.compile makes at best). The product is
  written and read once more.
* ``one_by_one``: a kernel for each operation, as eager PyTorch runs it. Every intermediate is written, and read by
  each of its users, in the dtype of the product's operands (reductions in f32).

No cache is modelled: a tensor that fits the L2 is counted as if it came from memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from coda.dtypes import F32, DType
from coda.ir import Node, Output, Program, Size, Type

PARTIAL_COLUMNS = 128  # columns that one partial of a row reduction is assumed to cover

# Operations that move nothing: leaves, and what only renames, cuts or reorders.
_FREE = {"input", "const", "index", "size", "default", "cast", "transpose", "layout", "slice", "part", "partial"}
_FREE |= {"finish"}


@dataclass(frozen=True)
class Gpu:
    """What a GPU sustains, measured and not from a data sheet: a device-to-device copy (read + write), and the best
    large bf16 product on random data."""

    name: str
    bytes_per_second: float
    bf16_flops: float
    launch_seconds: float  # what a kernel that waits for another adds, about


GPUS = {"h200": Gpu("NVIDIA H200", 4.30e12, 790e12, 2e-6)}


@dataclass(frozen=True)
class Cost:
    """Formulas over the axis sizes; ``at`` gives them as numbers."""

    flops: Size
    fused: Size
    two_kernels: Size
    one_by_one: Size

    def at(self, sizes: Mapping[str, int]) -> Cost:
        """The same with sizes put in for the symbols they name."""
        values = {symbol: sizes[symbol.name] for symbol in self._symbols() if symbol.name in sizes}
        return Cost(
            *(sympy.sympify(f).subs(values) for f in (self.flops, self.fused, self.two_kernels, self.one_by_one))
        )

    def _symbols(self) -> set[sympy.Symbol]:
        return self.flops.free_symbols | self.fused.free_symbols | self.one_by_one.free_symbols

    @property
    def is_number(self) -> bool:
        """Whether every size is known."""
        return not self._symbols()

    def seconds(self, way: str, gpu: Gpu) -> float:
        """The least time on a GPU, moving bytes in one of the three ways. The fused kernel overlaps its bytes with the
        product, whichever takes longer; what is moved beyond them is moved by other kernels, one after the other."""
        product = max(float(self.flops) / gpu.bf16_flops, float(self.fused) / gpu.bytes_per_second)
        return product + float(getattr(self, way) - self.fused) / gpu.bytes_per_second


def cost(program: Program) -> Cost:
    """The cost of a program, counted over its DAG."""
    nodes, stored = program.nodes(), _stored_dtypes(program)
    products = [n for n in nodes if n.op == "dot"]
    flops = sympy.Add(*(2 * _multiplications(n) for n in products))
    inputs = sympy.Add(*(read_bytes(program).values()))
    outputs = sympy.Add(*(output_bytes(o) for o in program.outputs))
    fused = inputs + outputs
    again = sympy.Add(*(2 * _bytes(n, stored[n]) for n in products if not _only_stored(n, program)))
    kernels = (n for n in nodes if n.op not in _FREE)
    one_by_one = sympy.Add(*(_bytes(x, stored[x]) for n in kernels for x in (n, *dict.fromkeys(n.args))))
    return Cost(flops, fused, fused + again, one_by_one)


def read_bytes(program: Program) -> dict[str, Size]:
    """What a kernel reads of each parameter: all of it, once, or of a table the rows that are gathered."""
    users = program.users()
    return {n.attr("name"): _read_once(n, users[n]) for n in users if n.op == "input"}


def _read_once(tensor: Node, users: Sequence[Node]) -> Size:
    whole = _bytes(tensor, tensor.dtype)
    if any(u.op != "gather" or u.args[0] is not tensor or u.args[1] is tensor for u in users):
        return whole
    gathered = {u.args[1]: _bytes(u, tensor.dtype) for u in users}  # by the positions, which select whole rows
    return sympy.Min(whole, sympy.Add(*gathered.values())) if gathered else whole


def _multiplications(dot: Node) -> Size:
    """Multiplications of a product: the elements of its result times the contracted size."""
    return dot.type.elements * sympy.Mul(*(axis.size for axis in dot.args[0].type.dims[-1]))


def _only_stored(dot: Node, program: Program) -> bool:
    """Whether nothing is computed from the product: it is the result, up to its rounding and layout."""
    users = program.users()
    pending = [dot]
    while pending:
        for user in users[pending.pop()]:
            if user.op not in _FREE:
                return False
            pending.append(user)
    return True


def _stored_dtypes(program: Program) -> dict[Node, DType]:
    """The dtype in which a kernel of its own would store each value."""
    stored: dict[Node, DType] = {}
    for node in program.nodes():
        floats = [stored[a] for a in node.args if a.type.dims and a.dtype.kind == "float"]
        if node.dtype != F32 or node.op == "input" or node.op.startswith("reduce_"):
            stored[node] = node.dtype
        else:
            stored[node] = min(floats, key=lambda d: d.bits, default=F32)
    return stored


def stored_bytes(program: Program) -> dict[Node, Size]:
    """The bytes of each value where every operation is a kernel of its own."""
    return {node: _bytes(node, dtype) for node, dtype in _stored_dtypes(program).items()}


def _bytes(node: Node, dtype: DType) -> Size:
    """Scalars and index vectors made on the spot cost nothing."""
    if not node.type.dims or node.op in ("index", "const", "size"):
        return sympy.Integer(0)
    return node.type.elements * _partials(node.type) * dtype.bytes


def _partials(type_: Type) -> Size:
    """How many partial results there are: about one for each ``PARTIAL_COLUMNS`` elements."""
    if type_.partial is None:
        return sympy.Integer(1)
    return sympy.ceiling(sympy.Mul(*(a.size for a in type_.partial.axes)) / PARTIAL_COLUMNS)


def output_bytes(output: Output) -> Size:
    """What a kernel writes of an output."""
    both_ways = 2 if output.into is not None else 1  # an inout parameter is read as well
    return output.type.elements * output.type.dtype.bytes * _partials(output.type) * both_ways
