"""The workspace of blocks is as small as it can be: the most that is alive at once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from coda.frontend import load_path
from coda.passes import derive
from coda.runtime.binding import evaluate_size
from coda.target.blocks import lower_program

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"M": 8192, "D": 4096, "A": 4096, "F": 14336, "V": 128256}
BLOCKS = {"llama3_mlp": "llama3", "gemma2_mlp": "gemma2", "gpt2_mlp": "gpt2", "vit_mlp": "vit"}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", BLOCKS)
def test_no_block_takes_more_than_is_alive_at_once(name: str, backward: bool) -> None:
    program = load_path(EXAMPLES / f"{BLOCKS[name]}_block.coda").programs[name]
    schedule = lower_program(derive(program)[0].backward if backward else program)
    bytes_of = {
        t.name: math.prod(evaluate_size(d, SIZES) for d in t.dims) * t.dtype.bytes for t in schedule.temporaries
    }
    alive = {t.name: [i for i, step in enumerate(schedule.steps) if any(a.name == t.name for a in step.args)]
             for t in schedule.temporaries}  # fmt: skip
    most = max(sum(size for name, size in bytes_of.items() if alive[name][0] <= i <= alive[name][-1])
               for i in range(len(schedule.steps)))  # fmt: skip
    buffers: dict[int, int] = {}
    for t in schedule.temporaries:
        buffers[t.buffer] = max(buffers.get(t.buffer, 0), bytes_of[t.name])
    assert sum(buffers.values()) == most > 0
