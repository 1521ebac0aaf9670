"""Fixed features in place of records: computed once, record by record, and cached in a file."""

import contextlib
import hashlib
import io
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import pytorch_lightning as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpexp.errors import ConfigError
from dpexp.training.data.base import TensorData
from dpexp.training.pretrained import load_weights

_PROBES = 4  # random records on which maps are told apart
_REVIEWED = 64  # records whose cached features are compared with new ones


class Features(TensorData):
    """Another data module's records, with x replaced by a fixed feature map of x.

    The map must not depend on private data, and the features of a record must not depend on other records.

    Args:
        of: data module whose training and test sets are TensorDatasets of (x, y).
        by: the map, x [B, ...] -> features [B, ...].
        cache: folder of the files of features, which are as private as the records. A file's name is a hash of the
            records and the map.
        at_once: records per call of the map. Above 1, a record's features must be bitwise the same whatever the other
            records of the call are.

    Raises:
        ConfigError: a set of `of` is not a TensorDataset of (x, y).
    """

    def __init__(
        self,
        of: pl.LightningDataModule,
        by: Callable[[Tensor], Tensor],
        cache: str,
        at_once: int = 1,
        batch_size: int = 512,
        num_workers: int = 0,
    ) -> None:
        sets = [_tensors(of, name) for name in ("train", "test")]
        folder = Path(cache).expanduser()
        train, test = ((cached_features(x, by, folder, at_once), y) for x, y in sets)
        super().__init__(train, test, batch_size, num_workers)


def _tensors(of: pl.LightningDataModule, name: str) -> tuple[Tensor, Tensor]:
    dataset: Dataset = getattr(of, f"{name}_dataloader")().dataset
    if not (isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2):
        raise ConfigError(
            f"data.module.of={type(of).__name__}: its {name} set is a {type(dataset).__name__}, and Features needs a "
            "TensorDataset of (x, y)."
        )
    return cast(tuple[Tensor, Tensor], dataset.tensors)


def cached_features(x: Tensor, by: Callable[[Tensor], Tensor], folder: Path, at_once: int) -> Tensor:
    """The features of x, read from their file if there is one; otherwise computed, and written to it."""
    path = folder / f"{_file_name(x, by)}.safetensors"
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        found = load_file(path)["features"]
        if found.shape[:1] == x.shape[:1] and _is_current(found, x, by):
            return found
    features = compute_features(x, by, at_once)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(dir=folder)
    os.close(descriptor)
    try:
        save_file({"features": features}, unfinished)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return features


def _is_current(found: Tensor, x: Tensor, by: Callable[[Tensor], Tensor]) -> bool:
    """Whether the map gives the cached features for some of the records: another map may have the same hash."""
    some = torch.linspace(0, len(x) - 1, min(len(x), _REVIEWED)).long()
    new, old = compute_features(x[some], by), found[some]
    scale = float(new.double().nan_to_num(0, 0, 0).abs().sum()) / max(1, new.numel())
    same_type = new.shape == old.shape and new.dtype == old.dtype
    return same_type and torch.allclose(new, old, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def _map_name(by: Callable) -> str:
    """A name of the map that is the same in every process."""
    named = by if isinstance(by, type | FunctionType) else type(by)
    return f"{named.__module__}.{named.__qualname__}" + (str(by) if type(by).__str__ is not object.__str__ else "")


def _file_name(x: Tensor, by: Callable[[Tensor], Tensor]) -> str:
    """A hash of the records, and of the map: its name, its tensors, and its features of a few random records."""
    shape, generator = (_PROBES, *x.shape[1:]), torch.Generator().manual_seed(0)
    if x.is_floating_point():
        probes = torch.randn(shape, generator=generator).to(x.dtype)
    else:  # such as token ids, which must be in range
        probes = torch.randint(int(x.min()), int(x.max()) + 1, shape, generator=generator).to(x.dtype)
    digest = hashlib.sha256(f"{_map_name(by)} {x.dtype} {tuple(x.shape)}".encode())
    for tensor in (x, compute_features(probes, by), *_Tensors.of(by)):
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


class _Tensors(pickle.Pickler):
    """Finds the tensors in an object, as far as it can be pickled."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self._found: list[Tensor] = []

    @classmethod
    def of(cls, value: Any) -> list[Tensor]:
        pickler = cls()
        with contextlib.suppress(Exception):
            pickler.dump(value)
        return [t for t in pickler._found if t.layout is torch.strided and not (t.is_quantized or t.is_meta)]

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, Tensor):
            return None
        self._found.append(obj.detach())
        return "tensor"


def compute_features(x: Tensor, by: Callable[[Tensor], Tensor], at_once: int = 1) -> Tensor:
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
    """Scattering coefficients of the first two orders: wavelet moduli, averaged over 2^J pixels, by kymatio.

    Bruna & Mallat 2013; Oyallon et al. 2019. An image [c, H, W] in [-1, 1] gives c (1 + JL + L²J(J-1)/2) channels of
    H/2^J × W/2^J.

    Args:
        shape: [c, H, W] of an image.
        J: number of scales.
        L: number of angles.
        groups: groups of a parameter-free GroupNorm of the channels; None: no normalization.

    Raises:
        ConfigError: kymatio is not installed, or `groups` does not divide the channels.
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
        self._name = f"scattering J={J} L={L} of {[*shape]}" + (f" in {groups} groups" if groups else "")
        self._groups = groups
        self._transform = ScatteringTorch2D(J=J, L=L, shape=tuple(shape[1:]))

    def __str__(self) -> str:
        return self._name

    def __call__(self, x: Tensor) -> Tensor:
        """[B, c, H, W] -> [B, channels, H/2^J, W/2^J]."""
        features = self._transform(((x + 1) / 2).contiguous()).flatten(1, 2)
        return nn.functional.group_norm(features, self._groups) if self._groups else features


class RandomFeatures:
    """Appends random features to another map's features: ReLU of random convolutions, with parameter-free GroupNorm.

    Saxe et al. 2011, "On random weights and unsupervised feature learning". The kernels are drawn from a fixed seed.

    Args:
        of: the other map, x [B, ...] -> features [B, channels, H, W].
        channels: its number of channels.
        count: number of random channels.
        size: side of the random kernels, odd.
        groups: groups of the random channels for GroupNorm.

    Raises:
        ConfigError: `groups` does not divide `count`, or the size is even.
    """

    def __init__(
        self, of: Callable[[Tensor], Tensor], channels: int, count: int, size: int = 3, groups: int = 1
    ) -> None:
        positive = all(isinstance(number, int) and number > 0 for number in (channels, count, size, groups))
        if not positive or count % groups or size % 2 == 0:
            raise ConfigError(
                f"data.module.by: channels={channels}, count={count}, size={size} and groups={groups} must be positive "
                "integers; groups must divide count, and size must be odd."
            )
        self._of, self._groups = of, groups
        self._kernels = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))
        self._kernels /= math.sqrt(channels * size * size)

    def __str__(self) -> str:
        return f"{tuple(self._kernels.shape)} random kernels in {self._groups} groups, of {_map_name(self._of)}"

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, channels + count, H, W]."""
        features = self._of(x)
        # One record at a time: the rounding of a convolution may depend on the batch size.
        convolved = [nn.functional.conv2d(one[None], self._kernels, padding="same").relu() for one in features]
        return torch.cat([features, nn.functional.group_norm(torch.cat(convolved), self._groups)], dim=1)


class Joined:
    """Concatenates the flattened features of several maps.

    Args:
        of: the maps, each x [B, ...] -> features [B, ...].
    """

    def __init__(self, of: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self._of = list(of)

    def __str__(self) -> str:
        return " and ".join(map(_map_name, self._of))

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, features of all maps]."""
        return torch.cat([by(x).flatten(1) for by in self._of], dim=1)


class Backbone:
    """The features of a network trained on other data, without its last layers.

    Args:
        model: an nn.Sequential.
        weights: weights.safetensors of the job that trained it.
        head: number of last layers that are left out.

    Raises:
        ConfigError: the file does not exist or does not fit, or the model is not an nn.Sequential of more layers.
    """

    def __init__(self, model: nn.Module, weights: str, head: int = 1) -> None:
        if not isinstance(model, nn.Sequential) or not 0 < head < len(model):
            raise ConfigError(
                f"data.module.by.model: {type(model).__name__} is not an nn.Sequential of more than {head} layers."
            )
        path = Path(weights).expanduser()
        if not path.is_file():
            raise ConfigError(f"data.module.by.weights={weights}: the file does not exist.")
        load_weights(model, path)
        self._layers = nn.Sequential(*list(model)[:-head]).eval()
        self._digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self._digest} up to {len(self._layers)} of {self._layers}"

    def __call__(self, x: Tensor) -> Tensor:
        return self._layers(x)
