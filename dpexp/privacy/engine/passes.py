"""One forward and one backward pass: of several records together, or of one."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_unflatten

from dpexp.errors import RecordError, words_of
from dpexp.privacy.engine.alone import Alone
from dpexp.privacy.engine.behind import nothing_behind_vmap
from dpexp.privacy.engine.branches import Asked, Restart
from dpexp.privacy.engine.capture import Capture
from dpexp.privacy.engine.chance import Chance
from dpexp.privacy.engine.checkpointed import kept
from dpexp.privacy.engine.chunk import Chunk
from dpexp.privacy.engine.derived import Derived
from dpexp.privacy.engine.looped import looping
from dpexp.privacy.engine.precision import full_precision
from dpexp.privacy.engine.uses import Dense, Use, merged
from dpexp.privacy.engine.ways import Settled, Way, Ways
from dpexp.privacy.given import Values
from dpexp.privacy.isolation.guard import Guard
from dpexp.privacy.isolation.randomness import of_python
from dpexp.privacy.isolation.state import State

ONE_LOSS = "training_step must return one number for a record: its loss."


def loss_in(step: Callable[[], Any]) -> Tensor:
    """The loss that a step returns, by itself or in a dictionary.

    Raises:
        RecordError: it returned none.
        RuntimeError: it wanted to end the program, which one record may not.
    """
    try:
        output = step()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {words_of(error)}") from None
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise RecordError(f"training_step must return a loss for every record; it returned a {type(loss).__name__}.")
    return loss


class Together:
    """Passes of several records.

    Attributes:
        answers: what all records of the last pass answered until it ended.
        own_error: of its record, if there was just one (see Capture).
    """

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor], values: Values, ways: Ways) -> None:
        self._module = module
        self._parameters = parameters
        self._values = values
        self._ways = ways
        self.answers: list[Hashable] = []
        self.own_error: Exception | None = None
        self._questions: float = 0  # that a step is expected to ask
        self._most_asked = 0
        self._alone = Alone()

    def uses(self, chunk: Chunk, way: Way, restore: Callable[[State], Any]) -> tuple[dict[str, Use], Tensor]:
        """The use that each parameter was put to, for all records of a chunk, the values that they gave for release,
        and their losses [B].

        Args:
            restore: sets a state back.

        Raises:
            Restart: the records differ, or another way is known to be theirs.
        """
        try:
            return self._uses(chunk, way)
        except Asked:
            self._questions = math.inf
        restore(chunk.state)
        return self._uses(chunk, way)

    def _uses(self, chunk: Chunk, way: Way) -> tuple[dict[str, Use], Tensor]:
        """
        Raises:
            Asked: there are more questions than expected, from where on it was not followed what random numbers reach,
                since that takes time.
        """
        uses: dict[int, list[Use]] = defaultdict(list)

        def record(parameter: Tensor, use: Use) -> None:
            uses[id(parameter)].append(use)

        def answered(answer: Hashable) -> None:
            self.answers.append(answer)
            instead = self._ways.instead(chunk.look, way, tuple(self.answers))
            if instead is not None:
                raise Settled(instead)

        self.answers, self.own_error = [], None
        device = next(iter(self._parameters.values())).device
        anchor = torch.zeros(chunk.size, device=device, requires_grad=True)
        derived = Derived(self._parameters.values())
        drawn = of_python()
        chance = Chance(device, self._questions) if self._questions else None

        def loss_of_one(anchor: Tensor, *leaves: Any) -> tuple[Tensor, dict[str, Tensor]]:
            if chance is not None:
                chance.free((anchor, leaves))
            capture = Capture(derived, anchor, record, chunk.state, chance, self._alone, answered)
            inside = looping(self._module, way.looped, capture, chunk.state.around)
            try:
                with self._values.given() as values, inside, kept(capture.met), nothing_behind_vmap(), capture:
                    loss = chunk.loss_of(tree_unflatten(list(leaves), chunk.structure))
            except Exception:
                if not isinstance(capture.error, Restart):
                    raise
            finally:
                self.own_error = capture.own_error
            if isinstance(capture.error, Restart):
                raise capture.error
            capture.refuse_changes()
            if capture.error is not None:
                raise RuntimeError(
                    "training_step catches an error, which may be of one record alone."
                ) from capture.error
            return loss, values()

        in_dims = (0, *(0 if isinstance(leaf, Tensor) else None for leaf in chunk.leaves))
        together = torch.func.vmap(loss_of_one, in_dims=in_dims, randomness="different")
        losses, values = together(anchor, *chunk.copies())
        if chance is not None:
            self._questions = self._most_asked = max(self._most_asked, chance.asked)
        if losses.dim() != 1:
            raise RecordError(ONE_LOSS)
        total = losses.sum()
        with torch.no_grad():
            if backward(total, chunk.state) is not None:
                raise RuntimeError("a backward pass catches an error, which may be of one record alone.")
        if of_python() != drawn:
            raise RuntimeError(
                "training_step draws random numbers by Python's or NumPy's generator, once for all records."
            )
        if any(p.grad is not None for p in self._parameters.values()):
            raise RuntimeError("a parameter is used in a way that was not seen.")
        with full_precision(device), torch.no_grad():
            for parameter, use in derived.passed_on(uses, chunk.state):
                record(parameter, use)
            of_parameters = {name: merged(uses.pop(id(p))) for name, p in self._parameters.items() if id(p) in uses}
            return of_parameters | {key: Dense(value) for key, value in values.items()}, losses.detach()


def gradients_of_one(
    loss_of: Callable[[Any], Tensor], one: Any, parameters: dict[str, Tensor], values: Values, state: State
) -> tuple[dict[str, Tensor], Tensor, Exception | None]:
    """A record's gradients with respect to the parameters that it reaches, by ordinary autograd, the values that it
    gave for release, and its loss; and an error that PyTorch raised, if that was caught.

    Raises:
        RecordError: it has none.
    """
    with values.given() as given, Guard(state) as guard:
        loss = loss_of(one)
    if loss.dim():
        raise RecordError(ONE_LOSS)
    released = {key: value.clone() for key, value in given().items()}
    caught = backward(loss, state) or guard.error
    gradients = {n: _dense(p.grad) for n, p in parameters.items() if p.grad is not None}
    return gradients | released, loss.detach(), caught


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def backward(loss: Tensor, state: State) -> Exception | None:
    """Like torch.autograd.backward, which would put the guard aside: the model's own code may run in here. Returns an
    error that was caught there."""
    guard = Guard(state)
    if loss.requires_grad:
        with full_precision(loss.device), guard:
            _engine_run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
    return guard.error
