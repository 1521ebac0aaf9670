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
from dpexp.commands.job import Job
from dpexp.privacy.audit_canaries import Attack, Canaries, Contributions, nearly_noiseless, unsampled
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.reporting.run_figures import audit_figure
from dpexp.reporting.terminal import RoundBar
from dpexp.tracking.job_folder import LEDGER
from dpexp.training.callbacks import Checkpoints, LastCheckpoint, Watch

FOLDER = "audit"  # in the job's folder
NOISE, SAMPLES = "noise", "samples"  # in it, each with the ledger of a training


def audit_plan(job: Job, claimed: float) -> tuple[Audit, Figure]:
    """Trains two variants of a job's plan with canaries, one without sampling and one with almost no noise.

    What they release in the canaries' coordinates is tested against the claim of the first variant's ledger. The models
    are discarded.

    Returns:
        the results, and their figure, with the ε `claimed` for the job.
    """
    assert job.plan is not None
    cfg, plan, folder = copy.deepcopy(job.cfg), job.plan, job.output / FOLDER
    cfg.callbacks, cfg.logger = {}, {}  # loggers would show what is released with next to no noise
    cfg.checkpoint.update(every_n_rounds=None, resume=False)
    cfg.trainer.num_evaluations = 0
    seed = cfg.privacy.noise_seed
    coins = KeyStream() if seed is None else KeyStream.known(seed, "canaries", 0)
    level = level_of_checks(cfg.audit.confidence, len(plan.groups) + 5)
    attack, contributions = Attack(), Contributions()
    canaries = _train_with_canaries(cfg, unsampled(plan), coins, attack, folder / NOISE)
    noiseless = nearly_noiseless(plan, canaries.count, level)
    sampled = _train_with_canaries(cfg, noiseless, None, contributions, folder / SAMPLES)
    deltas = sorted({*cfg.audit.deltas, cfg.privacy.delta})
    ledger, samples = (read_ledger(folder / name / LEDGER) for name in (NOISE, SAMPLES))
    counted = releases(canaries.releases + sampled.releases, concatenate([ledger, samples]))
    checks = [*attack.checks(level), *contributions.checks(level), counted]
    accountant = job.accountants[0]
    found = judged(
        attack.scores(canaries.count), canaries.included, ledger, deltas, level, checks, accountant,
        cfg.audit.confidence, canaries.middle,
    )  # fmt: skip
    return found, audit_figure(found, ledger, f"ε = {up(claimed, 4)} at δ = {up(cfg.privacy.delta, 4)}", accountant)


def _train_with_canaries(
    cfg: DictConfig, plan: PrivacyPlan, coins: KeyStream | None, reader: Attack | Contributions, folder: Path
) -> Canaries:
    """Trains once; `reader` reads the releases in the coordinates of the canaries, which are returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LEDGER).unlink(missing_ok=True)  # of an interrupted audit, which has shown nothing
    canaries: Canaries

    def plan_with_canaries(_: DictConfig, module: pl.LightningModule) -> PrivacyPlan:
        nonlocal canaries
        canaries = Canaries(module, plan, cfg.audit.num_canaries, coins, reader)
        return canaries.plan

    job = Job.of(cfg, folder, plan_with_canaries)
    canaries.put_into(job.data)
    callbacks: list[pl.Callback] = job.trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [one for one in callbacks if not isinstance(one, Checkpoints | LastCheckpoint | Watch)]
    callbacks.insert(callbacks.index(job.privacy) + 1, canaries)  # type: ignore[arg-type]
    for callback in callbacks:
        if isinstance(callback, RoundBar):
            callback.purpose = "audit"  # whose ε is not the job's
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "data.*(the training set holds|is not used).*")  # because of the canaries
        job.fit()
    return canaries
