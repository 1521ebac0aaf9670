"""MLflow runs of jobs and sweeps, the budget of a data set, and the files of a job's folder, which untracked jobs have,
too. No other folder imports MLflow."""

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# An unreachable server must not delay the end of a job for long.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
