"""Sources to ``NAME.so``: nvcc makes the cubin while the host compiler makes the launcher; then one link.

Everything happens inside one folder and all output of the tools is kept there in ``build.log``; a failure is one
line that names the log.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from coda.build.toolchain import Toolchain
from coda.errors import CodaError
from coda.resources import templates_dir

Progress = Callable[[str], None]

# -DNDEBUG: device asserts serialise wgmma. Warnings in _FATAL say that ptxas did so for another reason.
DEVICE_FLAGS = ("-cubin", "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xptxas", "-v")
HOST_FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-exceptions", "-fno-rtti",
    "-fno-threadsafe-statics", "-Wall", "-Wextra", "-Wno-missing-field-initializers",
)  # fmt: skip
LINK_FLAGS = (
    "-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-Wl,--as-needed", "-Wl,-z,noexecstack",
    "-Wl,--no-undefined",
)  # fmt: skip
_FATAL = re.compile(r"\((C7504|C7508|C7510)\)[^\n]*")

CUBIN_ASSEMBLY = """\
# The device code, as data.
    .section .rodata
    .balign 16
    .globl coda_cubin
    .hidden coda_cubin
coda_cubin:
    .incbin "device.cubin"
    .section .note.GNU-stack, "", @progbits
"""


def arch_flags(arch: str) -> tuple[str, ...]:
    """sm_90a -> its own gencode. This is the only place a target is named (case M1)."""
    return (f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}",)


@dataclass(frozen=True)
class KernelReport:
    """What ptxas says of one kernel."""

    symbol: str
    registers: int
    spill_bytes: int


@dataclass
class BuildReport:
    kernels: list[KernelReport] = field(default_factory=list)
    device_seconds: float = 0.0
    host_seconds: float = 0.0

    @property
    def summary(self) -> str:
        kernels = ", ".join(
            f"{k.symbol}: {k.registers} registers" + (f", {k.spill_bytes} bytes spilled" if k.spill_bytes else "")
            for k in self.kernels
        )
        return f"{kernels}; device {self.device_seconds:.0f} s, host {self.host_seconds:.0f} s"


def compile_artifact(
    folder: Path, name: str, tools: Toolchain, arch: str, progress: Progress | None = None
) -> BuildReport:
    """Build ``folder/NAME.so`` from ``kernels.cu``, ``host.cpp`` and ``NAME.h`` in the folder."""
    say = progress or (lambda message: None)
    report = BuildReport()
    log = _Log(folder / "build.log")
    say(f"compiling {name} for {arch}")
    with ThreadPoolExecutor(2) as pool:
        device = pool.submit(compile_device, folder, tools, arch, log, report)
        host = pool.submit(compile_host, folder, tools, log, report)
        host.result()
        device.result()
    link(folder, name, tools, log)
    say(report.summary)
    return report


class SpillError(CodaError):
    """A variant that is not worth having: registers go to memory between its matrix instructions."""


def compile_device(folder: Path, tools: Toolchain, arch: str, log: _Log, report: BuildReport) -> None:
    command = [
        str(tools.nvcc), *DEVICE_FLAGS, *arch_flags(arch), "-ccbin", str(tools.cxx), f"-I{templates_dir()}",
        f"-I{tools.cutlass_include}", "-o", "device.cubin", "kernels.cu",
    ]  # fmt: skip
    start = time.monotonic()
    output = log.run(command, folder, "the device code")
    report.device_seconds = time.monotonic() - start
    fatal = _FATAL.search(output)
    if fatal:
        raise CodaError.of(f"ptxas serialised the tensor cores: {fatal[0]}", f"the log is {log.path}")
    report.kernels = parse_ptxas(output)
    spilling = local_memory_in_mainloop(folder / "device.cubin", tools, log)
    if spilling:
        raise SpillError.of(
            f"kernel '{spilling}' spills registers inside its k-loop", f"choose a smaller tile; {log.path}"
        )


def compile_host(folder: Path, tools: Toolchain, log: _Log, report: BuildReport) -> None:
    includes = (f"-I{templates_dir()}", f"-isystem{tools.cuda_include}")
    command = [str(tools.cxx), *HOST_FLAGS, *includes, "-c", "-o", "host.o", "host.cpp"]
    start = time.monotonic()
    log.run(command, folder, "the launcher")
    report.host_seconds = time.monotonic() - start


def link(folder: Path, name: str, tools: Toolchain, log: _Log) -> None:
    """The cubin enters as data here, so that the launcher need not wait for it to be compiled."""
    (folder / "cubin.S").write_text(CUBIN_ASSEMBLY)
    command = [
        str(tools.cxx), *LINK_FLAGS, "-o", f"{name}.so", "host.o", "cubin.S", f"-L{tools.cuda_lib}", "-lcudart_static",
        "-lpthread", "-ldl", "-lrt",
    ]  # fmt: skip
    log.run(command, folder, "the link")


def parse_ptxas(output: str) -> list[KernelReport]:
    """The kernels that ``-Xptxas -v`` reported."""
    kernels = []
    for block in re.split(r"Compiling entry function '", output)[1:]:
        registers = re.search(r"Used (\d+) registers", block)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", block)
        kernels.append(
            KernelReport(
                symbol=block.split("'", 1)[0],
                registers=int(registers[1]) if registers else 0,
                spill_bytes=int(spills[1]) + int(spills[2]) if spills else 0,
            )
        )
    return kernels


def local_memory_in_mainloop(cubin: Path, tools: Toolchain, log: _Log) -> str | None:
    """The first kernel with a load or store of local memory between two wgmma instructions; None where there is none
    or no cuobjdump to look with."""
    if tools.cuobjdump is None:
        return None
    sass = subprocess.run(
        [str(tools.cuobjdump), "-sass", str(cubin)], capture_output=True, text=True, check=False
    ).stdout
    return find_local_memory(sass)


def find_local_memory(sass: str) -> str | None:
    for block in re.split(r"Function : ", sass)[1:]:
        first, last = block.find("HGMMA"), block.rfind("HGMMA")
        if first >= 0 and re.search(r"\b(LDL|STL)\b", block[first:last]):
            return block.split(None, 1)[0]
    return None


class _Log:
    """All commands and their output, in one file."""

    def __init__(self, path: Path):
        self.path = path

    def run(self, command: list[str], folder: Path, what: str) -> str:
        result = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        with self.path.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{result.stdout}\n")
        if result.returncode:
            first = next((line for line in result.stdout.splitlines() if "error" in line.lower()), "no message")
            raise CodaError.of(f"{what} does not compile: {first.strip()[:300]}", f"the whole log is {self.path}")
        return result.stdout
