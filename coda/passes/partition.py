"""From a block program to kernels, each a program itself.

Every value gets a stage (``schedule.py``): the product whose epilogue computes it, or the row kernel behind it. What
has to be in memory is then decided by bytes:

* results, and operands of products, because the tensor cores read memory;
* of what a later stage reads, the cheapest set of values from which it can be computed: a minimum cut, in which a
  product or reduction is never computed again, and pointwise math always may be.

A kernel is the set of stored values of one stage, with all that lies between them and what is in memory already:

* ``gemm``: the products of one group and their epilogue;
* ``row``: a thread block owns whole rows, for a norm whose result is needed whole, and the first statistics;
* ``call``: an opaque function, which coda does not lower;
* ``map``: elementwise; ``finish``: adds up the tiles' partial reductions, in fixed order, and computes statistics.

Nothing is rounded at an edge that the program does not round: an edge has the dtype of its value. So partition is
bitwise, and ``assemble`` puts the kernels together to the very program they came from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import sympy

from coda.ir import Node, Output, Param, Program, rewrite, substitute, topological
from coda.ops import OPS, build
from coda.ops.reduce import partial_of, read_of
from coda.passes.bare import bare_values, round_bare
from coda.passes.edges import stored_values
from coda.passes.kernels import Kernel, Partition
from coda.passes.labels import Note
from coda.passes.merge import ANCHORS, MOST, Group, core, merge, together
from coda.passes.naming import Fresh, source_name, taken_names
from coda.passes.schedule import LEAVES, Schedule, is_reduction

_STEMS = {"dot": "acc", "rsqrt": "r", "reduce_mean": "mean", "reduce_sum": "sums"}


def partition(program: Program, most: Mapping[str, int] = MOST, bare: Collection[int] = ()) -> Partition:
    """The kernels of a program with any number of products; ``most`` limits what is merged, see ``merge.py``. ``bare``
    numbers products that are stored as they are, in the dtype of the matrices around them (see ``bare.py``)."""
    program = round_bare(together(program, most), bare)
    program = _finish_means(program, Schedule(program, merge(program, most)[0], bare_values(program, bare)))
    groups, notes = merge(program, most)
    return _Partitioner(program, Schedule(program, groups, bare_values(program, bare))).run(notes)


def _finish_means(program: Program, schedule: Schedule) -> Program:
    """A mean that the tiles of a kernel begin is a sum, divided where it is finished."""

    def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
        if node.op != "reduce_mean" or node not in schedule.late:
            return None
        sizes = [a.size for a in node.args[0].type.axes if a.name in node.attr("axes")]
        total = build("reduce_sum", *args, axes=node.attr("axes"), span=node.span)
        return build("div", total, build("size", expr=sympy.Mul(*sizes)), span=node.span)

    if any(o.is_partial and o.value.args[0].op == "reduce_mean" for o in program.outputs):
        return program  # the program itself stores an unfinished mean
    return rewrite(program, visit)


class _Partitioner:
    def __init__(self, program: Program, schedule: Schedule):
        self.program, self.schedule = program, schedule
        self.nodes, self.stage, self.late = program.nodes(), dict(schedule.stage), schedule.late
        self.behind: dict[Node, int] = {}  # the stage of the latest product, or call, that a value depends on
        for n in self.nodes:
            before = max((self.behind[a] for a in n.args), default=0)
            self.behind[n] = self.stage[n] if n.op in ANCHORS else before
        self.users = program.users()
        self.fresh = Fresh(taken_names(program))
        self.results = [o.value for o in program.outputs]
        self.stored: set[Node] = set()
        self.tensors: dict[Node, Output] = {}
        self.order: dict[str, int] = {}  # tensors, in the order in which they were first needed

    def run(self, notes: tuple[Note, ...]) -> Partition:
        self.stored = stored_values(self.program, self.schedule)
        self.host_maps()
        self.host_sums()
        kernels = _in_order([k for roots in self.kernel_roots() for k in self.kernels(roots)])
        named = _named(kernels, self.program)
        reasons = tuple(Note("partition", f"{k.name}: {k.reason}") for k in named)
        return Partition(self.program, named, (*notes, *reasons))

    # What is in memory.

    def host_maps(self) -> None:
        """Move stored values of stage 0 into the epilogue of a product that reads all they need anyway."""
        for node in sorted(self.stored, key=self.nodes.index):
            inside = self.closure([node])
            if self.stage[node] or any(OPS[n.op].family == "reduce" for n in inside):
                continue
            needed = self.matrices(inside)
            readers = [self.stage[u] for u in self.reading(node)]
            for index, group in enumerate(self.schedule.groups, 1):
                same = group.dots[0].type.names == node.type.names
                if (
                    same
                    and group.kind != "call"
                    and all(2 * index < stage for stage in readers)
                    and needed <= self.matrices(self.stage_closure(2 * index))
                ):
                    self.stage[node] = 2 * index
                    break

    def host_sums(self) -> None:
        """Move sums over the rows that are a kernel of their own in stage 0 into a kernel behind a product that owns
        rows and reads all they need anyway."""
        for roots in self.kernel_roots():
            inside = self.closure(roots)
            over_rows = [n for n in inside if OPS[n.op].family == "reduce"]
            if self.stage[roots[0]] or any(n not in self.late for n in (*roots, *over_rows)):
                continue
            readers = [self.stage[u] for n in roots for u in self.reading(n) if u not in roots]
            behind = sorted({s for n in self.stored if (s := self.stage[n]) % 2 == 1})
            for stage in (s for s in behind if all(s < reader for reader in readers)):
                if self.matrices(inside) <= self.matrices(self.stage_closure(stage)):
                    self.stage |= dict.fromkeys(roots, stage)
                    self.behind |= dict.fromkeys(roots, stage - 1)
                    break

    def reading(self, node: Node) -> Iterator[Node]:
        """The operations that read a value from memory: through what only renames axes."""
        for user in self.users[node]:
            if user.op in ("transpose", "layout"):
                yield from self.reading(user)
            else:
                yield user

    def stage_closure(self, stage: int) -> list[Node]:
        return self.closure([n for n in self.nodes if n in self.stored and self.stage[n] == stage])

    def closure(self, roots: list[Node]) -> list[Node]:
        """The roots and what is computed for them, down to what is in memory."""
        here = set(roots)

        def operands(node: Node) -> Iterable[Node]:
            return () if node in self.stored and node not in here else node.args

        return topological(roots, operands)

    def matrices(self, nodes: list[Node]) -> set[Node]:
        """What the epilogue reads element by element. The operands of products do not count."""
        read = {a for n in nodes if n.op != "dot" for a in n.args}
        return {n for n in read if (n.op == "input" or n in self.stored) and len(n.type.axes) > 1}

    # Kernels.

    def kernel_roots(self) -> list[list[Node]]:
        """The stored values of each kernel: those of one product stage, or of another stage, behind the same product
        and of the same rows."""
        found: dict[tuple[int, int, frozenset[str]], list[Node]] = {}
        leaves = [n for n in dict.fromkeys(self.results) if n.op in LEAVES]
        for node in [*(n for n in self.nodes if n in self.stored), *leaves]:
            stage = self.stage[node]
            rows = frozenset[str]() if self.schedule.group(stage) else self.rows(node)
            found.setdefault((stage, self.behind[node] if rows else stage, rows), []).append(node)
        ordered = sorted(found.items(), key=lambda item: item[0][:2])
        return [part for (*_, rows), roots in ordered for part in (self.apart(roots) if rows else [roots])]

    def apart(self, roots: list[Node]) -> list[list[Node]]:
        """Stored values of the same rows by themselves where they share no matrix and have columns of their own: the
        heads of q and of k would be loops inside each other."""
        parts: list[tuple[set[object], list[Node]]] = []
        for root in roots:
            inside = self.closure([root])
            shared: set[object] = {*self.matrices(inside), *(set(inside) & set(roots))}
            shared.add(max((n.type.names for n in inside), key=len))
            joined = [p for p in parts if p[0] & shared]
            parts = [p for p in parts if p not in joined]
            parts.append((shared.union(*(p[0] for p in joined)), [*(n for p in joined for n in p[1]), root]))
        return [sorted(part, key=roots.index) for _, part in parts]

    def rows(self, node: Node) -> frozenset[str]:
        """The axes over which the rows run of which a kernel makes a value: those of some product's left operand, if
        they are among those it works over, else those of the value's slowest dim."""
        finished = topological([node], lambda n: n.args if n in self.late else ())  # with what is stored on the way
        made = [node, *(n for n in finished if n in self.late and self.stage[n] == self.stage[node])]
        widest = max((n.type for n in self.closure(made)), key=lambda t: len(t.axes))
        for dot in self.nodes:
            dims = core(dot.args[0]).type.dims[:-1] if dot.op == "dot" else ()
            rows = frozenset(a.name for dim in dims for a in dim)
            if rows and rows <= widest.names:
                return rows
        return frozenset(a.name for dim in node.type.dims[:1] for a in dim)

    def kernels(self, roots: list[Node]) -> list[Kernel]:
        """The kernel of some stored values, and the finish kernel behind it where some are late."""
        late = [n for n in roots if n in self.late and n.op != "partial"]
        begun = [n for n in self.closure(late) if n in late or n not in self.stored]
        partials = {n: self.partial(n) for n in begun if self.is_unfinished(n)}
        outputs = [o for n in roots if n not in late for o in self.writes(n)]
        outputs += [o for o in partials.values() if o not in outputs]
        group = self.schedule.group(self.stage[roots[0]])
        kernels = [self.kernel(outputs, self.tensors_but({*roots, *partials}), group)] if outputs else []
        if late:
            finished = [o for n in late for o in self.writes(n)]
            others = self.tensors_but(set(late))
            kernels.append(replace(self.kernel(finished, others | partials, None), kind="finish"))
        return kernels

    def is_unfinished(self, node: Node) -> bool:
        """Whether the tiles of a kernel can only begin a reduction."""
        return is_reduction(node) and node in self.late and not any(a in self.late for a in node.args)

    def kernel(self, outputs: list[Output], tensors: Mapping[Node, Output], group: Group | None) -> Kernel:
        """The program that computes some outputs from parameters and tensors in memory."""
        roots = [o.value for o in outputs]
        new = substitute(roots, {n: _read(o, n) for n, o in tensors.items()})
        results = sorted((replace(o, value=new[o.value]) for o in outputs), key=lambda o: o.into is None)
        read = {n.attr("name") for n in topological(o.value for o in results) if n.op == "input"}
        params = [p for p in self.program.params if p.name in read or any(o.into == p.name for o in results)]
        known = {p.name for p in params}
        by_name = {o.name: o for o in tensors.values() if o.name in read - known}
        params += [Param(o.name, o.type) for o in sorted(by_name.values(), key=lambda o: self.order[o.name])]
        names = {new[n]: called for n, called in self.program.names if n in new}
        computes = topological(roots, lambda n: () if n in tensors else n.args)
        kind = ("call" if group.kind == "call" else "gemm") if group else "row" if _has_statistics(computes) else "map"
        program = Program.of(self.program.name, params, results, names)
        return Kernel("", kind, program, group, frozenset(n for n in computes if n.args and n not in tensors))

    # Tensors.

    def tensors_but(self, made_here: set[Node]) -> dict[Node, Output]:
        """The tensors that a kernel can read: those of all stored values but the ones it makes."""
        return {n: self.tensor(n) for n in self.nodes if n in self.stored and n not in made_here}

    def tensor(self, node: Node) -> Output:
        """The tensor from which kernels read a stored value: an output of the program, or one made for it."""
        if node not in self.tensors:
            results = (o for o in self.program.outputs if o.value is node and o.into is None)
            self.tensors[node] = next(results, None) or Output(self.fresh(self.called(node)), node, node.type)
            self.order[self.tensors[node].name] = len(self.order)
        return self.tensors[node]

    def called(self, node: Node) -> str:
        """What the source calls a value, or what makes it."""
        return source_name(node, dict(self.program.names)) or _STEMS.get(node.op, "t")

    def writes(self, node: Node) -> list[Output]:
        """What a kernel stores of a value: every output of the program that it is, or else the tensor others read."""
        results = [o for o in self.program.outputs if o.value is node]
        if any(o.into is None for o in results) or (results and not self.users[node]):
            return results
        return [*results, self.tensor(node)]

    def partial(self, reduction: Node) -> Output:
        """The unfinished form of a reduction: the program's own output of it, if there is one."""
        value = build("partial", reduction, span=reduction.span)
        own = next((o for o in self.program.outputs if o.value is value), None)
        stored = replace(value.type, partial=partial_of(reduction))
        output = own or Output(self.fresh(f"{self.called(reduction)}_partial"), value, stored)
        self.order[output.name] = len(self.order)
        return output


def _has_statistics(nodes: list[Node]) -> bool:
    """Whether a kernel needs a reduction's result, more than to begin it."""
    begun = {n.args[0] for n in nodes if n.op == "partial"}
    return any(is_reduction(n) and n not in begun for n in nodes)


def _read(tensor: Output, node: Node) -> Node:
    """A tensor as kernels read it, with the dims of the value it holds."""
    value = read_of(tensor.name, tensor.type)
    return value if value.type.dims == node.type.dims else build("layout", value, dims=node.type.dims)


def _in_order(kernels: list[Kernel]) -> list[Kernel]:
    """Each kernel after those it reads from; otherwise as they come."""
    pending, order = list(kernels), list[Kernel]()
    while pending:
        waiting = {name for k in pending for name in k.writes}
        ready = next(k for k in pending if not (k.reads - k.inouts) & (waiting - k.writes))
        pending.remove(ready)
        order.append(ready)
    return order


def _named(kernels: list[Kernel], program: Program) -> tuple[Kernel, ...]:
    """The kernels called mlp_1_gemm, mlp_2_row ... in their order."""
    names = [f"{program.name}_{i}_{k.kind}" for i, k in enumerate(kernels, 1)]
    return tuple(replace(k, name=n, program=replace(k.program, name=n)) for k, n in zip(kernels, names, strict=True))
