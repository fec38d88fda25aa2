"""Choices on disk, and the decision behind them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from coda.build import lowered
from coda.runtime.device import Device, driver_version
from coda.tuning import choice as choices
from coda.tuning.decide import NOISE, UNFUSED, decide
from tests.support import program
from tests.tuning.support import LINEAR, choice, measurement

H200 = Device("NVIDIA H200", "580.159.04")
SIZES = {"M": 8192, "N": 4096, "K": 4096}


def key(text: str = LINEAR, sizes: dict[str, int] = SIZES, device: Device = H200) -> str:
    return choices.key(lowered(program(text)), sizes, device)


# The decision.


def test_the_fastest_candidate_is_chosen() -> None:
    measured = {"a": measurement(0.95), "b": measurement(0.9), UNFUSED: measurement(1.0)}
    assert (decide(measured).candidate, decide(measured).declined) == ("b", False)


def test_within_the_noise_the_expected_one_is_chosen() -> None:
    assert decide({"a": measurement(0.9 * (1 + 0.9 * NOISE)), "b": measurement(0.9)}).candidate == "a"
    assert decide({"a": measurement(0.9 * (1 + 1.1 * NOISE)), "b": measurement(0.9)}).candidate == "b"


@pytest.mark.parametrize(("ratio", "declined"), [(0.999, False), (1.0, True), (1.2, True)])
def test_g3_a_fusion_that_does_not_win_is_declined(ratio: float, declined: bool) -> None:
    assert decide({"a": measurement(ratio), UNFUSED: measurement(1.0)}).declined is declined


def test_nothing_is_declined_in_favour_of_nothing() -> None:
    assert not decide({"a": measurement(1.0), "b": measurement(1.3)}).declined
    with pytest.raises(ValueError, match="nothing to choose from"):
        decide({UNFUSED: measurement(1.0)})


def test_the_reason_has_both_times() -> None:
    assert choice().reason is None
    reason = choice(declined=True, fused_ms=0.625, unfused_ms=0.5).reason
    assert reason == ("measured at M=8192, fused kernels take 0.625 ms, torch.compile with separate kernels 0.5 ms")


# Keys.


@pytest.mark.parametrize(
    ("size", "counts_as"),
    [(1, 1), (7, 7), (17, 18), (4096, 4096), (6144, 6144), (28672, 28672), (11008, 11264), (8000, 8192), (8193, 9216)],
)
def test_sizes_count_in_eighths(size: int, counts_as: int) -> None:
    assert choices.bucket(size) == counts_as
    assert choices.bucket(counts_as) == counts_as


def test_n3_n4_what_a_choice_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another GPU, driver, version, program or size is another choice; another name of the program is not."""
    before = key()
    assert key(LINEAR.replace("linear", "another")) == before
    assert key(sizes=SIZES | {"M": 8000}) == before
    different = [
        key(LINEAR.replace("x @ w.T", "2 * (x @ w.T)")),
        key(sizes=SIZES | {"M": 4096}),
        key(device=replace(H200, name="NVIDIA H100 80GB HBM3")),
        key(device=replace(H200, driver="590.1")),
    ]
    monkeypatch.setattr(choices, "__version__", "99")
    different.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(choices, "_templates", lambda: "edited")
    different.append(key())
    assert len({before, *different}) == 1 + len(different)


def test_driver_version(tmp_path: Path) -> None:
    assert driver_version(tmp_path / "nothing") == ""
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\nGCC 12.3\n"
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == "580.159.04"


# The files.


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert choices.read(key(), tmp_path) is None
    assert choices.write(key(), choice(), tmp_path)
    assert choices.read(key(), tmp_path) == choice()
    assert [p.name for p in (tmp_path / "tuned").iterdir()] == [f"{key()}.json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"format": 1}', "format", "field", "type", "timings"])
def test_a_damaged_file_is_no_choice(tmp_path: Path, damage: str) -> None:
    choices.write(key(), choice(), tmp_path)
    path = tmp_path / "tuned" / f"{key()}.json"
    document = json.loads(path.read_text())
    if damage == "format":
        document["format"] = 0
    elif damage == "field":
        document["new"] = 1
    elif damage == "type":
        document["declined"] = "no"
    elif damage == "timings":
        document["timings"] = {"128x128": 3}
    path.write_text(json.dumps(document) if damage.isalpha() and damage != "null" else damage)
    assert choices.read(key(), tmp_path) is None


def test_n4_a_tile_that_is_not_offered_or_legal_any_more_is_no_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODA_CACHE", str(tmp_path))
    (plan,) = lowered(program(LINEAR)).gemms
    for tile, found in (("128x160_s4", "128x160_s4"), ("128x512", None), (None, None)):
        choices.write(key(), choice(tile=tile))
        chosen = choices.tile_for(plan, SIZES, H200)
        assert (chosen.name if chosen else None) == found
    heads = """program linear(x: bf16[M, K], w: bf16[(N d=128), K]) {
        z = x @ w.T
        return z * rsqrt(mean(z * z, d)): bf16
    }"""
    (plan,) = lowered(program(heads)).gemms
    choices.write(key(heads), choice(tile="128x160"))  # which holds no whole heads
    assert choices.tile_for(plan, SIZES, H200) is None


def test_a_cache_that_cannot_be_written_is_remembered_by_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_UNSAVED", {})
    (tmp_path / "file").write_text("")
    assert not choices.write(key(), choice(), tmp_path / "file")
    assert choices.read(key(), tmp_path / "file") == choice()
    with choices.lock(key(), tmp_path / "file"):  # nothing to lock is no fault
        pass


def write_and_read(root: str, number: int) -> bool:
    """Whether everything read while others write is one of the choices written, whole."""
    for _ in range(20):
        choices.write("key", choice(rounds=number, dropped={str(i): "x" * 200 for i in range(50)}), Path(root))
        found = choices.read("key", Path(root))
        if found is None or len(found.dropped) != 50 or not 0 <= found.rounds < 4:
            return False
    return True


def test_n1_concurrent_writers(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:  # whose renames race like those of processes
        assert all(pool.map(write_and_read, [str(tmp_path)] * 4, range(4)))
    assert [p.suffix for p in (tmp_path / "tuned").iterdir()] == [".json"]


def test_n6_one_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []
    inside = threading.Event()

    def other() -> None:
        with choices.lock("key", tmp_path):
            order.append("second")

    thread = threading.Thread(target=other)
    with choices.lock("key", tmp_path):
        thread.start()
        inside.wait(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
