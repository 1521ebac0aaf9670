"""A training step, and the stand-in on which it runs for a trace or for one record.

A step has an owner, whose method it is: a LightningModule, a Trainer of transformers, or nobody, in a loop of one's
own. It never runs on the owner or on the trained module themselves, but on throwaway copies of both: what it keeps,
logs or counts lands there and is discarded, whichever loop calls it.
"""

import dis
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from dpexp.errors import RecordError, words_of
from dpexp.privacy.gradients.branches import HiddenNumber
from dpexp.privacy.gradients.module_copy import attributes, copies
from dpexp.privacy.private_metrics import release


@dataclass(eq=False)
class TrainingStep:
    """How the loss of one record is computed, and by whom.

        step = TrainingStep.of(lambda model, record: F.cross_entropy(model(record[0]), record[1]), model)
        with step.stand_in() as own:
            loss = own.loss(record)  # computed on a copy of the model

    Attributes:
        call: (stand-in, batch of one record) -> its loss, or a dictionary that holds it.
        module: the trained module.
        owner: whose method the step is: a LightningModule, which is `module`, or a Trainer; None: nobody.
        function: the user's function that `call` calls.
        parts: names of the owner's attributes that belong to the run and not to the step, such as the `optimizer` of a
            Trainer of transformers. The owner's copy has views of them, of which the step may read numbers.
        logged: gets the names of what the step logs.
    """

    call: Callable[["StandIn", Any], Any]
    module: nn.Module
    owner: Any = None
    function: Any = None
    parts: Sequence[str] = ()
    logged: set[str] = field(default_factory=set)

    @property
    def by_user(self) -> bool:
        """Whether a user wrote it, and can change it; dpexp's own classifier has another."""
        return not type(self.module).__module__.startswith("dpexp.")

    @classmethod
    def of(cls, loss_of: Callable[[nn.Module, Any], Any], module: nn.Module) -> "TrainingStep":
        """The step of a loop of one's own: `loss_of` takes the module and a batch of one record."""
        return cls(lambda own, record: loss_of(own.module, record), module, function=loss_of)

    @contextmanager
    def stand_in(self, tensor: Callable[[Tensor], Tensor] | None = None) -> Iterator["StandIn"]:
        """Fresh copies of the module and of the owner; `tensor`: see `module_copy.copies`."""
        with copies(self.module, self.owner, self.parts, tensor) as (module, owner):
            own = StandIn(self, module, owner)
            own.mute()
            yield own

    def attributes(self, own: "StandIn | None" = None) -> dict[str, Any]:
        """The attributes of the module and the owner, except for the parts of the run: see `module_copy.attributes`.

        Args:
            own: a stand-in, whose copies of the module and the owner are looked at instead.
        """
        seen = own or self
        return attributes(seen.module, seen.owner, self.parts)

    def reads(self) -> dict[str, Any]:
        """What the function depends on besides its arguments, by name.

        It is compared from round to round, so that the step is traced again once something that it depends on was
        replaced (`Step.trace_again`). It has the function's code, its defaults, the object whose method it is, and the
        variables of its closure and its module that its code names. What these reach in turn is not in it. If the
        function is a callable of another kind, it is the object itself.
        """
        function = getattr(self.function, "__func__", self.function)
        found: dict[str, Any] = {"self": getattr(self.function, "__self__", None)}
        if not isinstance(function, FunctionType):
            return found | {"function": function}
        defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it has no value yet
                found[f"closure {name}"] = cell.cell_contents
        found |= {f"global {name}": function.__globals__.get(name) for name in _globals_of(function.__code__)}
        return found | {"code": function.__code__} | {f"default {key}": value for key, value in defaults.items()}


@cache
def _globals_of(code: CodeType) -> frozenset[str]:
    """The global variables that code names, also in functions and generators within it."""
    named = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return frozenset(named).union(*(_globals_of(one) for one in code.co_consts if isinstance(one, CodeType)))


@dataclass
class StandIn:
    """Copies of a step's module and owner, on which the step runs."""

    step: TrainingStep
    module: Any
    owner: Any

    def loss(self, record: Any) -> Tensor:
        """The loss of a batch of one record: a scalar, or what the step returns in its place.

        Raises:
            RecordError: the step returned no loss.
            RuntimeError: it tried to end the program, which a single record must not do.
        """
        try:
            output = self.step.call(self, record)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # as SystemExit of sys.exit(): whether a job ends must not tell of one record
            raise RuntimeError(f"{type(error).__name__}: {words_of(error)}") from None
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            kind = type(loss).__name__
            raise RecordError(f"training_step must return a loss for every record; it returned a {kind}.")
        return loss.reshape(()) if loss.numel() == 1 else loss

    def attributes(self) -> dict[str, Any]:
        """See `TrainingStep.attributes`."""
        return self.step.attributes(self)

    def mute(self) -> None:
        """Makes the copies drop what is logged and what metrics are given; `print` prints without the Trainer."""
        for name, part in self.module.named_modules():
            if isinstance(part, Metric | MetricCollection):
                vars(part).update(dict.fromkeys(_MUTED, partial(_hidden, part, f"self.{name}", self.step.logged)))
        for name, muted in (("log", partial(log_privately, self.step.logged)), ("print", print)):
            if hasattr(type(self.owner), name):
                vars(self.owner)[name] = muted


_MUTED = ("forward", "update", "compute")  # methods of a metric


def _hidden(metric: Any, name: str, logged: set[str], *_: Any, **__: Any) -> Any:
    """Takes the place of a metric's methods: the metric stays empty, and the result cannot be read."""
    logged.add(name)
    return {key: HiddenNumber() for key in [*metric.keys()]} if isinstance(metric, MetricCollection) else HiddenNumber()


def log_privately(logged: set[str], name: Any = None, value: Any = None, *_: Any, logs: Any = None, **__: Any) -> None:
    """Takes the place of `log`: notes names, and passes the values on for private release.

    If the plan has no metric of a name, the value is dropped there. Lightning's `log` gets a name and a value, that of
    transformers a dictionary.
    """
    several = name if isinstance(name, dict) else logs
    for key, one in {name: value}.items() if several is None else several.items():
        logged.add(key)
        release(key, one)
