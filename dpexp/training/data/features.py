"""Fixed features in place of records: computed once, record by record, and cached in a file."""

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpexp._lightning_compat import pl
from dpexp.errors import ConfigError
from dpexp.training.data.datasets import TensorData
from dpexp.training.pretrained import load_weights

_COMPARED = 64  # records
Map = Callable[[Tensor], Tensor]  # x [B, ...] -> features [B, ...]


class Features(TensorData):
    """Another data module's records, with x replaced by a fixed feature map of x.

    The map must not depend on private data, and the features of a record must not depend on other records.

    Args:
        of: data module whose training and test sets are TensorDatasets of (x, y).
        by: the map, x [B, ...] -> features [B, ...].
        cache: folder of the files of features, which are as private as the records.
        at_once: records per call of the map. Above 1, a record's features must be bitwise the same whatever the other
            records of the call are.
    """

    def __init__(self, of: pl.LightningDataModule, by: Map, cache: str, at_once: int = 1) -> None:
        sets = [_tensors(of, name) for name in ("train", "test")]
        folder = Path(cache).expanduser()
        train, test = ((cached_features(x, by, folder, at_once), y) for x, y in sets)
        super().__init__(train, test)


def _tensors(of: pl.LightningDataModule, name: str) -> tuple[Tensor, Tensor]:
    dataset: Dataset = getattr(of, f"{name}_dataloader")().dataset
    if not (isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2):
        raise ConfigError(
            f"data.module.of={type(of).__name__}: its {name} set is a {type(dataset).__name__}, and Features needs a "
            "TensorDataset of (x, y)."
        )
    return cast(tuple[Tensor, Tensor], dataset.tensors)


def cached_features(x: Tensor, by: Map, folder: Path, at_once: int) -> Tensor:
    """The features of x, read from their file if there is one; otherwise computed, and written to it."""
    path = folder / f"{_file_name(x, by)}.safetensors"
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        found = load_file(path)["features"]
        if found.shape[:1] == x.shape[:1]:
            return found
    features = compute_features(x, by, at_once)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unfinished:
        save_file({"features": features}, f"{unfinished}/features")
        os.replace(f"{unfinished}/features", path)
    return features


def _file_name(x: Tensor, by: Map) -> str:
    """A hash of the records, and of the features of some of them, which tell maps apart."""
    some = torch.linspace(0, len(x) - 1, min(len(x), _COMPARED)).long()
    digest = hashlib.sha256()
    for tensor in (x, compute_features(x[some], by)):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def compute_features(x: Tensor, by: Map, at_once: int = 1) -> Tensor:
    """The features of x, computed with a progress bar."""
    from rich.progress import track

    features = torch.empty(0)
    with torch.no_grad():
        for start in track(range(0, len(x), at_once), "features", transient=True):
            chunk = by(x[start : start + at_once]).contiguous()
            if not start:
                features = torch.empty(len(x), *chunk.shape[1:], dtype=chunk.dtype)
            features[start : start + len(chunk)] = chunk
    return features


class Scattering:
    """Scattering coefficients of the first two orders: wavelet moduli, averaged over 2^J pixels, by kymatio (Bruna &
    Mallat 2013; Oyallon et al. 2019).

    An image [c, H, W] in [-1, 1] gives c (1 + JL + L²J(J-1)/2) channels of H/2^J × W/2^J, for J scales and L angles.
    `groups` are those of a parameter-free GroupNorm; None: no normalization.
    """

    def __init__(self, shape: list[int], J: int = 2, L: int = 8, groups: int | None = None) -> None:
        channels = shape[0] * (1 + J * L + L * L * J * (J - 1) // 2)
        if groups is not None and not (isinstance(groups, int) and groups > 0 and channels % groups == 0):
            raise ConfigError(f"data.module.by.groups={groups} must divide the {channels} channels.")
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
                f"data.module.by: channels={channels}, count={count}, size={size} and groups={groups} must be positive "
                "integers; groups must divide count, and size must be odd."
            )
        self._of, self._groups = of, groups
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
        self._of = list(of)

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, features of all maps]."""
        return torch.cat([by(x).flatten(1) for by in self._of], dim=1)


class Backbone:
    """The features of an nn.Sequential trained on other data, without its last `head` layers.

    `weights` is the file weights.safetensors of the job that trained it.
    """

    def __init__(self, model: nn.Module, weights: str, head: int = 1) -> None:
        if not isinstance(model, nn.Sequential) or not 0 < head < len(model):
            raise ConfigError(
                f"data.module.by.model: {type(model).__name__} is not an nn.Sequential of more than {head} layers."
            )
        load_weights(model, Path(weights).expanduser())
        self._layers = nn.Sequential(*list(model)[:-head]).eval()

    def __call__(self, x: Tensor) -> Tensor:
        return self._layers(x)
