"""Initial weights of a job: whether they were trained on the job's own records."""

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

MODEL_ARGUMENT = object()
_NOT_OF_RECORDS = {"batch_size", "workers", "num_workers", "users"}  # options of data modules that change no record


def weights_of(cfg: DictConfig) -> Any:
    """The file with initial weights, or None; `MODEL_ARGUMENT` if `weights` is an argument of the model's own."""
    weights = cfg.model.get("weights")
    if isinstance(weights, str) and weights.endswith(".safetensors"):
        return Path(weights).expanduser()
    return None if weights is None else MODEL_ARGUMENT


def refuse_non_private_weights(cfg: DictConfig) -> None:
    """Refuses weights that come, perhaps through other files, from a training on this job's records without privacy."""
    for metadata in _initial_weights(cfg):
        if data_fingerprint(cfg) in _exposed_data(metadata):
            raise ConfigError(
                f"the weights {metadata['path']} come from a training without privacy on the records of this job's "
                "data.module; use weights trained on public data, or by a private job (whose ε is then spent as well)."
            )
    for spent in spent_before(metadata_of(cfg)):
        warnings.warn(f"the initial weights were trained on the same records, which costs {spent} in addition")


def spent_before(origin: Mapping[str, str]) -> list[str]:
    """(ε, δ) of the earlier private trainings on the same records that a job's initial weights come from."""
    before = (one.split("/") for one in origin["spent"].split())
    return [f"ε = {epsilon}, δ = {delta}" for data, epsilon, delta, _ in before if data == origin["data"]]


def metadata_of(cfg: DictConfig) -> dict[str, str]:
    """The metadata about records for a job's own weights file.

    To be called when the job starts: the files with its initial weights may be others when it ends."""
    before = [*_initial_weights(cfg)]
    tells_of = sorted({one for metadata in before for one in _exposed_data(metadata)})
    spent = sorted({one for metadata in before for one in _spent(metadata) if one.count("/") == 3})
    own = {"data": data_fingerprint(cfg), "job": secrets.token_hex(8)}
    return own | {"tells_of": " ".join(tells_of), "spent": " ".join(spent)}


def data_fingerprint(cfg: DictConfig) -> str:
    """Equal for jobs on the same records, as far as their configurations show."""
    module: Any = OmegaConf.to_container(cfg.data.module, resolve=True)
    while isinstance(module.get("of"), dict):  # features of those records
        module = module["of"]
    module = {key: value for key, value in module.items() if key not in _NOT_OF_RECORDS}
    return hashlib.sha256(json.dumps(module, sort_keys=True).encode()).hexdigest()[:16]


def _initial_weights(cfg: DictConfig) -> Iterator[dict[str, str]]:
    """The metadata of all weights files that the configuration of model and data names anywhere."""
    for text in {*_texts([OmegaConf.to_container(part, resolve=True) for part in (cfg.model, cfg.data.module)])}:
        with suppress(ConfigError, OSError, ValueError, RuntimeError):  # a text that names no weights file
            if (path := Path(text).expanduser()).is_file():
                yield {"path": text} | read_metadata(path)


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _texts(child)


def _exposed_data(metadata: Mapping[str, str]) -> set[str]:
    """Fingerprints of the data that a file's weights were trained on without privacy."""
    own = {metadata["data"]} if metadata.get("private") == "False" and "data" in metadata else set()
    return own | set(metadata.get("tells_of", "").split())


def _spent(metadata: Mapping[str, str]) -> set[str]:
    """The cost of the private trainings that a file's weights come from, each as fingerprint/ε/δ/job."""
    keys = ("data", "epsilon", "delta", "job")
    own = {"/".join(metadata[key] for key in keys)} if {*keys} <= {*metadata} else set()
    return own | set(metadata.get("spent", "").split())
