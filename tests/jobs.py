"""What jobs leave behind."""

import json

from mlflow import MlflowClient


def result_of(output):
    return json.loads((output / "result.json").read_text())


def store_of(folder):
    """A client of the store of the jobs that were run in a folder."""
    return MlflowClient(tracking_uri=f"sqlite:///{folder}/outputs/mlflow.db")
