"""Batched products: what the launcher asks for, and the launch itself, executed by the host.

The fake runtime records tensor maps and kernel parameters. A driver then does with them what the kernel does: for each
batch it multiplies what the maps describe, computes the generated math over ``coda::Batch`` of the recorded parameters,
and stores through its outputs; the finish kernels run on theirs. So maps, steps from batch to batch and the layout of
partial results are all tested by the values that come out.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.frontend import load
from coda.ops.reduce import REDUCTIONS
from coda.resources import templates_dir
from coda.runtime.binding import evaluate_size
from coda.runtime.reference import evaluate
from coda.target import Plan, Tile, emit, lower
from coda.target.blocks import lower_program
from coda.target.legality import as_schedule
from coda.target.plan import BAND
from tests.abi import harness
from tests.abi.harness import Recorder, host_of, tools
from tests.hostmath import FLAGS, HOST_INCLUDE, bits, exact_operand

BF16, F32 = torch.bfloat16, torch.float32
TILE = Tile(128, 128)
WORKSPACE = 1 << 20
MAP_TYPES = {7: F32, 9: BF16}  # by CUtensorMapDataType

PROGRAMS = """
program plain(x: bf16[B, M, K], w: bf16[B, K, N]) {
    return x @ w: bf16
}
program everything(x: bf16[B, M, K], w: bf16[B, N, K], bias: bf16[N]?, shift: f32[B, N], r: f32[B, M], t: f32[B],
                   res: bf16[B, M, N], s: f32 = 2.0) {
    y = cast(t * r * (x @ w.T) + bias + shift + res * s, bf16)
    return y, sum(y * y, N): f32, sum(y, M): f32, max(y, (M)): bf16
}
program over_all(x: bf16[B, M, K], w: bf16[B, K, N], shared: bf16[M, N], m: f32[M], label: i64[B, M]) {
    y = m * (x @ w) + shared
    return y: f32[M, B, N], sum(y, (B M)): f32, total = mean(y, (B M N)): f32, p = m * pick(y, N, label): f32
}
program gated(x: bf16[B, M, K], wg: bf16[B, F, K], wu: bf16[B, F, K], bg: bf16[B, F]) {
    z = stack(x @ wg.T + bg, x @ wu.T, s)
    return relu(z.s[0]) * z.s[1]: bf16, z: bf16[B, M, (s F)]
}
program halves(x: bf16[B, M, K], w: bf16[B, (s=2 F), K], z0: bf16[B, M, (s F)]) {
    z = x @ w.T + z0
    return relu(z.s[0]) * z.s[1]: bf16
}
program dgrad(dy: bf16[B, M, N], w: bf16[B, N, K], v: bf16[B, N, K], du: bf16[B, M, N]) {
    return dy @ w + du @ v: bf16
}
program wgrad(dy: bf16[B, M, N], x: bf16[B, M, K], inout dw: f32[B, N, K]) {
    dw += dy.T @ x
}
program shared_dims(x: bf16[B, M, K], w: bf16[B, N, K], bias: bf16[(B N)], r: f32[(B M)], res: bf16[(B M), N],
                    wide: bf16[M, (B N)]) {
    y = r * (x @ w.T) + bias + res + wide
    return y: bf16[M, (B N)], z = y: f32[(B M), N], sum(y, N): f32[(B M)], sum(y, M): f32[(B N)]
}
program between(o: bf16[M, B, K], u: bf16[N, (B K)]) {
    x: bf16[B, M, K] = o
    t: bf16[B, N, K] = u
    return x @ t.T: f32[M, (B N)]
}
program columns_between(o: bf16[K, (B F)], w: bf16[(B K), N]) {
    x: bf16[B, K, F] = o
    z: bf16[B, K, N] = w
    return x.T @ z: f32[F, B, N]
}
program positions(x: bf16[B, M, K], w: bf16[B, K, N]) {
    return x @ w + (100 * index(B) + 10 * index(M) + index(N)): f32
}
"""


@lru_cache(maxsize=1)
def programs() -> dict[str, Any]:
    return load(PROGRAMS).programs


@lru_cache
def plan(name: str) -> Plan:
    return lower(programs()[name])


_folder = TemporaryDirectory(prefix="coda-batched-")


@lru_cache
def recorder(name: str) -> Recorder:
    return Recorder(host_of(Path(_folder.name) / name, as_schedule(plan(name)), fake=True, tiles=[TILE]))


def started(name: str) -> Recorder:
    record = recorder(name)
    record.reset()
    return record


def calls(record: Recorder, kind: str) -> list[dict[str, Any]]:
    return [c for c in record.calls() if c["call"] == kind]


# -- the driver ------------------------------------------------------------------------------------------------------


@lru_cache
def driver(p: Plan) -> ctypes.CDLL:
    """The kernels of a plan as loops over its recorded parameters."""
    parameters = [f"values[{i}]" for i in range(len(emit.element_parameters(p)))]
    pairs = ", ".join(f"coda::Two<float>{{{v}[i], {v}[i + 1]}}" for v in parameters)
    text = f"""#include "finish_on_host.h"
#include <vector>
template <class T> T* at(coda::Output const& o, int64_t row, int64_t column, int lane = 0) {{
  return static_cast<T*>(o.data) + row * o.row + column * o.column + lane * o.lane;
}}
template <class R> void combine(typename R::State& total, float v) {{ total = R::combine(total, v); }}
{emit.body(p)}
using Launch = coda::BatchedLaunch<{len(p.tile_operands)}, {len(p.operands)}, {len(p.stores)}, {len(p.terms)}>;
extern "C" void run(Launch const* group, int member, float const* const* values, int tile) {{
  Launch const* const launch = group + member;
  int64_t i = 0;
  int const columns = launch->n / {p.lanes}, padded = columns + columns % 2;
  for (int batch = 0; batch < launch->batches; ++batch) {{
    coda::Batch<Launch> const p(*launch, batch);
    auto const u = Body::uniform(p.operands, p.m, columns);
{_starts(p)}
    for (int m = 0; m < p.m; ++m) {{
      auto const r = Body::row(p.operands, u, m, p.m);
      for (int n = 0; n < padded; n += 2, i += 2) {{
        auto const result = Body::element(u, r, Body::columns(p.operands, u, n, columns), m, n, {pairs});
        for (int e = 0; e < 2 && n + e < columns; ++e) {{
{_stores(p)}
        }}
      }}
    }}
  }}
}}
{"".join(_finish(p, f) for f in p.finishings)}"""
    folder = Path(_folder.name) / f"driver_{p.name}"
    folder.mkdir()
    (folder / "driver.cpp").write_text(text)
    includes = [f"-I{tools().cuda_include}", f"-I{HOST_INCLUDE}", f"-I{templates_dir()}"]
    command = [str(tools().cxx), *FLAGS, *includes, "-o", "driver.so", "driver.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[:4000]
    return ctypes.CDLL(str(folder / "driver.so"))


def _starts(p: Plan) -> str:
    """Partial results begin as those of nothing, and so does what is picked at a position outside."""
    lines = [f"    for (int m = 0; m < p.m; ++m) *at<float>(p.outputs[{k}], m, 0) = 0.0f;"
             for k, store in enumerate(p.stores) if store.kind == "pick"]  # fmt: skip
    for k, store in enumerate(p.stores):
        if store.kind in ("row", "column"):
            combiner = REDUCTIONS[store.reduction or ""].cpp
            bands, tiles = f"(p.m + {BAND - 1}) / {BAND}", "(columns + tile - 1) / tile"
            rows, columns = ("p.m", tiles) if store.kind == "row" else (bands, "columns")
            lines.append(f"    for (int m = 0; m < {rows}; ++m) for (int n = 0; n < {columns}; ++n)")
            lines.append(f"      *at<{combiner}::State>(p.outputs[{k}], m, n) = {combiner}::identity();")
    return "\n".join(lines)


def _stores(p: Plan) -> str:
    lines = []
    for k, store in enumerate(p.stores):
        for lane in range(len(store.values)):
            value = f"result.{emit.result_name(k, lane)}"
            if store.is_packed:
                lines.append(f"*at<uint16_t>(p.outputs[{k}], m, n + e, {lane}) = uint16_t({value} >> 16 * e);")
            elif store.kind == "tile":
                lines.append(f"*at<float>(p.outputs[{k}], m, n + e, {lane}) = e ? {value}.y : {value}.x;")
            elif store.kind in ("row", "column"):
                place = "m, (n + e) / tile" if store.kind == "row" else f"m / {BAND}, n + e"
                combiner = REDUCTIONS[store.reduction or ""].cpp
                state = f"*at<{combiner}::State>(p.outputs[{k}], {place})"
                lines.append(f"combine<{combiner}>({state}, e ? {value}.y : {value}.x);")
            elif lane == 0:
                index = f"result.{emit.result_name(k, 1)}"
                lines.append(f"if ({index} == n + e) *at<float>(p.outputs[{k}], m, 0) = e ? {value}.y : {value}.x;")
    return "\n".join(f"          {line}" for line in lines)


def _finish(p: Plan, finishing: Any) -> str:
    inputs, outputs = len(finishing.partials) + len(finishing.operands), len(finishing.results) + len(finishing.kept)
    kernel = f"{p.name}_finish_{finishing.kind}"
    return f"""{emit.finish_kernel(p, finishing)}
extern "C" void {kernel}_all(coda::Finish<{inputs}, {outputs}> const* p) {{
  for (threadIdx.x = 0; threadIdx.x < p->length; ++threadIdx.x) {kernel}(*p);
}}
"""


def through(call: Mapping[str, Any]) -> Tensor:
    """What a tensor map describes, slowest dim first."""
    dtype = MAP_TYPES[call["type"]]
    strides = [dtype.itemsize, *call["strides"]]
    end = dtype.itemsize + sum((size - 1) * stride for size, stride in zip(call["dims"], strides, strict=True))
    elements = torch.frombuffer((ctypes.c_char * end).from_address(call["base"]), dtype=dtype)
    return elements.as_strided(call["dims"][::-1], [s // dtype.itemsize for s in strides[::-1]]).float()


def products(p: Plan, encoded: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """What each lane accumulates, by what the maps describe: [B, M, N]."""
    total: Any = 0
    for a, b in zip(encoded[0 : 2 * len(p.terms) : 2], encoded[1 : 2 * len(p.terms) : 2], strict=True):
        left, right = through(a), through(b)
        left = left if p.a_major.value == "k" else left.mT
        if p.lanes == 2:  # [B, F/8, 2, 8, K]
            right = right.permute(0, 2, 1, 3, 4).flatten(2, 3)  # [B, 2, F, K]
            return [left @ right[:, lane].mT for lane in range(2)]
        total = total + left @ (right.mT if p.b_major.value == "k" else right)
    return [total]


def execute(name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs, poisoned before, after the launch."""
    p, record, library = plan(name), started(name), driver(plan(name))
    args = [inputs.get(a.name) if not a.is_output else outputs[a.name] for a in p.args]
    workspace = torch.full([WORKSPACE // 4], float("nan"))
    address = -(-workspace.data_ptr() // 256) * 256
    devices = [0 if arg.dims or arg.is_output else -1 for arg in p.args]
    for a in outputs.values():
        a.fill_(float("nan"))
    assert record.run(args, devices, workspace=address, size=WORKSPACE - 256) == 0, record.error
    encoded, launched = calls(record, "encode"), calls(record, "launch")
    memory = record.library.fake_parameters()
    if launched and "_gemm_" in launched[0]["kernel"]:
        values = products(p, encoded)
        counts = (len(p.tile_operands), len(p.operands), len(p.stores), len(p.terms))
        if record.parameters(harness.launch_type(*counts)).swap_lanes:
            values.reverse()
        present = iter(encoded[2 * len(p.terms) :])
        streams = {i: through(next(present)) for i in sorted({i for _, i, _ in emit.streams(p)})}
        for _, i, lane in emit.streams(p):
            x = streams[i]  # [.., M, N] or [.., M, 2, N]
            values.append((x if p.operands[i].lanes.value == "none" else x[..., lane, :]).expand(values[0].shape))
        padded = [torch.nn.functional.pad(v, (0, v.shape[-1] % 2)).contiguous() for v in values]
        pointers = (ctypes.c_void_p * len(padded))(*(v.data_ptr() for v in padded))
        library.run(ctypes.c_void_p(memory), 0, pointers, TILE.n // p.lanes)
        launched, first = launched[1:], 1
    else:
        first = 0
    for i, launch in enumerate(launched, first):
        getattr(library, f"{launch['kernel']}_all")(ctypes.c_void_p(memory + i * record.PARAMETERS))
    return dict(outputs)


# -- executed --------------------------------------------------------------------------------------------------------

SIZES = {"B": 3, "M": 37, "N": 40, "K": 24, "F": 16}


def operands(name: str, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    """Small eighths, whose sums of products are exact; positions for labels, one of them outside."""
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {}
    for arg in plan(name).args:
        shape = [evaluate_size(d, sizes) for d in arg.dims]
        if arg.dtype.kind == "int":
            inputs[arg.name] = torch.arange(shape[0] * shape[1]).reshape(shape) % (sizes["N"] + 1)
        elif not arg.is_output and arg.default is None:
            inputs[arg.name] = exact_operand(generator, *shape, dtype=torch_dtype(arg.dtype))
    return inputs


def results(name: str, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    return {a.name: torch.empty([evaluate_size(d, sizes) for d in a.dims], dtype=torch_dtype(a.dtype))
            for a in plan(name).args if a.is_output}  # fmt: skip


def check(name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> None:
    """Every bit of what is stored, element for element; sums are added in another order."""
    want = evaluate(programs()[name], {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()})
    got = execute(name, inputs, outputs)
    for arg in plan(name).program.outputs:
        result = inputs[arg.into] if arg.into else got[arg.name]
        if arg.value.type.names == plan(name).products[0].type.names:
            assert torch.equal(bits(result), bits(want[arg.name])), arg.name
        torch.testing.assert_close(result, want[arg.name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize("changed", [{}, {"B": 1}, {"M": 1, "B": 5}, {"M": 300, "N": 264, "B": 2}], ids=str)
def test_executed(name: str, changed: dict[str, int]) -> None:
    sizes = SIZES | changed
    check(name, operands(name, sizes), results(name, sizes))


@pytest.mark.parametrize("name", ["everything", "over_all", "gated"])
def test_batches_that_lie_between_rows(name: str) -> None:
    """[M, B, ..] in memory, of operands and outputs alike."""

    def between(t: Tensor) -> Tensor:
        return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() == 3 else t

    inputs = {k: between(v) if isinstance(v, Tensor) else v for k, v in operands(name, SIZES).items()}
    check(name, inputs, {k: between(v) for k, v in results(name, SIZES).items()})


def test_an_absent_operand_is_absent_in_every_batch() -> None:
    inputs = operands("everything", SIZES)
    check("everything", inputs | {"bias": None}, results("everything", SIZES))


def test_one_value_for_all_batches_or_columns() -> None:
    one = {"t": torch.tensor([0.5]), "bias": torch.tensor([2.0], dtype=BF16)}
    check("everything", operands("everything", SIZES) | one, results("everything", SIZES))


@pytest.mark.parametrize("empty", [{"B": 0}, {"M": 0}, {"N": 0}], ids=str)
def test_empty(empty: dict[str, int]) -> None:
    """No product is launched; sums over nothing are 0, a maximum is the least there is, a mean is none."""
    sizes = SIZES | empty
    execute("plain", operands("plain", sizes), results("plain", sizes))
    assert not calls(recorder("plain"), "launch")
    nothing = {"y": 0.0, "out1": 0.0, "out2": 0.0, "out3": -torch.inf, "total": torch.nan, "p": 0.0}
    for name in ("everything", "over_all"):
        for output, value in execute(name, operands(name, sizes), results(name, sizes)).items():
            torch.testing.assert_close(value, torch.full_like(value, nothing[output]), equal_nan=True)


# -- maps and grids --------------------------------------------------------------------------------------------------


def test_the_batch_is_the_last_coordinate_of_the_maps() -> None:
    record = started("everything")
    x, w, res = (torch.zeros(5, *shape, dtype=BF16) for shape in ((300, 256), (520, 256), (300, 520)))
    args = [x, w, None, torch.zeros(5, 520), torch.zeros(5, 300), torch.zeros(5), res, None, torch.zeros_like(res)]
    args += [torch.zeros(5, 300), torch.zeros(5, 520), torch.zeros(5, 520, dtype=BF16)]
    assert record.run(args) == 0, record.error
    a, b, tile = calls(record, "encode")
    assert (a["dims"], a["strides"], a["box"]) == ([256, 300, 5], [512, 300 * 512], [64, 128, 1])
    assert (b["dims"], b["strides"], b["box"]) == ([256, 520, 5], [512, 520 * 512], [64, 64, 1])
    assert (tile["dims"], tile["strides"], tile["box"]) == ([520, 300, 5], [1040, 300 * 1040], [64, 64, 1])
    gemm, *finishes = calls(record, "launch")
    assert gemm["grid"] == [2, 50, 1]  # clusters: 2 x 5 tiles of two for each of 5 batches
    assert [f["grid"] for f in finishes] == [[-(-5 * 300 // 32), 1, 1], [-(-5 * 520 // 32), 1, 1]]


def test_two_weights_are_one_map_with_five_dims() -> None:
    record = started("gated")
    both = torch.zeros(2, 3, 16, 24, dtype=BF16)
    x, bias, z = torch.zeros(3, 37, 24, dtype=BF16), torch.zeros(3, 16, dtype=BF16), torch.zeros(3, 37, 32, dtype=BF16)
    assert record.run([x, both[1], both[0], bias, torch.zeros(3, 37, 16, dtype=BF16), z]) == 0, record.error
    _, b = calls(record, "encode")
    lane = 3 * 16 * 24 * 2
    assert (b["base"], b["dims"], b["box"]) == (both.data_ptr(), [24, 8, 2, 2, 3], [64, 8, 2, 4, 1])
    assert b["strides"] == [48, lane, 8 * 48, 16 * 48]
    assert record.parameters(harness.launch_type(0, 1, 2)).swap_lanes == 1


def test_weight_gradients_are_one_launch() -> None:
    """Of several batches each: executed, member by member, from the parameters of the one launch."""
    text = "x: bf16[B, M, K], dg: bf16[B, M, N], du: bf16[B, M, F]) {\n return dg.T @ x: f32, du.T @ x: f32\n}\n"
    schedule = lower_program(load(f"program gradients({text}").programs["gradients"])
    assert schedule.members == (2, 0)
    record = Recorder(host_of(Path(_folder.name) / "gradients", schedule, fake=True, tiles=[TILE]))
    record.reset()
    generator = torch.Generator().manual_seed(0)
    x, dg, du = (exact_operand(generator, 3, 40, width) for width in (24, 264, 136))
    outputs = [torch.full((3, width, 24), float("nan")) for width in (264, 136)]
    assert record.run([x, dg, du, *outputs]) == 0, record.error
    (launch,) = calls(record, "launch")
    assert launch["grid"] == [2, (2 + 1) * 3, 1]  # clusters of two tiles: 264 rows and 136, in each of 3 batches
    encoded, memory = calls(record, "encode"), record.library.fake_parameters()
    for member, step in enumerate(schedule.gemms):
        (values,) = products(step, encoded[2 * member : 2 * member + 2])
        pointers = (ctypes.c_void_p * 1)(values.contiguous().data_ptr())
        driver(schedule.gemms[0]).run(ctypes.c_void_p(memory), member, pointers, TILE.n)
    for got, gradient in zip(outputs, (dg, du), strict=True):
        assert torch.equal(got, gradient.float().mT @ x.float())


def test_a_vector_is_stored_where_batches_begin_at_multiples_of_16_bytes() -> None:
    for odd, vector in ((0, 1), (4, 0)):
        record = started("plain")
        y = torch.zeros(2, 8 * 16 + odd, dtype=BF16)[:, :128].view(2, 8, 16)
        assert record.run([torch.zeros(2, 8, 24, dtype=BF16), torch.zeros(2, 24, 16, dtype=BF16), y]) == 0, record.error
        assert record.parameters(harness.launch_type(0, 0, 1)).outputs[0].vector == vector


def refusal(name: str, **changed: Tensor) -> str:
    sizes = SIZES
    inputs = operands(name, sizes) | changed
    record = started(name)
    args = [inputs.get(a.name) if not a.is_output else results(name, sizes)[a.name] for a in plan(name).args]
    assert record.run(args) != 0
    return record.error


def test_refusals() -> None:
    w = torch.zeros(24, 40, dtype=BF16)
    assert "operand 'w' has overlapping batches: 0 elements apart, 40 wide" in refusal("plain", w=w.expand(3, 24, 40))
    padded = torch.zeros(3, 24 * 40 + 4, dtype=BF16)[:, : 24 * 40].view(3, 24, 40)
    assert "operand 'w' has batches 1928 bytes apart; TMA needs a multiple of 16" in refusal("plain", w=padded)
    assert "operand 'w' has shape [2, 24, 40]: dim 0 must be 3" in refusal("plain", w=w.expand(2, 24, 40))
    assert "operand 'w' has 2 dims" in refusal("plain", w=w)
    apart = torch.zeros(3, 20, 24, dtype=BF16)[:, :16]
    assert "the batches of operand 'wg' are 480 elements apart" in refusal("gated", wg=apart)
