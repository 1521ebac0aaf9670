"""The list of runs in MLflow's UI, and where it is."""

import json

from mlflow import MlflowClient

# MLflow keeps such views in undocumented tags of the experiment.
COLUMNS = [
    "metrics.`epsilon`", "metrics.`delta`", "metrics.`test_accuracy`",
    "metrics.`noise_multiplier`", "metrics.`q`", "tags.`dpexp.group`", "tags.`dpexp.mechanism`",
    "tags.`dpexp.clip`", "tags.`dpexp.allocation`", "tags.`dpexp.seed`", "tags.`dpexp.error`",
]  # fmt: skip
VIEW = "dpexp"


def show_columns(client: MlflowClient, experiment_id: str) -> None:
    state = {"selectedColumns": COLUMNS, "orderByKey": "metrics.`test_accuracy`", "orderByAsc": False}
    client.set_experiment_tag(experiment_id, f"mlflow.sharedViewState.{VIEW}", json.dumps(state))


def address(uri: str, experiment_id: str) -> str:
    """How to see the list of runs: its address at a server, or the command that starts one, and the address there. The
    address of the experiment itself opens a page for traces."""
    page = f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}"
    if uri.startswith(("http://", "https://")):
        return f"{uri.rstrip('/')}/{page}"
    return f"mlflow ui --backend-store-uri {uri}, then http://127.0.0.1:5000/{page}"
