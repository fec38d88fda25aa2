"""Gradients between kernels are rounded once, as PyTorch rounds them.

A gradient that is rounded for a product is read rounded by all others, too.

The gradient of a residual stream is the operand of a product and goes on past it: ``d_h = d_out + ...`` is rounded for
``d_h @ w`` and added to what comes next. Without this it would be stored twice, rounded and in f32, three times the
bytes of the rounded one. PyTorch rounds it once: the gradient of a bf16 tensor is a bf16 tensor.

Only gradients: a value of the forward keeps the precision that its program gives it. And only for readers that wait for
another product, so in another kernel: a sum over the rows beside the rounding takes what is in registers.

A gradient that no product reads, but another kernel, is rounded for it: that of a normalised matrix, say, on its way
from the product that makes it to the row kernel of the norm. Label: algebraic; one rounding more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from coda.dtypes import F32
from coda.frontend.rounding import nearest_storage
from coda.ir import Node, Program, rewrite
from coda.ops import OPS, build, rebuild
from coda.passes.edges import crosses, stored_values
from coda.passes.labels import Label, Note, note
from coda.passes.merge import ANCHORS, core, merge
from coda.passes.save import is_statistic
from coda.passes.schedule import Schedule, in_memory

NAME = "narrow"


def narrow(program: Program, upstream: Collection[str]) -> tuple[Program, tuple[Note, ...]]:
    """The backward with each gradient in one precision. ``upstream`` names the parameters that are gradients."""
    operands = {core(a) for n in program.nodes() if n.op == "dot" for a in n.args}
    gradients = _gradients(program, upstream)
    rounded = {
        c.args[0]: c
        for c in program.nodes()
        if c.op == "cast" and c in operands and c.args[0] in gradients and c.args[0].dtype == F32
    }
    needs = products_below(program)
    later = {n: [a for a in n.args if a in rounded and needs[n] - needs[a]] for n in program.nodes() if n.op != "dot"}
    readers = {n: again for n, again in later.items() if again}

    def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
        if node not in readers:
            return None
        pairs = zip(node.args, args, strict=True)
        return rebuild(node, [rebuild(rounded[a], [new]) if a in readers[node] else new for a, new in pairs])

    if not readers:
        return program, ()
    label = Label("its other readers see it rounded")
    read = dict.fromkeys(a for again in readers.values() for a in again)
    notes = tuple(note(NAME, "a gradient is stored once, as its product reads it", label, a) for a in read)
    return rewrite(program, visit), notes


def narrow_edges(program: Program, upstream: Collection[str]) -> tuple[Program, tuple[Note, ...]]:
    """The backward with the gradients that lie between kernels rounded for those that read them."""
    schedule = Schedule(program, merge(program)[0])
    stored = stored_values(program, schedule)
    wide = {n for n in (stored & _gradients(program, upstream)) - in_memory(program) if _is_wide(n)}
    if not wide:
        return program, ()
    made: dict[Node, Node] = {}  # as its own kernel has a value
    read: dict[Node, Node] = {}  # as later kernels have it: from memory, or computed again from what is there
    for node in program.nodes():
        late = [node.op not in ANCHORS and crosses(schedule, a, node) for a in node.args]
        made[node] = rebuild(node, [(read if is_late else made)[a] for a, is_late in zip(node.args, late, strict=True)])
        read[node] = made[node] if node in stored else rebuild(node, [read[a] for a in node.args])
        if node in wide:
            read[node] = build("cast", made[node], dtype=nearest_storage(node), saturate=False, span=node.span)
    label = Label("it is rounded between kernels")
    notes = tuple(
        note(NAME, "a gradient is stored as PyTorch stores it", label, n) for n in program.nodes() if n in wide
    )
    changed = program.with_outputs(replace(o, value=made[o.value]) for o in program.outputs)
    return replace(changed, names=tuple((made[n], name) for n, name in program.names if n in made)), notes


def _is_wide(value: Node) -> bool:
    """Whether a value is a computed matrix in f32 among matrices of 16 bits."""
    if value.dtype != F32 or len(value.type.dims) < 2 or OPS[value.op].family == "reduce" or is_statistic(value):
        return False
    return nearest_storage(value).bits == 16


def products_below(program: Program) -> dict[Node, frozenset[Node]]:
    """The products that each value depends on."""
    found: dict[Node, frozenset[Node]] = {}
    for node in program.nodes():
        below = frozenset[Node]().union(*(found[a] for a in node.args))
        found[node] = below | {node} if node.op == "dot" else below
    return found


def _gradients(program: Program, upstream: Collection[str]) -> set[Node]:
    """The values that depend on a gradient."""
    found: set[Node] = set()
    for node in program.nodes():
        is_seed = node.op == "input" and node.attr("name") in upstream
        if is_seed or any(a in found for a in node.args):
            found.add(node)
    return found
