"""The typed schema of a configuration, and the resolvers of its YAML. Imports neither torch nor mlflow."""

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpexp.accounting.ledger.events import Part
from dpexp.errors import ConfigError, positive_integer
from dpexp.privacy.plan.options import Schedules

_CHECKOUT = Path(__file__).resolve().parent.parent
CONF = _CHECKOUT / "conf" if (_CHECKOUT / "pyproject.toml").exists() else Path(__file__).parent / "conf"
BY_GROUP = ("clip_norm", "mechanism", "clip_rule")  # sections that may have an option for each group
COMMAND = "DPEXP_COMMAND"  # environment variable with the command line, for the processes of every launcher


@dataclass
class Data:
    """The data set and its public constants; comments in conf/ and docs/options.md say what each key means.

    `module` is the `_target_` of a LightningDataModule, with its arguments."""

    id: str | None = None
    n: int = MISSING
    users: int | None = None
    shape: Any = None
    classes: int | None = None
    class_weights: Any = None
    pad_to: list[int] | None = None
    root: str | None = None
    path: str | None = None
    test_path: str | None = None
    schema: str | None = None
    target: str | None = None
    person: str | None = None
    test_hash: Any = None
    part: Any = None
    input: str | None = None
    label: str | None = None
    class_names: Any = None
    unsafe: bool = False
    unit: str | None = None
    length: int | None = None
    text: str | None = None
    encoder: str | None = None
    prompt: str | None = None
    messages: str | None = None
    chat_template: str | None = None
    user: str | None = None
    prompts: list[Any] | None = None
    features_of: Any = None
    cache: str = "${cwd:}/outputs/features"
    module: dict[str, Any] = MISSING


@dataclass
class Privacy:
    enabled: bool = True
    epsilon: float | None = None
    max_advantage: float | None = None
    max_tpr_at_fpr: Any = None
    noise_multiplier: float | None = None
    delta: float = MISSING
    adjacency: str | None = None
    noise_seed: int | None = None
    budget: Any = None


@dataclass
class PrivateMetrics:
    release: Any = None


@dataclass
class Accountant:
    names: list[str] = MISSING


@dataclass
class Trainer:
    accelerator: str = "cpu"
    precision: str = "32-true"
    max_physical_batch_size: Any = MISSING
    compile: Any = "auto"
    memory: str = "usual"
    num_workers: int = 0
    threads: int | None = None
    num_evaluations: int = 10
    devices: int = 1
    num_nodes: int = 1
    strategy: str = "auto"


@dataclass
class Checkpoint:
    every_n_rounds: int | None = None
    resume: bool = False


@dataclass
class Audit:
    num_canaries: int = 4000
    deltas: list[float] = MISSING
    confidence: float = 0.95


@dataclass
class Tracking:
    uri: str | None = None
    artifacts: str | None = None
    experiment: str = "dpexp"
    run_name: str | None = None


@dataclass
class Config:
    """The configuration. The arguments of `_target_` sections (model, optimizer, …) are checked by their target."""

    data: Data = field(default_factory=Data)
    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    callbacks: Any = None
    logger: Any = None
    preprocessing: Any = None
    augment: Any = None
    fine_tuning: Any = None
    audit: Audit | None = None
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    rounds: int | None = None
    check: bool = False
    debug: bool = False
    verbose: bool = False
    group: Any = None
    clip_norm: Any = None
    alpha: Any = None
    mechanism: Any = None
    clip_rule: Any = None
    allocation: Any = None
    noise: Any = None
    privacy_unit: Any = None
    private_metrics: PrivateMetrics = field(default_factory=PrivateMetrics)
    batchnorm: Any = None
    sampling: Any = None
    accountant: Accountant = field(default_factory=Accountant)
    trainer: Trainer = field(default_factory=Trainer)
    tracking: Tracking = field(default_factory=Tracking)
    privacy: Privacy = field(default_factory=Privacy)
    schedule: Schedules = MISSING
    calibrate: str = "noise_multiplier"
    train: bool = True
    objective: str = "test_accuracy"
    draw: int | None = None
    register: str | None = None
    seed: int = 0
    vectors: str = "layer"
    diagnostics: str = "none"


def register() -> None:
    """Registers the schema, and the resolvers, which may return lists and dictionaries, with Hydra and OmegaConf."""
    ConfigStore.instance().store("base_config", OmegaConf.structured(Config, flags={"allow_objects": True}))
    resolvers: dict[str, Any] = {
        "unless": _unless, "finite": lambda value: value is None or math.isfinite(value), "cwd": os.getcwd,
        "tracking_uri": tracking_uri, "artifact_folder": _artifact_folder, "resolved": _resolved, "table": _table,
        "class_names": _class_names, "class_count": _class_count, "batch_size_for": _batch_size_for,
        "image_shape": _image_shape, "power_of_ten_below": _power_of_ten_below, "labels_in": _labels_in,
        "hidden_size": _hidden_size,
    }  # fmt: skip
    for name, resolver in resolvers.items():
        reads_texts = name in ("labels_in", "hidden_size")  # once for a configuration, not for each of its values
        OmegaConf.register_new_resolver(name, resolver, replace=True, use_cache=reads_texts)


def tracking_uri() -> str:
    """The default tracking URI."""
    here = os.getcwd()
    quoted = here.replace("%", "%25").replace("?", "%3F")
    # For an address without the driver, MLflow makes a folder with the quoted name, too
    scheme = "sqlite" if quoted == here else "sqlite+pysqlite"
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{scheme}:///{quoted}/outputs/mlflow.db"


def _artifact_folder(uri: str | None, folder: str) -> str | None:
    """The URI of `folder` for a database in a file; None for a server, which chooses the place of artifacts itself."""
    return Path(folder).as_uri() if uri is None or uri.startswith("sqlite") else None


def _unless(*values: Any) -> Any:
    """The last value, a default, if all alternatives before it are None; else None."""
    *others, default = values
    return default if all(other is None for other in others) else None


def _resolved(path: str | None) -> str | None:
    """A whole path, in the form of Unicode that a data set's name must have; macOS gives another."""
    return path and normalize("NFC", str(Path(path).resolve()))


def part_of(part: Any, data_id: str | None) -> Part | None:
    """The part of the data set that `data.part` describes; None: all records."""
    if part is None:
        return None
    if not isinstance(part, Mapping) or {*part} != {"column", "low", "high"} or not isinstance(part["column"], str):
        raise ConfigError(f"data.part={part} must be {{column: NAME, low: 0, high: 0.5}}, a range of its hash.")
    return Part(f"sha256 of {part['column']!r} in data.id={data_id!r}", part["low"], part["high"])


def _table(fact: str, schema: str, target: str, person: str, test_path: str | None, part: Any = None) -> Any:
    """What the schema of a table says; see `tables.facts_of`. Of a part, how many rows or users to expect."""
    from dpexp.training.data.tables import facts_of  # imports torch

    found, used = facts_of(schema, target, person, test_path)[fact], part_of(part, None)
    return found if used is None or found is None else max(1, round(found * (used.high - used.low)))


def _class_names(*source: str | None) -> list[str]:
    """The public names of classes; see `images.class_names`."""
    from dpexp.training.data.images import class_names  # imports torch

    return class_names(*source)


def _labels_in(test_path: str, label: str) -> list[str]:
    """The public names of classes of texts; see `text_features.labels_in`."""
    from dpexp.training.data.text_features import labels_in  # imports torch

    return labels_in(test_path, label)


def _hidden_size(encoder: str) -> int:
    from dpexp.training.language import hidden_size  # imports torch

    return hidden_size(encoder)


def _class_count(names: Any) -> int:
    if names is None or len({*names}) < max(2, len(names)):
        raise ConfigError(f"data.class_names={names} must be at least two different names, as [cat, dog].")
    return len(names)


def _batch_size_for(n: int, users: int | None, unit: Any, evenly: bool = False) -> float:
    """The default number of examples in a sample: those of a quarter of the units, at most 512; `evenly`: or so."""
    examples = positive_integer("privacy_unit.size", unit.get("size", 1))
    units = users if users and "max_examples" in unit else n / examples
    size = max(1, min(512, units // 4))
    return (math.ceil(units / max(1, round(units / size))) if evenly else size) * max(n, 1) / max(units, 1)


def _image_shape(n: int) -> list[int]:
    """The default shape of images: that of a small model, where few records leave much noise for each weight."""
    return [3, 32, 32] if n >= 10_000 else [3, 8, 8]


def refusal_of_interpolation(error: OmegaConfBaseException) -> str:
    """What is wrong with a value ${…}, if that is the error: the message of a ConfigError that a resolver raised, of
    which OmegaConf keeps only the text, or a key that is not there, with the options that have it; else empty."""
    said = str(error).splitlines()[0]
    if missing := re.match("Interpolation key '(.+)' not found", said):
        choice = " or ".join([*options_by_key().get(missing[1], ()), "another value"])
        return f"{error.full_key or 'a value'}: there is no {missing[1]}; give {choice}."
    return said.partition("ConfigError raised while resolving interpolation: ")[2]


@cache
def options_by_key() -> dict[str, list[str]]:
    """section.key -> the options that have it, as group=option."""
    found = defaultdict(list)
    for path in [CONF / "config.yaml", *sorted(CONF.glob("*/*.yaml"))]:
        group, content = path.parent.name, yaml.safe_load(path.read_text()) or {}
        is_whole = path.parent == CONF or group in content
        for section, values in (content if is_whole else {group: content}).items():
            if isinstance(values, dict) and group not in ("experiment", "sweep"):
                for key in values:
                    found[f"{section}.{key}"].append(f"{group}={path.stem}")
    return found


def _power_of_ten_below(n: int) -> float:
    """The largest power of ten below 1/n."""
    return float(f"1e-{math.floor(math.log10(max(n, 1))) + 1}")
