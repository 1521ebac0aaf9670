"""What is private and shown under unsafe diagnostics alone."""

import pytorch_lightning as pl
import torch

from dpexp.privacy.engine.engine import Engine
from dpexp.privacy.isolation.silence import log_although_mute


def log_diagnostics(pl_module: pl.LightningModule, engine: Engine) -> None:
    """The last sample's size, losses, norms and how many of them were clipped."""
    observed = engine.observations
    sizes = sum(len(chunk["loss"]) for chunk in observed)
    values: dict[str, float] = {"unsafe/sample_size": float(sizes)}
    if sizes:
        values["unsafe/train_loss"] = float(torch.cat([chunk["loss"] for chunk in observed]).float().mean())
    for group in engine.now.groups:
        norms = [chunk[key] for chunk in observed if (key := f"norm/{group.name}") in chunk]
        if norms:
            joined = torch.cat(norms)
            values[f"unsafe/median_norm/{group.name}"] = float(joined.median())
            values[f"unsafe/clip_fraction/{group.name}"] = float((joined > group.S).float().mean())
    for name, value in values.items():
        log_although_mute(pl_module, name, value)
