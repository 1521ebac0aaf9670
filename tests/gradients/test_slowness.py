"""Warnings of slowness name the line, the reason and what to write instead."""

import random
import warnings

import pytest
import torch
from plans import plan_of
from torch import nn
from torch.utils.data import TensorDataset

import dpexp
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan import clipping
from dpexp.privacy.round import PrivateRound


def repeated(module, x):
    return module(x.repeat_interleave((x[:, 0] > 0).long(), 0)).sum()


def written(module, x):
    y = torch.arange(12.0).view(3, 4)
    y[0] = x[0]
    return module(y).sum()


def numbers(module, x):
    return module(x).sum() * float(x.numpy().mean())


def asked(module, x):
    return module(x).sum() * x.sum().item()


def counted(module, x):
    return module(x).sum() * torch.arange(x.sum().abs() + 2).sum()


def drawn(module, x):
    return module(x).sum() * random.random()


SAID = {
    repeated: ("`return module(x.repeat_interleave(", "a shape depends on a record's data", "weight with a mask"),
    written: ("`y[0] = x[0]`: a tensor that is the same for all records is written to", "x.new_zeros(...)"),
    numbers: ("`return module(x).sum() * float(x.numpy().mean())`: a branch or a number", "(mean)"),
    asked: ("`return module(x).sum() * x.sum().item()`: a branch or a number", "a product instead of .item()"),
    counted: (
        "`return module(x).sum() * torch.arange(x.sum().abs() + 2)",
        "reads a record's value",
        "torch.where(condition, a, b)",
    ),
    drawn: ("training_step draws random numbers by Python's or NumPy's generator", "Use torch's generator"),
}


@pytest.mark.parametrize("loss", SAID, ids=lambda loss: loss.__name__)
def test_the_line_and_the_way_out_are_told(loss):
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    plan = plan_of(module, n=100, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(0.3))
    engine = PrivateRound(plan, module, GaussianNoise())
    engine.begin()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine.add_chunk(loss, torch.randn(20, 3, 4), 20)
    (said,) = [str(w.message) for w in told if "one at a time, which is slow" in str(w.message)]
    assert all(words in said for words in SAID[loss]) and ("test_slowness.py, line" in said or loss is drawn)


def test_the_price_of_a_traced_step_is_told_before_the_first_round(tmp_path):
    module = nn.Linear(4, 4)
    plan = plan_of(module, n=100, q=0.3, steps=4, noise_multiplier=1.0)
    private = dpexp.Private(module, torch.optim.SGD(module.parameters(), 0.1), plan, tmp_path / "ledger.jsonl")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for sample in private.rounds(TensorDataset(torch.randn(100, 4))):
            assert bool(private.rounds_done) == any("this job's 4 rounds" in str(w.message) for w in told)
            private.step(lambda model, record: model(record[0]).square().sum(), sample)
    (said,) = [str(w.message) for w in told if "this job's 4 rounds" in str(w.message)]
    assert "times the gradients of a plain step; for" in said
