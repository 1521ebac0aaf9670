"""`python -m dpexp evaluate` and `predict`: use a trained model."""

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

from dpexp.commands.build import make
from dpexp.commands.saved_jobs import bare, configuration, located, restored, run_and_options, trainer_of
from dpexp.commands.trainer import silence_lightning
from dpexp.errors import ConfigError
from dpexp.reporting.terminal import console, print_metrics
from dpexp.training.classifier import Classifier, scores_of


def evaluate(arguments: Sequence[str]) -> dict[str, float]:
    """Prints and returns the metrics of the test set."""
    run, options = run_and_options("evaluate", arguments, ["uri"])
    silence_lightning()
    with located(run, options.get("uri")) as folder:
        cfg = configuration(folder)
        trainer = trainer_of(cfg)
        module = restored(cfg, folder, trainer)
    try:
        found = trainer.test(module, datamodule=make("data.module", cfg.data.module), verbose=False)
    except MisconfigurationException as error:
        raise ConfigError(f"evaluate: {' '.join(str(error).split())}") from error
    metrics = {name: value for part in found for name, value in part.items()}
    print_metrics(metrics)
    return metrics


def predict(arguments: Sequence[str]) -> DataFrame:
    """Writes and returns the predictions, one row per input."""
    run, options = run_and_options("predict", arguments, ["data", "out", "uri"])
    if "data" not in options:
        raise ConfigError("predict needs data=FILE: .npy, .npz, .pt or .csv.")
    path, out = Path(options["data"]), options.get("out", "predictions.csv")
    with located(run, options.get("uri")) as folder:
        cfg = configuration(folder)
        x = _inputs(path, cfg)
        trainer = trainer_of(cfg)
        module = restored(cfg, folder, trainer)
    model, precision = bare(module).eval(), trainer.precision_plugin
    try:
        with torch.no_grad(), precision.forward_context():
            outputs = torch.cat([scores_of(model(precision.convert_input(part))) for part in x.split(1000)])
    except Exception as error:
        raise ConfigError(f"data={path} of shape {tuple(x.shape)} does not fit the model: {error}") from error
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))  # NumPy has no bfloat16
    if isinstance(module, Classifier):
        probabilities = outputs.softmax(1)
        table = DataFrame(
            {"class": probabilities.argmax(1)} | {f"p_{k}": p for k, p in enumerate(probabilities.unbind(1))}
        )
    else:
        table = DataFrame(outputs.reshape(len(outputs), -1).numpy())
    try:
        table.to_csv(out, index=False)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written ({error.strerror or error}).") from error
    console.print(f"{len(table)} predictions: {out}", soft_wrap=True)
    return table


def _table(path: Path) -> np.ndarray:
    """The rows of a CSV file, whose first line may hold names (0, 1, 2, … count as names)."""
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
