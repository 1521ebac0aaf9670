"""Nothing is written to a parameter while data is seen."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpexp.errors import ConfigError
from dpexp.privacy.isolation.state import CHANGED, State


class Guard(TorchFunctionMode):
    """While active, no tensor of a state can be changed without its version telling: what `.data` gives shares the
    version; to set it is refused, and so are hooks on parameters, which would stay for other records.

    Attributes:
        error: the last one that a function of torch raised, whoever may have caught it.
    """

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self.error: Exception | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _CHANGES and id(args[0]) in self._state.known:
            if func == _DATA[0]:
                return args[0].detach()
            raise ConfigError(CHANGED.format(name=self._state.name(args[0])))
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = error
            raise


_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
_CHANGES = {*_DATA, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.set_}
