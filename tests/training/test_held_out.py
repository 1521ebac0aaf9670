"""How a training without privacy ends."""

import pytest
import pytorch_lightning as pl
import torch
from jobs import result_of
from plans import trainer as quiet_trainer
from torch import nn

from dpexp.training.callbacks import HeldOut
from dpexp.training.classifier import Classifier
from dpexp.training.data import TensorData


class Seen(pl.Callback):
    """The records of each training step."""

    def __init__(self):
        self.numbers = set()

    def on_train_batch_start(self, trainer, module, batch, number):
        self.numbers |= {*batch[0][:, 0].tolist()}


def overfitting(steps, **options):
    """A training on 40 records with as many columns, and labels that have next to nothing to do with these."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 40), torch.randint(2, (40,))
    x[:, 0] = torch.arange(40) / 40
    data = TensorData((x, y), (x, y))
    data.batch_size, path = options.pop("batch_size", 12), options.pop("path", None)
    module = Classifier(nn.Linear(40, 2), lambda p: torch.optim.Adam(p, 0.05), **options)
    held_out, seen = HeldOut(), Seen()
    trainer = quiet_trainer(held_out, seen, max_steps=steps, limit_val_batches=0)
    trainer.fit(module, datamodule=data, ckpt_path=path)
    return trainer, module, (x, y), held_out, seen.numbers


@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_it_ends_by_records_that_it_does_not_train_on_and_keeps_their_best_weights(weights):
    weights = weights and torch.tensor(weights)
    with pytest.warns(UserWarning, match="held out, no longer falls: the model is that of round"):
        trainer, module, (x, y), held_out, seen = overfitting(600, class_weights=weights)
    kept = torch.tensor([number in seen for number in x[:, 0].tolist()])
    assert kept.sum() == 36
    loss = nn.functional.cross_entropy(module(x[~kept]), y[~kept], weights)
    assert float(loss) == pytest.approx(float(held_out.best_score)) and trainer.global_step < 600


def test_a_resumed_training_knows_the_best_weights_of_before(tmp_path):
    with pytest.warns(UserWarning, match="is that of round"):
        trainer, module, _, held_out, _ = overfitting(600)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.warns(UserWarning, match=f"is that of round {held_out.best['round']} of 700"):
        again, resumed, *_ = overfitting(700, path=tmp_path / "last.ckpt")
    assert again.global_step > trainer.global_step and torch.equal(resumed.model.weight, module.model.weight)


@pytest.mark.parametrize("batch_size, steps", [(40, 5), (12, 1)])
def test_a_sample_of_all_records_and_a_training_shorter_than_an_epoch_have_a_best_round(batch_size, steps):
    with pytest.warns(UserWarning, match=f"round [1-{steps}] of {steps}[.]"):
        overfitting(steps, batch_size=batch_size)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("privacy, says", [("privacy.enabled=false", True), ("privacy.noise_multiplier=1", False)])
def test_a_job_holds_records_out_only_without_privacy(privacy, says, dpexp_job, recwarn):
    output = dpexp_job(privacy, "model=logistic", "sampling.steps=4", "tracking=none")
    assert any("held out" in str(one.message) for one in recwarn) == says and result_of(output)["rounds"] == 4
