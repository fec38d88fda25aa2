"""Random programs for property tests, built as IR, and the programs of the language's tour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from coda.dtypes import BF16, F16, F32, I64, DType
from coda.frontend import load_path
from coda.ir import Axis, Node, Output, Param, Partial, Program, Type, appearing_axes
from coda.ops import build
from coda.ops.reduce import PARTIALS, partial_of, read_of
from coda.passes import fuse
from coda.target.blocks import joined_finishes

TOUR = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).parents[1] / "examples"
# Programs that become several kernels: see test_blocks.py.
BLOCKS = {p.stem for kind in ("block", "layer") for p in EXAMPLES.glob(f"*_{kind}.coda")} | {"rms_norm_linear"}

UNARY = ("neg", "abs", "exp", "tanh", "sigmoid", "relu", "silu", "gelu_erf", "gelu_tanh", "erf", "sqrt", "rsqrt")
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
REDUCTIONS = ("sum", "mean", "max", "min", "logsumexp")
STORAGE = (BF16, F16, F32)
IDENTITIES = {"add": -0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}

B, M, N, K = Axis.free("B"), Axis.free("M"), Axis.free("N"), Axis.free("K")
OPERAND_AXES: dict[str, tuple[Axis, ...]] = {"tile": (M, N), "row": (M,), "column": (N,), "scalar": ()}
CONSTANTS = st.one_of(
    st.integers(-4, 4),
    st.floats(width=32, allow_nan=False),
    st.sampled_from([-0.0, math.inf, -math.inf, math.nan, 1e-30, 0.1]),
)


def cast(node: Node, dtype, saturate: bool = False) -> Node:
    return build("cast", node, dtype=dtype, saturate=saturate)


def constant(value: int | float) -> Node:
    return build("const", value=value, dtype=I64 if isinstance(value, int) else F32)


class EpilogueBuilder:
    """One product of [M, K] and [N, K], and random math on its result over the axes M and N."""

    unary: Sequence[str] = UNARY
    constants: st.SearchStrategy = CONSTANTS
    batch: tuple[Axis, ...] = ()
    operand_axes = OPERAND_AXES

    def __init__(self, draw, factors: Sequence[DType] = STORAGE):
        self.draw = draw
        self.params: list[Param] = []
        dtype = draw(st.sampled_from(factors))
        x, w = self.parameter("x", dtype, (*self.batch, M, K)), self.parameter("w", dtype, (*self.batch, N, K))
        self.values = [build("dot", x, build("transpose", w))]

    def parameter(self, name: str, dtype, axes: tuple[Axis, ...], optional: bool = False) -> Node:
        type_ = Type(dtype, tuple((a,) for a in axes))
        self.params.append(Param(name, type_, optional=optional))
        return build("input", name=name, type=type_)

    def pick(self) -> Node:
        """A value made so far, more often a recent one."""
        return self.values[-1 - min(self.draw(st.integers(0, 4)), len(self.values) - 1)]

    def operand(self, op: str) -> Node:
        """The second operand of a binary operation: a value, a constant or a new parameter, perhaps optional."""
        kind = self.draw(st.sampled_from(["value", "constant", "partial", *self.operand_axes]))
        if kind == "value":
            return self.pick()
        if kind == "constant":
            return constant(self.draw(self.constants))
        if kind == "partial":
            return self.partial()
        optional = op in IDENTITIES and kind != "scalar" and self.draw(st.booleans())
        name, dtype = f"{kind}{len(self.params)}", self.draw(st.sampled_from(STORAGE))
        node = self.parameter(name, dtype, self.operand_axes[kind], optional)
        return build("default", node, identity=IDENTITIES[op]) if optional else node

    def partial(self) -> Node:
        """What another program has left of a reduction over the contracted axis, one value for each row."""
        type_ = Type(F32, ((M,),), Partial(self.draw(st.sampled_from(("sum", "max", "min"))), (K,)))
        self.params.append(Param(f"partial{len(self.params)}", type_))
        return read_of(self.params[-1].name, type_)

    def step(self) -> Node:
        kind = self.draw(st.sampled_from(["unary", "binary", "binary", "where", "cast", "reduce", "clamp"]))
        x = self.pick()
        if kind == "unary":
            return build(self.draw(st.sampled_from(self.unary)), x)
        if kind == "binary":
            op = self.draw(st.sampled_from(BINARY))
            other = self.operand(op)
            flip = op not in IDENTITIES or (op in ("add", "mul") and self.draw(st.booleans()))
            return build(op, other, x) if flip else build(op, x, other)
        if kind == "where":
            condition = build(self.draw(st.sampled_from(COMPARISONS)), x, self.operand("where"))
            return build("where", condition, self.pick(), self.operand("where"))
        if kind == "cast":
            return cast(x, self.draw(st.sampled_from(STORAGE)), self.draw(st.booleans()))
        if kind == "clamp":
            return build("clamp", x, constant(self.draw(self.constants)), constant(self.draw(self.constants)))
        axes = [a.name for a in x.type.axes]
        if not axes:
            return build("neg", x)
        op = f"reduce_{self.draw(st.sampled_from(REDUCTIONS))}"
        return build(op, x, axes=(self.draw(st.sampled_from(axes)),))

    def output(self, name: str, value: Node) -> Output:
        if value.op.removeprefix("reduce_") in PARTIALS and self.draw(st.booleans()):
            unfinished = build("partial", value)
            return Output(name, unfinished, replace(value.type, partial=partial_of(value)))
        value = cast(value, self.draw(st.sampled_from(STORAGE)))
        dims = tuple(self.draw(st.permutations(value.type.dims))) if self.draw(st.booleans()) else value.type.dims
        return Output(name, value, Type(value.dtype, dims))


class BatchedBuilder(EpilogueBuilder):
    """The same of a product for each of B batches, with operands of each batch and of all."""

    batch = (B,)
    operand_axes = OPERAND_AXES | {f"{kind}_of_batch": (B, *axes) for kind, axes in OPERAND_AXES.items()}


@st.composite
def random_epilogue(
    draw, max_steps: int = 8, factors: Sequence[DType] = STORAGE, builder_type: type[EpilogueBuilder] = EpilogueBuilder
) -> Program:
    """A valid epilogue program with operands of every kind, explicit casts, reductions and up to three outputs.
    ``factors``: the dtypes its product may have."""
    builder = builder_type(draw, factors)
    for _ in range(draw(st.integers(0, max_steps))):
        builder.values.append(builder.step())
    results = [builder.values[-1], *(builder.pick() for _ in range(draw(st.integers(0, 2))))]
    if not any(n.op == "dot" for n in Program("p", (), tuple(Output("y", r, r.type) for r in results)).nodes()):
        results.append(builder.values[0])
    outputs = tuple(builder.output(f"y{i}", r) for i, r in enumerate(results))
    read = {n.attr("name") for n in Program("p", (), outputs).nodes() if n.op == "input"}
    params = tuple(p for p in builder.params if p.name in read)
    return Program("random", params, outputs, appearing_axes(params, outputs))


def tour() -> dict[str, Path]:
    """The programs of the language's tour, one file each."""
    return {path.stem: path for path in sorted(TOUR.glob("*.coda"))}


def lowered() -> dict[str, Program]:
    """The examples that become one kernel, and programs that between them use everything that lowering knows."""
    paths = [path for path in sorted(EXAMPLES.glob("*.coda")) if path.stem not in BLOCKS]
    found = (p for path in [*paths, TOUR / "lowering" / "special.coda"] for p in load_path(path).programs.values())
    return {p.name: p for p in found if has_product(p)}


def row_examples() -> dict[str, Program]:
    """The examples without a product: row and map kernels."""
    found = (p for path in sorted(EXAMPLES.glob("*.coda")) for p in load_path(path).programs.values())
    return {p.name: p for p in found if not has_product(p)}


def behind_attention() -> dict[str, Program]:
    """The kernels without a product that the backwards of q, k, v projections begin with: RoPE and norms of heads
    turned back, for all heads at once, and what the norm before wants to know."""
    found = {}
    for path in sorted(EXAMPLES.glob("*_block.coda")):
        for program in load_path(path, _HEADS.get(path.stem, {})).programs.values():
            if program.name.endswith("_qkv"):
                kernels = joined_finishes(fuse(program, None).backward.kernels)  # type: ignore[union-attr]
                found[program.name] = next(p for p in kernels if not has_product(p))
    return found


_HEADS = {"phi3_block": {"HQ": 4, "HK": 2}}


def has_product(program: Program) -> bool:
    return any(n.op == "dot" for n in program.nodes())
