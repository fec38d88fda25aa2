"""Exponentials that a rounding must not spoil: logits and their log-sum-exp, both as they are kept.

The gradient of a log-sum-exp is ``exp(z - lse)``: nearly 1 at the label of a right prediction, where 1 is taken off
again. Logits that are kept in bf16 and an ``lse`` of the exact ones would leave a rounding of ``z`` there, many times
what eager PyTorch leaves, which takes both from rounded logits. So where gradients take the exponential of the
difference of a value that is read rounded and of a statistic of it, the forward rounds it before anything reads it.

Label: algebraic (a rounding is added, where eager PyTorch has it).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from coda.frontend.rounding import nearest_storage
from coda.ir import Node, Output, Program, rewrite, topological
from coda.ops import build, rebuild
from coda.passes.labels import Label, Note, note


def unsteady(gradients: Program, statistics: Collection[Node], there: Mapping[Node, Output]) -> tuple[Node, ...]:
    """The values that are read rounded, and whose difference to a statistic of what they were before is the exponent of
    something. ``there`` says from which output gradients read a value; ``statistics`` are those among them."""
    rounded = [n for n, o in there.items() if n.dtype != o.type.dtype]
    found: dict[Node, None] = {}
    for node in topological((o.value for o in gradients.outputs), lambda n: () if n in there else n.args):
        if node.op != "exp" or node in there or node.args[0].op != "sub" or node.args[0] in there:
            continue
        for value, statistic in (node.args[0].args, node.args[0].args[::-1]):
            if statistic in statistics:
                below = topological([value], lambda n: () if n in there else n.args)
                found |= dict.fromkeys(n for n in rounded if n in below and n in topological([statistic]))
    return tuple(found)


def round_early(program: Program, values: Collection[Node]) -> tuple[Program, tuple[Note, ...]]:
    """The program with these values rounded as they are kept, before anything reads them."""

    def visit(node: Node, args: tuple[Node, ...]) -> Node | None:
        if node not in values:
            return None
        return build("cast", rebuild(node, args), dtype=nearest_storage(node), saturate=False, span=node.span)

    called = dict(program.names)
    notes = [
        note("steady", f"{name} is rounded before its statistics, as it is kept", Label(f"{name} is rounded"), n)
        for n, name in ((n, called.get(n, n.op)) for n in values)
    ]
    return rewrite(program, visit), tuple(notes)
