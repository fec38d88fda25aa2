"""Finding the tools and headers an artifact is built with, and saying what to do where one is missing.

Importing this module looks for nothing; ``find()`` does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from importlib import util
from pathlib import Path

from coda.errors import CodaError

CUTLASS_VERSION = "4.2.0"  # the templates are written against its collectives
DEFAULT_CUDA = Path("/usr/local/cuda")
NVCC_MINIMUM = (12, 8)  # cudaLibraryLoadData in the runtime library


@dataclass(frozen=True)
class Toolchain:
    """What builds artifacts, with the versions that go into the cache key."""

    nvcc: Path
    nvcc_version: str
    cxx: Path
    cxx_version: str
    cuda_include: Path
    cuda_lib: Path  # holds libcudart_static.a
    cutlass_include: Path
    cutlass_version: str
    cuobjdump: Path | None = None


def find() -> Toolchain:
    """The toolchain of this machine. Raises CodaError naming what is missing and how to get it."""
    nvcc = find_nvcc()
    root = cuda_root(nvcc)
    cxx = find_cxx()
    cutlass = find_cutlass()
    return Toolchain(
        nvcc=nvcc,
        nvcc_version=nvcc_version(nvcc),
        cxx=cxx,
        cxx_version=_first_line((str(cxx), "--version")),
        cuda_include=_holding(root, ("include", "targets/x86_64-linux/include"), "cuda_runtime_api.h"),
        cuda_lib=_holding(root, ("lib64", "lib", "targets/x86_64-linux/lib"), "libcudart_static.a"),
        cutlass_include=cutlass,
        cutlass_version=cutlass_version(cutlass),
        cuobjdump=_tool(root, "cuobjdump"),
    )


def find_nvcc() -> Path:
    """CODA_NVCC, then CUDA_HOME, PATH, /usr/local/cuda, and the PyPI packages."""
    given = os.environ.get("CODA_NVCC")
    if given:
        return _executable(Path(given), "CODA_NVCC")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    candidates = [Path(home) / "bin/nvcc"] if home else []
    candidates += [Path(on_path)] if on_path else []
    candidates += [DEFAULT_CUDA / "bin/nvcc", *(root / "bin/nvcc" for root in _pypi_cuda())]
    for path in candidates:
        if os.access(path, os.X_OK) and path.is_file():
            return path.resolve()
    raise CodaError.of(
        "nvcc was not found: looked at CODA_NVCC, CUDA_HOME, PATH, /usr/local/cuda and the PyPI packages",
        "pip install 'coda-epilogue[nvcc]', or set CODA_NVCC to the nvcc of a CUDA toolkit",
    )


def find_cxx() -> Path:
    """The host compiler: CXX, else g++ or c++ on PATH."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return Path(found)
    raise CodaError.of("no C++ compiler was found: looked at CXX, g++ and c++", "install g++ 9 or newer, or set CXX")


def find_cutlass() -> Path:
    """The include folder of CUTLASS: that of CODA_CUTLASS, else of the nvidia-cutlass wheel; its version is checked."""
    given = os.environ.get("CODA_CUTLASS")
    if given:
        folders = [Path(given) / "include", Path(given)]
    else:
        spec = util.find_spec("cutlass_library")
        folders = [Path(p) / "source/include" for p in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if (folder / "cutlass/version.h").is_file():
            version = cutlass_version(folder)
            if version == CUTLASS_VERSION:
                return folder
            raise CodaError.of(f"CUTLASS at {folder} is {version}, coda needs {CUTLASS_VERSION}", _CUTLASS_FIX)
    raise CodaError.of(f"the CUTLASS headers were not found{f' in {given}' if given else ''}", _CUTLASS_FIX)


_CUTLASS_FIX = (
    f"pip install nvidia-cutlass=={CUTLASS_VERSION}.0, or set CODA_CUTLASS to a checkout of v{CUTLASS_VERSION}"
)


def cutlass_version(include: Path) -> str:
    text = (include / "cutlass/version.h").read_text()
    parts = [re.search(rf"#define CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(m.group(1) if m else "?" for m in parts)


def cuda_root(nvcc: Path) -> Path:
    """The toolkit an nvcc belongs to. It is asked, since an nvcc on PATH may be a script that calls the real one."""
    match = re.search(r"^#\$ TOP=(.*)$", _dry_run(str(nvcc)), re.MULTILINE)
    return Path(match[1]).resolve() if match else nvcc.parent.parent


@lru_cache
def _dry_run(nvcc: str) -> str:
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stderr


def nvcc_version(nvcc: Path) -> str:
    """Like "13.0.88". Raises CodaError where nvcc does not run or is too old for the artifacts."""
    return _nvcc_version(str(nvcc), nvcc.stat().st_mtime_ns)


@lru_cache
def _nvcc_version(nvcc: str, modified: int) -> str:
    match = re.search(r"V(\d+)\.(\d+)\.(\d+)", _run([nvcc, "--version"]))
    if not match:
        raise CodaError.of(f"{nvcc} --version does not say a version", "set CODA_NVCC to another nvcc")
    if (int(match[1]), int(match[2])) < NVCC_MINIMUM:
        minimum = "{}.{}".format(*NVCC_MINIMUM)
        raise CodaError.of(
            f"{nvcc} is CUDA {match[1]}.{match[2]}; coda needs {minimum} or newer",
            "pip install 'coda-epilogue[nvcc]', or set CODA_NVCC to a newer nvcc",
        )
    return ".".join(match.groups())


@lru_cache
def _first_line(command: tuple[str, ...]) -> str:
    return _run(list(command)).splitlines()[0]


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CodaError.of(f"{command[0]} does not run: {error}") from None


def _executable(path: Path, variable: str) -> Path:
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise CodaError.of(f"{variable} is {path}, which is not an executable file")
    return path.resolve()


def _pypi_cuda() -> list[Path]:
    """Where the nvidia-cuda-* wheels of CUDA 13 put their tools: site-packages/nvidia/cu13."""
    spec = util.find_spec("nvidia")
    return [Path(p) / "cu13" for p in (spec.submodule_search_locations or [])] if spec else []


def _holding(root: Path, folders: tuple[str, ...], file: str) -> Path:
    """The first of the folders under root that has the file: toolkits say lib64, wheels say lib."""
    for folder in folders:
        if (root / folder / file).is_file():
            return root / folder
    raise CodaError.of(
        f"{file} was not found in the CUDA toolkit at {root}",
        "install its runtime development files (on PyPI: nvidia-cuda-runtime)",
    )


def _tool(root: Path, tool: str) -> Path | None:
    """Beside nvcc, on PATH, or from PyPI: a toolkit may come without it."""
    on_path = shutil.which(tool)
    places = [root / "bin" / tool, *([Path(on_path)] if on_path else []), *(p / "bin" / tool for p in _pypi_cuda())]
    return next((path for path in places if os.access(path, os.X_OK)), None)
