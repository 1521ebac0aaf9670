"""Records of several shapes, and graphs of weights that select entries."""

import pytest
import torch
from plans import plan_of
from torch import nn

import dpexp
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.step import TRACED
from dpexp.privacy.plan import clipping

SHORT, LONG = 4, 12


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(1, 1)
        self.seen, self.length = 0, None


def branch(x):
    return x.sum().item() > 0 or True  # long records cannot be traced


def counts_long_ones(module, x):
    if x.shape[1] == LONG and branch(x):
        module.seen += 1
        return module.scores(x).sum() * (-1) ** module.seen
    return module.scores(x).sum()


def keeps_the_first_length(module, x):
    module.length = module.length or x.shape[1]
    return module.scores(x).sum() / module.length


def notes_the_length(module, x):
    module.length = x.shape[1]
    return module.scores(x).sum() / module.length


def weights_of(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def train(tmp_path, loss_of, lengths, module=None, rounds=1):
    """The mode of a training on records of these lengths, and the average before noise in its last round."""
    torch.manual_seed(0)
    module = module or Counted()
    n = len(lengths)
    plan = plan_of(module, n=n, q=1.0, steps=rounds, noise_multiplier=1e-6, clip_norm=clipping.FixedClipNorm(1.0))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    private = dpexp.Private(module, optimizer, plan, tmp_path / f"{n}.jsonl", noise_seed=1)
    for sample in private.rounds([torch.randn(length, 1) for length in lengths], collate_fn=torch.stack):
        before = weights_of(module)
        private.step(loss_of, sample)
        found = private._engine.step.mode, before - weights_of(module)
    return found


def test_state_that_only_an_untraceable_shape_advances_lands_in_a_copy(tmp_path):
    """Each record counts anew, whichever are before it."""
    found = [train(tmp_path, counts_long_ones, lengths)[1] for lengths in ([LONG] * 3, [SHORT] * 8 + [LONG] * 3)]
    assert found[0].isfinite().all() and found[1].any()


def test_what_a_step_keeps_of_a_shape_reaches_no_other(tmp_path):
    for keeps in (keeps_the_first_length, notes_the_length):
        module = Counted()
        assert train(tmp_path, keeps, [SHORT] * 9 + [LONG], module)[0] == TRACED and module.length is None


class Selects(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.tensor([0.1, 0.2, -1.0]))


def test_a_selection_by_weights_follows_them(tmp_path):
    def loss_of(module, x):
        return module.v[module.v > 0].sum() * (2 + x.mean().tanh())

    module = Selects()
    _, gradient = train(tmp_path, loss_of, [SHORT] * 8, module, rounds=3)
    assert module.v.max() <= 0 and gradient.abs().max() < 1e-4


def test_records_without_a_loss_of_one_shape_contribute_nothing(tmp_path):
    def loss_of(module, x):
        if x.shape[1] == LONG:
            raise ConfigError("no loss") if x.dim() > 9 else RuntimeError("no loss")
        return module.scores(x).sum()

    with pytest.warns(UserWarning, match="contribute nothing"):
        _, with_long = train(tmp_path, loss_of, [SHORT] * 8 + [LONG])
    _, without = train(tmp_path, loss_of, [SHORT] * 8)
    torch.testing.assert_close(9 * with_long, 8 * without, rtol=1e-4, atol=1e-4)
