"""The clock as a Lightning callback."""

import json
from pathlib import Path

import pytorch_lightning as pl
from setting import rounds, tick

import dpexp


class Tick(pl.Callback):
    """Writes what it saw to `path`, if it is given one."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def on_train_batch_end(self, *_: object) -> None:
        tick()

    def on_fit_end(self, *_: object) -> None:
        if self.path:
            Path(self.path).write_text(json.dumps({"version": dpexp.__version__} | rounds()))
