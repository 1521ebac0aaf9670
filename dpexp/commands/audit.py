"""The audit of a job: an attack on its plan (see docs/audit.md)."""

import copy
import warnings
from pathlib import Path

from matplotlib.figure import Figure
from omegaconf import DictConfig

from dpexp._lightning_compat import pl
from dpexp.accounting.auditing import Audit, level_of_checks, releases
from dpexp.accounting.auditing import audit as judged
from dpexp.accounting.ledger import concatenate, read_ledger
from dpexp.accounting.rounding import up
from dpexp.commands.build import accountants, add_optimizer, data_of, module_of
from dpexp.commands.trainer import callback_for, trainer_for
from dpexp.privacy.audit_canaries import Attack, Canaries, Contributions, nearly_noiseless, unsampled
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.reporting.run_figures import audit_figure
from dpexp.reporting.terminal import RoundBar
from dpexp.training.callbacks import Checkpoints, LastCheckpoint, Watch

FOLDER = "audit"  # in the job's folder


def audit_plan(cfg: DictConfig, plan: PrivacyPlan, output: Path, claimed: float) -> tuple[Audit, Figure]:
    """Trains two variants of a job's plan with canaries, one without sampling and one with almost no noise.

    What they release in the canaries' coordinates is tested against the claim of the first variant's ledger. The models
    are discarded.

    Returns:
        the results, and their figure, with the ε `claimed` for the job.
    """
    cfg, folder = copy.deepcopy(cfg), output / FOLDER
    folder.mkdir(exist_ok=True)
    cfg.callbacks = {}
    cfg.checkpoint.update(every_n_rounds=None, resume=False)
    cfg.trainer.num_evaluations = 0
    seed = cfg.privacy.noise_seed
    coins = KeyStream() if seed is None else KeyStream.known(seed, "canaries", 0)
    level = level_of_checks(cfg.audit.confidence, len(plan.groups) + 5)
    attack, contributions = Attack(), Contributions()
    canaries = _train_with_canaries(cfg, unsampled(plan), coins, attack, folder / "ledger.jsonl")
    sampled = _train_with_canaries(
        cfg, nearly_noiseless(plan, canaries.count, level), None, contributions, folder / "samples.jsonl"
    )
    deltas = sorted({*cfg.audit.deltas, cfg.privacy.delta})
    ledger, samples = (read_ledger(folder / name) for name in ("ledger.jsonl", "samples.jsonl"))
    counted = releases(canaries.releases + sampled.releases, concatenate([ledger, samples]))
    checks = [*attack.checks(level), *contributions.checks(level), counted]
    accountant = accountants(cfg, plan)[0]
    found = judged(
        attack.scores(canaries.count), canaries.included, ledger, deltas, level, checks, accountant,
        cfg.audit.confidence, canaries.middle,
    )  # fmt: skip
    return found, audit_figure(found, ledger, f"ε = {up(claimed, 4)} at δ = {up(cfg.privacy.delta, 4)}", accountant)


def _train_with_canaries(
    cfg: DictConfig, plan: PrivacyPlan, coins: KeyStream | None, reader: Attack | Contributions, ledger: Path
) -> Canaries:
    """Trains once; `reader` reads the releases in the coordinates of the canaries, which are returned."""
    ledger.unlink(missing_ok=True)  # of an interrupted audit, which has shown nothing
    pl.seed_everything(cfg.seed, verbose=False)
    module = module_of(cfg)
    data = data_of(cfg)
    canaries = Canaries(module, plan, cfg.audit.num_canaries, coins, reader)
    canaries.put_into(data)
    add_optimizer(cfg, module, plan)
    privacy = callback_for(cfg, canaries.plan, ledger)
    trainer = trainer_for(cfg, canaries.plan, privacy, ledger.parent)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [one for one in callbacks if not isinstance(one, Checkpoints | LastCheckpoint | Watch)]
    callbacks.insert(callbacks.index(privacy) + 1, canaries)
    for callback in callbacks:
        if isinstance(callback, RoundBar):
            callback.purpose = "audit"  # whose ε is not the job's
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "data.*(the training set holds|is not used).*")  # because of the canaries
        trainer.fit(module, datamodule=data)
    return canaries
