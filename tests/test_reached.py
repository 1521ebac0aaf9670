"""Whatever a model holds: to look at it ends no job, and what nobody changes is not said to be changed."""

import random
import warnings

import numpy as np
import pytest
import torch
from dpexp.privacy.isolation.kept import identical
from torch import nn

from tests.test_branches import engine_of


class Refusing:
    """Has no attributes, and says so in its own way, as pydantic's placeholders do."""

    __slots__ = ()

    def __getattr__(self, name):
        raise ValueError(name)


class MadeUp:
    @property
    def __dict__(self):
        return {}


class Failing:
    @property
    def __dict__(self):
        raise RuntimeError


HELD = {
    "a source of the system's": random.SystemRandom,
    "a masked array": lambda: np.ma.array([1, 2], mask=[0, 1]),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "a conjugate": lambda: torch.ones(2, dtype=torch.cfloat).conj(),
    "a negative": lambda: torch.ones(2, dtype=torch.cfloat).conj().imag,
    "a lazy module, unregistered": lambda: [nn.LazyLinear(2)],
    "what refuses": Refusing,
    "a class that holds it": lambda: type("Holder", (), {"held": Refusing()})(),
    "attributes made up": MadeUp,
    "attributes that fail": Failing,
}


@pytest.mark.parametrize("what", HELD)
def test_what_a_model_holds_ends_no_job(what):
    module = nn.Linear(3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.held = HELD[what]()
    engine, _ = engine_of(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            engine.start()
            engine.accumulate(lambda x: module(x).sum(), torch.randn(4, 3), 4)
    assert engine._sums["weight"].any()


def test_masked_arrays_are_set_back():
    module = nn.Linear(3, 1)
    module.held = np.ma.array([1.0, 2.0], mask=[0, 1])

    def loss_of(x):
        module.held[0] = 7.0
        return module(x).sum()

    engine, _ = engine_of(module)
    engine.start()
    with pytest.warns(UserWarning, match="changes held"):
        engine.accumulate(loss_of, torch.randn(4, 3), 4)
    assert module.held.tolist() == [1.0, None]


def test_conjugates_are_compared_by_their_numbers():
    x = torch.randn(3, dtype=torch.cfloat)
    assert identical(x.conj(), x.conj().resolve_conj()) and not identical(x.conj(), x)
