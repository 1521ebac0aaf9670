"""How the scripts train: on one thread, without output, by a Trainer that keeps nothing."""

import logging
import warnings
from typing import Any

import pytorch_lightning as pl
import torch


def quiet() -> None:
    """One thread, no warnings and no logging from here on."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {"accelerator": "cpu", "max_epochs": -1, "num_sanity_val_steps": 0} | dict.fromkeys(off, False) | options
    return pl.Trainer(callbacks=[*callbacks], **given)
