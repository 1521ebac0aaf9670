"""Private preprocessing methods: layers fitted once, before training, to a noisy sum over all records.

A new method is a class here and a file in conf/preprocessing. `dpexp.privacy.preprocessing` runs them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from dpexp.accounting.dominating_pairs import pure_below
from dpexp.accounting.ledger import OneTimeQueryEvent, Round
from dpexp.accounting.sampling import FullBatch, event_of
from dpexp.errors import ConfigError, Count, Positive, Range, between, checks_arguments, exactly_one, is_count, one_of
from dpexp.privacy.sampling.privacy_unit import Example

PLACE = Range("must be an integer of at least 0", lambda value: value == 0 or is_count(value))
_MAX_CENTER = 1e20
_MIN_VARIANCE = 1e-3  # relative to the mean square of all features


@checks_arguments
class Preprocessing(nn.Module, ABC):
    """A layer before the model, fitted once to the noisy sum of a vector of each record, clipped to S.

    Its results are buffers, saved with the model; the model's inputs pass through `forward`.

    Args:
        budget_share: w. If the target equals μ*-Gaussian DP, the step's noise makes it √w μ*-Gaussian DP (with Laplace
            noise at most that), since squares of μ add up.
        noise_multiplier: σ/S, or b/S for Laplace noise, in place of a share.

    Attributes:
        d: dimension of a record's vector.
        S: the norm to which a record's vector is clipped: L2 for Gaussian noise, L1 for Laplace noise.
        replace_sensitivity: how far replacing a record moves the sum, in that norm.
        sd: standard deviation of the noise of each entry; 0 before fitting and without privacy.

    Examples:
        The mean length of inputs, each counted as at most `most`, to which all are scaled:

            class Length(Preprocessing):
                def __init__(self, most: float, budget_share=None, noise_multiplier=None) -> None:
                    super().__init__(budget_share, noise_multiplier)
                    self.d, self.S, self.replace_sensitivity = 1, most, most
                    self.register_buffer("length", torch.ones(1))

                def vector(self, x, y):
                    return x.norm().view(1)

                def fit(self, noisy, n):
                    self.length.copy_((noisy / n).clamp(min=1e-3))

                def forward(self, x):
                    return x / self.length
    """

    noise: str = "gaussian"
    sd: float = 0.0
    d: int
    S: float
    replace_sensitivity: float

    def __init__(
        self,
        budget_share: Annotated[float, between(0, 1, "()")] | None = None,
        noise_multiplier: Positive | None = None,
    ) -> None:
        super().__init__()
        name = f"preprocessing.{type(self).__name__}"
        exactly_one(name, budget_share=budget_share, noise_multiplier=noise_multiplier)
        self.budget_share, self.noise_multiplier = budget_share, noise_multiplier

    def query(self, name: str, adjacency: str, mu: float | None) -> OneTimeQueryEvent:
        """The ledger event of the release. mu: μ* of the target; None: there is none.

        Raises:
            ConfigError: `budget_share` is set, and there is no target.
        """
        event = partial(OneTimeQueryEvent, name, self.noise, self.S, self.replace_sensitivity)
        if self.noise_multiplier is not None:
            return event(self.noise_multiplier * self.S)
        assert self.budget_share is not None
        if mu is None:
            raise ConfigError(
                f"preprocessing.{name}.budget_share={self.budget_share} needs privacy.epsilon, max_advantage or "
                f"max_tpr_at_fpr; set one of them, or preprocessing.{name}.noise_multiplier."
            )
        cost = math.sqrt(self.budget_share) * mu
        if self.noise == "laplace":
            cost = pure_below(cost)
        sensitivity = self.replace_sensitivity if adjacency == "replace_one" else self.S
        return event(sensitivity / cost)

    @abstractmethod
    def vector(self, x: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The vector v of one record, which is clipped to S; one that is not finite counts as zero.

        Or (v, o) with o [T, m]: v and the upper triangle of oᵀo, off-diagonal entries times √2, as one vector.

        Args:
            x: one input [...], after the earlier preprocessing steps, in float64; y: its label.
        """

    @abstractmethod
    def fit(self, noisy: Tensor, n: int) -> None:
        """Sets the buffers from the noisy sum [d]. n: published number of records."""

    def forward(self, x: Tensor) -> Tensor:
        """The model's inputs [B, …]."""
        return x

    def released_values(self) -> list[float]:
        """Released values to show."""
        return []


class Pca(Preprocessing):
    """Projects inputs onto the first k principal components of a noisy covariance (Abadi et al. 2016, sections 4 and
    5.2; Dwork et al. 2014).

    Each record, minus `center` and scaled to length 1, adds u uᵀ to the covariance. The upper triangle is released,
    with off-diagonal entries times √2, so that its L2 norm is the Frobenius norm ‖u‖² = 1. Replacing a record moves the
    sum by ‖u uᵀ - v vᵀ‖ = (2 - 2(u·v)²)^(1/2) ≤ √2.

    Args:
        shape: of one input.
        k: number of components; the model's inputs are [k].
        center: public constant subtracted from inputs, such as the background colour.
    """

    S, replace_sensitivity = 1.0, math.sqrt(2)
    components: Tensor

    def __init__(self, shape: Sequence[int], k: int, center: float = 0.0, **budget: float | None) -> None:
        super().__init__(**budget)
        size = math.prod(shape)
        if not isinstance(k, int) or not 1 <= k <= size:
            raise ConfigError(
                f"preprocessing.pca.k={k} must be an integer between 1 and {size}, the size of an input of "
                f"{list(shape)}."
            )
        if not isinstance(center, int | float) or not abs(center) < _MAX_CENTER:
            raise ConfigError(f"preprocessing.pca.center={center} must be a number within ±{_MAX_CENTER:g}.")
        self.center, self._size, self.d = center, size, size * (size + 1) // 2
        self.register_buffer("components", torch.eye(k, size))

    def vector(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        row = x.reshape(1, self._size) - self.center
        return row.new_zeros(0), row / torch.linalg.vector_norm(row)

    def fit(self, noisy: Tensor, n: int) -> None:
        _, vectors = torch.linalg.eigh(from_upper(noisy.double(), self._size), UPLO="U")
        self.components.copy_(vectors.T.flip(0)[: len(self.components)])

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) - self.center) @ self.components.T


@checks_arguments
class Standardize(Preprocessing):
    """Shifts and scales each feature to mean 0 and variance 1, estimated from noisy sums of x and x² (Tramèr & Boneh
    2021, arXiv 2011.11660, section 2.3 and appendix B).

    The features of images [C, …] are their channels, and a record's x and x² are means over pixels. The vector (x, x²)
    of dimension 2C is clipped to S.

    Args:
        shape: of one input.
        clip_norm: S; the default √(2C) clips no features within [-1, 1].
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, shape: Sequence[int], clip_norm: Positive | None = None, **budget: float | None) -> None:
        super().__init__(**budget)
        features = shape[0]
        self.S = math.sqrt(2 * features) if clip_norm is None else float(clip_norm)
        self.d = 2 * features
        self.replace_sensitivity = 2 * self.S
        self._shape = tuple(shape)
        per_feature = (features, *(1 for _ in shape[1:]))
        self.register_buffer("mean", torch.zeros(per_feature))
        self.register_buffer("deviation", torch.ones(per_feature))

    def vector(self, x: Tensor, y: Tensor) -> Tensor:
        pixels = x.reshape(self._shape[0], math.prod(self._shape[1:]))
        return torch.cat([pixels.mean(1), pixels.square().mean(1)])

    def fit(self, noisy: Tensor, n: int) -> None:
        mean, square = (noisy.double() / n).chunk(2)
        min_variance = _MIN_VARIANCE * square.mean().clamp(min=1e-6)
        self.mean.copy_(mean.view_as(self.mean))
        self.deviation.copy_((square - mean.square()).clamp(min=min_variance).sqrt().view_as(self.mean))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


@checks_arguments
class Whiten(Preprocessing):
    """Centers each feature and multiplies channels by C^-power, with their covariance C from noisy sums (zero-phase
    whitening; Kessy, Lewin and Strimmer 2018, arXiv 1512.00809).

    The vector of an image x [channels, P] of P pixels is (x/√P, x xᵀ/P), clipped to S; the upper triangle of x xᵀ is
    released as by `Pca`.

    Args:
        shape: of one input.
        power: in (0, 1/2]; 1/2 decorrelates the channels, smaller powers keep large directions larger.
        min_eigenvalue: lower bound on the eigenvalues of C relative to the largest, since noise hides smaller ones.
        clip_norm: S; the default √(channels·(channels + 1)) clips no features within [-1, 1].
        first_feature: whiten only the features of a longer, flattened input from this one on; None: all.
        scale: factor of the whitened features.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        power: Annotated[float, between(0, 0.5, "(]")] = 0.5,
        min_eigenvalue: Annotated[float, between(1e-9, 1, "[]")] = 0.02,
        clip_norm: Positive | None = None,
        first_feature: Annotated[int, PLACE] | None = None,
        scale: Positive = 1.0,
        **budget: float | None,
    ) -> None:
        super().__init__(**budget)
        self.scale = scale
        channels = shape[0]
        self._features = (
            slice(None) if first_feature is None else slice(first_feature, first_feature + math.prod(shape))
        )
        self.S = math.sqrt(channels * (channels + 1)) if clip_norm is None else float(clip_norm)
        self.replace_sensitivity = 2 * self.S
        self._pixels = math.prod(shape[1:])
        self.d = channels * self._pixels + channels * (channels + 1) // 2
        self.power, self.min_eigenvalue, self._channels = power, min_eigenvalue, channels
        self.register_buffer("mean", torch.zeros(channels, self._pixels))
        self.register_buffer("matrix", torch.eye(channels))

    def vector(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scaled = x.flatten()[self._features].reshape(self._channels, self._pixels) / math.sqrt(self._pixels)
        return scaled.flatten(), scaled.T

    def fit(self, noisy: Tensor, n: int) -> None:
        scaled, products = (noisy.double() / n).tensor_split([self.mean.numel()])
        scaled = scaled.view_as(self.mean)
        covariance = from_upper(products, self._channels) - scaled @ scaled.T
        values, vectors = torch.linalg.eigh(covariance, UPLO="U")
        values = values.clamp(min=self.min_eigenvalue * float(values[-1].clamp(min=1e-6)))
        self.matrix.copy_((vectors * (self.scale * values.pow(-self.power))) @ vectors.T)
        self.mean.copy_(scaled * math.sqrt(self._pixels))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        centred = flat[:, self._features].unflatten(1, self.mean.shape) - self.mean
        with torch.autocast(x.device.type, enabled=False):
            # As a convolution, which is faster than a product for each record.
            whitened = nn.functional.conv1d(centred, self.matrix.to(centred.dtype).unsqueeze(-1)).flatten(1)
        before, after = flat[:, : self._features.start or 0], flat[:, self._features.stop or flat.shape[1] :]
        return torch.cat([before.to(whitened.dtype), whitened, after.to(whitened.dtype)], dim=1).unflatten(
            1, x.shape[1:]
        )


@checks_arguments
class ClassCounts(Preprocessing):
    """Noisy counts of the classes 0 … classes-1, by the Laplace or the Gaussian mechanism; inputs are unchanged.

    Adding or removing a record moves one count by 1, so that all counts together cost as much as one (parallel
    composition). Replacing a record moves two counts: by 2 in L1 norm, by √2 in L2 norm. Records with other labels are
    not counted.
    """

    S = 1.0
    counts: Tensor

    def __init__(
        self, classes: Count, noise: Annotated[str, one_of("laplace", "gaussian")] = "laplace", **budget: float | None
    ) -> None:
        super().__init__(**budget)
        self.noise, self.d = noise, classes
        self.replace_sensitivity = 2.0 if noise == "laplace" else math.sqrt(2)
        self.register_buffer("counts", torch.zeros(classes))

    def vector(self, x: Tensor, y: Tensor) -> Tensor:
        if y.dim() or y.is_floating_point() or y.is_complex():
            raise ConfigError("preprocessing.class_counts: a record's label must be one integer, its class.")
        return (torch.arange(self.d) == y).double()

    def fit(self, noisy: Tensor, n: int) -> None:
        self.counts.copy_(noisy)

    def released_values(self) -> list[float]:
        return [float(count) for count in self.counts]

    def weights(self) -> Tensor:
        """1 / count of each class, with counts clamped to at least 1 and two standard deviations of their noise."""
        return 1 / self.counts.clamp(min=max(1.0, 2 * self.sd))


def upper(symmetric: Tensor) -> Tensor:
    """The upper triangle, off-diagonal entries times √2: its L2 norm is the matrix's Frobenius norm."""
    i, j = torch.triu_indices(*symmetric.shape)
    return symmetric[i, j] * (1 + (i != j)).double().sqrt()


def from_upper(entries: Tensor, size: int) -> Tensor:
    """The upper triangular matrix [size, size] whose `upper` is `entries`."""
    i, j = torch.triu_indices(size, size)
    upper = torch.zeros(size, size, dtype=torch.float64)
    upper[i, j] = entries / (1 + (i != j)).double().sqrt()
    return upper


class PreprocessedModel(nn.Module):
    """A model whose inputs pass through preprocessing steps first, in their order."""

    def __init__(self, steps: Mapping[str, Preprocessing], model: nn.Module) -> None:
        super().__init__()
        self.preprocessing = nn.ModuleDict(steps)
        self.model = model

    def forward(self, x: Tensor) -> Any:
        for step in self.preprocessing.values():
            x = step(x)
        return self.model(x)


def preprocessing_of(module: nn.Module) -> dict[str, Preprocessing]:
    """The preprocessing steps of a module's PreprocessedModel by name, in their order."""
    found = [layer for layer in module.modules() if isinstance(layer, PreprocessedModel)]
    if len(found) > 1:
        raise ConfigError("model: it has several PreprocessedModel modules; put all preprocessing steps into one.")
    return dict(found[0].preprocessing.items()) if found else {}  # type: ignore[arg-type]


def rounds_before_training(
    module: nn.Module, n: int, privacy_unit: Example, adjacency: str, mu: float | None
) -> tuple[Round, ...]:
    """The rounds of a module's preprocessing steps, on all n records; arguments as of `Preprocessing.query`."""
    steps = preprocessing_of(module)
    shares = {name: step.budget_share for name, step in steps.items() if step.budget_share is not None}
    if sum(shares.values()) >= 1:
        listed = " and ".join(f"preprocessing.{name}.budget_share={share:g}" for name, share in shares.items())
        raise ConfigError(f"{listed} leave nothing for training; their sum must be below 1.")
    queries = [step.query(name, adjacency, mu) for name, step in steps.items()]
    if queries and privacy_unit != Example():
        raise ConfigError(
            f"{queries[0].name}, which is released once, bounds what an example contributes, not a {privacy_unit}; "
            "choose privacy_unit=example."
        )
    return tuple(Round(event_of(FullBatch(), n), (query,)) for query in queries)
