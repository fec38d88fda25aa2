"""``can_lower`` and ``NAME_check`` walk the same records: on any tensors, the same answer in the same words (B4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda.dtypes import TABLE
from coda.runtime.binding import evaluate_size
from coda.target.legality import can_lower
from coda.target.plan import Plan
from coda.target.requirements import MAX_RANK, View
from tests.abi import harness

DTYPES = [d.dlpack for d in TABLE.values()] + [(2, 64), (1, 8), (3, 32)]
SIZES = st.sampled_from([0, 1, 2, 7, 8, 10, 64, 128, 129, 256])
MISTAKEN_SIZES = st.one_of(SIZES, st.sampled_from([-1, -8]))
GOOD_SIZES = st.sampled_from([8, 64, 128, 264])
OFFSETS = st.sampled_from([2, 4, 16, 64, 4096])
PADDING = st.sampled_from([1, 8, 64, 1 << 33, 1 << 36, 1 << 39])


def fitting(plan: Plan, record: harness.Recorder, sizes: dict[str, int]) -> list[View | None]:
    """Contiguous arguments of these sizes, each in memory of its own."""
    outputs = record.artifact.output_shapes(sizes)
    shapes = [outputs[a.name] if a.is_output else [evaluate_size(d, sizes) for d in a.dims] for a in plan.args]
    shapes = [[2, *s] if a.partial and not a.is_output else s for a, s in zip(plan.args, shapes, strict=True)]
    bases = range(1 << 32, 1 << 40, 1 << 32)
    return [
        View(tuple(shape), contiguous(shape), arg.dtype.dlpack, base)
        for arg, shape, base in zip(plan.args, shapes, bases, strict=False)
    ]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def with_item(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


@st.composite
def mistaken(draw: Any, views: list[View | None], index: int) -> View | None:
    """The argument, wrong (or just unusual) in one way."""
    view = views[index]
    if view is None:
        return None
    dim = draw(st.integers(0, max(0, len(view.shape) - 1)))
    other = draw(st.sampled_from([v for v in views if v is not None]))
    changes = [
        st.none(),
        st.sampled_from(DTYPES).map(lambda dtype: replace(view, dtype=dtype)),
        st.lists(SIZES, max_size=MAX_RANK + 1).map(lambda s: replace(view, shape=tuple(s), strides=contiguous(s))),
        OFFSETS.map(lambda offset: replace(view, address=view.address + offset)),
        st.just(replace(view, address=other.address)),
        OFFSETS.map(lambda offset: replace(view, address=other.address + offset)),
        st.just(other),
    ]
    if view.shape:
        pitch = view.strides[dim]
        strides = st.sampled_from([-pitch, 0, 1, 2, 2 * pitch])
        changes += [
            MISTAKEN_SIZES.map(lambda size: replace(view, shape=with_item(view.shape, dim, size))),
            strides.map(lambda stride: replace(view, strides=with_item(view.strides, dim, stride))),
            PADDING.map(lambda pad: replace(view, strides=with_item(view.strides, 0, view.strides[0] + pad))),
            st.just(replace(view, strides=view.strides[::-1])),
        ]
    return draw(st.one_of(changes))


@st.composite
def arguments(draw: Any, plan: Plan, record: harness.Recorder) -> list[View | None]:
    """Arguments that fit, but for up to two mistakes; sometimes of odd sizes."""
    symbols = sorted({s.name for a in plan.args for d in a.dims for s in d.free_symbols})
    pool = draw(st.sampled_from([GOOD_SIZES, GOOD_SIZES, SIZES]))
    views = fitting(plan, record, {name: draw(pool) for name in symbols})
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(views) - 1))
        views[index] = draw(mistaken(views, index))
    return views


@pytest.mark.parametrize("name", list(harness.programs()))
def test_same_answer_in_python_and_cxx(name: str) -> None:
    plan, record = harness.plan(name), harness.recorder(name)

    @settings(max_examples=250, deadline=None, database=None)
    @given(args=arguments(plan, record))
    def agree(args: list[View | None]) -> None:
        refused = record.run_views(args, "check")
        answer = can_lower(plan, args, harness.tiles(name))
        assert record.error == ("" if answer else str(answer))
        assert bool(refused) == (not answer)

    agree()


@pytest.mark.parametrize("name", list(harness.programs()))
def test_fitting_tensors_are_accepted(name: str) -> None:
    """The records do not refuse everything."""
    plan, record = harness.plan(name), harness.recorder(name)
    symbols = sorted({s.name for a in plan.args for d in a.dims for s in d.free_symbols})

    @settings(max_examples=30, deadline=None, database=None)
    @given(sizes=st.fixed_dictionaries(dict.fromkeys(symbols, GOOD_SIZES)))
    def accepted(sizes: dict[str, int]) -> None:
        args = fitting(plan, record, sizes)
        assert can_lower(plan, args, harness.tiles(name))
        assert record.run_views(args, "check") == 0, record.error

    accepted()
