"""Nodes are shared between programs; the places in their errors are not."""

from __future__ import annotations

import pytest

import coda
from coda.target import lower

TEXT = """
program {name}(x: bf16[M, K], w: bf16[N, K], v: bf16[N, N2]) {{
    return (x @ w.T) @ v: bf16
}}
"""


def test_an_error_points_into_the_program_that_has_it():
    coda.parse("\n" * 40 + TEXT.format(name="earlier"))
    with pytest.raises(coda.CodaError) as caught:
        lower(coda.parse(TEXT.format(name="later")).programs["later"])
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.span is not None
    assert diagnostic.span.line == 3
