"""A `Trainer` of transformers that trains privately."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    SaveStrategy,
    TrainOutput,
    get_last_checkpoint,
    rotate_checkpoints,
)

from dpexp._transformers_compat import load_best_model, note_evaluation
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.training_step import StandIn, TrainingStep
from dpexp.privacy.loop import TrainingLoop, later_settings
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.private import Private
from dpexp.reporting.model_card import privacy_section

STATE = "private.pt"
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")  # of a Trainer's state
_NOT_SUPPORTED = ("neftune_noise_alpha", "auto_find_batch_size", "activation_offloading", "use_liger_kernel")
_SECTION = "<!-- written by dpexp: -->"  # in a model card; what follows is replaced by a later guarantee
_NEW_CARD = "---\nlibrary_name: transformers\n---\n"
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
    clipping. The plan's sampling alone sets the batch, so that `gradient_accumulation_steps` changes nothing, and
    `per_device_train_batch_size` is how many records are processed at once; `gradient_checkpointing` is `memory="low"`.
    A record's loss is `compute_loss` of a batch of one, on a copy of the Trainer, in which its log does nothing.
    Nothing is logged of training records; `log` gets the learning rate and ε. The ledger is `ledger.jsonl` in
    `args.output_dir`, and the README.md beside a saved model says its guarantee.

    Args:
        plan: from `make_plan`, for this model, with a δ; or a function that makes it from the model, once the Trainer
            has put adapters into it: `lambda model: dpexp.make_plan(model, …)`.
        options: of `dpexp.Private`, such as `noise_seed`; they come before `args`.
        others: of transformers.Trainer.
    """

    def __init__(
        self,
        *args: Any,
        plan: PrivacyPlan | Callable[[nn.Module], PrivacyPlan],
        options: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(*args, **others)
        self.plan = plan if isinstance(plan, PrivacyPlan) else plan(self.model)
        self._options = options or {}
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
        private.optimizer = self.optimizer
        if resume_from_checkpoint:
            self._resume(resume_from_checkpoint)
        loader = self.get_train_dataloader()
        self.is_in_train = True  # an evaluation then leaves the model's dtype
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
        self.is_in_train = False
        if args.load_best_model_at_end and self.state.best_model_checkpoint:
            load_best_model(self)
        metrics = {"epsilon": private.epsilon()}
        self.log(dict(metrics))
        self.event("train_end")
        return TrainOutput(private.rounds_done, 0.0, metrics)

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
        if self.args.fp16:
            raise ConfigError("fp16=True scales gradients by the data; use bf16=True, or leave it out.")
        for name in _NOT_SUPPORTED:
            if value := getattr(self.args, name, None):
                raise ConfigError(f"{name}={value} is not supported by {type(self).__name__}; leave it out.")
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
            is_best = note_evaluation(self, metrics)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_best
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
        for name, value in saved.get("best", {}).items():
            setattr(self.state, name, value)

    def _save_state(self) -> None:
        assert self.private
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.private.rounds_done}"
        self.save_model(str(folder))
        if self.state.best_global_step == self.private.rounds_done:
            self.state.best_model_checkpoint = str(folder)
        states = {"optimizer": self.optimizer.state_dict(), "scheduler": self.lr_scheduler.state_dict()}
        weights = {name: p.detach().cpu() for name, p in self.model.named_parameters() if p.requires_grad}
        best = {name: getattr(self.state, name) for name in _BEST}
        whole = states | {"weights": weights, "private": self.private.state_dict(), "best": best}
        torch.save(whole, folder / f"{STATE}.part")
        os.replace(folder / f"{STATE}.part", folder / STATE)  # a killed process leaves none that is cut off
        if self.args.should_save:  # the folder was written last, so that it is the newest, which is kept
            limit, kept = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(self.args.output_dir, limit, kept, use_mtime=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model, and its guarantee in the README.md beside it."""
        super().save_model(output_dir, _internal_call)
        self._write_guarantee(output_dir)

    def create_model_card(self, *args: Any, **others: Any) -> None:
        """Makes the Trainer's README.md, which `push_to_hub` uploads, and adds the guarantee."""
        super().create_model_card(*args, **others)
        self._write_guarantee()

    def _write_guarantee(self, folder: str | None = None) -> None:
        private = self.private
        if private is None or not private.ledger_opened or not self.args.should_save:
            return
        assert private.delta
        path = Path(folder or self.args.output_dir) / "README.md"
        card = path.read_text() if path.exists() else _NEW_CARD
        rounds = private.ledger.training_rounds  # more than were done, if a resume did some again
        section = privacy_section(private.ledger, self.plan, rounds, private.delta, private.accountant)
        path.write_text(f"{card.partition(_SECTION)[0].rstrip()}\n\n{_SECTION}\n\n{section}")


class _Rounds(Private):
    """The rounds of a PrivateTrainer, which owns the step."""

    def __init__(self, trainer: PrivateTrainer, ledger: Path) -> None:
        args = trainer.args
        memory = "low" if args.gradient_checkpointing else "usual"
        options = {"memory": memory, "max_physical_batch_size": args.per_device_train_batch_size} | trainer._options
        super().__init__(trainer.model, trainer.optimizer, trainer.plan, ledger, **options)
        self._trainer = trainer
        self._logged: set[str] = set()

    def _training_step(self, loss_of: Callable[..., Any]) -> TrainingStep:
        return TrainingStep(_loss, self.model, self._trainer, loss_of, _PARTS, self._logged)

    def _optimize(self) -> None:
        self._trainer.event("pre_optimizer_step")
        super()._optimize()
        self._trainer.event("optimizer_step")

    def _loop(self) -> TrainingLoop:
        return _TrainerLoop(self._trainer)


class _TrainerLoop(TrainingLoop):
    def __init__(self, trainer: PrivateTrainer) -> None:
        super().__init__(trainer.optimizer)
        self._trainer = trainer

    def readers(self) -> list[tuple[Any, Sequence[str]]]:
        return [(self._trainer, _METHODS)]

    def in_round(self, t: int, place: tuple[int, int]) -> Callable[[], AbstractContextManager]:
        epoch = t / self._trainer.plan.sampling.rounds_per_epoch

        @contextmanager
        def imitated() -> Iterator[None]:
            counts = patch.multiple(self._trainer.state, global_step=t, epoch=epoch)
            with counts, later_settings([self._trainer.optimizer]):
                yield

        return imitated


def _loss(own: StandIn, record: Any) -> Tensor | dict[str, Any]:
    """By the compute_loss of a copy of the Trainer."""
    trainer = own.owner
    with torch.autocast(trainer.args.device.type, torch.bfloat16, enabled=trainer.args.bf16):
        loss = trainer.compute_loss(own.module, record)
    return loss[0] if isinstance(loss, tuple) else loss
