"""The IR: programs as hash-consed DAGs of frozen nodes over named axes.

Everything else is built on four ideas:

* An ``Axis`` is a name with a symbolic size (a sympy expression); a name is not a size. ``dim A = D`` gives two
  axes of equal size that never broadcast into each other.
* A ``Type`` is a dtype and *dims*: each dim is a group of axes, slowest first, like einops' ``(B T)``. Elementwise
  operations look at axes by name only; the grouping matters to ``@`` (whose operands have two dims) and to the
  memory order of parameters and outputs.
* A ``Node`` is an operation from the table in ``coda.ops`` applied to nodes. Nodes are interned: equal nodes are
  the same object, so common subexpressions are found by construction and equality is identity. Operand order is
  kept as written: the IR never re-associates arithmetic.
* Arithmetic between casts is f32. A ``cast`` is a rounding; no pass may drop one.

A ``Program`` is immutable; passes are functions ``Program -> Program``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy

from coda.dtypes import DType
from coda.errors import Source, Span

Size: TypeAlias = sympy.Expr


def size_symbol(name: str) -> sympy.Symbol:
    """The symbol that stands for the size of a free axis."""
    return sympy.Symbol(name, integer=True, positive=True)


@dataclass(frozen=True)
class Axis:
    """A named axis. A free axis has its own symbol as size; a derived or static one any other expression."""

    name: str
    size: Size

    @classmethod
    def free(cls, name: str) -> Axis:
        return cls(name, size_symbol(name))

    @classmethod
    def of(cls, name: str, size: int | Size) -> Axis:
        return cls(name, sympy.sympify(size))

    @property
    def static(self) -> int | None:
        """The size as an int where it is known from the source alone."""
        return int(self.size) if self.size.is_Integer else None

    @property
    def is_free(self) -> bool:
        return self.size == size_symbol(self.name)

    def __str__(self) -> str:
        return self.name


Dim = tuple[Axis, ...]


@dataclass(frozen=True)
class Partial:
    """What partial results are parts of: a reduction of this kind ("sum", ..) over these axes."""

    kind: str
    axes: tuple[Axis, ...]

    def __str__(self) -> str:
        return f"partial[{self.kind}, {_dim_text(self.axes)}]"


@dataclass(frozen=True)
class Type:
    """A dtype over dims; each dim is a group of axes, slowest first. ``()`` dims is a scalar.

    ``partial``: a tensor in memory of partial results, one for each tile of the kernel that left them. They lie in
    front of the dims, and their number is known to nobody but that kernel. Only ``finish`` reads them.
    """

    dtype: DType
    dims: tuple[Dim, ...] = ()
    partial: Partial | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The atomic axes in memory order, slowest first."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def named(self) -> tuple[Axis, ...]:
        """The axes that the type mentions: also those that partial results are reduced over."""
        return (*(self.partial.axes if self.partial else ()), *self.axes)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(axis.name for axis in self.axes)

    def axis(self, name: str) -> Axis | None:
        return next((a for a in self.axes if a.name == name), None)

    def with_dtype(self, dtype: DType) -> Type:
        """Finished values of this dtype."""
        return Type(dtype, self.dims)

    @property
    def elements(self) -> Size:
        return sympy.Mul(*(a.size for a in self.axes))

    def __str__(self) -> str:
        before = f"{self.partial} " if self.partial else ""
        return f"{before}{self.dtype}[{', '.join(map(_dim_text, self.dims))}]"


def _dim_text(dim: Dim) -> str:
    names = " ".join(a.name for a in dim)
    return names if len(dim) == 1 else f"({names})"


def dim_size(dim: Dim) -> Size:
    return sympy.Mul(*(a.size for a in dim))


NOMINAL = 4096  # the size that a symbolic axis is assumed to have where costs are compared


def nominal(size: Size) -> int:
    """A size with every symbolic axis at its assumed size."""
    return int(size.subs({s: NOMINAL for s in size.free_symbols}))


@dataclass(frozen=True, eq=False)
class Node:
    """An operation applied to nodes. Make nodes with ``coda.ops.build`` (types are inferred) or ``intern``."""

    op: str
    args: tuple[Node, ...]
    attrs: tuple[tuple[str, Any], ...]
    type: Type
    span: Span | None = field(default=None, repr=False)  # where it was last written; not part of identity

    def attr(self, key: str) -> Any:
        return dict(self.attrs)[key]

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    def __repr__(self) -> str:
        attrs = "".join(f", {k}={v}" for k, v in self.attrs)
        return f"{self.op}({', '.join(a.op for a in self.args)}{attrs}): {self.type}"


_interned: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()


def intern(op: str, args: Iterable[Node], attrs: dict[str, Any], type: Type, span: Span | None = None) -> Node:
    """The one node with these parts. The span of the first maker is kept (but see ``written_at``)."""
    args, frozen = tuple(args), tuple(sorted(attrs.items()))
    # Python finds 1 == 1.0 == True and 0.0 == -0.0, and nan != nan: floats are told apart by their repr, the rest by
    # the dtype in `type`.
    key = (op, args, tuple((k, repr(v) if isinstance(v, float) else v) for k, v in frozen), type)
    node = _interned.get(key)
    if node is None:
        node = Node(op, args, frozen, type, span)
        _interned[key] = node
    return node


def written_at(node: Node, span: Span | None) -> Node:
    """The node, found in source text here: an equal one of an earlier program may have left its place behind."""
    object.__setattr__(node, "span", span)  # not part of the identity
    return node


@dataclass(frozen=True)
class Param:
    """An input of a program.

    ``optional``: may be absent, and is then the identity of the + or * it stands in. ``default``: the value of a
    scalar that is not given. ``inout``: an output accumulates into it. ``frozen``: a ``const`` weight that passes
    may fold into. ``span`` is where it is declared.
    """

    name: str
    type: Type
    optional: bool = False
    default: float | int | None = None
    inout: bool = False
    frozen: bool = False
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def is_scalar(self) -> bool:
        return not self.type.dims


@dataclass(frozen=True)
class Output:
    """A result: ``value`` stored with dtype and memory order of ``type``. The value's dtype is already that of
    ``type`` (the checker has inserted the cast). ``into`` names the inout parameter it accumulates into. Where the
    value is unfinished, ``type`` is that of partial results."""

    name: str
    value: Node
    type: Type
    into: str | None = None

    @property
    def is_partial(self) -> bool:
        """Whether this is an unfinished row or column reduction: one value for each tile, see ``ops.reduce``."""
        return self.value.op == "partial"


@dataclass(frozen=True)
class Program:
    """Inputs, outputs and the DAG between them. ``axes`` are the axes in order of declaration. ``names`` says what
    values are called in the source: the printer uses it, and it means nothing else."""

    name: str
    params: tuple[Param, ...]
    outputs: tuple[Output, ...]
    axes: tuple[Axis, ...] = ()
    source: Source | None = field(default=None, compare=False, repr=False)
    names: tuple[tuple[Node, str], ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(
        cls, name: str, params: Iterable[Param], outputs: Iterable[Output], names: Mapping[Node, str] | None = None
    ) -> Program:
        """A program made by a pass: the axes are those that appear."""
        params, outputs = tuple(params), tuple(outputs)
        axes = appearing_axes(params, outputs)
        return cls(name, params, outputs, axes, names=tuple((names or {}).items()))

    def param(self, name: str) -> Param:
        return next(p for p in self.params if p.name == name)

    def nodes(self) -> list[Node]:
        """All nodes reachable from the outputs, operands before users, in a deterministic order."""
        return topological(o.value for o in self.outputs)

    def users(self) -> dict[Node, list[Node]]:
        """For each node the nodes that read it (outputs are not counted)."""
        users: dict[Node, list[Node]] = {n: [] for n in self.nodes()}
        for node in users:
            for arg in dict.fromkeys(node.args):
                users[arg].append(node)
        return users

    @property
    def free_axes(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.is_free)

    def with_outputs(self, outputs: Iterable[Output]) -> Program:
        outputs = tuple(outputs)
        return replace(self, outputs=outputs, axes=appearing_axes(self.params, outputs))


def appearing_axes(params: Iterable[Param], outputs: Iterable[Output]) -> tuple[Axis, ...]:
    """The axes of a program in order of appearance: in its parameters, then in its values, operands first."""
    outputs = list(outputs)
    types = [p.type for p in params] + [n.type for n in topological(o.value for o in outputs)]
    return tuple(dict.fromkeys(axis for t in types for axis in t.named))


def topological(roots: Iterable[Node], operands: Callable[[Node], Iterable[Node]] | None = None) -> list[Node]:
    """Nodes in dependency order; iterative, so deep programs do not meet the recursion limit. ``operands(node)``
    narrows what is followed."""
    follow = operands or (lambda node: node.args)
    order: dict[Node, None] = {}
    stack: list[tuple[Node, Iterator[Node]]] = []
    for root in roots:
        if root in order:
            continue
        stack.append((root, iter(follow(root))))
        while stack:
            node, pending = stack[-1]
            child = next((a for a in pending if a not in order), None)
            if child is None:
                order[node] = None
                stack.pop()
            else:
                stack.append((child, iter(follow(child))))
    return list(order)


def rewrite(program: Program, visit: Callable[[Node, tuple[Node, ...]], Node | None]) -> Program:
    """Rebuild the DAG bottom-up. ``visit(node, new_args)`` returns the replacement, or None to keep the node
    (re-made over its new operands)."""
    from coda.ops import rebuild

    new: dict[Node, Node] = {}
    for node in program.nodes():
        args = tuple(new[a] for a in node.args)
        replacement = visit(node, args)
        new[node] = replacement if replacement is not None else rebuild(node, args)
    rebuilt = program.with_outputs(replace(o, value=new[o.value]) for o in program.outputs)
    return replace(rebuilt, names=tuple((new[node], name) for node, name in program.names if node in new))


def substitute(roots: Iterable[Node], replacements: Mapping[Node, Node]) -> dict[Node, Node]:
    """What becomes of the roots and all below them when some nodes are replaced. What only replaced nodes read is not
    visited."""
    from coda.ops import rebuild

    new = dict(replacements)
    for node in topological(roots, lambda node: () if node in replacements else node.args):
        if node not in new:
            new[node] = rebuild(node, [new[a] for a in node.args])
    return new


def replaced(program: Program, replacements: Mapping[Node, Node]) -> Program:
    """The program with some values replaced in all that reads them; names stay with what became of their values."""
    new = substitute((o.value for o in program.outputs), replacements)
    changed = program.with_outputs(replace(o, value=new[o.value]) for o in program.outputs)
    return replace(changed, names=tuple((new[n], name) for n, name in program.names if n in new))
