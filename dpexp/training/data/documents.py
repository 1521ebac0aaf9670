"""Texts of one's own, as tokens: documents or blocks for a language model, and texts with labels for a classifier.

A text is read and encoded by itself. A record without a text, a user or a known label contributes nothing, so that no
refusal depends on a single training record; the test set is public and checked strictly.
"""

import json
import os
import re
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpexp.errors import ConfigError, RecordError, positive_integer
from dpexp.training.classifier import scores_of
from dpexp.training.data.raw import RawData, encoding_of, opened, text_of
from dpexp.training.language import IGNORED, max_positions, tokenizer_of
from dpexp.training.pretrained import save_adapter

if TYPE_CHECKING:  # slow to import
    from pandas import DataFrame

_BATCH = 32  # texts that a classifier predicts for at once
_UNITS = ("document", "block")


class Tokens(Dataset):
    """Texts of at most `length` tokens, padded to it; an item holds what models of transformers take by keyword.

    Args:
        texts: token ids of each text.
        labels: the class of each text, IGNORED if unknown; None: the tokens are the labels, IGNORED where padded.

    Attributes:
        user_of: the user of each text, if users are known.
    """

    def __init__(self, texts: list[list[int]], length: int, pad: int, labels: list[int] | None = None) -> None:
        self.ids = torch.full((len(texts), length), pad, dtype=torch.int32)
        for row, text in zip(self.ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text, dtype=torch.int32)
        self.sizes, self.labels = [len(text) for text in texts], labels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids, is_token = self.ids[i].long(), torch.arange(self.ids.shape[1]) < self.sizes[i]
        labels = ids.masked_fill(~is_token, IGNORED) if self.labels is None else torch.tensor(self.labels[i])
        if self.sizes[i] < 1 + (self.labels is None) or (self.labels is not None and self.labels[i] == IGNORED):
            raise RecordError("data: a record has no text, no token to predict, or none of the labels.")
        return {"input_ids": ids, "attention_mask": is_token.long(), "labels": labels}


class _Texts(RawData):
    """Training and test texts in files, and a tokenizer that was not made from them.

    Args:
        path, test_path: a text file (documents are separated by blank lines), or a .jsonl file (an object per line).
        tokenizer: a local folder, or a name on the hub.
        length: tokens of an example; shorter ones are padded.
        text: the field with the text.
    """

    def __init__(
        self, path: str, test_path: str, tokenizer: str, length: int, text: str = "text", batch_size: int = 16
    ) -> None:
        super().__init__()
        self.batch_size, self._path, self._test_path, self._text = batch_size, path, test_path, text
        self._fields = {"data.text": text}
        most, self.length = max_positions(tokenizer), positive_integer("data.length", length)
        if length < 2 or (most is not None and length > most):
            raise ConfigError(f"data.length={length} must lie between 2 and the {most} tokens that the model can take.")
        self._tokenizer = tokenizer_of(tokenizer)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, self.batch_size)

    @cached_property
    def train(self) -> Tokens:
        return self._encoded(_read("data.path", self._path, self._fields))

    @cached_property
    def test(self) -> Tokens:
        fields = {key: name for key, name in self._fields.items() if key != "data.user"}
        rows = _read("data.test_path", self._test_path, fields, strict=True)
        return self._encoded([row for row in rows if row[self._text].strip()])

    @abstractmethod
    def _encoded(self, rows: list[dict[str, Any]]) -> Tokens:
        """The examples of these records."""

    def _ids(self, rows: list[dict[str, Any]], length: int | None = None) -> list[list[int]]:
        """The tokens of each row's text, cut at `length`; of a row without a text, none."""
        values = [value if isinstance(value := row.get(self._text), str) else "" for row in rows]
        texts = [value.encode("utf-8", "replace").decode() for value in values]  # half of a surrogate pair is no text
        encoded = self._tokenizer(texts, truncation=length is not None, max_length=length, verbose=False)
        return [ids if text.strip() else [] for ids, text in zip(encoded["input_ids"], texts, strict=True)]

    def save(self, model: nn.Module, folder: Path, card: str) -> None:
        """Writes the adapters, if there are any, as a folder of peft with the card, and what the prompts give."""
        if getattr(model, "peft_config", None):
            save_adapter(model, folder / "adapter")
            (folder / "adapter" / "README.md").write_text(card)

    def read_inputs(self, path: Path) -> "DataFrame":
        found = super().read_inputs(path)
        if self._text not in found:
            raise ConfigError(f"data={path} has no column {self._text}, but {', '.join(map(str, found))}.")
        return found


class Documents(_Texts):
    """Documents for a causal language model, which `python -m dpexp predict` lets continue texts.

    Args:
        unit: what an example is: a `document`, of which the first `length` tokens are used; or a `block` of `length`
            tokens, of which a document has several.
        user: the field with a document's user, for `user_of`.
        prompts: public texts that the trained model continues, in generated.txt.
        privacy_unit, adjacency: of the job.
    """

    def __init__(
        self, path: str, test_path: str, tokenizer: str, length: int, text: str = "text", unit: str = "document",
        user: str | None = None, prompts: Sequence[str] = (), privacy_unit: str = "example",
        adjacency: str | None = None, batch_size: int = 16,
    ) -> None:  # fmt: skip
        if unit not in _UNITS:
            raise ConfigError(
                f"data.unit={unit} is unknown; choose one of {', '.join(_UNITS)}, and privacy_unit=user for users."
            )
        if privacy_unit == "user" and user is None:
            raise ConfigError("data.user=null: privacy_unit=user needs the name of the field with each record's user.")
        self._one_block = unit == "block" and privacy_unit == "example"
        if self._one_block and adjacency not in ("replace_one", "replace_null"):
            raise ConfigError(
                f"data.unit=block with privacy.adjacency={adjacency}: neighbours differ by one block replaced in "
                "place; set privacy.adjacency=replace_one or replace_null; or data.unit=document."
            )
        super().__init__(path, test_path, tokenizer, length, text, batch_size)
        self._unit, self._user, self._prompts = unit, user, list(prompts)
        if user is not None:
            self._fields["data.user"] = user

    @cached_property
    def train(self) -> Tokens:
        if self._one_block:
            warnings.warn(
                f"data.unit=block: ε protects a block of {self.length} tokens, replaced in place; a document of several"
                " blocks is not protected as a whole, and nor is a person."
            )
        rows = _read("data.path", self._path, self._fields)
        if self._user is None:
            return self._encoded(rows)
        rows = [
            row for row, ids in zip(rows, self._ids(rows), strict=True)
            if ids and text_of(row.get(self._user))
        ]  # fmt: skip
        if not rows:
            raise ConfigError(f"data.path={self._path} has no record with both {self._text} and {self._user}.")
        data, code = self._encoded(rows), dict[str, int]()
        users = [code.setdefault(text_of(row[self._user]), len(code)) for row in rows]
        data.user_of = [users[k] for k in self._sources]  # type: ignore[attr-defined]
        return data

    def _encoded(self, rows: list[dict[str, Any]]) -> Tokens:
        end, length = self._tokenizer.eos_token_id, self.length
        texts = [ids + [end] * (bool(ids) and end is not None and ids[-1] != end) for ids in self._ids(rows)]
        cut = [[text[:length]] if self._unit == "document" else _blocks(text, length) for text in texts]
        self._sources = [k for k, parts in enumerate(cut) for _ in parts]
        return Tokens([part for parts in cut for part in parts], length, self._tokenizer.pad_token_id)

    def encode(self, inputs: "DataFrame") -> list[Tensor]:
        """The tokens [1, T] of each text."""
        ids = [one or [self._tokenizer.eos_token_id] for one in self._ids(inputs.to_dict("records"))]
        if (most := max(map(len, ids), default=0)) >= self.length:
            raise ConfigError(f"data: a text of {most} tokens leaves none of data.length={self.length} to continue it.")
        return [torch.tensor([one]) for one in ids]

    def predictions(self, model: Any, inputs: "DataFrame") -> "DataFrame":
        """A column `continuation`: the likeliest token, again and again, up to `length` tokens or the end of text."""
        from pandas import DataFrame

        pad, found = self._tokenizer.pad_token_id, []
        for ids in self.encode(inputs):
            with torch.no_grad():
                whole = model.generate(
                    ids.to(model.device), attention_mask=torch.ones_like(ids), max_length=self.length, do_sample=False,
                    pad_token_id=pad,
                )  # fmt: skip
            found.append(self._tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
        return DataFrame({"continuation": found}, index=inputs.index)

    def example(self) -> "DataFrame":
        from pandas import DataFrame

        return DataFrame({self._text: self._prompts[:2] or ["a"]})

    def save(self, model: nn.Module, folder: Path, card: str) -> None:
        super().save(model, folder, card)
        from pandas import DataFrame

        prompts = DataFrame({self._text: self._prompts})
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
        text: str = "text", batch_size: int = 16,
    ) -> None:  # fmt: skip
        super().__init__(path, test_path, tokenizer, length, text, batch_size)
        self.class_names = [text_of(name) for name in class_names]
        if len({*self.class_names}) < max(2, len(self.class_names)):
            raise ConfigError(f"data.class_names={class_names} must be at least two different names of classes.")
        self._label, self._fields["data.label"] = label, label

    @cached_property
    def test(self) -> Tokens:
        data = super().test
        if IGNORED in (data.labels or ()):
            raise ConfigError(
                f"data.test_path={self._test_path}: a record's field {self._label} is none of data.class_names="
                f"{self.class_names}."
            )
        return data

    def _encoded(self, rows: list[dict[str, Any]]) -> Tokens:
        code = {name: k for k, name in enumerate(self.class_names or ())}
        labels = [code.get(text_of(row.get(self._label)), IGNORED) for row in rows]
        return Tokens(self._ids(rows, self.length), self.length, self._tokenizer.pad_token_id, labels)

    def encode(self, inputs: "DataFrame") -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` [N, length] of the first tokens of each text."""
        return self._tokenizer(  # type: ignore[no-any-return]
            list(inputs[self._text].astype(str)), truncation=True, max_length=self.length, padding="max_length",
            return_tensors="pt",
        )  # fmt: skip

    def outputs(self, model: nn.Module, x: Any) -> Tensor:
        parts = zip(x["input_ids"].split(_BATCH), x["attention_mask"].split(_BATCH), strict=True)
        return torch.cat([scores_of(model(input_ids=ids, attention_mask=mask)) for ids, mask in parts])

    def example(self) -> "DataFrame":
        from pandas import DataFrame

        rows = _read("data.test_path", self._test_path, self._fields, strict=True)[:2]
        return DataFrame({self._text: [row[self._text] for row in rows]})


def _blocks(ids: list[int], length: int) -> list[list[int]]:
    """A document's tokens, in blocks of `length`; the last may be shorter, but has a token to predict."""
    return [ids[start : start + length] for start in range(0, max(1, len(ids) - 1), length)]


def _read(key: str, path: str, fields: Mapping[str, str], strict: bool = False) -> list[dict[str, Any]]:
    """The records of a file, of which one, or if `strict` each, must have the fields."""
    file = Path(os.path.expanduser(path))
    try:
        with opened(file) as source:
            content = source.handle.read().decode(encoding_of(file), "replace").replace("\r\n", "\n")
    except Exception as error:  # each compression has its own
        raise ConfigError(f"{key}={path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    if {".jsonl", ".json"} & {*file.suffixes}:
        rows = [_parsed(line) for line in content.split("\n") if line.strip()]
    else:
        texts = re.split(r"\n(?:[ \t]*\n)+", content)
        rows = [{fields["data.text"]: text.strip()} for text in texts if text.strip()]
    rows = [row if isinstance(row, dict) else {} for row in rows]
    if not rows:
        raise ConfigError(f"{key}={path} is empty: it needs documents, or lines of JSON in a .jsonl file.")
    for option, name in fields.items():
        kind = str if option == "data.text" else object
        having = [row.get(name) is not None and isinstance(row[name], kind) for row in rows]
        if not any(having) or (strict and not all(having)):
            which = f"record {having.index(False) + 1} of {key}={path} has no" if strict else f"{key}={path} has no"
            raise ConfigError(f"{option}={name}: {which} such field{' with a text' * (option == 'data.text')}.")
    return rows


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
