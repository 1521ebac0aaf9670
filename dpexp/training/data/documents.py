"""Users' texts as tokens: documents or blocks for a language model, and texts with labels for a classifier.

A text is read and encoded by itself. A training record without a text, a user or a known label stays in its place, and
contributes nothing. In the test set, which is public, an unknown label is refused.
"""

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pandas import DataFrame
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpexp.errors import ConfigError, RecordError, positive_integer
from dpexp.training.classifier import scores_of
from dpexp.training.data.prompts import Conversation, FilledPrompt, Row, TextAlone, text_in
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
        whole: how many tokens each text had before it was cut; None: none was.
        source_of: the record of each text; None: each has one.

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
        whole: list[int] | None = None,
        source_of: list[int] | None = None,
    ) -> None:
        self.ids = torch.full((len(texts), length), pad, dtype=torch.int32)
        for row, text in zip(self.ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text, dtype=torch.int32)
        self.sizes, self.labels = [len(text) for text in texts], labels
        self.prompts, self.whole = prompts or [0] * len(texts), whole or self.sizes
        self.source_of = source_of or [*range(len(texts))]
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


class Texts(RawData):
    """Training and test texts in files, and a tokenizer that was not made from them.

    Args:
        path, test_path: a text file (documents are separated by blank lines), .jsonl, .csv or .parquet, a pattern of
            several, or a data set in Hugging Face's format (see `rows_of`).
        tokenizer: a local folder, or a name on the hub.
        length: tokens of an example; shorter ones are padded.
        text: the field with the text.
        user: the field with a record's user, for `user_of`; privacy_unit: the name of its class.
        part: {column, low, high}: only training records with a hash of this field in the range are used (`in_part`).
    """

    batch_size = 16
    _text: str
    _fields: dict[str, str]  # those of each record, with the options that name them

    def __init__(
        self, path: str, test_path: str, tokenizer: str, length: int, text: str, user: str | None, privacy_unit: str,
        part: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        if privacy_unit == "dpexp.User" and user is None:
            raise ConfigError("data.user=null: privacy_unit=user needs the name of the field with each record's user.")
        self._path, self._test_path, self._text = path, test_path, text_of(text)
        most, self.length = max_positions(tokenizer), positive_integer("data.length", length)
        if length < 2 or (most is not None and length > most):
            raise ConfigError(f"data.length={length} must lie between 2 and the {most} tokens that the model can take.")
        self._tokenizer = tokenizer_of(tokenizer)
        self._user, self._part = text_of(user), with_name(part)

    def in_words(self, examples: float) -> str:
        """How long the test texts are, which are public, how many of them the length cuts, and the tokens of a round.

        Args:
            examples: those of a round, on average.
        """
        sizes = torch.tensor(self.test.whole, dtype=torch.float64)
        cut, mean = int((sizes > self.length).sum()), float(sizes.mean())
        read = float(sizes.clamp(max=self.length).mean())
        return (
            f"Test texts have {mean:.3g} tokens on average, at most {int(sizes.max())}; data.length={self.length} cuts "
            f"{cut} of {len(sizes)}. A round has about {round(examples * read, -1):,.0f} tokens."
        )

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, min(self.batch_size, _TESTED_AT_ONCE))

    @cached_property
    def train(self) -> Tokens:
        named = self._fields | ({self._user: "data.user"} if self._user else {})
        named |= {self._part["column"]: "data.part.column"} if self._part else {}
        rows = in_part(f"data.path={self._path}", rows_of("data.path", self._path, self._text, named), self._part)
        data = self._encoded(rows)
        if self._user:
            codes = codes_of(texts_of(rows[self._user]))
            data.user_of = codes[data.source_of].tolist()  # type: ignore[attr-defined]
        return data

    @cached_property
    def test(self) -> Tokens:
        return self._encoded(self._test_rows())

    @abstractmethod
    def _encoded(self, rows: DataFrame) -> Tokens:
        """The examples of these records."""

    @abstractmethod
    def _has_text(self, row: Row) -> bool:
        """Whether a record has what an example is made from."""

    def _test_rows(self) -> DataFrame:
        """The test records that have a text."""
        rows = rows_of("data.test_path", self._test_path, self._text)
        check_columns(f"data.test_path={self._test_path}", rows, self._fields)
        has_text = [self._has_text(row) for row in records_of(rows, self._fields)]
        if not any(has_text):
            field = next(iter(self._fields))
            raise ConfigError(f"data.test_path={self._test_path} has no record with a text in {field}.")
        return rows[has_text]

    def _ids(self, texts: Sequence[str], length: int | None = None, special: bool = True) -> list[list[int]]:
        """The tokens of each text, cut at `length`; of an empty one, none.

        Args:
            special: with those that a tokenizer puts around a text.
        """
        encoded = self._tokenizer(
            [*texts] or [""], truncation=length is not None, max_length=length, add_special_tokens=special,
            verbose=False,
        )  # fmt: skip
        return [ids if text else [] for ids, text in zip(encoded["input_ids"], texts, strict=False)]

    def save(self, model: nn.Module, folder: Path, card: str) -> None:
        """Writes the adapters, if there are any, as a folder of peft with the card, and what the prompts give."""
        if getattr(model, "peft_config", None):
            save_adapter(model, folder / "adapter")
            (folder / "adapter" / "README.md").write_text(card)


def records_of(rows: DataFrame, fields: Iterable[str]) -> list[dict[Any, Any]]:
    """The records with these fields alone, one by one."""
    return rows[[*fields]].to_dict("records")


class Documents(Texts):
    """Documents for a causal language model, which `python -m dpexp predict` lets continue texts.

    With prompts, or as conversations, only the text after the prompt has a loss (see `dpexp.training.data.prompts`).

    Args:
        unit: what an example is: a `document`, of which the first `length` tokens are used; or a `block` of `length`
            tokens, of which a document has several.
        prompt: the field with a text's prompt, or a prompt with fields, "Section {label}:"; None: there is none.
        messages: the field with a conversation, in place of `text` and `prompt`.
        chat_template: a file with the template of a conversation; None: the tokenizer's.
        prompts: public prompts that the trained model continues, in generated.txt.
        adjacency: of the job.
        others: of every kind of texts.
    """

    def __init__(
        self, path: str, test_path: str, tokenizer: str, length: int, text: str = "text", unit: str = "document",
        prompt: str | None = None, messages: str | None = None, chat_template: str | None = None,
        user: str | None = None, prompts: Sequence[Any] = (), privacy_unit: str = "dpexp.Example",
        adjacency: str | None = None, part: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if unit not in ("document", "block"):
            raise ConfigError(
                f"data.unit={unit} is unknown; choose one of document, block, and privacy_unit=user for users. Several "
                "texts are never packed into one example: ε would protect what was packed, not a text."
            )
        if prompt is not None and messages is not None:
            raise ConfigError(f"data.prompt={prompt} and data.messages={messages}: choose one.")
        if unit == "block" and (prompt or messages):
            option = "data.prompt" if prompt else "data.messages"
            raise ConfigError(f"{option} with data.unit=block: a block may lack its prompt; set data.unit=document.")
        self._one_block = unit == "block" and privacy_unit != "dpexp.User"
        if self._one_block and adjacency not in ("replace_one", "replace_null"):
            raise ConfigError(
                f"data.unit=block with privacy.adjacency={adjacency}: neighbours differ by one block replaced in "
                "place; set privacy.adjacency=replace_one or replace_null; or data.unit=document."
            )
        super().__init__(path, test_path, tokenizer, length, text, user, privacy_unit, part)
        self._unit, self._prompts = unit, list(prompts)
        if messages is not None:
            self.form: TextAlone = Conversation(text_of(messages), self._tokenizer, chat_template)
        else:
            self.form = FilledPrompt(self._text, prompt) if prompt else TextAlone(self._text)
        self._fields = self.form.fields

    @cached_property
    def train(self) -> Tokens:
        if self._one_block:
            warnings.warn(
                f"data.unit=block: ε protects a block of {self.length} tokens, replaced in place; a document of several"
                " blocks is not protected as a whole, and nor is a person."
            )
        return super().train

    def _has_text(self, row: Row) -> bool:
        return bool(self.form.parts(row)[1])

    def _encoded(self, rows: DataFrame) -> Tokens:
        check_columns("data", rows, self._fields)
        length, pad = self.length, self._tokenizer.pad_token_id
        parts = [self.form.parts(row) for row in records_of(rows, self._fields)]
        prompts = [prompt for prompt, _ in parts]
        texts = self._ids([text for _, text in parts], special=self.form.asks_nothing)
        if self.form.adds_special:
            texts = [*map(self._with_end, texts)]
        if not self.form.asks_nothing:
            begins = self._ids(prompts, special=self.form.adds_special)
            whole = [[*begin, *text] for begin, text in zip(begins, texts, strict=True)]
            # A record without a prompt, or whose prompt leaves its text no room, has no token with a loss.
            sizes = [len(begin) or length for begin in begins]
            return Tokens([ids[:length] for ids in whole], length, pad, prompts=sizes, whole=[*map(len, whole)])
        # The last block of a text may be shorter, but has a token to predict.
        starts = [range(0, max(1, len(text) - 1) if self._unit == "block" else 1, length) for text in texts]
        cut = [[text[k : k + length] for k in some] for text, some in zip(texts, starts, strict=True)]
        sources = [k for k, blocks in enumerate(cut) for _ in blocks]
        whole_sizes = [*map(len, texts)] if self._unit == "document" else None
        return Tokens([block for blocks in cut for block in blocks], length, pad, whole=whole_sizes, source_of=sources)

    def _with_end(self, ids: list[int]) -> list[int]:
        """A text's tokens and its end; no tokens stay none."""
        end = self._tokenizer.eos_token_id
        return [*ids, end] if ids and end is not None and ids[-1] != end else ids

    def prompt_ids(self, inputs: DataFrame) -> list[list[int]]:
        """The tokens of each prompt to continue; of an empty one, the special tokens that a text begins with, or else
        the one at its end."""
        check_columns("data", inputs, {name: self._fields[name] for name in self.form.asked})
        prompts = [self.form.prompt(row) for row in records_of(inputs, self.form.asked)]
        if not self.form.asks_nothing and "" in prompts:
            missing = prompts.index("")
            raise ConfigError(f"data: row {missing} has no prompt: {', '.join(self.form.asked)} must be there.")
        start = self._tokenizer("")["input_ids"] or [self._tokenizer.eos_token_id]
        ids = [one or start for one in self._ids(prompts, special=self.form.adds_special)]
        if (most := max(map(len, ids), default=0)) >= self.length:
            raise ConfigError(f"data: a text of {most} tokens leaves none of data.length={self.length} to continue it.")
        return ids

    def encode(self, inputs: DataFrame) -> list[Tensor]:
        """The tokens [1, T] of each text to continue."""
        return [torch.tensor([ids]) for ids in self.prompt_ids(inputs)]

    def continued(self, model: Any, prompts: Sequence[list[int]], **options: Any) -> list[str]:
        """What the model writes after each prompt's tokens, at once, up to `length` tokens or the end of text.

        Args:
            prompts: of one length, so that none is padded.
            options: of `generate` of transformers, such as do_sample and temperature.
        """
        ids = torch.tensor(prompts, device=model.device)
        with torch.no_grad():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_length=self.length,
                pad_token_id=self._tokenizer.pad_token_id, **options,
            )  # fmt: skip
        # Decoded with its prompt: some tokenizers leave out the blank at the beginning of what they decode.
        before, after = (
            self._tokenizer.batch_decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for part in (ids, whole)
        )
        return [text.removeprefix(prompt) for prompt, text in zip(before, after, strict=True)]

    def predictions(self, model: Any, inputs: DataFrame) -> DataFrame:
        """A column `continuation`: the likeliest token, again and again, up to `length` tokens or the end of text."""
        found = [self.continued(model, [ids], do_sample=False)[0] for ids in self.prompt_ids(inputs)]
        return DataFrame({"continuation": found}, index=inputs.index)

    def example(self) -> DataFrame:
        return DataFrame([self.form.input_of(prompt) for prompt in self._prompts[:2] or ["a"]])

    def save(self, model: nn.Module, folder: Path, card: str) -> None:
        super().save(model, folder, card)
        inputs = DataFrame([self.form.input_of(prompt) for prompt in self._prompts], columns=self.form.asked)
        lines = self._prompts and self.predictions(model, inputs)["continuation"]
        text = "\n\n".join(f"{prompt} → {line.strip()}" for prompt, line in zip(self._prompts, lines, strict=True))
        (folder / "generated.txt").write_text(text + "\n")


class LabelledTexts(Texts):
    """Texts with a class each, for a classifier.

    Args:
        label: the field with the class.
        class_names: the public names of the classes, in order.
        others: of every kind of texts.
    """

    def __init__(
        self, path: str, test_path: str, tokenizer: str, length: int, label: str, class_names: Sequence[Any],
        text: str = "text", user: str | None = None, privacy_unit: str = "dpexp.Example",
        part: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(path, test_path, tokenizer, length, text, user, privacy_unit, part)
        self.class_names = [text_of(name) for name in class_names]
        if len({*self.class_names}) < max(2, len(self.class_names)):
            raise ConfigError(f"data.class_names={class_names} must be at least two different names of classes.")
        self._label = text_of(label)
        self._fields = {self._text: "data.text", self._label: "data.label"}

    @cached_property
    def test(self) -> Tokens:
        data = super().test
        if IGNORED in (data.labels or ()):
            raise ConfigError(
                f"data.test_path={self._test_path}: a record's field {self._label} is none of data.class_names="
                f"{self.class_names}."
            )
        return data

    def _has_text(self, row: Row) -> bool:
        return bool(text_in(row[self._text]))

    def _encoded(self, rows: DataFrame) -> Tokens:
        check_columns("data", rows, self._fields)
        code = {name: k for k, name in enumerate(self.class_names or ())}
        labels = [code.get(label, IGNORED) for label in texts_of(rows[self._label])]
        texts = [*map(text_in, rows[self._text])]
        whole = [*map(len, self._ids(texts))]
        return Tokens(self._ids(texts, self.length), self.length, self._tokenizer.pad_token_id, labels, whole=whole)

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
