"""Products that share their right operand, as launches of one kernel: the gradients of gate and up, of q, k and v.

They differ in their left operand, their rows and where they are stored; what is computed behind them must be the same,
for the kernel is. Then their tiles run as one grid (templates/group.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coda.errors import CodaError
from coda.ir import Node, Program, topological
from coda.ops import OPS
from coda.target.plan import Plan
from coda.target.schedule import Kernel

MOST_MEMBERS = 4  # launches of one grid, each with some 700 bytes of parameters


def members(program: Program) -> list[Program]:
    """A program for each of several products, with the outputs that are made of it."""
    dots = [n for n in program.nodes() if n.op == "dot"]
    made_of = {o.name: [d for d in dots if d in topological([o.value])] for o in program.outputs}
    if any(len(of) != 1 for of in made_of.values()):
        raise CodaError.of(f"'{program.name}' has a result of several products that share their right operand")
    found = []
    for i, dot in enumerate(dots, 1):
        outputs = [o for o in program.outputs if made_of[o.name] == [dot]]
        read = {n.attr("name") for n in topological(o.value for o in outputs) if n.op == "input"}
        params = [p for p in program.params if p.name in read or any(o.into == p.name for o in outputs)]
        found.append(Program.of(f"{program.name}_{i}", params, outputs, dict(program.names)))
    return found


def are_twins(kernels: Sequence[Kernel]) -> bool:
    """Whether one kernel serves all of these."""
    forms = [_form(kernel) if isinstance(kernel, Plan) else None for kernel in kernels]
    return forms[0] is not None and all(form == forms[0] for form in forms)


def _form(plan: Plan) -> Any:
    """All of a plan that its kernel depends on; None where that is more than what is compared here."""
    simple = len(plan.terms) == 1 and plan.heads is None and not plan.joined and not plan.finishings
    optional = any(a.optional for a in plan.args if not a.is_output)
    if not simple or optional or any(store.kind != "tile" for store in plan.stores):
        return None
    numbers: dict[Node, Any] = {dot: ("product", i) for i, dot in enumerate(plan.products)}
    position = {o.arg: i for i, o in enumerate(plan.operands)}
    for node in topological((v for s in plan.stores for v in s.values), lambda n: () if n in numbers else n.args):
        if node in numbers:
            continue
        if node.op == "input":
            numbers[node] = ("operand", position[node.attr("name")])
        elif node.op in ("const", "cast") or OPS[node.op].family == "pointwise":
            numbers[node] = (node.op, node.attrs, tuple(numbers[a] for a in node.args))
        elif node.op in ("transpose", "layout"):
            numbers[node] = numbers[node.args[0]]
        else:
            return None
    operands = [(o.space, o.dtype, o.row_dim, o.column_dim, o.batch_dim, o.lanes, o.identity, o.map, o.gathered)
                for o in plan.operands]  # fmt: skip
    stores = [(s.dtype, s.lanes, s.row_dim, s.column_dim, s.batch_dim, [numbers[v] for v in s.values])
              for s in plan.stores]  # fmt: skip
    (term,) = plan.terms
    product = (plan.a_major, plan.b_major, plan.b_lanes, term.b, term.a_at, term.b_at, plan.batch, plan.columns)
    return product, operands, stores
