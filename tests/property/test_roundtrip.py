"""A printed program parses and checks back to the identical program: the same interned nodes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from coda.frontend import load, load_path
from coda.ir import Program
from coda.printer import print_program
from coda.verify import verify
from tests.programs import random_epilogue, tour


def roundtrip(program: Program) -> None:
    text = print_program(program)
    again = load(text).programs[program.name]
    assert again == program, text
    assert print_program(again) == text


@settings(max_examples=150, deadline=None)
@given(random_epilogue())
def test_random_epilogues_survive_printing(program):
    verify(program)
    roundtrip(program)


@pytest.mark.parametrize("name", [name for name in tour() if name != "moe"])
@pytest.mark.parametrize("consts", [{}, {"HQ": 32, "HK": 8}], ids=["symbolic", "given"])
def test_tour_survives_printing(name, consts):
    known = consts if name == "qkv" else {}
    for program in load_path(tour()[name], known).programs.values():
        verify(program)
        roundtrip(program)
