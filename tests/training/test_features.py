"""Features are of one record each, and computed once."""

import copy
import stat
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from dpexp.errors import ConfigError, RecordError
from dpexp.rows import PlacedRows
from dpexp.training.data import (
    Backbone,
    Deskewed,
    Digits,
    Features,
    Joined,
    LumaAndChroma,
    Mirrored,
    RandomFeatures,
    Scattering,
    TensorData,
)
from dpexp.training.data.features import as_map, compute_features
from dpexp.training.pretrained import save_weights


def images(*shape, seed=0):
    """Between 0 and 1."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


class Squares:
    """Counts how often it is asked."""

    def __init__(self, at_once=1):
        self.asked, self.at_once = 0, at_once

    def __call__(self, x):
        assert len(x) <= self.at_once
        self.asked += len(x)
        return x**2


def data(seed=0, n=10):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return TensorData((x, torch.arange(n) % 2), (x[:3] + 1, torch.arange(3)))


@pytest.mark.parametrize("at_once", [1, 4])
def test_features_take_the_place_of_x_and_are_made_once(cache, at_once):
    by, of, n = Squares(at_once), data(n=200), 200
    first = Features(of, by, cache)
    assert torch.equal(first.train.tensors[0], of.train.tensors[0] ** 2)
    assert torch.equal(first.test.tensors[0], of.test.tensors[0] ** 2)
    assert first.train.tensors[1] is of.train.tensors[1]
    compared = 16 + 3 + 2  # and a record of zeros each
    assert by.asked == n + 3 + compared  # the rest by a copy
    again = Features(data(n=200), by, cache)
    assert torch.equal(again.train.tensors[0], first.train.tensors[0]) and by.asked == n + 3 + 2 * compared
    Features(data(seed=1, n=200), by, cache)
    assert by.asked == 2 * (n + 3) + 3 * compared, "other records have other features"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (Path(cache), *Path(cache).iterdir())]
    assert modes == [0o700, *[0o600] * 4]


def test_one_other_record_makes_other_features(cache):
    first, other = data(n=200), data(n=200)
    other.train.tensors[0][1] += 1  # not among those whose features are compared
    for of in (first, other):
        found = Features(of, Squares(), cache)
        assert torch.equal(found.train.tensors[0], of.train.tensors[0] ** 2)


class Keeping:
    """A map of so many records at once, which may keep something of them."""

    kept = torch.tensor(0.0)

    def __init__(self, change, at_once=1):
        self.change, self.at_once = change, at_once

    def __call__(self, x):
        return self.change(self, x)


class Shared(Keeping):
    """One that has no copy of its own."""

    def __deepcopy__(self, memo):
        return self


def fitted_to_the_first(own, x):
    own.kept = own.kept or x.mean()
    return x - own.kept


def running_maximum(own, x):
    own.kept = torch.maximum(own.kept, x.abs().max())
    return x / own.kept.clamp(min=1e-9)


def less_the_one_before(own, x):
    before, own.kept = own.kept, x
    return x - before


def room_for_twenty(own, x):
    return x * (torch.arange(len(x)) < 20)[:, None]


def with_the_largest_first():
    """Records of which each has a 1 first, and no larger number."""
    x = images(40, 4)
    x[:, 0] = 1
    return TensorData((x, x[:, 1]), (x[:3], x[:3, 1]))


@pytest.mark.parametrize(
    "by, of",
    [
        (Keeping(fitted_to_the_first), data(n=200)), (Keeping(lambda own, x: x - x.mean(0), 8), data(n=200)),
        (Keeping(room_for_twenty, 32), data(n=200)), (torch.rand_like, data(n=200)),
        (Shared(less_the_one_before), data()),
        (Keeping(running_maximum), TensorData(*[(torch.ones(9, 4), torch.zeros(9))] * 2)),
        (Shared(running_maximum), with_the_largest_first()),
        (Keeping(lambda own, x: x / x.abs().amax().clamp(min=1e-9), 8), with_the_largest_first()),
    ],
)  # fmt: skip
def test_features_that_are_no_function_of_one_record_are_refused(by, of, cache):
    """Also if they would be the same for the records that are compared."""
    with pytest.raises(ConfigError, match=r"features of a record must depend on that record alone"):
        Features(of, by, cache)
    assert not Path(cache).exists()


def test_a_map_may_refuse_large_records(cache):
    def by(x):
        assert x.abs().max() < 100
        return 2 * x

    assert torch.equal(Features(data(), by, cache).train.tensors[0], 2 * data().train.tensors[0])


def test_what_a_map_keeps_of_the_first_record_where_no_copy_has_its_own_is_of_no_record(cache):
    by = Shared(lambda own, x: x - own.__dict__.setdefault("first", x.mean()))
    assert torch.equal(Features(data(), by, cache).train.tensors[0], data().train.tensors[0])


def test_a_map_gets_aligned_records_of_its_own(cache):
    of, x = data(), data().train.tensors[0]
    addresses = []

    def by(one):
        addresses.append(one.data_ptr() % 64)
        return one.mul_(2)

    assert torch.equal(Features(of, by, cache).train.tensors[0], 2 * x)
    assert torch.equal(of.train.tensors[0], x) and {*addresses} == {0}


SOME = torch.utils.data.SubsetRandomSampler(range(3))
CHOSEN = {
    "a sampler": {"batch_size": 2, "sampler": SOME},
    "a sampler of others": {"sampler": torch.utils.data.SequentialSampler(range(3))},
    "some": {"sampler": RandomSampler(data().train, num_samples=3)},
    "a batch sampler": {"batch_sampler": torch.utils.data.BatchSampler(SOME, 2, False)},
    "a collate_fn": {"collate_fn": list},
}


@pytest.mark.parametrize("name", ["train_dataloader", "test_dataloader", "val_dataloader"])
@pytest.mark.parametrize("what", CHOSEN)
def test_a_loader_that_does_not_give_each_record_as_it_is_is_refused(cache, name, what):
    of = data()
    setattr(of, name, lambda: DataLoader(of.train, **CHOSEN[what]))
    said = "a collate_fn" if what == "a collate_fn" else "a sampler"
    with pytest.raises(ConfigError, match=f"has {said} of its own"):
        Features(of, Squares(), cache)


def test_users_are_those_of_the_loaders_records(cache):
    of = Digits(users=7)
    assert Features(of, abs, cache).train.user_of is of.train.user_of
    of.train_dataloader = lambda: DataLoader(data().train)
    assert not hasattr(Features(of, abs, cache).train, "user_of")


class MadeInSetup(pl.LightningDataModule):
    def setup(self, stage):
        self.sets = {stage: data()} | getattr(self, "sets", {})

    def train_dataloader(self):
        return self.sets["fit"].train_dataloader()

    def test_dataloader(self):
        return self.sets["test"].test_dataloader()


def test_a_data_module_that_is_set_up_and_has_no_validation_set(cache):
    found = Features(MadeInSetup(), Squares(), cache)
    assert torch.equal(found.train.tensors[0], data().train.tensors[0] ** 2)
    assert found.val_dataloader().dataset is found.test


@pytest.mark.parametrize("around", [Mirrored, Deskewed, lambda of: Joined([of])])
def test_a_network_within_a_map_is_in_evaluation_mode(around):
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout())
    x = images(1, 1, 6, 6)
    assert torch.equal(around(model)(x), around(model)(x))
    assert not model[0].running_mean.any()


def test_another_map_has_other_features(cache):
    layers = [nn.Sequential(nn.Softplus(beta=beta), nn.Linear(4, 4)) for beta in (1.0, 5.0, 5.0)]
    maps = [lambda x, factor=factor: factor * x for factor in (1, 2, 1 + 1e-7)]
    for by in [*maps, *layers, lambda x: x.bfloat16(), lambda x: x.bfloat16()]:
        expected = torch.cat([by(one[None]) for one in data().train.tensors[0]])
        assert torch.equal(Features(data(), by, cache).train.tensors[0], expected)
    assert len(list(Path(cache).iterdir())) == 2 * 7  # training and test sets


def test_a_file_that_is_damaged_or_holds_something_else_is_made_again(cache):
    features = Features(data(), Squares(), cache)
    for content in ({"other": torch.zeros(2)}, {"features": torch.zeros(2, 4)}, {"features": torch.tensor(1.0)}, None):
        for path in Path(cache).iterdir():
            save_file(content, path) if content else path.write_bytes(path.read_bytes()[:50])
        again = Features(data(), Squares(), cache)
        assert torch.equal(again.train.tensors[0], features.train.tensors[0])


MNIST, CIFAR = [1, 28, 28], [3, 32, 32]
TWO_SCALES = [Scattering(MNIST, groups=27), Scattering(MNIST, J=3, groups=31)]
MAPS = [
    (Scattering(CIFAR), CIFAR, [243, 8, 8]),
    (LumaAndChroma(Scattering(CIFAR, J=3)), CIFAR, [651, 4, 4]),
    (Joined(TWO_SCALES), MNIST, [81 * 7 * 7 + 217 * 3 * 3]),
    (RandomFeatures(TWO_SCALES[0], channels=81, count=18, groups=9), MNIST, [99, 7, 7]),
    (Mirrored(RandomFeatures(TWO_SCALES[0], 81, 6)), MNIST, [87, 7, 7]),
    (Deskewed(torch.clone), MNIST, MNIST),
]


@pytest.mark.parametrize("by, shape, expected", MAPS, ids=lambda value: type(value).__name__)
def test_features_are_of_each_image_by_itself_to_the_bit(by, shape, expected):
    x = images(10, *shape) * 2 - 1
    others = torch.where(torch.arange(10).view(-1, 1, 1, 1) == 5, x, 1e30 * torch.ones(()))
    features = compute_features(x, by, 7)
    if isinstance(by, Joined):
        assert torch.equal(features, torch.cat([one(x).flatten(1) for one in TWO_SCALES], dim=1))
    assert [*features.shape] == [10, *expected]
    assert torch.equal(compute_features(others, by, 7)[5], features[5]) and torch.equal(by(x[5:6])[0], features[5])


def test_scattering_features_are_normalized_if_asked():
    x = images(3, 1, 28, 28) * 2 - 1
    assert torch.allclose(TWO_SCALES[0](x), nn.functional.group_norm(Scattering(MNIST)(x), 27), atol=1e-4)


def test_random_features_are_rectified_convolutions_with_kernels_that_know_no_data():
    first, second = (RandomFeatures(lambda x: x, 4, 6, size=3, groups=2) for _ in range(2))
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(0)).double().float()
    assert torch.equal(first(x), second(x)) and torch.equal(first(x)[:, :4], x)
    beside = first(x)[:, 4:].unflatten(1, (2, 3)).flatten(2)
    assert beside.mean(2).abs().max() < 1e-5 and (beside.var(2, correction=0) - 1).abs().max() < 1e-2
    assert (beside.amin(2, keepdim=True) == beside).double().mean() > 0.2, "what ReLU cuts off is one value"


def test_rows_that_cannot_be_used_users_and_class_names_stay(cache):
    of = data()
    of.train = PlacedRows(*of.train.tensors, usable=torch.arange(10) != 4, reason="odd.")
    of.train.user_of, of.class_names = [*range(10)], ["zero", "one"]
    features = Features(of, abs, cache)
    train = features.train
    assert train.usable is of.train.usable and train.user_of is of.train.user_of
    assert features.class_names == ["zero", "one"]
    assert torch.equal(train.tensors[0], of.train.tensors[0].abs()) and of.train.tensors[0].min() < 0
    with pytest.raises(RecordError, match=r"odd\."):
        train[4]


def test_validation_records_are_not_those_of_the_test_set(cache):
    of = data()
    of.val_dataloader = lambda: DataLoader(TensorDataset(torch.full((2, 4), -3.0), torch.arange(2)))
    for made, expected in ((of, torch.full((2, 4), 3.0)), (data(), data().test.tensors[0].abs())):
        loader = Features(made, abs, cache).val_dataloader()
        assert torch.equal(loader.dataset.tensors[0], expected)


def test_a_folder_that_cannot_be_written_is_told_not_the_map(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache=.*file: .* GiB of features cannot be written there: .*exists"):
        Features(data(), abs, str(tmp_path / "file"))


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Tanh(), nn.Linear(3, 2))


def test_a_backbone_is_a_network_up_to_a_layer_without_dropout(tmp_path, cache):
    model, path = network(), tmp_path / "weights.safetensors"
    save_weights(model, path, {"private": "False"})
    features = Features(data(), Backbone(network(), "2", weights=str(path)), cache)
    assert torch.allclose(features.train.tensors[0], model[0](data().train.tensors[0]).tanh())
    assert torch.allclose(Backbone(model)(torch.ones(1, 4)), model.eval()(torch.ones(1, 4)))


def test_a_backbone_with_batch_norm_keeps_its_statistics_and_resizes_and_normalizes_images():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2))
    x = images(4, 3, 8, 8) * 2 - 1
    before = copy.deepcopy(model.state_dict())
    mean, std = [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]
    by = Backbone(model, "2", size=12, mean=mean, std=std)
    resized = nn.functional.interpolate(x, size=(12, 12), mode="bicubic") / 2 + 0.5
    normal = (resized - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(compute_features(x, by), model[:3](normal).flatten(1), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def with_train_set(*tensors):
    of = data()
    of.train = TensorDataset(*tensors)
    return of


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Scattering(MNIST, groups=10), "data.features_of.groups=10 must divide the 81 channels"),
        (lambda: Scattering(MNIST, groups=0), "data.features_of.groups=0 must divide the 81 channels"),
        (lambda: RandomFeatures(abs, 4, 6, groups=4), "groups must divide count, and size must be odd"),
        (lambda: RandomFeatures(abs, 4, 6, size=2), "groups must divide count, and size must be odd"),
        (lambda: RandomFeatures(abs, 4, 0), "must be positive integers"),
        (lambda: Backbone(network(), "5"), "layer=5 is no module of Sequential; its most similar modules are [0-3], "),
        (lambda: Backbone(network(), ["1", "5"]), "layer=5 is no module of Sequential"),
        (lambda: compute_features(torch.ones(5, 4), lambda x: x[:1], 2), "gives 1 rows for 2 records"),
        (lambda: compute_features(torch.ones(5, 4), nn.BatchNorm1d(4)), r"BatchNorm takes .* call eval\(\) on the"),
        (
            lambda: compute_features(torch.ones(5, 4), as_map(nn.BatchNorm1d(4, track_running_stats=False))),
            r"if it keeps no running statistics \(track_running_stats=False\), choose another layer, as GroupNorm",
        ),
        (lambda: Backbone(network(), mean=[0.5]), r"give mean=\[0\.5\] and std=None both, or neither"),
        (lambda: Backbone(network(), weights="nowhere"), "nowhere does not fit the model: No such file"),
        (
            lambda: Features(with_train_set(torch.zeros(3, 4)), Squares(), "cache"),
            r"the train set of TensorData is a TensorDataset that .*; features need a",
        ),
    ],
)
def test_what_makes_no_features_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_mirrored_features_are_the_mean_of_two_views():
    x = images(5, 1, 28, 28) * 2 - 1
    by = RandomFeatures(Scattering(MNIST, groups=27), 81, 6)
    both = compute_features(x, Mirrored(by))
    assert torch.allclose(both, (compute_features(x, by) + compute_features(x.flip(3), by)) / 2, atol=1e-6)
    assert torch.equal(both, compute_features(x.flip(3), Mirrored(by)).contiguous())


def moments(image):
    mass = image / image.sum()
    down, right = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    row, column = (mass * down).sum(), (mass * right).sum()
    return row, column, (mass * (down - row) * (right - column)).sum() / (mass * (down - row) ** 2).sum()


def test_luma_and_chroma_of_grey_and_blue():
    x = torch.tensor([[0.3, 0.3, 0.3], [-1.0, -1.0, 1.0]])[..., None, None]
    found = LumaAndChroma(lambda x: x)(x).flatten(1)
    assert torch.allclose(found, torch.tensor([[0.3, 0.0, 0.0], [-0.772, 1.0, (-1 + 0.772) / 1.402]]), atol=1e-6)


def test_deskewed_images_are_centred_and_upright():
    down, right = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    strokes = [((right - 11 - slope * (down - 12)).abs() < 2) & ((down - 12).abs() < 8) for slope in (-0.5, 0.0, 0.4)]
    x = torch.stack(strokes).float()[:, None] * 2 - 1
    upright = Deskewed(torch.clone)(x)
    for after in upright:
        row, column, slant = moments((after[0] + 1) / 2)
        assert abs(row - 13.5) < 0.2 and abs(column - 13.5) < 0.2 and abs(slant) < 0.05
    assert moments((x[0, 0] + 1) / 2)[2] < -0.3
    assert torch.equal(Deskewed(torch.clone)(-torch.ones(1, 1, 28, 28)), -torch.ones(1, 1, 28, 28)), "an empty image"


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Tanh()

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


def test_a_record_that_skips_a_layer_never_gets_the_features_of_another():
    by = Backbone(Skipping(), "layer")
    by(torch.ones(1, 4))
    with pytest.raises(ConfigError, match="a record does not pass through layer=layer"):
        by(-torch.ones(1, 4))


def test_several_layers_of_a_backbone_are_averaged_over_positions_and_normalized():
    model = nn.Sequential(nn.Conv2d(1, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(4 * 24 * 24, 7))
    x = images(3, 1, 28, 28)
    features = compute_features(x, Backbone(model, ["1", "4"]))
    for columns, mean in ((features[:, :5], model[:2](x).mean((2, 3))), (features[:, 5:], model(x))):
        assert torch.allclose(columns, nn.functional.layer_norm(mean, mean.shape[1:]), atol=1e-4)
