"""Records of several examples, against the same done by hand; neighbours differ in a unit or a user."""

import math
import warnings
from collections import Counter

import audited
import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from plans import plan_of, trainer
from reference import norm_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpexp
from dpexp.accounting.ledger import Ledger, concatenate, read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.mechanism import MARGIN
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan import groups
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.sampling.privacy_unit import Example, Microbatch, User
from dpexp.rows import PlacedRows

SCALED = pytest.mark.parametrize("seed, scale", [*enumerate([1.0, 1e30, math.nan])])


class Model(pl.LightningModule):
    """A small CNN and a layer, with the mean loss of its batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)
        )

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Items(Dataset):
    """No TensorDataset, so that each example is fetched by itself."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def of_users(x, y, user_of):
    """Each index gives a list of one user's examples."""
    users = [[i for i, own in enumerate(user_of) if own == user] for user in dict.fromkeys(user_of)]
    return [[(x[i], y[i]) for i in members] for members in users]


@pytest.fixture
def quiet(monkeypatch):
    """No noise at all, which no plan may have."""

    def divided(self, sums, divisor=1.0):
        for total, _ in sums:
            total.div_(divisor)

    monkeypatch.setattr(GaussianNoise, "add_to", divided)


def rows(n, seed=1):
    torch.manual_seed(seed)
    return 3 * torch.randn(n, 4), torch.randint(3, (n,))


def released(folder, dataset, record, module=None, users=None, precision="64-true", **choices):
    """What one round releases, times qn: by parameter."""
    folder.mkdir(exist_ok=True)
    ledger = folder / f"{len([*folder.glob('*.jsonl')])}.jsonl"
    module = module or Model()
    plan = plan_of(
        module, n=len(dataset), users=users, privacy_unit=record,
        **{"sampling": "full_batch", "q": 1.0, "steps": 1, "noise_multiplier": 1e-6} | choices,
    )  # fmt: skip
    before = {name: p.detach().double().clone() for name, p in module.named_parameters()}
    callback = dpexp.PrivacyCallback(plan, ledger, noise_seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(callback, precision=precision).fit(module, DataLoader(dataset, 2))
    factor = plan.sampling.q * plan.n
    return {name: (before[name] - p.detach().double()) * factor for name, p in module.named_parameters()}, plan


def by_hand(records, vector, plan):
    """Σ_u c_u v_u: one record after another, straight from the paper."""
    sums = {}
    for record in records:
        v = vector(record)
        for group in plan.groups:
            names = [name for one in group.vectors for name in one.parameters]
            norm = math.sqrt(sum(v[name].square().sum().item() for name in names))
            c = min(1.0, group.S * (1 - MARGIN[torch.float64]) / norm)
            for name in names:
                sums[name] = sums.get(name, 0) + c * v[name]
    return sums


def mean_gradient(x, y):
    def vector(positions):
        model = Model().double()
        model.loss((x[positions].double(), y[positions])).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    return vector


USER_OF = [7, 2, 2, 7, 9, 2, 2, 9, 5, 5, 5]
MEMBERS = [[0, 3], [1, 2, 5, 6], [4, 7], [8, 9, 10]]


def a_data_set(kind, x, y, user_of=USER_OF):
    if kind is of_users:
        return of_users(x, y, user_of)
    dataset = kind(x, y)
    dataset.user_of = user_of
    return dataset


def differing(found, expected):
    """The names of sums that are not as expected, or next to nothing."""

    def is_same(name):
        return found[name].norm() > 0.01 and torch.allclose(found[name], expected[name], atol=1e-9, rtol=0)

    return [name for name in found.keys() | expected.keys() if not is_same(name)]


class Unread(Items):
    """Items of which some cannot be fetched."""

    def __getitem__(self, i):
        if i in ODD:
            raise OSError
        return super().__getitem__(i)


ODD = (1, 3, 4, 5)  # of which all of a unit of three


def unusable(x, y):
    return PlacedRows(x, y, usable=torch.tensor([k not in ODD for k in range(len(x))]), reason="odd.")


def in_units(k):
    return [[*range(i, min(i + k, 11))] for i in range(0, 11, k)]


BY_ATTRIBUTE, WITHOUT_SOME = User(8, "user_of"), [7, 2, 2, -1, 9, 2, 2, 9, 5, 5, -1]
LEFT = [  # of units some of whose examples cannot be used
    (unusable, Example(), [[k] for k in (0, 2, 6, 7, 8, 9, 10)]),
    (unusable, User(4, "user_of"), [[2, 6], [8, 9], [0], [7]]),
    (Unread, Microbatch(3), [[0, 2], [6, 7, 8], [9, 10]]),
]


@pytest.mark.parametrize(
    "kind, record, units, user_of",
    [
        *((kind, Microbatch(k), in_units(k), USER_OF) for k, kind in ((3, TensorDataset), (4, Items))),
        *((kind, BY_ATTRIBUTE, MEMBERS, USER_OF) for kind in (TensorDataset, Items)),
        (of_users, User(8, None), MEMBERS, USER_OF),
        *(pytest.param(*left, WITHOUT_SOME, id=f"left_out-{left[1]}") for left in LEFT),
    ],
)
def test_a_units_vector_is_the_mean_gradient_of_its_examples(kind, record, units, user_of, tmp_path, quiet):
    """Of those that can be used."""
    x, y = rows(11)
    dataset = a_data_set(kind, x.double(), y, user_of)
    choices = {"clip_norm": FixedClipNorm(0.3), "group": groups.per_layer()}
    found, plan = released(tmp_path, dataset, record, users=4, **choices)
    assert differing(found, by_hand(units, mean_gradient(x, y), plan)) == []
    assert plan.n == (len(units) if user_of is USER_OF else {Example: 11}.get(type(record), 4))


@pytest.mark.parametrize("kind", [TensorDataset, of_users])
def test_of_a_user_with_more_examples_a_random_part_is_used(kind):
    """Another one each round; those of a smaller one stay."""
    dataset = a_data_set(kind, torch.arange(11), torch.zeros(11))
    units, stream = User(2, None if kind is of_users else "user_of").units(dataset), KeyStream.known(0, "sampling", 0)
    by_number = MEMBERS if kind is of_users else [MEMBERS[k] for k in (1, 3, 0, 2)]
    for i, members in enumerate(by_number):
        drawn = [units.examples(dataset, units.draw(i, stream)) for _ in range(200)]
        chosen = [tuple(int(example[0]) for example in own) for own in drawn]
        counts = Counter(member for some in chosen for member in some)
        assert all(len({*some}) == 2 for some in chosen) and counts.keys() == {*members}
        assert len(members) > 2 or {*chosen} == {tuple(members)}
        assert all(abs(count - 200 * 2 / len(members)) < 40 for count in counts.values())  # 5.6 standard deviations


@pytest.mark.parametrize(
    "record, last, seed, scale",
    [(BY_ATTRIBUTE, 4, 1, 1e30), (Microbatch(3), 3, 2, math.inf)],
)
def test_a_unit_more_or_less_moves_the_sum_by_at_most_S_and_an_example_by_twice_that(
    record, last, seed, scale, tmp_path
):
    """With next to no noise, whatever it has, and however much of it."""
    x, y = rows(8 + last, seed)
    x[8:] *= scale
    others = torch.randint(3, (8,), generator=torch.Generator().manual_seed(seed)).tolist()

    def sums(x, y):
        dataset = a_data_set(TensorDataset, x, y, [*others, *[5] * last][: len(x)])
        return released(tmp_path, dataset, record, users=4, precision="32-true")[0]

    some = sums(x, y)
    assert norm_of(some, sums(x[:8], y[:8])) <= 1 + 1e-4
    if record is not BY_ATTRIBUTE:
        x[-1] = 5.0
        assert norm_of(some, sums(x, y)) <= 2 + 1e-4


def choices_of(kind, **more):
    """For an audit of 2000 users with 4 examples each."""
    return {"data": data_of_users, "n": 2000, "users": 2000} | more


def data_of_users():
    data = audited.Synthetic(8000, [4], 3)
    data.train.user_of = [i // 4 for i in range(8000)]
    return data


def test_the_privacy_unit_is_in_the_ledger_and_the_plan(tmp_path, read_lines):
    dataset = a_data_set(TensorDataset, *rows(11))
    _, plan = released(tmp_path, dataset, User(8, "user_of"), users=4, precision="32-true")
    header = read_lines(tmp_path / "0.jsonl")[0]
    assert header["record"] == {"kind": "user", "most": 8, "by": "user_of", "local": None}
    ledger = read_ledger(tmp_path / "0.jsonl")
    assert ledger.unit == "user" and plan.ledger() == ledger
    assert plan_of(Model(), n=11, q=0.5, steps=1, noise_multiplier=1.0).ledger().record is None
    others = [
        Ledger("add_remove", {}, record=record) for record in (None, *(Microbatch(k).to_header() for k in (4, 8)))
    ]
    for different in ([ledger, others[0]], others[1:]):
        with pytest.raises(ConfigError, match="different privacy units"):
            concatenate(different)


@pytest.mark.parametrize(
    "given, said",
    [
        ("{_target_: dpexp.Microbatch}", "dpexp.Microbatch cannot be made: .* 'size'"),
        ("{_target_: dpexp.Microbatch, size: 0}", "privacy_unit.size=0 must be an integer"),
        ("{_target_: dpexp.Example, size: 2}", "privacy_unit.size=2 is no option of dpexp.Example"),
        ("{_target_: dpexp.User, max_examples: 0}", "privacy_unit.max_examples=0 must be an integer"),
        (
            "{_target_: dpexp.User, local_training: {lr: 1}}",
            "exactly one of privacy_unit.local_training.steps or privacy_unit.local_training.epochs",
        ),
        ("{_target_: dpexp.User, local_training: {steps: 1}}", "must give lr, and steps or epochs"),
        ("{_target_: dpexp.User, local_training: {lr: 1, rate: 1}}", "'rate': 1} must give .* no other keys"),
        ("{_target_: dpexp.User, local_training: 3}", "privacy_unit.local_training=3 must give lr"),
        ("{_target_: dpexp.User, local_training: {steps: 1, lr: -1}}", "local_training.lr=-1 must be"),
    ],
)
def test_what_a_record_cannot_be_is_said(given, said):
    from dpexp.commands.objects import made_of  # which imports Hydra

    with pytest.raises(ConfigError, match=said):
        made_of("privacy_unit", OmegaConf.create(given))


@pytest.mark.parametrize(
    "user_of, users, said",
    [
        (None, None, r"privacy_unit=user counts users: give data.users"),
        (None, 4, r"privacy_unit.user_attribute=user_of must be an attribute of the training data set"),
        ([1, 2], 4, r"a list of as many integers; there is a list of another length"),
    ],
)
def test_what_a_data_set_does_not_say_is_asked_for(user_of, users, said, tmp_path):
    dataset = TensorDataset(*rows(11))
    if user_of:
        dataset.user_of = user_of
    with pytest.raises(ConfigError, match=said):
        released(tmp_path, dataset, BY_ATTRIBUTE, users=users)


def test_a_pair_is_an_example_and_no_list_of_two(tmp_path):
    x, y = rows(8)
    with pytest.raises(ConfigError, match="each index is a list of a user's examples; it has a tuple, as an example"):
        released(tmp_path, [(a, a) for a in x], User(2, None))
    pairs = [*zip(x, y, strict=True)]
    for data in ([pairs[:4], pairs[4:]], [tuple(pairs[:4]), tuple(pairs[4:])]):
        assert [len(User(8, None).units(data).examples(data, (i, bytes(32)))) for i in range(2)] == [4, 4]
