"""One experiment, from a composed configuration to a trained, accounted and tracked model."""

import itertools
import json
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytorch_lightning as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf

from dpexp.accounting.ledger import Ledger, ParallelQueryEvent, concatenate, ledger_so_far, read_ledger
from dpexp.commands import processes, trial
from dpexp.commands.build import (
    accountants,
    add_scheduler,
    callback_for,
    check_device,
    joint_note,
    make,
    make_small,
    module_of,
    plan_for,
    rounds_of,
    set_batch_size,
    silence_lightning,
    uncalibrated_plan,
)
from dpexp.commands.initial_weights import metadata_of
from dpexp.commands.objective import check_objective, objective, objective_of, result_of
from dpexp.commands.saved_jobs import (
    CARD,
    CHECKPOINT,
    RESERVED,
    SavedElsewhere,
    bare,
    check_resumable,
    rounds_done,
    save_model,
)
from dpexp.commands.trainer import AVERAGING, sentence, trainer_for
from dpexp.commands.validate import check, refuse_taken, reported, taken
from dpexp.config import audit_trainings
from dpexp.errors import ClaimRefuted, ConfigError
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing_methods import preprocessing_of
from dpexp.privacy.private_metrics import MetricEstimates
from dpexp.reporting import terminal
from dpexp.reporting.run_figures import class_counts, signal_and_noise, values_over_rounds
from dpexp.tracking.job_folder import training_marker
from dpexp.tracking.provenance import without_passwords
from dpexp.training.callbacks import LastWeights, Stop
from dpexp.training.pretrained import reserve_disk_space

if TYPE_CHECKING:
    from dpexp.accounting.auditing import Audit
    from dpexp.accounting.membership_inference import Membership

    # MLflow is imported where it is used: a job without tracking does not wait for it
    from dpexp.tracking.run import TrackedRun


def run(cfg: DictConfig) -> float | None:
    """Runs the experiment and returns its objective (None if it has none).

    The output folder gets `ledger.jsonl`, `plan.json`, `epsilon.png`, the configuration and `result.json`. A trial that
    an earlier start of the same sweep has finished is not run again.

    Raises:
        ConfigError: before training, for any choice that cannot be honoured.
    """
    silence_lightning()
    check(cfg)
    count = processes.number_of(cfg)
    if count > 1 and not processes.is_started():
        return processes.start(run, cfg, count)
    with processes.connected(cfg, count):
        if processes.rank() == 0:
            with Stop().installed() as stop:
                return _run(cfg, stop)
        _run_worker(cfg)
        return None


def _run_worker(cfg: DictConfig) -> None:
    """Trains with process 0."""
    warnings.simplefilter("ignore")
    received = processes.broadcast()
    if received is None:
        return
    output, cfg.checkpoint.resume = received
    processes.use_threads(cfg)
    module, data, _, trainer, _ = _make_job(cfg, output, plan_for)
    trainer.fit(module, datamodule=data, ckpt_path=output / CHECKPOINT if cfg.checkpoint.resume else None)
    with suppress(Exception):  # process 0 reports it
        _test(module, data, trainer)


def _run(cfg: DictConfig, stop: Stop) -> float | None:
    current, output = trial.current(cfg), Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        output = _unused(output)
    if cfg.tracking.uri is not None and cfg.tracking.resume:
        from dpexp.tracking.run import finished_trial, unfinished_trial

        finished = finished_trial(cfg)
        if finished is not None:
            processes.broadcast()
            trial.skip()
            terminal.print_skipped(current.label if current else str(finished.info.run_name))
            return objective_of(finished.data.metrics, cfg.objective)
        earlier = unfinished_trial(cfg)
        if earlier is not None and (earlier / CHECKPOINT).exists():
            output, cfg.checkpoint.resume = earlier, True
    processes.use_threads(cfg)
    processes.broadcast((output, cfg.checkpoint.resume))
    if not cfg.checkpoint.resume:
        refuse_taken(output)
    job = _make_job(cfg, output, plan_for)
    output.mkdir(parents=True, exist_ok=True)
    if cfg.checkpoint.resume:
        check_resumable(cfg, output)
    (output / "config.yaml").write_text(OmegaConf.to_yaml(_without_passwords(cfg), resolve=True))
    plan = job.plan
    if current is None:
        terminal.print_plan(cfg, plan, joint_note(cfg, plan))
        terminal.print_trained_parameters(job.module)
    with _track(cfg, plan, output, _reserved_ledger(cfg, plan, output), stop) as tracked:
        result = _train(cfg, job, output, tracked, stop) if cfg.train else _planned_result(cfg, plan)
        _write(result, output)  # an audit may fail
        summary, refuted = _audit(cfg, plan, output)
        if summary:
            result["audit"] = summary
        result["mlflow_run_id"] = tracked.run_id if tracked else None
        _write(result, output)
        if tracked:
            tracked.finish(result)
        if result["rounds"] >= (plan.rounds if plan else rounds_of(cfg)) and (output / CARD).exists():
            (output / CHECKPOINT).unlink(missing_ok=True)
        if refuted:
            raise ClaimRefuted(f"the audit refutes what is claimed: {refuted}.")
    if current is None:
        terminal.print_result(result, output, tracked.address if tracked else None)
    else:
        terminal.print_trial(current.label, result, trial.seconds_left())
    if "weights" in result:
        raise ConfigError(
            f"{output} could not be written to at the end; the trained weights are in {result['weights']}"
        )
    return objective(cfg, plan, result)


def _write(result: dict[str, Any], output: Path) -> None:
    with suppress(OSError) if "weights" in result else nullcontext():
        (output / "result.json").write_text(json.dumps(result, indent=2))


class _Job(NamedTuple):
    module: pl.LightningModule
    data: pl.LightningDataModule
    plan: PrivacyPlan | None
    trainer: pl.Trainer
    metadata: dict[str, str]


def _make_job(
    cfg: DictConfig, output: Path, plan_of: Callable[[DictConfig, pl.LightningModule], PrivacyPlan]
) -> _Job:  # fmt: skip
    """Makes everything that training needs before anything is written."""
    if cfg.debug:
        make_small(cfg)
    if audit_trainings(cfg):
        from dpexp.commands.audit import canaries_of

        canaries_of(cfg)  # raises a ConfigError if there are none
    pl.seed_everything(cfg.seed, verbose=False)
    module = module_of(cfg, load_weights=not cfg.checkpoint.resume)  # right after the seed: reproducible
    data = make("data.module", cfg.data.module)
    if hasattr(data, "num_workers"):
        data.num_workers = cfg.trainer.num_workers
    check_device(cfg)
    plan = plan_of(cfg, module) if cfg.privacy.enabled else None
    add_scheduler(cfg, module, plan.rounds if plan else rounds_of(cfg))
    callback = callback_for(cfg, plan, output / "ledger.jsonl") if plan else None
    trainer = trainer_for(cfg, plan, callback, output)
    check_objective(cfg, module, trainer)
    return _Job(module, data, plan, trainer, metadata_of(cfg))


def check_trial(cfg: DictConfig) -> None:
    """Refuses a trial that cannot run, without calibrating it."""
    silence_lightning()
    check(cfg)
    _make_job(cfg, Path(HydraConfig.get().sweep.dir), uncalibrated_plan)


def _unused(folder: Path) -> Path:
    """A folder without a run of an earlier start of the same sweep, whose ledger still counts."""
    attempts = (folder.with_name(f"{folder.name}.{k}") if k > 1 else folder for k in itertools.count(1))
    return next(attempt for attempt in attempts if not taken(attempt))


def _reserved_ledger(cfg: DictConfig, plan: PrivacyPlan | None, output: Path) -> Ledger | None:
    """The most that the job will have released at its end, with the rounds that a resumed job repeats, and audits."""
    if plan is None or cfg.data.id is None:
        return None
    own, audits = plan.ledger(), audit_trainings(cfg)
    if cfg.checkpoint.resume:
        before = ledger_so_far(output / "ledger.jsonl")
        own = replace(concatenate([before, plan.ledger(rounds_done(output / CHECKPOINT))]), incomplete=False)
    return concatenate([*([own] if cfg.train or not audits else []), *[plan.ledger()] * audits])


def _track(
    cfg: DictConfig, plan: PrivacyPlan | None, output: Path, reserved: Ledger | None, stop: Stop
) -> "AbstractContextManager[TrackedRun | None]":
    if cfg.tracking.uri is None:
        return nullcontext()
    from dpexp.tracking.run import track

    return track(cfg, plan, output, accountants(cfg, plan) if plan else [], reserved, lambda: stop.name)


def _without_passwords(cfg: DictConfig) -> DictConfig:
    """The configuration without the tracking server's password."""
    shown = cfg.copy()
    for name in ("uri", "artifacts"):
        if cfg.tracking[name] is not None:
            shown.tracking[name] = without_passwords(cfg.tracking[name])
    return shown


def _train(cfg: DictConfig, job: _Job, output: Path, tracked: "TrackedRun | None", stop: Stop) -> dict[str, Any]:
    module, data, plan, trainer, metadata = job
    trainer.callbacks.append(stop)  # type: ignore[attr-defined]
    if tracked:
        trainer.logger = tracked.logger
        tracked.logger.rounds = lambda: trainer.global_step
    if plan is None:
        set_batch_size(cfg, data)
    started = time.monotonic()
    privacy = [one for one in trainer.callbacks if isinstance(one, PrivacyCallback)]  # type: ignore[attr-defined]
    marked = cfg.data.id is not None and plan is not None
    try:
        with (
            reserve_disk_space(bare(module), output / RESERVED),
            training_marker(output, lambda: privacy[0].ledger_opened) if marked else nullcontext(),
        ):
            trainer.fit(module, datamodule=data, ckpt_path=output / CHECKPOINT if cfg.checkpoint.resume else None)
    except (KeyboardInterrupt, SystemExit):
        terminal.print_interrupted(plan, output, cfg.privacy.delta, reported(cfg))
        raise
    except OSError:
        if privacy and privacy[0].ledger_opened:
            terminal.print_interrupted(plan, output, cfg.privacy.delta, reported(cfg))
        raise
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        message = sentence(error)
        if message is None:
            raise
        raise ConfigError(message) from error
    seconds = time.monotonic() - started
    try:
        metrics = _test(module, data, trainer)
    except Exception as error:  # data without a test set, for instance: the result must not be lost
        warnings.warn(f"the model could not be tested, and is kept: {' '.join(str(error).split())[:300]}")
        metrics = {}
    ledger = read_ledger(output / "ledger.jsonl") if plan else None
    result = result_of(cfg, plan, ledger, trainer.global_step, metrics, seconds)
    if privacy and privacy[0].compiling:
        result["step"] = privacy[0].compiling
    if privacy and privacy[0].estimates.history:
        result["released"] = _released_metrics(privacy[0].estimates, output)
    if privacy and privacy[0].signals.history:
        _save(signal_and_noise(privacy[0].signals), output / "signal.png")
    result |= _preprocessing(module, plan, output)
    try:
        about = save_model(cfg, plan, module, data, result, output, tracked.run_id if tracked else None, metadata)
    except SavedElsewhere as error:  # the result must not be lost
        warnings.warn(f"the model could not be kept in {output}: {error}")
        result["weights"] = str(error.path)
    except Exception as error:
        warnings.warn(f"the model could not be kept: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        if tracked:
            tracked.log_model(about, result["rounds"])
    return result


def _save(figure: Any, path: Path) -> None:
    with suppress(OSError):  # with a full disk, the model matters more
        figure.savefig(path, dpi=150)


def _released_metrics(estimates: MetricEstimates, output: Path) -> dict[str, dict[str, float]]:
    """The last estimates of the private metrics; saves their figure."""
    _save(values_over_rounds(estimates), output / "released.png")
    smoothed = {name: estimates.moving_average(name) for name in estimates.history}
    return {name: {"estimate": estimate, "sd": sd} for name, (estimate, sd) in smoothed.items()}


def _audit(cfg: DictConfig, plan: PrivacyPlan | None, output: Path) -> tuple[dict[str, float], str]:
    """The summary of the configured audit, and what it refutes; both empty without an audit."""
    if cfg.audit is None:
        return {}, ""
    found: Audit | Membership
    if audit_trainings(cfg):
        from dpexp.commands.audit import audit_membership, earlier_summary, save_summary

        before = earlier_summary(cfg, plan, output)
        if before is not None:
            terminal.print_earlier_audit(before)
            return before, "see result.json" if before["refuted"] else ""
        found, figure = audit_membership(cfg, plan, output)
        save_summary(found, output)
        terminal.print_membership_audit(found, audit_trainings(cfg), cfg.privacy.delta)
    else:
        from dpexp.commands.audit import audit_plan

        assert plan is not None  # `check` refuses an audit without one
        found, figure = audit_plan(cfg, plan, output)
        terminal.print_audit(found)
    figure.savefig(output / "audit.png", dpi=150)
    return found.summary(), "; ".join(found.exceeded)


def _test(module: pl.LightningModule, data: pl.LightningDataModule, trainer: pl.Trainer) -> dict[str, float]:
    """The metrics on the test set; if weights were averaged, also those of the last weights, as `…_unaveraged`."""

    def metrics_of_module() -> dict[str, float]:
        parts = trainer.test(module, datamodule=data, verbose=False)
        return {name: value for part in parts for name, value in part.items()}

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
    return metrics


def _preprocessing(module: pl.LightningModule, plan: PrivacyPlan | None, output: Path) -> dict[str, Any]:
    """The released values of private preprocessing; saves counts of classes as a figure."""
    released = {name: values for name, step in preprocessing_of(module).items() if (values := step.released_values())}
    counted = [event for event in plan.preprocessing if isinstance(event, ParallelQueryEvent)] if plan else []
    for name, values in released.items():
        event = next((event for event in counted if event.query == name), None)
        _save(class_counts(values, event, name), output / f"{name}.png")
    return {"preprocessing": released} if released else {}


def _planned_result(cfg: DictConfig, plan: PrivacyPlan | None) -> dict[str, Any]:
    """The result with train=false: the cost of the plan."""
    if plan is None:
        if audit_trainings(cfg):
            return result_of(cfg, None, None, rounds_of(cfg), {}, 0.0)
        raise ConfigError("train=false has nothing to plan with privacy.enabled=false.")
    return result_of(cfg, plan, plan.ledger(), plan.rounds, {}, 0.0)
