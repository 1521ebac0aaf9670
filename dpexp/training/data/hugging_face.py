"""Data sets in Hugging Face's format: a folder, or a name on the hub."""

import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from dpexp.errors import ConfigError, in_one_line

_WITH_TYPES = ("arrow", "parquet")  # kinds of data sets whose files name the types of their columns


def is_hugging_face(path: str) -> bool:
    """Whether a path is a folder, or looks like a name on the hub, such as stanfordnlp/imdb, and is no file."""
    place = Path(os.path.expanduser(path))
    return place.is_dir() or (not place.exists() and re.fullmatch(r"\w[\w-]*/\w[\w-]*", path) is not None)


@cache
def split_of(path: str | None, subset: str | None, split: str, *columns: str | None) -> Any:
    """Some columns, or all, of a split of a data set in Hugging Face's format."""
    if None in (path, *columns):
        raise ConfigError("data.path, data.input and data.label must be given: a data set, and two of its columns.")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data sets of Hugging Face need pip install 'dpexp[huggingface]'.") from error
    datasets.disable_progress_bars()
    folder = Path(os.path.expanduser(str(path)))
    try:
        if (folder / "dataset_dict.json").exists():
            return _with(columns, datasets.load_from_disk(str(folder))[split])
        kind = datasets.load_dataset_builder(path, subset).name
        if kind not in _WITH_TYPES:
            raise ConfigError(
                f"data.path={path} is a data set of kind {kind}, of which Hugging Face would take classes and columns "
                "from private rows; give its files (a folder of images: data=images), or save it by save_to_disk."
            )
        return _with(columns, datasets.load_dataset(path, subset)[split])
    except ConfigError:
        raise
    except Exception as error:
        reason = in_one_line(error)[:200]
        wanted = " and ".join(map(str, columns)) or "its columns"
        raise ConfigError(f"data.path={path}, split {split}: {wanted} cannot be read: {reason}.") from error


def _with(columns: Collection[str | None], rows: Any) -> Any:
    return rows.select_columns(list(columns)) if columns else rows
