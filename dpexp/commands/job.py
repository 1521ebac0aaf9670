"""A job: what a configuration describes, made once, before anything is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dpexp._lightning_compat import pl
from dpexp.commands import build, processes
from dpexp.commands.objective import check_objective
from dpexp.commands.trainer import callback_for, trainer_for
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.tracking.job_folder import CHECKPOINT, LEDGER
from dpexp.training.callbacks import HeldOut
from dpexp.training.classifier import Classifier
from dpexp.training.data.raw import InMemory


@dataclass(frozen=True)
class Job:
    """What goes once through a job. A trial, a worker, a training of an audit, and what is only checked are jobs, too.

    Attributes:
        cfg: the configuration, which only commands read.
        output: the job's folder.
        plan, privacy: the privacy plan, and the callback that carries it out; None without privacy.
        accountants: those whose ε are stated, the reported one first; none without privacy.
        learning_rate: what optimizer.lr=auto means for the plan; None if it is given.
        processes: how many train together.
    """

    cfg: DictConfig
    output: Path
    module: pl.LightningModule
    data: pl.LightningDataModule
    plan: PrivacyPlan | None
    privacy: PrivacyCallback | None
    trainer: pl.Trainer
    accountants: list[str]
    learning_rate: float | None
    processes: int

    @classmethod
    def of(
        cls,
        cfg: DictConfig,
        output: Path,
        plan_of: Callable[[DictConfig, pl.LightningModule], PrivacyPlan] = build.plan_for,
    ) -> "Job":
        """Makes everything that training needs.

        Args:
            plan_of: the plan of a private job with a module.

        Raises:
            ConfigError: for any choice that cannot be honoured.
        """
        count = processes.join_and_count(cfg)
        if cfg.debug:  # three rounds without MLflow
            cfg.sampling.steps, cfg.sampling.epochs, cfg.tracking.uri = 3, None, None
            OmegaConf.update(cfg, "trainer.detect_anomaly", True, force_add=True)
        pl.seed_everything(cfg.seed, verbose=False)
        build.check_files(cfg)
        module = build.module_of(cfg, load_weights=not cfg.checkpoint.resume)  # right after the seed: reproducible
        data = build.data_of(cfg)
        plan = plan_of(cfg, module) if cfg.privacy.enabled else None
        build.set_batch_size(cfg, data, plan)
        learning_rate = build.add_optimizer(cfg, module, plan)
        names = build.accountants(cfg, plan) if plan else []
        privacy = callback_for(cfg, plan, names[0], output / LEDGER) if plan else None
        trainer = trainer_for(cfg, plan, privacy, output, count)
        if isinstance(data, InMemory):
            data.usable_only = plan is None
            if plan is None and isinstance(module, Classifier):
                # After the preprocessing, which takes all records, and before the checkpoint of the last round.
                trainer.callbacks.insert(2, HeldOut())  # type: ignore[attr-defined]
        check_objective(cfg, module, trainer)
        return cls(cfg, output, module, data, plan, privacy, trainer, names, learning_rate, count)

    @property
    def checkpoint(self) -> Path | None:
        """That of the training that goes on; None: it begins."""
        return self.output / CHECKPOINT if self.cfg.checkpoint.resume else None

    def fit(self) -> None:
        """Trains, from the checkpoint on if there is one."""
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=self.checkpoint)
