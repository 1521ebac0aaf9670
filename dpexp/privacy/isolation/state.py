"""What a module and its surroundings hold before a step, and are made to hold after it."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError
from dpexp.privacy.isolation.kept import Kept, KeptDict, kind_of
from dpexp.privacy.isolation.randomness import Generators, Seeds
from dpexp.privacy.isolation.reached import Reached
from dpexp.privacy.isolation.surroundings import Surroundings

_CONTAINERS = (dict, list, set, deque, bytearray)

CHANGED = (
    "model: {name} is changed inside training_step, so data could reach it without noise; leave parameters to the "
    "optimizer, or change them in a hook such as on_train_batch_end."
)


class State:
    """All that is reached from a module, and what its surroundings hold.

    Args:
        before: of an earlier state of the module, which saves the look if nothing has changed since.
        handed: what else the step is handed, of which a copy may share what it reaches: classes, functions, and objects
            that are their own copies.

    Attributes:
        known: ids of all that was reached.
        reached: from the module.
        around: what else a step can get hold of.
    """

    def __init__(
        self,
        module: nn.Module,
        around: Surroundings | None = None,
        before: Reached | None = None,
        handed: Iterable[Any] = (),
    ) -> None:
        self.around = around = around or Surroundings()
        parameters = list(module.named_parameters())
        fixed = [*((f"the parameter {name}", parameter) for name, parameter in parameters), *around.tensors]
        self._fixed = [(name, tensor, _version(tensor)) for name, tensor in fixed]
        self._trained = [(parameter, parameter.requires_grad) for _, parameter in parameters]
        tensors = [tensor for _, tensor in fixed]
        self.reached = before if before and before.is_still(module, tensors) else Reached(module, tensors)
        self._handed = Reached(nn.Module(), tensors, handed) if handed else None
        self._around: list[Kept] = []
        self.known = {*self.reached.known, *(self._handed.known if self._handed else ())}
        self._seeds, self._generators = Seeds(), Generators()
        for holder in around.holders:
            self._keep_shallowly(holder if isinstance(holder, dict) else vars(holder))

    def restore(self) -> list[str]:
        """Sets everything back; returns the names of what had changed.

        Raises:
            ConfigError: a parameter was changed, or something else that cannot be set back. All else was.
        """
        lost: list[str] = []
        all_reached = [reached for reached in (self.reached, self._handed) if reached]
        changed = [name for reached in all_reached for name in reached.set_back()]
        several = [kept for reached in all_reached for kept in (*reached.kept, *reached.filled())]
        for kept in (*several, *self._around):
            try:
                changed += kept.set_back() if kept.differs() else []
            except Exception:
                lost.append(f"{kept.name}, which cannot be set back,")
        for parameter, trained in self._trained:
            parameter.grad = None
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)
                changed.append("requires_grad of a parameter")
        for name, tensor, version in self._fixed:
            if _version(tensor) != version:
                with torch.no_grad():
                    tensor.zero_()  # lest it be saved on the way out
                lost.append(name)
        self._seeds.refuse_others()
        if lost:
            raise ConfigError(CHANGED.format(name=" and ".join(lost[:3])))
        return changed

    def renew_randomness(self) -> None:
        """What comes next draws other random numbers, whatever was done to the generators."""
        self._generators.renew()
        self._seeds = Seeds()

    def name(self, tensor: Tensor) -> str:
        """Of a tensor that was reached."""
        named = {id(fixed): name for name, fixed, _ in self._fixed}
        kept = (*self.reached.kept, *(self._handed.kept if self._handed else ()), *self._around)
        return ({id(one.thing): one.name for one in kept} | named)[id(tensor)]

    def _keep_shallowly(self, attributes: dict) -> None:
        if id(attributes) in self.known:
            return
        self.known.add(id(attributes))
        kept = KeptDict(attributes, None, None, attributes=True)
        self._around.append(kept)
        for key, value in list(attributes.items()):
            if isinstance(value, _CONTAINERS) and id(value) not in self.known:
                self.known.add(id(value))
                if kind := kind_of[type(value)]:
                    self._around.append(kind(value, kept, key))


def _version(tensor: Tensor) -> tuple:
    """Another one as soon as a tensor is written to, or exchanged."""
    placed = tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return (0 if tensor.is_inference() else tensor._version), tensor.shape, tensor.data_ptr() if placed else 0
