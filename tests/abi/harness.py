"""Artifacts without device code, for tests without a GPU.

``host_only`` links the real launcher over a stub cubin; with ``fake=True`` the CUDA runtime is replaced by
``fake_cuda.cpp``, which records what a call would have launched. ``Recorder`` reads that back.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from coda.build import toolchain
from coda.build.compile import LINK_FLAGS, Log, compile_host, embedded, link
from coda.build.describe import Metadata
from coda.build.host import header, host_source
from coda.build.units import units
from coda.errors import CodaError
from coda.frontend import load
from coda.runtime.dlpack import DLTensor
from coda.runtime.library import Artifact
from coda.target import TILES, Plan, Tile, lower, variants
from coda.target import schedule as whole
from coda.target.legality import as_schedule, legal_tile
from coda.target.requirements import View

HERE = Path(__file__).parent

PROGRAMS = """
program plain(x: bf16[M, K], w: bf16[N, K]) {
    return x @ w.T: bf16
}
program bias_scale(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]?, r: f32[M], s: f32 = 2.0) {
    return s * (r * (x @ w.T)) + bias: bf16
}
program stats(o: bf16[M, A], w: bf16[D, A], x: bf16[M, D]) {
    h = cast(x + o @ w.T, bf16)
    return h, sum(h * h, D): f32, partial(sum(h, D)): f32
}
program finished(h: bf16[M, D], stats: partial[sum, D] f32[M], w: bf16[N, D], eps: f32 = 1e-5) {
    return rsqrt(finish(stats) / size(D) + eps) * (h @ w.T): bf16
}
program columns(x: bf16[M, K], w: bf16[N, K]) {
    y = x @ w.T
    return y: bf16, mean(y, M): f32
}
program gated(x: bf16[M, D], wg: bf16[F, D], wu: bf16[F, D]) {
    z = stack(x @ wg.T, x @ wu.T, s)
    return silu(z.s[0]) * z.s[1]: bf16, z: bf16[M, (s F)]
}
program halves(x: bf16[M, D], w: bf16[(s=2 F), D], z0: bf16[M, (s F)]) {
    z = x @ w.T + z0
    return silu(z.s[0]) * z.s[1]: bf16
}
program interleaved(x: bf16[M, D], w: bf16[(F s=2), D]) {
    z = x @ w.T
    return silu(z.s[0]) * z.s[1]: bf16, z: bf16[M, (F s)]
}
program loss(x: bf16[M, D], w: bf16[V, D], label: i64[M], ignore: i64 = -100) {
    z = x @ w.T
    nll = where(label == ignore, 0, logsumexp(z, V) - pick(z, V, label))
    return nll: f32, mean = sum(nll, M) / sum(where(label == ignore, 0, 1), M): f32
}
program tokens(x: bf16[(B T), D], w: bf16[N, D]) {
    return x @ w.T: bf16
}
program dgrad(dy: bf16[M, N], w: bf16[N, K]) {
    return dy @ w: bf16
}
program wgrad(dy: f16[M, N], x: f16[M, K]) {
    return dy.T @ x: f32
}
program accumulated(dy: bf16[M, N], x: bf16[M, K], inout dw: f32[N, K], inout db: f32[K]) {
    g = dy.T @ x
    dw += g
    db += sum(g, N)
}
program batched(x: bf16[B, M, K], wg: bf16[B, N, K], wu: bf16[B, N, K], bias: bf16[B, N]?, r: bf16[B, M, N]) {
    return silu(x @ wg.T + bias) * (x @ wu.T) + r: bf16
}
program views(o: bf16[M, B, K], u: bf16[N, (B K)], r: bf16[M, (B N)]) {
    x: bf16[B, M, K] = o
    w: bf16[B, N, K] = u
    return x @ w.T + r: bf16[(B M), N]
}
program rotated(h: bf16[M, K], wq: bf16[(HQ=3 d=96), K], wv: bf16[(HK=1 d), K], cos: f32[M, f=48], sin: f32[M, f]) {
    return q = rope_half(h @ wq.T, cos, sin): bf16[M, HQ, d], v = h @ wv.T: f32[M, HK, d]
}
program summed(x: bf16[M, K], w: bf16[N, K], h: bf16[M, R], b: bf16[N, R]) {
    return x @ w.T + h @ b.T: bf16
}
"""


@lru_cache(maxsize=1)
def programs() -> dict[str, Any]:
    return load(PROGRAMS).programs


@lru_cache
def plan(name: str) -> Plan:
    return lower(programs()[name])


@lru_cache(maxsize=1)
def tools() -> toolchain.Toolchain:
    """The toolchain, or a skip: the launcher needs the CUDA headers to compile."""
    try:
        return toolchain.find()
    except CodaError as error:
        pytest.skip(str(error))


def tiles(name: str) -> list[Tile]:
    """All tiles that the program above can have."""
    return [tile for tile in TILES if legal_tile(tile, plan(name))]


def host_only(folder: Path, name: str, fake: bool = False) -> Path:
    """``folder/NAME.so`` with the launcher of a program above and no kernels."""
    return host_of(folder, as_schedule(plan(name)), fake)


def host_of(folder: Path, schedule: whole.Schedule, fake: bool = False, tiles: Sequence[Tile] = TILES) -> Path:
    """The same of a schedule, whose GEMMs are at all of these tiles that they can have."""
    folder.mkdir(parents=True, exist_ok=True)
    name = schedule.name
    built = [v for step in schedule.gemms for v in variants(step, [t for t in tiles if legal_tile(t, step)])]
    assembly = whole.Assembly(schedule, tuple(built))
    (folder / "host.cpp").write_text(host_source(name, [assembly], Metadata(cutlass="4.2.0", nvcc="13.0.88")))
    (folder / f"{name}.h").write_text(header(name, [schedule]))
    (folder / "no.cubin").write_bytes(b"no device code")
    cubins = [folder / "no.cubin"] * len(units([assembly]))
    compile_host(folder, tools())
    if not fake:
        link(folder, name, tools(), cubins)
        return folder / f"{name}.so"
    (folder / "cubins.S").write_text(embedded(cubins))
    source = [f"-isystem{tools().cuda_include}", "-std=c++17", "-fPIC", str(HERE / "fake_cuda.cpp")]
    command = [str(tools().cxx), *LINK_FLAGS, *source, "-o", f"{name}.so", "host.o", "cubins.S"]
    Log(folder / "build.log").run(command, folder, "the fake")
    return folder / f"{name}.so"


def run(command: Sequence[str | Path], **options: Any) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True, **options).stdout


# -- what the fake runtime saw ---------------------------------------------------------------------------------------


class Operand(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
        ("lane", ctypes.c_int64),
        ("value", ctypes.c_float),
        ("extent", ctypes.c_int64),
        ("integer", ctypes.c_int64),
    )


class Output(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_uint64),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
        ("lane", ctypes.c_int64),
        ("vector", ctypes.c_int32),
        ("rows_per_batch", ctypes.c_int32),
        ("batch", ctypes.c_int64),
    )


class Schedule(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("clusters_m", "clusters_n", "swizzle", "along_n", "grid_clusters")
    )


def launch_type(maps: int, operands: int, outputs: int, terms: int = 1) -> type[ctypes.Structure]:
    """coda::Launch of templates/launch.h."""
    tensor_map = ctypes.c_uint64 * 16

    class Launch(ctypes.Structure):
        _fields_ = (
            ("a", tensor_map * terms),
            ("b", tensor_map * terms),
            ("tiles", tensor_map * max(maps, 1)),
            ("m", ctypes.c_int32),
            ("n", ctypes.c_int32),
            ("k", ctypes.c_int32 * terms),
            ("swap_lanes", ctypes.c_int32),
            ("schedule", Schedule),
            ("operands", Operand * max(operands, 1)),
            ("outputs", Output * max(outputs, 1)),
        )

    return Launch


def launches_type(members: int, *counts: int) -> type[ctypes.Structure]:
    """coda::Launches of templates/launch.h."""

    class Aligned(launch_type(*counts)):  # type: ignore[misc]  # a CUtensorMap begins at multiples of 128 bytes
        _fields_ = (("padding", ctypes.c_byte * (-ctypes.sizeof(launch_type(*counts)) % 128)),)

    class Launches(ctypes.Structure):
        _fields_ = (("each", Aligned * members), ("first", ctypes.c_int32 * members))

    return Launches


def finish_type(operands: int, outputs: int) -> type[ctypes.Structure]:
    """coda::Finish of templates/launch.h."""

    class Finish(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_int32),
            ("extent", ctypes.c_int64),
            ("operands", Operand * max(operands, 1)),
            ("outputs", Output * max(outputs, 1)),
        )

    return Finish


class Recorder:
    """An artifact over the fake runtime. ``run`` passes tensors off as CUDA memory and returns the calls made."""

    PARAMETERS = 4096  # bytes recorded of each launch; more than any Launch of the programs above

    def __init__(self, path: Path):
        self.artifact = Artifact(path)
        self.library = self.artifact._library
        self.library.fake_log.restype = ctypes.c_char_p
        self.library.fake_parameters.restype = ctypes.c_void_p

    def reset(self, capability: int = 90, capturing: bool = False) -> None:
        self.library.fake_reset(capability, int(capturing), self.PARAMETERS)

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.library.fake_log().decode().splitlines()]

    def run(
        self,
        args: Sequence[Any],
        devices: int | Sequence[int] = 0,
        workspace: int = 1 << 20,
        size: int = 1 << 30,
        stream: int = 0,
    ) -> int:
        """The status of NAME_run with tensors declared to be on these devices (-1: in host memory)."""
        frame = self.artifact._frame(args)
        for i in range(len(args)):
            device = devices if isinstance(devices, int) else devices[i]
            frame.tensors[i].device_type, frame.tensors[i].device_id = (1, 0) if device < 0 else (2, device)
        return self.artifact._functions.run(frame.pointers, len(args), workspace, size, stream)

    def run_views(self, views: Sequence[View | None], call: str = "run") -> int:
        """The status of NAME_run (or "check") with tensors that need not exist, on cuda:0."""
        structs, keep = (DLTensor * len(views))(), []
        pointers = (ctypes.c_void_p * len(views))(*(ctypes.addressof(s) for s in structs))
        for i, (struct, view) in enumerate(zip(structs, views, strict=True)):
            if view is None:
                pointers[i] = None
                continue
            arrays = [(ctypes.c_int64 * max(1, len(a)))(*a) for a in (view.shape, view.strides)]
            keep.append(arrays)
            struct.data, struct.device_type, struct.ndim, struct.lanes = view.address, 2, len(view.shape), 1
            struct.code, struct.bits = view.dtype
            struct.shape, struct.strides = map(ctypes.addressof, arrays)
        functions = self.artifact._functions
        if call == "check":
            return functions.check(pointers, len(views))
        return functions.run(pointers, len(views), 1 << 20, 1 << 40, 0)

    def parameters(self, kind: type[ctypes.Structure], index: int = 0) -> Any:
        """The kernel parameter of a launch."""
        return kind.from_buffer_copy(
            ctypes.string_at(self.library.fake_parameters() + index * self.PARAMETERS, ctypes.sizeof(kind))
        )

    @property
    def error(self) -> str:
        return self.artifact._sentence()


_folder = tempfile.TemporaryDirectory(prefix="coda-abi-")


@lru_cache
def recorder(name: str) -> Recorder:
    """The program over the fake runtime, built once a session."""
    return Recorder(host_only(Path(_folder.name) / "fake" / name, name, fake=True))


@lru_cache
def library(name: str) -> Path:
    """The program with the real runtime and no kernels, built once a session."""
    return host_only(Path(_folder.name) / "real" / name, name)


def torch_include() -> Path:
    """Torch's headers; they include a real dlpack.h."""
    import torch

    return Path(torch.__file__).parent / "include"
