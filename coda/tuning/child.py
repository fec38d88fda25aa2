"""The measuring process. A candidate that faults poisons the CUDA context of its process, or hangs. So candidates run
in a child, which sees one GPU only. It says what it is about to run; when it dies over a candidate, that one is dropped
and a new child goes on with the rest (case N5).

The job is a line of JSON on stdin, events are lines of JSON on stdout: ``{"at": NAME}`` before a candidate is touched,
``{"checked": NAME, "reason": why it is dropped, or null}``; in the end ``{"timings": {NAME: ...}, "unfused": how}``.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda.errors import CodaError
from coda.runtime.timing import Measurement, Timer
from coda.tuning.decide import UNFUSED

if TYPE_CHECKING:
    from coda.tuning.measure import Bench

PATIENCE = 120.0  # seconds that a candidate may take to be checked
LONGER = 5  # times that for everything else: the float64 products, Inductor
_GPU = threading.Lock()
TIMING = "timing"  # the name under which all of them run at once
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What to measure: libraries of one program, by the name of their tile, the most promising first."""

    sizes: Mapping[str, int]
    candidates: Mapping[str, str]
    rounds: int
    seconds: float
    passed: Sequence[str] = ()  # need not be checked again
    device: str = "cuda:0"  # of those that the child sees


@dataclass
class Outcome:
    """What came of it. ``dropped`` has the reasons, also for UNFUSED."""

    timings: dict[str, Measurement] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    unfused: str = ""


def measure(job: Job, say: Say, command: Sequence[str] = (), patience: float = PATIENCE) -> Outcome:
    """Check and time the candidates, in as many processes as it takes, but one at a time: threads that tune must not
    disturb each other. Raises CodaError where none is left, or where the process dies while all are timed."""
    with _GPU:
        return _measure(job, say, command, patience)


def _measure(job: Job, say: Say, command: Sequence[str], patience: float) -> Outcome:
    outcome = Outcome()
    passed: list[str] = []
    while not outcome.timings:
        left = {n: path for n, path in job.candidates.items() if n not in outcome.dropped}
        if not left:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in outcome.dropped.items())
            raise CodaError.of(f"no candidate can be used: {reasons}")
        skip = {"without_unfused": UNFUSED in outcome.dropped}
        document = {**asdict(job), "candidates": left, "passed": [n for n in passed if n in left], **skip}
        at, death = _run(document, outcome, passed, say, command, patience)
        if death is None:
            continue
        if at is None or at == TIMING:
            raise CodaError.of(f"the measuring process failed: {death}", "`coda doctor` shows what is found here")
        outcome.dropped[at] = death
        say(f"{at}: dropped, {death}")
    return outcome


def _run(
    document: dict, outcome: Outcome, passed: list[str], say: Say, command: Sequence[str], patience: float
) -> tuple[str | None, str | None]:
    """One child: what it was at in the end, and how it died, if it did."""
    at: str | None = None
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command or [sys.executable, "-m", "coda.tuning.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, env=_environment(),
        )  # fmt: skip
        assert child.stdin and child.stdout
        try:
            child.stdin.write(json.dumps(document) + "\n")
            child.stdin.close()
        except BrokenPipeError:
            pass  # how it died is told below

        def allowed() -> float:
            long = at is None or at in (UNFUSED, TIMING)
            return (LONGER * patience if long else patience) + (document["seconds"] if at == TIMING else 0)

        try:
            for event in _events(child.stdout, allowed):
                if "at" in event:
                    at = event["at"]
                elif "checked" in event:
                    name, reason, at = event["checked"], event["reason"], None
                    if reason is None:
                        passed.append(name)
                    else:
                        outcome.dropped[name] = reason
                        say(f"{name}: dropped, {reason}")
                elif "timings" in event:
                    outcome.timings = {n: Measurement(**_tupled(t)) for n, t in event["timings"].items()}
                    outcome.unfused = event["unfused"]
                    break
            else:  # it closed its output
                code = child.wait(patience)
                all_dropped = not set(document["candidates"]) - set(outcome.dropped)
                return at, None if code == 0 and all_dropped else _death(code, errors)
        except (TimeoutError, subprocess.TimeoutExpired):
            return at, f"it did not end within {allowed():.0f} s"
        finally:  # also when this process is interrupted
            child.kill()
            child.wait()
        return at, None


def _events(stream: Any, allowed: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """The lines of a child as they come. Raises TimeoutError when there is none for too long."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        with stream:  # closed here: a close beside a read would wait for it
            for line in stream:
                lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=allowed())
        except queue.Empty:
            raise TimeoutError from None
        if not line:
            return
        yield json.loads(line)


def _tupled(timing: dict[str, Any]) -> dict[str, Any]:
    return timing | {"ratio_quartiles": tuple(timing["ratio_quartiles"])}


def _death(code: int, errors: Any) -> str:
    errors.seek(0)
    lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    how = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
    return how + (f": {lines[-1][:300]}" if lines else "")


def _environment() -> dict[str, str]:
    """The child finds coda where the parent did, and of the GPUs only the parent's (case N6)."""
    root = str(Path(__file__).resolve().parents[2])
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, before] if before else [root]),
        "CUDA_VISIBLE_DEVICES": _visible(os.environ.get("CUDA_VISIBLE_DEVICES"), _current_device()),
    }


def _visible(visible: str | None, index: int) -> str:
    """The GPU that the parent counts as number ``index``."""
    return str(index) if visible is None else visible.split(",")[index].strip()


def _current_device() -> int:
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else 0


# -- the child -------------------------------------------------------------------------------------------------------


def serve(
    document: dict[str, Any], emit: Callable[[dict[str, Any]], None], load: Callable[[str], Any], bench: Bench,
    timer: Timer,
) -> None:  # fmt: skip
    """Do a job. ``load`` makes an artifact of the path of a library."""
    for name, path in document["candidates"].items():
        emit({"at": name})
        reason = bench.admit(name, load(path), trusted=name in document["passed"])
        if name not in document["passed"]:
            emit({"checked": name, "reason": reason})
    if not bench.ready:
        return
    if not document["without_unfused"]:
        emit({"at": UNFUSED})
        emit({"checked": UNFUSED, "reason": bench.admit_unfused()})
    emit({"at": TIMING})
    timings = bench.time(timer, document["rounds"], document["seconds"])
    how = bench.unfused.how if bench.unfused else ""
    emit({"timings": {name: asdict(timing) for name, timing in timings.items()}, "unfused": how})


def main() -> None:
    import torch

    from coda.build import load
    from coda.runtime.timing import CudaTimer
    from coda.tuning import measure

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the events

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=answers, flush=True)

    document = json.loads(sys.stdin.readline())
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    name, path = next(iter(document["candidates"].items()))
    emit({"at": name})
    program = load(path).program  # all are of one program
    emit({"at": None})
    bench = measure.Bench(program, document["sizes"], torch.device(document["device"]))
    serve(document, emit, load, bench, CudaTimer())


if __name__ == "__main__":
    main()
