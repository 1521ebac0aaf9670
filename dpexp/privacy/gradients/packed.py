"""Packed sequences of one record, whose length differs between records: all positions are kept, and masked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpexp._torch_compat import PACK_PADDED_SEQUENCE, PAD_PACKED_SEQUENCE
from dpexp.privacy.gradients.recurrent import CELLS, Lstm

_GATE_CLOSED = -1e4  # its sigmoid is 0
# Attributes of a packed sequence's tensors that are those of the record alone.
_ATTRIBUTES = {getattr(Tensor, name).__get__ for name in ("dtype", "device", "is_cuda")} | {Tensor.dim}


@dataclass
class _Pack:
    """A sequence of T positions, of which the first `length` [1] are a record's."""

    batch_sizes: Tensor
    length: Tensor
    T: int

    def mask(self, dims: int) -> Tensor:
        """[T, 1, …]: whether a position is the record's."""
        return (torch.arange(self.T, device=self.length.device) < self.length).reshape(-1, *[1] * (dims - 1))

    def reversed(self, x: Tensor) -> Tensor:
        """The record's positions in reverse order."""
        t = torch.arange(self.T, device=x.device)
        order = torch.where(t < self.length, self.length - 1 - t, t)
        return x.gather(0, order.reshape(-1, *[1] * (x.dim() - 1)).expand_as(x))


class PackedSequences:
    """Replaces functions of torch.nn.utils.rnn, under vmap, for records of one sequence.

    A packed sequence's values may only enter recurrent layers and `pad_packed_sequence`, which mask them.

    Args:
        recurrence: see `recurrent_layer`.
        in_range: receives for each packing whether the record's length was valid.
    """

    def __init__(self, recurrence: Callable[..., tuple[Tensor, Tensor, Tensor]], in_range: list[Tensor]) -> None:
        self._recurrence, self._in_range = recurrence, in_range
        self._packs: dict[int, _Pack] = {}  # by the id of batch_sizes
        self._values: dict[int, tuple[Tensor, _Pack]] = {}
        self._running = False

    def run(self, func: Any, args: tuple, kwargs: dict, leaves: Sequence[Any]) -> Any:
        """What a call returns; None: it concerns no packed sequence.

        Raises:
            RuntimeError: the records cannot be processed together.
        """
        if self._running:
            return None
        self._running = True
        try:
            return self._run(func, args, kwargs, leaves)
        finally:
            self._running = False

    def _run(self, func: Any, args: tuple, kwargs: dict, leaves: Sequence[Any]) -> Any:
        if func is PACK_PADDED_SEQUENCE:
            return self._pack(*args)
        if func is Tensor.scatter_ and args[0].numel() == 1 and len(args) == 4 and not kwargs:
            return args[0].copy_(args[3])  # of an order of sequences, for which vmap has no rule
        pack = next((self._packs[id(leaf)] for leaf in leaves if id(leaf) in self._packs), None)
        of_values = next((self._values[id(leaf)][1] for leaf in leaves if id(leaf) in self._values), None)
        if pack is not None and of_values is pack and func is PAD_PACKED_SEQUENCE:
            return self._pad(pack, *args)
        if pack is not None and of_values is pack and func in CELLS:
            return self._layer(pack, func, *args)
        if pack is not None and func is Tensor.__getitem__ and args[1:] == (0,):
            return 1  # a number of sequences
        asked = func in _ATTRIBUTES or (func is Tensor.size and args[1:] == ((0,) if pack is not None else (-1,)))
        if not asked and (pack is not None or of_values is not None):
            raise RuntimeError("a part of a packed sequence enters a function that runs one record at a time.")
        return None

    def _pack(self, input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        values = input if batch_first else input.transpose(0, 1)
        if values.dim() < 3 or len(values) != 1:
            raise RuntimeError("packed sequences, of which a record has several, run one record at a time.")
        T = values.shape[1]
        # One shorter than T, so that pad_packed_sequence shows whether it was given a total length.
        pack = _Pack(torch.ones(max(1, T - 1), dtype=torch.int64), lengths.clamp(1, T), T)
        self._packs[id(pack.batch_sizes)] = pack
        self._in_range.append(((lengths >= 1) & (lengths <= T)).all())
        record = values[0]
        if record.is_floating_point():  # padding may hold anything
            record = torch.where(pack.mask(record.dim()), record, 0.0)
        return self._known(record, pack), pack.batch_sizes

    def _known(self, values: Tensor, pack: _Pack) -> Tensor:
        self._values[id(values)] = values, pack
        return values

    def _pad(self, pack: _Pack, values: Tensor, _: Any, batch_first: bool, padding: float, total: int) -> tuple:
        if total < pack.T:
            raise RuntimeError("pad_packed_sequence without total_length= gives each record its own length.")
        padded = torch.where(pack.mask(values.dim()), values, padding)
        padded = F.pad(padded, (*[0, 0] * (values.dim() - 1), 0, total - pack.T), value=padding)
        return padded[None] if batch_first else padded[:, None], pack.length

    def _layer(
        self, pack: _Pack, func: Any, values: Tensor, _: Any, hx: Any, weights: list[Tensor], has_biases: bool,
        num_layers: int, dropout: float, train: bool, bidirectional: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        cell, directions = CELLS[func], (False, True) if bidirectional else (False,)
        each = len(weights) // (num_layers * len(directions))
        if each != (4 if has_biases else 2):
            raise RuntimeError("an LSTM with projections of packed sequences runs one record at a time.")
        h0, c0 = hx if not isinstance(hx, Tensor) else (hx, hx)
        x = values[:, None]  # [T, 1, d]
        ends: list[tuple[Tensor, Tensor]] = []
        last = (pack.length - 1).reshape(1, 1, 1)
        for layer in range(num_layers):
            outputs = []
            for reverse in directions:
                k = len(ends)
                w_ih, w_hh, *biases = weights[each * k : each * (k + 1)]
                b_ih, b_hh = biases if has_biases else (None, None)
                p = F.linear(pack.reversed(x) if reverse else x, w_ih, b_ih)
                if cell is Lstm:  # at positions after the last, c stays as it is
                    hold = p.new_zeros(4, w_hh.shape[1])
                    hold[0], hold[1] = _GATE_CLOSED, -_GATE_CLOSED
                    p = torch.where(pack.mask(3), p, hold.flatten())
                h_t, _, c = self._recurrence(p, h0[k], c0[k], w_hh, b_hh, cell, False)
                h = h_t.gather(0, last.expand(1, *h_t.shape[1:]))[0]
                h_t = torch.where(pack.mask(3), h_t, 0.0)
                outputs.append(pack.reversed(h_t) if reverse else h_t)
                ends.append((h, c))
            x = torch.cat(outputs, -1)
            if layer < num_layers - 1:
                x = F.dropout(x, dropout, train)
        states = [torch.stack(part) for part in zip(*ends, strict=True)]
        return (self._known(x[:, 0], pack), *(states if cell is Lstm else states[:1]))
