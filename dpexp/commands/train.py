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

from dpexp.accounting.ledger import Ledger, ParallelQueryEvent, joined, ledger_so_far, read_ledger
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
    quieten,
    rounds_of,
    set_batch_size,
    unsolved,
)
from dpexp.commands.initial_weights import heading
from dpexp.commands.objective import check_objective, objective, objective_of, result_of
from dpexp.commands.saved_jobs import CARD, RESERVED, NotKept, bare, check_resumable, completed, keep
from dpexp.commands.trainer import AVERAGING, CHECKPOINT, sentence, trainer_for
from dpexp.commands.validate import check, refuse_taken, reported, taken
from dpexp.config import audit_trainings
from dpexp.errors import ClaimRefuted, ConfigError
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing_methods import preprocessing_of
from dpexp.privacy.private_metrics import GradientSignal, MetricEstimates
from dpexp.reporting import terminal
from dpexp.reporting.run_figures import counts
from dpexp.tracking.job_folder import begun
from dpexp.tracking.provenance import without_passwords
from dpexp.training.callbacks import LastWeights, Stop
from dpexp.training.pretrained import reserve_disk_space

if TYPE_CHECKING:
    from dpexp.accounting.auditing import Audit
    from dpexp.accounting.membership_inference import Membership

    # MLflow is imported where it is used: a job without tracking does not wait for it
    from dpexp.tracking.run import Tracked


def run(cfg: DictConfig) -> float | None:
    """Runs the experiment and returns its objective (None if it has none).

    The output directory gets `ledger.jsonl`, `plan.json`, `epsilon.png`, the configuration, and `result.json`. A trial
    that an earlier start of the same sweep has finished is not run again.

    Raises:
        ConfigError: before training, for any choice that cannot be honoured.
    """
    quieten()
    check(cfg)
    count = processes.asked(cfg)
    if count > 1 and not processes.begun():
        return processes.start(run, cfg, count)
    with processes.connected(cfg, count):
        if processes.rank() == 0:
            with Stop().installed() as stop:
                return _run(cfg, stop)
        _accompany(cfg)
        return None


def _accompany(cfg: DictConfig) -> None:
    """Trains with the first process."""
    warnings.simplefilter("ignore")
    said = processes.tell()
    if said is None:
        return
    output, cfg.checkpoint.resume = said
    processes.use_threads(cfg)
    module, data, _, trainer, _ = _job(cfg, output, plan_for)
    trainer.fit(module, datamodule=data, ckpt_path=output / CHECKPOINT if cfg.checkpoint.resume else None)
    with suppress(Exception):  # the first process tells
        _tested(module, data, trainer)


def _run(cfg: DictConfig, stop: Stop) -> float | None:
    among, output = trial.current(cfg), Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        output = _free(output)
    if cfg.tracking.uri is not None and cfg.tracking.resume:
        from dpexp.tracking.run import finished_trial, unfinished_trial

        finished = finished_trial(cfg)
        if finished is not None:
            processes.tell()
            trial.skip()
            terminal.skipped(among.place if among else str(finished.info.run_name))
            return objective_of(finished.data.metrics, cfg.objective)
        earlier = unfinished_trial(cfg)
        if earlier is not None and (earlier / CHECKPOINT).exists():
            output, cfg.checkpoint.resume = earlier, True
    processes.use_threads(cfg)
    processes.tell((output, cfg.checkpoint.resume))
    if not cfg.checkpoint.resume:
        refuse_taken(output)
    job = _job(cfg, output, plan_for)
    output.mkdir(parents=True, exist_ok=True)
    if cfg.checkpoint.resume:
        check_resumable(cfg, output)
    (output / "config.yaml").write_text(OmegaConf.to_yaml(_shown(cfg), resolve=True))
    plan = job.plan
    if among is None:
        terminal.announce(cfg, plan, joint_note(cfg, plan))
        terminal.announce_tuned(job.module)
    with _track(cfg, plan, output, _at_its_end(cfg, plan, output), stop) as tracked:
        result = _trained(cfg, job, output, tracked, stop) if cfg.train else _planned(cfg, plan)
        _write(result, output)  # whatever becomes of an audit
        summary, refuted = _audited(cfg, plan, output)
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
    if among is None:
        terminal.conclude(result, output, tracked.address if tracked else None)
    else:
        terminal.trial_ended(among.place, result, trial.seconds_left())
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
    origin: dict[str, str]


def _job(
    cfg: DictConfig, output: Path, plan_of: Callable[[DictConfig, pl.LightningModule], PrivacyPlan]
) -> _Job:  # fmt: skip
    """What training needs, all of it made before anything is written.

    Raises:
        ConfigError: for any choice that cannot be honoured.
    """
    if cfg.debug:
        make_small(cfg)
    if audit_trainings(cfg):
        from dpexp.commands.audit import canaries_of

        canaries_of(cfg)  # or a sentence that says why there are none
    pl.seed_everything(cfg.seed, verbose=False)
    module = module_of(cfg, begun=not cfg.checkpoint.resume)  # first after the seed, so that it can be made again
    data = make("data.module", cfg.data.module)
    if hasattr(data, "workers"):
        data.num_workers = cfg.trainer.num_workers
    check_device(cfg)
    plan = plan_of(cfg, module) if cfg.privacy.enabled else None
    add_scheduler(cfg, module, plan.rounds if plan else rounds_of(cfg))
    callback = callback_for(cfg, plan, output / "ledger.jsonl") if plan else None
    trainer = trainer_for(cfg, plan, callback, output)
    check_objective(cfg, module, trainer)
    return _Job(module, data, plan, trainer, heading(cfg))


def check_trial(cfg: DictConfig) -> None:
    """Whether a trial can run, but for what calibrating it would show.

    Raises:
        ConfigError: for any choice that cannot be honoured.
    """
    quieten()
    check(cfg)
    _job(cfg, Path(HydraConfig.get().sweep.dir), unsolved)


def _free(folder: Path) -> Path:
    """A folder that no earlier start of the same sweep has left a run in, which its costs are counted from."""
    attempts = (folder.with_name(f"{folder.name}.{k}") if k > 1 else folder for k in itertools.count(1))
    return next(attempt for attempt in attempts if not taken(attempt))


def _at_its_end(cfg: DictConfig, plan: PrivacyPlan | None, output: Path) -> Ledger | None:
    """What the job will have released at most, rounds included that a resumed one does again, and an audit's."""
    if plan is None or cfg.data.id is None:
        return None
    own, audits = plan.ledger(), audit_trainings(cfg)
    if cfg.checkpoint.resume:
        before = ledger_so_far(output / "ledger.jsonl")
        own = replace(joined([before, plan.ledger(completed(output / CHECKPOINT))]), incomplete=False)
    return joined([*([own] if cfg.train or not audits else []), *[plan.ledger()] * audits])


def _track(
    cfg: DictConfig, plan: PrivacyPlan | None, output: Path, promised: Ledger | None, stop: Stop
) -> "AbstractContextManager[Tracked | None]":
    if cfg.tracking.uri is None:
        return nullcontext()
    from dpexp.tracking.run import track

    return track(cfg, plan, output, accountants(cfg, plan) if plan else [], promised, lambda: stop.name)


def _shown(cfg: DictConfig) -> DictConfig:
    """The configuration as others may read it: without the tracking server's password."""
    shown = cfg.copy()
    for name in ("uri", "artifacts"):
        if cfg.tracking[name] is not None:
            shown.tracking[name] = without_passwords(cfg.tracking[name])
    return shown


def _trained(cfg: DictConfig, job: _Job, output: Path, tracked: "Tracked | None", stop: Stop) -> dict[str, Any]:
    module, data, plan, trainer, origin = job
    trainer.callbacks.append(stop)  # type: ignore[attr-defined]
    if tracked:
        trainer.logger = tracked.logger
        tracked.logger.rounds = lambda: trainer.global_step
    if plan is None:
        set_batch_size(cfg, data)
    started = time.monotonic()
    released = [one for one in trainer.callbacks if isinstance(one, PrivacyCallback)]  # type: ignore[attr-defined]
    named = cfg.data.id is not None and plan is not None
    try:
        with (
            reserve_disk_space(bare(module), output / RESERVED),
            begun(output, lambda: released[0].ledger_opened) if named else nullcontext(),
        ):
            trainer.fit(module, datamodule=data, ckpt_path=output / CHECKPOINT if cfg.checkpoint.resume else None)
    except (KeyboardInterrupt, SystemExit):
        terminal.interrupted(plan, output, cfg.privacy.delta, reported(cfg))
        raise
    except OSError:
        if released and released[0].ledger_opened:
            terminal.interrupted(plan, output, cfg.privacy.delta, reported(cfg))
        raise
    except (MisconfigurationException, RuntimeError, ValueError) as error:
        said = sentence(error)
        if said is None:
            raise
        raise ConfigError(said) from error
    seconds = time.monotonic() - started
    try:
        metrics = _tested(module, data, trainer)
    except Exception as error:  # such as of data without a test set: what was spent is not lost with it
        warnings.warn(f"the model could not be tested, and is kept: {' '.join(str(error).split())[:300]}")
        metrics = {}
    ledger = read_ledger(output / "ledger.jsonl") if plan else None
    result = result_of(cfg, plan, ledger, trainer.global_step, metrics, seconds)
    if released and released[0].compiling:
        result["step"] = released[0].compiling
    if released and released[0].estimates.history:
        result["released"] = _released(released[0].estimates, output)
    if released and released[0].signals.history:
        _draw_signals(released[0].signals, output)
    result |= _prepared(module, plan, output)
    try:
        about = keep(cfg, plan, module, data, result, output, tracked.run_id if tracked else None, origin)
    except NotKept as error:  # what was spent and measured is not lost with it
        warnings.warn(f"the model could not be kept in {output}: {error}")
        result["weights"] = str(error.path)
    except Exception as error:
        warnings.warn(f"the model could not be kept: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        if tracked:
            tracked.log_model(about, result["rounds"])
    return result


def _save(figure: Any, path: Path) -> None:
    with suppress(OSError):  # a full disk: the model comes first
        figure.savefig(path, dpi=150)


def _released(estimates: MetricEstimates, output: Path) -> dict[str, dict[str, float]]:
    """The values that were released at last, and their figure."""
    from dpexp.reporting.run_figures import values_over_rounds

    _save(values_over_rounds(estimates), output / "released.png")
    smoothed = {name: estimates.moving_average(name) for name in estimates.history}
    return {name: {"estimate": estimate, "sd": sd} for name, (estimate, sd) in smoothed.items()}


def _draw_signals(signals: GradientSignal, output: Path) -> None:
    from dpexp.reporting.run_figures import signal_and_noise

    _save(signal_and_noise(signals), output / "signal.png")


def _audited(cfg: DictConfig, plan: PrivacyPlan | None, output: Path) -> tuple[dict[str, float], str]:
    """What an audit came to, if there was one, and what it refutes."""
    if cfg.audit is None:
        return {}, ""
    found: Audit | Membership
    if audit_trainings(cfg):
        from dpexp.commands.audit import attacked, attacked_before, keep_summary

        before = attacked_before(cfg, plan, output)
        if before is not None:
            terminal.attacked_before(before)
            return before, "see result.json" if before["refuted"] else ""
        found, figure = attacked(cfg, plan, output)
        keep_summary(found, output)
        terminal.attacked(found, audit_trainings(cfg), cfg.privacy.delta)
    else:
        from dpexp.commands.audit import audited

        assert plan is not None  # without one there is no claim, and `check` has said so
        found, figure = audited(cfg, plan, output)
        terminal.audited(found)
    figure.savefig(output / "audit.png", dpi=150)
    return found.summary(), "; ".join(found.exceeded)


def _tested(module: pl.LightningModule, data: pl.LightningDataModule, trainer: pl.Trainer) -> dict[str, float]:
    """The test set's metrics; where weights were averaged, also those of the last weights, as `…_unaveraged`."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    last = next((callback for callback in callbacks if isinstance(callback, LastWeights)), None)
    if last is not None and last.weights is None:  # fit found every round done, where it calls no on_train_end
        for callback in callbacks:
            if isinstance(callback, (LastWeights, *AVERAGING)):
                callback.on_train_end(trainer, module)
    metrics = _test(module, data, trainer)
    if last is not None and last.weights is not None:
        averaged = {name: value.clone() for name, value in module.state_dict().items()}
        loggers, trainer.loggers = trainer.loggers, []  # which would take it for the averages'
        module.load_state_dict(last.weights)
        try:
            others = {f"{name}_unaveraged": value for name, value in _test(module, data, trainer).items()}
        finally:
            module.load_state_dict(averaged)
            trainer.loggers = loggers
        for logger in loggers:
            logger.log_metrics(others, trainer.global_step)
        metrics |= others
    return metrics


def _test(module: pl.LightningModule, data: pl.LightningDataModule, trainer: pl.Trainer) -> dict[str, float]:
    return {
        name: value for part in trainer.test(module, datamodule=data, verbose=False) for name, value in part.items()
    }


def _prepared(module: pl.LightningModule, plan: PrivacyPlan | None, output: Path) -> dict[str, Any]:
    """What preparations tell, and counts of classes as a figure."""
    told = {name: numbers for name, found in preprocessing_of(module).items() if (numbers := found.released_values())}
    parts = [event for event in plan.preprocessing if isinstance(event, ParallelQueryEvent)] if plan else []
    for name, numbers in told.items():
        event = next((event for event in parts if event.query == name), None)
        _save(counts(numbers, event, name), output / f"{name}.png")
    return {"prepared": told} if told else {}


def _planned(cfg: DictConfig, plan: PrivacyPlan | None) -> dict[str, Any]:
    """train=false: what training would cost."""
    if plan is None:
        if audit_trainings(cfg):
            return result_of(cfg, None, None, rounds_of(cfg), {}, 0.0)
        raise ConfigError("train=false has nothing to plan with privacy.enabled=false.")
    return result_of(cfg, plan, plan.ledger(), plan.rounds, {}, 0.0)
