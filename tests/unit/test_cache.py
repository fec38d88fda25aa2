"""The build cache: one key, one folder, published whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from coda.build import cache

LIBRARY = "lib.so"


def write(text: str):
    def build(folder: Path) -> None:
        (folder / LIBRARY).write_text(text)

    return build


def never(folder: Path) -> None:
    raise AssertionError("built again")


def test_second_call_finds_the_first(tmp_path: Path) -> None:
    entry = cache.obtain("abcd", LIBRARY, write("one"), tmp_path)
    assert entry == tmp_path / "ab" / "abcd"
    assert cache.obtain("abcd", LIBRARY, never, tmp_path) == entry


def test_parts_of_a_key_cannot_run_together() -> None:
    assert cache.content_key({"a": "bc", "d": ""}) != cache.content_key({"a": "b", "cd": ""})
    assert cache.content_key({"a": "1", "b": "2"}) == cache.content_key({"b": "2", "a": "1"})


@pytest.mark.parametrize("damage", ["torn", "missing", "record"])
def test_damaged_entry_is_rebuilt(tmp_path: Path, damage: str) -> None:
    entry = cache.obtain("abcd", LIBRARY, write("one"), tmp_path)
    if damage == "torn":
        (entry / LIBRARY).write_text("on")
    elif damage == "missing":
        (entry / LIBRARY).unlink()
    else:
        (entry / "entry.json").write_text("{")
    again = cache.obtain("abcd", LIBRARY, write("two"), tmp_path)
    assert again == entry
    assert (entry / LIBRARY).read_text() == "two"
    assert [p.name for p in entry.parent.iterdir()] == [entry.name]


def test_failed_build_leaves_no_entry_but_its_log(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "build.log").write_text("why")
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            cache.obtain("abcd", LIBRARY, fail, tmp_path)
    assert not (tmp_path / "ab" / "abcd").exists()
    (kept,) = (tmp_path / "ab").iterdir()  # of the last failure only
    assert (kept / "build.log").read_text() == "why"


def test_cache_that_cannot_be_written_builds_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    entry = cache.obtain("abcd", LIBRARY, write("one"), tmp_path / "file" / "cache")
    assert (entry / LIBRARY).read_text() == "one"


def test_root_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_CACHE", "/somewhere")
    assert cache.cache_root() == Path("/somewhere")
    monkeypatch.delenv("CODA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_root() == Path("/xdg/coda")


def test_record_holds_the_hash(tmp_path: Path) -> None:
    entry = cache.obtain("abcd", LIBRARY, write("one"), tmp_path)
    assert json.loads((entry / "entry.json").read_text())["library"] == LIBRARY
    assert os.stat(entry).st_mode & 0o777 == 0o755
