"""An `SFTTrainer` of TRL that trains privately."""

from typing import Any
from unittest.mock import patch

from transformers import Trainer
from trl import SFTTrainer
from trl.trainer import sft_trainer

from dpexp.errors import ConfigError
from dpexp.integrations.transformers import PrivateTrainer


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    """trl.SFTTrainer whose `train` carries out a privacy plan, as that of PrivateTrainer does.

    Chat templates, tokens, labels, adapters and evaluation are SFTTrainer's. A record is a row of `train_dataset`; its
    loss is the model's own, the mean over its labels. SFTTrainer's statistics of batches, entropy and token accuracy,
    are not computed.
    """

    def __init__(self, *args: Any, **others: Any) -> None:
        with patch.object(sft_trainer, "add_fused_lm_head"):  # a copy of the model would run the original's forward
            super().__init__(*args, **others)

    compute_loss = Trainer.compute_loss

    def _refuse_arguments(self) -> None:
        super()._refuse_arguments()
        if self.args.loss_type != "nll":
            raise ConfigError(f"loss_type={self.args.loss_type} is not supported by PrivateSFTTrainer; leave it out.")
