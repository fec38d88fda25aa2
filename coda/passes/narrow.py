"""Gradients between kernels are rounded once, as PyTorch rounds them: the gradient of a bf16 tensor is a bf16 tensor.

The gradient of a residual stream is the operand of a product, or a result, and goes on past it: ``d_h = d_out + ...``
is rounded for ``d_h @ w`` and added to what comes next. Without this pass it would be stored twice, rounded and in f32,
three times the bytes of the rounded one; or, where what comes next is a norm, a second time multiplied by its weight.
So a gradient whose rounding is in memory counts as stored, and later kernels read the rounding. One of which nothing in
memory is the rounding, that of a normalised matrix on its way from a product to the row kernel of the norm, is rounded.

Only gradients: a value of the forward keeps the precision that its program gives it. And only for other kernels: a sum
over the rows beside the rounding takes what is in registers. Label: algebraic; one rounding more.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from coda.dtypes import F32
from coda.frontend.rounding import nearest_storage
from coda.ir import Node, Program
from coda.ops import OPS, build, rebuild
from coda.passes.edges import crosses, stored_values
from coda.passes.labels import Label, Note, note
from coda.passes.merge import ANCHORS, merge
from coda.passes.save import is_statistic
from coda.passes.schedule import Schedule, in_memory

LABEL = Label("it is rounded between kernels")


def narrow(program: Program, upstream: Collection[str]) -> tuple[Program, tuple[Note, ...]]:
    """The backward with the gradients that lie between kernels rounded for those that read them. ``upstream`` names the
    parameters that are gradients."""
    schedule = Schedule(program, merge(program)[0])
    wide = {n for n in _gradients(program, upstream) if _is_wide(n)}
    rounded = {c.args[0] for c in in_memory(program) if c.op == "cast" and c.dtype == nearest_storage(c.args[0])}
    stored = stored_values(program, schedule, wide & rounded)
    wide &= stored - in_memory(program)
    made: dict[Node, Node] = {}  # as its own kernel has a value
    read: dict[Node, Node] = {}  # as later kernels have it: from memory, or computed again from what is there
    for node in program.nodes():
        late = {a for a in node.args if node.op not in ANCHORS and crosses(schedule, a, node)}
        made[node] = rebuild(node, [(read if a in late else made)[a] for a in node.args])
        read[node] = made[node] if node in stored else rebuild(node, [read[a] for a in node.args])
        if node in wide:
            read[node] = build("cast", made[node], dtype=nearest_storage(node), saturate=False, span=node.span)
    changed = program.with_outputs(replace(o, value=made[o.value]) for o in program.outputs)
    before, after = program.users(), changed.users()
    narrowed = [n for n in program.nodes() if n in wide and len(after.get(read[n], ())) > len(before.get(read[n], ()))]
    notes = tuple(note("narrow", "a gradient is stored as PyTorch stores it", LABEL, n) for n in narrowed)
    return replace(changed, names=tuple((made[n], name) for n, name in program.names if n in made)), notes


def _is_wide(value: Node) -> bool:
    """Whether a value is a computed matrix in f32 among matrices of 16 bits."""
    if value.dtype != F32 or len(value.type.dims) < 2 or OPS[value.op].family == "reduce" or is_statistic(value):
        return False
    return nearest_storage(value).bits == 16


def _gradients(program: Program, upstream: Collection[str]) -> set[Node]:
    """The values that depend on a gradient."""
    found: set[Node] = set()
    for node in program.nodes():
        is_seed = node.op == "input" and node.attr("name") in upstream
        if is_seed or any(a in found for a in node.args):
            found.add(node)
    return found
