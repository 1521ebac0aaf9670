"""Features are of one record each, made once, and tell whose weights made them."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dpexp.errors import ConfigError
from dpexp.training.data import Backbone, Features, Joined, RandomFeatures, Scattering, TensorData
from dpexp.training.data.features import compute_features
from dpexp.training.models import scattering_cnn, scattering_linear
from dpexp.training.pretrained import save_weights

SQUARES, MADE_UP, LOOKED_AT = 3, 4, 64


class Squares:
    """Counts how often it is asked."""

    def __init__(self):
        self.asked = 0

    def __str__(self):
        return "squares"

    def __call__(self, x):
        self.asked += len(x)
        return x**2


def data(seed=0, n=10):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return TensorData((x, torch.arange(n) % 2), (x[:SQUARES] + 1, torch.arange(SQUARES)))


@pytest.mark.parametrize("at_once", [1, 4])
def test_features_take_the_place_of_x_and_are_made_once(tmp_path, at_once):
    by, of, n = Squares(), data(n=200), 200
    first = Features(of, by, str(tmp_path), at_once)
    assert torch.equal(first.train.tensors[0], of.train.tensors[0] ** 2) and by.asked == n + SQUARES + 2 * MADE_UP
    assert torch.equal(first.test.tensors[0], of.test.tensors[0] ** 2)
    assert first.train.tensors[1] is of.train.tensors[1]
    made = by.asked
    again = Features(data(n=200), by, str(tmp_path), at_once)
    assert torch.equal(again.train.tensors[0], first.train.tensors[0])
    assert by.asked == made + LOOKED_AT + SQUARES + 2 * MADE_UP
    kept = by.asked
    Features(data(seed=1, n=200), by, str(tmp_path), at_once)
    assert by.asked == kept + made, "other records have other features"
    assert not list(tmp_path.glob("tmp*"))


def test_another_map_has_other_features(tmp_path):
    for factor in range(1, 4):
        features = Features(data(), lambda x, factor=factor: factor * x, str(tmp_path))
        assert torch.equal(features.train.tensors[0], factor * data().train.tensors[0])
    layers = [nn.Sequential(nn.Softplus(beta=1), nn.Linear(4, 4)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1][0].beta, layers[1][0].extra_repr = 5.0, layers[0][0].extra_repr  # says of itself what the other says
    made = [Features(data(), one, str(tmp_path)).train.tensors[0] for one in layers]
    assert str(layers[0]) == str(layers[1]) and not torch.equal(*made)


@pytest.mark.parametrize("size", [1.0, 1e-5])
def test_small_features_of_another_map_are_told_from_those_kept(tmp_path, size):
    def clamped(at):
        def by(x):
            return (size * x).clamp(max=size * at)

        by.__qualname__ = "by"
        return by

    x = torch.linspace(0, 1, 800).view(200, 4)
    of = TensorData((x, torch.zeros(200)), (x, torch.zeros(200)))
    for at in (0.5, 5.0):  # alike on made-up records but for their size
        found = Features(of, clamped(at), str(tmp_path)).train.tensors[0]
        assert torch.equal(found, clamped(at)(x))


@pytest.mark.parametrize("inside", [lambda layer: layer, lambda layer: Joined([layer]), lambda layer: layer.forward])
def test_a_layer_of_other_weights_is_another_map(tmp_path, inside):
    """Also where they are alike for all records that anybody looks at."""
    x = torch.arange(2000).view(-1, 1)
    of = TensorData((x, x[:, 0]), (x, x[:, 0]))
    layers = [nn.Embedding(2000, 3), nn.Embedding(2000, 3)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].weight.data[1] += 1
    for layer in layers:
        features = Features(of, inside(layer), str(tmp_path)).train.tensors[0]
        assert torch.equal(features.flatten(), layer(x).flatten())


def test_features_may_be_of_half_precision(tmp_path):
    for _ in range(2):
        features = Features(data(), lambda x: x.bfloat16(), str(tmp_path)).train.tensors[0]
        assert torch.equal(features, data().train.tensors[0].bfloat16())


def test_records_of_whole_numbers_are_tried_on_numbers_that_they_hold(tmp_path):
    x = torch.tensor([[5, 9], [7, 5], [9, 9]])
    asked = []

    def by(x):
        asked.append(x)
        return x.double()

    assert torch.equal(Features(TensorData((x, x[:, 0]), (x, x[:, 0])), by, str(tmp_path)).train.tensors[0], x.double())
    asked = torch.cat(asked)
    assert asked.dtype == torch.int64 and asked.min() >= 5 and asked.max() <= 9


def test_a_file_that_is_damaged_or_holds_something_else_is_made_again(tmp_path):
    features = Features(data(), Squares(), str(tmp_path))
    for content in (
        {"other": torch.zeros(2)}, {"features": torch.zeros(2, 4)}, {"features": torch.zeros(10, 4)},
        {"features": torch.tensor(1.0)}, {"features": features.train.tensors[0].double()},
    ):  # fmt: skip
        for path in tmp_path.iterdir():
            save_file(content, path)
        again = Features(data(), Squares(), str(tmp_path))
        assert torch.equal(again.train.tensors[0], features.train.tensors[0])
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:50])
    again = Features(data(), Squares(), str(tmp_path))
    assert torch.equal(again.train.tensors[0], features.train.tensors[0])


@pytest.mark.parametrize("at_once", [1, 7])
def test_scattering_is_of_each_image_by_itself_to_the_bit(at_once):
    scattering = Scattering([3, 32, 32])
    x = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    features = compute_features(x, scattering, at_once)
    assert features.shape == (16, 243, 8, 8)
    others = torch.where(torch.arange(16).view(-1, 1, 1, 1) == 9, x, 1e30 * torch.ones(()))
    assert torch.equal(compute_features(others, scattering, at_once)[9], features[9])
    assert torch.equal(scattering(x[9:10])[0], features[9])


@pytest.mark.parametrize("at_once", [7])
def test_joined_are_features_of_several_maps_of_each_image_by_itself(at_once):
    scales = [Scattering([1, 28, 28], groups=27), Scattering([1, 28, 28], J=3, groups=31)]
    x = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 2 - 1
    features = compute_features(x, Joined(scales), at_once)
    assert features.shape == (16, 81 * 7 * 7 + 217 * 3 * 3)
    assert torch.equal(features, torch.cat([compute_features(x, by).flatten(1) for by in scales], dim=1))
    others = torch.where(torch.arange(16).view(-1, 1, 1, 1) == 9, x, 1e30 * torch.ones(()))
    assert torch.equal(compute_features(others, Joined(scales), at_once)[9], features[9])
    assert str(Joined(scales)) != str(Joined(scales[:1])) != str(Joined(scales[1:]))


def test_scattering_is_wavelet_moduli():
    """Of a constant image the averages alone are not zero; a shift by less than 2^J pixels changes little."""
    scattering = Scattering([1, 28, 28])
    flat = scattering(torch.ones(1, 1, 28, 28))[0]
    assert flat.shape == (81, 7, 7) and torch.allclose(flat[0], torch.ones(7, 7), atol=1e-4)
    assert flat[1:].abs().max() < 1e-4
    x = torch.zeros(1, 1, 28, 28) - 1
    x[..., 10:18, 10:18] = 1
    a, b = scattering(x), scattering(x.roll(1, -1))
    assert (a - b).norm() < 0.5 * (x - x.roll(1, -1)).norm()


def test_scattering_features_are_normalized_if_asked():
    x = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 2 - 1
    plain, normalized = Scattering([1, 28, 28])(x), Scattering([1, 28, 28], groups=27)(x)
    for k in range(27):
        own = plain[:, 3 * k : 3 * k + 3].flatten(1)
        expected = (own - own.mean(1, keepdim=True)) / (own.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        assert torch.allclose(normalized[:, 3 * k : 3 * k + 3].flatten(1), expected, atol=1e-4)
    for groups in (10, 0, -27, 27.0):
        with pytest.raises(ConfigError, match=r"data\.module\.by\.groups=\S+ must divide the 81 channels"):
            Scattering([1, 28, 28], groups=groups)


@pytest.mark.parametrize("at_once", [7])
def test_random_features_are_of_each_record_by_itself_to_the_bit(at_once):
    lift = RandomFeatures(Scattering([1, 28, 28], groups=27), channels=81, count=18, groups=9)
    x = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(0)) * 2 - 1
    features = compute_features(x, lift, at_once)
    assert features.shape == (16, 99, 7, 7) and torch.equal(lift(x[9:10])[0], features[9])
    others = torch.where(torch.arange(16).view(-1, 1, 1, 1) == 9, x, 1e30 * torch.ones(()))
    assert torch.equal(compute_features(others, lift, at_once)[9], features[9])


def test_random_features_are_rectified_convolutions_with_kernels_that_know_no_data():
    first, second = (RandomFeatures(lambda x: x, 4, 6, size=3, groups=2) for _ in range(2))
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(0)).double().float()
    assert torch.equal(first(x), second(x)) and torch.equal(first(x)[:, :4], x)
    beside = first(x)[:, 4:].unflatten(1, (2, 3)).flatten(2)
    assert beside.mean(2).abs().max() < 1e-5 and (beside.var(2, correction=0) - 1).abs().max() < 1e-2
    assert (beside.amin(2, keepdim=True) == beside).double().mean() > 0.2, "what ReLU cuts off is one value"
    for wrong in ({"groups": 4}, {"size": 2}, {"groups": 0}, {"size": -1}, {"count": 0}, {"channels": 0}):
        with pytest.raises(ConfigError, match="groups must divide count, and size must be odd"):
            RandomFeatures(**{"of": lambda x: x, "channels": 4, "count": 6} | wrong)


def test_random_features_of_a_map_without_a_name_have_one_file(tmp_path):
    class Plain:
        def __call__(self, x):
            return x[:, None, :, None]

    for _ in range(2):
        Features(data(), RandomFeatures(Plain(), 1, 2), str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2  # of the training set and of the test set


def test_a_map_that_differs_where_no_made_up_record_tells_is_found_out(tmp_path):
    class Cut:
        def __init__(self, least):
            self.least = least

        def __call__(self, x):
            return x.clamp(min=self.least)

    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    x[::10] -= 20
    of = TensorData((x, torch.zeros(200)), (x[:7], torch.zeros(7)))
    for least in (-5.0, -10.0, -10.0):
        assert torch.equal(Features(of, Cut(least), str(tmp_path)).train.tensors[0], x.clamp(min=least))


def test_a_backbone_is_a_network_up_to_its_head(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Tanh(), nn.Linear(3, 2))
    save_weights(model, tmp_path / "weights.safetensors", {"private": "False"})
    fresh = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Tanh(), nn.Linear(3, 2))
    features = Features(data(), Backbone(fresh, str(tmp_path / "weights.safetensors")), str(tmp_path / "cache"))
    assert torch.allclose(features.train.tensors[0], model[0](data().train.tensors[0]).tanh())
    for wrong in (0, 4):
        with pytest.raises(ConfigError, match=r"not an nn\.Sequential of more than"):
            Backbone(fresh, str(tmp_path / "weights.safetensors"), head=wrong)
    with pytest.raises(ConfigError, match=r"data\.module\.by\.weights=nowhere: the file does not exist"):
        Backbone(fresh, "nowhere")


def test_what_is_no_set_of_x_and_y_is_refused(tmp_path):
    of = data()
    of.train = torch.utils.data.TensorDataset(torch.zeros(3, 4))
    with pytest.raises(ConfigError, match="needs a TensorDataset of"):
        Features(of, Squares(), str(tmp_path))


@pytest.mark.parametrize("model", [scattering_linear, scattering_cnn])
@pytest.mark.parametrize("shape", [(81, 7, 7), (243, 8, 8)])
def test_models_of_scattering_features(model, shape):
    assert model(shape, 10)(torch.randn(2, *shape)).shape == (2, 10)
