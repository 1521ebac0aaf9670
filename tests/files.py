"""Files of data for tests: tables, lines of JSON, and a tokenizer whose tokens are words."""

import json
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


def save(frame, path):
    """Writes a table in the format that its suffix says; returns the path."""
    match Path(path).suffix:
        case ".csv":
            frame.to_csv(path, index=False)
        case ".parquet":
            frame.to_parquet(path)
        case ".jsonl":
            frame.to_json(path, orient="records", lines=True)
    return str(path)


def write_lines(path, rows):
    """Rows as lines of JSON."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def word_tokenizer(words, **special):
    """A tokenizer of these words, of which `<unknown>` is one. special: as `eos_token="<end>"`."""
    tokenizer = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>", **special)
