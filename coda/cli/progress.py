"""Progress of a long build on stderr: a line that counts seconds on a terminal, else a line at start and end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CLEAR_LINE = "\r\x1b[K"


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show that ``what`` is under way while the body runs. Yields a function that shows a message beside it."""
    start, done = time.monotonic(), threading.Event()
    terminal = sys.stderr.isatty()
    clear = CLEAR_LINE if terminal else ""

    def say(message: str) -> None:
        print(f"{clear}{message}", file=sys.stderr, flush=True)

    def count() -> None:
        while not done.wait(1.0):
            print(f"{clear}{what} ... {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)

    counter = threading.Thread(target=count, daemon=True)
    if terminal:
        counter.start()
    else:
        say(f"{what} ...")
    outcome = "failed after"
    try:
        yield say
        outcome = "done in"
    finally:
        done.set()
        if terminal:
            counter.join()
        say(f"{what}: {outcome} {time.monotonic() - start:.1f} s")
