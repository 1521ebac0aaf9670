"""`python -m dpexp audit [OVERRIDE ...]` attacks a job's plan, and prints what was found beside what is claimed.

It takes what a job takes: `audit group=conv_fc mechanism=joint sampling=fixed_size`. Canaries are put into the data,
with gradients in coordinates of their own; callback, Trainer, sampler, noise and ledger are the job's. The status is
not 0 if a claim is refuted. An audit can refute a claim, and never proves one. A job with audit=dirac trains, and is
then audited.
"""

import copy
import warnings
from pathlib import Path

import pytorch_lightning as pl
from matplotlib.figure import Figure
from omegaconf import DictConfig

from dpexp.accounting.auditing import Audit, level_of_checks
from dpexp.accounting.auditing import audit as judged
from dpexp.accounting.ledger import read_ledger
from dpexp.commands.building import accountants, add_scheduler, callback_for, make, module_of
from dpexp.commands.lightning import trainer_for
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.canaries import Attack, Canaries, Contributions, nearly_noiseless, unsampled
from dpexp.privacy.keystream import KeyStream
from dpexp.privacy.plan import PrivacyPlan
from dpexp.showing.attack import attack as attacked
from dpexp.showing.terminal import RoundBar
from dpexp.training.callbacks import Checkpoints, LastCheckpoint, Watch

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
    return found, attacked(found, ledger, accountant)


def _trained(
    cfg: DictConfig, plan: PrivacyPlan, coins: KeyStream | None, reader: Attack | Contributions, ledger: Path
) -> Canaries:
    """The canaries of one training, which `reader` read."""
    ledger.unlink(missing_ok=True)  # of an audit that was interrupted: nothing of it was shown
    pl.seed_everything(cfg.seed, verbose=False)
    module = module_of(cfg)
    data = make("data.module", cfg.data.module)
    canaries = Canaries(module, plan, cfg.audit.canaries_count, coins, reader)
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
    cfg.callbacks, cfg.checkpoint.every, cfg.checkpoint.resume, cfg.trainer.evaluations = {}, None, False, 0
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
