"""Speeches by speaker, and next characters."""

import pytest
import torch

from dpexp.training.data.text import CHARACTERS, IGNORED, Shakespeare, text_by_speaker, windows
from dpexp.training.models import Lstm

TEXT = """First Citizen:
Speak.

All:
Speak, speak.

GHOST:

First Citizen:
You are
all resolved."""


def read(x, y):
    """What the windows of one speaker say: the first character, and those that follow."""
    return CHARACTERS[x[0, 0]] + "".join(CHARACTERS[c] for c in y.flatten() if c != IGNORED)


def test_speeches_are_gathered_by_speaker():
    assert text_by_speaker(TEXT) == {
        "First Citizen": "Speak.\nYou are\nall resolved.\n", "All": "Speak, speak.\n", "GHOST": "\n",
    }  # fmt: skip


@pytest.mark.parametrize("length", [1, 4, 80])
def test_windows_hold_all_that_is_said_and_each_next_character(length):
    spoken = list(text_by_speaker(TEXT).values())
    x, y, users = windows(spoken, length)
    assert x.shape == y.shape == (len(users), length) and set(users.tolist()) == {0, 1}, "one says nothing"
    for user in (0, 1):
        assert read(x[users == user], y[users == user]) == spoken[user]
    flat_x, flat_y = x[users == 0].flatten(), y[users == 0].flatten()
    assert torch.equal(flat_x[1:][flat_y[1:] != IGNORED], flat_y[:-1][flat_y[1:] != IGNORED])


def test_every_tenth_speaker_is_held_out(tmp_path, monkeypatch):
    spoken = {f"S{k}": "ab\n" * (k + 1) for k in range(20)}
    (tmp_path / "input.txt").write_text("\n\n".join(f"{name}:\n{said.strip()}" for name, said in spoken.items()))
    monkeypatch.setattr("dpexp.training.data.text.standard_file", lambda root, *_: tmp_path / "input.txt")
    data = Shakespeare(str(tmp_path), length=4)
    assert set(data.train.user_of) == set(range(18)) and set(data.test.user_of) == {1}, "S0 fills no window"
    assert len(data.train.user_of) == len(data.train) and (data.test.tensors[1] != IGNORED).all()


def test_scores_of_a_character_do_not_see_those_behind_it():
    model = Lstm(65, width=16)
    x = torch.randint(65, (3, 10))
    scores = model(x)
    assert scores.shape == (3, 65, 10)
    x[:, 6:] = 0
    assert torch.allclose(model(x)[..., :6], scores[..., :6], atol=1e-6)
