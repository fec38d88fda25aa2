"""Products that one kernel can compute together.

* ``K``: a sum of products, as in ``dg @ wg + du @ wu``: one accumulation, the operands change at a k-tile boundary.
* ``N``: products with the same left operand (gate and up; q, k and v): the right operands stand side by side.
* ``M``: products with the same right operand (two weight gradients from one activation): the left ones stand below each
  other.

Opaque calls are groups of their own, of kind ``call``: what comes before, what behind them is computed by kernels.

In the IR a merged product stays what it is written as, several ``dot`` nodes; a group says that they belong to one
kernel, which ``partition`` makes of it. N and M are bitwise. K is algebraic: one running sum instead of two, each
rounded to f32, and their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coda.ir import Dim, Node, Program, replaced, topological
from coda.ops.calls import same_call
from coda.passes.axes import add_all
from coda.passes.labels import BITWISE, Label, Note, note

MOST = {"K": 16, "N": 16, "M": 16}  # the most products that one kernel of each kind takes
ANCHORS = ("dot", "call")  # what a kernel is made around
K_LABEL = Label("one accumulation instead of two sums added in f32")


@dataclass(frozen=True)
class Group:
    """Products for one kernel; ``kind`` is "single", "K", "N" or "M". Of kind "call" the results of an opaque call."""

    kind: str
    dots: tuple[Node, ...]

    @property
    def label(self) -> Label:
        return K_LABEL if self.kind == "K" else BITWISE


def core(operand: Node, reader: str = "dot") -> Node:
    """What is in memory of an operand of a product or call: without a transpose, or another view of a parameter or of
    what a call gives."""
    while operand.op == "transpose" or (operand.op == "layout" and _is_view(operand, reader)):
        (operand,) = operand.args
    return operand


def _is_view(layout: Node, reader: str) -> bool:
    (of,) = layout.args
    read = of.type.axes == layout.type.axes or (reader == "dot" and batched_view(layout) is not None)
    return read and of.op in ("input", "call")


def batched_view(layout: Node) -> tuple[int, int, int] | None:
    """Where an operand of a batched product has its three dims in what lies in memory, [M, B, K] or [M, (B K)]: a batch
    that shares a dim with another is outside. None where a kernel does not read it as it is."""
    batch, *matrix = layout.type.dims
    found = dict[Dim, int]()
    for i, dim in enumerate(layout.args[0].type.dims):
        if dim[: len(batch)] == batch:
            found[batch], dim = i, dim[len(batch) :]
        if dim:
            found[dim] = i
    last = len(layout.args[0].type.dims) - 1
    if len(matrix) != 2 or found.keys() != {batch, *matrix} or last not in (found[matrix[0]], found[matrix[1]]):
        return None
    return found[batch], found[matrix[0]], found[matrix[1]]


def merge(program: Program, most: Mapping[str, int] = MOST) -> tuple[tuple[Group, ...], tuple[Note, ...]]:
    """All products of a program in groups, in an order in which kernels can run them. ``most`` says how many products
    the kernels at hand take, by kind; 0 or 1 rules a kind out."""
    merger = _Merger(program)
    for kind, candidates in (("K", merger.sums()), ("N", merger.sharing(0)), ("M", merger.sharing(1))):
        for dots in candidates:
            merger.join(kind, dots, most.get(kind, 0))
    groups = merger.ordered()
    assert groups is not None
    merged = [g for g in groups if g.kind in "KNM"]
    notes = (note("merge", f"{len(g.dots)} products in one kernel ({g.kind})", g.label, g.dots[0]) for g in merged)
    return tuple(groups), tuple(notes)


def together(program: Program, most: Mapping[str, int] = MOST) -> Program:
    """The program with the products that one kernel adds up next to each other in their sum, before its other terms:
    ``d + x @ v + y @ w`` becomes ``(x @ v + y @ w) + d``. Label: that of the merge."""
    apart = next((found for g in merge(program, most)[0] if (found := _apart(program, g)) is not None), None)
    if apart is None:
        return program
    total, leaves, dots = apart
    others = [n for n in leaves if n not in dots]
    return together(replaced(program, {total: add_all([add_all(dots), *others])}), most)


def _apart(program: Program, group: Group) -> tuple[Node, list[Node], list[Node]] | None:
    """The sum in which the products of a group stand apart, its terms and the products in their order."""
    if group.kind != "K":
        return None
    users, stored = program.users(), {o.value for o in program.outputs}

    def leaves(total: Node) -> list[Node]:
        found: list[Node] = []
        for operand in total.args:
            inner = operand.op == "add" and len(users[operand]) == 1 and operand not in stored
            found += leaves(operand) if inner and operand.type.dims == total.type.dims else [operand]
        return found

    sums = [(n, leaves(n)) for n in program.nodes() if n.op == "add" and n.type.dims == group.dots[0].type.dims]
    holding = [(n, terms) for n, terms in sums if set(group.dots) <= set(terms)]
    if any(set(terms) == set(group.dots) for _, terms in holding):
        return None
    total, terms = holding[0]  # the innermost
    return total, terms, [n for n in terms if n in group.dots]


class _Merger:
    """Groups so far; a merge that would make kernels wait for each other is not made."""

    def __init__(self, program: Program):
        self.nodes = program.nodes()
        self.users, self.stored = program.users(), {o.value for o in program.outputs}
        self.dots = [n for n in self.nodes if n.op in ANCHORS]
        self.before = {d: {n for n in topological(d.args) if n.op in ANCHORS} for d in self.dots}
        self.groups = [Group("single", (d,)) for d in self.dots if d.op == "dot"]
        calls = [d for d in self.dots if d.op == "call"]
        self.groups += dict.fromkeys(Group("call", tuple(c for c in calls if same_call(c, d))) for d in calls)

    def sums(self) -> list[list[Node]]:
        """The products that are added up and read by nothing else, sum by sum, outermost first."""
        found = [[d for d in self.terms(n) if d.op == "dot"] for n in reversed(self.nodes) if n.op == "add"]
        return [dots for dots in found if len(dots) > 1]

    def terms(self, total: Node) -> list[Node]:
        """The terms of a sum, through sums that nothing else reads."""
        terms: list[Node] = []
        for operand in total.args:
            alone = len(self.users[operand]) == 1 and operand not in self.stored
            if operand.op == "add" and alone:
                terms += self.terms(operand)
            elif alone and operand.type.dims == total.type.dims:
                terms.append(operand)
        return terms

    def sharing(self, side: int) -> list[list[Node]]:
        """The products that read one matrix on one side, contracted over the same axis."""
        found: dict[object, list[Node]] = {}
        for d in self.dots:
            if d.op == "dot":
                found.setdefault(d.args[side], []).append(d)
        return [dots for dots in found.values() if len(dots) > 1]

    def join(self, kind: str, dots: list[Node], most: int) -> None:
        """Merge those of the products that are still alone, ``most`` at a time, if kernels can be put in order."""
        single = [g for g in self.groups if g.kind == "single" and g.dots[0] in dots]
        if len(single) > most > 1:
            self.join(kind, [g.dots[0] for g in single[:most]], most)
            self.join(kind, [g.dots[0] for g in single[most:]], most)
        elif 1 < len(single) <= most:
            groups, self.groups = self.groups, [g for g in self.groups if g not in single]
            self.groups.append(Group(kind, tuple(d for g in single for d in g.dots)))
            if self.ordered() is None:
                self.groups = groups

    def ordered(self) -> list[Group] | None:
        """The groups so that each comes after those it reads from, those that nothing waits for last, but before an
        opaque call: what they read need not outlive it. None where they wait for each other."""
        needs = {g: set().union(*(self.before[d] for d in g.dots)) for g in self.groups}
        waited_for: set[Node] = set().union(*needs.values())
        pending = sorted(self.groups, key=lambda g: (not waited_for & set(g.dots), self.dots.index(g.dots[0])))
        done: set[Node] = set()
        order: list[Group] = []
        while pending:
            ready = next((g for g in pending if needs[g] <= done), None)
            if ready is None:
                return None
            if ready.kind == "call":
                ready = next((g for g in pending if g.kind != "call" and needs[g] <= done), ready)
            pending.remove(ready)
            order.append(ready)
            done.update(ready.dots)
        return order
