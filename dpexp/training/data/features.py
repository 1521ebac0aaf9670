"""Features of records in their place, computed once and kept in a file."""

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

_MADE_UP = 4
_LOOKED_AT = 64


class Features(TensorData):
    """What a fixed map makes of another data module's x. The map knows no data, and sees records so that what it makes
    of one depends on no other.

    Args:
        of: whose training and test sets hold (x, y).
        by: x [B, ...] -> features [B, ...].
        cache: the folder of files of features, under a name that is of the records and of the map. They are as private
            as the records.
        at_once: records that the map is given together. Above 1 its result for a record must be the same bits
            whatever the others are.
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
        sets = [_in_memory(of, part) for part in ("train", "test")]
        folder = Path(cache).expanduser()
        train, test = ((kept(x, by, folder, at_once), y) for x, y in sets)
        super().__init__(train, test, batch_size, num_workers)


def _in_memory(of: pl.LightningDataModule, part: str) -> tuple[Tensor, Tensor]:
    """
    Raises:
        ConfigError: a set is not of tensors (x, y).
    """
    dataset: Dataset = getattr(of, f"{part}_dataloader")().dataset
    if not (isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2):
        raise ConfigError(
            f"data.module.of={type(of).__name__}: its {part} set is a {type(dataset).__name__}, and Features wants a "
            "TensorDataset of (x, y)."
        )
    return cast(tuple[Tensor, Tensor], dataset.tensors)


def kept(x: Tensor, by: Callable[[Tensor], Tensor], folder: Path, at_once: int) -> Tensor:
    """The features of x, from their file if there is one, and otherwise into it."""
    path = folder / f"{_name(x, by)}.safetensors"
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        found = load_file(path)["features"]
        if found.shape[:1] == x.shape[:1] and _still(found, x, by):
            return found
    features = made(x, by, at_once)
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


def _still(found: Tensor, x: Tensor, by: Callable[[Tensor], Tensor]) -> bool:
    """Whether the map makes of some records what is found: another one may be called the same, and agree elsewhere."""
    some = torch.linspace(0, len(x) - 1, min(len(x), _LOOKED_AT)).long()
    now = made(x[some], by)
    then, usual = found[some], float(now.double().nan_to_num(0, 0, 0).abs().sum()) / max(1, now.numel())
    alike = now.shape == then.shape and now.dtype == then.dtype
    return alike and torch.allclose(now, then, rtol=1e-3, atol=1e-3 * usual, equal_nan=True)


def _called(by: Callable) -> str:
    """A name that is the same in every process."""
    kind = by if isinstance(by, type | FunctionType) else type(by)
    return f"{kind.__module__}.{kind.__qualname__}" + (str(by) if type(by).__str__ is not object.__str__ else "")


def _name(x: Tensor, by: Callable[[Tensor], Tensor]) -> str:
    """Of the records, and of the map: what it is called, its weights, and what it makes of a few made-up records."""
    called = _called(by)
    shape, draw = (_MADE_UP, *x.shape[1:]), torch.Generator().manual_seed(0)
    if x.is_floating_point():
        made_up = torch.randn(shape, generator=draw).to(x.dtype)
    else:  # such as words have
        made_up = torch.randint(int(x.min()), int(x.max()) + 1, shape, generator=draw).to(x.dtype)
    known = hashlib.sha256(f"{called} {x.dtype} {tuple(x.shape)}".encode())
    for tensor in (x, made(made_up, by), *_Tensors.of(by)):
        known.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return known.hexdigest()[:32]


class _Tensors(pickle.Pickler):
    """Finds the tensors that an object leads to, as far as it can be pickled."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self._found: list[Tensor] = []

    @classmethod
    def of(cls, what: Any) -> list[Tensor]:
        pickler = cls()
        with contextlib.suppress(Exception):
            pickler.dump(what)
        return [one for one in pickler._found if one.layout is torch.strided and not (one.is_quantized or one.is_meta)]

    def persistent_id(self, obj: Any) -> str | None:
        if not isinstance(obj, Tensor):
            return None
        self._found.append(obj.detach())
        return "tensor"


def made(x: Tensor, by: Callable[[Tensor], Tensor], at_once: int = 1) -> Tensor:
    """The features of x, with progress shown."""
    from rich.progress import track

    features = torch.empty(0)
    with torch.no_grad():
        for start in track(range(0, len(x), at_once), "features", transient=True):
            some = by(x[start : start + at_once]).contiguous()
            if not start:
                features = torch.empty(len(x), *some.shape[1:], dtype=some.dtype)
            features[start : start + len(some)] = some
    return features


class Scattering:
    """Scattering coefficients of the first two orders: wavelet moduli, averaged over 2^J pixels (Bruna & Mallat 2013;
    Oyallon et al. 2019), by kymatio.

    An image [c, H, W] in [-1, 1] has c (1 + JL + L²J(J-1)/2) channels of H/2^J × W/2^J.

    Args:
        groups: its channels are normalized in so many groups, without parameters; None: not.
    """

    def __init__(self, shape: list[int], J: int = 2, L: int = 8, groups: int | None = None) -> None:
        """
        Raises:
            ConfigError: kymatio is not there, or `groups` does not divide the channels.
        """
        channels = shape[0] * (1 + J * L + L * L * J * (J - 1) // 2)
        if groups is not None and not (isinstance(groups, int) and groups > 0 and channels % groups == 0):
            raise ConfigError(f"data.module.by.groups={groups} must divide the {channels} channels.")
        try:
            # kymatio's own top level imports what SciPy no longer has.
            from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
        except ImportError as error:
            raise ConfigError("scattering features need kymatio: pip install 'dpexp[scattering]'.") from error
        self.of = f"scattering J={J} L={L} of {[*shape]}" + (f" in {groups} groups" if groups else "")
        self._groups = groups
        self._transform = ScatteringTorch2D(J=J, L=L, shape=tuple(shape[1:]))

    def __str__(self) -> str:
        return self.of

    def __call__(self, x: Tensor) -> Tensor:
        """[B, c, H, W] -> [B, channels, H/2^J, W/2^J]."""
        features = self._transform(((x + 1) / 2).contiguous()).flatten(1, 2)
        return nn.functional.group_norm(features, self._groups) if self._groups else features


class RandomFeatures:
    """Another map's features, and beside them those of random convolutions and ReLU (Saxe et al. 2011, "On random
    weights and unsupervised feature learning"), normalized in groups without parameters. The weights are drawn from a
    fixed seed, and know no data.
    """

    def __init__(
        self, of: Callable[[Tensor], Tensor], channels: int, count: int, size: int = 3, groups: int = 1
    ) -> None:
        """
        Args:
            of: x [B, ...] -> features [B, channels, H, W]; count: of random channels; size: of their kernels, odd;
            groups: of channels that are normalized together.

        Raises:
            ConfigError: `groups` does not divide `count`, or the size is even.
        """
        positive = all(isinstance(number, int) and number > 0 for number in (channels, count, size, groups))
        if not positive or count % groups or size % 2 == 0:
            raise ConfigError(
                f"data.module.by: channels={channels}, count={count}, size={size} and groups={groups} must be positive "
                "whole numbers, of which groups divides count, and size is odd."
            )
        self._of, self._groups = of, groups
        self._kernels = torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(0))
        self._kernels /= math.sqrt(channels * size * size)

    def __str__(self) -> str:
        return f"{tuple(self._kernels.shape)} random kernels in {self._groups} groups, of {_called(self._of)}"

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, channels + count, H, W]."""
        features = self._of(x)
        # One at a time: how a convolution rounds may depend on how many it is of.
        beside = torch.cat([nn.functional.conv2d(one[None], self._kernels, padding="same").relu() for one in features])
        return torch.cat([features, nn.functional.group_norm(beside, self._groups)], dim=1)


class Joined:
    """What several maps make of a record, flattened, one after the other."""

    def __init__(self, of: Sequence[Callable[[Tensor], Tensor]]) -> None:
        """
        Args:
            of: each x [B, ...] -> features [B, ...].
        """
        self._of = list(of)

    def __str__(self) -> str:
        return " and ".join(map(_called, self._of))

    def __call__(self, x: Tensor) -> Tensor:
        """[B, ...] -> [B, as many features as all maps have]."""
        return torch.cat([by(x).flatten(1) for by in self._of], dim=1)


class Backbone:
    """What a network that was trained on other data makes of a record, up to its head."""

    def __init__(self, model: nn.Module, weights: str, head: int = 1) -> None:
        """
        Args:
            model: an nn.Sequential.
            weights: weights.safetensors of the job that trained it.
            head: how many of its last layers are left out.

        Raises:
            ConfigError: there is no such file, it does not fit the model, or that is no nn.Sequential of more layers.
        """
        if not isinstance(model, nn.Sequential) or not 0 < head < len(model):
            raise ConfigError(
                f"data.module.by.model: {type(model).__name__} is no nn.Sequential of more than {head} layers."
            )
        path = Path(weights).expanduser()
        if not path.is_file():
            raise ConfigError(f"data.module.by.weights={weights}: there is no such file.")
        load_weights(model, path)
        self._layers = nn.Sequential(*list(model)[:-head]).eval()
        self._digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self._digest} up to {len(self._layers)} of {self._layers}"

    def __call__(self, x: Tensor) -> Tensor:
        return self._layers(x)
