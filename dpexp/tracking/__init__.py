"""What is kept of a job: the files of its folder, its run in MLflow, the parent runs of sweeps, and data sets' budgets.

No other folder of dpexp imports MLflow.

A job's own folder alone counts; what MLflow has is a copy of it.

- `Record` (`record.py`) writes what the job says of itself into its folder, whether the job is tracked or not.
- `Run` (`record.py`) is what a record knows of a run in a store: start sending, and end. So it needs no MLflow.
- `TrackedRun` (`run.py`) is that `Run` for MLflow: it creates or reopens the run when the job starts, and ends it.
- `Mirror` (`mirror.py`) sends the run whatever the folder has and the run lacks, while the job trains or later.

A folder can be copied, and an interrupted job can be resumed in both copies. Then neither ledger has the rounds of the
other copy. If the run in MLflow took one ledger after the other, the rounds of the first would be forgotten, and ε of
what was released would be understated. So each start of a job has a random number, which its folder keeps and its run
has as a tag. A folder that lacks the number in the tag is an *earlier copy*: the job went on elsewhere. Such a folder
is not mirrored to that run, and a ledger that lacks rounds of the run's is refused.
"""

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# An unreachable server must not delay the end of a job for long.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
