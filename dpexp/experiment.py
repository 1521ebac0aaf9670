"""One experiment, from a composed configuration to a trained, accounted and tracked model."""

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp import display
from dpexp.accounting.accountants import APPROXIMATIONS, NAMES, check_delta, epsilon
from dpexp.accounting.claims import CLAIMS
from dpexp.accounting.ledger import Ledger, read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.plan import PrivacyPlan, make_plan
from dpexp.privacy.refusals import refuse_mixing_layers
from dpexp.privacy.sampling import Policy, make_policy
from dpexp.tracking.run import Tracked, finished_trial, track
from dpexp.training.classifier import Classifier

DIAGNOSTICS = ("none", "unsafe")


def run(cfg: DictConfig) -> float | None:
    """Runs the experiment and returns its objective (None if it has none).

    The output directory gets `ledger.jsonl`, `plan.json`, `epsilon.png`, the configuration, and `result.json`. A trial
    that an earlier start of the same sweep has finished is not run again.

    Raises:
        ConfigError: before training, for any choice that cannot be honoured.
    """
    _quieten()
    _check(cfg)
    finished = finished_trial(cfg) if cfg.tracking.resume else None
    if finished is not None:
        display.skipped(finished.info.run_name)
        metrics = finished.data.metrics
        return metrics.get(f"epsilon_{reported(cfg)}" if cfg.objective == "epsilon" else cfg.objective)
    _use_threads(cfg)
    output = Path(HydraConfig.get().runtime.output_dir)
    pl.seed_everything(cfg.seed, verbose=False)
    data = _make("data.module", cfg.data.module)
    module = _module(cfg)
    plan = plan_for(cfg, module) if cfg.privacy.enabled else None
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    display.announce(cfg, plan)
    with track(cfg, plan, output, accountants(cfg, plan) if plan else []) as tracked:
        result = _trained(cfg, plan, module, data, output, tracked) if cfg.train else _planned(cfg, plan)
        result["mlflow_run_id"] = tracked.run_id if tracked else None
        (output / "result.json").write_text(json.dumps(result, indent=2))
        if tracked:
            tracked.finish(result)
    display.conclude(result, cfg, output)
    return _objective(cfg, plan, result)


def _trained(
    cfg: DictConfig,
    plan: PrivacyPlan | None,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    output: Path,
    tracked: Tracked | None,
) -> dict[str, Any]:
    callback = _callback(cfg, plan, output) if plan else None
    trainer = _trainer(cfg, plan, callback, output)
    if tracked:
        trainer.logger = tracked.logger
        tracked.logger.rounds = lambda: trainer.global_step
    if hasattr(data, "workers"):
        data.workers = cfg.trainer.workers
    if plan is None and hasattr(data, "batch_size"):
        data.batch_size = max(1, round(_policy(cfg).q * cfg.data.n))
    started = time.monotonic()
    try:
        trainer.fit(module, datamodule=data)
    except (KeyboardInterrupt, SystemExit):
        display.interrupted(plan, output, cfg.privacy.delta, reported(cfg))
        raise
    seconds = time.monotonic() - started
    tested = trainer.test(module, datamodule=data, verbose=False)
    metrics = {name: value for part in tested for name, value in part.items()}
    ledger = read_ledger(output / "ledger.jsonl") if plan else None
    return _result(cfg, plan, ledger, trainer.global_step, metrics, seconds)


def _planned(cfg: DictConfig, plan: PrivacyPlan | None) -> dict[str, Any]:
    """train=false: what training would cost."""
    if plan is None:
        raise ConfigError("train=false has nothing to plan with privacy.enabled=false.")
    return _result(cfg, plan, plan.ledger(), plan.rounds, {}, 0.0)


def _objective(cfg: DictConfig, plan: PrivacyPlan | None, result: dict[str, Any]) -> float | None:
    known = dict(result["metrics"])
    if "epsilon" in result:
        known["epsilon"] = next(iter(result["epsilon"].values()))
    if plan is not None and plan.calibration is not None:
        known[plan.calibration.knob] = plan.calibration.value
    if cfg.objective not in known and cfg.objective != "test_accuracy":
        raise ConfigError(f"objective={cfg.objective} is not among what this job gives: {', '.join(known)}.")
    return known.get(cfg.objective)


def _use_threads(cfg: DictConfig) -> None:
    """Parallel trials share the cores instead of fighting for them."""
    threads = cfg.trainer.threads
    hydra = HydraConfig.get()
    if threads is None and hydra.mode == RunMode.MULTIRUN:
        launcher = hydra.runtime.choices.get("hydra/launcher", "basic")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if launcher == "joblib":
            jobs = hydra.launcher.n_jobs
            threads = max(1, cores // (cores if jobs < 1 else jobs))
        elif launcher != "basic":
            threads = hydra.launcher.get("cpus_per_task") or 1
    if threads is not None:
        torch.set_num_threads(threads)


def planned(cfg: DictConfig) -> PrivacyPlan:
    """The plan of a private job, which is not trained.

    Raises:
        ConfigError: for any choice that cannot be honoured, or a job that is not private.
    """
    _check(cfg)
    if not is_private(cfg):
        raise ConfigError(
            f"it is not private with privacy.enabled={cfg.privacy.enabled}, "
            f"privacy.noise_seed={cfg.privacy.noise_seed} and diagnostics={cfg.diagnostics}."
        )
    return plan_for(cfg, _module(cfg))


def plan_for(cfg: DictConfig, module: pl.LightningModule) -> PrivacyPlan:
    """The privacy plan that a configuration asks for."""
    sampling = cfg.sampling
    group, bound, mechanism, allocation = (
        _make(section, cfg[section]) for section in ("group", "bound", "mechanism", "allocation")
    )
    return make_plan(
        module,
        n=cfg.data.n,
        sampling=sampling.policy,
        q=sampling.q,
        expected_batch_size=sampling.expected_batch_size,
        maximum=sampling.maximum,
        steps=sampling.steps,
        epochs=sampling.epochs,
        epsilon=cfg.privacy.epsilon,
        noise_multiplier=cfg.privacy.noise_multiplier,
        delta=cfg.privacy.delta,
        adjacency=cfg.privacy.adjacency,
        group=group,
        vectors_by=cfg.vectors,
        bound=bound,
        mechanism=mechanism,
        allocation=allocation,
        schedules=OmegaConf.to_container(cfg.schedule, resolve=True),  # type: ignore[arg-type]
        accountant=reported(cfg),
        calibrate=cfg.calibrate,
    )


def reported(cfg: DictConfig) -> str:
    """The accountant whose ε is reported and calibrated with."""
    return str(cfg.accountant.names[0]) if cfg.accountant.names[0] != "all" else "pld"


def accountants(cfg: DictConfig, plan: PrivacyPlan) -> list[str]:
    """Those asked for, the reported one first; `all` stands for every one that has a bound for the plan's claim."""
    if "all" not in cfg.accountant.names:
        return list(cfg.accountant.names)
    return list(CLAIMS[plan.sampling.name][plan.adjacency])


def _check(cfg: DictConfig) -> None:
    try:
        OmegaConf.to_container(cfg, resolve=True)
        missing = sorted(OmegaConf.missing_keys(cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    if missing:
        raise ConfigError(f"{missing[0]} must be given.")
    if cfg.diagnostics not in DIAGNOSTICS:
        raise ConfigError(f"diagnostics={cfg.diagnostics} is unknown; choose one of {', '.join(DIAGNOSTICS)}.")
    names = list(cfg.accountant.names)
    if not names or any(name not in (*NAMES, "all") for name in names):
        raise ConfigError(f"accountant.names={names} must be among {', '.join(NAMES)}; or [all].")
    if names[0] in APPROXIMATIONS:
        raise ConfigError(
            f"accountant.names={names}: {names[0]} is an approximation, which may lie below the true ε, so it cannot "
            "be the one reported; put another first."
        )
    check_delta(cfg.privacy.delta)
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"seed={cfg.seed} must lie between 0 and 2^32 - 1.")
    if cfg.trainer.threads is not None and cfg.trainer.threads < 1:
        raise ConfigError(f"trainer.threads={cfg.trainer.threads} must be at least 1.")
    for name in ("evaluations", "workers"):
        if cfg.trainer[name] < 0:
            raise ConfigError(f"trainer.{name}={cfg.trainer[name]} must be at least 0.")


def _make(section: str, node: Any, **arguments: Any) -> Any:
    """Instantiates a `_target_` section; a mistake in it becomes a sentence."""
    try:
        return instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        cause = error.__cause__ or str(error).splitlines()[0]
        target = node.get("_target_") if node else None
        raise ConfigError(f"{section}: {target} cannot be made: {' '.join(str(cause).split())}.") from error


def _module(cfg: DictConfig) -> pl.LightningModule:
    model = _make("model", cfg.model)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model: {cfg.model._target_} gives a {type(model).__name__}, not a torch.nn.Module.")
    if cfg.privacy.enabled:
        refuse_mixing_layers(model)
    if isinstance(model, pl.LightningModule):
        return model
    module = Classifier(
        model,
        _make("optimizer", cfg.optimizer, _partial_=True),
        _make("scheduler", cfg.scheduler, _partial_=True) if cfg.scheduler else None,
    )
    try:
        module.configure_optimizers()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer or scheduler: {error}.") from error
    return module


def _callback(cfg: DictConfig, plan: PrivacyPlan, output: Path) -> PrivacyCallback:
    return PrivacyCallback(
        plan,
        output / "ledger.jsonl",
        delta=cfg.privacy.delta,
        accountant=accountants(cfg, plan)[0],
        physical_batch=cfg.trainer.physical_batch,
        noise_seed=cfg.privacy.noise_seed,
        unsafe_diagnostics=cfg.diagnostics == "unsafe",
    )


def _trainer(cfg: DictConfig, plan: PrivacyPlan | None, callback: PrivacyCallback | None, output: Path) -> pl.Trainer:
    policy = plan.sampling if plan else _policy(cfg)
    rounds = plan.rounds if plan else _rounds(cfg)
    per_epoch = max(1, round(policy.rounds_per_epoch))
    bar = display.RoundBar(rounds, callback)
    try:
        return pl.Trainer(
            accelerator=cfg.trainer.accelerator,
            devices=_devices(cfg),
            precision=cfg.trainer.precision,
            max_epochs=-1,
            max_steps=rounds,
            check_val_every_n_epoch=max(1, rounds // (per_epoch * max(1, cfg.trainer.evaluations))),
            limit_val_batches=1.0 if cfg.trainer.evaluations else 0,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            logger=False,
            callbacks=[callback, bar] if callback else [bar],
            default_root_dir=output,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
    except Exception as error:  # Lightning raises many types for what is always a wrong value
        raise ConfigError(f"trainer: {error}") from error


def _devices(cfg: DictConfig) -> int | list[int]:
    """One; trials of a sweep take turns among several GPUs."""
    hydra = HydraConfig.get()
    if cfg.trainer.accelerator in ("gpu", "cuda") and hydra.mode == RunMode.MULTIRUN and torch.cuda.device_count() > 1:
        return [hydra.job.num % torch.cuda.device_count()]
    return 1


def _policy(cfg: DictConfig) -> Policy:
    sampling, n = cfg.sampling, cfg.data.n
    q = sampling.q if sampling.q is not None else sampling.expected_batch_size / n
    return make_policy(sampling.policy, q, n, sampling.maximum)


def _rounds(cfg: DictConfig) -> int:
    return cfg.sampling.steps or _policy(cfg).rounds(cfg.sampling.epochs)


def _result(
    cfg: DictConfig,
    plan: PrivacyPlan | None,
    ledger: Ledger | None,
    rounds: int,
    metrics: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "private": is_private(cfg),
        "trained": cfg.train,
        "rounds": rounds,
        "metrics": metrics,
        "seconds": round(seconds, 3),
    }
    if plan is not None and ledger is not None:
        result |= {
            "epsilon": {name: epsilon(ledger, cfg.privacy.delta, name) for name in accountants(cfg, plan)},
            "delta": cfg.privacy.delta,
            "adjacency": plan.adjacency,
            "noise_multiplier": plan.noise_multiplier,
            "q": plan.sampling.q,
            "n": plan.n,
            "groups": {group.name: {"S": group.S, "sigma": group.sigma, "share": group.share} for group in plan.groups},
        }
        if plan.calibration is not None:
            result["calibration"] = {"knob": plan.calibration.knob, "value": plan.calibration.value}
    return result


def is_private(cfg: DictConfig) -> bool:
    """Whether everything that the run shows is covered by its (ε, δ)."""
    return cfg.privacy.enabled and cfg.diagnostics == "none" and cfg.privacy.noise_seed is None


def _quieten() -> None:
    """Lightning's advice is for those who write the training loop."""
    import logging

    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (".*does not have many workers.*", ".*LeafSpec.*", ".*GPU available but not used.*"):
        warnings.filterwarnings("ignore", message)
