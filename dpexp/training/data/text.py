"""Speeches of nine of Shakespeare's plays, and which play each is from, in tiny Shakespeare (Karpathy 2015)."""

import re

import torch
from torch import Tensor

from dpexp.training.data.base import TensorData, standard_file
from dpexp.training.text_model import tokens

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
IGNORED = -100  # by cross entropy
_TENTH = 10


class Shakespeare(TensorData):
    """Speeches in windows of characters, each with the characters that come next: x and y [N, length] in
    [0, 65). Of a window that is not full, what is missing is a newline in x, and -100 in y.

    Every tenth speaker, by first appearance, is in the test set, of which only full windows are kept; what they say is
    taken as public.

    Attributes (of `train` and `test`):
        user_of: the speaker of each window, counted from 0.
    """

    def __init__(self, root: str, length: int = 80, batch_size: int = 64, num_workers: int = 0) -> None:
        text = standard_file(root, URL, MD5).read_text()
        spoken = speeches(text)
        train = [said for k, said in enumerate(spoken.values()) if k % _TENTH]
        test = [said for k, said in enumerate(spoken.values()) if not k % _TENTH]
        (x, y, users), (test_x, test_y, test_users) = windows(train, length), windows(test, length)
        full = (test_y != IGNORED).all(1)
        super().__init__((x, y), (test_x[full], test_y[full]), batch_size, num_workers)
        self.train.user_of, self.test.user_of = users.tolist(), test_users[full].tolist()  # type: ignore[attr-defined]


def speeches(text: str) -> dict[str, str]:
    """All that each speaker says, in their order of first appearance: a speech is a line with a name and a colon, and
    what follows up to an empty line; it may be empty."""
    found: dict[str, str] = {}
    for speech in re.split(r"\n\n+", text.strip()):
        name, _, said = speech.partition("\n")
        found[name.rstrip(":")] = found.get(name.rstrip(":"), "") + said + "\n"
    return found


def windows(spoken: list[str], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, length], y [N, length] and the speaker's number [N], of all speakers one after the other."""
    number = {character: k for k, character in enumerate(CHARACTERS)}
    xs, ys, users = [], [], []
    for user, said in enumerate(spoken):
        codes = torch.tensor([number[character] for character in said])
        count = -(-(len(codes) - 1) // length)
        x, y = torch.full((count * length,), number["\n"]), torch.full((count * length,), IGNORED)
        x[: len(codes) - 1], y[: len(codes) - 1] = codes[:-1], codes[1:]
        xs.append(x.view(count, length))
        ys.append(y.view(count, length))
        users += [user] * count
    return torch.cat(xs), torch.cat(ys), torch.tensor(users)


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

    def __init__(self, root: str, length: int = 32, batch_size: int = 64, num_workers: int = 0) -> None:
        """
        Args:
            length: tokens that are kept of a speech; what follows is left out.

        Raises:
            ConfigError: the package with MiniLM's vocabulary is not there.
        """
        said, plays = zip(*speeches_of_plays(standard_file(root, URL, MD5).read_text()), strict=True)
        x, y, tested = tokens(list(said), length), torch.tensor(plays), torch.arange(len(said)) % _FIFTH == 0
        super().__init__((x[~tested], y[~tested]), (x[tested], y[tested]), batch_size, num_workers)


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
