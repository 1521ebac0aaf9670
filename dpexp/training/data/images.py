"""Users' images in folders, and data sets in Hugging Face's format, in memory.

A training record that cannot be read, or is of no known class, stays in its place and contributes nothing. Test records
are public: one that cannot be read is named.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pandas import DataFrame
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import TensorDataset

from dpexp.errors import ConfigError, in_one_line
from dpexp.rows import PlacedRows
from dpexp.training.data.hugging_face import split_of
from dpexp.training.data.raw import RawData, check_columns, text_of

_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_UNUSABLE = "data: a record cannot be read, or is of no known class."


class Images(RawData):
    """Images in files FOLDER/CLASS/FILE, resized and scaled to [-1, 1], in the order of FILE.

    Args:
        path: the folder of training images; test_path: that of test images, which are taken as public.
        class_names: public names of the classes, in order.
        shape: [channels, height, width], with 1 channel (grey) or 3 (colours).
    """

    def __init__(
        self, path: str, test_path: str, class_names: Sequence[str], shape: Sequence[int], input: str = "image"
    ) -> None:  # fmt: skip
        super().__init__()
        self._input, self._shape, self._paths = text_of(input), tuple(shape), (path, test_path)
        self.class_names: Sequence[str] = [text_of(name) for name in class_names]

    @cached_property
    def train(self) -> TensorDataset:
        return self._read(*self._records(in_test=False), is_public=False)

    @cached_property
    def test(self) -> TensorDataset:
        return self._read(*self._records(in_test=True), is_public=True)

    example_file = "photos"

    def input_in_words(self) -> str:
        return f"an image file, or a row with what the training records have in the column {self._input}"

    def example(self) -> DataFrame:
        _, _, record = self._records(in_test=True)
        values = [record(i)[0] for i in range(min(2, len(self.test)))]
        return DataFrame({self._input: [v.read_bytes() if isinstance(v, Path) else v for v in values]})

    def read_inputs(self, path: Path) -> DataFrame:
        """An image, the images in a folder, or the rows of a CSV or Parquet file."""
        if path.is_dir() or path.suffix.lower() in _SUFFIXES:
            return DataFrame({self._input: [*map(str, _images_in(path) if path.is_dir() else [path])]})
        return super().read_inputs(path)

    def encode(self, inputs: DataFrame) -> Tensor:
        """x [N, …] of a column that holds images (a file's path or content) or lists of numbers."""
        check_columns("data", inputs, {self._input: "data.module.input"})
        values = [*inputs[self._input]]
        return self._read("data", len(values), lambda i: (values[i], 0), is_public=True).tensors[0]

    def _records(self, in_test: bool) -> tuple[str, int, Callable[[int], tuple[Any, Any]]]:
        """Where they are, their number, and a function of i that gives a record's value and class."""
        key, path = ("data.test_path" if in_test else "data.path"), self._paths[in_test]
        files = [
            (file.relative_to(folder), folder.name, file)
            for folder in class_folders(key, path)
            for file in _images_in(folder)
        ]
        files.sort()  # by name, so that an image's class does not move others
        return f"{key}={path}", len(files), lambda i: (files[i][2], files[i][1])

    def _read(
        self, where: str, count: int, record: Callable[[int], tuple[Any, Any]], is_public: bool
    ) -> TensorDataset:  # fmt: skip
        """The records, all of which can be read if they are public."""
        x, y = np.zeros((count, *self._shape), np.float32), np.zeros(count, np.int64)
        codes = {key: k for k, name in enumerate(self.class_names) for key in (name, k)}

        def read(i: int) -> bool:
            value: Any = None
            try:
                value, label = record(i)
                label = text_of(label) if isinstance(label, str) else label
                if label not in codes:
                    raise ValueError(f"{label} is none of the classes {', '.join(self.class_names)}")
                x[i], y[i] = self._encoded(value), codes[label]
            except Exception as error:
                if is_public:
                    which = value if isinstance(value, str | Path) else f"record {i}"
                    reason = in_one_line(error)[:200]
                    raise ConfigError(f"{where}: {which} cannot be read: {reason}.") from error
                return False
            return True

        with ThreadPoolExecutor() as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of single images
            is_read = np.array([*pool.map(read, range(count))], bool)
        tensors = torch.from_numpy(x), torch.from_numpy(y)
        if not is_public:
            return PlacedRows(*tensors, usable=torch.from_numpy(is_read), reason=_UNUSABLE)
        if not count:
            raise ConfigError(f"{where} holds no record that can be read of the classes {', '.join(self.class_names)}.")
        return TensorDataset(*tensors)

    def _encoded(self, value: Any) -> np.ndarray:
        if not isinstance(value, str | bytes | Path):
            return np.array(value, np.float32).reshape(self._shape)
        if len(self._shape) != 3 or self._shape[0] not in (1, 3):
            raise ValueError(f"data.shape={list(self._shape)} must be [channels, height, width] with 1 or 3 channels")
        channels, height, width = self._shape
        with Image.open(BytesIO(value) if isinstance(value, bytes) else value) as file:
            image = ImageOps.exif_transpose(file)
        if image.mode in ("I", "F"):
            raise ValueError(f"the range of its values is unknown (mode {image.mode})")
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image, np.float32).reshape(height, width, channels).transpose(2, 0, 1) / 127.5 - 1


class HuggingFace(Images):
    """Images, or vectors of numbers, of a data set in Hugging Face's format.

    Args:
        path: what `DatasetDict.save_to_disk` wrote, or a data set in Parquet that `datasets.load_dataset` takes;
            subset: its second argument.
        class_names: see `Images`; shape: that of an image or a vector.
        input: the column of images or vectors; label: that of classes, by index or name.
    """

    def __init__(
        self, path: str, class_names: Sequence[str], shape: Sequence[int], input: str, label: str,
        subset: str | None = None, train_split: str = "train", test_split: str = "test",
    ) -> None:  # fmt: skip
        super().__init__(path, path, class_names, shape, input)
        self._column, self._label = input, label  # as the data set spells them
        self._subset, self._splits = subset, (train_split, test_split)

    def _records(self, in_test: bool) -> tuple[str, int, Callable[[int], tuple[Any, Any]]]:
        path, split = self._paths[0], self._splits[in_test]
        rows = split_of(path, self._subset, split, self._column, self._label)
        kind = type(rows.features[self._column])
        are_images = kind.__name__ == "Image"
        rows = rows.cast_column(self._column, kind(decode=False)) if are_images else rows

        def record(i: int) -> tuple[Any, Any]:
            row = rows[i]
            value = row[self._column]
            return (value["bytes"] or Path(value["path"])) if are_images else value, row[self._label]

        return f"data.path={path}, split {split}", len(rows), record


def class_folders(key: str, path: str | None) -> list[Path]:
    """The folders in a folder, one for each class."""
    folder = Path(os.path.expanduser(path or ""))
    if path is None or not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"{key}={path} must be a folder that holds a folder of images for each class.")
    return sorted(each for each in folder.iterdir() if each.is_dir() and not _is_hidden(each, folder))


def _images_in(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES)
    return sorted(file for file in files if not _is_hidden(file, folder))


def _is_hidden(path: Path, folder: Path) -> bool:
    """Whether an editor or operating system made a path within a folder, such as .ipynb_checkpoints."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.relative_to(folder).parts)


def class_names(*source: str | None) -> list[str]:
    """The names of the folders in a folder of test images, the second one; or of a column's classes, see `split_of`."""
    if len(source) == 2:
        class_folders("data.path", source[0])
        return sorted({text_of(folder.name) for folder in class_folders("data.test_path", source[1])})
    return getattr(split_of(*source).features[source[-1]], "names", [])
