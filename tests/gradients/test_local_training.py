"""Users who train, against FedAvg written out with plain torch."""

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

from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan import adaptive_clipping, clipping, groups
from dpexp.privacy.plan.clipping import Automatic
from dpexp.privacy.private_metrics import MetricEstimates
from dpexp.privacy.sampling.privacy_unit import LocalTraining, User
from tests.audited import check, shown, twice_the_bound

__all__ = ["quiet"]
LOCALS = {
    "one step": LocalTraining(lr=0.5, steps=1),
    "epochs": LocalTraining(lr=0.3, epochs=3),
    "batches": LocalTraining(lr=0.3, epochs=2, batch_size=2),
    "steps": LocalTraining(lr=0.3, steps=4, batch_size=3),
}


def trained_by_hand(x, y, local, make=Model, losses=None):
    """θ_0 - θ_K of torch's own SGD on the examples at some positions; `losses` gets those of its steps."""

    def vector(positions):
        before, model = make().double(), make().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
        batches = torch.tensor(positions).split(local.batch_size or len(positions)) * (local.epochs or 100)
        for some in batches[: local.steps]:
            optimizer.zero_grad()
            loss = model.loss((x[some].double(), y[some]))
            loss.backward()
            optimizer.step()
            if losses is not None:
                losses.append(loss.item())
        after = dict(model.named_parameters())
        return {name: p.detach() - after[name].detach() for name, p in before.named_parameters()}

    return vector


@pytest.fixture
def in_order(monkeypatch):
    """Users' examples stay in their order."""
    monkeypatch.setattr(KeyStream, "permutation", lambda self, size: torch.arange(size))


class Transformer(Model):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Linear(1, 8), layer, nn.Flatten(), nn.Linear(32, 3))
        self.scale = nn.Parameter(torch.ones(4))

    def loss(self, batch):
        return super().loss((self.scale * batch[0], batch[1]))


class Tied(Model):
    """Also has a layer that is frozen, and one that is not used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
        self.net[2].weight = self.net[0].weight
        self.unused = nn.Linear(2, 2)


class Branching(Model):
    def loss(self, batch):
        return super().loss(batch) * (2 if batch[0].sum() > 0 else 1)


class Infinite(Model):
    """Its loss is finite for real records alone."""

    def loss(self, batch):
        return super().loss(batch) / (batch[0][:, 0] == 5).all()


CASES = {  # a kind of data set, how a user trains, a model
    **{name: (kind, local, Model) for (name, local), kind in zip(
        LOCALS.items(), (TensorDataset, Items, of_users, of_users), strict=True)},
    **{make.__name__: (TensorDataset, LOCALS["batches"], make) for make in (Transformer, Tied, Branching, Infinite)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_users_vector_is_how_far_its_training_goes(name, tmp_path, quiet, in_order):
    kind, local, make = CASES[name]
    x, y = rows(11)
    x[:, 0] = 5 if make is Infinite else x[:, 0]
    found, plan = released(
        tmp_path, a_data_set(kind, x.double(), y), User(8, None if kind is of_users else "user_of", local), make(),
        users=4, group=groups.flat() if make is Tied else groups.per_layer(),
        clip_norm=clipping.FixedClipNorm(0.5),
    )  # fmt: skip
    expected = by_hand(MEMBERS, trained_by_hand(x, y, local, make), plan)
    still = {name for name, total in found.items() if not total.any()}
    frozen = {"net.3.weight", "net.3.bias", "unused.weight", "unused.bias"}
    assert still == (frozen if make is Tied else set())
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


@pytest.mark.parametrize("cannot_train", [False, True])
def test_a_users_training_depends_on_no_other(cannot_train, tmp_path, quiet, in_order):
    """To the last bit, though steps amplify it; be it that the first cannot train, and adds nothing."""
    x, y = rows(12)
    users = [[(x[i], y[i]) for i in range(start, start + 3)] for start in range(0, 12, 3)]
    odd = [[(x[0].double(), y[0])]] if cannot_train else []

    def total(users):
        record = User(3, None, LocalTraining(lr=2.0, steps=12))
        return released(tmp_path, users, record, users=4, precision="32-true")[0]

    apart, whole = [total([user]) for user in users], total(odd + users)
    for name in whole:
        assert torch.allclose(whole[name], sum(one[name] for one in apart), atol=1e-6, rtol=0)


CHOICES = {
    "adaptive": {"clip_norm": adaptive_clipping.AdaptiveClipNorm(initial=0.1, learning_rate=1.0, budget_share=0.2)},
    "joint": {"mechanism": clipping.Joint(clipping.FixedClipNorm(0.5)), "clip_norm": None},
    "automatic": {"clip_rule": Automatic()},
}


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_users_who_train_go_with(choices, tmp_path):
    x, y = rows(11)
    record = User(8, "user_of", LOCALS["epochs"])
    found, plan = released(tmp_path, a_data_set(TensorDataset, x, y), record, users=4, precision="32-true", **choices)
    assert all(total.isfinite().all() and total.any() for total in found.values())
    assert read_ledger(tmp_path / "0.jsonl") == plan.ledger()
    assert plan.ledger().record["local"] == {"lr": 0.3, "steps": None, "epochs": 3, "batch_size": None}


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


def test_values_are_means_over_local_steps(tmp_path, quiet, monkeypatch):
    x, y = rows(11)
    told, losses, local, add = {}, [], LOCALS["epochs"], MetricEstimates.add

    def watched(self, plan, t, found):
        told.update({key: value.clone() for key, value in found.items() if "train_loss" in key})
        return add(self, plan, t, found)

    monkeypatch.setattr(MetricEstimates, "add", watched)
    released(
        tmp_path, a_data_set(TensorDataset, x.double(), y), User(8, "user_of", local), Telling(), users=4,
        private_metrics={"train_loss": {"clip_norm": 100.0, "budget_share": 0.1}},
    )  # fmt: skip
    for positions in MEMBERS:
        trained_by_hand(x, y, local, losses=losses)(positions)
    (value,) = told.values()
    assert value.item() == pytest.approx(sum(losses) / (4 * local.epochs), abs=1e-9)


TRAINED = User(3, "user_of", LocalTraining(lr=0.1, steps=2, batch_size=2))


def test_users_who_train_unclipped_are_caught(tmp_path, monkeypatch):
    twice_the_bound(monkeypatch)
    choices = choices_of("user", privacy_unit=TRAINED, steps=1, noise_multiplier=1.0)
    assert check(shown(tmp_path, canaries=200, **choices), "contribution to model.0").refuted
