"""Whatever the text, the frontend answers with a program, which prints and reads back, or with a CodaError."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda.errors import CodaError, Source
from coda.frontend import load
from coda.ir import Program
from coda.printer import print_program
from coda.verify import verify
from tests.programs import tour

TEXTS = [path.read_text() for path in tour().values()]
TOKENS = [re.findall(r"\w+|\s+|[^\w\s]", text) for text in TEXTS]
VOCABULARY = sorted(
    {t for tokens in TOKENS for t in tokens} | {"?", "-0.0", "inf", "dim", "[M", "(s", "%", "scatter_add"}
)


@st.composite
def mangled(draw) -> str:
    """A program of the tour with a few tokens dropped, doubled, swapped or replaced."""
    tokens = list(draw(st.sampled_from(TOKENS)))
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(tokens) - 1))
        j = draw(st.integers(0, len(tokens) - 1))
        edits = [[], [tokens[i]] * 2, [tokens[j]], [draw(st.sampled_from(VOCABULARY))]]
        tokens[i : i + 1] = draw(st.sampled_from(edits))
    return "".join(tokens)


def programs_or_error(text: str) -> dict[str, Program]:
    """The programs of a text; none if it is refused, and then each mistake has its place."""
    try:
        return load(Source(text, "text.coda")).programs
    except CodaError as error:
        places = [d.span for d in error.diagnostics]
    assert places
    assert None not in places
    return {}


@settings(max_examples=150, deadline=None)
@given(mangled())
def test_mangled_programs(text):
    for name, program in programs_or_error(text).items():
        verify(program)
        assert load(print_program(program)).programs[name] == program


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="program(){}[]:=,;+-*/@#?\n xM0.1e", max_size=60))
def test_noise(text):
    programs_or_error(text)


@pytest.mark.parametrize("expression", [" + ".join(["x"] * 20000), "-" * 20000 + "x"])
def test_deep_nesting_is_an_error_with_a_hint(expression):
    with pytest.raises(CodaError, match="nested too deeply"):
        load(f"program p(x: f32[M]) {{ return {expression} }}")
