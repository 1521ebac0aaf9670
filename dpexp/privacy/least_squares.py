"""DP least squares: a linear model from one noisy sum over all records, without rounds of training."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpexp.accounting.ledger import OneTimeQueryEvent
from dpexp.errors import ConfigError, positive, positive_integer
from dpexp.privacy.preprocessing_methods import Preprocessing, from_upper

_MIN_RIDGE = 1e-6  # relative to n; of a sum without noise, in float32


class LeastSquares(Preprocessing):
    """Ridge regression on classes or numbers from noisy sums of r rᵀ and r tᵀ (Mehta et al. 2022, "Differentially
    private image classification from features", arXiv 2211.13403, DP least squares).

    A record's row r is (x, 1), scaled to length 1, or clipped to `clip_norm` and divided by it. Its target t has a
    length of at most 1: class k is c e_k - 1, divided by its length √(c(c-1)); a number y is clipped to ±`label_bound`
    and divided by it. The scores c(p - 1/c) of classes are logits: to first order, the logarithm of p up to a constant.

    The vector (r rᵀ, r tᵀ) is released as by `Pca`, clipped to S = √2. Replacing a record moves the sum by at most
    1.5·S: with ρ = r·r' and τ = t·t' in [-1, 1], the product of two vectors is ρ² + ρτ >= -1/4. That both parts count
    alike costs at most twice the least possible variance, whatever the solution: with squared weights a and b of the
    parts, the noise costs (a + b)(A/a + B/b), which is 2(A + B) at a = b, and (√A + √B)² <= A + B + 2√(AB) at best.

    The solution (R + λI)⁻¹ r tᵀ is post-processing: R is the noisy sum of r rᵀ with negative eigenvalues, which noise
    alone can make, set to 0, and λ by default σ√(2m)/4, a quarter of the norm that the noise in R has for rows of m
    entries: of ½, ¼, … the best on held-out records of Adult at ε = 0.1 and 0.3, and nearly so at 1.

    Args:
        shape: of one input.
        classes: c; None: labels are numbers.
        clip_norm: of (x, 1); None: each is scaled to length 1.
        label_bound: of labels that are numbers.
        ridge: λ/n; None: as above.
    """

    S, replace_sensitivity = math.sqrt(2), 1.5 * math.sqrt(2)
    budget_share = noise_multiplier = None  # it has the plan's noise multiplier

    def __init__(
        self,
        shape: Sequence[int],
        classes: int | None,
        clip_norm: float | None = None,
        label_bound: float | None = None,
        ridge: float | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if classes is not None and positive_integer("model.classes", classes) == 1:
            raise ConfigError("model.classes=1 must be at least 2; or null, for labels that are numbers.")
        if (classes is None) == (label_bound is None):
            wanted = "must be given with numbers as labels" if classes is None else f"is not for classes={classes}"
            raise ConfigError(f"model.label_bound={label_bound} {wanted}; it bounds numbers in place of data.classes.")
        for name, value in (("clip_norm", clip_norm), ("label_bound", label_bound), ("ridge", ridge)):
            if value is not None:
                positive(f"model.{name}", value)
        self.classes, self.clip_norm, self.ridge = classes, clip_norm, ridge
        self.target_length = label_bound or math.sqrt(classes * (classes - 1))  # type: ignore[operator]
        self._m, self._targets = math.prod(shape) + 1, classes or 1
        self.d = self._m * self._targets + self._m * (self._m + 1) // 2
        self.coefficients = nn.Parameter(torch.zeros(self._m, self._targets), requires_grad=False)

    def query(self, name: str, adjacency: str, mu: float | None) -> OneTimeQueryEvent:
        return OneTimeQueryEvent(name, self.noise, self.S, self.replace_sensitivity, self.S)  # z = 1

    def rows(self, x: Tensor) -> Tensor:
        """r of inputs [B, …]: [B, m]."""
        rows = torch.cat([x.flatten(1), x.new_ones(len(x), 1)], dim=1)
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows / (lengths if self.clip_norm is None else lengths.clamp(min=self.clip_norm))

    def targets(self, y: Tensor) -> Tensor:
        """t of one label [classes]; 0 for a label outside the classes."""
        if y.numel() != 1 or y.is_complex() or y.is_floating_point() != (self.classes is None):
            raise ConfigError(
                "model: a record's label must be one "
                + ("number, or set data.classes." if self.classes is None else "integer, its class.")
            )
        if self.classes is None:
            return y.double().view(1).clamp(-self.target_length, self.target_length) / self.target_length
        own = (torch.arange(self.classes) == y).double()
        return (self.classes * own - own.sum()) / self.target_length

    def vector(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        row = self.rows(x[None])
        return torch.outer(row[0], self.targets(y)), row

    def fit(self, noisy: Tensor, n: int) -> None:
        products, squares = noisy.double().tensor_split([self._m * self._targets])
        ridge = self.sd * math.sqrt(2 * self._m) / 4 if self.ridge is None else self.ridge * n
        values, vectors = torch.linalg.eigh(from_upper(squares, self._m), UPLO="U")
        inverse = (vectors / (values.clamp(min=0) + max(ridge, _MIN_RIDGE * n))) @ vectors.T
        self.coefficients.copy_(self.target_length * inverse @ products.view(self._m, -1))

    def forward(self, x: Tensor) -> Tensor:
        """Scores [B, classes], or estimates [B, 1]."""
        return self.rows(x) @ self.coefficients
