"""Gradients of random programs against torch autograd, in float64."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coda.errors import CodaError
from coda.passes.differentiate import differentiate
from coda.runtime.binding import bind, shapes_of
from coda.runtime.gradients import random_seeds
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from tests.gradients import autograd, check_gradients
from tests.programs import BatchedBuilder, EpilogueBuilder, random_epilogue

SIZES = {"M": 3, "N": 4, "K": 2}


class Tame(EpilogueBuilder):
    """Programs whose values stay finite and mostly off the kinks."""

    unary = ("neg", "abs", "tanh", "sigmoid", "relu", "silu", "gelu_erf", "gelu_tanh", "erf")
    constants = st.floats(0.25, 2.0, width=16)


class TameBatched(Tame, BatchedBuilder):
    pass


@settings(max_examples=150, deadline=None)
@given(random_epilogue(builder_type=Tame), st.integers(0, 99), st.sampled_from(["fast", "low"]))
def test_random_programs(program, seed, memory):
    check_random(program, seed, memory, SIZES)


@settings(max_examples=60, deadline=None)
@given(random_epilogue(builder_type=TameBatched), st.integers(0, 99), st.sampled_from(["fast", "low"]))
def test_random_programs_over_batches(program, seed, memory):
    check_random(program, seed, memory, {"B": 2, **SIZES})


def check_random(program, seed, memory, sizes):
    try:
        backward = differentiate(program)
    except CodaError as error:
        if "no output" in str(error) or "'clamp' has no derivative" in str(error):
            return
        raise
    inputs = random_inputs(program, sizes, seed)
    outputs = evaluate(program, inputs, exact=True)
    assume(all(y.isfinite().all() and (y.abs() < 1e6).all() for y in outputs.values()))
    bound = bind(program, shapes_of(inputs), sizes)
    want = autograd(program, inputs, random_seeds(program, backward.backward, bound, seed + 1), bound)
    assume(all(g is None or g.isfinite().all() for g in want.values()))
    check_gradients(program, sizes, inputs=inputs, seed=seed, memory=memory, rtol=1e-7)
