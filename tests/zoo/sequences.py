"""Sequence models written by hand."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from zoo import CLASSES, PAD, WORDS, B, T, classes, lengths, of, plain, words


class EncoderDecoder(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32, padding_idx=PAD)
        self.coder = nn.Transformer(32, 4, 2, 2, 48, rate, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, batch):
        x, y = batch
        causal = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=self.head.weight.dtype)
        padded = (x == PAD).to(causal.dtype) * -1e9
        return self.head(
            self.coder(self.words(x), self.words(y), tgt_mask=causal, tgt_is_causal=True, src_key_padding_mask=padded,
                       memory_key_padding_mask=padded)
        )  # fmt: skip


class Encoder(nn.Module):
    """A boolean padding mask; the mean over the words."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, rate, batch_first=True), 2)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        there = (x != PAD)[..., None]
        h = self.body(self.words(x), src_key_padding_mask=x == PAD) * there
        return self.head(h.sum(1) / there.sum(1))


class Attention(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, rate, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        mixed, weights = self.attention(x, x, x)
        return self.head(mixed.mean(1)) + weights.mean()


class AttentionPool(nn.Module):
    """Learned queries: an einsum of a parameter and data."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, 32))
        self.keys, self.head = nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, x):
        weights = torch.einsum("qd,btd->bqt", self.queries, self.keys(x)).softmax(-1)
        return self.head((weights @ x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind, packed: bool, rate: float, **options) -> None:
        super().__init__()
        self.packed = packed
        self.words = nn.Embedding(WORDS, 16, padding_idx=PAD)
        self.body = kind(16, 12, 2, dropout=rate, batch_first=True, **options)
        self.head = nn.Linear(options.get("proj_size") or 12 * (1 + options.get("bidirectional", False)), CLASSES)

    def forward(self, batch):
        x, size = batch
        x = self.words(x)
        if self.packed:
            x = pack_padded_sequence(x, size.cpu(), batch_first=True, enforce_sorted=False)
            states = self.body(x)[1]
            states = states[0] if isinstance(states, tuple) else states
            last = states.unflatten(0, (2, -1))[-1].transpose(0, 1).flatten(1)
        else:
            last = self.body(x)[0].mean(1)
        return self.head(last)


class Cells(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(WORDS, 16), kind(16, 12), nn.Linear(12, CLASSES)

    def forward(self, x):
        state = None
        for step in self.words(x).unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Experts(nn.Module):
    """A mixture of experts: two of four for each word."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.dense = dense
        self.words, self.router = nn.Embedding(WORDS, 16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        h = self.words(x)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        mixed = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            share = (weights * (chosen == i)).sum(-1, keepdim=True)
            if self.dense:
                mixed = mixed + share * expert(h)
            else:
                at = share[..., 0] > 0
                mixed = mixed.masked_scatter(at[..., None], share[at] * expert(h[at]))
        return self.head((h + mixed).mean(1))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Parameter(torch.randn(T, 32) / 10)
        self.body = nn.TransformerEncoderLayer(32, 4, 48, rate, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=self.places.dtype)
        return self.head(self.body(self.words(x) + self.places, causal, is_causal=True))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, 16, mode="mean", padding_idx=PAD), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.bag(x))


class StateSpace(nn.Module):
    """A diagonal state space model, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.decay = nn.Embedding(WORDS, 16), nn.Parameter(torch.rand(16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        h = self.decay.new_zeros(len(x), 16)
        for step in self.words(x).unbind(1):
            h = h * self.decay.sigmoid() + step
        return self.head(h)


def read():
    return words(), classes()


def sequences():
    return torch.randn(B, T, 32), classes()


def sized():
    return (words(), lengths()), classes()


def of_three_words():
    return (words()[:, :3], lengths()), classes()


def spoken_of():
    y = torch.randint(1, WORDS, (B, 6))
    return (words(), y), y.roll(-1, 1)


def continued():
    x = torch.randint(1, WORDS, (B, T))
    return x, x.roll(-1, 1)


MODELS = {
    "encoder and decoder": plain(of(EncoderDecoder), spoken_of),
    "encoder, boolean mask": plain(of(Encoder), read),
    "attention with its weights": plain(of(Attention), sequences),
    "attention pooling": plain(of(AttentionPool), sequences),
    "LSTM": plain(of(Recurrent, nn.LSTM, False), sized),
    "LSTM, packed": plain(of(Recurrent, nn.LSTM, True), sized),
    "LSTM, projected": plain(of(Recurrent, nn.LSTM, False, proj_size=5), of_three_words),  # traced step by step
    "GRU, both ways": plain(of(Recurrent, nn.GRU, False, bidirectional=True), sized),
    "GRU, both ways, packed": plain(of(Recurrent, nn.GRU, True, bidirectional=True), sized),
    "LSTMCell": plain(of(Cells, nn.LSTMCell), read), "GRUCell": plain(of(Cells, nn.GRUCell), read),
    "experts, dense": plain(of(Experts, True), read), "experts, routed": plain(of(Experts, False), read),
    "tied language model": plain(of(Tied), continued), "bag of words": plain(of(Bags), read),
    "state space": plain(of(StateSpace), read),
}  # fmt: skip
