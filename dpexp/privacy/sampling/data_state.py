"""Tests before the first round that a data set gives record i from i and the global random generators.

With state (a running mean, a counter, an iterator, its own random generator) one record would change another, which
(ε, δ) does not cover. So some records are fetched and collated several times in each loader process, with others in
between and in another order, from equal states of the generators, and compared bit for bit. Later this is assumed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Subset

from dpexp.errors import ConfigError
from dpexp.privacy.noise.randomness import KeyStream, own_randomness
from dpexp.privacy.sampling.batches import FailedRecord, flattened
from dpexp.privacy.sampling.fetching import RecordFetcher, Seeding, attempt, copied, fetching_loader, only_rows
from dpexp.privacy.sampling.privacy_unit import Units
from dpexp.privacy.state_checks import bits_of

_COMPARED = 8  # records that each loader process fetches several times, at most


class StateTest(RecordFetcher):
    """Fetches and collates records three times: in reverse order by a copy of the data set, and twice in order.

    The copy shows what the first record sets once and for all.
    """

    def __getitems__(self, drawn: list[Any]) -> list[Any]:
        """Names what gave records, each with a key of its random numbers, different values."""
        backward = StateTest(copied(self._dataset), self._collate, self._units)._values(drawn[::-1])[::-1]
        found, source = [], self._dataset
        while type(source) is Subset:
            source = source.dataset
        for times in zip(backward, self._values(drawn), self._values(drawn), strict=True):
            if _differ([item for item, _ in times]):
                found.append(f"the data set {type(source).__name__}")
            elif _differ([batch for item, batch in times if not isinstance(item, FailedRecord)]):
                name = getattr(self._collate, "__name__", type(self._collate).__name__)
                found.append(f"the collate_fn {name}")
        return found

    def _values(self, drawn: list[Any]) -> list[tuple[Any, Any]]:
        """The bits of each record's item, once all are fetched, and of its batch."""
        items = [_seeded(key, self._get, record) for record, key in drawn]
        bits = [item if isinstance(item, FailedRecord) else attempt(_bits, item) for item in items]
        of_batch = lambda item: _bits(self._collate_one([item]))  # noqa: E731
        batches = [_seeded(key, of_batch, item) for item, (_, key) in zip(items, drawn, strict=True)]
        return [*zip(bits, batches, strict=True)]


def _seeded(key: bytes, do: Callable[[Any], Any], value: Any) -> Any:
    with own_randomness(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"), KeyStream(key)):
        return attempt(do, value)


def _bits(value: Any) -> Any:
    leaves, structure = flattened(value)
    return structure, [(type(leaf), bits_of(leaf)) for leaf in leaves]


def _differ(values: list[Any]) -> bool:
    known = [value for value in values if not isinstance(value, FailedRecord)]
    return any(value != known[0] for value in known)


def refuse_state(loader: Any, units: Units | None) -> None:
    """Raises ConfigError: the data set or collate_fn gives a record different values, in some loader process."""
    if only_rows(loader):
        return
    size, stream = len(loader.dataset if units is None else units), KeyStream()
    test = StateTest(loader.dataset, loader.collate_fn, units)
    some = [*dict.fromkeys((stream.words(8 * _COMPARED) % size).tolist())][:_COMPARED]
    drawn = [(i if units is None else units.draw(i, stream), KeyStream().key) for i in some]
    with own_randomness(torch.device("cpu"), stream):
        seeding = Seeding(loader.worker_init_fn, KeyStream().key)
        tests = fetching_loader(loader, test, [drawn] * max(1, loader.num_workers), seeding)
        changed = [what for found in tests for what in found]
    if changed:
        raise ConfigError(
            f"data: {changed[0]} gave a record another value after other records were fetched, so that records would "
            "change one another; draw random numbers from torch's, NumPy's or Python's global generator; keep no state "
            "between records."
        )
