"""Reads earlier runs from MLflow."""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException
from pandas import DataFrame

from dpexp.accounting.risk import FIGURES
from dpexp.errors import ConfigError
from dpexp.tracking.client import database
from dpexp.tracking.job_folder import (
    ERROR_TAG,
    METRICS,
    OUTPUT_TAG,
    RECORD,
    RUN,
    TRIED_PREFIX,
    metric_of,
    metrics_by_step,
    read_json,
    value_of,
)
from dpexp.tracking.provenance import one_line, without_passwords


@contextmanager
def pulled(uri: str, run_id: str, needed: str, *others: str) -> Iterator[Path]:
    """A temporary folder with files of a run, which is read as that of its job.

    Args:
        needed: a file without which the run is refused.
        others: those that it may have; patterns, too.
    """
    client, _ = _run(uri, run_id)
    with tempfile.TemporaryDirectory() as folder:
        with readable(uri):
            _download(client, run_id, Path(folder), (needed, *others))
        if not (Path(folder) / needed).exists():
            raise ConfigError(f"there is no {needed} among the artifacts of the MLflow run {run_id}.")
        yield Path(folder)


@contextmanager
def pulled_sweep(uri: str, run_id: str, *names: str) -> Iterator[Path]:
    """A temporary folder with files of a sweep's parent run, and in it a folder with those of each trial."""
    client, parent = _run(uri, run_id)
    with tempfile.TemporaryDirectory() as folder, readable(uri):
        _download(client, run_id, Path(folder), names)
        for number, trial in enumerate(_children(client, parent)):
            own = Path(folder) / str(number)
            own.mkdir()
            _download(client, trial.info.run_id, own, names)
        yield Path(folder)


def is_sweep(uri: str, run_id: str) -> bool:
    """Whether a run is the parent of a sweep's trials."""
    _, run = _run(uri, run_id)
    return "dpexp.sweep_hash" in run.data.tags


@contextmanager
def folder_of(client: MlflowClient, run: Run, *names: str) -> Iterator[Path]:
    """The folder of a run's job, if one of the named files is in it; else a temporary one with the run's own."""
    own = own_folder(run)
    if own is not None and any((own / name).exists() for name in names):
        yield own
        return
    with tempfile.TemporaryDirectory() as folder:
        _download(client, run.info.run_id, Path(folder), names)
        yield Path(folder)


def own_folder(run: Run) -> Path | None:
    """The folder of a run's job, if it is on this machine, and is not that of another run by now."""
    folder = Path(run.data.tags.get(OUTPUT_TAG, ""))
    if OUTPUT_TAG not in run.data.tags or not folder.is_dir():
        return None
    named = folder / RUN
    return folder if not named.exists() or named.read_text() == run.info.run_id else None


def _download(client: MlflowClient, run_id: str, folder: Path, patterns: Sequence[str]) -> None:
    for name in sorted(artifact.path for artifact in client.list_artifacts(run_id)):
        if any(fnmatch(name, pattern) for pattern in patterns):
            client.download_artifacts(run_id, name, str(folder))


def output_of(uri: str, run_id: str) -> Path:
    """The folder of a run's job on this machine."""
    _, run = _run(uri, run_id)
    folder = run.data.tags.get(OUTPUT_TAG, "")
    if not folder or not Path(folder).is_dir():
        raise ConfigError(f"the folder {folder} of the MLflow run {run_id} is not on this machine.")
    return Path(folder)


PAGE = 1000  # runs per request
PARENT_RUN = "mlflow.parentRunId"  # a tag
_NUMBERS = (
    "epsilon", "epsilon_planned", "test_accuracy", "test_auc", "test_loss", "noise_multiplier", "sampling_rate",
    "knob_value", "delta", *FIGURES,
)  # fmt: skip
_TAGS = (
    "data", "model", "group", "mechanism", "clip_norm", "alpha", "clip_rule", "allocation", "sampling", "adjacency",
    "privacy_unit",
)  # fmt: skip
# Parameters in which repetitions of a configuration differ. Not `draw`: private selection covers a single draw, never
# a mean of several. The rounds and the plan follow from the rest.
_NOT_CONFIGURATION = ("seed", "objective", "privacy.noise_seed", "rounds")
TRIAL = (
    "run_id", "parent_id", "trial", "name", "start", "status", "error", "private", *_TAGS, "configuration", "seed",
    "accountant", "knob", *_NUMBERS, "steps",
)  # fmt: skip


def trials(uri: str, sources: Sequence[str]) -> DataFrame:
    """The runs of the sources, the best test accuracy first, without parent runs.

    Args:
        sources: names of experiments, ids of parent runs (which stand for their children) and of single runs.

    Returns:
        One row per run, with the columns TRIAL. `configuration` is equal for runs that differ only in the seed and in
        what cannot change the result (tracking, trainer); `start` is in milliseconds; `knob` is the calibrated
        parameter; `steps` has the metrics of each round that logged some. Missing numbers are NaN.

    Raises:
        ConfigError: there is no such store, or a source is neither an experiment nor a run.
    """
    client = existing(uri)
    with readable(uri):
        runs = {run.info.run_id: run for source in sources for run in _named(client, source, uri)}
        parents = {run.data.tags.get(PARENT_RUN) for run in runs.values()}
        parents |= {run_id for run_id, run in runs.items() if "dpexp.sweep_hash" in run.data.tags}
        rows = [_trial(client, run) for run_id, run in runs.items() if run_id not in parents]
    frame = DataFrame(rows, columns=list(TRIAL)).astype(dict.fromkeys(_NUMBERS, float))
    return frame.sort_values("test_accuracy", ascending=False, kind="stable", ignore_index=True)


def _run(uri: str, run_id: str) -> tuple[MlflowClient, Run]:
    try:
        client = existing(uri)
        return client, client.get_run(run_id)
    except (ConfigError, MlflowException) as error:
        store = without_passwords(uri)
        raise ConfigError(f"{run_id} is no file or folder here, and no run of {store}: {one_line(error)}") from error


def existing(uri: str) -> MlflowClient:
    """A client of an existing store: MLflow would create a missing SQLite file."""
    file = database(uri)
    if file is not None and not file.is_file():
        raise ConfigError(f"uri={uri} does not exist, so there are no runs to read; run a job, or name its store.")
    with readable(uri):
        return MlflowClient(tracking_uri=uri)


@contextmanager
def readable(uri: str) -> Iterator[None]:
    """Refuses a store of which MLflow cannot read something."""
    try:
        yield
    except (MlflowException, OSError) as error:
        raise ConfigError(f"uri={without_passwords(uri)} cannot be read: {one_line(error)}") from error


def _named(client: MlflowClient, source: str, uri: str) -> list[Run]:
    experiment = client.get_experiment_by_name(source)
    if experiment is not None:
        return list(search(client, [experiment.experiment_id]))
    try:
        run = client.get_run(source)
    except MlflowException as error:
        raise ConfigError(f"{source} is neither an experiment nor a run of {without_passwords(uri)}.") from error
    return _children(client, run) or [run]


def _children(client: MlflowClient, parent: Run) -> list[Run]:
    """The trials of a sweep, oldest first."""
    found = search(client, [parent.info.experiment_id], f"tags.`{PARENT_RUN}` = '{parent.info.run_id}'")
    return sorted(found, key=lambda run: (run.info.start_time, run.info.run_id))


def search(
    client: MlflowClient, experiments: list[str], condition: str = "", view: int = ViewType.ACTIVE_ONLY
) -> Iterator[Run]:  # fmt: skip
    """The runs of experiments that meet a condition, page by page."""
    token = None
    while True:
        page = client.search_runs(experiments, condition, view, PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _trial(client: MlflowClient, run: Run) -> dict[str, Any]:
    tags = run.data.tags
    with folder_of(client, run, RECORD, METRICS) as folder:
        # Without a record, as of an earlier version: what MLflow has.
        given = read_json(folder / RECORD).get("configuration", run.data.params)
        steps = metrics_by_step(folder)
    metrics = {name: value for values in steps.values() for name, value in values.items()} or run.data.metrics
    knob = given.get("calibrate", "noise_multiplier")
    solved = any(name.startswith(TRIED_PREFIX) for name in metrics)
    return {
        "run_id": run.info.run_id,
        "parent_id": tags.get(PARENT_RUN),
        "trial": tags.get("dpexp.config_hash"),
        "name": run.info.run_name or run.info.run_id,
        "start": run.info.start_time,
        "status": run.info.status,
        "error": tags.get(ERROR_TAG, ""),
        "private": tags.get("dpexp.private", ""),
        **{name: tags.get(f"dpexp.{name}") for name in _TAGS},
        "configuration": _configuration(given),
        "seed": tags.get("dpexp.seed"),
        "accountant": json.loads(given.get("accountant.names", '["pld"]'))[0],
        "knob": knob,
        "knob_value": value_of(metrics, knob) if solved or metric_of(knob) == knob else None,
        "delta": given.get("privacy.delta"),
        **{name: value_of(metrics, name) for name in _NUMBERS if name not in ("knob_value", "delta")},
        "steps": steps,
    }


def _configuration(given: Mapping[str, str]) -> str:
    own = {
        key: value
        for key, value in given.items()
        if key not in _NOT_CONFIGURATION and not key.startswith(("tracking.", "trainer.", "plan."))
    }
    return json.dumps(own, sort_keys=True)
