"""A visitor plan for people: what the kernel multiplies, reads, stores and finishes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from coda.cli.common import table
from coda.ir import dim_size
from coda.runtime.binding import evaluate_size
from coda.target import Plan, Tile, variants
from coda.target.legality import as_schedule, can_lower, partial_outputs, partial_step
from coda.target.plan import Major, Operand, Segment, Space, Store, Term
from coda.target.requirements import View
from coda.target.schedule import Schedule

ALIGNMENT = 256  # of device allocations

WHERE = {
    Space.UNIFORM: "one value",
    Space.ROW: "for each row",
    Space.COLUMN: "for each column",
    Space.TILE: "for each element",
}


def refusal(plan: Plan | Schedule, sizes: Mapping[str, int], tile: Tile) -> str | None:
    """Why the kernels would refuse contiguous, aligned tensors of these sizes; None where they take them."""
    schedule = as_schedule(plan)
    views, address = [], 0
    for arg in schedule.args:
        shape = tuple(evaluate_size(size, sizes) for size in arg.dims)
        step, store = partial_step(schedule), partial_outputs(schedule).get(arg.name)
        if step is not None and store is not None:
            (variant,) = variants(step, [tile])
            rows, columns = (evaluate_size(dim_size(dim), sizes) for dim in (step.rows, step.columns))
            row_wise = store.kind == "row"
            shape = (variant.row_partials(columns), rows) if row_wise else (variant.column_partials(rows), columns)
        elif arg.partial:
            shape = (1, *shape)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        views.append(View(shape, strides, arg.dtype.dlpack, address))
        address += -(-math.prod(shape) * arg.dtype.bytes // ALIGNMENT) * ALIGNMENT
    answer = can_lower(schedule, views, tile)
    return None if answer else str(answer)


def document(plan: Plan, tile: Tile) -> dict:
    """The plan as JSON."""
    return {
        "name": plan.name,
        "kind": plan.kind,
        "product": _product(plan),
        "lanes": plan.lanes,
        "launches": 1 + len(plan.finishings),
        "tile": tile.name,
        "reads": [
            {"name": o.arg, "dtype": o.dtype.name, "space": o.space.value} for o in plan.operands if o.size is None
        ],
        "stores": [
            {"output": s.arg, "kind": s.kind, "dtype": s.dtype.name, "reduction": s.reduction, "finished": s.finished}
            for s in plan.stores
        ],
        "finishes": [{"kind": f.kind, "outputs": [name for _, name, _ in f.results]} for f in plan.finishings],
    }


def text(plan: Plan, tile: Tile) -> list[str]:
    """The plan as lines."""
    launches = 1 + len(plan.finishings)
    rows = [("kernel", _product(plan), "f32 accumulation, one launch" if launches == 1 else f"{launches} launches")]
    rows.append(("tile", tile.name, f"{tile.schedule}, cluster {tile.cluster_m}x{tile.cluster_n}"))
    rows += [("heads", f"{s.name}: {_heads(plan, s)}", _blocks(s)) for s in (plan.heads.segments if plan.heads else ())]
    rows += [("reads", _typed(plan, o.arg), _reads(o)) for o in _read(plan)]
    rows += [("stores", _typed(plan, s.arg) if s.arg else f"workspace: {s.dtype}", _stores(s)) for s in plan.stores]
    for finishing in plan.finishings:
        outputs = ", ".join(_typed(plan, name) for _, name, _ in finishing.results)
        rows.append(("finishes", outputs, f"from the partials, for each {finishing.kind}"))
    return table(rows).splitlines()


def _product(plan: Plan) -> str:
    terms = (" | " if plan.joined else " + ").join(_term(plan, term) for term in plan.terms)
    dims = (plan.batch, plan.rows, plan.columns, *(t.contraction for t in plan.terms))
    batch, rows, columns, *inner = (" ".join(axis.name for axis in dim) for dim in dims)
    contraction = inner[0] if len(inner) == 1 or plan.joined else f"({' + '.join(inner)})"
    lanes = f", {plan.lanes} lanes" if plan.lanes > 1 else ""
    return f"{terms}  ({f'{batch} of ' if batch else ''}{rows} x {columns} x {contraction}{lanes})"


def _term(plan: Plan, term: Term) -> str:
    left = term.a if plan.a_major is Major.K else f"{term.a}.T"
    weights = [f"{b}.T" if plan.b_major is Major.K else b for b in term.b]
    return f"{left} @ " + (weights[0] if len(weights) == 1 else f"[{', '.join(weights)}]")


def _heads(plan: Plan, segment: Segment) -> str:
    outputs = {plan.stores[piece.store].arg for block in segment.blocks for piece in block.pieces}
    outputs |= {plan.stores[store].arg for _, store in segment.head_values}
    count = "all heads" if segment.count is None else f"heads {segment.start} to {segment.start + segment.count - 1}"
    return f"{count} to {', '.join(sorted(o for o in outputs if o))}"


def _blocks(segment: Segment) -> str:
    """How a head is worked on: a pass for its reductions, then its columns, partners together."""
    first = [f"{n.op.removeprefix('reduce_')} over the head" for n in segment.reductions]
    pairs = " in pairs" if any(p.value.op == "stack" for b in segment.blocks for p in b.pieces) else ""
    blocks = [" with ".join(f"{o}..{o + b.width - 1}" for o in b.offsets) for b in segment.blocks]
    return "; ".join([*first, f"columns {', '.join(blocks)}{pairs}"] if blocks else first)


def _read(plan: Plan) -> list[Operand]:
    """The operands that are tensors."""
    return [o for o in plan.operands if o.size is None]


def _reads(operand: Operand) -> str:
    if operand.gathered:
        return "the row of the table at each row's position"
    if operand.partial is not None:
        return f"for each row, the {operand.partial} of its partials"
    through = ", prefetched by TMA" if operand.space is Space.TILE else ""
    of_each = ", of each batch" if operand.batch_dim is not None and operand.space is not Space.TILE else ""
    return WHERE[operand.space] + of_each + through


def _typed(plan: Plan, name: str) -> str:
    return plan.arg(name).text


def _stores(store: Store) -> str:
    if store.kind == "tile":
        return WHERE[Space.TILE]
    if store.kind == "each":
        return WHERE[Space.ROW]
    if store.kind == "pick":
        return "one element of each row, at an index"
    over = "column" if store.kind == "row" else "row"
    return f"{store.reduction} over the {over}s of a tile, for each {store.kind} and tile"
