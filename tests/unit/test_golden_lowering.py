"""What programs become: the IR after unrolling lanes, the visitor plan and the generated C++, as files to read.

``pytest --update-golden`` rewrites them; the review of a change to the compiler is their diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from coda.cli import planview
from coda.errors import CodaError
from coda.frontend import load, load_path
from coda.ir import Program
from coda.printer import print_program
from coda.target import TILES, lower, variants
from coda.target.emit import device_source

EXAMPLES = Path(__file__).parents[2] / "examples"
NOT_LOWERED = {"mlp_block"}  # a block program

SPECIAL = """
# Outputs of three dtypes, one of them half as wide; the operands are of other dtypes than the arithmetic.
program widths(x: bf16[M, K], wg: bf16[F, K], wu: bf16[F, K], scale: f16[M], bias: f32[F]) {
    gate = cast(scale * (x @ wg.T), f16) + bias
    up = x @ wu.T
    return y = silu(gate) * up: f16, gate: f32, z = stack(gate, up, s): bf16[M, (s F)]
}

# One weight whose rows alternate between gate and up; so do the columns of the second result.
program interleaved(x: bf16[M, K], w: bf16[(F s=2), K], bias: bf16[(F s)]) {
    z = x @ w.T + bias
    return y = silu(z.s[0]) * z.s[1]: bf16, z: bf16[M, (F s)]
}

# One weight, gate before up, and the preactivation read back lane by lane.
program concatenated(x: bf16[M, K], w: bf16[(s=2 F), K], z0: bf16[M, (s F)]) {
    z = x @ w.T + z0
    return y = gelu_tanh(z.s[0]) * z.s[1]: bf16
}

# Operands that may be absent, of every kind; scalars from the host.
program absent(x: bf16[M, K], w: bf16[N, K], c: bf16[M, N]?, r: f32[M]?, bias: bf16[N]?, alpha: f32 = 1.0, beta: f32) {
    return y = alpha * (r * (x @ w.T)) + beta * c + bias: bf16
}

# Reductions over both directions, finished and not. The mean is divided and used where it is finished.
program reductions(x: bf16[M, K], w: bf16[N, K], mask: f32[M], eps: f32) {
    y = cast(x @ w.T, bf16)
    return y, total = sum(y, N): f32, largest = max(y, N): bf16, rstd = mask * rsqrt(mean(y * y, N) + eps): f32,
        parts = partial(min(y, N)): f32, by_column = sum(y, M): f32, column_parts = partial(max(y, M)): f32
}

# The result and its operand both transposed in memory, in f32.
program transposed(x: bf16[M, K], w: bf16[N, K]) {
    return y = 0.5 * (x @ w.T): f32[N, M]
}

# Values of a row, a column and a scalar are computed once for each, however much math they take.
program spaces(x: bf16[M, K], w: bf16[N, K], r: f32[M], c: bf16[N], s: f32) {
    return y = (x @ w.T) * rsqrt(r / s + s * s) + exp(-c) * cast(c + 1, bf16): bf16
}

# Explicit roundings stay, also where two follow each other; comparisons, where and clamp.
program casts(x: bf16[M, K], w: bf16[N, K], t: f16[M, N]) {
    y = cast(cast(x @ w.T, f16), bf16)
    return y = where(y > 0, clamp(y, -1.5, 6), t): f32, index = where(index(N) <= index(M), y, 0): bf16
}
"""


def programs() -> dict[str, Program]:
    found = {path.stem: path for path in sorted(EXAMPLES.glob("*.coda"))}
    loaded = {name: next(iter(load_path(path).programs.values())) for name, path in found.items()}
    return {name: p for name, p in loaded.items() if name not in NOT_LOWERED} | load(SPECIAL).programs


@pytest.mark.parametrize("name", programs())
def test_lowering(name, golden):
    plan = lower(programs()[name])
    tile = TILES[0]
    golden(f"lowering/{name}/unrolled.coda", print_program(plan.program))
    golden(f"lowering/{name}/plan.txt", "\n".join(planview.text(plan, tile)) + "\n")
    golden(f"lowering/{name}/kernels.cu", device_source(plan, variants(plan, [tile])))


@pytest.mark.parametrize("name", sorted(NOT_LOWERED))
def test_other_examples_say_why(name):
    (program,) = load_path(EXAMPLES / f"{name}.coda").programs.values()
    with pytest.raises(CodaError, match="this is a block program"):
        lower(program)
