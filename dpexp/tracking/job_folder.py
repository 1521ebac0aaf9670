"""Names in a job's folder: of its files, metrics and tags; and its lock.

Imports nothing slow.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dpexp.errors import ConfigError

RUN = "mlflow_run_id"
LEDGER = "ledger.jsonl"
PLANNED_LEDGER = "planned_ledger.jsonl"  # the most that the job will have released at its end
WEIGHTS, CARD, MLFLOW_MODEL, DISK_RESERVE = "weights.safetensors", "card.md", "mlflow_model", "weights.reserved"
CHECKPOINT = "last.ckpt"
# What a job says of itself, and what of it MLflow has: see dpexp.tracking.mirror
RECORD, METRICS, STATUS, SENT = "run.json", "metrics.jsonl", "status.json", "mirror.json"
# Metrics. MLflow draws a chart of each: names with a slash first, then by name. What a run is looked at for, epsilon
# and test_…, comes before what is constant.
TRIED = "tried "  # prefix of what calibration tried
WITH = "with "  # prefix of the figures of a plan, its guarantee and its audit, and of released statistics
# Tags
ERROR = "dpexp.error"  # why a run did not finish
OUTPUT = "dpexp.output"  # the job's folder
START = "dpexp.start"  # a random number of the job's last start; its folder has those of all
CONFIGURATION = "configuration"  # in result.json once the job has ended well: a hash of what could change it
_PATIENCE = 1.0  # seconds: longer than another process takes to look whether the lock is held


def constants(values: Mapping[str, float]) -> dict[str, float]:
    """Figures by the names of their metrics."""
    return {WITH + name.replace("/", " "): value for name, value in values.items()}


def metric_of(knob: str) -> str:
    """The figure that has the value of a calibrated parameter."""
    return {"sampling_rate_at_fixed_noise": "sampling_rate", "steps": "rounds"}.get(knob, knob)


def value_of(metrics: Mapping[str, float], name: str) -> float | None:
    """A metric, figure or calibrated parameter of a run."""
    return metrics.get(name, metrics.get(WITH + metric_of(name)))


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
    """What a job's record has of each step, in order; of several values of a metric the last."""
    found: dict[int, dict[str, float]] = {}
    path = output / METRICS
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            row = json.loads(line)
            found.setdefault(row["step"], {}).update(row["metrics"])
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file at once: who reads it meanwhile finds the former content."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def finished_result(output: Path) -> dict[str, Any] | None:
    """The content of result.json, if the job in a folder has ended well."""
    result = read_json(output / "result.json")
    return result if CONFIGURATION in result else None


def ended(output: Path) -> dict[str, Any]:
    """How the job in a folder, which runs no more, has ended; one that was killed outright could not write it."""
    if said := read_json(output / STATUS):
        return said
    if finished_result(output):
        return {"status": "FINISHED"}
    return {"status": "KILLED", "reason": "its process was killed: SIGKILL, out of memory, or power failure"}
