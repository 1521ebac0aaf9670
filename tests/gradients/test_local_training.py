"""Users who train, against FedAvg written out with plain torch."""

import copy

import pytest
import torch
from reference import norm_of
from test_privacy_unit import (
    MEMBERS,
    SCALED,
    Items,
    Model,
    a_data_set,
    by_hand,
    choices_of,
    differing,
    of_users,
    quiet,
    released,
    rows,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan import adaptive_clipping, clipping, groups
from dpexp.privacy.plan.clipping import Automatic
from dpexp.privacy.sampling.privacy_unit import LocalTraining, User
from tests.audited import check, shown, twice_the_bound

__all__ = ["quiet"]
LOCALS = {
    "one step": LocalTraining(lr=0.5, steps=1),
    "epochs": LocalTraining(lr=0.3, epochs=3),
    "batches": LocalTraining(lr=0.3, epochs=2, batch_size=2),
    "steps": LocalTraining(lr=0.3, steps=4, batch_size=3),
}


def trained_by_hand(x, y, local, make=Model):
    """θ_0 - θ_K of torch's own SGD on the examples at some positions."""

    def vector(positions):
        model = make().double()
        before = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
        size, steps = local.batch_size or len(positions), 0
        for _ in range(local.epochs or 100):
            for start in range(0, len(positions), size):
                if steps == local.steps:
                    break
                some = positions[start : start + size]
                optimizer.zero_grad()
                model.loss((x[some].double(), y[some])).backward()
                optimizer.step()
                steps += 1
        return {
            n: p.detach() - q.detach()
            for (n, p), (_, q) in zip(before.named_parameters(), model.named_parameters(), strict=True)
        }

    return vector


@pytest.fixture
def in_order(monkeypatch):
    """Users' examples stay in their order."""
    monkeypatch.setattr(KeyStream, "permutation", lambda self, size: torch.arange(size))


class Transformer(Model):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(1, 8)
        self.net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.scale * self.head(self.net(self.embed(x.unsqueeze(-1))).mean(1)), y)


class Tied(Model):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.net[2].weight = self.net[0].weight


class Branching(Model):
    def loss(self, batch):
        return super().loss(batch) * (2 if batch[0].sum() > 0 else 1)


class Infinite(Model):
    """Its loss is finite for real records alone."""

    def loss(self, batch):
        return super().loss(batch) / (batch[0][:, 0] == 5).all()


class FrozenAndUnused(Model):
    def __init__(self):
        super().__init__()
        self.net[1].weight.requires_grad_(False)
        self.unused = nn.Linear(2, 2)


THREE_EACH = [i // 3 for i in range(12)]
BY_THREES = [[3 * u, 3 * u + 1, 3 * u + 2] for u in range(4)]
CASES = {  # a kind of data set, how a user trains, a model
    **{name: (kind, local, Model) for (name, local), kind in zip(
        LOCALS.items(), (TensorDataset, Items, of_users, of_users), strict=True)},
    **{make.__name__: (TensorDataset, LOCALS["batches"], make) for make in (Transformer, Tied, Branching, Infinite)},
    "FrozenAndUnused": (TensorDataset, LOCALS["epochs"], FrozenAndUnused),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_users_vector_is_how_far_its_training_goes(name, tmp_path, quiet, in_order):
    kind, local, make = CASES[name]
    x, y = rows(11)
    x[:, 0] = 5 if make is Infinite else x[:, 0]
    found, plan = released(
        tmp_path, a_data_set(kind, x.double(), y), User(8, None if kind is of_users else "user_of", local), make(),
        users=4, group=groups.flat() if make is FrozenAndUnused else groups.per_layer(),
        clip_norm=clipping.FixedClipNorm(0.5),
    )  # fmt: skip
    expected = by_hand(MEMBERS, trained_by_hand(x, y, local, make), plan)
    still = {name for name, total in found.items() if not total.any()}
    assert still == ({"net.1.weight", "unused.weight", "unused.bias"} if make is FrozenAndUnused else set())
    assert {*differing(found, dict.fromkeys(still, 0) | expected)} == still


@SCALED
def test_a_user_who_trains_more_or_less_moves_the_sum_by_at_most_S(seed, scale, tmp_path):
    x, y = rows(12, seed)
    x[8:] *= scale
    user_of = torch.randint(3, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    record = User(8, "user_of", LocalTraining(lr=10.0, steps=3))
    users = {"users": 4, "precision": "32-true"}
    with_, _ = released(tmp_path, a_data_set(TensorDataset, x, y, [*user_of, 5, 5, 5, 5]), record, **users)
    without, _ = released(tmp_path, a_data_set(TensorDataset, x[:8], y[:8], user_of), record, **users)
    assert norm_of(with_, without) <= 1 + 1e-4


def test_a_users_training_depends_on_no_other(tmp_path, quiet, in_order):
    """To the last bit, though steps amplify it."""
    x, y = rows(12)
    user_of = THREE_EACH

    def total(some):
        dataset = a_data_set(TensorDataset, x[some], y[some], [user_of[i] for i in some])
        record = User(8, "user_of", LocalTraining(lr=2.0, steps=12))
        return released(tmp_path, dataset, record, users=4, precision="32-true")[0]

    apart = [total([i for i in range(12) if user_of[i] == user]) for user in range(4)]
    whole = total([*range(12)])
    for name in whole:
        assert torch.allclose(whole[name], sum(one[name] for one in apart), atol=1e-6, rtol=0)


def test_a_first_user_who_cannot_train_adds_nothing(tmp_path, quiet, in_order):
    x, y = rows(9)
    users, record = [[(x[i], y[i]) for i in some] for some in BY_THREES[:3]], User(3, None, LOCALS["epochs"])

    def total(users):
        return released(tmp_path, users, record, users=4, precision="32-true")[0]

    odd = [(x[0].double(), y[0])]
    with_odd, without = total([odd, *users]), total(users)
    assert all(torch.allclose(with_odd[name], without[name], atol=1e-6) for name in without)


class Elsewhere(Model):
    def __init__(self):
        super().__init__()
        weight = self.net[4].weight
        self.head = lambda x: F.linear(x, weight)

    def loss(self, batch):
        return F.cross_entropy(self.head(self.net[:4](batch[0])), batch[1])


class Unbatched(Model):
    def training_step(self, batch):
        return self.loss(batch[:2])


def test_what_cannot_train_is_refused_by_a_sentence(tmp_path):
    x, y = rows(11)
    record = User(8, "user_of", LOCALS["epochs"])
    with pytest.raises(ConfigError, match="used otherwise than as an attribute of its module"):
        released(tmp_path, a_data_set(TensorDataset, x, y), record, Elsewhere(), users=4, precision="32-true")
    dataset = a_data_set(Items, x, y)
    dataset.__class__ = type("Named", (Items,), {"__getitem__": lambda self, i: (self.x[i], self.y[i], "a name")})
    with pytest.raises(ConfigError, match="must hold tensors whose first dimension runs over the examples"):
        released(tmp_path, dataset, User(8, "user_of", LOCALS["batches"]), Unbatched(), users=4, precision="32-true")


class Telling(Model):
    def training_step(self, batch):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss


OTHERS = {
    "adaptive": {"clip_norm": adaptive_clipping.AdaptiveClipNorm(initial=0.1, learning_rate=1.0, budget_share=0.2)},
    "joint": {"mechanism": clipping.Joint(clipping.FixedClipNorm(0.5)), "clip_norm": None},
    "automatic": {"clip_rule": Automatic()},
}


@pytest.mark.parametrize("choices", OTHERS.values(), ids=OTHERS)
def test_users_who_train_go_with(choices, tmp_path):
    x, y = rows(11)
    found, plan = released(
        tmp_path, a_data_set(TensorDataset, x, y), User(8, "user_of", LOCALS["epochs"]), users=4, precision="32-true",
        **choices,
    )  # fmt: skip
    assert all(total.isfinite().all() and total.any() for total in found.values())
    assert read_ledger(tmp_path / "0.jsonl") == plan.ledger()
    assert plan.ledger().record["local"] == {"lr": 0.3, "steps": None, "epochs": 3, "batch_size": None}


def test_values_are_means_over_local_steps(tmp_path, quiet, monkeypatch):
    x, y = rows(12)
    local = LocalTraining(lr=0.3, epochs=2)
    dataset = a_data_set(TensorDataset, x.double(), y, THREE_EACH)
    told = {}

    def expected(positions):
        model, losses = Model().double(), []
        for _ in range(2):
            model.zero_grad()
            loss = model.loss((x[positions].double(), y[positions]))
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for p in model.parameters():
                    p -= local.lr * p.grad
        return sum(losses) / 2

    add = dpexp.privacy.private_metrics.MetricEstimates.add

    def watched(self, plan, t, found):
        told.update({key: value.clone() for key, value in found.items() if "train_loss" in key})
        return add(self, plan, t, found)

    monkeypatch.setattr(dpexp.privacy.private_metrics.MetricEstimates, "add", watched)
    released(
        tmp_path, dataset, User(8, "user_of", local), Telling(), users=4,
        private_metrics={"train_loss": {"clip_norm": 100.0, "budget_share": 0.1}},
    )  # fmt: skip
    (value,) = told.values()
    hand = sum(map(expected, BY_THREES)) / 4
    assert value.item() == pytest.approx(hand, abs=1e-9)


TRAINED = User(3, "user_of", LocalTraining(lr=0.1, steps=2, batch_size=2))


def test_users_who_train_unclipped_are_caught(tmp_path, monkeypatch):
    twice_the_bound(monkeypatch)
    choices = choices_of("user", privacy_unit=TRAINED, steps=1, noise_multiplier=1.0)
    assert check(shown(tmp_path, canaries=200, **choices), "contribution to model.0").refuted
