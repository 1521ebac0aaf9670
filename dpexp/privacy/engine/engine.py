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
from dpexp.privacy.engine.uses import Dense, Use, merged
from dpexp.privacy.noise import GaussianNoise
from dpexp.privacy.plan import Group, PrivacyPlan

# A record is clipped to S less this much, relatively, so that its true norm is at most S although the norm was
# computed with rounding errors.
MARGIN = {torch.float32: 2.0**-16, torch.float64: 2.0**-40}


class Engine:
    """Carries out a plan's mechanisms on a module's gradients.

    Per sample: `start`, then `accumulate` for each chunk, then `release`.

    Args:
        observe: keep each chunk's per-record norms and losses in `observations`. They are private.

    Raises:
        ConfigError: the plan was made for other parameters than the module's trainable ones.
    """

    def __init__(self, plan: PrivacyPlan, module: nn.Module, noise: GaussianNoise, observe: bool = False) -> None:
        self.plan = self.now = plan
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
        self.observe = observe
        self.observations: list[dict[str, Tensor]] = []

    def start(self, t: int = 0) -> None:
        """Begins round t's sample: all sums are zero."""
        self.now = self.plan.at(t)
        self._sums = {
            name: torch.zeros_like(p, dtype=torch.promote_types(torch.float32, p.dtype))
            for name, p in self._parameters.items()
        }
        self.observations = []

    def accumulate(self, loss_of: Callable[[Any], Tensor], batch: Any, size: int, empty: bool = False) -> None:
        """Adds one chunk's clipped vectors to the sums.

        Args:
            loss_of: the loss of a batch of one record, as a scalar.
            batch: tensors, in any nesting of tuples, lists and dicts, whose first dimension is `size`.
            empty: the chunk stands for an empty sample and contributes nothing.

        Raises:
            ConfigError: the batch cannot be split into records, or a buffer changed.
        """
        before = _state(self._module)
        while not self._slow:
            try:
                uses, losses = self._uses_together(loss_of, batch, size)
            except (torch.OutOfMemoryError, ConfigError, KeyboardInterrupt):
                raise
            except Exception as reason:
                _refuse_changes(before, self._module)
                self._give_up(reason)
                continue
            with _full_precision(losses.device), torch.no_grad():
                self._clip_and_add(uses, losses, empty)
            break
        else:
            self._accumulate_singly(loss_of, batch, size, empty)
        _refuse_changes(before, self._module)

    def release(self, ledger: LedgerWriter) -> dict[str, Tensor]:
        """Writes the sum query events, and only then returns v̂ for each parameter:
        (Σ_i c_i v^i + α N(0, σ̃²)) / qn."""
        for group in self.now.groups:
            ledger.query(group.query())
        ledger.commit()
        qn = self.now.sampling.q * self.now.n
        released = {}
        for group, alpha, name in _by_parameter(self.now.groups):
            total = self._sums[name]
            released[name] = total.add_(self._noise(total), alpha=alpha * group.sigma).div_(qn)
        self._sums = {}
        return released

    def _give_up(self, reason: Exception) -> None:
        """Settles for processing one module's records, or the whole model's, one at a time."""
        name = culprit(reason, self._module, self._looped)
        if name is None:
            self._slow, what = True, "this model's records"
        else:
            self._looped = {other for other in self._looped if not other.startswith(f"{name}.")} | {name}
            what = f"the records of the module {name} ({type(self._module.get_submodule(name)).__name__})"
        warnings.warn(
            f"{what} are processed one at a time, which is right but slow, because they cannot be processed "
            f"together: {(str(reason) or type(reason).__name__).splitlines()[0]}"
        )

    def _uses_together(self, loss_of: Callable, batch: Any, size: int) -> tuple[dict[str, Use], Tensor]:
        """The use that each parameter was put to, for all records of a chunk, and their losses [B]."""
        leaves, structure = records(batch, size)
        for parameter in self._parameters.values():
            parameter.grad = None
        uses: dict[int, list[Use]] = defaultdict(list)

        def record(parameter: Tensor, use: Use) -> None:
            uses[id(parameter)].append(use)

        device = next(iter(self._parameters.values())).device
        anchor = torch.zeros(size, device=device, requires_grad=True)

        def loss_of_one(anchor: Tensor, *leaves: Tensor) -> Tensor:
            capture = Capture(self._parameters.values(), anchor, record)
            with looping(self._module, self._looped, capture), capture:
                return loss_of(tree_unflatten(list(leaves), structure))

        in_dims = (0, *(None if leaf is None else 0 for leaf in leaves))
        losses = torch.func.vmap(loss_of_one, in_dims=in_dims, randomness="different")(
            anchor,
            *(leaf if leaf is None else leaf.unsqueeze(1) for leaf in leaves),  # type: ignore[arg-type]
        )
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

    def _accumulate_singly(self, loss_of: Callable, batch: Any, size: int, empty: bool) -> None:
        leaves, structure = records(batch, size)
        for i in range(size):
            loss = loss_of(tree_unflatten([leaf if leaf is None else leaf[i : i + 1] for leaf in leaves], structure))
            if loss.dim():
                raise ConfigError(f"training_step must return one loss; it has shape {tuple(loss.shape)}.")
            with _full_precision(loss.device):
                gradients = (
                    torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
                    if loss.requires_grad
                    else ()
                )
            with _full_precision(loss.device), torch.no_grad():
                self._clip_and_add(
                    {
                        name: Dense(g[None].to(self._sums[name].dtype))
                        for name, g in zip(self._parameters, gradients, strict=False)
                        if g is not None
                    },
                    loss.detach()[None],
                    empty,
                )

    def _clip_and_add(self, uses: dict[str, Use], losses: Tensor, empty: bool) -> None:
        observation = {"loss": losses}
        for group in self.now.groups:
            members = [(alpha, name) for g, alpha, name in _by_parameter([group]) if name in uses]
            if not members:
                continue
            norms = sum(uses[name].squared_norms() / alpha**2 for alpha, name in members).sqrt()  # type: ignore[union-attr]
            finite = torch.isfinite(norms)
            c = torch.where(finite, clip_factors(norms, group.S), 0)
            observation[f"norm/{group.name}"] = norms
            to_zero = norms.is_cuda or not finite.all()  # on a GPU, asking would wait for it
            for _, name in members:
                if to_zero:
                    uses[name].zero(~finite)
                if not empty:
                    uses.pop(name).add_weighted_sum(c, self._sums[name])
        if self.observe and not empty:
            self.observations.append(observation)


def clip_factors(norms: Tensor, S: float) -> Tensor:
    """c_i = min(1, S/‖v^i‖) (Abadi et al. 2016), with S less the rounding margin."""
    return (S * (1 - MARGIN[norms.dtype]) / norms).clamp(max=1)


def records(batch: Any, size: int) -> tuple[list[Tensor | None], Any]:
    """A batch's tensors, each with the records along its first dimension, and its structure."""
    leaves, structure = tree_flatten(batch)
    for leaf in leaves:
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            raise ConfigError(
                f"data: a training batch holds a {type(leaf).__name__}, which cannot be split into records; "
                "make it tensors in tuples, lists or dicts."
            )
        if leaf.dim() == 0 or len(leaf) != size:
            raise ConfigError(
                f"data: a training batch of {size} records holds a tensor of shape {tuple(leaf.shape)}; "
                "its first dimension must run over the records."
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


def _state(module: nn.Module) -> dict[str, tuple[Tensor, int, Tensor | None]]:
    """What must not change while data is seen: buffers, with a copy, and frozen parameters."""
    buffers = {name: (b, b._version, b.clone()) for name, b in module.named_buffers()}
    return buffers | {name: (p, p._version, None) for name, p in module.named_parameters() if not p.requires_grad}


def _refuse_changes(before: dict[str, tuple[Tensor, int, Tensor | None]], module: nn.Module) -> None:
    now = dict(module.named_buffers()) | dict(module.named_parameters())
    for name, (tensor, version, copy) in before.items():
        same = now.get(name) is tensor and tensor._version == version
        if not same or not (copy is None or torch.equal(tensor, copy)):
            raise ConfigError(
                f"model: the buffer or frozen parameter {name} changed during training_step, so data would reach it "
                "without noise; remove what updates it, or freeze it with eval()."
            )
