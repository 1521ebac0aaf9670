"""A job: what a configuration describes, made once, before anything is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dpexp._lightning_compat import pl
from dpexp.commands import build, processes
from dpexp.commands.objective import check_objective
from dpexp.commands.trainer import callback_for, trainer_for
from dpexp.commands.validate import sampling_of
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.tracking.job_folder import CHECKPOINT, LEDGER
from dpexp.training.callbacks import HeldOut
from dpexp.training.classifier import Classifier
from dpexp.training.data.raw import InMemory


@dataclass(frozen=True)
class Job:
    """All objects that one training needs, made once from its configuration.

    A single job is one, and so is a trial of a sweep, each process of a training, each training of an audit, and a job
    that is only checked.

    Attributes:
        cfg: the configuration, which only commands read. `of` sets its `rounds`, and what `debug` changes.
        output: the job's folder.
        plan: the privacy plan; None without privacy.
        privacy: the callback that carries out the plan; None without privacy.
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
            plan_of: makes the plan of a private job from its configuration and module.

        Raises:
            ConfigError: for any choice that cannot be honoured.
        """
        count = processes.join_and_count(cfg)
        if cfg.debug:
            _shorten(cfg)
        pl.seed_everything(cfg.seed, verbose=False)
        build.check_files(cfg)
        # The order matters. The module comes right after the seed, so that its weights are reproducible. The plan needs
        # the module's parameters. The rounds, the batch size and the learning rate need the plan. The trainer is last.
        module = build.module_of(cfg, load_weights=not cfg.checkpoint.resume)
        data = build.data_of(cfg)
        plan = plan_of(cfg, module) if cfg.privacy.enabled else None
        # From here on, the optimizer's section, a scheduler's ${rounds} and the trainer read the number of rounds.
        cfg.rounds = plan.rounds if plan else sampling_of(cfg).resolve(cfg.data.n)[1]
        build.set_loader_options(cfg, data, plan)
        learning_rate = build.add_optimizer(cfg, module, plan)
        names = build.accountants(cfg, plan) if plan else []
        privacy = callback_for(cfg, plan, names[0], output / LEDGER) if plan else None
        trainer = trainer_for(cfg, plan, privacy, output, count)
        if isinstance(data, InMemory):
            # In private training, a record that cannot be used keeps its place, since n is public, and contributes 0.
            data.usable_only = plan is None
            if plan is None and isinstance(module, Classifier):
                # Third: after Watch and the preprocessing, which takes all records, and before LastCheckpoint, which is
                # to save the weights that HeldOut chooses.
                trainer.callbacks.insert(2, HeldOut())  # type: ignore[attr-defined]
        check_objective(cfg, module, trainer)
        return cls(cfg, output, module, data, plan, privacy, trainer, names, learning_rate, count)

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint from which a resumed job goes on; None for a new job."""
        return self.output / CHECKPOINT if self.cfg.checkpoint.resume else None

    def fit(self) -> None:
        """Trains, from the checkpoint on if there is one."""
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=self.checkpoint)


def _shorten(cfg: DictConfig) -> None:
    """Applies `debug=true` to a configuration: three rounds, no MLflow, and PyTorch's search for NaN gradients."""
    cfg.sampling.steps, cfg.sampling.epochs, cfg.tracking.uri = 3, None, None
    OmegaConf.update(cfg, "trainer.detect_anomaly", True, force_add=True)
