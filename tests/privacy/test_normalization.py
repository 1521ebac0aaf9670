"""Batch normalization with private statistics, with fixed ones, or by groups of channels."""

import copy
import math

import pytest
import torch
from jobs import result_of
from plans import plan_of, trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainings import released_sums

import dpexp
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.normalization import FrozenBatchNorm, GroupNormalization, PrivateBatchNorm, RunningNorm
from dpexp.privacy.plan.groups import value_key
from dpexp.privacy.round import RoundEngine
from dpexp.training.models import resnet


def net(*widths):
    torch.manual_seed(0)
    return resnet([2, 6, 6], 3, widths or [4, 8]).double()


def data(size=5, seed=0):
    torch.manual_seed(seed)
    return 3 * torch.randn(size, 2, 6, 6, dtype=torch.float64) + 1, torch.randint(0, 3, (size,))


def loss_of(model, one):
    return F.cross_entropy(model(one[0][None]), one[1][None])


def engine_of(model, private):
    plan = plan_of(
        model,
        n=100,
        q=0.1,
        steps=3,
        noise_multiplier=1e-6 / 25,
        private_metrics=private.release(model),
        accountant="rdp",
    )
    return RoundEngine(plan, model, GaussianNoise())


def moments_by_hand(model, one):
    """Of each layer that normalises, for one record."""
    found = {}

    def note(layer, inputs):
        (x,) = inputs
        u = F.batch_norm(x.detach(), torch.zeros(x.shape[1]).to(x), torch.ones(x.shape[1]).to(x))[0]
        found[layer.metric_name] = torch.cat([u.mean((1, 2)), (u**2).mean((1, 2)) - 1])

    handles = [layer.register_forward_pre_hook(note) for layer in model.modules() if isinstance(layer, RunningNorm)]
    loss = loss_of(model, one)
    for handle in handles:
        handle.remove()
    return found, dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, [*model.parameters()]), strict=True)
    )


@pytest.mark.parametrize("scale", [0.4, 1e3])
def test_moments_of_each_record_are_clipped_together_and_are_constants_of_its_gradient(scale, tmp_path, recwarn):
    private = PrivateBatchNorm(clip_scale=scale)
    model, batch = private(net(4)), data()
    engine = engine_of(model, private)
    found = released_sums(engine, tmp_path, loss_of, batch)
    assert not [warning for warning in recwarn if "slow" in str(warning.message)]
    (group,) = [group for group in engine.plan.groups if group.name == "batchnorm"]
    alphas = {vector.name: alpha for vector, alpha in zip(group.vectors, group.alphas, strict=True)}
    assert len(alphas) == 3 and alphas["batchnorm/1"] == pytest.approx(scale * 8**0.5)
    expected = dict.fromkeys(found, 0.0)
    for one in zip(*batch, strict=True):
        moments, gradients = moments_by_hand(model, one)
        norm = math.hypot(*(float(v.norm()) / alphas[name] for name, v in moments.items()))
        assert (norm > group.S) == (scale == 0.4), "one case clips, the other does not"
        for name, v in moments.items():
            expected[value_key(name)] += min(1.0, group.S / norm) * v
        norm = math.hypot(*(float(v.norm()) for v in gradients.values()))
        for name, v in gradients.items():
            expected[name] += min(1.0, 1 / norm) * v
    for name, total in expected.items():
        is_rough = scale == 1e3 and name.startswith(value_key(""))  # of more noise
        torch.testing.assert_close(found[name], total, rtol=1e-5, atol=2e-2 if is_rough else 1e-5)


def test_running_statistics_find_those_of_the_data():
    """By hand, and in the end: what is released comes to 0."""
    layer = RunningNorm(nn.BatchNorm2d(2).double(), "here", rate=0.5)
    second = -0.25 + 0.25 * 4 * 0.9**0.5
    for moments, mean, variance in (
        ([1.0, -0.5, 0.6, -0.2], [0.5, -0.25], [1.3, 0.9]), ([0.0, 4, 99, -99], [0.5, second], [2.6, 0.45]),
    ):  # fmt: skip
        layer.update(torch.tensor(moments, dtype=torch.float64))
        assert layer.running_mean.tolist() == pytest.approx(mean, abs=1e-5)
        assert layer.running_var.tolist() == pytest.approx(variance, rel=1e-7)
    x = 7 * torch.randn(500, 2, dtype=torch.float64) + torch.tensor([40.0, -3])
    layer = RunningNorm(nn.BatchNorm1d(2).double(), "here", rate=1.0)
    for _ in range(2000):
        u = (x - layer.running_mean) / (layer.running_var + layer.eps).sqrt()
        layer.update(torch.cat([u.mean(0), u.square().mean(0) - 1]).clamp(-3, 3))
    torch.testing.assert_close(layer.running_mean, x.mean(0), rtol=0.05, atol=0.2)
    torch.testing.assert_close(layer.running_var, x.var(0, correction=0), rtol=0.1, atol=0)


@pytest.mark.parametrize("choice", [PrivateBatchNorm(), FrozenBatchNorm()])
def test_in_evaluation_it_is_batch_normalization(choice):
    model = net()
    model(data(64)[0])  # learns statistics
    other = choice(copy.deepcopy(model))
    x = data()[0]
    torch.testing.assert_close(other.eval()(x), model.eval()(x))
    assert set(other.state_dict()) == set(model.state_dict())
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.train()(x), model(x))


def test_group_normalization_keeps_scale_and_shift():
    model = net()
    nn.init.normal_(model[1].weight)
    other = GroupNormalization(groups=3)(copy.deepcopy(model))
    norms = [layer for layer in other.modules() if isinstance(layer, nn.GroupNorm)]
    assert [layer.num_groups for layer in norms] == [2] * 6 and torch.equal(other[1].weight, model[1].weight)
    plan = plan_of(other, n=100, q=0.1, steps=1, noise_multiplier=1.0)
    assert plan.groups[0].d == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (64, 4), (100, 5), (1024, 32)])
def test_a_group_of_values_without_places_has_sixteen_channels(channels, groups):
    """A group of one value is always 0, one of two is ±1."""
    found = GroupNormalization()(nn.Sequential(nn.BatchNorm1d(channels)))[0]
    assert found.num_groups == groups and found(torch.randn(1, channels)).unique().numel() > channels / 2


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.again = self.norm

    def forward(self, x):
        return self.out(self.again(2 * self.norm(x)))


def test_a_layer_used_twice_gives_the_mean(tmp_path):
    private = PrivateBatchNorm(clip_scale=1e3)
    model = private(Twice().double())
    assert model.norm is model.again
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randint(0, 2, (4,))
    found = released_sums(engine_of(model, private), tmp_path, loss_of, (x, y))
    inner = 2 * model.norm(x)  # statistics are 0 and 1
    mean = torch.cat([(x + inner).sum(0), (x**2 + inner**2 - 2).sum(0)]).detach() / 2
    torch.testing.assert_close(found[value_key("batchnorm/norm")], mean, atol=1e-3, rtol=1e-4)


QUICK = (
    "model=resnet", "sampling.steps=2", "privacy.noise_multiplier=1.0", "trainer.num_evaluations=0", "tracking=none",
)  # fmt: skip


def test_a_job_with_private_statistics(dpexp_job):
    output = dpexp_job(*QUICK, "batchnorm=private", "model.widths=[4]")
    result = result_of(output)
    assert result["groups"]["batchnorm"]["share"] == 0.1
    weights = dpexp.load(output).state_dict()
    assert weights["1.num_batches_tracked"] == 2 and not torch.equal(weights["1.running_mean"], torch.zeros(4))
    assert dpexp.load(output)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_by_default_it_is_refused_and_three_ways_are_named(dpexp_job):
    with pytest.raises(SystemExit, match=r"batchnorm=groupnorm, batchnorm=private or batchnorm=freeze"):
        dpexp_job(*QUICK)


def test_the_twin_has_batch_normalization(dpexp_job):
    output = dpexp_job(*QUICK[:2], *QUICK[3:], "batchnorm=private", "model.widths=[4]", "privacy.enabled=false")
    assert isinstance(dpexp.load(output)[1], nn.BatchNorm2d)


def test_a_plan_that_does_not_release_the_moments_is_refused(tmp_path):
    module = dpexp.Classifier(PrivateBatchNorm()(net().float()), lambda parameters: torch.optim.SGD(parameters, 0.1))
    callback = dpexp.PrivacyCallback(plan_of(module, n=100, q=0.1, steps=1, noise_multiplier=1.0), tmp_path / "ledger")
    x, y = data(20)
    with pytest.raises(dpexp.ConfigError, match="does not release batchnorm/1"):
        trainer(callback).fit(module, DataLoader(TensorDataset(x.float(), y)))


@pytest.mark.parametrize(
    "choice, said",
    [
        (lambda _: PrivateBatchNorm(budget_share=-1), r"\(budget_share=-1\) must be"),
        (lambda _: PrivateBatchNorm(initial_rate=0), r"\(initial_rate=0\) must lie in \(0, 1\]"),
        (FrozenBatchNorm(), "no batch norm"),
    ],
)
def test_mistakes_are_sentences(choice, said):
    model = nn.Linear(2, 2) if "no batch" in said else net()
    with pytest.raises(dpexp.ConfigError, match=said):
        choice(model)
