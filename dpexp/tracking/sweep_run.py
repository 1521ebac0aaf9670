"""The parent run of a sweep's trials."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Param, ViewType
from mlflow.utils import chunk_list
from pandas import DataFrame

from dpexp.accounting.ledger import Ledger, ledger_so_far
from dpexp.config import Tracking
from dpexp.errors import ConfigError
from dpexp.reporting.comparisons import Best, compact, summary, trained
from dpexp.reporting.sweep_figures import ROUND, figures_of
from dpexp.tracking.client import MAX_PARAMS, address, create_run, end_dead_runs, open_store, set_view
from dpexp.tracking.job_folder import LEDGER, OUTPUT_TAG, metrics_of_figures, write_json
from dpexp.tracking.mirror import shown
from dpexp.tracking.provenance import HOST, MAX_NAME, PARENT, provenance, provenance_of_resume
from dpexp.tracking.read import folder_of, own_folder, search, trials

TRIALS, SUMMARY = "trials.csv", "summary.csv"  # in a sweep's folder: a row for each trial, for each configuration
SWEEP = "sweep.json"  # in a sweep's folder: its MLflow run, and what was fixed before its first trial


class SweepRun:
    """A sweep's parent run; a sweep that is started again in its folder continues its earlier run."""

    def __init__(self, store: Tracking, name: str, key: str, facts: dict[str, Any], folder: Path) -> None:
        self._uri, self._file = str(store.uri), folder / SWEEP
        self._client, self._experiment = open_store(store)
        end_dead_runs(self._client, self._experiment)
        earlier = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.facts: dict[str, Any] = facts | {"key": key} | earlier
        if self.facts["key"] != key:
            raise ConfigError(f"{folder} holds another sweep, or its configuration has changed; name another folder.")
        self.resumed = "run_id" in self.facts
        if not self.resumed:
            tags = {"dpexp.sweep_hash": key} | provenance()
            self.remember({"run_id": create_run(self._client, self._experiment, tags, run_name=name[:MAX_NAME])})
        self.run_id: str = self.facts["run_id"]
        run = self._client.get_run(self.run_id)
        host, process = (run.data.tags.get(f"dpexp.{name}") for name in ("host", "pid"))
        if self.resumed and run.info.status == "RUNNING" and host == HOST and process != str(os.getpid()):
            raise ConfigError(f"this sweep is running in process {process}; wait for it.")
        self._client.update_run(self.run_id, "RUNNING")
        if self.resumed:
            for tag, value in provenance_of_resume().items():
                self._client.set_tag(self.run_id, tag, value)
        set_view(self._client, self._experiment)
        self.address = address(self._uri, self._experiment)
        os.environ[PARENT] = self.run_id

    def remember(self, facts: dict[str, Any]) -> None:
        """Stores facts for the next start of the same sweep."""
        self.facts |= facts
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, self.facts)

    def trials(self) -> DataFrame:
        """The trials, each once: of several starts the one that finished, else the last."""
        end_dead_runs(self._client, self._experiment)
        frame = trials(self._uri, [self.run_id])
        if frame.empty:
            return frame
        order = frame.assign(done=frame["status"] == "FINISHED").sort_values(["done", "start"])
        return order.drop_duplicates("trial", keep="last").drop(columns=["done"])

    def ledgers(self) -> dict[str, Ledger]:
        """The ledgers of all private trials that ever began to train, by run id.

        Trials that failed, were killed, repeated or deleted from the list count too.

        Raises:
            ConfigError: ledgers are lost, or a run's (ε, δ) does not cover what it shows.
        """
        ledgers, missing, not_private = {}, [], []
        children = f"tags.`mlflow.parentRunId` = '{self.run_id}'"
        for run in search(self._client, [self._experiment], children, ViewType.ALL):
            folder, private = run.data.tags.get(OUTPUT_TAG), run.data.tags.get("dpexp.private", "")
            trains = run.data.params.get("train", "True") == "True"
            if folder is None or not trains or private.startswith("no: trained without"):
                continue
            name = run.info.run_name or run.info.run_id
            with folder_of(self._client, run, LEDGER, "ledger.end.json") as own:
                path = own / LEDGER
                try:
                    ledgers[run.info.run_id] = ledger_so_far(path)
                except ConfigError:
                    end = own / "ledger.end.json"  # of a ledger that was begun, and is lost
                    written = end.exists() or (path.exists() and b"\n" in path.read_bytes())
                    began = written or "epsilon" in run.data.metrics or run.info.status == "FINISHED"
                    if began or own_folder(run) is None:
                        missing.append(name)
                    continue
            if private != "yes":
                not_private.append(name)
        if not_private:
            raise ConfigError(f"{', '.join(not_private)} show more than their (ε, δ) covers.")
        if missing:
            raise ConfigError(f"the ledgers of {', '.join(missing)} are missing.")
        return ledgers

    def conclude(
        self, frame: DataFrame, tops: Mapping[str, Best], costs: Mapping[str, float], lines: Sequence[str],
        status: str, output: Path,
    ) -> list[str]:  # fmt: skip
        """Writes tables and figures of the trials into the sweep's folder, logs them and its costs, and ends the run.

        If all trials have finished, the run also gets the parameters that they share.

        Args:
            frame: one row per trial.
            tops: the best configurations.
            costs: ε of choosing among the trials, by type of claim.
            lines: the description of the run.
            status: FINISHED, FAILED or KILLED.
            output: the sweep's folder.

        Returns:
            Why figures are not drawn.
        """
        if status == "FINISHED" and not frame.empty:
            params = [self._client.get_run(trial).data.params.items() for trial in frame["run_id"]]
            shared = [Param(key, value) for key, value in sorted(set(params[0]).intersection(*params[1:]))]
            for some in chunk_list(shared, MAX_PARAMS):
                self._client.log_batch(self.run_id, params=some)
        metrics = metrics_of_figures({f"selection/{key}": value for key, value in costs.items()})
        if [*tops] == [""]:  # accuracies at different costs are in the summary
            top = tops[""].row
            best = {name: shown(name, top[name]) for name in ("test_accuracy", "epsilon")}
            metrics |= {name: value for name, value in best.items() if not math.isnan(value)}
        earlier = [key for key in self._client.get_run(self.run_id).data.metrics if key not in metrics]
        for key, value in {**metrics, **dict.fromkeys(earlier, math.nan)}.items():  # NaN replaces what no longer holds
            self._client.log_metric(self.run_id, key, value)
        drawn, omitted = figures_of(frame, self._evaluations(frame)) if not frame.empty else ({}, [])
        self._client.set_tag(self.run_id, "mlflow.note.content", "\n".join(f"- {line}" for line in (*lines, *omitted)))
        if not frame.empty:
            output.mkdir(parents=True, exist_ok=True)
            compact(frame).to_csv(output / TRIALS, index=False)
            summary(frame).to_csv(output / SUMMARY, index=False)
            for name, figure in drawn.items():
                figure.savefig(output / name, dpi=150)
            for name in (TRIALS, SUMMARY, *drawn):
                self._client.log_artifact(self.run_id, str(output / name))
        self._client.set_terminated(self.run_id, status)
        os.environ.pop(PARENT, None)
        return omitted

    @staticmethod
    def _evaluations(frame: DataFrame) -> DataFrame:
        """A row for each evaluation during a training, which has its round as a setting."""
        rows = []
        for trial in trained(frame).to_dict("records"):
            for step, values in sorted(trial["steps"].items()):
                if {"epsilon", "test_accuracy"} <= {*values}:
                    setting = json.dumps(json.loads(trial["configuration"]) | {ROUND: step})
                    now = {name: values.get(name, math.nan) for name in ("epsilon", "test_accuracy", "test_loss")}
                    rows.append(trial | now | {"configuration": setting})
        return DataFrame(rows, columns=frame.columns)

    def discard(self) -> None:
        """Deletes the run of a sweep that was refused before its first trial."""
        self._client.set_terminated(self.run_id, "FAILED")
        self._client.delete_run(self.run_id)
        self._file.unlink()
        os.environ.pop(PARENT, None)
