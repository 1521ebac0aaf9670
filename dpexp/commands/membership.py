"""What a membership attacker gets of a job's models: `audit=mislabelled`.

The plan is carried out several times more, as the job does it, with canaries among the records: test records with a
wrong label. The attacker sees the losses of the final models.
"""

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
from dpexp.accounting.auditing import Mask
from dpexp.accounting.ledger import Ledger, joined, read_ledger
from dpexp.accounting.membership import Membership, likelihood_ratios, log_odds, membership
from dpexp.accounting.renyi import Array
from dpexp.commands.audit import FOLDER, keeping_nothing, undisturbed
from dpexp.commands.building import (
    accountants,
    add_scheduler,
    callback_for,
    make,
    module_of,
    rounds_of,
    set_batch_size,
)
from dpexp.privacy.keystream import KeyStream
from dpexp.privacy.mislabelled import Canary, mislabelled, one_by_one, put_into
from dpexp.privacy.plan import PrivacyPlan
from dpexp.privacy.silence import mute
from dpexp.showing.membership import membership_figure
from dpexp.tracking.underway import begun

_SUMMARY = "shown.json"


def canaries_of(cfg: DictConfig) -> list[Canary]:
    """Raises:
    ConfigError: the data have no records that could be canaries.
    """
    pl.seed_everything(cfg.seed, verbose=False)
    return mislabelled(make("data.module", cfg.data.module), cfg.audit.canaries_count, cfg.seed, cfg.data.classes)


def attacked(cfg: DictConfig, plan: PrivacyPlan | None, output: Path) -> tuple[Membership, Figure]:
    """Carries out a job's plan `audit.attacked` + `audit.references` times more, and judges what an attacker finds.

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
    first = cfg.audit.attacked
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
    secret = np.array([stream.words(k).lt(2**62).numpy() for _ in range(cfg.audit.attacked)])
    half = np.arange(cfg.audit.references)[:, None] < cfg.audit.references // 2
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
