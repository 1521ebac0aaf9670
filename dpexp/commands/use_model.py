"""`python -m dpexp predict RUN data=inputs.npy` lets a trained model predict.

RUN is a job's folder or an MLflow run id. Options:
    data=FILE             inputs, one a row: .npy, .npz (its first array), .pt (a tensor) or .csv (numbers)
    out=predictions.csv   where the predictions go: for a classifier, class and probabilities
    uri=sqlite:///outputs/mlflow.db
"""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from pandas import DataFrame, read_csv
from torch import Tensor

from dpexp.commands.arguments import Arguments
from dpexp.commands.build import make, quieten
from dpexp.commands.saved_jobs import bare, configuration, located, restored, trainer_of
from dpexp.errors import ConfigError
from dpexp.reporting.terminal import console, measured
from dpexp.training.classifier import Classifier, scores_of


def evaluate(arguments: Sequence[str]) -> dict[str, float]:
    """Prints and returns the metrics of the test set.

    Raises:
        ConfigError: there is no such run, it kept no model, or its data have no test set.
    """
    given = Arguments.parsed("evaluate", __doc__, arguments, {"uri": None})
    if given is None:
        return {}
    quieten()
    with located(given.run, given.options["uri"]) as folder:
        cfg = configuration(folder)
        trainer = trainer_of(cfg)
        module = restored(cfg, folder, trainer)
    try:
        found = trainer.test(module, datamodule=make("data.module", cfg.data.module), verbose=False)
    except MisconfigurationException as error:
        raise ConfigError(f"evaluate: {' '.join(str(error).split())}") from error
    metrics = {name: value for part in found for name, value in part.items()}
    measured(metrics)
    return metrics


_AT_ONCE = 1000


def predict(arguments: Sequence[str]) -> DataFrame | None:
    """Writes and returns the predictions, one row for each input.

    Raises:
        ConfigError: there is no such run or file, or they do not fit.
    """
    given = Arguments.parsed("predict", __doc__, arguments, {"data": None, "out": "predictions.csv", "uri": None})
    if given is None:
        return None
    if given.options["data"] is None:
        raise ConfigError("predict needs data=FILE: .npy, .npz, .pt or .csv.")
    path = Path(given.options["data"])
    with located(given.run, given.options["uri"]) as folder:
        cfg = configuration(folder)
        x = _inputs(path, cfg)
        trainer = trainer_of(cfg)
        module = restored(cfg, folder, trainer)
    model, precision = bare(module).eval(), trainer.precision_plugin
    try:
        with torch.no_grad(), precision.forward_context():
            outputs = torch.cat([scores_of(model(precision.convert_input(part))) for part in x.split(_AT_ONCE)])
    except Exception as error:
        raise ConfigError(f"data={path} of shape {tuple(x.shape)} does not fit the model: {error}") from error
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))  # NumPy knows no bfloat16
    if isinstance(module, Classifier):
        chances = outputs.softmax(1)
        table = DataFrame({"class": chances.argmax(1)} | {f"p_{k}": chances[:, k] for k in range(chances.shape[1])})
    else:
        table = DataFrame(outputs.reshape(len(outputs), -1).numpy())
    try:
        table.to_csv(str(given.options["out"]), index=False)
    except OSError as error:
        raise ConfigError(f"out={given.options['out']} cannot be written ({error.strerror or error}).") from error
    console.print(f"{len(table)} predictions: {given.options['out']}", soft_wrap=True)
    return table


def _table(path: Path) -> np.ndarray:
    """Rows of numbers, with a first line of names (of which 0, 1, 2, … are some) or without."""
    first = read_csv(path, header=None, nrows=1)
    names = not all(np.issubdtype(kind, np.number) for kind in first.dtypes)
    named = names or [*first.iloc[0]] == [*range(first.shape[1])]
    return read_csv(path, header=0 if named else None).to_numpy()


def _inputs(path: Path, cfg: DictConfig) -> Tensor:
    readers: dict[str, Any] = {
        ".npy": lambda: np.load(path, allow_pickle=False),
        ".npz": lambda: next(iter(np.load(path, allow_pickle=False).values())),
        ".pt": lambda: torch.load(path, weights_only=True).numpy(),
        ".csv": lambda: _table(path),
    }
    if path.suffix not in readers:
        raise ConfigError(f"data={path} must be a file that ends in {', '.join(readers)}.")
    try:
        x = torch.as_tensor(np.asarray(readers[path.suffix]()))
    except (OSError, ValueError, TypeError, AttributeError, StopIteration, zipfile.BadZipFile, RuntimeError) as error:
        raise ConfigError(f"data={path} cannot be read: {' '.join(str(error).split())}") from error
    if not x.dim() or not len(x):
        raise ConfigError(f"data={path} holds no inputs.")
    x = x.float() if x.is_floating_point() or path.suffix == ".csv" else x
    shape = list(cfg.data.get("shape") or [])
    if shape and x[0].numel() == math.prod(shape):
        x = x.reshape(-1, *shape)
    return x
