"""N8: candidates that are not used are nothing that a user has to read. M5: how long a build takes is told to those who
ask, and builds do not take more cores than there are."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from coda import build
from coda.build import compile as compiling
from coda.build.compile import SpillError
from coda.cli import main
from coda.resources import templates_dir
from tests.support import RESIDUAL_STATS, program


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compilers that do nothing, and find that the first tile spills."""
    tried: list[str] = []

    def compile_unit(folder: Path, file: str, *_: object) -> None:
        tried.append(file)
        if len(tried) == 1:
            raise SpillError.of(f"{file} spills registers inside its k-loop")
        (folder / "device.cubin").write_bytes(b"code")
        (folder / "build.log").touch()

    monkeypatch.setenv("CODA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "compile_unit", compile_unit)
    monkeypatch.setattr(build, "compile_host", lambda folder, tools: None)
    monkeypatch.setattr(build, "link", lambda folder, name, *_: (folder / f"{name}.so").write_bytes(b"library"))


def test_n8_a_rejected_tile_is_silent(stand_ins: None, capfd: pytest.CaptureFixture[str]) -> None:
    build.library(build.as_schedule(program(RESIDUAL_STATS)), None, None, build.DEFAULT_ARCH)
    assert capfd.readouterr() == ("", "")


def test_n8_who_asks_gets_one_line(stand_ins: None) -> None:
    said: list[str] = []
    build.library(build.as_schedule(program(RESIDUAL_STATS)), None, None, build.DEFAULT_ARCH, said.append)
    (line,) = said
    assert "spills registers" in line and line.endswith("trying the next tile") and "rror" not in line


def test_m5_no_more_compilers_than_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However many builds run at once: those of threads share what there is."""
    cores = len(os.sched_getaffinity(0))
    running, most, lock = 0, 0, threading.Lock()

    def run(self: object, command: object, folder: Path, what: str) -> str:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.02)
        with lock:
            running -= 1
        (folder / compiling.CUBIN).touch()
        return "Compiling entry function 'k' for\nUsed 168 registers"

    monkeypatch.setattr(compiling.Log, "run", run)
    monkeypatch.setattr(compiling, "local_memory_in_mainloop", lambda cubin, tools: None)
    said: list[str] = []

    def one(i: int) -> None:
        folder = tmp_path / str(i)
        folder.mkdir()
        compiling.compile_unit(folder, "k.cu", _NoTools(), "sm_90a", said.append)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4 * cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= cores
    assert (
        sum("registers; " in line and line.endswith(" s") for line in said) == 4 * cores
    )  # each says how long it took


class _NoTools:
    nvcc = cxx = cutlass_include = "none"
    cuobjdump = None


def test_m5_headers_are_narrow() -> None:
    """CUTLASS's umbrella headers, its library and its tensor reductions are not included."""
    included = [line for path in templates_dir().rglob("*.h") for line in path.read_text().splitlines()
                if line.startswith("#include")]  # fmt: skip
    assert not [line for line in included if "cutlass/library" in line or "cutlass/util" in line or "thrust" in line]


def test_m5_a_build_of_several_kernels_is_several_units(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "mlp_block.coda"
    assert main(["lower", str(example), "--no-build", "--json"]) == 0
    assert capsys.readouterr().out.count(".cu") == 3
