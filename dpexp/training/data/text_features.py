"""Users' texts as embeddings by a public transformer, computed once, for a small private classifier."""

from functools import cached_property
from typing import Any

import torch
from pandas import DataFrame
from torch import Tensor, nn

from dpexp.rows import PlacedRows
from dpexp.training.data.documents import LabelledTexts, Tokens
from dpexp.training.data.raw import RawData, check_columns, rows_of, text_of, texts_of
from dpexp.training.language import encoder

_PADDED = -1  # no token of any tokenizer


class TokenRows(LabelledTexts):
    """Texts with a class each, as rows (tokens, class) that `TextEmbedding` takes as `data.features_of`."""

    @cached_property
    def train(self) -> PlacedRows:  # type: ignore[override]
        return _rows(super().train)

    @cached_property
    def test(self) -> PlacedRows:  # type: ignore[override]
        return _rows(super().test)

    def encode(self, inputs: DataFrame) -> Tensor:  # type: ignore[override]
        """The first tokens of each text [N, length]."""
        found = super().encode(inputs)
        return found["input_ids"].masked_fill(found["attention_mask"] == 0, _PADDED)

    def outputs(self, model: nn.Module, x: Any) -> Tensor:
        return RawData.outputs(self, model, x)


def _rows(tokens: Tokens) -> PlacedRows:
    is_padding = torch.arange(tokens.ids.shape[1]) >= torch.tensor(tokens.sizes)[:, None]
    rows = PlacedRows(
        tokens.ids.masked_fill(is_padding, _PADDED), torch.tensor(tokens.labels),
        usable=tokens.usable, reason="data: a record has no text, or none of the labels.",
    )  # fmt: skip
    vars(rows).update({name: value for name, value in vars(tokens).items() if name in ("user_of", "whole")})
    return rows


class TextEmbedding:
    """The embedding of a text: the mean of a transformer's last hidden states, scaled to length 1, as
    sentence-transformers has it for MiniLM. The transformer must not have been trained on private texts.

    Args:
        name: the transformer, an encoder: a local folder, or a name on the hub.
    """

    def __init__(self, name: str) -> None:
        self._model = encoder(name)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows of tokens [B, T] -> [B, d]; of a row without any, zeros."""
        return torch.stack([self._of(row[row != _PADDED]) for row in x.long()])

    def _of(self, tokens: Tensor) -> Tensor:
        if not len(tokens):
            return torch.zeros(self._model.config.hidden_size)
        states = self._model(input_ids=tokens[None], attention_mask=torch.ones_like(tokens[None])).last_hidden_state
        return nn.functional.normalize(states[0].mean(0), dim=0)


def labels_in(test_path: str, label: str) -> list[str]:
    """The labels of test texts, which are public, in order."""
    name = text_of(label)
    rows = rows_of("data.test_path", test_path)
    check_columns(f"data.test_path={test_path}", rows, {name: "data.label"})
    return sorted({*texts_of(rows[name])} - {""})
