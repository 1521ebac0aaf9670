"""Audits of a job: an attack on its plan, and membership inference of mislabelled records (see docs/audit.md)."""

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from dpexp._lightning_compat import pl
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import Audit, Mask, level_of_checks
from dpexp.accounting.auditing import audit as judged
from dpexp.accounting.composition import Array
from dpexp.accounting.ledger import Ledger, concatenate, read_ledger
from dpexp.accounting.membership_inference import Membership, likelihood_ratios, log_odds, membership
from dpexp.commands.build import accountants, add_scheduler, make, module_of, rounds_of, set_batch_size
from dpexp.commands.trainer import callback_for, trainer_for
from dpexp.privacy.audit_canaries import Attack, Canaries, Contributions, nearly_noiseless, unsampled
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.mislabelled_canaries import Canary, mislabelled, one_by_one, put_into
from dpexp.privacy.muted_logging import mute
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.reporting.audit_figures import audit_figure, membership_figure
from dpexp.reporting.terminal import RoundBar
from dpexp.tracking.job_folder import training_marker
from dpexp.training.callbacks import Checkpoints, LastCheckpoint, Watch

FOLDER = "audit"  # in the job's folder
_SUMMARY = "shown.json"


def audit_plan(cfg: DictConfig, plan: PrivacyPlan, output: Path) -> tuple[Audit, Figure]:
    """Trains two variants of a job's plan with canaries, one without sampling and one with almost no noise.

    What they release in the canaries' coordinates is tested against the claim of the first variant's ledger. The models
    are discarded.

    Returns:
        the results, and their figure.
    """
    cfg, folder = _training_only(cfg), output / FOLDER
    folder.mkdir(exist_ok=True)
    seed = cfg.privacy.noise_seed
    coins = KeyStream() if seed is None else KeyStream.known(seed, "canaries", 0)
    level = level_of_checks(cfg.audit.confidence, len(plan.groups) + 4)
    attack, contributions = Attack(), Contributions()
    canaries = _train_with_canaries(cfg, unsampled(plan), coins, attack, folder / "ledger.jsonl")
    _train_with_canaries(
        cfg, nearly_noiseless(plan, canaries.count, level), None, contributions, folder / "samples.jsonl"
    )
    deltas = sorted({*cfg.audit.deltas, cfg.privacy.delta})
    ledger = read_ledger(folder / "ledger.jsonl")
    accountant = accountants(cfg, plan)[0]
    found = judged(
        attack.scores(canaries.count), canaries.included, ledger, deltas, accountant, cfg.audit.confidence,
        canaries.middle, [*attack.checks(level), *contributions.checks(level)],
    )  # fmt: skip
    return found, audit_figure(found, ledger, accountant)


def _train_with_canaries(
    cfg: DictConfig, plan: PrivacyPlan, coins: KeyStream | None, reader: Attack | Contributions, ledger: Path
) -> Canaries:
    """Trains once; `reader` reads the releases in the coordinates of the canaries, which are returned."""
    ledger.unlink(missing_ok=True)  # of an interrupted audit, which has shown nothing
    pl.seed_everything(cfg.seed, verbose=False)
    module = module_of(cfg)
    data = make("data.module", cfg.data.module)
    canaries = Canaries(module, plan, cfg.audit.num_canaries, coins, reader)
    canaries.put_into(data)
    add_scheduler(cfg, module, plan.rounds)
    privacy = callback_for(cfg, canaries.plan, ledger)
    trainer = _silent_trainer(cfg, canaries.plan, privacy, ledger.parent)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.insert(callbacks.index(privacy) + 1, canaries)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "data.*the training set holds.*")  # because of the canaries
        trainer.fit(module, datamodule=data)
    return canaries


def canaries_of(cfg: DictConfig) -> list[Canary]:
    """The mislabelled records of a membership audit.

    Raises:
        ConfigError: the data have no records that could be canaries.
    """
    pl.seed_everything(cfg.seed, verbose=False)
    return mislabelled(make("data.module", cfg.data.module), cfg.audit.num_canaries, cfg.seed, cfg.data.classes)


def audit_membership(cfg: DictConfig, plan: PrivacyPlan | None, output: Path) -> tuple[Membership, Figure]:
    """Membership inference: trains `audit.target_models` + `audit.shadow_models` models more, and attacks the former.

    The models are discarded. The results are computed from all of them, and cost what all ledgers cost together.

    Args:
        plan: None for a job without privacy, which claims nothing.

    Returns:
        the results, and their figure.
    """
    cfg, folder = _training_only(cfg), output / FOLDER
    canaries = canaries_of(cfg)
    coins = _coins(cfg, len(canaries))
    folder.mkdir(exist_ok=True)
    ledgers = [folder / f"ledger_{k}.jsonl" for k in range(len(coins))]
    for ledger in ledgers:
        ledger.unlink(missing_ok=True)  # of an interrupted audit, which has shown nothing
    with training_marker(output, lambda: ledgers[0].exists()):
        trainings = enumerate(zip(coins, ledgers, strict=True))
        found = np.array([log_odds(_losses(cfg, plan, canaries, *training, k)) for k, training in trainings])
    first = cfg.audit.target_models
    scores = likelihood_ratios(found[:first], found[first:], coins[first:])
    deltas = sorted({*cfg.audit.deltas, cfg.privacy.delta})
    if plan is None:
        result = membership(scores, coins[:first], None, deltas, confidence=cfg.audit.confidence)
        return result, membership_figure(result, None)
    written, accountant = [read_ledger(ledger) for ledger in ledgers], accountants(cfg, plan)[0]
    claimed = max(written[:first], key=len)  # trainer.max_time may end some of them early
    spent = _epsilon_of_all(cfg, plan, output, written)
    result = membership(scores, coins[:first], claimed, deltas, accountant, cfg.audit.confidence, spent)
    return result, membership_figure(result, claimed, accountant)


def _coins(cfg: DictConfig, k: int) -> Mask:
    """Which canaries each training includes [trainings, k]: target models first, with secret fair coins; then shadow
    models, public, with each canary in half of them."""
    seed = cfg.privacy.noise_seed
    stream = KeyStream() if seed is None else KeyStream.known(seed, "canaries", 0)
    secret = np.array([stream.words(k).lt(2**62).numpy() for _ in range(cfg.audit.target_models)])
    half = np.arange(cfg.audit.shadow_models)[:, None] < cfg.audit.shadow_models // 2
    public = np.random.default_rng(cfg.seed).permuted(np.repeat(half, k, axis=1), axis=0)
    return np.concatenate([secret, public])


def _losses(
    cfg: DictConfig, plan: PrivacyPlan | None, canaries: list[Canary], included: Mask, ledger: Path, number: int
) -> Array:
    """The losses [k] of the canaries under the final model of one training."""
    if cfg.privacy.noise_seed is not None:  # each training's noise must be its own
        cfg = cfg.copy()
        cfg.privacy.noise_seed += 1 + number
    pl.seed_everything(cfg.seed, verbose=False)
    module = module_of(cfg)
    data = make("data.module", cfg.data.module)
    if plan is None:
        set_batch_size(cfg, data)
    put_into(data, canaries, included.tolist(), plan)
    add_scheduler(cfg, module, plan.rounds if plan else rounds_of(cfg))
    privacy = callback_for(cfg, plan, ledger) if plan else None
    trainer = _silent_trainer(cfg, plan, privacy, ledger.parent)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "data.n=.*")  # because of the canaries
        trainer.fit(module, datamodule=data)
    mute(module)
    module.predict_step = module.training_step  # type: ignore[assignment, method-assign]  # Lightning predicts without gradients
    losses = trainer.predict(module, one_by_one(data, canaries))
    return np.array([_loss(loss) for loss in losses or []])


def _loss(returned: Any) -> float:
    """The loss that `training_step` returned; NaN for a record without one."""
    loss = returned["loss"] if isinstance(returned, dict) else returned
    return float(loss) if isinstance(loss, Tensor) else math.nan


def _epsilon_of_all(cfg: DictConfig, plan: PrivacyPlan, output: Path, written: list[Ledger]) -> float:
    """ε of everything shown: of the job's own training and of those of its audit, composed."""
    own = [read_ledger(output / "ledger.jsonl")] if cfg.train else []
    return epsilon(concatenate(own + written), cfg.privacy.delta, accountants(cfg, plan)[0])


def save_summary(found: Membership, output: Path) -> None:
    """Saves the results of a membership audit, before any is shown: from then on it is not repeated."""
    part = output / FOLDER / f"{_SUMMARY}.part"
    part.write_text(json.dumps(found.summary()))
    part.replace(output / FOLDER / _SUMMARY)


def earlier_summary(cfg: DictConfig, plan: PrivacyPlan | None, output: Path) -> dict[str, float] | None:
    """The results that an earlier start of the job has shown; None if none. A repeated audit would release more."""
    if not (output / FOLDER / _SUMMARY).exists():
        return None
    found: dict[str, float] = json.loads((output / FOLDER / _SUMMARY).read_text())
    if plan is not None:
        written = [read_ledger(ledger) for ledger in sorted((output / FOLDER).glob("ledger_*.jsonl"))]
        found["epsilon_together"] = _epsilon_of_all(cfg, plan, output, written)
    return found


def _training_only(cfg: DictConfig) -> DictConfig:
    """The configuration of an audit's trainings: without callbacks, checkpoints and validation."""
    cfg = copy.deepcopy(cfg)
    cfg.callbacks = {}
    cfg.checkpoint.every_n_rounds, cfg.checkpoint.resume = None, False
    cfg.trainer.num_evaluations = 0
    return cfg


def _silent_trainer(
    cfg: DictConfig, plan: PrivacyPlan | None, privacy: PrivacyCallback | None, folder: Path
) -> pl.Trainer:  # fmt: skip
    """The job's Trainer, without the callbacks that save models or show released values."""
    trainer = trainer_for(cfg, plan, privacy, folder)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [one for one in callbacks if not isinstance(one, Checkpoints | LastCheckpoint | Watch)]
    for callback in callbacks:
        if isinstance(callback, RoundBar):
            callback.shows_values = False
    return trainer
