"""Finding the toolchain, and what is said where a part of it is missing (case M2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda.build import toolchain
from coda.errors import CodaError


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def nvcc_saying(path: Path, version: str) -> Path:
    return script(path, f'echo "Cuda compilation tools, release {version.rpartition(".")[0]}, V{version}"')


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without any CUDA."""
    for variable in ("CODA_NVCC", "CUDA_HOME", "CUDA_PATH", "CODA_CUTLASS", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(toolchain, "_pypi_cuda", list)
    monkeypatch.setattr(toolchain, "DEFAULT_CUDA", Path("/nowhere"))
    return monkeypatch


def test_missing_nvcc_says_where_it_was_looked_for(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(CodaError, match=r"nvcc was not found.*\n.*pip install 'coda-epilogue\[nvcc\]'"):
        toolchain.find_nvcc()


def test_given_nvcc_must_be_there(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("CODA_NVCC", "/not/there/nvcc")
    with pytest.raises(CodaError, match="CODA_NVCC is /not/there/nvcc, which is not an executable file"):
        toolchain.find_nvcc()


def test_order_of_candidates(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given, home, path, pypi = (
        nvcc_saying(tmp_path / n / "bin/nvcc", "13.0.88") for n in ("given", "home", "path", "pypi")
    )
    bare.setattr(toolchain, "_pypi_cuda", lambda: [pypi.parent.parent])
    assert toolchain.find_nvcc() == pypi
    bare.setenv("PATH", str(path.parent))
    assert toolchain.find_nvcc() == path
    bare.setenv("CUDA_HOME", str(home.parent.parent))
    assert toolchain.find_nvcc() == home
    bare.setenv("CODA_NVCC", str(given))
    assert toolchain.find_nvcc() == given


def test_cuobjdump_may_come_from_elsewhere(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside, path, pypi = (script(tmp_path / n / "bin/cuobjdump", "") for n in ("beside", "path", "pypi"))
    assert toolchain._tool(tmp_path / "toolkit", "cuobjdump") is None
    bare.setattr(toolchain, "_pypi_cuda", lambda: [pypi.parent.parent])
    assert toolchain._tool(tmp_path / "toolkit", "cuobjdump") == pypi
    bare.setenv("PATH", str(path.parent))
    assert toolchain._tool(tmp_path / "toolkit", "cuobjdump") == path
    assert toolchain._tool(beside.parent.parent, "cuobjdump") == beside


def test_old_nvcc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CodaError, match=r"is CUDA 11\.8; coda needs 12\.8 or newer"):
        toolchain.nvcc_version(nvcc_saying(tmp_path / "nvcc", "11.8.89"))
    assert toolchain.nvcc_version(nvcc_saying(tmp_path / "new", "13.0.88")) == "13.0.88"


def test_nvcc_may_be_a_script_that_calls_another(tmp_path: Path) -> None:
    wrapper = script(tmp_path / "bin/nvcc", 'echo "#\\$ TOP=/opt/cuda/bin/.." >&2')
    assert toolchain.cuda_root(wrapper) == Path("/opt/cuda")


def test_libraries_of_wheels_are_in_lib(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(CodaError, match=r"libcudart_static\.a was not found in the CUDA toolkit"):
        toolchain._holding(tmp_path, ("lib64", "lib"), "libcudart_static.a")
    (tmp_path / "lib/libcudart_static.a").touch()
    assert toolchain._holding(tmp_path, ("lib64", "lib"), "libcudart_static.a") == tmp_path / "lib"


def test_other_cutlass_is_refused(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Case C9: generated code and library belong together."""
    (tmp_path / "include/cutlass").mkdir(parents=True)
    numbers = "".join(f"#define CUTLASS_{p} {v}\n" for p, v in (("MAJOR", 3), ("MINOR", 9), ("PATCH", 1)))
    (tmp_path / "include/cutlass/version.h").write_text(numbers)
    bare.setenv("CODA_CUTLASS", str(tmp_path))
    with pytest.raises(CodaError, match=r"is 3\.9\.1, coda needs 4\.2\.0"):
        toolchain.find_cutlass()
    bare.setenv("CODA_CUTLASS", str(tmp_path / "other"))
    with pytest.raises(CodaError, match="CUTLASS headers were not found in"):
        toolchain.find_cutlass()


def test_missing_host_compiler(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(CodaError, match=r"no C\+\+ compiler was found"):
        toolchain.find_cxx()
