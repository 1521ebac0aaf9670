"""What the libraries of benchmarks/peers.py are given is one and the same thing."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpexp.training.models import cnn, mlp

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def module(monkeypatch):
    """A module of benchmarks/peers, imported for this test alone."""
    monkeypatch.syspath_prepend(PEERS)
    monkeypatch.setattr(sys, "argv", ["", "cnn", "0", "", ""])
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        if name in ("setting", "torch_work"):
            del sys.modules[name]


def test_the_experiment_is_what_the_scripts_say(module):
    setting, experiment = module("setting"), OmegaConf.load(PEERS / "experiment" / "peers.yaml")
    experiment.pop("defaults")
    assert experiment == {
        "clip_norm": {"value": setting.BOUND},
        "optimizer": {"lr": setting.LR, "momentum": setting.MOMENTUM},
        "sampling": {"expected_batch_size": setting.BATCH, "epochs": setting.EPOCHS},
        "privacy": {"epsilon": setting.EPSILON, "delta": setting.DELTA},
    }


@pytest.mark.parametrize("work, ours", [("cnn", cnn([1, 28, 28], 10)), ("mlp", mlp([1, 28, 28], 10, [256]))])
def test_the_models_are_the_same(module, work, ours):
    assert str(module("torch_work").architecture(work)) == str(ours)
