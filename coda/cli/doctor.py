"""coda doctor: show what coda finds on this machine, and what to do about what is missing.

Exit code 0 when kernels can be built here, 1 when something needed for that is missing. A missing GPU is no fault:
kernels are built without one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coda.build import toolchain
from coda.cli.common import add_json, print_json
from coda.errors import CodaError
from coda.resources import grammar_file, templates_dir
from coda.version import __version__


@dataclass(frozen=True)
class Finding:
    """One thing looked for. ``required``: for building kernels. ``fix``: what to do where it is missing."""

    name: str
    ok: bool
    found: str
    fix: str | None = None
    required: bool = True

    def __str__(self) -> str:
        mark = "ok" if self.ok else "MISSING" if self.required else "none"
        return f"{mark:8s} {self.name:14s} {self.found}" + (f"\n{'':23s} fix: {self.fix}" if self.fix else "")


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    findings = list(examine())
    ok = all(f.ok for f in findings if f.required)
    if args.json:
        print_json({"ok": ok, "findings": [asdict(f) for f in findings]})
    else:
        print(*findings, sep="\n")
        print("kernels can be built here" if ok else "kernels cannot be built here; the reference interpreter works")
    return 0 if ok else 1


def examine() -> Iterator[Finding]:
    """Everything there is to know, in the order in which one would mend it."""
    yield Finding("coda", True, f"{__version__}, Python {sys.version.split()[0]}")
    yield _look("grammar", lambda: str(grammar_file()))
    yield _look("templates", lambda: str(templates_dir()))
    yield _look("nvcc", _nvcc)
    yield _look("cuda runtime", _cuda_runtime)
    yield _look("host compiler", _host_compiler)
    yield _look("cutlass", _cutlass)
    yield from _torch_and_gpu()


def _look(name: str, find: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, find())
    except CodaError as error:
        diagnostic = error.diagnostics[0]
        return Finding(name, False, diagnostic.message, diagnostic.hint)


def _nvcc() -> str:
    nvcc = toolchain.find_nvcc()
    return f"{toolchain.nvcc_version(nvcc)} at {nvcc}"


def _cuda_runtime() -> str:
    tools = toolchain.find()
    return f"headers in {tools.cuda_include}, library in {tools.cuda_lib}"


def _host_compiler() -> str:
    return str(toolchain.find_cxx())


def _cutlass() -> str:
    include = toolchain.find_cutlass()
    return f"{toolchain.cutlass_version(include)} at {include}"


def _torch_and_gpu() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", False, f"cannot be imported: {error}", "pip install torch", required=False)
        return
    yield Finding("torch", True, f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}", required=False)
    yield _driver()
    yield _gpu(torch.cuda)


def _driver() -> Finding:
    version = Path("/proc/driver/nvidia/version")
    if not version.exists():
        return Finding("driver", False, "no NVIDIA driver is loaded; kernels can be built but not run", required=False)
    return Finding("driver", True, version.read_text().splitlines()[0], required=False)


def _gpu(cuda: Any) -> Finding:
    if not cuda.is_available():
        fix = "install a torch built with CUDA" if Path("/dev/nvidia0").exists() else None
        return Finding("gpu", False, "torch sees none; programs run in the reference interpreter", fix, required=False)
    major, minor = cuda.get_device_capability()
    name = f"{cuda.get_device_name()}, sm_{major}{minor}"
    if (major, minor) != (9, 0):
        fix = "kernels are for sm_90a: H100, H200, H20"
        return Finding("gpu", False, f"{name} cannot run them", fix, required=False)
    return Finding("gpu", True, name, required=False)
