"""``can_lower`` and ``NAME_check`` walk the same records: on any tensors, the same answer in the same words."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda.dtypes import TABLE
from coda.runtime.binding import evaluate_size
from coda.target.legality import can_lower
from coda.target.plan import TILES, Arg, Plan
from coda.target.requirements import MAX_RANK, View
from tests.abi import harness

DTYPES = [d.dlpack for d in TABLE.values()] + [(2, 64), (1, 8), (3, 32)]
SIZES = st.sampled_from([0, 1, 2, 7, 8, 10, 64, 128, 129, 256])
BASES = st.sampled_from([1 << 20, 1 << 30, (1 << 30) + 2, (1 << 30) + 16, (1 << 30) + 64, 1 << 41, 1 << 44])
MOSTLY = st.integers(0, 9).map(lambda i: i > 0)


@st.composite
def views(draw: Any, arg: Arg, sizes: dict[str, int]) -> View | None:
    """A tensor for an argument: usually right, often wrong in one way."""
    if draw(st.integers(0, 15)) == 0:
        return None
    shape = [evaluate_size(d, sizes) for d in arg.dims]
    if draw(st.integers(0, 7)) == 0:
        shape = draw(st.lists(SIZES, max_size=MAX_RANK))
    elif shape and draw(st.integers(0, 7)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = draw(SIZES)
    dtype = arg.dtype.dlpack if draw(MOSTLY) else draw(st.sampled_from(DTYPES))
    return View(tuple(shape), draw(strides(shape)), dtype, draw(BASES))


@st.composite
def strides(draw: Any, shape: list[int]) -> tuple[int, ...]:
    """Row-major with some padding; sometimes transposed, expanded or stepped."""
    result, step = [], 1
    for size in reversed(shape):
        result.append(step)
        step *= max(size, 1)
        if draw(st.integers(0, 3)) == 0:
            step += draw(st.sampled_from([1, 8, 1 << 33, 1 << 39]))
    if result and draw(st.integers(0, 7)) == 0:
        result[draw(st.integers(0, len(result) - 1))] = draw(st.sampled_from([-8, 0, 1, 2, 64]))
    if draw(st.integers(0, 7)) == 0:
        result.reverse()
    return tuple(reversed(result))


@st.composite
def arguments(draw: Any, plan: Plan) -> list[View | None]:
    symbols = sorted({s.name for a in plan.args for d in a.dims for s in d.free_symbols})
    sizes = {name: draw(SIZES) for name in symbols}
    return [draw(views(a, sizes)) for a in plan.args]


@pytest.mark.parametrize("name", list(harness.programs()))
def test_same_answer_in_python_and_cxx(name: str) -> None:
    plan, record = harness.plan(name), harness.recorder(name)

    @settings(max_examples=150, deadline=None, database=None)
    @given(args=arguments(plan))
    def agree(args: list[View | None]) -> None:
        refused = record.run_views(args, "check")
        answer = can_lower(plan, args, TILES)
        assert record.error == ("" if answer else str(answer))
        assert bool(refused) == (not answer)

    agree()


@pytest.mark.parametrize("name", list(harness.programs()))
def test_good_tensors_are_accepted(name: str) -> None:
    """The records do not refuse everything: contiguous tensors of consistent sizes run."""
    plan, record = harness.plan(name), harness.recorder(name)

    @settings(max_examples=50, deadline=None, database=None)
    @given(st.data())
    def accepted(data: st.DataObject) -> None:
        symbols = sorted({s.name for a in plan.args for d in a.dims for s in d.free_symbols})
        sizes = {s: data.draw(st.sampled_from([8, 64, 128, 264])) for s in symbols}
        shapes = record.artifact.output_shapes(sizes)
        args = []
        for i, arg in enumerate(plan.args):
            shape = shapes[arg.name] if arg.is_output else tuple(evaluate_size(d, sizes) for d in arg.dims)
            steps = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
            args.append(View(shape, steps, arg.dtype.dlpack, (i + 1) << 32))
        assert can_lower(plan, args, TILES)
        assert record.run_views(args, "check") == 0, record.error

    accepted()
