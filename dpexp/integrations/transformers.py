"""A `Trainer` of transformers that trains privately."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, get_last_checkpoint

from dpexp.errors import ConfigError
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.private import Private

STATE = "private.pt"
_NOT_SUPPORTED = (
    "fp16", "bf16", "gradient_checkpointing", "neftune_noise_alpha", "load_best_model_at_end", "save_total_limit",
    "auto_find_batch_size",
)  # fmt: skip


class PrivateTrainer(Trainer):
    """transformers.Trainer whose `train` carries out a privacy plan; evaluation, saving and logs are its own.

    `args` says what it says without privacy, but for what the plan determines: batch size, number of steps and gradient
    clipping. A record's loss is `compute_loss` of a batch of one. Nothing is logged of training records; `log` gets the
    learning rate and ε. The ledger is `ledger.jsonl` in `args.output_dir`.

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
        """Trains for the plan's rounds.

        Args:
            resume_from_checkpoint: a folder that `save_strategy` made; True: the last one.

        Raises:
            ConfigError: the model, the data or an argument cannot be trained on privately.
        """
        args, model = self.args, self.model
        if self.plan.delta is None:
            raise ConfigError("the plan needs a delta, at which ε is logged: Target(…, delta=1e-5).")
        if args.gradient_accumulation_steps != 1:
            raise ConfigError("gradient_accumulation_steps must be 1; the plan's sampling rate sets the batch size.")
        for name in _NOT_SUPPORTED:
            if value := getattr(args, name, None):
                raise ConfigError(f"{name}={value} is not supported by PrivateTrainer; leave it out.")
        model.to(args.device)
        self.create_optimizer_and_scheduler(self.plan.rounds)
        ledger = Path(args.output_dir) / "ledger.jsonl"
        ledger.parent.mkdir(parents=True, exist_ok=True)
        self.private = private = Private(model, self.optimizer, self.plan, ledger, **self._options)
        if resume_from_checkpoint:
            self._resume(resume_from_checkpoint)
        loader = self.get_train_dataloader()
        self.state.max_steps = self.plan.rounds
        self.state.compute_steps(args, self.plan.rounds)
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        for sample in private.rounds(loader.dataset, loader.collate_fn, args.dataloader_num_workers):
            private.step(self._loss, sample)
            self.lr_scheduler.step()
            self._after_step(private.rounds_done)
            model.train()
            if self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        return TrainOutput(private.rounds_done, 0.0, {"epsilon": private.epsilon()})

    def _loss(self, model: nn.Module, record: Any) -> Tensor:
        loss = self.compute_loss(model, record)
        return loss if isinstance(loss, Tensor) else loss[0]

    def _after_step(self, completed: int) -> None:
        """Logs, evaluates and saves as the arguments say."""
        assert self.private
        self.state.global_step = completed
        self.state.epoch = completed / self.plan.sampling.rounds_per_epoch
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if completed % round(self.plan.sampling.rounds_per_epoch) == 0 or completed == self.plan.rounds:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        if self.control.should_log:
            self.control.should_log = False
            rate = self.lr_scheduler.get_last_lr()[0]
            self.log({"learning_rate": rate, "epsilon": self.private.epsilon()})
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            self.evaluate()
        if self.control.should_save:
            self.control.should_save = False
            self._save_state()
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

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
