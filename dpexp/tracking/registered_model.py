"""A trained model in MLflow's format, loaded by `mlflow.pyfunc`, and in its model registry."""

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.models import Model

from dpexp.errors import ConfigError
from dpexp.tracking.provenance import without_passwords
from dpexp.tracking.record import card_of

_REQUIREMENTS = ("dpexp", "torch", "pytorch-lightning", "numpy")


def save_as_mlflow(job: Path, example: Any, folder: Path, loader: str) -> None:
    """Writes a model folder in MLflow's format, without a server. Where it is loaded, dpexp is needed.

    Args:
        job: the folder of the finished job.
        example: two public inputs: an array, or for inputs as users have them a table.
        loader: the module whose `_load_pyfunc` loads a job's folder.
    """
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as files, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shutil.copy(job / "weights.safetensors", files)
        (Path(files) / "config.yaml").write_text(without_passwords((job / "config.yaml").read_text()))
        mlflow.pyfunc.save_model(
            str(folder), loader_module=loader, data_path=files, input_example=example,
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in _REQUIREMENTS],
        )  # fmt: skip


def send_model(
    client: MlflowClient, run_id: str, folder: Path, rounds: int, tags: Mapping[str, str], name: str | None
) -> None:
    """Logs a model folder as a model of a run, and registers it as a version of `name`, if given."""
    run = client.get_run(run_id)
    card = card_of(folder.parent)
    _delete_earlier(client, run_id, run.info.experiment_id)
    logged = client.create_logged_model(
        run.info.experiment_id, "model", source_run_id=run_id, tags={**tags, "mlflow.note.content": card}
    )
    model = Model.load(str(folder))
    model.run_id, model.model_id = run_id, logged.model_id
    model.save(str(folder / "MLmodel"))
    client.log_model_artifacts(logged.model_id, str(folder))
    client.finalize_logged_model(logged.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, rounds)])
    if name is not None:
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = client.create_model_version(
            name, logged.artifact_location, run_id, tags=dict(tags), description=card, model_id=logged.model_id
        )
        known = [{"name": name, "version": version.version}]
        client.set_logged_model_tags(logged.model_id, {"mlflow.modelVersions": json.dumps(known)})


def _delete_earlier(client: MlflowClient, run_id: str, experiment_id: str) -> None:
    """Deletes models of a run whose sending was cut off, or after which its job went on; not what is registered."""
    for model in client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'"):
        if "mlflow.modelVersions" not in model.tags:
            client.delete_logged_model(model.model_id)


def check_name(client: MlflowClient, name: str) -> None:
    """Refuses a name that the model registry refuses."""
    try:
        client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise ConfigError(f"register={name} cannot be used: {' '.join(str(error).split())}") from error
