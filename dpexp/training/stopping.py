"""Signals that end a job: Ctrl-C, and what schedulers send before they kill."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl

NAMES = {
    signal.SIGINT: "the keyboard",
    signal.SIGTERM: "SIGTERM, which schedulers send before they kill",
} | ({signal.SIGUSR1: "SIGUSR1, which schedulers send before they kill"} if hasattr(signal, "SIGUSR1") else {})
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


class Stop(pl.Callback):
    """Notes which signal came first, and raises KeyboardInterrupt.

    It is raised again at the next round, since Python drops what is raised while an object is collected.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    @contextmanager
    def heeded(self) -> Iterator["Stop"]:
        """Meanwhile; but not of signals that somebody else has a handler for.

        Raises:
            SystemExit: after such a signal, with the status that a shell gives a process which it ended.
        """
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in NAMES if main}
        own = [number for number, handler in before.items() if handler in _DEFAULT]
        for number in own:
            signal.signal(number, self._came)
        try:
            yield self
        except (KeyboardInterrupt, SystemExit):  # Lightning makes one of the other
            if self.number is None:
                raise
            raise SystemExit(128 + self.number) from None
        finally:
            for number in own:
                signal.signal(number, before[number])

    def on_train_batch_start(self, *_: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt

    def _came(self, number: int, _: Any) -> None:
        self.number = self.number or number
        raise KeyboardInterrupt

    @property
    def name(self) -> str:
        return NAMES[signal.Signals(self.number or signal.SIGINT)]
