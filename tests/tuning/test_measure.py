"""Checking and timing candidates, and what becomes of those that are wrong, crash or hang. The kernels are stand-ins,
which compute with the interpreter."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch

from coda.errors import CodaError
from coda.tuning.child import TIMING, Job, _visible, measure, serve
from coda.tuning.decide import UNFUSED
from coda.tuning.measure import Bench
from tests.support import PredicateArtifact, program
from tests.tuning.support import CPU, LINEAR, SIZES, Broken, Clock

INOUT = "program wgrad(dy: bf16[M, N], x: bf16[M, K], inout dw: f32[N, K]) { dw += dy.T @ x }"


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(program(LINEAR), SIZES, CPU)


def test_a_good_kernel_is_admitted(bench: Bench) -> None:
    assert bench.admit("good", PredicateArtifact(bench.program)) is None
    assert bench.admit_unfused() is None
    assert {"good", UNFUSED} <= set(bench.ready)


def wrong(args, run):
    args[-1][3, 5] += 1


def unwritten(args, run):
    args[-1][0, 0] = float("nan")


def racing(args, run):
    args[-1][0, 0] *= 1 + 2**-7 * run


def greedy(args, run):
    args[0][1, 1] = 7.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (wrong, "its results are wrong: 'out' has error"),
        (unwritten, "its results are wrong: 'out' has error"),
        (racing, "it gives other bits in each run"),
        (greedy, "it changes its operand 'x'"),
    ],
)
def test_b7_a_kernel_with_a_fault_is_not(fault, reason: str) -> None:
    bench = Bench(program(LINEAR), SIZES, CPU)
    found = bench.admit("bad", Broken(bench.program, fault))
    assert found is not None and found.startswith(reason), found
    assert "bad" not in bench.ready


def test_a_refusal_is_a_reason(bench: Bench) -> None:
    class Refusing(PredicateArtifact):
        def check(self, args):
            return "operand 'x' is not to its taste"

    assert bench.admit("refusing", Refusing(bench.program)) == "operand 'x' is not to its taste"


def test_operands_that_are_accumulated_into_start_anew_in_each_check() -> None:
    p = program(INOUT)
    bench = Bench(p, SIZES, CPU)

    class Accumulating(PredicateArtifact):
        def run(self, args, workspace, stream):
            args[2] += args[0].float().T @ args[1].float()

    before = bench.sets[0]["dw"].clone()
    assert bench.admit("accumulating", Accumulating(p)) is None
    assert bench.admit_unfused() is None
    assert torch.equal(bench.sets[0]["dw"], before)
    bench.ready[UNFUSED]()  # which is timed with what a call does with its result
    assert not torch.equal(bench.sets[0]["dw"], before)


def test_whatever_keeps_the_unfused_way_from_running_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ImportError("no cuBLAS")

    bench = Bench(program(LINEAR), SIZES, CPU)
    monkeypatch.setattr("coda.tuning.measure.Unfused.__call__", broken)
    assert bench.admit_unfused() == "it cannot be run: ImportError: no cuBLAS"
    assert bench.unfused is None


def served(job: Job, artifacts: dict, times: list[float], **more: object) -> list[dict]:
    events: list[dict] = []
    document = {"candidates": job.candidates, "rounds": 5, "seconds": 0, "passed": [], "without_unfused": False} | more
    serve(document, events.append, artifacts.__getitem__, Bench(program(LINEAR), SIZES, CPU), Clock(times))
    return events


def test_a_job_is_served_candidate_by_candidate_and_then_timed() -> None:
    p = program(LINEAR)
    artifacts = {"a.so": PredicateArtifact(p), "b.so": Broken(p, wrong), "c.so": PredicateArtifact(p)}
    job = Job(SIZES, {"a": "a.so", "b": "b.so", "c": "c.so"}, 5, 0)
    *events, last = served(job, artifacts, [2.0, 1.0, 4.0])
    assert [e.get("at") or e["checked"] for e in events] == ["a", "a", "b", "b", "c", "c", UNFUSED, UNFUSED, TIMING]
    assert [e["checked"] for e in events if e.get("reason")] == ["b"]
    assert {n: t["ratio"] for n, t in last["timings"].items()} == {"a": 0.5, "c": 0.25, UNFUSED: 1.0}
    assert last["unfused"] == "eager torch"
    json.dumps(last)


def test_without_the_unfused_way_ratios_are_to_the_first_candidate() -> None:
    artifacts = {"a.so": PredicateArtifact(program(LINEAR)), "c.so": PredicateArtifact(program(LINEAR))}
    job = Job(SIZES, {"a": "a.so", "c": "c.so"}, 5, 0)
    events = served(job, artifacts, [2.0, 1.0], without_unfused=True, passed=["a"])
    assert [e["checked"] for e in events if "checked" in e] == ["c"]
    assert {n: t["ratio"] for n, t in events[-1]["timings"].items()} == {"a": 1.0, "c": 0.5}


# The process. These children are scripts that do as they are told, instead of running kernels.

CHILD = textwrap.dedent("""
    import json, os, signal, sys, time
    job = json.loads(sys.stdin.readline())
    def emit(**event): print(json.dumps(event), flush=True)
    names = [*job["candidates"], *([] if job["without_unfused"] else ["unfused"])]
    for name in names:
        emit(at=name)
        if name in job["passed"]: continue
        deed = job["candidates"].get(name, FAULTS.get(name))
        if deed == "crash": os.kill(os.getpid(), signal.SIGSEGV)
        if deed == "raise": raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if deed == "hang": time.sleep(60)
        emit(checked=name, reason="wrong" if deed == "wrong" else None)
    names = [n for n in names if job["candidates"].get(n) != "wrong"]
    if names != ["unfused"]:
        emit(at="timing")
        if "timing" in FAULTS: raise RuntimeError("unspecified launch failure")
        timing = dict(median_ms=1.0, ratio=1.0, ratio_quartiles=[1.0, 1.0], rounds=5)
        emit(timings={name: timing for name in names}, unfused="eager torch")
""")


def run(deeds: dict[str, str], patience: float = 30.0, **faults: str):
    said: list[str] = []
    command = [sys.executable, "-c", f"FAULTS = {faults!r}\n{CHILD}"]
    return measure(Job(SIZES, deeds, 5, 1.0), said.append, command, patience), said


def test_n5_a_candidate_that_kills_its_process_is_dropped_and_the_others_go_on() -> None:
    deeds = {"a": "", "b": "crash", "c": "raise", "d": "wrong", "e": ""}
    outcome, said = run(deeds)
    assert set(outcome.timings) == {"a", "e", UNFUSED}
    assert outcome.dropped["b"] == "its process was ended by signal 11"
    assert outcome.dropped["c"] == (
        "its process ended with exit code 1: RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert outcome.dropped["d"] == "wrong"
    assert said[0] == "b: dropped, its process was ended by signal 11"


def test_a_candidate_that_hangs_is_dropped() -> None:
    outcome, _ = run({"a": "hang", "b": ""}, patience=1.0)
    assert outcome.dropped == {"a": "it did not end within 1 s"}
    assert "b" in outcome.timings


def test_an_unfused_way_that_crashes_is_left_out() -> None:
    outcome, _ = run({"a": ""}, unfused="crash")
    assert set(outcome.timings) == {"a"}
    assert outcome.dropped == {UNFUSED: "its process was ended by signal 11"}


def test_where_none_is_left_or_timing_fails_there_is_an_error() -> None:
    with pytest.raises(CodaError, match="no candidate can be used: a: its process was ended by signal 11; b: wrong"):
        run({"a": "crash", "b": "wrong"})
    with pytest.raises(CodaError, match=r"the measuring process failed: .* unspecified launch failure"):
        run({"a": ""}, timing="raise")


@pytest.mark.parametrize(
    ("visible", "index", "device"), [(None, 0, "0"), (None, 3, "3"), ("4,5", 1, "5"), ("GPU-a, GPU-b", 1, "GPU-b")]
)
def test_n6_the_child_sees_its_parents_gpu_only(visible: str | None, index: int, device: str) -> None:
    assert _visible(visible, index) == device


def test_the_real_child_loads_libraries_and_asks_them(tmp_path) -> None:
    """With the launcher of an artifact and no device code: it refuses operands in host memory."""
    from tests.abi import harness

    library = harness.host_only(tmp_path, "plain")
    with pytest.raises(CodaError, match=r"no candidate can be used: 128x128: plain: 'x' is in host memory"):
        measure(Job({"M": 48, "N": 64, "K": 32}, {"128x128": str(library)}, 5, 1.0, device="cpu"), print)


def test_a_library_that_cannot_be_loaded_is_dropped(tmp_path) -> None:
    (tmp_path / "a.so").write_text("not a library")
    with pytest.raises(CodaError, match=r"no candidate can be used: a: .*not a library that can be loaded"):
        measure(Job(SIZES, {"a": str(tmp_path / "a.so")}, 5, 1.0, device="cpu"), print)
