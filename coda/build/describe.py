"""``coda_describe()``: what an artifact says about itself, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coda.printer import print_program
from coda.target.legality import DESIGN_SMS, checks, partial_outputs
from coda.target.plan import Arg, Plan, Variant
from coda.version import __version__

FORMAT = 1  # of this JSON

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


def describe(name: str, variants: Sequence[Variant], meta: Metadata) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "name": name,
        "arch": meta.arch,
        "compute_capability": meta.compute_capability,
        "versions": {"coda": __version__, "cutlass": meta.cutlass, "nvcc": meta.nvcc},
        "rounding": ROUNDING,
        "programs": [_program(plan, [v for v in variants if v.plan is plan]) for plan in plans_of(variants)],
    }


def plans_of(variants: Sequence[Variant]) -> list[Plan]:
    """The plans of the variants, each once, in order."""
    return list({id(v.plan): v.plan for v in variants}.values())


def signature(plan: Plan) -> str:
    """``bias_gelu(x: bf16[M, K], w: bf16[N, K]) -> out: bf16[M, N]``"""
    inputs = ", ".join(argument_text(plan, a) for a in plan.args if not a.is_output)
    outputs = ", ".join(argument_text(plan, a) for a in plan.args if a.is_output)
    return f"{plan.name}({inputs})" + (f" -> {outputs}" if outputs else "")


def argument_text(plan: Plan, arg: Arg) -> str:
    axes = arg.axes
    store = partial_outputs(plan).get(arg.name)
    if store is not None:
        axes = ("partials", *axes)
    optional = "?" if arg.optional else "" if arg.default is None else f" = {arg.default}"
    inout = "inout " if arg.inout else ""
    return f"{inout}{arg.name}: {arg.dtype}[{', '.join(axes)}]{optional}"


def _program(plan: Plan, variants: Sequence[Variant]) -> dict[str, Any]:
    table = checks(plan)
    source = plan.program.source
    return {
        "name": plan.name,
        "signature": signature(plan),
        "source": source.text if source else None,
        "program": print_program(plan.program),  # what was lowered, consts resolved; it parses back
        "args": [_arg(plan, a) for a in plan.args],
        "axes": {a.name: str(a.size) for a in plan.program.axes},
        "rows": table.rows.text,
        "columns": table.columns.text,
        "contraction": "+".join(extent.text for extent in table.contractions),
        "lanes": plan.lanes,
        "requirements": [r.sentence for r in table.requirements],
        "design_sms": DESIGN_SMS,
        "workspace": any(s.kind != "tile" and s.arg is None for s in plan.stores),
        "variants": [_variant(v) for v in variants],
    }


def _arg(plan: Plan, arg: Arg) -> dict[str, Any]:
    store = partial_outputs(plan).get(arg.name)
    return {
        "name": arg.name,
        "type": f"{arg.dtype}[{', '.join(arg.axes)}]",
        "dtype": arg.dtype.name,
        "shape": [str(d) for d in arg.dims],  # formulas over the free axes; of one partial result where there are many
        "output": arg.is_output,
        "optional": arg.optional,
        "default": arg.default,
        "inout": arg.inout,
        "partials": store.kind
        if store
        else None,  # "row": [tile columns, rows]; "column": [tile rows x warps, columns]
    }


def _variant(variant: Variant) -> dict[str, Any]:
    tile = variant.tile
    return {
        "symbol": variant.symbol,
        "tile": tile.name,
        "tile_m": tile.m,
        "tile_n": tile.n,
        "tile_k": tile.k,
        "schedule": tile.schedule,
        "cluster": [tile.cluster_m, tile.cluster_n],
        "columns": variant.columns,
    }
