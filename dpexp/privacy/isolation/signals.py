"""Signals wait while a step is under way."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


@contextmanager
def signals_wait() -> Iterator[None]:
    """Meanwhile no handler of Python's is called; then those are whose signals came.

    A handler may save a checkpoint, in which nothing must be that a step is about to leave behind; or set what would be
    taken for the step's and set back, such as `trainer.should_stop`. Ctrl-C does not wait: it ends the step, and all is
    set back on the way out.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    waiting = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in waiting:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in waiting.items():
            signal.signal(number, handler)
        for number in came:
            waiting[number](number, None)  # type: ignore[operator]
