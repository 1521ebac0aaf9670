"""Users' texts as tokens: documents or blocks for a language model, and texts with labels for a classifier.

A text is read and encoded by itself. A training record without a text, a user or a known label stays in its place, and
contributes nothing. In the test set, which is public, an unknown label is refused.
"""

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpexp.errors import ConfigError, RecordError, positive_integer
from dpexp.training.classifier import scores_of
from dpexp.training.data.raw import RawData, check_columns, codes_of, in_part, rows_of, text_of, texts_of, with_name
from dpexp.training.language import IGNORED, max_positions, tokenizer_of
from dpexp.training.pretrained import save_adapter

_BATCH = 32  # texts that a classifier predicts for at once


class Tokens(Dataset):
    """Texts of at most `length` tokens, padded to it; an item holds what models of transformers take by keyword.

    Args:
        texts: token ids of each text.
        labels: the class of each text, IGNORED if unknown; None: the tokens are the labels, IGNORED where padded.
        prompts: how many tokens each text begins with that have no loss; None: none.

    Attributes:
        usable: bool [N], of each text; an item of others raises a RecordError.
        user_of: the user of each text, -1 where nobody knows, if there are users.
    """

    def __init__(
        self,
        texts: list[list[int]],
        length: int,
        pad: int,
        labels: list[int] | None = None,
        prompts: list[int] | None = None,
    ) -> None:
        self.ids = torch.full((len(texts), length), pad, dtype=torch.int32)
        for row, text in zip(self.ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text, dtype=torch.int32)
        self.sizes, self.labels = [len(text) for text in texts], labels
        self.prompts = prompts or [0] * len(texts)
        predicts_first = labels is not None  # which a causal model does not
        least = [max(size, 0 if predicts_first else 1) for size in self.prompts]
        self.usable = torch.tensor(self.sizes) > torch.tensor(least)
        if labels is not None:
            self.usable &= torch.tensor(labels) != IGNORED

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids, place = self.ids[i].long(), torch.arange(self.ids.shape[1])
        is_token = place < self.sizes[i]
        if self.labels is None:
            labels = ids.masked_fill(~is_token | (place < self.prompts[i]), IGNORED)
        else:
            labels = torch.tensor(self.labels[i])
        if not self.usable[i]:
            raise RecordError("data: a record has no text, no token to predict, or none of the labels.")
        return {"input_ids": ids, "attention_mask": is_token.long(), "labels": labels}


_TESTED_AT_ONCE = 16  # texts, for each of whose tokens a model gives a score to each word that it knows


class _Texts(RawData):
    """Training and test texts in files, and a tokenizer that was not made from them.

    Args:
        path, test_path: a text file (documents are separated by blank lines), or .jsonl, .csv or .parquet.
        tokenizer: a local folder, or a name on the hub.
        length: tokens of an example; shorter ones are padded.
        text: the field with the text.
    """

    batch_size = 16
    _text: str

    def __init__(self, path: str, test_path: str, tokenizer: str, length: int, text: str) -> None:
        super().__init__()
        self._path, self._test_path, self._text = path, test_path, text_of(text)
        self._fields = {self._text: "data.text"}
        most, self.length = max_positions(tokenizer), positive_integer("data.length", length)
        if length < 2 or (most is not None and length > most):
            raise ConfigError(f"data.length={length} must lie between 2 and the {most} tokens that the model can take.")
        self._tokenizer = tokenizer_of(tokenizer)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, min(self.batch_size, _TESTED_AT_ONCE))

    @cached_property
    def train(self) -> Tokens:
        return self._encoded(rows_of("data.path", self._path, self._text, self._fields))

    @cached_property
    def test(self) -> Tokens:
        return self._encoded(self._test_rows())

    @abstractmethod
    def _encoded(self, rows: DataFrame) -> Tokens:
        """The examples of these records."""

    def _test_rows(self) -> DataFrame:
        """The test records that have a text."""
        rows = rows_of("data.test_path", self._test_path, self._text)
        check_columns(f"data.test_path={self._test_path}", rows, self._fields)
        has_text = [bool(text) for text in self._texts(rows, self._text)]
        if not any(has_text):
            raise ConfigError(f"data.test_path={self._test_path} has no record with a text in {self._text}.")
        return rows[has_text]

    def _texts(self, rows: DataFrame, of: str) -> list[str]:
        """Each record's text in a field; "" if it is not a text."""
        values = [value if isinstance(value, str) and value.strip() else "" for value in rows[of]]
        return [value.encode("utf-8", "replace").decode() for value in values]  # half of a surrogate pair is no text

    def _ids(self, rows: DataFrame, field: str, length: int | None = None, special: bool = True) -> list[list[int]]:
        """The tokens of each record's text in a field, cut at `length`; of a record without a text, none.

        Args:
            special: with those that a tokenizer puts around a text.
        """
        check_columns("data", rows, {field: self._fields[field]})
        texts = self._texts(rows, field)
        encoded = self._tokenizer(
            texts or [""], truncation=length is not None, max_length=length, add_special_tokens=special, verbose=False
        )
        return [ids if text else [] for ids, text in zip(encoded["input_ids"], texts, strict=False)]

    def save(self, model: nn.Module, folder: Path, card: str) -> None:
        """Writes the adapters, if there are any, as a folder of peft with the card, and what the prompts give."""
        if getattr(model, "peft_config", None):
            save_adapter(model, folder / "adapter")
            (folder / "adapter" / "README.md").write_text(card)


class Documents(_Texts):
    """Documents for a causal language model, which `python -m dpexp predict` lets continue texts.

    With prompts, an example is a prompt and its text, and only the text's tokens have a loss.

    Args:
        unit: what an example is: a `document`, of which the first `length` tokens are used; or a `block` of `length`
            tokens, of which a document has several.
        prompt: the field with a text's prompt; None: there is none.
        user: the field with a document's user, for `user_of`.
        prompts: public texts that the trained model continues, in generated.txt.
        privacy_unit: the name of its class; adjacency: of the job.
        part: {column, low, high}: only training records with a hash of this field in the range are used (`in_part`).
    """

    def __init__(
        self, path: str, test_path: str, tokenizer: str, length: int, text: str = "text", unit: str = "document",
        prompt: str | None = None, user: str | None = None, prompts: Sequence[str] = (),
        privacy_unit: str = "dpexp.Example", adjacency: str | None = None, part: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if unit not in ("document", "block"):
            raise ConfigError(
                f"data.unit={unit} is unknown; choose one of document, block, and privacy_unit=user for users."
            )
        if prompt is not None and unit == "block":
            raise ConfigError("data.prompt with data.unit=block: a block may lack its prompt; set data.unit=document.")
        if privacy_unit == "dpexp.User" and user is None:
            raise ConfigError("data.user=null: privacy_unit=user needs the name of the field with each record's user.")
        self._one_block = unit == "block" and privacy_unit != "dpexp.User"
        if self._one_block and adjacency not in ("replace_one", "replace_null"):
            raise ConfigError(
                f"data.unit=block with privacy.adjacency={adjacency}: neighbours differ by one block replaced in "
                "place; set privacy.adjacency=replace_one or replace_null; or data.unit=document."
            )
        super().__init__(path, test_path, tokenizer, length, text)
        self._unit, self._prompts, self._part = unit, list(prompts), with_name(part)
        self._user, self._prompt = text_of(user), text_of(prompt)
        if self._prompt:
            self._fields[self._prompt] = "data.prompt"

    @cached_property
    def train(self) -> Tokens:
        if self._one_block:
            warnings.warn(
                f"data.unit=block: ε protects a block of {self.length} tokens, replaced in place; a document of several"
                " blocks is not protected as a whole, and nor is a person."
            )
        named = self._fields | ({self._user: "data.user"} if self._user else {})
        named |= {self._part["column"]: "data.part.column"} if self._part else {}
        rows = in_part(f"data.path={self._path}", rows_of("data.path", self._path, self._text, named), self._part)
        data = self._encoded(rows)
        if self._user:
            codes = codes_of(texts_of(rows[self._user]))
            data.user_of = codes[self._sources].tolist()  # type: ignore[attr-defined]
        return data

    def _encoded(self, rows: DataFrame) -> Tokens:
        end, length = self._tokenizer.eos_token_id, self.length
        encoded = self._ids(rows, self._text, special=self._prompt is None)
        texts = [ids + [end] * (bool(ids) and end is not None and ids[-1] != end) for ids in encoded]
        if self._prompt:
            return self._prompted(self._ids(rows, self._prompt), texts)
        # The last block of a text may be shorter, but has a token to predict.
        starts = [range(0, max(1, len(text) - 1) if self._unit == "block" else 1, length) for text in texts]
        cut = [[text[k : k + length] for k in some] for text, some in zip(texts, starts, strict=True)]
        self._sources = [k for k, parts in enumerate(cut) for _ in parts]
        return Tokens([part for parts in cut for part in parts], length, self._tokenizer.pad_token_id)

    def _prompted(self, prompts: list[list[int]], texts: list[list[int]]) -> Tokens:
        """Each prompt and its text; one without a prompt, or whose prompt leaves its text no room, is not used."""
        self._sources = [*range(len(texts))]
        whole = [(prompt + text)[: self.length] for prompt, text in zip(prompts, texts, strict=True)]
        sizes = [len(prompt) or self.length for prompt in prompts]
        return Tokens(whole, self.length, self._tokenizer.pad_token_id, prompts=sizes)

    def encode(self, inputs: DataFrame) -> list[Tensor]:
        """The tokens [1, T] of each text to continue."""
        ids = [one or [self._tokenizer.eos_token_id] for one in self._ids(inputs, self._prompt or self._text)]
        if (most := max(map(len, ids), default=0)) >= self.length:
            raise ConfigError(f"data: a text of {most} tokens leaves none of data.length={self.length} to continue it.")
        return [torch.tensor([one]) for one in ids]

    def predictions(self, model: Any, inputs: DataFrame) -> DataFrame:
        """A column `continuation`: the likeliest token, again and again, up to `length` tokens or the end of text."""
        pad, found = self._tokenizer.pad_token_id, []
        for ids in self.encode(inputs):
            with torch.no_grad():
                whole = model.generate(
                    ids.to(model.device), attention_mask=torch.ones_like(ids), max_length=self.length, do_sample=False,
                    pad_token_id=pad,
                )  # fmt: skip
            found.append(self._tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
        return DataFrame({"continuation": found}, index=inputs.index)

    def example(self) -> DataFrame:
        return DataFrame({self._prompt or self._text: self._prompts[:2] or ["a"]})

    def save(self, model: nn.Module, folder: Path, card: str) -> None:
        super().save(model, folder, card)
        prompts = DataFrame({self._prompt or self._text: self._prompts})
        lines = self._prompts and self.predictions(model, prompts)["continuation"]
        text = "\n\n".join(f"{prompt} → {line}" for prompt, line in zip(self._prompts, lines, strict=True))
        (folder / "generated.txt").write_text(text + "\n")


class LabelledTexts(_Texts):
    """Texts with a class each, for a classifier.

    Args:
        label: the field with the class.
        class_names: the public names of the classes, in order.
    """

    def __init__(
        self, path: str, test_path: str, tokenizer: str, length: int, label: str, class_names: Sequence[Any],
        text: str = "text",
    ) -> None:  # fmt: skip
        super().__init__(path, test_path, tokenizer, length, text)
        self.class_names = [text_of(name) for name in class_names]
        if len({*self.class_names}) < max(2, len(self.class_names)):
            raise ConfigError(f"data.class_names={class_names} must be at least two different names of classes.")
        self._label = text_of(label)
        self._fields[self._label] = "data.label"

    @cached_property
    def test(self) -> Tokens:
        data = super().test
        if IGNORED in (data.labels or ()):
            raise ConfigError(
                f"data.test_path={self._test_path}: a record's field {self._label} is none of data.class_names="
                f"{self.class_names}."
            )
        return data

    def _encoded(self, rows: DataFrame) -> Tokens:
        code = {name: k for k, name in enumerate(self.class_names or ())}
        labels = [code.get(label, IGNORED) for label in texts_of(rows[self._label])]
        return Tokens(self._ids(rows, self._text, self.length), self.length, self._tokenizer.pad_token_id, labels)

    def encode(self, inputs: DataFrame) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` [N, length] of the first tokens of each text."""
        check_columns("data", inputs, {self._text: "data.text"})
        return self._tokenizer(  # type: ignore[no-any-return]
            list(inputs[self._text].astype(str)), truncation=True, max_length=self.length, padding="max_length",
            return_tensors="pt",
        )  # fmt: skip

    def outputs(self, model: nn.Module, x: Any) -> Tensor:
        parts = zip(x["input_ids"].split(_BATCH), x["attention_mask"].split(_BATCH), strict=True)
        return torch.cat([scores_of(model(input_ids=ids, attention_mask=mask)) for ids, mask in parts])

    def example(self) -> DataFrame:
        return self._test_rows()[[self._text]].head(2)
