"""Generated C++ math, compiled for the host, against the interpreter: every operation, every cast, random programs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from coda.dtypes import BF16, BOOL, F16, F32, I32, I64, TABLE, torch_dtype
from coda.errors import CodaError
from coda.ir import Node, Output, Program, appearing_axes
from coda.ops import OPS, build
from coda.printer import print_program
from coda.runtime.binding import type_shape
from coda.runtime.reference import evaluate
from coda.target import Plan, lower
from tests.hostmath import (
    APPROXIMATE,
    EXACT,
    HostProgram,
    bits,
    compile_plans,
    disagreement,
    exact_operand,
    own_functions,
    same_bits,
)
from tests.programs import EpilogueBuilder, M, N, cast, constant, lowered, random_epilogue

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan)
ORDINARY = (1.0, -1.0, 0.5, -2.0, 3.0, 0.1, -0.7, 7.25, -6.5, 12.0, -15.0, 30.0, -80.0, 88.0)
EXTREME = (3e38, -3e38, 1e30, -1e20, 1e-20, -1e-30, 1.1754944e-38, 1e-40, -1e-45, 65504.0, 65520.0, 1e-7)
VALUES = torch.tensor(SPECIAL + ORDINARY + EXTREME)


class Table(EpilogueBuilder):
    """A program that applies one operation to operands of its own; its product is a second output."""

    def __init__(self) -> None:
        super().__init__(lambda strategy: BF16)

    def program(self, name: str, value: Node) -> Program:
        outputs = (Output("y", value, value.type), Output("product", self.values[0], self.values[0].type))
        return Program(name, tuple(self.params), outputs, appearing_axes(self.params, outputs))


def inputs_of(program: Program, **given: Tensor) -> dict[str, Tensor]:
    """The given operands, and a product of zeros."""
    rows, columns = next(t.shape for t in given.values() if t.dim() == 2)
    zeros = {"x": torch.zeros(rows, 1).bfloat16(), "w": torch.zeros(columns, 1).bfloat16()}
    return {p.name: given.get(p.name, zeros.get(p.name)) for p in program.params}


# -- the operation table ---------------------------------------------------------------------------------------------

ZERO_OF_EITHER_SIGN = {"maximum", "minimum", "clamp", "relu"}  # between 0.0 and -0.0, as the hardware likes

# The errors allowed, in units of the last place of an f32 result, by the first operand. e^x is 2^(x log2 e), so the
# rounding of that product counts |x| times; inside gelu_tanh x is a cubic.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {"gelu_tanh": lambda a: 8 + 4 * (a.abs() + a.abs() ** 3)}
# Besides: 1 + erf(x) cancels, as in torch; and 1 + tanh(x) in the float64 oracle.
CANCELLATION = {"gelu_erf": 2.0**-23, "gelu_tanh": 2.0**-50}
FLUSHED = 2.0**-120  # exponentials that overflow in 1 / (1 + e^x) a little before the result underflows


@pytest.fixture(scope="module")
def table() -> dict[str, tuple[Program, HostProgram]]:
    """Each operation of the table over float tile operands, compiled."""
    programs = {}
    for name in (*EXACT, *APPROXIMATE):
        builder = Table()
        operands = [builder.parameter(f"a{i}", F32, (M, N)) for i in range(OPS[name].arity)]
        if name == "where":
            operands[0] = build("gt", operands[0], constant(0))
        value = build(name, *operands)
        programs[name] = builder.program(name, cast(value, F32) if value.dtype is BOOL else value)
    compiled = compile_plans([lower(p) for p in programs.values()])
    return {name: (programs[name], host) for name, host in zip(programs, compiled, strict=True)}


def operands_of(name: str, values: Tensor) -> dict[str, Tensor]:
    """All pairs of the values; the third operand runs through them in another order."""
    arity, count = OPS[name].arity, len(values)
    if arity == 1:
        return {"a0": torch.cat([values, torch.linspace(-20, 20, 401), torch.linspace(-100, 100, 97)])[None]}
    a, b = torch.meshgrid(values, values, indexing="ij")
    third = values[(7 + torch.arange(count) + 3 * torch.arange(count)[:, None]) % count]
    return dict(zip(["a0", "a1", "a2"][:arity], (a, b, third), strict=False))


@pytest.mark.parametrize("name", EXACT)
def test_arithmetic_has_torchs_bits(name, table):
    program, host = table[name]
    inputs = inputs_of(program, **operands_of(name, VALUES))
    got, want = host(inputs)["y"], evaluate(program, inputs)["y"]
    if name in ZERO_OF_EITHER_SIGN:
        got, want = got + 0.0, want + 0.0
    assert same_bits(got, want), disagreement(got, want)


@pytest.mark.parametrize("name", APPROXIMATE)
def test_functions_are_right_to_a_few_last_places(name, table):
    program, host = table[name]
    values = VALUES if OPS[name].arity == 1 else torch.tensor(SPECIAL + ORDINARY)
    inputs = inputs_of(program, **operands_of(name, values))
    got, torchs = host(inputs)["y"], evaluate(program, inputs)["y"]
    exact = evaluate(program, inputs, exact=True)["y"]

    unbounded = ~got.isfinite() | ~exact.float().isfinite()
    agrees = (bits(got) == bits(exact.float())) | (bits(got) == bits(torchs))  # torch's f32 gelu(inf) is NaN on a CPU
    assert bool(agrees[unbounded].all()), (got[unbounded & ~agrees], exact[unbounded & ~agrees])

    a = inputs["a0"].double().nan_to_num()
    place = torch.ldexp(torch.ones_like(exact), torch.frexp(exact)[1] - 24)
    allowed = PLACES.get(name, lambda a: 4 + 2 * a.abs())(a) * place + CANCELLATION.get(name, 0.0) * a.abs() + FLUSHED
    error = (got.double() - exact).abs()
    wrong = (error > allowed) & ~unbounded
    assert not wrong.any(), (a[wrong], got[wrong], exact[wrong])


# -- casts -----------------------------------------------------------------------------------------------------------


def around_every_16_bit_value(dtype: torch.dtype) -> Tensor:
    """Each value of a 16-bit dtype, the middle between it and the next, and the f32 neighbours of both."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    above = torch.roll(every, -1)
    middle = ((every.double() + above.double()) / 2).float()
    points = torch.stack([every, middle])
    patterns = points.view(torch.int32)
    return torch.stack([patterns - 1, patterns, patterns + 1]).view(torch.float32).reshape(-1, 512)


@pytest.fixture(scope="module")
def casts() -> dict[str, tuple[Program, HostProgram]]:
    """x rounded to bf16 and f16, then used again, stored in another dtype or as it is."""
    programs = {}
    for dtype in (BF16, F16):
        for saturate in (False, True):
            builder = Table()
            rounded = cast(builder.parameter("a0", F32, (M, N)), dtype, saturate)
            name = f"{dtype}_saturated" if saturate else f"{dtype}"
            programs[name] = builder.program(name, cast(build("neg", rounded), F32))
            programs[f"{name}_stored"] = builder.program(f"{name}_stored", rounded)
    compiled = compile_plans([lower(p) for p in programs.values()])
    return {name: (programs[name], host) for name, host in zip(programs, compiled, strict=True)}


@pytest.mark.parametrize("stored", ["", "_stored"])
@pytest.mark.parametrize("name", ["bf16", "f16", "bf16_saturated", "f16_saturated"])
def test_casts_round_to_nearest_even(name, stored, casts):
    program, host = casts[name + stored]
    dtype = torch_dtype(TABLE[name.split("_")[0]])
    inputs = inputs_of(program, a0=around_every_16_bit_value(dtype))
    got, want = host(inputs)["y"], evaluate(program, inputs)["y"]
    assert same_bits(got, want), disagreement(got, want)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_16_bit_value_is_read_as_it_is(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch_dtype(dtype))
    builder = Table()
    column, row = builder.parameter("column", dtype, (N,)), builder.parameter("row", dtype, (M,))
    value = build("where", build("ne", builder.values[0], constant(1)), column, row)
    program = builder.program("read", cast(value, F32))
    inputs = {"x": torch.zeros(1, 1).bfloat16(), "w": torch.zeros(len(every), 1).bfloat16()}
    inputs |= {"column": every, "row": every[:1]}
    (host,) = compile_plans([lower(program)])
    assert same_bits(host(inputs)["y"][0], every.float())


# -- integers --------------------------------------------------------------------------------------------------------

INTEGER_OPS = (
    "add",
    "sub",
    "mul",
    "neg",
    "maximum",
    "minimum",
    "clamp",
    "abs",
    "sign",
    "lt",
    "le",
    "eq",
    "ne",
    "where",
)


@pytest.mark.parametrize(("first", "second"), [(I64, I64), (I32, I32), (I32, I64)], ids=str)
def test_integers_stay_integers(first, second):
    """Large enough that f32 would show: 2^24 + 1 and the like."""
    programs = []
    for name in INTEGER_OPS:
        builder = Table()
        operands = [builder.parameter("a", first, (M,)), builder.parameter("b", second, (N,)), constant(7)]
        if name == "where":
            operands = [build("lt", operands[0], operands[1]), *operands[:2]]
        value = build(name, *operands[: OPS[name].arity])
        remainder = build("sub", value, constant(2**24)) if value.dtype is not BOOL else value
        programs.append(builder.program(name, cast(build("add", builder.values[0], remainder), F32)))
    a = torch.tensor([0, 1, -1, 5, 2**24 + 1, -(2**24) - 3, 9]).to(torch_dtype(first))
    b = torch.tensor([0, 2, -7, 2**24 + 1, 2**24 + 3]).to(torch_dtype(second))
    inputs = {"x": torch.zeros(len(a), 1).bfloat16(), "w": torch.zeros(len(b), 1).bfloat16(), "a": a, "b": b}
    for program, host in zip(programs, compile_plans([lower(p) for p in programs]), strict=True):
        mine = {p.name: inputs[p.name] for p in program.params}
        got, want = host(mine)["y"], evaluate(program, mine)["y"]
        assert same_bits(got, want), (program.name, disagreement(got, want))


# -- random programs -------------------------------------------------------------------------------------------------


def drawn(strategy: st.SearchStrategy, count: int) -> list:
    """Examples of a strategy, always the same: they are compiled together, so hypothesis cannot shrink them."""
    examples: list = []

    @settings(max_examples=count, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(strategy)
    def collect(example) -> None:
        examples.append(example)

    collect()
    return examples


def sizes_of(plan: Plan) -> dict[str, int]:
    return {axis.name: size for axis, size in zip(plan.program.free_axes, (5, 6, 7, 9, 4), strict=False)}


def random_operands(plan: Plan, seed: int) -> dict[str, Tensor | float | None]:
    """An exact product; other operands with special values among ordinary ones, some absent, some from the host."""
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes_of(plan)
    inputs: dict[str, Tensor | float | None] = {}
    for i, param in enumerate(plan.program.params):
        shape, dtype = type_shape(param.type, sizes), torch_dtype(param.type.dtype)
        if param.name in plan.factors:
            inputs[param.name] = exact_operand(generator, *shape, dtype=dtype)
        elif param.type.partial:
            inputs[param.name] = exact_operand(generator, 5, *shape, dtype=dtype)
        elif (param.default is not None and seed % 2) or (param.optional and (seed + i) % 2):
            inputs[param.name] = None
        else:
            special = VALUES[torch.randint(len(VALUES), shape, generator=generator)]
            ordinary = torch.randn(shape, generator=generator)
            values = torch.where(torch.rand(shape, generator=generator) < 0.1, special, ordinary).to(dtype)
            inputs[param.name] = values if shape or seed % 2 else values.item()
    return inputs


def check_bits(program: Program, host: HostProgram, seed: int) -> None:
    """Generated math and interpreter with our functions agree on random operands."""
    inputs = random_operands(host.plan, seed)
    known = {axis.name for axis in program.axes}
    sizes = {name: size for name, size in sizes_of(host.plan).items() if name in known}
    got = host(inputs, sizes)
    with own_functions():
        want = evaluate(program, inputs, dims=sizes)
    for name in want:
        assert same_bits(got[name], want[name]), (
            f"{print_program(program)}\n{name} {disagreement(got[name], want[name])}"
        )


def reorders(plan: Plan) -> bool:
    """Whether a kernel adds in an order that is not torch's: totals over all rows, sums over both lanes."""
    over_lanes = plan.lane_axis is not None and any(s.kind == "row" for s in plan.stores)
    return over_lanes or any(f.kind == "total" for f in plan.finishings)


def test_examples_have_the_interpreters_bits():
    """Lanes of every kind, operands of every kind, reductions finished and not."""
    programs = lowered()
    plans = {name: lower(program) for name, program in programs.items()}
    plans = {name: plan for name, plan in plans.items() if plan.heads is None and not plan.batch and not reorders(plan)}
    for name, host in zip(plans, compile_plans(list(plans.values())), strict=True):
        for seed in range(2):
            check_bits(programs[name], host, seed)


def test_random_programs_have_the_interpreters_bits():
    programs = drawn(random_epilogue(factors=[BF16]), 80)
    plans = {}
    for program in programs:
        with contextlib.suppress(CodaError):
            plans[program] = lower(program)
    assert len(plans) > len(programs) / 2, "most programs lower"
    for program, host in zip(plans, compile_plans(list(plans.values())), strict=True):
        for seed in range(2):
            check_bits(program, host, seed)


# -- three dtypes: operands, arithmetic, results (cases C5, C8, E1) ---------------------------------------------------

FLOATS = (BF16, F16, F32)


@pytest.mark.parametrize("middle", FLOATS, ids=str)
def test_dtypes_of_operand_cast_and_output_are_independent(middle):
    """Each operand kind in each dtype, a cast in the middle, each output dtype."""
    programs = []
    for read in FLOATS:
        for stored in FLOATS:
            builder = Table()
            (acc,) = builder.values
            tile, row = builder.parameter("tile", read, (M, N)), builder.parameter("row", read, (M,))
            column, scalar = builder.parameter("column", read, (N,)), builder.parameter("scalar", read, ())
            h = cast(build("add", build("mul", acc, row), tile), middle)
            y = build("sub", build("mul", h, cast(build("div", column, scalar), middle)), build("mul", row, scalar))
            programs.append(builder.program(f"{read}_{stored}", cast(y, stored)))
    for program, host in zip(programs, compile_plans([lower(p) for p in programs]), strict=True):
        inputs = random_operands(host.plan, seed=1)
        got, want = host(inputs), evaluate(program, inputs)
        assert same_bits(got["y"], want["y"]), (program.name, disagreement(got["y"], want["y"]))
        assert same_bits(got["product"], want["product"])
