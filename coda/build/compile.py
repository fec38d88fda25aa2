"""Sources to ``NAME.so``: nvcc makes the cubins while the host compiler makes the launcher; then one link.

Everything happens inside one folder and all output of the tools is kept there in ``build.log``; a failure is one
line that names the log.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

CORES = len(os.sched_getaffinity(0))
_FREE = threading.BoundedSemaphore(CORES)  # of all builds of a process together
CUBIN = "device.cubin"
_EMBEDDED = """\
    .balign 16
    .globl coda_cubin_{i}
    .hidden coda_cubin_{i}
coda_cubin_{i}:
    .incbin "{path}"
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

    def __str__(self) -> str:
        spills = f", {self.spill_bytes} bytes spilled" if self.spill_bytes else ""
        return f"{self.symbol}: {self.registers} registers{spills}"


class SpillError(CodaError):
    """A variant that is not worth having: registers go to memory between its matrix instructions."""


def compile_unit(folder: Path, file: str, tools: Toolchain, arch: str, say: Progress) -> None:
    """``folder/device.cubin`` from a file of device code in the folder."""
    say(f"compiling {file} for {arch}")
    log = Log(folder / "build.log")
    command = [
        str(tools.nvcc), *DEVICE_FLAGS, *arch_flags(arch), "-ccbin", str(tools.cxx), f"-I{templates_dir()}",
        f"-I{tools.cutlass_include}", "-o", CUBIN, file,
    ]  # fmt: skip
    with _FREE:
        start = time.monotonic()
        output = log.run(command, folder, "the device code")
    seconds = time.monotonic() - start
    fatal = _FATAL.search(output)
    if fatal:
        raise CodaError.of(f"ptxas serialised the tensor cores: {fatal[0]}", f"the log is {log.path}")
    spilling = local_memory_in_mainloop(folder / CUBIN, tools)
    if spilling:
        raise SpillError.of(
            f"kernel '{spilling}' spills registers inside its k-loop", f"choose a smaller tile; {log.path}"
        )
    say("; ".join(map(str, parse_ptxas(output))) + f"; {seconds:.0f} s")


def compile_host(folder: Path, tools: Toolchain) -> None:
    """``folder/host.o`` from ``host.cpp`` and ``NAME.h`` in the folder."""
    includes = (f"-I{templates_dir()}", f"-isystem{tools.cuda_include}")
    command = [str(tools.cxx), *HOST_FLAGS, *includes, "-c", "-o", "host.o", "host.cpp"]
    Log(folder / "build.log").run(command, folder, "the launcher")


def link(folder: Path, name: str, tools: Toolchain, cubins: Sequence[Path]) -> None:
    """``folder/NAME.so`` from ``host.o`` and the cubins, which enter as data only here: the launcher need not wait."""
    (folder / "cubins.S").write_text(embedded(cubins))
    command = [
        str(tools.cxx), *LINK_FLAGS, "-o", f"{name}.so", "host.o", "cubins.S", f"-L{tools.cuda_lib}",
        "-lcudart_static", "-lpthread", "-ldl", "-lrt",
    ]  # fmt: skip
    Log(folder / "build.log").run(command, folder, "the link")


def embedded(cubins: Sequence[Path]) -> str:
    """Assembly that holds the cubins as data."""
    parts = ["# The device code, as data.\n    .section .rodata\n"]
    parts += [_EMBEDDED.format(i=i, path=path) for i, path in enumerate(cubins)]
    return "".join(parts) + '    .section .note.GNU-stack, "", @progbits\n'


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


def local_memory_in_mainloop(cubin: Path, tools: Toolchain) -> str | None:
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


class Log:
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
