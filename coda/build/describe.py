"""``coda_describe()``: what an artifact says about itself, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coda.ir import dim_size
from coda.printer import print_program
from coda.target.legality import DESIGN_SMS, checks, partial_outputs, partial_step
from coda.target.plan import Arg, Variant
from coda.target.rowplan import RowPlan
from coda.target.schedule import Assembly, Kernel, Loop, Schedule
from coda.version import __version__

FORMAT = 3  # of this JSON

ROUNDING = (
    "Products multiply storage types and accumulate in f32 on tensor cores. Arithmetic between casts is f32. A cast, "
    "and a store to a narrower type, rounds to nearest even and is never dropped. Reductions add in a fixed order: "
    "equal inputs and an equal variant give equal bits."
)


@dataclass(frozen=True)
class Metadata:
    """What the plans do not say."""

    arch: str = "sm_90a"
    cutlass: str = ""
    nvcc: str = ""

    @property
    def compute_capability(self) -> int:
        """10 * major + minor: sm_90a code runs on 9.0 and nothing else."""
        return int(self.arch.removeprefix("sm_").rstrip("a"))


def describe(name: str, assemblies: Sequence[Assembly], meta: Metadata) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "name": name,
        "arch": meta.arch,
        "compute_capability": meta.compute_capability,
        "versions": {"coda": __version__, "cutlass": meta.cutlass, "nvcc": meta.nvcc},
        "rounding": ROUNDING,
        "programs": [_program(assembly) for assembly in assemblies],
    }


def signature(plan: Schedule) -> str:
    """``bias_gelu(x: bf16[M, K], w: bf16[N, K]) -> out: bf16[M, N]``"""
    inputs = ", ".join(argument_text(plan, a) for a in plan.args if not a.is_output)
    outputs = ", ".join(argument_text(plan, a) for a in plan.args if a.is_output)
    return f"{plan.name}({inputs})" + (f" -> {outputs}" if outputs else "")


def argument_text(plan: Schedule, arg: Arg) -> str:
    axes = ("partials", *arg.axes) if arg.partial else arg.axes
    optional = "?" if arg.optional else "" if arg.default is None else f" = {arg.default}"
    inout = "inout " if arg.inout else ""
    return f"{inout}{arg.name}: {arg.dtype}[{', '.join(axes)}]{optional}"


def _program(assembly: Assembly) -> dict[str, Any]:
    plan = assembly.schedule
    table = checks(plan)
    source = plan.program.source
    counted = partial_step(plan)
    return {
        "name": plan.name,
        "signature": signature(plan),
        "source": source.text if source else None,
        "program": print_program(plan.program),  # what was lowered, consts resolved; it parses back
        "args": [_arg(plan, a) for a in plan.args],
        "axes": {a.name: str(a.size) for a in plan.program.axes},
        "kernels": [_kernel(assembly, step) for step in plan.steps],
        "partial_kernel": plan.steps.index(counted) if counted else None,  # whose partial results are outputs
        "requirements": [r.sentence for r in table.requirements],
        "design_sms": DESIGN_SMS,
        "workspace": bool(plan.temporaries) or any(map(_leaves_partials, plan.steps)),
        **({"loop": _loop(plan.loop)} if plan.loop else {}),
    }


def _loop(loop: Loop) -> dict[str, Any]:
    """The kernels that run once for each chunk of an axis; in their sizes its name is that of the chunk."""
    return {"kernels": [loop.first, loop.end], "axis": loop.axis.name, "chunk": loop.part.name, "width": loop.width}


def _leaves_partials(step: Kernel) -> bool:
    """Whether a kernel leaves something for its finish kernels."""
    return any(s.kind != "tile" and s.arg is None for s in step.stores)


def _kernel(assembly: Assembly, step: Kernel) -> dict[str, Any]:
    about: dict[str, Any] = {
        "name": step.name,
        "kind": step.kind,
        "rows": str(dim_size(step.rows)),
        "columns": str(dim_size(step.columns)),
        "finishes": [f.kind for f in step.finishings],
    }
    if isinstance(step, RowPlan):
        return about | {"symbols": [v.symbol for v in step.variants]}
    return (
        about
        | ({"batch": str(dim_size(step.batch))} if step.batch else {})
        | {
            "contraction": "+".join(str(dim_size(t.contraction)) for t in step.terms),
            "lanes": step.lanes,
            "variants": [_variant(v) for v in assembly.variants_of(step)],
        }
    )


def _arg(plan: Schedule, arg: Arg) -> dict[str, Any]:
    store = partial_outputs(plan).get(arg.name)
    before = f"{arg.partial} " if arg.partial else ""
    return {
        "name": arg.name,
        "type": f"{before}{arg.dtype}[{', '.join(arg.axes)}]",
        "dtype": arg.dtype.name,
        "shape": [str(d) for d in arg.dims],  # formulas over the free axes; of one partial result where there are many
        "output": arg.is_output,
        "optional": arg.optional,
        "default": arg.default,
        "inout": arg.inout,
        # "row": [tile columns, rows]; "column": [tile rows x warps, columns]; "any": as many as are given
        "partials": store.kind if store else "any" if arg.partial else None,
    }


def _variant(variant: Variant) -> dict[str, Any]:
    tile = variant.tile
    return {
        "symbol": variant.symbol,
        "tile": tile.name,
        "tile_m": tile.m,
        "tile_n": tile.n,
        "tile_k": tile.k,
        "cost": tile.cost,
        "schedule": tile.schedule,
        "cluster": [tile.cluster_m, tile.cluster_n],
        "swizzle": tile.swizzle,
        "along": tile.along,
        "columns": variant.columns,
    }
