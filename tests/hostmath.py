"""Generated math, run by the host compiler: the body and the finish kernels of plans against the interpreter.

``compile_plans`` makes one shared library of a batch of plans. A ``HostProgram`` is called with a program's operands
and returns its outputs as ``coda.runtime.reference.evaluate`` does: it takes the product from the interpreter, fills
the operand table as the launcher does, visits every row and pair of columns, reduces in torch, and runs the finish
kernels.

``own_functions`` puts the functions of ``templates/scalar.h`` into the interpreter: with them, generated math and
interpreter agree to the bit, so that a random program tests the code generator and not the accuracy of ``expf``.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.ir import Output, dim_size
from coda.ops import OPS
from coda.resources import templates_dir
from coda.runtime.binding import bind, evaluate_size, shapes_of
from coda.runtime.reference import evaluate
from coda.target import emit
from coda.target.plan import Finishing, Lanes, Operand, Plan, Store

HOST_INCLUDE = Path(__file__).parent / "host_include"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unused")
# Operations of which IEEE arithmetic defines every bit. (torch's vectorised sqrt is one place off now and then, and
# relu(-0.0) is a zero of either sign.)
EXACT = (
    "add", "sub", "mul", "div", "neg", "eq", "ne", "lt", "le", "gt", "ge", "where", "maximum", "minimum", "clamp",
    "abs", "sign",
)  # fmt: skip
APPROXIMATE = tuple(name for name, op in OPS.items() if op.family == "pointwise" and name not in EXACT)
REDUCE = {"sum": Tensor.sum, "mean": Tensor.sum, "max": Tensor.amax, "min": Tensor.amin}


def _logsumexp_partial(x: Tensor, dim: int) -> Tensor:
    """LogSumExp::State of templates/reduce.h: the maximum, and the sum relative to it."""
    most = x.amax(dim, keepdim=True)
    return torch.stack([most.squeeze(dim), (x - torch.where(most.isinf(), 0, most)).exp().sum(dim)], -1)


PARTIAL = REDUCE | {"logsumexp": _logsumexp_partial}

PREAMBLE = """\
#include "finish_on_host.h"
#include <vector>

// What the entries of templates/launch.h are filled from: Entry in tests/hostmath.py.
struct Entry {
  void* data;
  int64_t row, column, lane;
  float value;
  int64_t integer, extent;
};

static std::vector<coda::Operand> operands(Entry const* entries, int count) {
  std::vector<coda::Operand> result(count);
  for (int i = 0; i < count; ++i) {
    Entry const& e = entries[i];
    coda::Operand& o = result[i];
    o.data = e.data, o.row = e.row, o.column = e.column, o.lane = e.lane, o.value = e.value, o.integer = e.integer;
    o.extent = e.extent;
  }
  return result;
}

static void put(float* output, int64_t i, coda::Two<float> v) { output[i] = v.x, output[i + 1] = v.y; }
static void put(float* output, int64_t i, int64_t v) { output[i] = output[i + 1] = float(v); }

template <class Finish>
Finish finish(Entry const* entries, int inputs, int outputs, int length, int64_t extent) {
  Finish p{};
  p.length = length, p.extent = extent;
  for (int i = 0; i < inputs; ++i) p.operands[i] = operands(entries + i, 1)[0];
  for (int i = 0; i < outputs; ++i) {
    Entry const& e = entries[inputs + i];
    p.outputs[i].data = e.data, p.outputs[i].row = e.row, p.outputs[i].column = e.column;
    p.outputs[i].batch = e.lane, p.outputs[i].rows_per_batch = int(e.extent);
  }
  return p;
}
"""


class Entry(ctypes.Structure):
    """An operand or output: see the struct of this name in the preamble."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
        ("lane", ctypes.c_int64),
        ("value", ctypes.c_float),
        ("integer", ctypes.c_int64),
        ("extent", ctypes.c_int64),
    )


# -- compiling -------------------------------------------------------------------------------------------------------


def compile_plans(plans: Sequence[Plan]) -> list[HostProgram]:
    """One library of all the plans. Skips the test where there is no g++."""
    plans = [replace(plan, name=f"p{i}_{plan.name}") for i, plan in enumerate(plans)]
    library = compile_cpp("\n".join([PREAMBLE, *map(driver, plans)]))
    return [HostProgram(plan, library) for plan in plans]


def compile_plan(plan: Plan) -> HostProgram:
    return compile_plans([plan])[0]


def compile_cpp(text: str) -> ctypes.CDLL:
    compiler = shutil.which("g++") or pytest.skip("no g++ to compile generated math with")
    folder = Path(mkdtemp(dir=_session_folder()))
    (folder / "math.cpp").write_text(text)
    includes = (f"-I{HOST_INCLUDE}", f"-I{templates_dir()}")
    command = [compiler, *FLAGS, *includes, "-o", "math.so", "math.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stderr[:4000]}\n{text if len(text) < 20000 else folder / 'math.cpp'}"
    return ctypes.CDLL(str(folder / "math.so"))


@lru_cache(maxsize=1)
def _session_folder() -> str:
    import atexit

    folder = mkdtemp(prefix="coda-hostmath-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def driver(plan: Plan) -> str:
    """The body of a plan and a function that runs it over a whole output; its finish kernels likewise. Arrays have an
    even number of columns, the last of which may be padding."""
    tiles = [f"coda::Two<float>{{tiles[{i}][i], tiles[{i}][i + 1]}}" for i in range(len(emit.element_parameters(plan)))]
    stores = [
        f"    put(outputs[{number}], i, {_as_floats(store, emit.result_name(k, lane))});"
        for number, (k, lane, store) in enumerate(_results(plan))
    ]
    return f"""{emit.body_source(plan)}
extern "C" void {plan.name}_run(Entry const* entries, int rows, int columns, float const* const* tiles,
                                float* const* outputs) {{
  using Body = {plan.name}::Body;
  auto const table = operands(entries, {len(plan.operands)});
  coda::Operand const* const in = table.data();
  int64_t i = 0;
  auto const u = Body::uniform(in, rows, columns);
  for (int m = 0; m < rows; ++m) {{
    auto const r = Body::row(in, u, m, rows);
    for (int n = 0; n < columns; n += 2, i += 2) {{
      auto const c = Body::columns(in, u, n, columns);
      auto const result = Body::element(u, r, c, m, n, {", ".join(tiles)});
{chr(10).join(stores)}
    }}
  }}
}}
{"".join(_finish_driver(plan, f) for f in plan.finishings)}"""


def _finish_driver(plan: Plan, finishing: Finishing) -> str:
    inputs, outputs = len(finishing.partials) + len(finishing.operands), len(finishing.results) + len(finishing.kept)
    name = f"{plan.name}_finish_{finishing.kind}"
    return f"""{emit.finish_kernel(plan, finishing)}
extern "C" void {name}_all(Entry const* entries, int length, int64_t extent) {{
  auto const p = finish<coda::Finish<{inputs}, {outputs}>>(entries, {inputs}, {outputs}, length, extent);
  for (threadIdx.x = 0; threadIdx.x < length; ++threadIdx.x) {name}(p);
}}
"""


def _results(plan: Plan) -> list[tuple[int, int, Store]]:
    """(store, lane) of each field of Result, in order."""
    return [(k, lane, store) for k, store in enumerate(plan.stores) for lane in range(len(store.values))]


def _as_floats(store: Store, name: str) -> str:
    return f"coda::unpack<{store.dtype.cpp}>(result.{name})" if store.is_packed else f"result.{name}"


# -- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostProgram:
    """A plan compiled for the host."""

    plan: Plan
    library: ctypes.CDLL

    def __call__(self, inputs: Mapping[str, Any], dims: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        return _Call(self, inputs, dims).outputs()


class _Call:
    def __init__(self, program: HostProgram, inputs: Mapping[str, Any], dims: Mapping[str, int] | None):
        self.plan, self.library, self.inputs = program.plan, program.library, inputs
        self.sizes = bind(self.plan.program, shapes_of(inputs), dims)
        self.rows, self.columns = (evaluate_size(dim_size(d), self.sizes) for d in (self.plan.rows, self.plan.columns))

    def outputs(self) -> dict[str, Tensor]:
        values = self._visit()
        results: dict[str, Tensor] = {}
        partials: dict[int, Tensor] = {}
        for k, store in enumerate(self.plan.stores):
            if store.kind == "tile":
                results[store.arg or ""] = self._stored(store, values[k])
            elif store.kind == "each":
                results[store.arg or ""] = values[k][0][:, 0].to(torch_dtype(store.dtype))
            elif store.kind == "pick":
                partials[k] = self._picked(*values[k])
            else:
                partials[k] = PARTIAL[store.reduction or ""](values[k][0], 1 if store.kind == "row" else 0).contiguous()
                if store.arg is not None:
                    results[store.arg] = partials[k][None]
        for finishing in self.plan.finishings:
            results |= self._finish(finishing, partials)
        return {o.name: results[o.name] for o in self.plan.program.outputs}

    def _visit(self) -> dict[int, list[Tensor]]:
        """For each store its values over the output, one tensor for each lane."""
        width = self.columns + self.columns % 2
        tiles = [self._padded(t, width) for t in (*self._products(), *self._streams())]
        results = [torch.full((self.rows, width), -777.0) for _ in _results(self.plan)]
        run = getattr(self.library, f"{self.plan.name}_run")
        run.restype = None
        run(_array(self._entries(self.plan.operands)), self.rows, self.columns, _pointers(tiles), _pointers(results))
        values: dict[int, list[Tensor]] = {k: [] for k in range(len(self.plan.stores))}
        for (k, _, _), result in zip(_results(self.plan), results, strict=True):
            values[k].append(result[:, : self.columns].contiguous())
        return values

    def _padded(self, x: Tensor, width: int) -> Tensor:
        padded = torch.full((self.rows, width), float("nan"))
        padded[:, : self.columns] = x
        return padded

    def _products(self) -> list[Tensor]:
        """What the lanes accumulate, by the interpreter."""
        names = [f"product{lane}" for lane in range(self.plan.lanes)]
        outputs = [Output(name, node, node.type) for name, node in zip(names, self.plan.products, strict=True)]
        program = self.plan.program.with_outputs(outputs)
        known = {a.name for a in program.axes}
        values = evaluate(program, self.inputs, dims={name: n for name, n in self.sizes.items() if name in known})
        return [values[name] for name in names]

    def _streams(self) -> list[Tensor]:
        """The tile operand of each stream; an absent one is its identity, as in the visitor."""
        streams = []
        for _, index, lane in emit.streams(self.plan):
            operand = self.plan.operands[index]
            tensor = self.inputs.get(operand.arg)
            if tensor is None:
                streams.append(torch.full((self.rows, self.columns), operand.identity))
            else:
                flat = tensor.reshape(self.rows, -1).float()
                streams.append(self._lane(flat, operand.lanes, lane))
        return streams

    def _lane(self, x: Tensor, lanes: Lanes, lane: int) -> Tensor:
        if lanes is Lanes.NONE:
            return x
        if lanes is Lanes.OUTER:
            return x.reshape(len(x), 2, -1)[:, lane]
        return x.reshape(len(x), -1, 2)[:, :, lane]

    def _entries(self, operands: Sequence[Operand]) -> list[Entry]:
        return [self._entry(operand) for operand in operands]

    def _entry(self, operand: Operand) -> Entry:
        """As templates/host/bind.h fills it."""
        if operand.size is not None:
            return Entry(integer=evaluate_size(operand.size, self.sizes))
        value, default = self.inputs.get(operand.arg), self.plan.arg(operand.arg).default
        if value is None:
            value = operand.identity if default is None else default
        if not isinstance(value, Tensor):
            return Entry(integer=value) if operand.dtype.kind == "int" else Entry(value=value)
        entry = Entry(data=value.data_ptr(), extent=len(value) if operand.partial else 0)
        if value.numel() == 1 and value.dim() <= 1:  # one value stands for all
            return entry
        if operand.row_dim is not None:
            entry.row = value.stride(operand.row_dim)
        if operand.column_dim is not None:
            stride = value.stride(operand.column_dim)
            entry.column = 2 * stride if operand.lanes is Lanes.INNER else stride
            entry.lane = {Lanes.NONE: 0, Lanes.INNER: stride, Lanes.OUTER: self.columns * stride}[operand.lanes]
        return entry

    def _picked(self, x: Tensor, index: Tensor) -> Tensor:
        inside = (index[:, 0] >= 0) & (index[:, 0] < self.columns)
        return torch.where(inside, x.gather(1, torch.where(inside, index[:, 0], 0).long()[:, None])[:, 0], 0)

    def _stored(self, store: Store, values: list[Tensor]) -> Tensor:
        if store.lanes is Lanes.OUTER:
            result = torch.cat(values, 1)
        elif store.lanes is Lanes.INNER:
            result = torch.stack(values, -1).flatten(1)
        else:
            (result,) = values
        result = result.T.contiguous() if store.row_dim == 1 else result
        return result.to(torch_dtype(store.dtype))

    def _finish(self, finishing: Finishing, partials: dict[int, Tensor]) -> dict[str, Tensor]:
        """The results of a finish kernel; what it keeps for the totals is added to the partials."""
        length = {"row": self.rows, "column": self.columns, "total": 1}[finishing.kind]
        extent = self.columns if finishing.kind == "row" else self.rows
        kept = [torch.full([length], -777.0) for _ in finishing.kept]
        partials |= {len(self.plan.stores) + i: x for i, x in enumerate(kept)}
        results = {
            name: torch.full([length] if self.plan.arg(name).dims else [], -777.0).to(torch_dtype(dtype))
            for _, name, dtype in finishing.results
        }
        count = self.rows if finishing.kind == "total" else 1
        entries = [Entry(data=partials[i].data_ptr(), extent=count) for i in finishing.partials]
        entries += self._entries(finishing.operands)
        entries += [Entry(data=r.data_ptr(), row=r.dim()) for r in (*results.values(), *kept)]  # adjacent elements
        run = getattr(self.library, f"{self.plan.name}_finish_{finishing.kind}_all")
        run.restype, run.argtypes = None, (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
        run(_array(entries), length, extent)
        return results


def _array(entries: Sequence[Entry]) -> ctypes.Array:
    return (Entry * max(len(entries), 1))(*entries)


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * max(len(tensors), 1))(*(t.data_ptr() for t in tensors))


# -- the interpreter with our functions ------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _functions() -> ctypes.CDLL:
    loops = []
    for name in APPROXIMATE:
        operands = [f"x[{k}][i]" for k in range(OPS[name].arity or 0)]
        loops.append(
            f'extern "C" void {name}_all(float const* const* x, float* y, int64_t count) {{\n'
            f"  for (int64_t i = 0; i < count; ++i) y[i] = {(OPS[name].cpp or '').format(*operands)};\n}}"
        )
    return compile_cpp("\n".join(['#include "scalar.h"', *loops]))


def apply(name: str, *operands: Tensor) -> Tensor:
    """A function of templates/scalar.h on tensors."""
    operands = tuple(x.contiguous() for x in torch.broadcast_tensors(*operands))
    y = torch.empty_like(operands[0])
    function = getattr(_functions(), f"{name}_all")
    function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    function(_pointers(operands), y.data_ptr(), y.numel())
    return y


@contextlib.contextmanager
def own_functions() -> Iterator[None]:
    """In f32 arithmetic the interpreter computes with our functions, and adds in the order of contiguous memory."""

    def function(name: str) -> Any:
        return lambda ctx, node, *xs: apply(name, *ctx.align(node, xs))

    def reduction(name: str) -> Any:
        original = OPS[name].torch
        return lambda ctx, node, x: original(ctx, node, x.contiguous())

    records = {name: replace(OPS[name], torch=function(name)) for name in APPROXIMATE}
    records |= {f"reduce_{k}": replace(OPS[f"reduce_{k}"], torch=reduction(f"reduce_{k}")) for k in REDUCE}
    with mock.patch.dict(OPS, records):
        yield


# -- values ----------------------------------------------------------------------------------------------------------


def exact_operand(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small eighths: the sums of their products are exact in f32, in any order."""
    return (torch.randint(-12, 13, shape, generator=generator) / 8).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a tensor (8-bit ones widened to f32), with one pattern for all NaN."""
    x = x.float() if x.element_size() == 1 else x
    one_nan = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return one_nan.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits, the sign of zero included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def disagreement(got: Tensor, want: Tensor) -> str:
    """Where two tensors of equal shape first differ, for an assertion's message."""
    at = tuple((bits(got) != bits(want)).nonzero()[0].tolist())
    return f"at {at}: got {got[at].item()!r}, expected {want[at].item()!r}"
