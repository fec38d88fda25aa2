"""N1, N2, N3: many processes, one cache; and no stale artifact."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from coda.build import DEFAULT_ARCH, _device_identity, _identity, cache
from coda.build.toolchain import Toolchain
from coda.build.units import Unit

LIBRARY = "lib.so"
TOOLS = Toolchain(
    *(Path("/nvcc"), "13.0.88", Path("/g++"), "g++ 12", Path("/include"), Path("/lib"), Path("/cutlass"), "4.2.0")
)


def slow_build(folder: Path) -> None:
    """Half of the file, a pause, the other half: a reader of an unfinished build would see it torn."""
    with (folder / LIBRARY).open("w") as file:
        file.write("half")
        file.flush()
        time.sleep(0.05)
        file.write(" and half")


def build_and_read(root: str) -> tuple[str, bool]:
    """What is read, and whether this process built it."""
    built = []

    def build(folder: Path) -> None:
        slow_build(folder)
        built.append(folder)

    return (cache.obtain("abcd", LIBRARY, build, Path(root)) / LIBRARY).read_text(), bool(built)


def test_n1_eight_processes_on_a_cold_cache(tmp_path: Path) -> None:
    """One builds, the others wait for it."""
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        texts, built = zip(*pool.map(build_and_read, [str(tmp_path)] * 16, chunksize=1), strict=True)
    assert set(texts) == {"half and half"} and sum(built) == 1
    assert cache.is_intact(tmp_path / "ab" / "abcd", LIBRARY)


def test_n1_a_builder_that_dies_holds_nobody_up(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=cache.obtain, args=("abcd", LIBRARY, die, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 3 and build_and_read(str(tmp_path)) == ("half and half", True)


def die(folder: Path) -> None:
    os._exit(3)


def test_n2_loser_of_the_race_uses_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files cannot be locked."""
    monkeypatch.setattr(cache, "locked", lambda path: nullcontext())

    def build(folder: Path) -> None:
        cache.obtain("abcd", LIBRARY, lambda f: (f / LIBRARY).write_text("winner") and None, tmp_path)
        (folder / LIBRARY).write_text("loser")

    mine = cache.obtain("abcd", LIBRARY, build, tmp_path)
    assert (mine / LIBRARY).read_text() == "loser"
    assert (tmp_path / "ab" / "abcd" / LIBRARY).read_text() == "winner"


@pytest.mark.parametrize("change", ["source", "template", "nvcc", "cutlass", "cxx", "arch", "flags", "coda"])
def test_n3_everything_is_in_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str) -> None:
    from dataclasses import replace

    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "bind.h").write_text("// one")
    monkeypatch.setattr("coda.build.templates_dir", lambda: tmp_path)

    def key(text: str = "kernel", tools: Toolchain = TOOLS, arch: str = DEFAULT_ARCH) -> str:
        return cache.content_key(_identity({"kernels.cu": text}, tools, arch))

    before = key()
    assert key() == before
    if change == "template":
        (tmp_path / "host" / "bind.h").write_text("// two")
    elif change == "flags":
        monkeypatch.setattr("coda.build.DEVICE_FLAGS", ("-O2",))
    elif change == "coda":
        monkeypatch.setattr("coda.build.__version__", "99")
    changed = {
        "source": lambda: key("other kernel"),
        "nvcc": lambda: key(tools=replace(TOOLS, nvcc_version="13.1.0")),
        "cutlass": lambda: key(tools=replace(TOOLS, cutlass_version="4.3.0")),
        "cxx": lambda: key(tools=replace(TOOLS, cxx_version="g++ 13")),
        "arch": lambda: key(arch="sm_100a"),
    }.get(change, key)
    assert changed() != before


def test_n3_device_code_depends_on_all_but_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "bind.h").write_text("// one")
    (tmp_path / "store.h").write_text("// one")
    monkeypatch.setattr("coda.build.templates_dir", lambda: tmp_path)

    def key(text: str = "kernel") -> str:
        return cache.content_key(_device_identity(Unit(("kernel",), text), TOOLS, DEFAULT_ARCH))

    before = key()
    (tmp_path / "host" / "bind.h").write_text("// two")
    assert key() == before
    assert key("another") != before
    (tmp_path / "store.h").write_text("// two")
    assert key() != before
