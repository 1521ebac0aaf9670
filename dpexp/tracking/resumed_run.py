"""The run of a job that is gone on with."""

import tempfile
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from dpexp.accounting.ledger import holds
from dpexp.errors import ConfigError
from dpexp.tracking.client import ERROR, OUTPUT
from dpexp.tracking.job_folder import RUN
from dpexp.tracking.provenance import origin_resumed

_LEDGER = "ledger.jsonl"


def reopened(client: MlflowClient, output: Path) -> Run | None:
    """The run of the job that is gone on with; None if it was not tracked, or elsewhere, or is another folder's, of
    which this one is a copy: both release from now on, so each has a run of its own.

    Raises:
        ConfigError: the folder's ledger is an earlier copy of the run's.
    """
    try:
        run = client.get_run((output / RUN).read_text())
        folder = Path(run.data.tags.get(OUTPUT, output))
        if folder.exists() and not folder.samefile(output):
            return None
        _refuse_older(client, run.info.run_id, output)
        client.update_run(run.info.run_id, status="RUNNING")
        for tag, value in origin_resumed().items():
            client.set_tag(run.info.run_id, tag, value)
        if ERROR in run.data.tags:
            client.delete_tag(run.info.run_id, ERROR)
    except (OSError, MlflowException):
        return None
    return run


def _refuse_older(client: MlflowClient, run_id: str, output: Path) -> None:
    """Raises:
    ConfigError: a run has sent its store rounds that its folder's ledger lacks, which is an earlier copy.
    """
    with tempfile.TemporaryDirectory() as copied:
        for artifact in client.list_artifacts(run_id):
            if artifact.path == _LEDGER:
                client.download_artifacts(run_id, _LEDGER, copied)
                if not holds((output / _LEDGER).read_bytes(), (Path(copied) / _LEDGER).read_bytes()):
                    raise ConfigError(
                        f"{output / _LEDGER} lacks rounds that the ledger of its run {run_id} in MLflow holds, as an "
                        "earlier copy does; put the run's artifact in its place, so that all of them count."
                    )
