"""A row plan for people: what a row or map kernel reads, reduces and stores."""

from __future__ import annotations

from collections.abc import Iterable

from coda.cli.common import table
from coda.ir import Axis, Node
from coda.target.loops import is_leaf
from coda.target.rowplan import Access, Reading, RowPlan

GRIDS = {"row": "a team of threads owns a row", "map": "elementwise"}


def document(plan: RowPlan) -> dict:
    """The plan as JSON."""
    return {
        "name": plan.name,
        "kind": plan.kind,
        "launches": 1 + len(plan.finishings),
        "rows": [_names(level) for level in plan.levels],
        "columns": [_names(space) for space in plan.spaces],
        "reads": [
            {"name": plan.accesses[r.access].arg, "dtype": plan.accesses[r.access].dtype.name, "space": _space(r)}
            for r in _read(plan)
        ],
        "reduces": [[_reduction(n) for n in stage] for stage in plan.stages],
        "stores": [
            {"output": plan.accesses[w.access].arg, "kind": "row" if w.space is None else "tile"} for w in plan.writings
        ],
        "finishes": [{"kind": f.kind, "outputs": [name for _, name, _ in f.results]} for f in plan.finishings],
    }


def text(plan: RowPlan) -> list[str]:
    """The plan as lines."""
    launches = 1 + len(plan.finishings)
    count = "one launch" if launches == 1 else f"{launches} launches"
    loops = f"rows ({_names(plan.rows)}), columns {', '.join(f'({_names(s)})' for s in plan.spaces)}"
    rows = [("kernel", f"{plan.kind}: {loops}", f"{GRIDS[plan.kind]}, {count}")]
    rows += [("reads", _typed(plan, plan.accesses[r.access]), _how(r)) for r in _read(plan)]
    for number, stage in enumerate(plan.stages, 1):
        rows.append(("reduces", ", ".join(map(_reduction, stage)), f"stage {number}"))
    for w in plan.writings:
        where = "for each row" if w.space is None else "for each element"
        rows.append(("stores", _typed(plan, plan.accesses[w.access]), where))
    rows += [("adds up", _reduction(t.reduction), "over the rows of a block") for t in plan.totals]
    for finishing in plan.finishings:
        outputs = ", ".join(_typed(plan, _of(plan, name)) for _, name, _ in finishing.results)
        rows.append(("finishes", outputs, "from the partials of the blocks"))
    return table(list(dict.fromkeys(rows))).splitlines()


def _read(plan: RowPlan) -> list[Reading]:
    return [r for r in plan.readings if is_leaf(r.leaf)]


def _names(axes: Iterable[Axis]) -> str:
    return " ".join(a.name for a in axes)


def _reduction(node: Node) -> str:
    return f"{node.op.removeprefix('reduce_')} over ({' '.join(node.attr('axes'))})"


def _space(r: Reading) -> str:
    if r.space is None:
        return "row" if r.varies else "uniform"
    return "tile" if r.varies else "column"


def _how(r: Reading) -> str:
    where = {"uniform": "one value", "row": "for each row", "column": "for each column", "tile": "for each element"}
    return where[_space(r)] + (", at a position of the row" if r.index is not None else "")


def _of(plan: RowPlan, name: str) -> Access:
    return Access(name, plan.arg(name).dtype)


def _typed(plan: RowPlan, access: Access) -> str:
    arg = plan.arg(access.arg or "")
    axes = f"[{', '.join(arg.axes)}]" if arg.axes else ""
    return f"{arg.name}: {arg.dtype}{axes}" + "?" * arg.optional
