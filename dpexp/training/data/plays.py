"""Speeches of nine of Shakespeare's plays, and which play each is from, in tiny Shakespeare (Karpathy 2015)."""

import re

import torch

from dpexp.training.data.files import standard_file
from dpexp.training.data.shakespeare import MD5, URL
from dpexp.training.data.tensors import TensorData
from dpexp.training.minilm import tokens

# The plays in the file's order, and how the first speech of each begins.
PLAYS = {
    "Coriolanus": "Before we proceed any further",
    "Richard III": "Now is the winter of our discontent",
    "Richard II": "Old John of Gaunt, time-honour'd Lancaster",
    "Romeo and Juliet": "Gregory, o' my word",
    "Henry VI, part 3": "I wonder how the king escaped",
    "The Winter's Tale": "If you shall chance, Camillo",
    "Measure for Measure": "Escalus.",
    "The Taming of the Shrew": "I'll pheeze you",
    "The Tempest": "Boatswain!",
}
_FIFTH = 5


class Plays(TensorData):
    """Speeches of 40 characters or more, as MiniLM's tokens [N, tokens], and their plays [N], in the order of `PLAYS`.

    Every fifth speech is in the test set.
    """

    def __init__(self, root: str, length: int = 32, batch_size: int = 64, workers: int = 0) -> None:
        """
        Args:
            length: tokens that are kept of a speech; what follows is left out.

        Raises:
            ConfigError: the package with MiniLM's vocabulary is not there.
        """
        said, plays = zip(*speeches_of_plays(standard_file(root, URL, MD5).read_text()), strict=True)
        x, y, tested = tokens(list(said), length), torch.tensor(plays), torch.arange(len(said)) % _FIFTH == 0
        super().__init__((x[~tested], y[~tested]), (x[tested], y[tested]), batch_size, workers)


def speeches_of_plays(text: str, least: int = 40) -> list[tuple[str, int]]:
    """What is said in each speech of at least so many characters, without the speaker's name, and the play's number.

    Args:
        text: speeches with an empty line between them, the first line of each a name.
    """
    found, play, firsts = [], -1, list(PLAYS.values())
    for speech in re.split(r"\n\n+", text.strip()):
        said = " ".join(speech.partition("\n")[2].split())
        if play + 1 < len(firsts) and said.startswith(firsts[play + 1]):
            play += 1
        if len(said) >= least:
            found.append((said, play))
    return found
