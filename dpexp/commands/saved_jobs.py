"""Finished and interrupted jobs: saving, loading and using a trained model, and resuming a training."""

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pandas import DataFrame, read_csv, to_numeric
from torch import Tensor, nn
from yaml import YAMLError

from dpexp._lightning_compat import MisconfigurationException, pl
from dpexp.commands.build import data_of, features_map, make, module_of, silence_lightning
from dpexp.commands.command_line import as_overrides, config_file, is_option, with_config_file
from dpexp.commands.job import Job
from dpexp.commands.validate import check
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError, in_one_line
from dpexp.privacy.callback import PrivacyCallback
from dpexp.reporting.model_card import card
from dpexp.reporting.terminal import console, print_tested
from dpexp.reporting.wording import measured
from dpexp.tracking.job_folder import CARD, CHECKPOINT, DISK_RESERVE, MLFLOW_MODEL, WEIGHTS
from dpexp.tracking.provenance import without_passwords
from dpexp.training.classifier import Classifier, scores_of
from dpexp.training.data.features import Features, OnFeatures
from dpexp.training.data.inputs import OneInput
from dpexp.training.data.raw import RawData, content_of, delimiter_of, text_of
from dpexp.training.pretrained import load_weights, non_tensor_state, read_metadata, save_weights

_MAY_DIFFER = ("checkpoint", "rounds", "tracking")  # sections in which a resumed job may differ


def load(run: str | Path, uri: str | None = None) -> nn.Module:
    """The trained model of a finished job, in evaluation mode.

    Examples:
        >>> import dpexp
        >>> model = dpexp.load("outputs/2026-01-01/12-00-00")  # doctest: +SKIP

    The model is made by what its configuration names, which may be any installed code: load only what you trust, from
    folders and from servers. (`weights.safetensors` itself holds only numbers, and runs nothing.)

    Args:
        run: the job's folder, or its MLflow run id.
        uri: the tracking URI of the run; by default $MLFLOW_TRACKING_URI, or outputs/mlflow.db here.

    Raises:
        ConfigError: there is no such run, or it saved no model.
    """
    with located(run, uri) as folder:
        saved = Saved(folder)
        saved.restore()
    return saved.model


class Saved:
    """The trained model in a job's folder. MLflow serves it by `predict`."""

    def __init__(self, folder: Path) -> None:
        self.cfg, self._folder = _configuration(folder), folder
        silence_lightning()
        precision = self.cfg.trainer.precision
        try:
            self.trainer = pl.Trainer(
                accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
        except Exception as error:  # Lightning raises many types for a wrong value
            raise ConfigError(f"trainer.precision={precision} is not available on the CPU: {error}") from error
        target = get_object(self.cfg.data.module._target_)
        encodes = isinstance(target, type) and issubclass(target, RawData)
        self.data: RawData | None = make("data.module", self.cfg.data.module) if encodes else None  # has read nothing
        known = read_metadata(folder / WEIGHTS).get("one_input")
        self._one_input = OneInput(**json.loads(known)) if known else None

    def restore(self) -> None:
        """Makes the module with the trained weights, at the precision of its training. Runs code: see `load`."""
        pl.seed_everything(self.cfg.seed, verbose=False)  # making a model may draw random numbers
        module = self.trainer.precision_plugin.convert_module(module_of(self.cfg, load_weights=False))
        assert isinstance(module, pl.LightningModule)
        load_weights(bare(module), self._folder / WEIGHTS)
        by = features_map(self.cfg)
        self.module, self.model = module, bare(module).eval()
        self.model = self.model if by is None else OnFeatures(by, self.model)

    def predict(self, inputs: Any, params: Any = None) -> Any:
        """A table for inputs as users have them; for an array the model's scores, in at least float32.

        Both are computed at the job's precision."""
        precision = self.trainer.precision_plugin
        with torch.no_grad(), precision.forward_context():
            if self.data is not None:
                return self.data.predictions(self.model, inputs.rename(columns=text_of))
            x = torch.as_tensor(np.asarray(inputs))
            x = self._one_input.converted(x) if self._one_input else x
            x = x if isinstance(self.model, OnFeatures) else precision.convert_input(x)
            scores = torch.cat([scores_of(self.model(part)) for part in x.split(1000)])
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).numpy()


def _load_pyfunc(path: str) -> Saved:
    """The loader of a model that dpexp saved for MLflow, which finds this function by its name."""
    saved = Saved(Path(path))
    saved.restore()
    return saved


def run_and_options(command: str, arguments: Sequence[str], known: Collection[str]) -> tuple[str, dict[str, str]]:
    """The run and the options of a command line `RUN key=value …`.

    Args:
        known: the keys that the command has.
    """
    options = dict(argument.split("=", 1) for argument in arguments if is_option(argument))
    runs = [argument for argument in arguments if not is_option(argument)]
    if "data" in known and "data" not in options and len(runs) == 2:
        options["data"] = runs.pop()
    for key in options:
        if key not in known:
            raise ConfigError(f"{command}: {key} is unknown; known: {', '.join(known)}.")
    if len(runs) != 1:
        raise ConfigError(f"{command} needs one job's folder or MLflow run id; see {command} --help.")
    return runs[0], options


@contextmanager
def located(run: str | Path, uri: str | None) -> Iterator[Path]:
    """A folder with the configuration and the weights of a run."""
    path = Path(run)
    if path.is_dir():
        if not (path / WEIGHTS).exists() or not (path / "config.yaml").exists():
            raise ConfigError(f"{run} holds no {WEIGHTS}: only a job that has finished its training saves a model.")
        yield path
        return
    from dpexp.tracking.read import pulled

    with pulled(uri or tracking_uri(), str(run), WEIGHTS, "config.yaml") as folder:
        yield folder


def _configuration(folder: Path) -> DictConfig:
    """The configuration of a job's folder."""
    path = folder / "config.yaml"
    try:
        cfg = OmegaConf.load(path)
        assert isinstance(cfg, DictConfig)
        _name_classes(cfg)
        check(cfg)
    except (YAMLError, OmegaConfBaseException, AssertionError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is not the configuration of a job: {in_one_line(error)[:200]}.") from error
    return cfg


def _name_classes(cfg: DictConfig) -> None:
    """Gives sections of version 0.1, which named a kind, the class that has its name now."""
    for section, key in (("sampling", "policy"), ("noise", "kind"), ("privacy_unit", "kind")):
        values = dict(cfg[section] or {})
        if "_target_" in values:
            continue
        kind = str(values.pop(key))
        if kind == "full_batch":  # whose rate was given as 1
            values["sampling_rate"] = None
        target = kind if "." in kind else f"dpexp.{kind.title().replace('_', '')}"
        cfg[section] = {"_target_": target} | {name: value for name, value in values.items() if value is not None}


def bare(module: pl.LightningModule) -> nn.Module:
    """The part of a LightningModule that predicts: a classifier's model, or the LightningModule itself."""
    return module.model if isinstance(module, Classifier) else module


def evaluate(arguments: Sequence[str]) -> dict[str, float]:
    """Prints and returns the metrics of the test set."""
    run, options = run_and_options("evaluate", arguments, ["uri"])
    with located(run, options.get("uri")) as folder:
        saved = Saved(folder)
        saved.restore()
    try:
        data = data_of(saved.cfg)
        found = saved.trainer.test(saved.module, datamodule=data, verbose=False)
    except MisconfigurationException as error:
        raise ConfigError(f"evaluate: {in_one_line(error)}.") from error
    metrics = {name: value for part in found for name, value in part.items()}
    print_tested(metrics, getattr(data, "class_names", None), saved.cfg.data.class_weights is not None)
    for name, value in metrics.items():
        console.print(f"{name}: {measured(name, value)}")
    return metrics


def predict(arguments: Sequence[str]) -> DataFrame:
    """Writes and returns the predictions, one row per input."""
    run, options = run_and_options("predict", arguments, ["data", "out", "uri"])
    if "data" not in options:
        raise ConfigError("predict needs data=FILE: .npy, .npz, .pt or .csv.")
    path, out = Path(os.path.expanduser(options["data"])), options.get("out", "predictions.csv")
    with located(run, options.get("uri")) as folder:
        saved = Saved(folder)
        x: Any = _inputs(path, saved.cfg) if saved.data is None else saved.data.read_inputs(path)
        saved.restore()
    try:
        found = saved.predict(x)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"data={path} of shape {tuple(x.shape)} does not fit the model: {error}") from error
    if saved.data is not None:
        table = x.drop(columns=[name for name in found if name in x]).join(found)
    elif isinstance(saved.module, Classifier):
        p = torch.as_tensor(found).softmax(1)
        table = DataFrame({"class": p.argmax(1)} | {f"p_{k}": column for k, column in enumerate(p.unbind(1))})
    else:
        table = DataFrame(found.reshape(len(found), -1))
    try:
        table.to_csv(out, index=False)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written ({error.strerror or error}).") from error
    console.print(f"{len(table)} predictions: {out}", soft_wrap=True)
    return table


def _table(path: Path) -> np.ndarray:
    """The rows of a CSV file, whose first line may hold names (0, 1, 2, … count as names)."""
    content = content_of(path, "strict")
    rows = read_csv(StringIO(content), header=None, sep=delimiter_of(content), dtype=str)
    first = to_numeric(rows.iloc[0], errors="coerce")
    is_named = first.isna().any() or [*first] == [*range(len(first))]
    return (rows[1:] if is_named else rows).to_numpy(np.float64)


def _first_array(path: Path) -> np.ndarray:
    """The first array of an .npz file."""
    return next(iter(np.load(path, allow_pickle=False).values()))


def _tensor(path: Path) -> np.ndarray:
    """The tensor in a file of torch.save."""
    return torch.load(path, weights_only=True).numpy()


_READERS: dict[str, Callable[[Path], Any]] = {".npy": np.load, ".npz": _first_array, ".pt": _tensor, ".csv": _table}


def _inputs(path: Path, cfg: DictConfig) -> Tensor:
    """The inputs in a file, each in the shape of the data set's records, if it has one."""
    suffix = next((suffix for suffix in reversed(path.suffixes) if suffix in _READERS), None)
    if suffix is None:
        raise ConfigError(f"data={path} must be a file that ends in {', '.join(_READERS)}.")
    try:
        x = torch.as_tensor(np.asarray(_READERS[suffix](path)))
    except Exception as error:  # each format and compression has its own
        raise ConfigError(f"data={path} cannot be read: {in_one_line(error)}.") from error
    if not x.dim() or not len(x):
        raise ConfigError(f"data={path} holds no inputs.")
    x = x.float() if x.is_floating_point() or suffix == ".csv" else x
    shape = list(cfg.data.get("shape") or [])
    if shape and x[0].numel() == math.prod(shape):
        x = x.reshape(-1, *shape)
    return x


def save_model(job: Job, result: dict[str, Any], run_id: str | None) -> dict[str, str]:
    """Writes weights, card and, for an MLflow run, MLflow's form of the model into the job's folder.

    Returns:
        Tags of the model for MLflow's registry.
    """
    cfg, output = job.cfg, job.output
    for path in (output / WEIGHTS, output / CARD):
        path.unlink(missing_ok=True)  # of a training that ended early, and was resumed
    shutil.rmtree(output / MLFLOW_MODEL, ignore_errors=True)
    model = bare(job.module)
    about = {"private": str(result["private"]), "rounds": str(result["rounds"])}
    about |= {"data_id": cfg.data.id} if cfg.data.id else {}
    if "epsilon" in result:
        accountant, epsilon = next(iter(result["epsilon"].items()))
        about |= {"epsilon": repr(epsilon), "delta": repr(result["delta"]), "adjacency": result["adjacency"]}
        about |= {"accountant": accountant}
    data = job.data.of if isinstance(job.data, Features) else job.data
    file, words = "inputs.npy", "what the data module gives the model"
    with suppress(Exception):  # the data may be of any kind, and have no test set
        if isinstance(data, RawData):
            file, words = data.example_file, data.input_in_words()
        else:
            one_input = OneInput.of(_test_inputs(data), getattr(data, "raw_max", None))
            about["one_input"], words = json.dumps(asdict(one_input)), str(one_input)
    (output / DISK_RESERVE).unlink(missing_ok=True)
    save_weights(model, output / WEIGHTS, about)
    names = {name: str(HydraConfig.get().runtime.choices.get(name)) for name in ("data", "model")}
    names["schedule"] = ", ".join(f"{key}: {kind}" for key, kind in cfg.schedule.items() if kind is not None)
    lost = non_tensor_state(model)
    if lost:
        warnings.warn(f"{WEIGHTS} cannot hold {', '.join(lost)}, which are no tensors: a loaded model lacks them")
    text = card(names, result, job.plan, run_id or str(output), lost, file, words)
    (output / CARD).write_text(text)
    if isinstance(data, RawData):
        try:
            data.save(model.eval(), output, text)
        except Exception as error:  # the weights are kept
            warnings.warn(f"{data.save.__qualname__} failed: {type(error).__name__}: {error}")
    if run_id is not None:
        from dpexp.tracking.registered_model import save_as_mlflow

        try:
            example = data.example() if isinstance(data, RawData) else next(_test_inputs(data))[:2].numpy()
            save_as_mlflow(output, example, output / MLFLOW_MODEL, __name__)
        except Exception as error:  # the user's model or data may not support it
            warnings.warn(f"MLflow gets no loadable model, only {WEIGHTS}: {type(error).__name__}: {error}")
    return about


def _test_inputs(data: pl.LightningDataModule) -> Iterator[Tensor]:
    """What the model gets of the test set, which is assumed to be public, batch by batch."""
    for batch in data.test_dataloader():
        batch = data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)
        if isinstance(batch, Mapping):
            raise ConfigError(f"its model takes one tensor, and a batch holds {', '.join(batch)}.")
        x, *_ = batch
        yield x.float() if x.is_floating_point() else x  # NumPy has no bfloat16


def resume(arguments: Sequence[str]) -> list[str]:
    """Prepares to continue the interrupted job of RUN: changes to the folder that it was started in.

    Returns:
        The arguments of the job that continues it.
    """
    run, options = run_and_options("resume", arguments, ["uri"])
    folder = Path(run)
    if not folder.is_dir():
        from dpexp.tracking.read import output_of

        folder = output_of(options.get("uri") or tracking_uri(), run)
    folder = folder.resolve()
    if not (folder / CHECKPOINT).exists():  # it remains until all rounds are done and the model is saved
        if (folder / "result.json").exists():
            raise ConfigError(f"the job in {folder} has finished; there is nothing to resume.")
        raise ConfigError(
            f"{folder} holds no checkpoint: the job ended before its first one, or was killed without "
            "checkpoint.every_n_rounds. The rounds of its ledger are spent; start it again in another folder."
        )
    hydra = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_text())["hydra"]
    task = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text())
    os.chdir(hydra["runtime"]["cwd"])
    sources = [s["path"] for s in hydra["runtime"]["config_sources"] if s["provider"] == "command-line"]
    flags = [f"--config-dir={path}" for path in sources]
    file = config_file(hydra)
    arguments = [*([str(file)] if file else []), *flags, *task, f"hydra.run.dir={folder}", "checkpoint.resume=true"]
    return as_overrides(with_config_file(arguments))


def check_resumable(cfg: DictConfig, output: Path) -> None:
    """Refuses to resume without a readable checkpoint, or with another configuration than before."""
    if not (output / CHECKPOINT).exists():
        raise ConfigError(f"checkpoint.resume=true needs the checkpoint {output}/last.ckpt, which does not exist.")
    try:
        rounds_done(output / CHECKPOINT)
    except Exception as error:  # torch raises many types for a damaged file
        raise ConfigError(
            f"the checkpoint {output}/last.ckpt cannot be read ({in_one_line(error)[:200]}): it is damaged; "
            "the rounds of the ledger are spent, so start the job again in another folder."
        ) from error
    before: Any = yaml.safe_load((output / "config.yaml").read_text())
    former, uri = before["tracking"]["uri"], cfg.tracking.uri and without_passwords(cfg.tracking.uri)
    if cfg.data.id is not None and former is not None and uri != former:
        raise ConfigError(
            f"tracking.uri={uri or 'null'}: {former} would not know that the job in {output} releases more of data.id="
            f"{cfg.data.id}; resume it with its former tracking."
        )
    now: Any = OmegaConf.to_container(cfg, resolve=True)
    changed = [key for key in {**before, **now} if key not in _MAY_DIFFER and before.get(key) != now.get(key)]
    if changed:
        raise ConfigError(
            f"{changed[0]}={now.get(changed[0])} was {before.get(changed[0])} when the checkpoint in {output} was "
            "made; resume the job with its former configuration."
        )


def rounds_done(checkpoint: Path) -> int:
    """The number of rounds that a job had done when the checkpoint was made."""
    return int(privacy_state(checkpoint).get("completed", 0))


def privacy_state(checkpoint: Path) -> dict[str, Any]:
    """`PrivateTraining.state_dict` in a checkpoint; empty if the job is not private."""
    states = torch.load(checkpoint, map_location="cpu", weights_only=False, mmap=True)["callbacks"]
    found: dict[str, Any] = states.get(PrivacyCallback.__name__, {})
    return found
