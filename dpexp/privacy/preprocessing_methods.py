"""Releases before training: sums over all records that are released once, and layers that make use of them.

A new one is a class here and a file in conf/prepare. `dpexp.privacy.preprocessing` carries them out.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.accounting.dominating_pairs import pure_below
from dpexp.accounting.ledger import OneTimeQueryEvent, ParallelQueryEvent
from dpexp.errors import ConfigError, exactly_one, positive, whole
from dpexp.privacy.gradients.norms import norms

_MARGIN = 1 - 2.0**-49  # for what rounding adds to a vector's numbers
_MARGIN_OF_PRODUCTS = 1 - 2.0**-30
_FARTHEST = 1e20
_LEAST = 1e-3  # of a variance, as a part of the mean square of all features


class Preprocessing(nn.Module, ABC):
    """A vector of each record is summed over all of them, noise is added once, and what comes of it is kept in buffers,
    with the model; inputs go through `forward` wherever the model does.

    Its noise is given in one of two ways. `noise_multiplier` is σ/S, or of Laplace noise b/S, with the sensitivity S
    under add_remove. `budget_share` is a part w of what may be spent: were training a Gaussian mechanism, the target
    would be spent by some μ* of Gaussian DP, and squares of μ add up; the preparation gets the noise with which its own
    μ² is w μ*² (Laplace noise: at most that).

    Attributes:
        d: how many numbers a record's vector has.
        S, replace_sensitivity: how far the sum moves when a record is added or removed, or replaced: in L2 norm for
            Gaussian noise, in L1 norm for Laplace noise.
        sd: the standard deviation of each released number's noise; 0 before that is known, and without privacy.
    """

    noise: str = "gaussian"
    sd: float = 0.0
    d: int
    S: float
    replace_sensitivity: float

    def __init__(self, budget_share: float | None = None, noise_multiplier: float | None = None) -> None:
        super().__init__()
        name = f"preprocessing.{type(self).__name__}"
        exactly_one(name, budget_share=budget_share, noise_multiplier=noise_multiplier)
        if budget_share is not None and not 0 < budget_share < 1:
            raise ConfigError(f"{name}.budget_share={budget_share} must lie strictly between 0 and 1; 0.1 is a tenth.")
        if noise_multiplier is not None:
            positive(f"{name}.noise_multiplier", noise_multiplier)
        self.budget_share, self.noise_multiplier = budget_share, noise_multiplier

    def query(self, name: str, adjacency: str, mu: float | None) -> OneTimeQueryEvent | ParallelQueryEvent:
        """The event that the release writes. `mu`: μ* of what may be spent; None if no target is known.

        Raises:
            ConfigError: a share of what is not known.
        """
        if self.noise_multiplier is not None:
            return OneTimeQueryEvent(name, self.noise, self.S, self.replace_sensitivity, self.noise_multiplier * self.S)
        assert self.budget_share is not None
        if mu is None:
            raise ConfigError(
                f"preprocessing.{name}.budget_share={self.budget_share} is a part of privacy.epsilon, advantage or "
                f"tpr, of which "
                f"none is "
                f"given; give one of them, or preprocessing.{name}.noise_multiplier."
            )
        own = math.sqrt(self.budget_share) * mu
        if self.noise == "laplace":
            own = pure_below(own)
        moved = self.replace_sensitivity if adjacency == "replace_one" else self.S
        return OneTimeQueryEvent(name, self.noise, self.S, self.replace_sensitivity, moved / own)

    @abstractmethod
    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        """Σ of the records' vectors [d], in float64: each bounded, and a function of its own record alone. A record of
        which nothing can be made, such as one that is not finite, contributes zero; where this raises, or gives what is
        not d finite numbers, it is asked of each record by itself, and those of which it still does contribute zero.

        Args:
            x: [B, …] inputs, as the preparations before have left them; y: [B, …] labels.
        """

    @abstractmethod
    def fit(self, noisy: Tensor, n: int) -> None:
        """Takes in the noisy sum [d]. n: the published number of records."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, …] inputs as the model shall see them."""
        return x

    def released_values(self) -> list[float]:
        """Numbers to be shown, which are released."""
        return []


class Pca(Preprocessing):
    """Projects inputs onto the first k principal components of a noisy covariance (Abadi et al. 2016, sections 4 and
    5.2; Dwork et al. 2014).

    Each record, seen from `center` and scaled to length 1, adds u uᵀ to the covariance, which is symmetric: of it the
    upper triangle is released, what is off the diagonal times √2, so that the L2 norm is the Frobenius norm ‖u‖² = 1.
    For another record in its place, ‖u uᵀ - v vᵀ‖² = 2 - 2(u·v)² is at most 2.

    Args:
        shape: of one input; k: components; the model then has inputs [k].
        center: a published constant from which inputs are seen, such as the colour of the background.
    """

    S, replace_sensitivity = 1.0, math.sqrt(2)
    components: Tensor

    def __init__(self, shape: Sequence[int], k: int, center: float = 0.0, **spent: float | None) -> None:
        super().__init__(**spent)
        size = math.prod(shape)
        if not isinstance(k, int) or not 1 <= k <= size:
            raise ConfigError(
                f"preprocessing.pca.k={k} must be a whole number between 1 and {size}, the size of an input of "
                f"{list(shape)}."
            )
        if not isinstance(center, int | float) or not abs(center) < _FARTHEST:
            raise ConfigError(f"preprocessing.pca.center={center} must be a number within ±{_FARTHEST:g}.")
        self.center, self._size, self.d = center, size, size * (size + 1) // 2
        self.register_buffer("components", torch.eye(k, size))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        rows = x.double().reshape(len(x), self._size) - self.center
        length = norms(rows)[:, None]
        usable = (length > 1e-300) & torch.isfinite(length)
        unit = torch.where(usable, rows / length, 0.0) * _MARGIN
        return _upper(unit.T @ unit)

    def fit(self, noisy: Tensor, n: int) -> None:
        _, vectors = torch.linalg.eigh(_from_upper(noisy.double(), self._size), UPLO="U")
        self.components.copy_(vectors.T.flip(0)[: len(self.components)])

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - self.center) @ self.components.T


class Standardize(Preprocessing):
    """Shifts and scales each feature to mean 0 and variance 1, as noisy sums of x and x² tell them (Tramèr & Boneh
    2021, arXiv 2011.11660, section 2.3 and appendix B).

    Of images [C, …] a channel is a feature, and a record's x and x² are means over its places. A record's vector
    (x, x²), of 2C numbers, is clipped to S.

    Args:
        shape: of one input; clip_norm: S; for features within [-1, 1], √(2C) clips none, and is the default.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, shape: Sequence[int], clip_norm: float | None = None, **spent: float | None) -> None:
        super().__init__(**spent)
        features = shape[0]
        self.S = (
            math.sqrt(2 * features) if clip_norm is None else positive("preprocessing.standardize.clip_norm", clip_norm)
        )
        self.d = 2 * features
        self.replace_sensitivity = 2 * self.S
        self._shape = tuple(shape)
        per_feature = (features, *(1 for _ in shape[1:]))
        self.register_buffer("mean", torch.zeros(per_feature))
        self.register_buffer("deviation", torch.ones(per_feature))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        places = x.double().reshape(len(x), self._shape[0], math.prod(self._shape[1:]))
        v = torch.cat([places.mean(2), places.square().mean(2)], dim=1)
        length = norms(v)[:, None]
        factor = (_MARGIN * self.S / length.clamp(min=1e-300)).clamp(max=1.0)
        return torch.where(torch.isfinite(length), v * factor, 0.0).sum(0)

    def fit(self, noisy: Tensor, n: int) -> None:
        mean, square = (noisy.double() / n).chunk(2)
        least = _LEAST * square.mean().clamp(min=1e-6)
        self.mean.copy_(mean.view_as(self.mean))
        self.deviation.copy_((square - mean.square()).clamp(min=least).sqrt().view_as(self.mean))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


class Whiten(Preprocessing):
    """Gives each feature mean 0, and multiplies channels by C^-power, of their covariance C as noisy sums tell it
    (zero-phase whitening; Kessy, Lewin and Strimmer 2018, arXiv 1512.00809).

    Of an image [channels, …] of P places a record's vector is (x/√P, x xᵀ/P), of x [channels, P], clipped to S; of x xᵀ
    the upper triangle is released, as by `Pca`.

    Args:
        shape: of one input.
        power: in (0, 1/2]. With 1/2 channels are not correlated any more; below, large directions stay larger.
        min_eigenvalue: eigenvalues of C below so much of the largest are taken for that much: noise hides them.
        clip_norm: S; for features within [-1, 1], √(channels·(channels + 1)) clips none, and is the default.
        first_feature: of a longer input, flattened, it is about the features from this one on, and the others stay as
            they are;
            None: it is about all of an input.
        scale: what it gives is multiplied by so much, which weighs it against the others.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        power: float = 0.5,
        min_eigenvalue: float = 0.02,
        clip_norm: float | None = None,
        first_feature: int | None = None,
        scale: float = 1.0,
        **spent: float | None,
    ) -> None:
        super().__init__(**spent)
        if not isinstance(power, int | float) or not 0 < power <= 0.5:
            raise ConfigError(f"preprocessing.whiten.power={power} must be above 0 and at most 0.5.")
        if not isinstance(min_eigenvalue, int | float) or not 1e-9 <= min_eigenvalue <= 1:
            raise ConfigError(f"preprocessing.whiten.min_eigenvalue={min_eigenvalue} must be between 1e-9 and 1.")
        if first_feature is not None and not (isinstance(first_feature, int) and first_feature >= 0):
            raise ConfigError(
                f"preprocessing.whiten.first_feature={first_feature} must be a whole number, 0 or above, or null."
            )
        self.scale = positive("preprocessing.whiten.scale", scale)
        channels = shape[0]
        self._own = slice(None) if first_feature is None else slice(first_feature, first_feature + math.prod(shape))
        self.S = (
            math.sqrt(channels * (channels + 1))
            if clip_norm is None
            else positive("preprocessing.whiten.clip_norm", clip_norm)
        )
        self.replace_sensitivity = 2 * self.S
        self._places = math.prod(shape[1:])
        self.d = channels * self._places + channels * (channels + 1) // 2
        self.power, self.min_eigenvalue, self._channels = power, min_eigenvalue, channels
        self.register_buffer("mean", torch.zeros(channels, self._places))
        self.register_buffer("matrix", torch.eye(channels))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        own = x.flatten(1)[:, self._own].double()
        scaled = own.reshape(len(x), self._channels, self._places) / math.sqrt(self._places)
        # ‖x xᵀ‖ = ‖xᵀ x‖, of which one is the smaller.
        products = scaled @ scaled.mT if self._channels < self._places else scaled.mT @ scaled
        length = torch.hypot(norms(scaled), norms(products))[:, None, None]
        usable = torch.isfinite(length)
        clipped = torch.where(
            usable, (_MARGIN_OF_PRODUCTS * self.S / length.clamp(min=1e-300)).clamp(max=1.0) * scaled, 0.0
        )
        rows, others = (v.transpose(0, 1).flatten(1) for v in (clipped, torch.where(usable, scaled, 0.0)))
        return torch.cat([clipped.sum(0).flatten(), _upper(rows @ others.T)])

    def fit(self, noisy: Tensor, n: int) -> None:
        scaled, products = (noisy.double() / n).tensor_split([self.mean.numel()])
        scaled = scaled.view_as(self.mean)
        covariance = _from_upper(products, self._channels) - scaled @ scaled.T
        values, vectors = torch.linalg.eigh(covariance, UPLO="U")
        values = values.clamp(min=self.min_eigenvalue * float(values[-1].clamp(min=1e-6)))
        self.matrix.copy_((vectors * (self.scale * values.pow(-self.power))) @ vectors.T)
        self.mean.copy_(scaled * math.sqrt(self._places))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        centred = flat[:, self._own].unflatten(1, self.mean.shape) - self.mean
        with torch.autocast(x.device.type, enabled=False):
            whitened = torch.einsum("ij,bjp->bip", self.matrix.to(centred.dtype), centred).flatten(1)
        before, after = flat[:, : self._own.start or 0], flat[:, self._own.stop or flat.shape[1] :]
        return torch.cat([before.to(whitened.dtype), whitened, after.to(whitened.dtype)], dim=1).unflatten(
            1, x.shape[1:]
        )


class ClassCounts(Preprocessing):
    """Counts the records of each class, by the Laplace or the Gaussian mechanism. It leaves inputs as they are; the
    counts are shown, and kept with the model.

    Labels are 0 … classes-1, so that classes are disjoint parts of the records: one record more moves one count, by 1,
    and all together cost what one does (parallel composition). Another in its place moves up to two of them: in L1 norm
    by 2, in L2 norm by √2. Records with other labels are in none.
    """

    S = 1.0
    counts: Tensor

    def __init__(self, classes: int, noise: str = "laplace", **spent: float | None) -> None:
        super().__init__(**spent)
        if noise not in ("laplace", "gaussian"):
            raise ConfigError(f"preprocessing.class_counts.noise={noise} is unknown; choose laplace or gaussian.")
        self.noise, self.d = noise, whole("preprocessing.class_counts.classes", classes)
        self.replace_sensitivity = 2.0 if noise == "laplace" else math.sqrt(2)
        self.register_buffer("counts", torch.zeros(classes))

    def query(self, name: str, adjacency: str, mu: float | None) -> ParallelQueryEvent:
        one = super().query(name, adjacency, mu)
        assert isinstance(one, OneTimeQueryEvent)
        counted = (replace(one, query=str(k), S_replaced=1.0) for k in range(len(self.counts)))
        return ParallelQueryEvent(name, "class", tuple(counted))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        if y.dim() != 1 or y.is_floating_point() or y.is_complex():
            raise ConfigError("preprocessing.class_counts: a record's label must be one whole number, its class.")
        known = y[(y >= 0) & (y < self.d)]
        return torch.bincount(known.long(), minlength=self.d).double()

    def fit(self, noisy: Tensor, n: int) -> None:
        self.counts.copy_(noisy)

    def released_values(self) -> list[float]:
        return [float(count) for count in self.counts]

    def weights(self) -> Tensor:
        """One over each class's count, where a count below two standard deviations of its noise, or below 1, is taken
        for that much: noise alone makes no class rare."""
        return 1 / self.counts.clamp(min=max(1.0, 2 * self.sd))


def _upper(symmetric: Tensor) -> Tensor:
    """The upper triangle, what is off the diagonal times √2, so that its L2 norm is the matrix' Frobenius norm."""
    i, j = torch.triu_indices(*symmetric.shape)
    return symmetric[i, j] * (1 + (i != j)).double().sqrt()


def _from_upper(numbers: Tensor, size: int) -> Tensor:
    """[size, size] with the upper triangle that `_upper` made these numbers of."""
    i, j = torch.triu_indices(size, size)
    upper = torch.zeros(size, size, dtype=torch.float64)
    upper[i, j] = numbers / (1 + (i != j)).double().sqrt()
    return upper


class PreprocessedModel(nn.Module):
    """A model whose inputs go through preparations first, in their order."""

    def __init__(self, preparations: Mapping[str, Preprocessing], model: nn.Module) -> None:
        super().__init__()
        self.preprocessing = nn.ModuleDict(preparations)
        self.model = model

    def forward(self, x: Tensor) -> Any:
        for preparation in self.preprocessing.values():
            x = preparation(x)
        return self.model(x)


def preprocessing_of(module: nn.Module) -> dict[str, Preprocessing]:
    """Those that a module holds in one place, by name and in their order."""
    found = [layer for layer in module.modules() if isinstance(layer, PreprocessedModel)]
    if len(found) > 1:
        raise ConfigError("model: it has several parts that are Prepared; give one all of the preparations.")
    return dict(found[0].preprocessing.items()) if found else {}  # type: ignore[arg-type]


def queries(module: nn.Module, adjacency: str, mu: float | None) -> tuple[OneTimeQueryEvent | ParallelQueryEvent, ...]:
    """What the preparations of a module will release, as for `Preprocessing.query`."""
    found = preprocessing_of(module)
    shares = {
        name: preparation.budget_share for name, preparation in found.items() if preparation.budget_share is not None
    }
    if sum(shares.values()) >= 1:
        asked = " and ".join(f"preprocessing.{name}.budget_share={share:g}" for name, share in shares.items())
        raise ConfigError(f"{asked} leave nothing for training; together they must be below 1.")
    return tuple(preparation.query(name, adjacency, mu) for name, preparation in found.items())


def parts_of(event: OneTimeQueryEvent | ParallelQueryEvent) -> tuple[OneTimeQueryEvent, ...]:
    """The queries of disjoint parts of the records, or the one of all."""
    return event.queries if isinstance(event, ParallelQueryEvent) else (event,)
