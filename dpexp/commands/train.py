"""One experiment, from a composed configuration to a trained, accounted and tracked model."""

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.markup import escape

from dpexp.accounting.ledger import Ledger, concatenate, read_ledger, to_continue, write_ledger
from dpexp.commands import build, processes
from dpexp.commands.account import earlier_on_data, with_earlier
from dpexp.commands.description import config_hash, facts
from dpexp.commands.job import Job
from dpexp.commands.objective import objective
from dpexp.commands.result import measure, released_values, result_of
from dpexp.commands.saved_jobs import bare, check_resumable, privacy_state, rounds_done, save_model
from dpexp.commands.trainer import explained
from dpexp.commands.trial import trial_label
from dpexp.commands.validate import check, privacy_unit_of, replaced, reported, taken
from dpexp.config import Tracking
from dpexp.errors import ClaimRefuted, ConfigError
from dpexp.privacy.distributed import Processes
from dpexp.privacy.fit import DryRunDone
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.sampling.privacy_unit import User
from dpexp.reporting import terminal
from dpexp.tracking.job_folder import (
    CARD,
    CHECKPOINT,
    CONFIGURATION_KEY,
    DISK_RESERVE,
    LEDGER,
    PLANNED_LEDGER,
    finished_result,
)
from dpexp.tracking.provenance import without_passwords
from dpexp.tracking.record import MetricsLogger, Record, Run, recorded
from dpexp.training.callbacks import Stop
from dpexp.training.data.documents import Texts
from dpexp.training.pretrained import reserve_disk_space

# Beginnings of warnings that are shown in a single job. Trials of a sweep, which print one line each, leave them out.
_NOT_SHOWN_IN_TRIALS = (
    "the clipped gradients and noise of a round take",
    "what training_step logs",
    "compiling the step",
    "without privacy, training ends",
)


def run(cfg: DictConfig) -> float | None:
    """Runs the experiment and returns its objective (None if it has none).

    The output folder gets the configuration, the plan, the ledger and its figure, `result.json`, and the job's record.
    A trial that has finished in the sweep's folder is not run again.

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
                return _run_main(cfg, stop)
        _run_worker(cfg)
        return None


def _run_worker(cfg: DictConfig) -> None:
    """Trains with process 0, which reports everything."""
    warnings.simplefilter("ignore")
    received = Processes.of_torch().broadcast_object()
    if received is None:  # see _tell_workers
        return
    output, cfg.checkpoint.resume = received
    job = Job.of(cfg, output)
    job.fit()
    measure(job)


def _run_main(cfg: DictConfig, stop: Stop) -> float | None:
    """Finds out in process 0 what is to be run: a trial may have finished before, and a job may only be checked."""
    output = Path(HydraConfig.get().runtime.output_dir)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        finished = _finished_before(cfg, output)
        if finished is not None:
            _tell_workers(None)
            return objective(cfg.objective, finished)
        output = _folder_of_trial(output)
        if (output / CHECKPOINT).exists():
            cfg.checkpoint.resume = True
    if cfg.check:
        _try_step(cfg)
        return None
    if not cfg.train and not cfg.privacy.enabled:
        raise ConfigError("train=false has nothing to plan with privacy.enabled=false.")
    _tell_workers((output, cfg.checkpoint.resume))
    return _run_job(Job.of(cfg, output), stop)


def _tell_workers(job: tuple[Path, bool] | None) -> None:
    """Tells the other processes the job's folder and whether it resumes; None: nothing is trained, and they stop."""
    Processes.of_torch().broadcast_object(job)


def _run_job(job: Job, stop: Stop) -> float | None:
    """Trains, or only plans, and records a job or trial; returns its objective."""
    cfg, output, trial = job.cfg, job.output, trial_label(job.cfg)
    planned = _begin_folder(job)
    named = job.plan is not None and cfg.data.id is not None
    others = earlier_on_data(cfg) if named and not cfg.checkpoint.resume else []
    if trial is None:
        _print_beginning(job, planned, others)
    else:
        warnings.filterwarnings("ignore", "|".join(_NOT_SHOWN_IN_TRIALS))
    about = facts(cfg, job.plan, job.accountants)
    with recorded(output, about, cfg.checkpoint.resume, _tracking(job, planned), lambda: stop.name) as (record, run):
        if job.plan is not None and not cfg.checkpoint.resume:
            record.add_plan(job.plan)
        result = _train(job, record, run, stop, others) if cfg.train else _planned_result(job)
        refuted = _audit_and_write(job, result, record, run)
        # Once all rounds are done and the model is saved, there is nothing to resume.
        done = max(result["rounds"], job.privacy.rounds_done if job.privacy else 0)  # with those that are lost
        if done >= cfg.rounds and (output / CARD).exists():
            (output / CHECKPOINT).unlink(missing_ok=True)
        if refuted:
            raise ClaimRefuted(f"the audit refutes what is claimed: {refuted}.")
    if trial is None:
        terminal.print_result(result, output, run.address if run else None, cfg.data.class_weights is not None)
    else:
        terminal.print_trial(trial, result)
    return objective(cfg.objective, result)


def _audit_and_write(job: Job, result: dict[str, Any], record: Record, run: Run | None) -> str:
    """Audits the job, if that is asked for, and writes result.json; returns what the audit refutes, "" if nothing.

    The file is written three times, so that an error in between loses nothing and finishes nothing:

    - before the audit, which may fail;
    - with what the audit found and the id of the run, before the record has the figures of the result;
    - with the hash of the configuration, if nothing is refuted. Only then does it count as finished (see
      `finished_result`), and the same trial is not run again.
    """
    _write(result, job.output)
    refuted = _audit(job, result)
    result["mlflow_run_id"] = run.run_id if run else None
    _write(result, job.output)
    record.add_result(result)
    if not refuted:
        _write(result | {CONFIGURATION_KEY: config_hash(job.cfg)}, job.output)
    return refuted


def _finished_before(cfg: DictConfig, output: Path) -> dict[str, Any] | None:
    """The result of a trial with this configuration that has finished in the sweep's folder."""
    results = map(finished_result, output.parent.glob("*/"))
    configuration = config_hash(cfg)
    finished = next((one for one in results if one and one[CONFIGURATION_KEY] == configuration), None)
    if finished is not None:
        terminal.print_line(trial_label(cfg) or str(output), "finished before")
        if not taken(output):  # the result is in another folder; this one would look like a job that never finishes
            shutil.rmtree(output / ".hydra", ignore_errors=True)
    return finished


def _folder_of_trial(output: Path) -> Path:
    """The folder in which a trial goes on from its checkpoint, or the first that holds no run yet.

    Args:
        output: the folder that Hydra chose. After it come those of later attempts, with .2, .3, … at their ends.
    """
    chosen_by_hydra, attempt = output, 1
    while taken(output) and not (output / CHECKPOINT).exists():
        attempt += 1
        output = chosen_by_hydra.with_name(f"{chosen_by_hydra.name}.{attempt}")
    if output != chosen_by_hydra and (chosen_by_hydra / ".hydra").is_dir():
        shutil.copytree(chosen_by_hydra / ".hydra", output / ".hydra", dirs_exist_ok=True)
    return output


def _try_step(cfg: DictConfig) -> None:
    """Carries out `check=true`: reads the data, plans, tries the step of one round, and prints what a job will take."""
    with TemporaryDirectory() as folder:
        job = Job.of(cfg, Path(folder))
        if job.plan is None or job.privacy is None or job.processes > 1:
            raise ConfigError("check=true tries a private step in one process; leave check out.")
        _print_plan(job)
        terminal.print_trained_parameters(job.module)
        job.privacy.options = replace(job.privacy.options, dry_run_only=True)
        try:
            with explained(job.trainer):
                job.fit()
        except DryRunDone as done:
            terminal.print_check(str(done.step.mode), done.step.seconds_of_round, job.plan.rounds)


def _begin_folder(job: Job) -> Ledger | None:
    """Writes the configuration and the overrides, without passwords, and the planned ledger of a private job.

    Returns:
        The planned ledger; None without privacy.
    """
    cfg, output = job.cfg, job.output
    output.mkdir(parents=True, exist_ok=True)
    if cfg.checkpoint.resume:
        check_resumable(cfg, output)
    shown = cfg.copy()
    shown.tracking.update({name: text and without_passwords(text) for name, text in cfg.tracking.items()})
    (output / "config.yaml").write_text(OmegaConf.to_yaml(shown, resolve=True))
    hydra = HydraConfig.get()
    file = [] if hydra.job.config_name == "config" else [f"{hydra.job.config_name}.yaml"]
    overrides = OmegaConf.to_yaml([*file, *hydra.overrides.task])
    (output / "overrides.yaml").write_text(without_passwords(overrides))
    if job.plan is None:
        return None
    planned = _planned_ledger(job)
    write_ledger(output / PLANNED_LEDGER, planned)
    return planned


def _planned_ledger(job: Job) -> Ledger:
    """The most that the job will have released at its end, with the rounds that a resumed job repeats."""
    assert job.plan is not None
    if job.checkpoint is None:
        return job.plan.ledger()
    state = privacy_state(job.checkpoint)
    # A wrong ledger is refused before its plan counts.
    before = to_continue(job.output / LEDGER, state.get("ledger")).ledger
    since = job.plan.resumed_at(int(state.get("completed", 0)), before)
    return replace(concatenate([before, job.plan.ledger(since)]), incomplete=False)


def _tracking(job: Job, planned: Ledger | None) -> Callable[[dict[str, Any]], Run] | None:
    """Starts the run that mirrors the job's record; None: the job is not tracked."""
    if job.cfg.tracking.uri is None:
        return None
    from dpexp.tracking.run import TrackedRun  # imports MLflow

    store = Tracking(**job.cfg.tracking)
    return partial(TrackedRun, store, job.output, planned, job.cfg.checkpoint.resume, job.cfg.register)


def _train(
    job: Job, record: Record, run: Run | None, stop: Stop, others: Sequence[Ledger | None]
) -> dict[str, Any]:  # fmt: skip
    """Trains, measures and saves the model; returns the result.

    Args:
        others: the ledgers of earlier runs on the same data; None: of a run whose cost is unknown.
    """
    cfg, trainer = job.cfg, job.trainer
    trainer.callbacks.append(stop)  # type: ignore[attr-defined]
    trainer.loggers = [MetricsLogger(record.metrics), *trainer.loggers]
    for logger in trainer.loggers:
        logger.rounds = lambda: trainer.global_step  # type: ignore[attr-defined]
    started = time.monotonic()
    _fit(job)
    seconds = time.monotonic() - started
    metrics = measure(job)
    ledger = read_ledger(job.output / LEDGER) if job.plan else None
    result = result_of(job, ledger, trainer.global_step, metrics, seconds)
    if ledger and others and (together := with_earlier(others, ledger, cfg.privacy.delta)):
        result["all_runs"] = together
    if job.learning_rate is not None:
        result["learning_rate"] = job.learning_rate
    if class_names := getattr(job.data, "class_names", None):
        result["class_names"] = [*map(str, class_names)]
    result |= released_values(job)
    try:
        about = save_model(job, result, run.run_id if run else None)
    except Exception as error:  # the result must not be lost
        warnings.warn(f"the model could not be kept: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    else:
        record.add_model(about, result["rounds"], cfg.register)
    return result


def _fit(job: Job) -> None:
    """Trains; an interrupted training prints what it has spent."""
    cfg, output, privacy = job.cfg, job.output, job.privacy
    try:
        with reserve_disk_space(bare(job.module), output / DISK_RESERVE), explained(job.trainer):
            job.fit()
    except (KeyboardInterrupt, SystemExit, OSError) as error:
        if not isinstance(error, OSError) or (privacy and privacy.ledger_opened):
            terminal.print_interrupted(job.plan, output, cfg.privacy.delta, reported(cfg))
        raise
    finally:
        released = privacy is None or privacy.ledger_opened or (output / LEDGER).exists()
        if job.plan and cfg.data.id is not None and not released:
            # Nothing was released: by an empty ledger the job costs 0, and not its whole plan.
            with suppress(OSError):
                write_ledger(output / LEDGER, Ledger(job.plan.adjacency, {}))


def _planned_result(job: Job) -> dict[str, Any]:
    """The result of a job that only plans."""
    assert job.plan is not None
    return result_of(job, job.plan.ledger(), job.plan.rounds, {}, 0.0)


def _audit(job: Job, result: dict[str, Any]) -> str:
    """Attacks the plan, if the job is to be audited, and adds what was found to the result; returns what refutes it."""
    if job.plan is None or job.cfg.audit is None:
        return ""
    from dpexp.commands.audit import audit_plan

    claimed = next(iter(result["epsilon"].values()))
    found, figure = audit_plan(job, claimed)
    terminal.print_audit(found, claimed, job.cfg.privacy.delta)
    figure.savefig(job.output / "audit.png", dpi=150)
    result["audit"] = found.summary()
    return "; ".join(found.exceeded)


def _write(result: dict[str, Any], output: Path) -> None:
    (output / "result.json").write_text(json.dumps(result, indent=2))


def refuse_impossible_trial(cfg: DictConfig) -> None:
    """Refuses a trial of a sweep that cannot run, before the first trial is run. Nothing is calibrated or written."""
    build.silence_lightning()
    check(cfg)
    Job.of(cfg, Path(HydraConfig.get().sweep.dir), build.uncalibrated_plan)


# What is printed before the first round


def _print_beginning(job: Job, planned: Ledger | None, others: Sequence[Ledger | None]) -> None:
    """Prints where a resumed job goes on, the plan, earlier runs on the same data, and what is trained."""
    cfg, plan, goes_on = job.cfg, job.plan, job.checkpoint is not None
    if plan and goes_on:
        done = rounds_done(job.output / CHECKPOINT)
        terminal.print_resumed(plan, job.output, cfg.privacy.delta, reported(cfg), done, planned)
    _print_plan(job)
    if plan and cfg.data.id is not None and not goes_on:
        for line in _on_these_data(cfg, with_earlier(others, plan.ledger(), cfg.privacy.delta)):
            terminal.console.print(line, soft_wrap=True, markup=False)
    terminal.print_trained_parameters(job.module)


def _print_plan(job: Job) -> None:
    terminal.print_plan(job.plan, job.cfg.privacy.delta, replaced(job.cfg), [*_notes(job)])


def _notes(job: Job) -> Iterator[str]:
    """What is said of a plan beside its figures."""
    cfg, plan = job.cfg, job.plan
    if chosen := defaults(cfg, plan, job.learning_rate):
        yield f"By default: {'; '.join(chosen)}."
    if plan is not None and cfg.data.path is not None:
        person = cfg.data.person if cfg.data.person not in (None, "row") else None
        whom = f"all rows with one {person}" if person else f"a {plan.privacy_unit}"
        yield f"ε protects {escape(whom)} of {escape(cfg.data.path)}; test records are not protected."
    if plan is not None and isinstance(job.data, Texts):
        yield job.data.in_words(plan.sampling.q * cfg.data.n)
    if cfg.privacy.noise_seed is not None:
        yield "[bold red]privacy.noise_seed is set: whoever knows it can subtract the noise.[/]"
    if cfg.diagnostics == "unsafe":
        yield "[bold red]diagnostics=unsafe: this run shows private training statistics.[/]"


def defaults(cfg: DictConfig, plan: PrivacyPlan | None, learning_rate: float | None) -> list[str]:
    """The default values that follow from the data and the plan, in words."""
    chosen = []
    # Not resolved: an interpolation, as ${unless:…}, that still stands there shows that the user gave no value.
    given = OmegaConf.to_yaml(cfg)
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
    if learning_rate is not None:
        chosen.append(f"optimizer.lr={learning_rate:.3g}, for this number of rounds, noise and model")
    return chosen


def _on_these_data(cfg: DictConfig, together: str) -> Iterator[str]:
    """What a job and earlier ones spend together, in words, and how the data are known, if their path is their name."""
    if together:
        yield f"After this job, {together}."
    # Not resolved: the user gave no data.id, so that it is the path.
    if "id: ${resolved:" in OmegaConf.to_yaml(cfg):
        yield f"Earlier runs are known by the path {cfg.data.id}; data.id names the data wherever they are."
