"""What programs become: the IR after unrolling lanes, the visitor plan and the generated C++, as files to read.

``pytest --update-golden`` rewrites them; the review of a change to the compiler is their diff.
"""

from __future__ import annotations

import pytest

from coda.cli import planview
from coda.errors import CodaError
from coda.frontend import load_path
from coda.printer import print_program
from coda.target import TILES, lower, variants
from coda.target.emit import device_source
from tests.programs import BLOCKS, EXAMPLES, lowered


@pytest.mark.parametrize("name", lowered())
def test_lowering(name, golden):
    plan = lower(lowered()[name])
    tile = TILES[0]
    golden(f"lowering/{name}/unrolled.coda", print_program(plan.program))
    golden(f"lowering/{name}/plan.txt", "\n".join(planview.text(plan, tile)) + "\n")
    golden(f"lowering/{name}/kernels.cu", device_source(plan, variants(plan, [tile])))


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_other_examples_say_why(name):
    for program in load_path(EXAMPLES / f"{name}.coda").programs.values():
        if sum(n.op == "dot" for n in program.nodes()) > 1:
            with pytest.raises(CodaError, match=r"this is a block program|one kernel takes one|is computed"):
                lower(program)
