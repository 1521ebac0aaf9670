"""A `Trainer` of transformers that trains privately."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, get_last_checkpoint

from dpexp.errors import ConfigError
from dpexp.privacy.gradients.training_step import StandIn, TrainingStep
from dpexp.privacy.muted_logging import later_settings
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.private import Private

STATE = "private.pt"
_NOT_SUPPORTED = (
    "neftune_noise_alpha", "load_best_model_at_end", "save_total_limit", "auto_find_batch_size",
)  # fmt: skip
_JOINS_ROWS = ("packing", "padding_free")
# Attributes of a Trainer that belong to the run, of which compute_loss may read numbers:
_PARTS = (
    "args", "state", "control", "callback_handler", "accelerator", "processing_class", "optimizer", "lr_scheduler",
    "private", "train_dataset", "eval_dataset", "data_collator",
)  # fmt: skip
# Its methods that must not read what compute_loss keeps:
_METHODS = ("log", "evaluate", "evaluation_loop", "prediction_step", "save_model", "train")


class PrivateTrainer(Trainer):
    """transformers.Trainer whose `train` carries out a privacy plan; evaluation, saving and logs are its own.

    `args` says what it says without privacy, but for what the plan determines: batch size, number of steps and gradient
    clipping. A record's loss is `compute_loss` of a batch of one, on a copy of the Trainer, in which its log does
    nothing. Nothing is logged of training records; `log` gets the learning rate and ε. The ledger is `ledger.jsonl` in
    `args.output_dir`.

    Args:
        plan: from `make_plan`, for this model, with a δ.
        options: of `dpexp.Private`, such as `noise_seed`.
        others: of transformers.Trainer.
    """

    def __init__(self, *args: Any, plan: PrivacyPlan, options: dict[str, Any] | None = None, **others: Any) -> None:
        super().__init__(*args, **others)
        self.plan, self._options = plan, options or {}
        self.private: Private | None = None
        self.control: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *_: Any, **__: Any) -> TrainOutput:
        """Trains for the plan's rounds; called again, it goes on where they stand.

        Args:
            resume_from_checkpoint: a folder that `save_strategy` made; True: the last one.

        Raises:
            ConfigError: the model, the data or an argument cannot be trained on privately.
        """
        self._refuse_arguments()
        args, model = self.args, self.model
        model.to(args.device)
        self.create_optimizer_and_scheduler(self.plan.rounds)
        ledger = Path(args.output_dir) / "ledger.jsonl"
        ledger.parent.mkdir(parents=True, exist_ok=True)
        self.private = private = self.private or _Rounds(self, ledger)
        if resume_from_checkpoint:
            self._resume(resume_from_checkpoint)
        loader = self.get_train_dataloader()
        self.callback_handler.optimizer, self.callback_handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.state.max_steps = self.plan.rounds
        self.state.compute_steps(args, self.plan.rounds)
        self.event("train_begin")
        for sample in private.rounds(loader.dataset, loader.collate_fn, args.dataloader_num_workers):
            if private.rounds_done % self._rounds_per_epoch == 0:
                self.event("epoch_begin")
            self.event("step_begin")
            private.step(self.compute_loss, sample)
            if not isinstance(self.lr_scheduler, ReduceLROnPlateau):
                self.lr_scheduler.step()
            self._after_step(private.rounds_done)
            model.train()
            if self.control.should_training_stop:
                break
        self.event("train_end")
        return TrainOutput(private.rounds_done, 0.0, {"epsilon": private.epsilon()})

    def event(self, name: str) -> None:
        """Calls an event of the Trainer's callbacks, such as `step_begin`."""
        call = getattr(self.callback_handler, f"on_{name}")
        self.control = call(self.args, self.state, self.control)

    @property
    def _rounds_per_epoch(self) -> int:
        return max(1, round(self.plan.sampling.rounds_per_epoch))

    def _refuse_arguments(self) -> None:
        if self.plan.delta is None:
            raise ConfigError("the plan needs a delta, at which ε is logged: Target(…, delta=1e-5).")
        if self.args.gradient_accumulation_steps != 1:
            raise ConfigError("gradient_accumulation_steps must be 1; the plan's sampling rate sets the batch size.")
        if self.args.fp16:
            raise ConfigError("fp16=True scales gradients by the data; use bf16=True, or leave it out.")
        for name in _NOT_SUPPORTED:
            if value := getattr(self.args, name, None):
                raise ConfigError(f"{name}={value} is not supported by PrivateTrainer; leave it out.")
        for name in _JOINS_ROWS:
            if getattr(self.args, name, None) or getattr(self.data_collator, name, None):
                raise ConfigError(
                    f"{name}=True joins several rows before PrivateTrainer sees them, and ε would protect what was "
                    "joined, not a row; leave it out."
                )

    def _after_step(self, completed: int) -> None:
        """Logs, evaluates and saves as the arguments say."""
        assert self.private
        self.state.global_step = completed
        self.state.epoch = completed / self.plan.sampling.rounds_per_epoch
        self.event("step_end")
        if completed % self._rounds_per_epoch == 0 or completed == self.plan.rounds:
            self.event("epoch_end")
        if self.control.should_log:
            self.control.should_log = False
            rate = self.optimizer.param_groups[0]["lr"]
            self.log({"learning_rate": rate, "epsilon": self.private.epsilon()})
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            metrics = self.evaluate()
            if isinstance(self.lr_scheduler, ReduceLROnPlateau):
                self.lr_scheduler.step(metrics[f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"])
        if self.control.should_save:
            self.control.should_save = False
            self._save_state()
            self.event("save")

    def _resume(self, checkpoint: str | bool) -> None:
        assert self.private
        folder = get_last_checkpoint(self.args.output_dir) if checkpoint is True else checkpoint
        if not folder or not (Path(str(folder)) / STATE).is_file():
            raise ConfigError(f"resume_from_checkpoint={checkpoint}: there is no {STATE} of a private training.")
        saved = torch.load(Path(str(folder)) / STATE, map_location=self.args.device, weights_only=True)
        self.model.load_state_dict(saved["weights"], strict=False)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.lr_scheduler.load_state_dict(saved["scheduler"])
        self.private.load_state_dict(saved["private"])

    def _save_state(self) -> None:
        assert self.private
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.private.rounds_done}"
        self.save_model(str(folder))
        states = {"optimizer": self.optimizer.state_dict(), "scheduler": self.lr_scheduler.state_dict()}
        weights = {name: p.detach().cpu() for name, p in self.model.named_parameters() if p.requires_grad}
        torch.save(states | {"weights": weights, "private": self.private.state_dict()}, folder / STATE)


class _Rounds(Private):
    """The rounds of a PrivateTrainer, which owns the step."""

    def __init__(self, trainer: PrivateTrainer, ledger: Path) -> None:
        memory = "low" if trainer.args.gradient_checkpointing else "usual"
        options = {"memory": memory} | trainer._options
        super().__init__(trainer.model, trainer.optimizer, trainer.plan, ledger, **options)
        self._trainer = trainer
        self._logged: set[str] = set()

    def _training_step(self, loss_of: Callable[..., Any]) -> TrainingStep:
        return TrainingStep(_loss, self.model, self._trainer, loss_of, _PARTS, self._logged)

    def _optimize(self) -> None:
        self._trainer.event("pre_optimizer_step")
        super()._optimize()
        self._trainer.event("optimizer_step")

    def _readers(self) -> list[tuple[Any, Sequence[str]]]:
        return [(self._trainer, _METHODS)]

    def _in_round(self, t: int, place: tuple[int, int]) -> Callable[[], AbstractContextManager]:
        epoch = t / self.plan.sampling.rounds_per_epoch

        @contextmanager
        def imitated() -> Iterator[None]:
            counts = patch.multiple(self._trainer.state, global_step=t, epoch=epoch)
            with counts, later_settings([self.optimizer]):
                yield

        return imitated


def _loss(own: StandIn, record: Any) -> Tensor | dict[str, Any]:
    """By the compute_loss of a copy of the Trainer."""
    trainer = own.owner
    with torch.autocast(trainer.args.device.type, torch.bfloat16, enabled=trainer.args.bf16):
        loss = trainer.compute_loss(own.module, record)
    return loss[0] if isinstance(loss, tuple) else loss
