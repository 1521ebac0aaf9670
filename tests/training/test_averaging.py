"""Averages of weights with a warm-up."""

import pytest
import torch

from dpexp.errors import ConfigError
from dpexp.training.callbacks import WarmAveraging


def test_averages_with_a_warm_up_forget_the_beginning():
    """By De et al.'s factor, from the weights after the first round on; up to `decay`."""
    model = torch.nn.Linear(1, 1, bias=False)
    for decay, most in ((0.9999, 1.0), (0.3, 0.3)):
        callback, expected = WarmAveraging(decay), None
        average = torch.optim.swa_utils.AveragedModel(model, **callback._kwargs)
        for n, weight in enumerate([5.0, -1.0, 2.0, 0.5, 7.0]):
            model.weight.data.fill_(weight)
            average.update_parameters(model)
            kept = min(most, (1 + n) / (10 + n)) if n else 0.0
            expected = kept * (expected or 0.0) + (1 - kept) * weight
            assert average.module.weight.item() == pytest.approx(expected)


@pytest.mark.parametrize("decay", [-3, 1, "x", None])
def test_a_decay_that_is_none_is_a_sentence(decay):
    with pytest.raises(ConfigError, match=r"^WarmAveraging\(decay=.*\) must lie in \[0, 1\)"):
        WarmAveraging(decay)
