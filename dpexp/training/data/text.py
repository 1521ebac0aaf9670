"""Tiny Shakespeare (Karpathy 2015): characters by speaker."""

import re

import torch
from torch import Tensor

from dpexp.training.data.datasets import TensorData, standard_file

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
IGNORED = -100  # label that cross entropy ignores
_TEST_SPEAKERS = 10  # every tenth


class Shakespeare(TensorData):
    """Windows of the characters x and next characters y [N, length] in [0, 65) of each speaker.

    A speaker's last window is padded with newlines in x and -100 in y. Every tenth speaker, by first appearance, is in
    the test set, which keeps only full windows. `user_of` of both sets has the speaker of each window, from 0.
    """

    def __init__(self, root: str, length: int = 80, batch_size: int = 64, num_workers: int = 0) -> None:
        text = standard_file(root, URL, MD5).read_text()
        by_speaker = list(text_by_speaker(text).values())
        train = [lines for k, lines in enumerate(by_speaker) if k % _TEST_SPEAKERS]
        test = by_speaker[::_TEST_SPEAKERS]
        (x, y, users), (test_x, test_y, test_users) = windows(train, length), windows(test, length)
        full = (test_y != IGNORED).all(1)
        super().__init__((x, y), (test_x[full], test_y[full]), batch_size, num_workers)
        self.train.user_of, self.test.user_of = users.tolist(), test_users[full].tolist()  # type: ignore[attr-defined]


def text_by_speaker(text: str) -> dict[str, str]:
    """All that each speaker says, in the order of first appearance. A speech is a line with a name and a colon, and the
    lines up to the next empty line, if any."""
    found: dict[str, str] = {}
    for speech in re.split(r"\n\n+", text.strip()):
        name, _, lines = speech.partition("\n")
        found[name.rstrip(":")] = found.get(name.rstrip(":"), "") + lines + "\n"
    return found


def windows(texts: list[str], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, length], y [N, length] and the speaker [N] of all windows of all speakers' texts, in order."""
    code = {character: k for k, character in enumerate(CHARACTERS)}
    xs, ys, users = [], [], []
    for user, text in enumerate(texts):
        codes = torch.tensor([code[character] for character in text])
        count = -(-(len(codes) - 1) // length)
        x, y = torch.full((count * length,), code["\n"]), torch.full((count * length,), IGNORED)
        x[: len(codes) - 1], y[: len(codes) - 1] = codes[:-1], codes[1:]
        xs.append(x.view(count, length))
        ys.append(y.view(count, length))
        users += [user] * count
    return torch.cat(xs), torch.cat(ys), torch.tensor(users)
