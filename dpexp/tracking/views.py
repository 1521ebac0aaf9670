"""The list of runs in MLflow's UI, and where it is."""

import json

from mlflow import MlflowClient

# MLflow keeps such views in undocumented tags of the experiment.
COLUMNS = [  # metrics come before parameters, and by name
    "metrics.`epsilon`", "metrics.`test_accuracy`", "params.`privacy.delta`", "params.`plan.z`", "params.`plan.q`",
    "tags.`dpexp.group`", "tags.`dpexp.mechanism`", "tags.`dpexp.clip`", "tags.`dpexp.allocation`",
    "tags.`dpexp.seed`", "tags.`dpexp.error`",
]  # fmt: skip
VIEW = "dpexp"


CHARTS = ("test_accuracy", "epsilon")  # on top; MLflow adds one of each other metric behind them
_SECTION = {"uuid": "metrics", "name": "Model metrics", "display": True, "isReordered": True}
_LINE = {
    "type": "LINE", "metricSectionId": "metrics", "runsCountToCompare": 10, "deleted": False, "isGenerated": True,
    "lineSmoothness": 0, "scaleType": "linear", "xAxisScaleType": "linear", "range": {}, "xAxisKey": "step",
    "selectedXAxisMetricKey": "", "yAxisKey": "metric", "yAxisExpressions": [], "ignoreOutliers": False,
    "useGlobalXaxisKey": True,
}  # fmt: skip


def show_columns(client: MlflowClient, experiment_id: str) -> None:
    state = {
        "selectedColumns": COLUMNS, "orderByKey": "metrics.`test_accuracy`", "orderByAsc": False,
        "isAccordionReordered": True, "compareRunSections": [_SECTION],
        "compareRunCharts": [_LINE | {"uuid": name, "metricKey": name, "displayName": name} for name in CHARTS],
    }  # fmt: skip
    client.set_experiment_tag(experiment_id, f"mlflow.sharedViewState.{VIEW}", json.dumps(state))


def address(uri: str, experiment_id: str) -> str:
    """How to see the list of runs: its address at a server, or the command that starts one, and the address there. The
    address of the experiment itself opens a page for traces."""
    page = f"#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}"
    if uri.startswith(("http://", "https://")):
        return f"{uri.rstrip('/')}/{page}"
    return f"mlflow ui --backend-store-uri {uri}, then http://127.0.0.1:5000/{page}"
