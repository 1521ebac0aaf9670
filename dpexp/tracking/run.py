"""A training job's run in MLflow, which mirrors its record while it trains (see `dpexp.tracking`)."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run, RunTag
from mlflow.exceptions import MlflowException

from dpexp.accounting.ledger import Ledger
from dpexp.config import Tracking
from dpexp.errors import ConfigError
from dpexp.reporting.terminal import print_missed
from dpexp.tracking.client import address, create_run, end_dead_runs, open_store
from dpexp.tracking.job_folder import ERROR_TAG, RUN
from dpexp.tracking.mirror import Mirror, begin_job_run, conclude_job_run, create_job_run, earlier_run
from dpexp.tracking.provenance import one_line, without_passwords
from dpexp.tracking.record import published_error
from dpexp.tracking.registered_model import check_name


class TrackedRun:
    """A job's run in MLflow, from the start of the job to its end.

    If it cannot be started, the job is refused. After the start, no error of the tracking server reaches the training.

    Args:
        store: the store that the run is in.
        folder: the job's folder.
        planned: the most that the job will have released at its end; None if it is not private.
        resumes: goes on with the run that the job has, if the store still has it.
        register: a name in the model registry, or None.
        facts: those of the record, which adds to them.
    """

    def __init__(
        self,
        store: Tracking,
        folder: Path,
        planned: Ledger | None,
        resumes: bool,
        register: str | None,
        facts: dict[str, Any],
    ) -> None:
        self._uri, self._folder = str(store.uri), folder
        shown = without_passwords(self._uri)
        client, experiment_id = open_store(store)
        if register is not None:
            check_name(client, register)
        try:
            end_dead_runs(client, experiment_id)
            earlier = earlier_run(client, folder, facts) if resumes else None
            if earlier is None:
                begin = partial(create_job_run, client, experiment_id, facts, folder)
            else:
                begin = partial(_reopen, client, earlier, facts["tags"])
            self.run_id = begin_job_run(self._uri, client, facts, folder, begin, planned, earlier)
            (folder / RUN).write_text(self.run_id)
            self._mirror = Mirror(client, self.run_id, folder, facts)
        except (MlflowException, OSError) as error:
            raise ConfigError(f"tracking.uri={shown} cannot be used: {one_line(error)}") from error
        self.address = address(self._uri, experiment_id)
        self._client, self._facts = client, facts

    def follow(self) -> None:
        """Sends what the record gets, from a thread."""
        self._mirror.follow()

    def end(self, said: Mapping[str, Any]) -> None:
        """Waits for the server to get the rest; a killed job waits two seconds, others twenty."""
        if self._mirror.close(said, patience=2.0 if said["status"] == "KILLED" else 20.0):
            conclude_job_run(self._uri, self._client, self._facts, self.run_id, self._folder)
        if self._mirror.missed is not None:
            print_missed(self._mirror.missed, self._folder)


def _reopen(client: MlflowClient, run: Run, tags: Mapping[str, str]) -> str:
    run_id: str = run.info.run_id
    client.log_batch(run_id, tags=[RunTag(*tag) for tag in tags.items()])  # with the process that it runs in now
    client.update_run(run_id, status="RUNNING")
    if ERROR_TAG in run.data.tags:
        client.delete_tag(run_id, ERROR_TAG)
    return run_id


def record_failure(store: Tracking, name: str, tags: Mapping[str, str], error: Exception, folder: Path) -> None:
    """Creates a FAILED run for a trial of a sweep whose training never started."""
    client, experiment_id = open_store(store)
    reason = published_error(error, folder)
    run_id = create_run(client, experiment_id, {**tags, ERROR_TAG: reason}, run_name=name)
    client.set_terminated(run_id, "FAILED")
