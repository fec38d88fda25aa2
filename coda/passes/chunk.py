"""Cut an axis into chunks: the same program for one chunk of the axis after the other.

The backward of a loss makes the gradient of its logits, ``d_z`` over rows and the whole vocabulary: as large as the
logits, and, where those were kept, beside them. In chunks of the vocabulary only a part of it is ever there, and the
products with it stay short enough for the L2 cache:

* ``before``: zeros, where sums begin; and what the chunks read that does not vary over the axis;
* ``body``: everything over the axis, for the positions from ``start`` of it. Tensors over the axis are seen in parts;
  a sum over the axis (``d_z @ w``) is added, in f32, to what the chunks before have left;
* ``after``: what is made of the sums.

All are programs like any other. What needs the whole axis at once (a maximum, a log-sum-exp, a sum that is used
over the axis again) is refused with a sentence. Label: algebraic where there are sums (they are added up in f32, chunk
by chunk), else bitwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from coda.dtypes import F32, I64
from coda.errors import CodaError, Diagnostic
from coda.ir import Axis, Dim, Node, Output, Param, Program, Type, size_symbol, substitute, topological
from coda.ops import OPS, build
from coda.passes.axes import conform, number
from coda.passes.labels import BITWISE, Label, Note
from coda.passes.naming import Fresh, taken_names
from coda.passes.schedule import in_memory

LONG = 1 << 16  # positions of a contraction beyond which a product falls behind (docs/performance.md)

_VIEWS = {"transpose", "layout", "default"}  # of a parameter: read where it is
_ALIKE = {"cast", "partial", "finish", *_VIEWS}  # besides arithmetic: what is the same of a part


@dataclass(frozen=True)
class Chunked:
    """A program in chunks. ``part`` is the axis of a chunk, ``parts`` says of which tensor of the program each tensor
    over ``part`` is a part, ``start`` is the parameter of the body that gets the chunk's first position."""

    program: Program
    axis: Axis
    part: Axis
    start: str
    before: tuple[Program, ...]
    body: Program
    after: Program | None
    parts: dict[str, str]
    notes: tuple[Note, ...]


def chunk_axis(program: Program, backward: Program) -> str | None:
    """The axis along which a backward is cut: the columns of a product of which the program itself never stores
    anything over rows and columns, as the logits of a loss; or one that a product of the backward contracts, known to
    be very long, as where logits are returned. None where there is none that can be cut."""
    for axis in dict.fromkeys((*_never_stored(program), *_long(backward))):
        with contextlib.suppress(CodaError):
            return chunk(backward, axis.name).axis.name
    return None


def _never_stored(program: Program) -> Iterator[Axis]:
    stored = [n.type.names for n in in_memory(program)]
    for node in program.nodes():
        rows, columns = node.type.dims if node.op == "dot" and len(node.type.dims) == 2 else ((), ())
        if len(columns) == 1 and not any({a.name for a in (*rows, *columns)} <= s for s in stored):
            yield columns[0]


def _long(backward: Program) -> Iterator[Axis]:
    for node in backward.nodes():
        contracted = node.args[0].type.dims[-1] if node.op == "dot" and len(node.type.dims) == 2 else ()
        if len(contracted) == 1 and contracted[0].size.is_Integer and contracted[0].size > LONG:
            yield contracted[0]


def chunk(program: Program, axis: str) -> Chunked:
    """The program in chunks of the axis of this name. Raises CodaError where it needs the whole axis at once."""
    found = next((a for a in program.axes if a.name == axis), None)
    if found is None:
        raise CodaError.of(f"program '{program.name}' has no axis '{axis}' to be computed in chunks")
    try:
        return _Cutter(program, found).run()
    except CodaError as error:
        error.source = error.source or program.source
        raise


@dataclass
class _Cutter:
    program: Program
    axis: Axis
    sums: dict[Node, str] = field(default_factory=dict)  # over the axis: the names of what the chunks add to
    shared: dict[Node, str] = field(default_factory=dict)  # computed before the chunks: their names
    new: dict[Node, Node] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fresh = Fresh(taken_names(self.program))
        name = self.fresh(f"{self.axis.name}_chunk")
        self.part = Axis(name, size_symbol(name))
        self.start = self.fresh(f"{self.axis.name}_start")
        self.called = dict(self.program.names)
        self.after = self._after()

    def run(self) -> Chunked:
        wide = [o for o in self.program.outputs if self.is_wide(o.value)]
        late = [o for o in self.program.outputs if o.value in self.after]
        early = [o for o in self.program.outputs if o not in wide and o not in late]
        bodies = [Output(s, self.inside(n), _sum_type(n), into=s) for n, s in self.sums.items()]
        bodies += [self._part_output(o) for o in wide]
        if not bodies:
            raise CodaError.of(f"nothing of program '{self.program.name}' varies over '{self.axis}'")
        zeros = [Output(s, conform(number(0.0), _sum_type(n)), _sum_type(n)) for n, s in self.sums.items()]
        shared = [Output(s, n, n.type) for n, s in self.shared.items()]
        before = (self._program("zeros", zeros), self._program("before", [*shared, *early]))
        return Chunked(
            self.program, self.axis, self.part, self.start, tuple(p for p in before if p), self._body(bodies),
            self._after_program(late), dict(self.parts), (self._note(),),
        )  # fmt: skip

    # What is computed when.

    def is_wide(self, node: Node) -> bool:
        return self.axis.name in node.type.names

    def _after(self) -> set[Node]:
        """What sums over the axis are made into; notes the sums."""
        after: set[Node] = set()
        from_product: set[Node] = set()
        for node in self.program.nodes():
            late = next((a for a in node.args if a in after), None)
            if node.op == "dot" or any(a in from_product for a in node.args):
                from_product.add(node)
            if late is not None:
                if any(map(self.is_wide, (node, *node.args))):
                    raise self.refusal(f"a sum over '{self.axis}' is used over '{self.axis}' again", late)
                after.add(node)
            elif self.is_wide(node):
                continue
            elif any(map(self.is_wide, node.args)) and node in from_product:
                if node.op not in ("dot", "reduce_sum"):
                    what = node.op.removeprefix("reduce_")
                    raise self.refusal(f"'{what}' over '{self.axis}' takes all of it at once", node)
                result = next(o.name for o in self.program.outputs if node in topological([o.value]))
                self.sums[node] = self.fresh(f"{self.called.get(node, result)}_sum")
                after.add(node)
        return after

    def refusal(self, why: str, node: Node) -> CodaError:
        return CodaError([Diagnostic(f"{why}, so it is not computed in chunks", node.span)])

    # The body.

    def inside(self, node: Node) -> Node:
        """What a value over the axis, or a sum, is of one chunk."""
        if node not in self.new:
            here = node in self.sums or self.is_wide(node)
            self.new[node] = self._of_chunk(node) if here else self._given(node)
        return self.new[node]

    def _of_chunk(self, node: Node) -> Node:
        if node.op == "input":
            name = self.fresh(f"{node.attr('name')}_chunk")
            self.parts[name] = node.attr("name")
            return build("input", name=name, type=self.part_type(node.type, node))
        if node.op == "index":
            return build("add", build("index", axis=self.part), self._first(), span=node.span)
        if node.op == "eq" and self._compares_positions(node):
            return build("eq", *map(self._from_start, node.args), span=node.span)
        attrs = dict(node.attrs)
        if node.op == "layout":
            attrs["dims"] = tuple(map(self._part_dim, attrs["dims"]))
        elif OPS[node.op].family == "reduce" and "axes" in attrs:
            attrs["axes"] = tuple(self.part.name if a == self.axis.name else a for a in attrs["axes"])
        elif node.op != "dot" and node.op not in _ALIKE and OPS[node.op].family != "pointwise":
            raise self.refusal(f"'{node.op}' is over '{self.axis}'", node)
        return build(node.op, *map(self.inside, node.args), span=node.span, **attrs)

    def _first(self) -> Node:
        return build("input", name=self.start, type=Type(I64))

    def _compares_positions(self, node: Node) -> bool:
        """Whether what does not vary over the axis is compared with the position along it: ``index(V) == label``. Then
        the start of the chunk is subtracted once, not added at each position."""
        wide = [a for a in node.args if self.is_wide(a)]
        return len(wide) == 1 and wide[0].op == "index" and all(a.dtype.kind == "int" for a in node.args)

    def _from_start(self, position: Node) -> Node:
        """A position along the axis, counted from the start of the chunk."""
        if position.op == "index":
            return build("index", axis=self.part)
        return build("sub", self.inside(position), self._first(), span=position.span)

    def _given(self, node: Node) -> Node:
        """A value that does not vary over the axis: a parameter, or computed before the chunks. What is no float is
        computed again, for it has no tensor that a kernel would store."""
        if not node.args or (node.op in _VIEWS and node.args[0].op == "input"):
            return node
        if node.dtype.kind == "float" and (node.type.dims or not _is_arithmetic(node)):
            self.shared[node] = self.fresh(self.called.get(node, "shared"))
            return build("input", name=self.shared[node], type=node.type)
        return build(node.op, *map(self.inside, node.args), span=node.span, **dict(node.attrs))

    def _part_dim(self, dim: Dim) -> Dim:
        return (self.part,) if dim == (self.axis,) else dim

    def part_type(self, type_: Type, node: Node) -> Type:
        dims = tuple(map(self._part_dim, type_.dims))
        if any(a == self.axis for dim in dims for a in dim):
            raise self.refusal(f"'{self.axis}' shares a dim of {type_} with other axes", node)
        return Type(type_.dtype, dims)

    def _part_output(self, output: Output) -> Output:
        name = self.fresh(f"{output.name}_chunk")
        self.parts[name] = output.into or output.name
        type_ = self.part_type(output.type, output.value)
        return Output(name, self.inside(output.value), type_, into=name if output.into else None)

    # The programs.

    def _body(self, outputs: list[Output]) -> Program:
        outputs = sorted(outputs, key=lambda o: o.into is None)
        names = {self.new[n]: name for n, name in self.called.items() if n in self.new and self.new[n].args}
        return Program.of(f"{self.program.name}_chunk", self._params(outputs), outputs, names)

    def _program(self, suffix: str, outputs: list[Output]) -> Program | None:
        if not outputs:
            return None
        outputs = sorted(outputs, key=lambda o: o.into is None)
        return Program.of(f"{self.program.name}_{suffix}", self._params(outputs), outputs, self.called)

    def _after_program(self, outputs: list[Output]) -> Program | None:
        known = {n: build("input", name=s, type=_sum_type(n)) for n, s in self.sums.items()}
        new = substitute((o.value for o in outputs), known)
        return self._program("after", [replace(o, value=new[o.value]) for o in outputs])

    def _params(self, outputs: Iterable[Output]) -> list[Param]:
        """The parameters that outputs read or add to: the program's, in their order, then those of the chunks."""
        read = {n.attr("name"): n for n in topological(o.value for o in outputs) if n.op == "input"}
        added = {o.into: o for o in outputs if o.into is not None}
        params = []
        for param in self.program.params:
            names = [param.name, *(part for part, whole in self.parts.items() if whole == param.name)]
            for name in names:
                if name in read or name in added:
                    type_ = read[name].type if name in read else added[name].type
                    params.append(replace(param, name=name, type=type_, inout=name in added))
        known = {p.name for p in params}
        params += [Param(n, node.type) for n, node in read.items() if n not in known and n != self.start]
        params += [Param(self.start, Type(I64))] if self.start in read else []
        return params + [Param(n, o.type, inout=True) for n, o in added.items() if n not in known]

    def _note(self) -> Note:
        label = Label(f"sums over '{self.axis}' are added up in f32, chunk by chunk") if self.sums else BITWISE
        return Note("chunk", f"'{self.program.name}' is computed in chunks of '{self.axis}'", label)


def _sum_type(node: Node) -> Type:
    return node.type.with_dtype(F32)


def _is_arithmetic(node: Node) -> bool:
    """Whether a scalar is made of scalars by arithmetic alone, which each kernel does for itself."""
    inside = topological([node])
    return all(n.op in ("input", "const") or OPS[n.op].family == "pointwise" or n.op in _ALIKE for n in inside)
