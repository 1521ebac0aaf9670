"""Random numbers of training are secret, and leave the generators as they were."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dpexp.errors import ConfigError
from dpexp.privacy.keystream import KeyStream


@contextmanager
def own_randomness(device: torch.device, stream: KeyStream) -> Iterator[None]:
    """Meanwhile the random number generators go on from secret states of full size; afterwards they are as before.

    A record's loss may be random, as with dropout. That costs nothing as long as each record's random numbers are
    independent of all else and nobody knows them: the release is then a mixture, over random numbers that do not depend
    on who is there, of releases of which each is private. From a known seed they would depend on a record's place.
    """
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        renew(device, stream)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def renew(device: torch.device, stream: KeyStream) -> None:
    """The generators go on from other states, that of a device too."""
    seed_everything(stream)
    if device.type == "cuda":
        torch.cuda.manual_seed(int(stream.words(1)))


def seed_everything(stream: KeyStream) -> None:
    """Fills the whole states of this process's generators: torch's own seed would be one of only 2^32."""
    state = torch.Generator().get_state()
    words = stream.words(2 * _MERSENNE)
    state[:8] = stream.words(1).view(torch.uint8)  # what the generator takes for its seed, so that to seed it shows
    state[_LEGACY : _LEGACY + 8 * _MERSENNE] = (words[:_MERSENNE] & 0xFFFFFFFF).view(torch.uint8)
    torch.set_rng_state(state)
    np.random.set_state(("MT19937", (words[_MERSENNE:] & 0xFFFFFFFF).numpy().astype(np.uint32), _MERSENNE, 0, 0.0))
    random.seed(stream.words(4).numpy().tobytes())


_MERSENNE, _LEGACY = 624, 24  # numbers of a Mersenne twister; bytes before them in torch's state


def of_python() -> tuple:
    """The states of Python's and NumPy's generators, to see whether numbers were drawn."""
    _, key, *rest = np.random.get_state()  # type: ignore[misc]
    return random.getstate(), key.tobytes(), *rest  # type: ignore[attr-defined]


class Generators:
    """PyTorch's, Python's and NumPy's, of which a step may do with the states what it likes: none of it reaches a later
    one, nor do its random numbers come again."""

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    def renew(self) -> None:
        """Goes on from new states, which follow from that of PyTorch's generator before the step."""
        stream = KeyStream(hashlib.sha256(self._state.numpy().tobytes()).digest())
        seed_everything(stream)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(int(stream.words(1)))
        self._state = torch.get_rng_state()


class Seeds:
    """Random numbers from a seed that a step chose would be no secret, and go to records by their place."""

    def __init__(self) -> None:
        self._seed_of = torch.default_generator.initial_seed
        self._seed = self._seed_of()
        self._of_cuda = torch.cuda.initial_seed() if torch.cuda.is_initialized() else None

    def refuse_others(self) -> None:
        """
        Raises:
            ConfigError: a generator of PyTorch's was seeded since.
        """
        on_cuda = self._of_cuda
        if self._seed_of() != self._seed or (on_cuda is not None and torch.cuda.initial_seed() != on_cuda):
            raise ConfigError(
                "model: PyTorch's generator is seeded inside training_step, so that what is drawn there is known; "
                "leave that to dpexp, whose generators are secret, or draw from a torch.Generator of the model's own."
            )
