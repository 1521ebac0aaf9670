"""`python -m dpexp resume RUN` goes on with a training that was interrupted, in the same folder, ledger and MLflow run.

RUN is a job's folder, or the MLflow run id of a job of this machine. Options: uri=sqlite:///outputs/mlflow.db.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from dpexp.commands.arguments import Arguments
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError

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
            "checkpoint.every. What its ledger says is spent; start it anew in another folder."
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
    before.setdefault("noise", {"kind": "gaussian"})  # of a job that is older than the choice
    before.setdefault("clip", {"_target_": "dpexp.privacy.clipping.Abadi"})
    before.setdefault("norms", "exact")
    before["data"].setdefault("class_weights", None)
    before.setdefault("metrics", {"release": None})
    before.setdefault("batchnorm", None)
    before.setdefault("prepare", None)
    before.setdefault("tuning", {"_target_": "dpexp.training.tuning.All", "head": None})
    if "weights" in cfg.model:
        before["model"].setdefault("weights", None)
    before.setdefault("augment", {"_target_": None, "multiplicity": 1})
    before["trainer"] = {"devices": 1, "num_nodes": 1, "strategy": "auto"} | before["trainer"]
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
