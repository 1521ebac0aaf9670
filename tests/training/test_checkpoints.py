"""Checkpoints on disk."""

import errno
import tracemalloc

import pytest
import torch
from plans import trainer as quiet_trainer
from torch import nn

from dpexp.training.callbacks import save
from dpexp.training.classifier import Classifier
from dpexp.training.data import TensorData


@pytest.fixture
def trained():
    """A trainer after one step, and its module of 4 MB."""
    records = torch.randn(8, 1000), torch.randint(1000, (8,))
    data = TensorData(records, records)
    data.batch_size, module = 4, Classifier(nn.Linear(1000, 1000), lambda p: torch.optim.SGD(p, 0.1))
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    return trainer, module


def test_no_copy_of_the_weights_is_held_while_they_are_written(trained, tmp_path):
    trainer, module = trained
    tracemalloc.start()
    try:
        save(trainer, tmp_path / "last.ckpt")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1e6
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert state["global_step"] == 1 and torch.equal(state["state_dict"]["model.weight"], module.model.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_full_disk_is_told_with_the_file_and_the_last_checkpoint_kept(trained, tmp_path):
    (tmp_path / "last.ckpt").write_text("before")
    (tmp_path / "last.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*last\.part'") as caught:
        save(trained[0], tmp_path / "last.ckpt")
    assert caught.value.errno == errno.ENOSPC
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
