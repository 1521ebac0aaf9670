"""The objective: the figure of a job that a sweeper compares."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from dpexp._lightning_compat import pl
from dpexp.errors import ConfigError
from dpexp.training.callbacks import LastWeights
from dpexp.training.classifier import Classifier


def check_objective(cfg: DictConfig, module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """Refuses an unknown objective before training, if all metrics are known: with dpexp's classifier and callbacks."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    homes = {type(part).__module__.partition(".")[0] for part in (module, *callbacks)}
    if cfg.train and not (isinstance(module, Classifier) and homes <= {"dpexp", "pytorch_lightning", "lightning"}):
        return
    known = [*module.OBJECTIVES] if cfg.train and isinstance(module, Classifier) else []
    if any(isinstance(callback, LastWeights) for callback in callbacks):
        known += [f"{name}_unaveraged" for name in known]
    if cfg.privacy.enabled:
        known.append("epsilon")
        targets = (cfg.privacy.epsilon, cfg.privacy.max_advantage, cfg.privacy.max_tpr_at_fpr)
        if any(target is not None for target in targets):
            known.append(cfg.calibrate)
    if cfg.objective not in (*known, "test_accuracy"):
        raise ConfigError(f"objective={cfg.objective} is not an objective of this job: {', '.join(known)}.")


def objective(name: str, result: Mapping[str, Any]) -> float | None:
    """The objective of a result; None if it is the test accuracy of a job that measures none."""
    known = dict(result["metrics"])
    if "epsilon" in result:
        known["epsilon"] = next(iter(result["epsilon"].values()))
    if "calibration" in result:
        known[result["calibration"]["knob"]] = result["calibration"]["value"]
    if name not in known and name != "test_accuracy":
        raise ConfigError(f"objective={name} is not an objective of this job: {', '.join(known)}.")
    return known.get(name)
