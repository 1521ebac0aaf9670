"""Fixed features in place of records: computed once, record by record, and cached in a file."""

import contextlib
import copy
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from dpexp._lightning_compat import pl
from dpexp.errors import ConfigError
from dpexp.rows import PLAIN
from dpexp.training.classifier import scores_of
from dpexp.training.data.datasets import TensorData
from dpexp.training.pretrained import load_weights

_COMPARED = 16  # records
_BATCH_NORM = (
    "data.features_of: its BatchNorm takes mean and variance of the records beside, and a record's features must "
    "depend on that record alone; call eval() on the network, or, if it keeps no running statistics "
    "(track_running_stats=False), choose another layer, as GroupNorm."
)
Map = Callable[[Tensor], Tensor]  # x [B, ...] -> features [B, ...]


def as_map(by: Any) -> Map:
    """A network as a map, in evaluation mode; another map as it is."""
    return Backbone(by) if isinstance(by, nn.Module) else by


class Features(TensorData):
    """Another data module's records, with x replaced by a fixed feature map of x: `data.features_of`.

    The map must not depend on private data, and the features of a record must not depend on other records.

    Args:
        of: data module whose training and test sets are TensorDatasets of (x, y).
        by: the map, x [B, ...] -> features [B, ...]. It gets one record at a time, or its `at_once` of them, where a
            record's features are bitwise the same whatever the others are.
        cache: folder of the files of features, which are as private as the records.

    Raises:
        ConfigError: the features of the same records differ when they are computed again, in another order.
    """

    def __init__(self, of: pl.LightningDataModule, by: Map, cache: str) -> None:
        of.prepare_data()
        for stage in ("fit", "test"):
            of.setup(stage)
        own = getattr(of.val_dataloader, "__func__", of.val_dataloader)
        train, test = _records(of, "train"), _records(of, "test")
        validation = test if own is pl.LightningDataModule.val_dataloader else _records(of, "val")

        def features(dataset: TensorDataset) -> tuple[Tensor, Tensor]:
            return cached_features(dataset.tensors[0], by, Path(cache).expanduser()), dataset.tensors[1]

        super().__init__(features(train), features(test))
        train = copy.copy(train)  # with its users, and which rows can be used
        train.tensors, self.train = self.train.tensors, train
        is_test = validation.tensors[0] is test.tensors[0]
        self._validation = self.test if is_test else TensorDataset(*features(validation))
        self.of, self.class_names = of, getattr(of, "class_names", None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self._validation, 1000)


def _records(of: pl.LightningDataModule, name: str) -> TensorDataset:
    """The TensorDataset of a loader, which must yield all of its (x, y) unchanged."""
    loader = getattr(of, f"{name}_dataloader")()
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"data.features_of: the {name} loader is a {type(loader).__name__} instead of a DataLoader.")
    dataset: Dataset = loader.dataset
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    is_whole = type(batches) in (BatchSampler, type(None)) and type(sampler) in (SequentialSampler, RandomSampler)
    if not (is_whole and sampler.data_source is dataset and len(sampler) == len(dataset)):  # type: ignore
        raise ConfigError(
            f"data.features_of: the {name} loader has a sampler of its own ({type(sampler).__name__}), which "
            "would be dropped; give a TensorDataset of the chosen records."
        )
    if loader.collate_fn is not default_collate:
        raise ConfigError(
            f"data.features_of: the {name} loader has a collate_fn of its own, which would be dropped; give a "
            "TensorDataset of what it makes."
        )
    if not (type(dataset) in PLAIN and len(dataset.tensors) == 2):  # type: ignore
        raise ConfigError(
            f"data.features_of: the {name} set of {type(of).__name__} is a {type(dataset).__name__} that may give "
            "other records each time; features need a TensorDataset of (x, y)."
        )
    return dataset


def cached_features(x: Tensor, by: Map, folder: Path) -> Tensor:
    """The features of x, read from their file if there is one; otherwise computed, and written to it.

    First some records' features are computed twice: by the map, one record at a time, after a record of zeros; and by a
    copy of it, in reverse order, `at_once` records at a time, with a large record before each unless the map fails for
    these. So a map that keeps state, or whose features depend on the records beside, gives different features.
    """
    each = int(getattr(by, "at_once", 1))
    some = x[torch.linspace(0, len(x) - 1, min(len(x), max(_COMPARED, 2 * each))).long()]
    unused = copy.deepcopy(by)
    with contextlib.suppress(Exception), torch.no_grad():
        by(torch.zeros_like(some[:1]))
    of_some = compute_features(some, by, 1)
    others = 1000 * some if some.is_floating_point() else some.roll(1, 0)
    try:
        again = compute_features(torch.stack([some, others], 1).flatten(0, 1).flip(0), unused)[1::2].flip(0)
    except Exception:
        again = compute_features(some.flip(0), unused).flip(0)
    if _bytes(again) != _bytes(of_some):
        raise ConfigError(
            "data.features_of: it gives the same records other features when it is called again, in another order or "
            "with others; the features of a record must depend on that record alone, without random numbers."
        )
    path = folder / f"{_hash(x, of_some)}.safetensors"
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        found = load_file(path)["features"]
        if found.shape[:1] == x.shape[:1]:
            return found
    features = compute_features(x, by)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            save_file({"features": features}, f"{unfinished}/features")
            os.chmod(f"{unfinished}/features", 0o600)
            os.replace(f"{unfinished}/features", path)
    except (OSError, SafetensorError) as error:
        size = features.nbytes / 2**30
        raise ConfigError(
            f"data.cache={folder}: {size:.2g} GiB of features cannot be written there: {error}."
        ) from error
    return features


def _hash(*tensors: Tensor) -> str:
    """A hash of the records, and of the features of some of them, which tell maps apart."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:32]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def compute_features(x: Tensor, by: Map, at_once: int | None = None) -> Tensor:
    """The features of x, computed with a progress bar; `at_once` records per call, by default the map's own number."""
    from rich.progress import track

    features, each = torch.empty(0), at_once or int(getattr(by, "at_once", 1))
    with torch.no_grad():
        for start in track(range(0, len(x), each), "features", transient=True, disable=len(x) < 200):
            try:
                chunk = by(x[start : start + each].clone()).contiguous()  # aligned, and the map's own
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise ConfigError(_BATCH_NORM) from error
            if not start:
                features = torch.empty(len(x), *chunk.shape[1:], dtype=chunk.dtype)
            if chunk.shape[:1] != x[start : start + each].shape[:1]:
                raise ConfigError(
                    f"data.features_of: it gives {len(chunk)} rows for {len(x[start : start + each])} records."
                )
            features[start : start + len(chunk)] = chunk
    return features


class OnFeatures(nn.Module):
    """A model of x, from a map to features and a model of them."""

    def __init__(self, by: Map, model: nn.Module) -> None:
        super().__init__()
        self.by, self.model = by, model

    def forward(self, x: Tensor) -> Any:
        """Computes features at the precision of x, as for training, and applies the model to them."""
        with torch.autocast(x.device.type, enabled=False):
            features = compute_features(x, self.by)
        weight = next(self.model.parameters(), features)
        return self.model(features.to(weight.dtype) if features.is_floating_point() else features)


class Scattering:
    """Scattering coefficients of the first two orders: wavelet moduli, averaged over 2^J pixels, by kymatio (Bruna &
    Mallat 2013; Oyallon et al. 2019).

    An image [c, H, W] in [-1, 1] gives c (1 + JL + L²J(J-1)/2) channels of H/2^J × W/2^J, for J scales and L angles.
    `groups` are those of a parameter-free GroupNorm; None: no normalization.
    """

    at_once = 64

    def __init__(self, shape: list[int], J: int = 2, L: int = 8, groups: int | None = None) -> None:
        channels = shape[0] * (1 + J * L + L * L * J * (J - 1) // 2)
        if groups is not None and not (isinstance(groups, int) and groups > 0 and channels % groups == 0):
            raise ConfigError(f"data.features_of.groups={groups} must divide the {channels} channels.")
        try:
            # kymatio's own top level imports what SciPy no longer has.
            from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
        except ImportError as error:
            raise ConfigError("scattering features need kymatio: pip install 'dpexp[scattering]'.") from error
        self._groups = groups
        self._transform = ScatteringTorch2D(J=J, L=L, shape=tuple(shape[1:]))

    def __call__(self, x: Tensor) -> Tensor:
        """[B, c, H, W] -> [B, channels, H/2^J, W/2^J]."""
        features = self._transform(((x + 1) / 2).contiguous()).flatten(1, 2)
        return nn.functional.group_norm(features, self._groups) if self._groups else features


class RandomFeatures:
    """Appends random features to another map's features: ReLU of random convolutions, with parameter-free GroupNorm
    (Saxe et al. 2011, "On random weights and unsupervised feature learning").

    Args:
        of: the other map, x [B, ...] -> features [B, channels, H, W].
        count: number of random channels, in `groups` for GroupNorm.
        size: side of the random kernels, odd, which are drawn from a fixed seed.
    """

    def __init__(self, of: Map, channels: int, count: int, size: int = 3, groups: int = 1) -> None:
        positive = all(isinstance(number, int) and number > 0 for number in (channels, count, size, groups))
        if not positive or count % groups or size % 2 == 0:
            raise ConfigError(
                f"data.features_of: channels={channels}, count={count}, size={size} and groups={groups} must be "
                "positive integers; groups must divide count, and size must be odd."
            )
        self._of, self._groups, self.at_once = as_map(of), groups, getattr(of, "at_once", 1)
        self._kernels = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))
        self._kernels /= math.sqrt(channels * size * size)

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, channels + count, H, W]."""
        features = self._of(x)
        # One record at a time: the rounding of a convolution may depend on the batch size.
        convolved = [nn.functional.conv2d(one[None], self._kernels, padding="same").relu() for one in features]
        return torch.cat([features, nn.functional.group_norm(torch.cat(convolved), self._groups)], dim=1)


class Joined:
    """Concatenates the flattened features of several maps."""

    def __init__(self, of: Sequence[Map]) -> None:
        self._of = [as_map(by) for by in of]
        self.at_once = min(getattr(by, "at_once", 1) for by in self._of)

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, features of all maps]."""
        return torch.cat([by(x).flatten(1) for by in self._of], dim=1)


class _Changed:
    """Another map's features of images that are changed first."""

    def __init__(self, of: Map) -> None:
        self._of, self.at_once = as_map(of), getattr(of, "at_once", 1)


class Mirrored(_Changed):
    """Another map's features of an image, averaged with those of its mirror image: to a linear model, two views."""

    def __call__(self, x: Tensor) -> Tensor:
        """[B, c, H, W] -> [B, ...]."""
        return self._of(torch.cat([x, x.flip(-1)])).unflatten(0, (2, -1)).mean(0)


class LumaAndChroma(_Changed):
    """Another map's features of a colour image's luma and two colour differences (ITU-R BT.601) in place of R, G, B."""

    def __call__(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> [B, ...]."""
        red, green, blue = x.unbind(1)
        luma = 0.299 * red + 0.587 * green + 0.114 * blue
        return self._of(torch.stack([luma, (blue - luma) / 1.772, (red - luma) / 1.402], dim=1))


class Deskewed(_Changed):
    """Another map's features of images that are centred and sheared upright by their moments (LeCun et al. 1998,
    "Gradient-based learning applied to document recognition", section III: deslanting).

    The moments are those of x + 1: the background of images in [-1, 1] is -1.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """[B, c, H, W] -> [B, ...]."""
        return self._of(torch.cat([_upright(one[None]) for one in x]))


def _upright(x: Tensor) -> Tensor:
    image = (x + 1) / 2
    mass = image.sum((0, 1))
    mass = mass / mass.sum().clamp(min=1e-6)
    down, right = torch.linspace(-1, 1, mass.shape[0])[:, None], torch.linspace(-1, 1, mass.shape[1])
    row, column = (mass * down).sum(), (mass * right).sum()
    slant = (mass * (down - row) * (right - column)).sum() / (mass * (down - row) ** 2).sum().clamp(min=1e-5)
    shear = torch.eye(2, 3)[None]
    shear[0, 0, 1], shear[0, 0, 2], shear[0, 1, 2] = slant.clamp(-1, 1), column, row
    grid = nn.functional.affine_grid(shear, list(x.shape), align_corners=True)
    return nn.functional.grid_sample(image, grid, align_corners=True) * 2 - 1


class Backbone:
    """A network trained on public data, up to one of its layers, in evaluation mode.

    Args:
        model: the network.
        layer: its features are the output of this module, by its name in `model.named_modules()`; None: the network's.
            A list: the outputs of all of these, each averaged over positions and then shifted and scaled to mean 0 and
            variance 1 over channels.
        size: images [3, H, W] are resized to so many pixels in each direction, by bicubic interpolation; None: they
            are not.
        mean: of each channel in [0, 1], by which, and by `std`, images in [-1, 1] are normalized; None: they are not.
        std: likewise.
        weights: the file weights.safetensors of the job that trained it; None: the model has its weights.
    """

    def __init__(
        self, model: nn.Module, layer: str | Sequence[str] | None = None, size: int | None = None,
        mean: Sequence[float] | None = None, std: Sequence[float] | None = None, weights: str | None = None,
    ) -> None:  # fmt: skip
        layers = dict(model.named_modules())
        self._several = isinstance(layer, Sequence) and not isinstance(layer, str)
        names: Sequence[str] = cast(Sequence[str], layer) if self._several else [cast(str, layer or "")]
        self._outputs: dict[str, Any] = dict.fromkeys(names)
        if unknown := [name for name in self._outputs if name not in layers]:
            raise ConfigError(
                f"data.features_of.layer={unknown[0]} is no module of {type(model).__name__}; its most similar modules "
                f"are {', '.join(get_close_matches(str(unknown[0]), filter(None, layers), 8, 0))}."
            )
        if (mean is None) != (std is None):
            raise ConfigError(f"data.features_of: give mean={mean} and std={std} both, or neither.")
        if weights is not None:
            load_weights(model, Path(weights).expanduser())
        self._model, self._size = model.eval(), size
        self._normal = None if mean is None else (torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1))
        for name in self._outputs:
            layers[name].register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs[name] = scores_of(output)

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, d]."""
        if self._size is not None:
            x = nn.functional.interpolate(x, size=(self._size, self._size), mode="bicubic")
        if self._normal is not None:
            mean, std = self._normal
            x = ((x + 1) / 2 - mean) / std
        self._outputs = dict.fromkeys(self._outputs)
        self._model(x)
        if skipped := [name for name, output in self._outputs.items() if output is None]:
            raise ConfigError(f"data.features_of: a record does not pass through layer={skipped[0]}.")
        if not self._several:
            return next(iter(self._outputs.values())).flatten(1)
        means = [output.flatten(2).mean(2) if output.ndim > 2 else output for output in self._outputs.values()]
        return torch.cat([nn.functional.layer_norm(mean, mean.shape[1:]) for mean in means], dim=1)
