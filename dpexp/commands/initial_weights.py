"""What the weights that a job begins from tell of its own records."""

import hashlib
import json
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpexp.errors import ConfigError
from dpexp.training.pretrained import read_metadata

ITS_OWN = object()


_OF_NO_DATA = {"batch_size", "workers", "num_workers", "users"}  # options by which the records stay the same


def weights_of(cfg: DictConfig) -> Any:
    """The file to begin from, or None; `ITS_OWN` where `weights` is an argument of the model's maker."""
    given = cfg.model.get("weights")
    if isinstance(given, str) and given.endswith(".safetensors"):
        return Path(given).expanduser()
    return None if given is None else ITS_OWN


def refuse_telling(cfg: DictConfig) -> None:
    """
    Raises:
        ConfigError: a file's weights come, perhaps by way of others, from a training on this job's records without
            privacy.
    """
    for said in _begun_from(cfg):
        if data_fingerprint(cfg) in _tells_of(said):
            raise ConfigError(
                f"the weights {said['path']} come from a training without privacy on the records of this job's "
                "data.module, which would be told by them; begin from public data, or from a private job (whose ε is "
                "spent besides)."
            )
    for spent in spent_before(heading(cfg)):
        warnings.warn(f"the weights that training begins from were trained on the same records, at {spent}, besides")


def spent_before(origin: Mapping[str, str]) -> list[str]:
    """(ε, δ) of the private trainings on the same records from which the weights come that a job begins from."""
    before = (one.split("/") for one in origin["spent"].split())
    return [f"ε = {epsilon}, δ = {delta}" for data, epsilon, delta, _ in before if data == origin["data"]]


def heading(cfg: DictConfig) -> dict[str, str]:
    """What the head of a job's own file of weights is to say of records; from the files that it begins from, which may
    be others when it ends."""
    before = [*_begun_from(cfg)]
    tells_of = sorted({one for said in before for one in _tells_of(said)})
    spent = sorted({one for said in before for one in _spent(said) if one.count("/") == 3})
    own = {"data": data_fingerprint(cfg), "job": secrets.token_hex(8)}
    return own | {"tells_of": " ".join(tells_of), "spent": " ".join(spent)}


def data_fingerprint(cfg: DictConfig) -> str:
    """The same for jobs on the same records, as far as their configurations tell."""
    told: Any = OmegaConf.to_container(cfg.data.module, resolve=True)
    while isinstance(told.get("of"), dict):  # features of those records
        told = told["of"]
    told = {key: value for key, value in told.items() if key not in _OF_NO_DATA}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _begun_from(cfg: DictConfig) -> Iterator[dict[str, str]]:
    """What is said by the heads of the files of weights that model and data are made from, wherever they are named."""
    for text in {*_texts([OmegaConf.to_container(part, resolve=True) for part in (cfg.model, cfg.data.module)])}:
        with suppress(ConfigError, OSError, ValueError, RuntimeError):  # of texts that name no file
            if (path := Path(text).expanduser()).is_file():
                yield {"path": text} | read_metadata(path)


def _texts(thing: Any) -> Iterator[str]:
    if isinstance(thing, str):
        yield thing
    elif isinstance(thing, dict | list):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from _texts(part)


def _tells_of(said: Mapping[str, str]) -> set[str]:
    """Fingerprints of records that a file's weights tell of, without an ε."""
    own = {said["data"]} if said.get("private") == "False" and "data" in said else set()
    return own | set(said.get("tells_of", "").split())


def _spent(said: Mapping[str, str]) -> set[str]:
    """What private jobs have spent on records that they tell of: fingerprint/ε/δ/job."""
    keys = ("data", "epsilon", "delta", "job")
    own = {"/".join(said[key] for key in keys)} if {*keys} <= {*said} else set()
    return own | set(said.get("spent", "").split())
