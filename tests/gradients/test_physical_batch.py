"""trainer.max_physical_batch_size=auto: as many records as fit."""

import json

import pytest
import torch
from plans import plan_of, trainer
from torch import nn

from dpexp.privacy import physical_batch
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.physical_batch import FIRST_ON_GPU, double_while_fitting, largest_fitting_batch
from dpexp.training.classifier import Classifier
from dpexp.training.data import Digits


@pytest.mark.parametrize(
    "memory, sample, found", [(100, 1000, 64), (10**6, 100, 128), (10**6, 128, 128), (3, 100, FIRST_ON_GPU)]
)
def test_it_is_doubled_until_memory_or_the_sample_ends(memory, sample, found):
    tried = []

    def attempt(size):
        tried.append(size)
        if size > memory:
            raise torch.OutOfMemoryError

    assert double_while_fitting(attempt, sample) == found
    assert max(tried) <= 2 * max(memory, FIRST_ON_GPU) and max(tried) < 2 * max(sample, FIRST_ON_GPU)


def test_an_error_of_another_kind_leaves_it_small():
    def attempt(size):
        raise ValueError("not such a record")

    assert double_while_fitting(attempt, 1000) == FIRST_ON_GPU


def test_tries_change_no_weights_and_see_one_public_record(monkeypatch):
    """On a CPU, in place of a GPU whose memory ends at 100 records."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    module = Classifier(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    module.log_dict = lambda *_: None
    plan = plan_of(module, n=1437, q=0.5, steps=1, noise_multiplier=1.0)
    seen, before = [], model[1].weight.clone()
    run = trainer()
    run.fit_loop.epoch_loop.val_loop._data_source.instance = Digits().val_dataloader()

    class Memory:
        def __getattr__(self, name):
            return {"max_memory_allocated": lambda _: seen[-1], "mem_get_info": lambda _: (0, 125)}.get(
                name, lambda: None
            )

    monkeypatch.setattr(physical_batch.torch, "cuda", Memory())
    expected, _ = Digits().test[0]

    def loss_of(module, batch):
        return module.training_step(batch)

    real = physical_batch.RoundEngine.add_chunk

    def accumulate(engine, loss_of, batch, size):
        assert torch.equal(batch[0], expected.expand(size, 1, 1, 8, 8))
        seen.append(size)
        return real(engine, loss_of, batch, size)

    monkeypatch.setattr(physical_batch.RoundEngine, "add_chunk", accumulate)
    assert largest_fitting_batch(plan, TrainingStep.of(loss_of, module), run) == 64
    assert seen == [16, 32, 64, 128]
    assert torch.equal(model[1].weight, before) and model[1].weight.grad is None


def test_a_job_on_a_cpu_takes_the_usual_number(dpexp_job):
    fast = ("model=logistic", "sampling.steps=2", "tracking=none", "trainer.num_evaluations=0", "privacy.noise_seed=3")
    of = [dpexp_job(*fast, *more) / "result.json" for more in ((), ("trainer.max_physical_batch_size=auto",))]
    losses = [json.loads(path.read_text())["metrics"]["test_loss"] for path in of]
    assert losses[0] == losses[1]
    with pytest.raises(SystemExit, match=r"trainer\.max_physical_batch_size=many must be an integer"):
        dpexp_job(*fast, "trainer.max_physical_batch_size=many")
