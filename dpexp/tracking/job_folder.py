"""What a job's folder holds: the names of its files, metrics and tags, reading them, and the folder's lock.

Imports nothing slow.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dpexp.errors import ConfigError

# Files of the job
LEDGER = "ledger.jsonl"
PLANNED_LEDGER = "planned_ledger.jsonl"  # the most that the job will have released at its end
WEIGHTS, CARD, MLFLOW_MODEL, DISK_RESERVE = "weights.safetensors", "card.md", "mlflow_model", "weights.reserved"
CHECKPOINT = "last.ckpt"
# Files of its record (dpexp.tracking.record), and of what MLflow has of it (dpexp.tracking.mirror)
RECORD, METRICS, STATUS = "run.json", "metrics.jsonl", "status.json"
RUN, SENT = "mlflow_run_id", "mirror.json"
# A key of result.json, once the job has ended well: a hash of the configuration without what cannot change the result
CONFIGURATION_KEY = "configuration"
# Prefixes of metrics. MLflow draws a chart of each metric: names with a slash first, then by name. With these prefixes,
# what a run is looked at for, epsilon and test_…, comes before what is constant.
TRIED_PREFIX = "tried "  # what calibration tried
FIGURE_PREFIX = "with "  # figures of a plan, of its guarantee and its audit, and released statistics
# Tags of the run
ERROR_TAG = "dpexp.error"  # why a run did not finish
OUTPUT_TAG = "dpexp.output"  # the job's folder
START_TAG = "dpexp.start"  # a random number of the job's last start; its folder has those of all

_PATIENCE = 1.0  # seconds: longer than another process takes to look whether the lock is held


def metrics_of_figures(values: Mapping[str, float]) -> dict[str, float]:
    """The constant figures of a job as metrics, whose names have a prefix."""
    return {FIGURE_PREFIX + name.replace("/", " "): value for name, value in values.items()}


def metric_of(knob: str) -> str:
    """The name of the figure that has the value of a calibrated parameter."""
    return {"sampling_rate_at_fixed_noise": "sampling_rate", "steps": "rounds"}.get(knob, knob)


def value_of(metrics: Mapping[str, float], name: str) -> float | None:
    """A metric, figure or calibrated parameter of a run."""
    return metrics.get(name, metrics.get(FIGURE_PREFIX + metric_of(name)))


@contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Holds the lock of a job's folder: two processes that resume one job would write to the same run."""
    lock = FileLock(output / "job.lock")
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout as error:
        raise ConfigError(f"the job in {output} is running in another process.") from error
    try:
        yield
    finally:
        lock.release()


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file; empty if there is none, or it is damaged."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def metrics_by_step(output: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step in a job's record, in order. Of several values at one step, the last counts."""
    found: dict[int, dict[str, float]] = {}
    path = output / METRICS
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):  # else it is being written, or was cut off
            row = json.loads(line)
            found.setdefault(row["step"], {}).update(row["metrics"])
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a file at once: whoever reads it meanwhile finds its former content."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def finished_result(output: Path) -> dict[str, Any] | None:
    """The content of result.json, if the job in a folder has ended well."""
    result = read_json(output / "result.json")
    return result if CONFIGURATION_KEY in result else None


def ended(output: Path) -> dict[str, Any]:
    """How the job in a folder ended, if it no longer runs. A job that was killed outright has left no word of it."""
    if said := read_json(output / STATUS):
        return said
    if finished_result(output):
        return {"status": "FINISHED"}
    return {"status": "KILLED", "reason": "its process was killed: SIGKILL, out of memory, or power failure"}
