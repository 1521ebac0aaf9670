"""Accumulates clipped sums over the chunks of a sample, and releases them with noise."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpexp.accounting.ledger import LedgerWriter
from dpexp.errors import ConfigError
from dpexp.privacy.engine.capture import Capture
from dpexp.privacy.engine.looped import culprit, looping
from dpexp.privacy.engine.rounding import UNIT
from dpexp.privacy.engine.uses import Dense, Use, merged
from dpexp.privacy.isolation import Guard, State
from dpexp.privacy.noise import GaussianNoise
from dpexp.privacy.plan import Group, PrivacyPlan

MARGIN = {dtype: 3.001 * unit for dtype, unit in UNIT.items()}  # what rounding c, c·g and c·g·x can add (see rounding)
_SMALLEST = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}


class Engine:
    """Carries out a plan's mechanisms on a module's gradients.

    Per sample: `start`, then `accumulate` for each chunk, then `release`.

    Args:
        observe: keep each chunk's per-record norms and losses in `observations`. They are private.

    Attributes:
        beside: objects and dictionaries that a step might change besides the module (see isolation.State).

    Raises:
        ConfigError: the plan was made for other parameters than the module's trainable ones.
    """

    def __init__(self, plan: PrivacyPlan, module: nn.Module, noise: GaussianNoise, observe: bool = False) -> None:
        self.plan = self.now = plan
        self.beside: tuple[Any, ...] = ()
        self._noise = noise
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        planned = {name for g in plan.groups for v in g.vectors for name in v.parameters}
        if planned != set(trainable):
            odd = sorted(planned.symmetric_difference(trainable))
            raise ConfigError(f"the plan was made for another model: they differ in {', '.join(odd)}.")
        self._parameters = trainable
        self._sums: dict[str, Tensor] = {}
        self._module = module
        self._looped: set[str] = set()
        self._slow = False
        self._succeeded = False
        self._said: set[str] = set()
        self.observe = observe
        self.observations: list[dict[str, Tensor]] = []

    def start(self, t: int = 0) -> None:
        """Begins round t's sample: all sums are zero."""
        self.now = self.plan.at(t)
        self._sums = {
            name: torch.zeros(p.shape, dtype=torch.promote_types(torch.float32, p.dtype), device=p.device)
            for name, p in self._parameters.items()
        }
        self.observations = []

    def accumulate(self, loss_of: Callable[[Any], Tensor], batch: Any, size: int) -> None:
        """Adds one chunk's clipped vectors to the sums. A record whose loss cannot be computed contributes nothing,
        unless none ever could.

        Args:
            loss_of: the loss of one record, as a scalar.
            batch: what it is given, stacked over the records: tensors [size, ...] in any nesting of tuples, lists and
                dicts; whatever else the batch holds is the same for all of them.

        Raises:
            ConfigError: the batch cannot be split into records, or a parameter changed.
        """
        state = State(self._module, self.beside)
        before = self._slow, self._looped
        while not self._slow:
            try:
                uses, losses = self._uses_together(loss_of, batch, size, state)
            except (torch.OutOfMemoryError, ConfigError, KeyboardInterrupt):
                raise
            except Exception as reason:
                self._restore(state)
                self._give_up(reason)
                continue
            self._restore(state)
            with _full_precision(losses.device), torch.no_grad():
                self._clip_and_add(uses, losses)
            self._succeeded = True
            break
        else:
            if self._accumulate_singly(loss_of, batch, size, state):
                self._slow, self._looped = before  # it was a record's fault
        if (self._slow, self._looped) != before:
            self._warn_of_slowness()

    def release(self, ledger: LedgerWriter) -> dict[str, Tensor]:
        """Writes the sum query events, and only then returns v̂ for each parameter:
        (Σ_i c_i v^i + α N(0, σ̃²)) / qn."""
        for group in self.now.groups:
            ledger.query(group.query())
        ledger.commit()
        released, self._sums = self._sums, {}
        noisy = [(released[name], alpha * group.sigma) for group, alpha, name in _by_parameter(self.now.groups)]
        self._noise.add_to(noisy, divisor=self.now.sampling.q * self.now.n)
        return released

    def _restore(self, state: State) -> None:
        changed = [name for name in state.restore() if name not in self._said]
        if changed:
            self._said.update(changed)
            warnings.warn(
                f"training_step changes {', '.join(changed)}, which is set back after each chunk of records, since "
                "data would pass the noise that way."
            )

    def _give_up(self, reason: Exception) -> None:
        """Settles for processing one module's records, or the whole model's, one at a time."""
        name = culprit(reason, self._module, self._looped)
        self._reason = (str(reason) or type(reason).__name__).splitlines()[0]
        if name is None:
            self._slow = True
        else:
            self._looped = {other for other in self._looped if not other.startswith(f"{name}.")} | {name}

    def _warn_of_slowness(self) -> None:
        what = "this model's records"
        if not self._slow:
            kinds = [f"{name} ({type(self._module.get_submodule(name)).__name__})" for name in sorted(self._looped)]
            what = f"the records of the module{'s' if len(kinds) > 1 else ''} {', '.join(kinds)}"
        warnings.warn(
            f"{what} are processed one at a time, which is right but slow, because they cannot be processed "
            f"together: {self._reason}"
        )

    def _uses_together(
        self, loss_of: Callable, batch: Any, size: int, state: State
    ) -> tuple[dict[str, Use], Tensor]:  # fmt: skip
        """The use that each parameter was put to, for all records of a chunk, and their losses [B]."""
        leaves, structure = records(batch, size)
        for parameter in self._parameters.values():
            parameter.grad = None
        uses: dict[int, list[Use]] = defaultdict(list)

        def record(parameter: Tensor, use: Use) -> None:
            uses[id(parameter)].append(use)

        device = next(iter(self._parameters.values())).device
        anchor = torch.zeros(size, device=device, requires_grad=True)

        def loss_of_one(anchor: Tensor, *leaves: Any) -> Tensor:
            capture = Capture(self._parameters.values(), anchor, record, state)
            with looping(self._module, self._looped, capture), capture:
                return loss_of(tree_unflatten(list(leaves), structure))

        in_dims = (0, *(0 if isinstance(leaf, Tensor) else None for leaf in leaves))
        losses = torch.func.vmap(loss_of_one, in_dims=in_dims, randomness="different")(anchor, *leaves)
        if losses.dim() != 1:
            raise ConfigError(f"training_step must return one loss; it has shape {tuple(losses.shape[1:])}.")
        total = losses.sum()
        with _full_precision(device), torch.no_grad():
            if total.requires_grad:
                total.backward()
            if any(p.grad is not None for p in self._parameters.values()):
                for p in self._parameters.values():
                    p.grad = None
                raise RuntimeError("a parameter is used in a way that was not seen.")
            return (
                {name: merged(uses.pop(id(p))) for name, p in self._parameters.items() if id(p) in uses},
                losses.detach(),
            )

    def _accumulate_singly(self, loss_of: Callable, batch: Any, size: int, state: State) -> int:
        """Returns how many records' losses could not be computed."""
        leaves, structure = records(batch, size)
        errors: list[Exception] = []
        for i in range(size):
            one = tree_unflatten([leaf[i] if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
            try:
                gradients, loss = self._gradients_of_one(loss_of, one, state)
            except (torch.OutOfMemoryError, ConfigError, KeyboardInterrupt):
                raise
            except Exception as error:
                errors.append(error)
                continue
            finally:
                self._restore(state)
            with _full_precision(loss.device), torch.no_grad():
                self._clip_and_add(gradients, loss.detach()[None])
        if len(errors) == size and not self._succeeded:
            raise errors[-1]
        self._succeeded = True
        if errors and "failure" not in self._said:
            self._said.add("failure")
            warnings.warn(f"the loss of some records cannot be computed; they contribute nothing: {errors[0]!r}")
        return len(errors)

    def _gradients_of_one(self, loss_of: Callable, one: Any, state: State) -> tuple[dict[str, Use], Tensor]:
        with Guard(state):
            loss = loss_of(one)
        if loss.dim():
            raise ConfigError(f"training_step must return one loss; it has shape {tuple(loss.shape)}.")
        gradients: tuple[Tensor | None, ...] = ()
        with _full_precision(loss.device):
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        found = zip(self._parameters, gradients, strict=False)
        return {name: Dense(g[None].to(self._sums[name].dtype)) for name, g in found if g is not None}, loss

    def _clip_and_add(self, uses: dict[str, Use], losses: Tensor) -> None:
        observation = {"loss": losses}
        for group in self.now.groups:
            members = [(alpha, name) for g, alpha, name in _by_parameter([group]) if name in uses]
            if not members:
                continue
            norms = sum(uses[name].squared_norms() / alpha**2 for alpha, name in members).sqrt()  # type: ignore[union-attr]
            finite = torch.isfinite(norms)
            observation[f"norm/{group.name}"] = norms
            to_zero = norms.is_cuda or not finite.all()  # on a GPU, asking would wait for it
            c = {
                dtype: clip_factors(norms, group.S, dtype) for dtype in {self._sums[name].dtype for _, name in members}
            }
            for _, name in members:
                if to_zero:
                    uses[name].zero(~finite)
                total = self._sums[name]
                uses.pop(name).add_weighted_sum(c[total.dtype], total)
        if self.observe:
            self.observations.append(observation)


def clip_factors(norms: Tensor, S: float, dtype: torch.dtype) -> Tensor:
    """c_i = min(1, S/‖v^i‖) (Abadi et al. 2016) [B], for vectors of a type, with S less what applying c rounds; 0 where
    the norm is not finite."""
    c = (S * (1 - MARGIN[dtype]) / norms).clamp(max=1)
    return torch.where(c > _SMALLEST[dtype], c, 0).to(dtype)


def records(batch: Any, size: int) -> tuple[list[Any], Any]:
    """A batch's leaves, of which the tensors have the records along their first dimension, and its structure."""
    leaves, structure = tree_flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != size):
            raise ConfigError(
                f"data: a training batch holds a tensor of shape {tuple(leaf.shape)}; its first dimension must run "
                "over the records."
            )
    return leaves, structure


def _by_parameter(groups: Any) -> Iterator[tuple[Group, float, str]]:
    for group in groups:
        for vector, alpha in zip(group.vectors, group.alphas, strict=True):
            for name in vector.parameters:
                yield group, alpha, name


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Norms, sums and noise are never computed in the autocast type, nor in TF32."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
