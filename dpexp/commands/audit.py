"""`python -m dpexp audit [OVERRIDE ...]` attacks a job's plan, and prints what was found beside what is claimed.

It takes what a job takes: `audit group=conv_fc mechanism=joint sampling=fixed_size`. Canaries are put into the data,
with gradients in coordinates of their own; callback, Trainer, sampler, noise and ledger are the job's. The status is
not 0 if a claim is refuted. An audit can refute a claim, and never proves one. A job with audit=dirac trains, and is
then audited.
"""

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.auditing import Audit, Mask, level_of_checks
from dpexp.accounting.auditing import audit as judged
from dpexp.accounting.ledger import Ledger, joined, read_ledger
from dpexp.accounting.membership_inference import Membership, likelihood_ratios, log_odds, membership
from dpexp.accounting.rdp import Array
from dpexp.commands.build import accountants, add_scheduler, callback_for, make, module_of, rounds_of, set_batch_size
from dpexp.commands.trainer import trainer_for
from dpexp.privacy.audit_canaries import Attack, Canaries, Contributions, nearly_noiseless, unsampled
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.mislabelled_canaries import Canary, mislabelled, one_by_one, put_into
from dpexp.privacy.muted_logging import mute
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.reporting.audit_figures import attack as attack_figure
from dpexp.reporting.audit_figures import membership_figure
from dpexp.reporting.terminal import RoundBar
from dpexp.tracking.job_folder import begun
from dpexp.training.callbacks import Checkpoints, LastCheckpoint, Watch

_SUMMARY = "shown.json"


def canaries_of(cfg: DictConfig) -> list[Canary]:
    """Raises:
    ConfigError: the data have no records that could be canaries.
    """
    pl.seed_everything(cfg.seed, verbose=False)
    return mislabelled(make("data.module", cfg.data.module), cfg.audit.num_canaries, cfg.seed, cfg.data.classes)


def attacked(cfg: DictConfig, plan: PrivacyPlan | None, output: Path) -> tuple[Membership, Figure]:
    """Carries out a job's plan `audit.target_models` + `audit.shadow_models` times more, and judges what an attacker
    finds.

    The models are thrown away. What is shown was computed from those of the attacked trainings and of the reference
    trainings, so that it costs what all their ledgers record together.

    Args:
        plan: None of a job without privacy, of which nothing is claimed.

    Returns:
        what came of it, and its figure.
    """
    cfg, folder = undisturbed(cfg), output / FOLDER
    canaries = canaries_of(cfg)
    coins = _coins(cfg, len(canaries))
    folder.mkdir(exist_ok=True)
    ledgers = [folder / f"ledger_{k}.jsonl" for k in range(len(coins))]
    for ledger in ledgers:
        ledger.unlink(missing_ok=True)  # of an audit that was interrupted: nothing of it was shown
    with begun(output, lambda: ledgers[0].exists()):
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
    spent = _together(cfg, plan, output, written)
    result = membership(scores, coins[:first], claimed, deltas, accountant, cfg.audit.confidence, spent)
    return result, membership_figure(result, claimed, accountant)


def keep_summary(found: Membership, output: Path) -> None:
    """To be called before anything of it is shown: from then on the audit is not repeated."""
    beside = output / FOLDER / f"{_SUMMARY}.part"
    beside.write_text(json.dumps(found.summary()))
    beside.replace(output / FOLDER / _SUMMARY)


def attacked_before(cfg: DictConfig, plan: PrivacyPlan | None, output: Path) -> dict[str, float] | None:
    """What an earlier start of the job has shown of its audit, if it has: to repeat it would be to release more."""
    if not (output / FOLDER / _SUMMARY).exists():
        return None
    found: dict[str, float] = json.loads((output / FOLDER / _SUMMARY).read_text())
    if plan is not None:
        written = [read_ledger(ledger) for ledger in sorted((output / FOLDER).glob("ledger_*.jsonl"))]
        found["epsilon_together"] = _together(cfg, plan, output, written)
    return found


def _together(cfg: DictConfig, plan: PrivacyPlan, output: Path, written: list[Ledger]) -> float:
    """ε of all that is shown: of the job's own training and of its audit's."""
    own = [read_ledger(output / "ledger.jsonl")] if cfg.train else []
    return epsilon(joined(own + written), cfg.privacy.delta, accountants(cfg, plan)[0])


def _coins(cfg: DictConfig, k: int) -> Mask:
    """[trainings, k]: fair and secret of the attacked ones; of the reference trainings, which come behind them, public,
    and each canary in half of them."""
    seed = cfg.privacy.noise_seed
    stream = KeyStream() if seed is None else KeyStream.known(seed, "canaries", 0)
    secret = np.array([stream.words(k).lt(2**62).numpy() for _ in range(cfg.audit.target_models)])
    half = np.arange(cfg.audit.shadow_models)[:, None] < cfg.audit.shadow_models // 2
    public = np.random.default_rng(cfg.seed).permuted(np.repeat(half, k, axis=1), axis=0)
    return np.concatenate([secret, public])


def _losses(
    cfg: DictConfig, plan: PrivacyPlan | None, canaries: list[Canary], included: Mask, ledger: Path, number: int
) -> Array:
    """What the final model of one training answers for each canary [k]."""
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
    trainer = keeping_nothing(cfg, plan, privacy, ledger.parent)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "data.n=.*")  # the canaries are more records
        trainer.fit(module, datamodule=data)
    mute(module)
    module.predict_step = module.training_step  # type: ignore[assignment, method-assign]  # without gradients, as Lightning predicts
    answers = trainer.predict(module, one_by_one(data, canaries))
    return np.array([_number(answer) for answer in answers or []])


def _number(answer: Any) -> float:
    """The loss that `training_step` returned; a record may have none."""
    loss = answer["loss"] if isinstance(answer, dict) else answer
    return float(loss) if isinstance(loss, Tensor) else math.nan


FOLDER = "audit"  # in the job's


def audited(cfg: DictConfig, plan: PrivacyPlan, output: Path) -> tuple[Audit, Figure]:
    """Carries out two variants of a job's plan with canaries, one without sampling and one with next to no noise, and
    judges what is released in their coordinates.

    The models are thrown away: of the trainings nothing is kept but the ledgers, and what the canaries show. What is
    attacked is the claim of the first ledger.

    Returns:
        what came of it, and its figure.
    """
    cfg, folder = undisturbed(cfg), output / FOLDER
    folder.mkdir(exist_ok=True)
    seed = cfg.privacy.noise_seed
    coins = KeyStream() if seed is None else KeyStream.known(seed, "canaries", 0)
    level = level_of_checks(cfg.audit.confidence, len(plan.groups) + 4)
    attack, contributions = Attack(), Contributions()
    canaries = _trained(cfg, unsampled(plan), coins, attack, folder / "ledger.jsonl")
    _trained(cfg, nearly_noiseless(plan, canaries.count, level), None, contributions, folder / "samples.jsonl")
    deltas = sorted({*cfg.audit.deltas, cfg.privacy.delta})
    ledger = read_ledger(folder / "ledger.jsonl")
    accountant = accountants(cfg, plan)[0]
    found = judged(
        attack.scores(canaries.count), canaries.included, ledger, deltas, accountant, cfg.audit.confidence,
        canaries.middle, [*attack.checks(level), *contributions.checks(level)],
    )  # fmt: skip
    return found, attack_figure(found, ledger, accountant)


def _trained(
    cfg: DictConfig, plan: PrivacyPlan, coins: KeyStream | None, reader: Attack | Contributions, ledger: Path
) -> Canaries:
    """The canaries of one training, which `reader` read."""
    ledger.unlink(missing_ok=True)  # of an audit that was interrupted: nothing of it was shown
    pl.seed_everything(cfg.seed, verbose=False)
    module = module_of(cfg)
    data = make("data.module", cfg.data.module)
    canaries = Canaries(module, plan, cfg.audit.num_canaries, coins, reader)
    canaries.put_into(data)
    add_scheduler(cfg, module, plan.rounds)
    privacy = callback_for(cfg, canaries.plan, ledger)
    trainer = keeping_nothing(cfg, canaries.plan, privacy, ledger.parent)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.insert(callbacks.index(privacy) + 1, canaries)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "data.*the training set holds.*")  # the canaries are other records
        trainer.fit(module, datamodule=data)
    return canaries


def undisturbed(cfg: DictConfig) -> DictConfig:
    """A job's configuration for the trainings of its audit: without callbacks, checkpoints and validation."""
    cfg = copy.deepcopy(cfg)
    cfg.callbacks, cfg.checkpoint.every_n_rounds, cfg.checkpoint.resume, cfg.trainer.num_evaluations = (
        {},
        None,
        False,
        0,
    )
    return cfg


def keeping_nothing(
    cfg: DictConfig, plan: PrivacyPlan | None, privacy: PrivacyCallback | None, folder: Path
) -> pl.Trainer:  # fmt: skip
    """The job's Trainer, but that it leaves no model anywhere, and shows nothing that it releases, or that its weights
    tell."""
    trainer = trainer_for(cfg, plan, privacy, folder)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [one for one in callbacks if not isinstance(one, Checkpoints | LastCheckpoint | Watch)]
    for callback in callbacks:
        if isinstance(callback, RoundBar):
            callback.tells_values = False
    return trainer
