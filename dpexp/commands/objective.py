"""The result of a job, and the objective that it returns to a sweeper."""

from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.risk import risk
from dpexp.commands.build import accountants, is_private
from dpexp.commands.validate import reported
from dpexp.errors import ConfigError
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.training.callbacks import LastWeights
from dpexp.training.classifier import Classifier


def check_objective(cfg: DictConfig, module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """Refuses an unknown objective before training, if all metrics are known: with dpexp's classifier and callbacks."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    homes = {type(part).__module__.partition(".")[0] for part in (module, *callbacks)}
    if cfg.train and not (isinstance(module, Classifier) and homes <= {"dpexp", "pytorch_lightning"}):
        return
    known = [*Classifier.METRICS] if cfg.train else []
    if any(isinstance(callback, LastWeights) for callback in callbacks):
        known += [f"{name}_unaveraged" for name in known]
    if cfg.privacy.enabled:
        known.append("epsilon")
    targets = (cfg.privacy.epsilon, cfg.privacy.max_advantage, cfg.privacy.max_tpr_at_fpr)
    if cfg.privacy.enabled and any(target is not None for target in targets):
        known.append(cfg.calibrate)
    if cfg.objective not in (*known, "test_accuracy"):
        raise ConfigError(f"objective={cfg.objective} is not an objective of this job: {', '.join(known)}.")


def objective(cfg: DictConfig, plan: PrivacyPlan | None, result: dict[str, Any]) -> float | None:
    """The configured objective; None if it is the test accuracy of a job that measures none.

    Raises:
        ConfigError: the job did not measure it.
    """
    known = dict(result["metrics"])
    if "epsilon" in result:
        known["epsilon"] = next(iter(result["epsilon"].values()))
    if plan is not None and plan.calibration is not None:
        known[plan.calibration.knob] = plan.calibration.value
    if cfg.objective not in known and cfg.objective != "test_accuracy":
        raise ConfigError(f"objective={cfg.objective} is not an objective of this job: {', '.join(known)}.")
    return known.get(cfg.objective)


def objective_of(metrics: dict[str, float], name: str) -> float | None:
    """The objective of a finished MLflow run, from its metrics."""
    from dpexp.tracking.client import CALIBRATED_METRIC

    if name == "epsilon":
        return metrics.get("epsilon", metrics.get("epsilon_planned"))
    return metrics.get(name, metrics.get(CALIBRATED_METRIC.get(name, "")))


def result_of(
    cfg: DictConfig,
    plan: PrivacyPlan | None,
    ledger: Ledger | None,
    rounds: int,
    metrics: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    """The content of result.json."""
    result: dict[str, Any] = {
        "private": is_private(cfg) and (ledger is None or ledger.not_private_reason is None),
        "trained": cfg.train,
        "rounds": rounds,
        "metrics": metrics,
        "seconds": round(seconds, 3),
    }
    if plan is not None and ledger is not None:
        result |= {
            "epsilon": {name: epsilon(ledger, cfg.privacy.delta, name) for name in accountants(cfg, plan)},
            "delta": cfg.privacy.delta,
            "risk": risk(ledger, reported(cfg)).figures(),
            "adjacency": plan.adjacency,
            "unit": str(plan.privacy_unit),
            "noise_multiplier": plan.noise_multiplier,
            "q": plan.sampling.q,
            "n": plan.n,
            "groups": {group.name: {"S": group.S, "sigma": group.sigma, "share": group.share} for group in plan.groups},
        }
        if len(plan.bands) > 1:
            result["bands"] = plan.bands
        if plan.calibration is not None:
            result["calibration"] = {"knob": plan.calibration.knob, "value": plan.calibration.value}
    return result
