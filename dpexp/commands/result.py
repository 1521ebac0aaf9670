"""What a job measured: result.json and its figures."""

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpexp._lightning_compat import pl
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.risk import risk
from dpexp.commands.job import Job
from dpexp.commands.trainer import AVERAGING
from dpexp.commands.validate import not_private_reason, reported
from dpexp.errors import in_one_line
from dpexp.privacy.preprocessing_methods import preprocessing_of
from dpexp.reporting.run_figures import class_counts, values_over_rounds
from dpexp.training.callbacks import LastWeights


def result_of(
    job: Job, ledger: Ledger | None, rounds: int, metrics: dict[str, float], seconds: float
) -> dict[str, Any]:
    """The content of result.json."""
    cfg, plan = job.cfg, job.plan
    result: dict[str, Any] = {
        "private": not_private_reason(cfg) is None and (ledger is None or ledger.not_private_reason is None),
        "trained": cfg.train,
        "rounds": rounds,
        "metrics": metrics,
        "seconds": round(seconds, 3),
    }
    if plan is not None and ledger is not None:
        result |= {
            "epsilon": {name: epsilon(ledger, cfg.privacy.delta, name) for name in job.accountants},
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


def measure(job: Job) -> dict[str, float]:
    """The metrics on the test set; if weights were averaged, also those of the last weights, as `…_unaveraged`.

    What cannot be measured, as without a test set, is left out with a warning.
    """
    module, trainer = job.module, job.trainer

    def metrics_of_module() -> dict[str, float]:
        parts = trainer.test(module, datamodule=job.data, verbose=False)
        return {name: value for part in parts for name, value in part.items()}

    metrics: dict[str, float] = {}
    try:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        last = next((callback for callback in callbacks if isinstance(callback, LastWeights)), None)
        if last is not None and last.weights is None:  # all rounds were done before: fit then calls no on_train_end
            for callback in callbacks:
                if isinstance(callback, (LastWeights, *AVERAGING)):
                    callback.on_train_end(trainer, module)
        metrics = metrics_of_module()
        if last is not None and last.weights is not None:
            averaged = {name: value.clone() for name, value in module.state_dict().items()}
            loggers, trainer.loggers = trainer.loggers, []  # which would log them as those of the averages
            module.load_state_dict(last.weights)
            try:
                others = {f"{name}_unaveraged": value for name, value in metrics_of_module().items()}
            finally:
                module.load_state_dict(averaged)
                trainer.loggers = loggers
            for logger in loggers:
                logger.log_metrics(others, trainer.global_step)
            metrics |= others
    except Exception as error:  # the result must not be lost
        warnings.warn(f"the model could not be tested, and is kept: {in_one_line(error)[:300]}")
    return metrics


def released_values(job: Job) -> dict[str, Any]:
    """What was released in addition to the model, for result.json; saves its figures."""
    privacy, output, steps = job.privacy, job.output, preprocessing_of(job.module)
    preprocessing = {name: values for name, step in steps.items() if (values := step.released_values())}
    found: dict[str, Any] = {"preprocessing": preprocessing} if preprocessing else {}
    for name, values in preprocessing.items():
        _save(class_counts(values, steps[name].sd, name), output / f"{name}.png")
    if privacy and privacy.estimates.history:
        _save(values_over_rounds(privacy.estimates), output / "released.png")
        smoothed = {name: privacy.estimates.moving_average(name) for name in privacy.estimates.history}
        found["released"] = {name: {"estimate": estimate, "sd": sd} for name, (estimate, sd) in smoothed.items()}
    return found


def _save(figure: Any, path: Path) -> None:
    with suppress(OSError):  # with a full disk, the model matters more
        figure.savefig(path, dpi=150)
