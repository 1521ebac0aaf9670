"""`python -m dpexp resume RUN` goes on with a training that was interrupted, in the same folder, ledger and MLflow run.

RUN is a job's folder, or the MLflow run id of a job of this machine. Options: uri=sqlite:///outputs/mlflow.db.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from yaml import YAMLError

from dpexp.commands.arguments import Arguments
from dpexp.commands.build import module_of
from dpexp.commands.initial_weights import spent_before
from dpexp.commands.validate import check
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.reporting.model_card import card
from dpexp.training.classifier import Classifier
from dpexp.training.pretrained import load_weights, non_tensor_state, save_to_temporary_file, save_weights

WEIGHTS, CARD, OF_MLFLOW = "weights.safetensors", "card.md", "mlflow_model"
RESERVED = "weights.reserved"


class NotKept(Exception):
    """The weights could not be written into the job's folder.

    Attributes:
        path: where they are instead.
    """

    def __init__(self, why: Exception, path: Path) -> None:
        super().__init__(f"{type(why).__name__}: {' '.join(str(why).split())[:300]}")
        self.path = path


def keep(
    cfg: DictConfig,
    plan: PrivacyPlan | None,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    result: dict[str, Any],
    output: Path,
    run_id: str | None,
    origin: dict[str, str],
) -> dict[str, str]:
    """Writes weights, card, and for a run of MLflow's also its own form of the model, into the job's folder.

    Args:
        origin: see `ancestry.heading`.

    Returns:
        What tells the model from others in a registry.
    """
    for path in (output / WEIGHTS, output / CARD):
        path.unlink(missing_ok=True)  # of a training that ended early, and was gone on with
    shutil.rmtree(output / OF_MLFLOW, ignore_errors=True)
    model = bare(module)
    about = {"private": str(result["private"]), "rounds": str(result["rounds"])}
    if "epsilon" in result:
        accountant, epsilon = next(iter(result["epsilon"].items()))
        about |= {"epsilon": repr(epsilon), "delta": repr(result["delta"]), "adjacency": result["adjacency"]}
        about |= {"accountant": accountant}
    (output / RESERVED).unlink(missing_ok=True)
    try:
        save_weights(model, output / WEIGHTS, about | origin)
    except Exception as error:
        (output / WEIGHTS).unlink(missing_ok=True)
        raise NotKept(error, save_to_temporary_file(model, about | origin)) from error
    names = {name: str(HydraConfig.get().runtime.choices.get(name)) for name in ("data", "model")}
    names["schedule"] = ", ".join(f"{key}: {kind}" for key, kind in cfg.schedule.items() if kind is not None)
    lost = non_tensor_state(model)
    if lost:
        warnings.warn(f"{WEIGHTS} cannot hold {', '.join(lost)}, no tensors: a model made from it begins anew there")
    text = card(names, result, plan, run_id or str(output), lost, spent_before(origin))
    (output / CARD).write_text(text)
    if run_id is None:
        return about
    from dpexp.tracking.registered_model import save_as_mlflow

    try:
        save_as_mlflow(model.eval(), _example(data), output / OF_MLFLOW)
    except Exception as error:  # whatever the user's model or data do not offer
        warnings.warn(f"MLflow gets no model that it can load, only {WEIGHTS}: {type(error).__name__}: {error}")
    return about


def bare(module: pl.LightningModule) -> nn.Module:
    """What predicts: the classifier's own model, or the whole of another LightningModule."""
    return module.model if isinstance(module, Classifier) else module


def load(run: str | Path, uri: str | None = None) -> nn.Module:
    """The trained model of a finished job, in evaluation mode.

    A model is made again by what its configuration names, which may be any code that is installed: load only what you
    trust, from folders and from servers. (`weights.safetensors` alone is numbers, and runs nothing.)

    Args:
        run: the job's folder, or its MLflow run id.
        uri: of the tracking server that has the run; by default $MLFLOW_TRACKING_URI, or outputs/mlflow.db here.

    Raises:
        ConfigError: there is no such run, or it kept no model.
    """
    with located(run, uri) as folder:
        cfg = configuration(folder)
        return bare(restored(cfg, folder, trainer_of(cfg))).eval()


def configuration(folder: Path) -> DictConfig:
    """A job's.

    Raises:
        ConfigError: it is none.
    """
    path = folder / "config.yaml"
    try:
        cfg = OmegaConf.load(path)
        assert isinstance(cfg, DictConfig)
        check(cfg)
    except (YAMLError, OmegaConfBaseException, AssertionError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} is not the configuration of a job: {' '.join(str(error).split())[:200]}") from error
    return cfg


def trainer_of(cfg: DictConfig) -> pl.Trainer:
    """A Trainer that computes as the job's did, on the CPU.

    Raises:
        ConfigError: the CPU cannot compute at that precision.
    """
    try:
        return pl.Trainer(
            accelerator="cpu", precision=cfg.trainer.precision, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
    except Exception as error:  # Lightning raises many types for what is always a wrong value
        raise ConfigError(f"trainer.precision={cfg.trainer.precision} cannot be had on the CPU: {error}") from error


def restored(cfg: DictConfig, folder: Path, trainer: pl.Trainer) -> pl.LightningModule:
    """A job's module with the trained weights, in the precision in which it was trained. Runs code: see `load`."""
    pl.seed_everything(cfg.seed, verbose=False)  # a model may hold what is drawn when it is made
    module = trainer.precision_plugin.convert_module(module_of(cfg, begun=False))
    assert isinstance(module, pl.LightningModule)
    load_weights(bare(module), folder / WEIGHTS)
    return module


@contextmanager
def located(run: str | Path, uri: str | None) -> Iterator[Path]:
    """A folder with the configuration and the weights of a run.

    Raises:
        ConfigError: there is no such run, or it kept no model.
    """
    path = Path(run)
    if path.is_dir():
        if not (path / WEIGHTS).exists() or not (path / "config.yaml").exists():
            raise ConfigError(f"{run} holds no {WEIGHTS}: only a job that trained to its end keeps a model.")
        yield path
        return
    from dpexp.tracking.read import downloaded_files

    uri = uri or tracking_uri()
    with downloaded_files(uri, str(run), ["config.yaml", WEIGHTS]) as folder:
        if not (folder / WEIGHTS).exists():
            raise ConfigError(f"{run} is no folder, and no run of {uri} that kept a model.")
        yield folder


def _example(data: pl.LightningDataModule) -> Tensor:
    """Two records of the test set, which is taken as public."""
    batch = next(iter(data.test_dataloader()))
    if isinstance(batch, Mapping):
        raise ConfigError(f"it takes one tensor, and a batch holds {', '.join(batch)}.")
    x, *_ = batch
    return x[:2]


_MAY_DIFFER = ("checkpoint", "rounds", "tracking")


def resume(arguments: Sequence[str], job: Callable[[], None]) -> None:
    """Runs the job of RUN again with what it was given, from its checkpoint on.

    Raises:
        ConfigError: there is no such job, or nothing to go on from.
    """
    given = Arguments.parsed("resume", __doc__, arguments, {"uri": None})
    if given is None:
        return
    folder = _folder(given).resolve()
    if not (folder / "last.ckpt").exists():  # it stays until all rounds are done and the model is kept
        if (folder / "result.json").exists():
            raise ConfigError(f"the job in {folder} has finished; there is nothing to resume.")
        raise ConfigError(
            f"{folder} holds no checkpoint: the job ended before its first one, or killed outright without "
            "checkpoint.every_n_rounds. What its ledger says is spent; start it anew in another folder."
        )
    hydra = yaml.safe_load((folder / ".hydra" / "hydra.yaml").read_text())["hydra"]
    task = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text())
    sources = [s["path"] for s in hydra["runtime"]["config_sources"] if s["provider"] == "command-line"]
    os.chdir(hydra["runtime"]["cwd"])
    flags = [f"--config-dir={path}" for path in sources]
    sys.argv[1:] = [*flags, *task, f"hydra.run.dir={folder}", "checkpoint.resume=true"]
    job()


def check_resumable(cfg: DictConfig, output: Path) -> None:
    """Raises:
    ConfigError: there is no checkpoint, or the job was configured otherwise when it was made.
    """
    if not (output / "last.ckpt").exists():
        raise ConfigError(f"checkpoint.resume=true needs the checkpoint {output}/last.ckpt, which does not exist.")
    try:
        completed(output / "last.ckpt")
    except Exception as error:  # torch raises many types for what is always a damaged file
        raise ConfigError(
            f"the checkpoint {output}/last.ckpt cannot be read ({' '.join(str(error).split())[:200]}): it is damaged; "
            "what the ledger beside it says is spent, so start the job anew in another folder."
        ) from error
    before: Any = yaml.safe_load((output / "config.yaml").read_text())
    if cfg.data.id is not None and before["tracking"]["uri"] is not None and cfg.tracking.uri is None:
        raise ConfigError(
            f"tracking=none: nobody would know that the job in {output} releases more of data.id={cfg.data.id}; resume "
            "it with the tracking that it had."
        )
    now: Any = OmegaConf.to_container(cfg, resolve=True)
    changed = [key for key in {**before, **now} if key not in _MAY_DIFFER and before.get(key) != now.get(key)]
    if changed:
        raise ConfigError(
            f"{changed[0]}={now.get(changed[0])} was {before.get(changed[0])} when the checkpoint in {output} was "
            "made; resume the job as it was."
        )


def completed(checkpoint: Path) -> int:
    """How many rounds of its plan a job had done when the checkpoint was made."""
    import torch

    from dpexp.privacy.callback import PrivacyCallback

    states = torch.load(checkpoint, map_location="cpu", weights_only=False, mmap=True)["callbacks"]
    return next((int(state["completed"]) for key, state in states.items() if key == PrivacyCallback.__name__), 0)


def _folder(given: Arguments) -> Path:
    path = Path(given.run)
    if path.is_dir():
        return path
    from dpexp.tracking.read import output_of

    return output_of(given.options["uri"] or tracking_uri(), given.run)
