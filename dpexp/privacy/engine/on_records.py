"""Functions on the whole chunk at once, of which vmap shows one record."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack


class OnRecords(ABC):
    """A function that exists under vmap only. Like a torch.autograd.Function with nothing but a rule for vmap, which
    takes seven times as long to be called (measured), since what it does outside must be thought of as well."""

    @staticmethod
    @abstractmethod
    def vmap(B: int, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        """The outputs for all B records, and along which dimensions these lie.

        Args:
            in_dims: along which dimension of each argument they lie; None: it is the same for all.
        """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        level: Any = _functorch.maybe_current_level()
        inner: list[Any] = list(args)
        in_dims: list[Any] = [None] * len(args)
        B = None
        for k, arg in enumerate(args):
            batched = isinstance(arg, Tensor) and _functorch.is_batchedtensor(arg)
            if batched and _functorch.maybe_get_level(arg) == level:
                inner[k], in_dims[k] = _functorch.get_unwrapped(arg), _functorch.maybe_get_bdim(arg)
                B = inner[k].shape[in_dims[k]]
        if B is None:
            raise RuntimeError("a transform of torch.func inside the model is not supported by the fast path.")
        with temporarily_pop_interpreter_stack():
            outputs, out_dims = cls.vmap(B, in_dims, *inner)
        if isinstance(outputs, Tensor):
            return _functorch._add_batch_dim(outputs, out_dims, level)
        return tuple(
            _functorch._add_batch_dim(output, dim, level) for output, dim in zip(outputs, out_dims, strict=True)
        )
