"""Random numbers of training are secret, and leave the generators as they were."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

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
