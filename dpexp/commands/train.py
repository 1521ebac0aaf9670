"""One experiment, from a composed configuration to a trained, accounted and tracked model."""

import itertools
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpexp._lightning_compat import pl
from dpexp.accounting.ledger import Ledger, concatenate, read_ledger, to_continue, write_ledger
from dpexp.commands import build, processes
from dpexp.commands.account import earlier_on_data, with_earlier
from dpexp.commands.result import check_objective, measure, objective, released_values, result_of
from dpexp.commands.saved_jobs import (
    CARD,
    CHECKPOINT,
    DISK_RESERVE,
    bare,
    check_resumable,
    privacy_state,
    rounds_done,
    save_model,
)
from dpexp.commands.trainer import callback_for, explained, trainer_for
from dpexp.commands.trial import trial_label
from dpexp.commands.validate import check, privacy_unit_of, reported, taken
from dpexp.errors import ClaimRefuted, ConfigError
from dpexp.privacy.distributed import Processes
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.sampling.privacy_unit import User
from dpexp.privacy.training import DryRunDone
from dpexp.reporting import terminal
from dpexp.tracking.job_folder import CONFIGURATION, LEDGER, PLANNED_LEDGER, finished_result
from dpexp.tracking.provenance import config_hash, without_passwords
from dpexp.training.callbacks import HeldOut, Stop
from dpexp.training.classifier import Classifier
from dpexp.training.data.raw import InMemory
from dpexp.training.pretrained import reserve_disk_space

if TYPE_CHECKING:  # MLflow is imported where it is used: a job without tracking does not wait for it
    from dpexp.privacy.callback import PrivacyCallback
    from dpexp.tracking.run import TrackedRun


def run(cfg: DictConfig) -> float | None:
    """Runs the experiment and returns its objective (None if it has none).

    The output folder gets `ledger.jsonl`, the configuration and `result.json`; if the job is tracked, also `plan.json`
    and `epsilon.png`. A trial that has finished in the sweep's folder is not run again.

    Raises:
        ConfigError: before training, for any choice that cannot be honoured.
    """
    build.silence_lightning()
    count = processes.join_and_count(cfg)
    if count > 1 and not processes.is_one_of_several():
        return processes.start(run, cfg, count)
    processes.use_threads(cfg)
    with processes.connected(cfg, count):
        if processes.rank() == 0:
            with Stop().installed() as stop:
                return _run(cfg, stop)
        _run_worker(cfg)
        return None


def _run_worker(cfg: DictConfig) -> None:
    """Trains with process 0, which reports everything."""
    warnings.simplefilter("ignore")
    received = Processes.of_torch().broadcast_object()
    if received is None:
        return
    output, cfg.checkpoint.resume = received
    job = _make_job(cfg, output)
    job.trainer.fit(job.module, datamodule=job.data, ckpt_path=job.checkpoint)
    measure(job.module, job.data, job.trainer)


def _run(cfg: DictConfig, stop: Stop) -> float | None:
    trial, output = trial_label(cfg), Path(HydraConfig.get().runtime.output_dir)
    configuration = config_hash(cfg)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        results = map(finished_result, output.parent.glob("*/"))
        finished = next((one for one in results if one and one[CONFIGURATION] == configuration), None)
        if finished is not None:
            Processes.of_torch().broadcast_object()
            terminal.print_line(trial or str(output), "finished before")
            if not taken(output):  # another trial's result: no job is left here that would never finish
                shutil.rmtree(output / ".hydra", ignore_errors=True)
            return objective(cfg, finished)
        of_hydra, output = output / ".hydra", _unused(output)
        if of_hydra.is_dir() and of_hydra.parent != output:
            shutil.copytree(of_hydra, output / ".hydra", dirs_exist_ok=True)
        if (output / CHECKPOINT).exists():
            cfg.checkpoint.resume = True
    if cfg.check:
        _check(cfg)
        return None
    Processes.of_torch().broadcast_object((output, cfg.checkpoint.resume))
    job = _make_job(cfg, output)
    output.mkdir(parents=True, exist_ok=True)
    if cfg.checkpoint.resume:
        check_resumable(cfg, output)
    shown = cfg.copy()
    shown.tracking.update({name: text and without_passwords(text) for name, text in cfg.tracking.items()})
    (output / "config.yaml").write_text(OmegaConf.to_yaml(shown, resolve=True))
    plan = job.plan
    planned = _planned_ledger(cfg, plan, output) if plan else None
    if planned is not None:
        write_ledger(output / PLANNED_LEDGER, planned)
    others = earlier_on_data(cfg) if plan and cfg.data.id is not None and not cfg.checkpoint.resume else []
    if trial is None:
        _print_beginning(cfg, job, output, planned, others)
    else:
        said = "the clipped gradients and noise of a round take", "what training_step logs", "compiling the step"
        warnings.filterwarnings("ignore", "|".join((*said, "without privacy, training ends")))
    if cfg.tracking.uri is None:
        tracking: AbstractContextManager[TrackedRun | None] = nullcontext()
    else:
        from dpexp.tracking.run import track

        names = build.accountants(cfg, plan) if plan else []
        tracking = track(cfg, plan, output, names, planned, lambda: stop.name)
    with tracking as tracked:
        if cfg.train:
            result = _train(cfg, job, output, tracked, stop, others)
        elif plan is not None:
            result = result_of(cfg, plan, plan.ledger(), plan.rounds, {}, 0.0)
        else:
            raise ConfigError("train=false has nothing to plan with privacy.enabled=false.")
        _write(result, output)  # an audit may fail
        refuted = ""
        if plan is not None and cfg.audit is not None:
            from dpexp.commands.audit import audit_plan

            claimed = next(iter(result["epsilon"].values()))
            found, figure = audit_plan(cfg, plan, output, claimed)
            terminal.print_audit(found, claimed, cfg.privacy.delta)
            figure.savefig(output / "audit.png", dpi=150)
            result["audit"], refuted = found.summary(), "; ".join(found.exceeded)
        result["mlflow_run_id"] = tracked.run_id if tracked else None
        _write(result, output)
        if tracked:
            tracked.finish(result)
        done = max(result["rounds"], job.privacy.rounds_done if job.privacy else 0)  # with those that are lost
        if done >= cfg.rounds and (output / CARD).exists():
            (output / CHECKPOINT).unlink(missing_ok=True)
        if refuted:
            raise ClaimRefuted(f"the audit refutes what is claimed: {refuted}.")
        _write(result | {CONFIGURATION: configuration}, output)
    if trial is None:
        weighted = cfg.data.class_weights is not None
        terminal.print_result(result, output, tracked.address if tracked else None, weighted)
    else:
        terminal.print_trial(trial, result)
    return objective(cfg, result)


def _print_beginning(
    cfg: DictConfig, job: "_Job", output: Path, planned: Ledger | None, others: Sequence[Ledger | None]
) -> None:  # fmt: skip
    """Prints where a resumed job goes on, the plan, earlier runs on the same data, and what is trained."""
    plan, goes_on = job.plan, cfg.checkpoint.resume
    if plan and goes_on:
        done = rounds_done(output / CHECKPOINT)
        terminal.print_resumed(plan, output, cfg.privacy.delta, reported(cfg), done, planned)
    terminal.print_plan(cfg, plan, [defaults_note(cfg, job.module, plan)])
    if plan and cfg.data.id is not None and not goes_on:
        for line in _on_these_data(cfg, with_earlier(others, plan.ledger(), cfg.privacy.delta)):
            terminal.console.print(line, soft_wrap=True, markup=False)
    terminal.print_trained_parameters(job.module)


def _on_these_data(cfg: DictConfig, together: str) -> Iterator[str]:
    """What a job and earlier ones spend together, in words, and how the data are known, if their path is their name."""
    if together:
        yield f"After this job, {together}."
    if "id: ${resolved:" in OmegaConf.to_yaml(cfg):
        yield f"Earlier runs are known by the path {cfg.data.id}; data.id names the data wherever they are."


def _check(cfg: DictConfig) -> None:
    """Does everything but the rounds: reads the data, plans, tries the step, and prints what the job will take."""
    if not cfg.privacy.enabled or processes.join_and_count(cfg) > 1:
        raise ConfigError("check=true tries a private step in one process; leave check out.")
    with TemporaryDirectory() as folder:
        job = _make_job(cfg, Path(folder))
        assert job.plan and job.privacy
        terminal.print_plan(cfg, job.plan, [defaults_note(cfg, job.module, job.plan)])
        terminal.print_trained_parameters(job.module)
        job.privacy.dry_run_only = True
        try:
            with explained(job.trainer):
                job.trainer.fit(job.module, datamodule=job.data)
        except DryRunDone as done:
            terminal.print_check(str(done.step.mode), done.step.seconds_of_round, job.plan.rounds)


def _write(result: dict[str, Any], output: Path) -> None:
    (output / "result.json").write_text(json.dumps(result, indent=2))


def defaults_note(cfg: DictConfig, module: pl.LightningModule, plan: PrivacyPlan | None) -> str:
    """A sentence that names the default values that follow from the data and the plan; "" if there are none."""
    chosen, given = [], OmegaConf.to_yaml(cfg)
    if isinstance(privacy_unit_of(cfg), User) and "users" in cfg.data.module:
        chosen.append(f"data.users={cfg.data.users} synthetic users, to whom the records are assigned at random")
    if "shape: ${image_shape:" in given:
        chosen.append(f"data.shape={[*cfg.data.shape]}, for a small model where images are few")
    batch = None if cfg.calibrate.startswith("sampling_rate") else cfg.sampling.get("expected_batch_size")
    if plan and "size: ${unless:" in given and batch:
        size, records = f"{batch:.5g}", plan.privacy_unit.plural
        if plan.n != cfg.data.n:  # a record is not one example
            size += f" (the examples of {plan.sampling.q * plan.n:.5g} {records})"
        chosen.append(f"sampling.expected_batch_size={size}, of a quarter of the {records}, at most 512")
    if isinstance(module, Classifier) and (found := build.default_learning_rate(cfg, plan)):
        chosen.append(f"optimizer.lr={found['lr']:.3g}, for this number of rounds, noise and model")
    return f"By default: {'; '.join(chosen)}." if chosen else ""


class _Job(NamedTuple):
    module: pl.LightningModule
    data: pl.LightningDataModule
    plan: PrivacyPlan | None
    privacy: "PrivacyCallback | None"
    trainer: pl.Trainer
    checkpoint: Path | None


def _make_job(
    cfg: DictConfig, output: Path, plan_of: Callable[[DictConfig, pl.LightningModule], PrivacyPlan] = build.plan_for
) -> _Job:  # fmt: skip
    """Makes everything that training needs before anything is written."""
    if cfg.debug:  # three rounds without MLflow
        cfg.sampling.steps, cfg.sampling.epochs, cfg.tracking.uri = 3, None, None
        OmegaConf.update(cfg, "trainer.detect_anomaly", True, force_add=True)
    pl.seed_everything(cfg.seed, verbose=False)
    build.check_files(cfg)
    module = build.module_of(cfg, load_weights=not cfg.checkpoint.resume)  # right after the seed: reproducible
    data = build.data_of(cfg)
    if hasattr(data, "num_workers"):
        data.num_workers = cfg.trainer.num_workers
    plan = plan_of(cfg, module) if cfg.privacy.enabled else None
    build.set_batch_size(cfg, data, plan)
    if isinstance(data, InMemory):
        data.usable_only = plan is None
    build.add_optimizer(cfg, module, plan)
    privacy = callback_for(cfg, plan, output / "ledger.jsonl") if plan else None
    trainer = trainer_for(cfg, plan, privacy, output)
    if plan is None and isinstance(module, Classifier) and isinstance(data, InMemory):
        # After the preprocessing, which takes all records, and before the checkpoint of the last round.
        trainer.callbacks.insert(2, HeldOut())  # type: ignore[attr-defined]
    check_objective(cfg, module, trainer)
    return _Job(module, data, plan, privacy, trainer, output / CHECKPOINT if cfg.checkpoint.resume else None)


def check_trial(cfg: DictConfig) -> None:
    """Refuses a trial that cannot run, without calibrating it."""
    build.silence_lightning()
    check(cfg)
    _make_job(cfg, Path(HydraConfig.get().sweep.dir), build.uncalibrated_plan)


def _unused(folder: Path) -> Path:
    """The folder of a trial whose earlier starts have not finished: one with a checkpoint, or without a run."""
    attempts = (folder.with_name(f"{folder.name}.{k}") if k > 1 else folder for k in itertools.count(1))
    return next(attempt for attempt in attempts if (attempt / CHECKPOINT).exists() or not taken(attempt))


def _planned_ledger(cfg: DictConfig, plan: PrivacyPlan, output: Path) -> Ledger:
    """The most that the job will have released at its end, with the rounds that a resumed job repeats."""
    if not cfg.checkpoint.resume:
        return plan.ledger()
    state = privacy_state(output / CHECKPOINT)
    before = to_continue(output / LEDGER, state.get("ledger")).ledger  # a wrong one is refused before its plan counts
    since = plan.resumed_at(int(state.get("completed", 0)), before)
    return replace(concatenate([before, plan.ledger(since)]), incomplete=False)


def _train(
    cfg: DictConfig, job: _Job, output: Path, tracked: "TrackedRun | None", stop: Stop, others: Sequence[Ledger | None]
) -> dict[str, Any]:  # fmt: skip
    module, data, plan, privacy, trainer, checkpoint = job
    trainer.callbacks.append(stop)  # type: ignore[attr-defined]
    if tracked:
        trainer.loggers = [tracked.logger, *trainer.loggers]
    for logger in trainer.loggers:
        logger.rounds = lambda: trainer.global_step  # type: ignore[attr-defined]
    started = time.monotonic()
    try:
        with reserve_disk_space(bare(module), output / DISK_RESERVE), explained(trainer):
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    except (KeyboardInterrupt, SystemExit, OSError) as error:
        if not isinstance(error, OSError) or (privacy and privacy.ledger_opened):
            terminal.print_interrupted(plan, output, cfg.privacy.delta, reported(cfg))
        raise
    finally:
        path = output / LEDGER
        if plan and privacy and cfg.data.id is not None and not privacy.ledger_opened and not path.exists():
            with suppress(OSError):  # without a ledger, the job counts as its plan
                write_ledger(path, Ledger(plan.adjacency, {}))
    seconds = time.monotonic() - started
    metrics = measure(module, data, trainer)
    ledger = read_ledger(output / "ledger.jsonl") if plan else None
    result = result_of(cfg, plan, ledger, trainer.global_step, metrics, seconds)
    if ledger and others and (together := with_earlier(others, ledger, cfg.privacy.delta)):
        result["all_runs"] = together
    if isinstance(module, Classifier) and (found := build.default_learning_rate(cfg, plan)):
        result["learning_rate"] = found["lr"]
    if class_names := getattr(data, "class_names", None):
        result["class_names"] = [*map(str, class_names)]
    result |= released_values(module, privacy, output)
    try:
        about = save_model(cfg, plan, module, data, result, output, tracked.run_id if tracked else None)
    except Exception as error:  # the result must not be lost
        warnings.warn(f"the model could not be kept: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        if tracked:
            tracked.log_model(about, result["rounds"])
    return result
