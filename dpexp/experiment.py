"""One experiment, from a composed configuration to a trained, accounted and tracked model."""

import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp import display
from dpexp.accounting.accountants import APPROXIMATIONS, NAMES, check_delta, epsilon
from dpexp.accounting.claims import CLAIMS
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.plan import PrivacyPlan, make_plan
from dpexp.privacy.refusals import refuse_mixing_layers
from dpexp.privacy.sampling import Policy, make_policy
from dpexp.tracking import track
from dpexp.training.classifier import Classifier

DIAGNOSTICS = ("none", "unsafe")


def run(cfg: DictConfig) -> float | None:
    """Runs the experiment and returns its test accuracy (None if the model reports none).

    The output directory gets `ledger.jsonl`, `plan.json`, `epsilon.png`, the configuration, and `result.json`.

    Raises:
        ConfigError: before training, for any choice that cannot be honoured.
    """
    _quieten()
    _check(cfg)
    output = Path(HydraConfig.get().runtime.output_dir)
    pl.seed_everything(cfg.seed, verbose=False)
    data = _make("data.module", cfg.data.module)
    module = _module(cfg)
    plan = plan_for(cfg, module) if cfg.privacy.enabled else None
    callback = _callback(cfg, plan, output) if plan else None
    trainer = _trainer(cfg, plan, callback, output)
    if hasattr(data, "workers"):
        data.workers = cfg.trainer.workers
    if plan is None and hasattr(data, "batch_size"):
        data.batch_size = max(1, round(_policy(cfg).q * cfg.data.n))
    (output / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    display.announce(cfg, plan)
    with track(cfg, plan, output, accountants(cfg, plan) if plan else []) as tracked:
        trainer.logger = tracked.logger if tracked else None
        started = time.monotonic()
        try:
            trainer.fit(module, datamodule=data)
        except (KeyboardInterrupt, SystemExit):
            display.interrupted(plan, output, cfg.privacy.delta, reported(cfg))
            raise
        seconds = time.monotonic() - started
        tested = trainer.test(module, datamodule=data, verbose=False)
        metrics = {name: value for part in tested for name, value in part.items()}
        result = _result(cfg, plan, trainer.global_step, metrics, seconds, output, tracked.run_id if tracked else None)
        (output / "result.json").write_text(json.dumps(result, indent=2))
        if tracked:
            tracked.finish(result, output)
    display.conclude(result, cfg, output)
    return metrics.get("test_accuracy")


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
            devices=1,
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


def _policy(cfg: DictConfig) -> Policy:
    sampling, n = cfg.sampling, cfg.data.n
    q = sampling.q if sampling.q is not None else sampling.expected_batch_size / n
    return make_policy(sampling.policy, q, n, sampling.maximum)


def _rounds(cfg: DictConfig) -> int:
    return cfg.sampling.steps or _policy(cfg).rounds(cfg.sampling.epochs)


def _result(
    cfg: DictConfig,
    plan: PrivacyPlan | None,
    rounds: int,
    metrics: dict[str, float],
    seconds: float,
    output: Path,
    run_id: str | None,
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "private": is_private(cfg),
        "rounds": rounds,
        "metrics": metrics,
        "seconds": round(seconds, 3),
        "mlflow_run_id": run_id,
    }
    if plan is not None:
        ledger = read_ledger(output / "ledger.jsonl")
        result |= {
            "epsilon": {name: epsilon(ledger, cfg.privacy.delta, name) for name in accountants(cfg, plan)},
            "delta": cfg.privacy.delta,
            "adjacency": plan.adjacency,
            "noise_multiplier": plan.noise_multiplier,
            "q": plan.sampling.q,
            "n": plan.n,
            "groups": {group.name: {"S": group.S, "sigma": group.sigma, "share": group.share} for group in plan.groups},
        }
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
