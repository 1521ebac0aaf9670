"""A job's record: what it says of itself in its own folder, whether it is tracked or not.

`dpexp.tracking` says how `Record`, `Run`, `TrackedRun` and `Mirror` go together. Imports no MLflow.
"""

import json
import math
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from dpexp._lightning_compat import pl
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import ledger_so_far
from dpexp.errors import ConfigError, is_own, place_of, root_of
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.reporting.run_figures import epsilon_over_rounds
from dpexp.tracking.job_folder import (
    LEDGER,
    METRICS,
    OUTPUT_TAG,
    RECORD,
    START_TAG,
    STATUS,
    TRIED_PREFIX,
    exclusive,
    metric_of,
    metrics_of_figures,
    read_json,
    write_json,
)
from dpexp.tracking.provenance import one_line, provenance_of_resume, valid_name

OF_THE_START = ("name", "start", "params", "configuration", "data")  # facts that stay when a job is resumed
_MAX_DESCRIPTION = 5000  # characters
# The messages of their errors quote no training record.
_OWN_PACKAGES = ("dpexp", "hydra", "omegaconf", "mlflow", "pytorch_lightning", "lightning")


class Record:
    """The files in which a job says what it is, what it measured and how it ended.

    - `run.json`: what a run that mirrors the job shows; its keys are below.
    - `metrics.jsonl`: in each line a step and its metrics. A step is the number of completed rounds; of metrics whose
      names begin with "tried", it is the number of an attempt of the calibration.
    - `status.json`: how it ended, and when.

    No time of a round is written: its duration depends on the size of its sample, which is private.

    | Key of `run.json` | What it is |
    |---|---|
    | `name`, `start` | the run's name; when it started, in milliseconds |
    | `tags`, `params` | texts by name, as MLflow shows them |
    | `configuration` | each option's value by its key |
    | `data` | the arguments of `mlflow.entities.Dataset` for the training set |
    | `files` | names of files in the folder that are closed |
    | `store` | the MLflow store, as `tracking` in the configuration |
    | `delta`, `accountants` | the δ and the accountants by which ε is computed |
    | `spends` | `data_id`, `budget` and whether the job `trains`; null: its data set is not named |
    | `starts` | a random number for each start of the job, first to last |
    | `model` | the arguments of `registered_model.send_model`, once a model is saved |
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder, self.facts = folder, facts
        with (folder / METRICS).open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # a power failure may have cut the last line
        write_json(folder / RECORD, facts)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Adds a line to `metrics.jsonl`. It has no time: MLflow will show its place in the file instead."""
        row = {"step": step, "metrics": {valid_name(name): float(value) for name, value in values.items()}}
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def add(self, *files: str, tags: Mapping[str, str] | None = None, **facts: Any) -> None:
        """Adds the names of closed files, tags, and other facts. A mirror shares `facts`, and sends them too."""
        self.facts |= facts | {"files": [*self.facts["files"], *files], "tags": self.facts["tags"] | (tags or {})}
        write_json(self.folder / RECORD, self.facts)

    def add_plan(self, plan: PrivacyPlan) -> None:
        """Writes the plan, its figures, and what calibration tried."""
        z = plan.noise_multiplier
        described = asdict(plan) | {"noise_multiplier": z if math.isfinite(z) else None}
        (self.folder / "plan.json").write_text(json.dumps(described, indent=2))
        figures: dict[str, float] = {"noise_multiplier": z, "sampling_rate": plan.sampling.q, "rounds": plan.rounds}
        for round_ in plan.before_training:
            (query,) = round_.queries
            figure = "epsilon" if query.noise == "laplace" else "mu"
            figures[f"preprocessing/{valid_name(query.name)}/{figure}"] = 1 / round_.z(plan.adjacency)
        if (solved := plan.calibration) is not None:
            # A calibrated noise, sampling rate or number of rounds stands there already, as the plan has it.
            figures.setdefault(metric_of(solved.knob), solved.value)
            for step, (value, cost) in enumerate(solved.trace):
                self.metrics({f"{TRIED_PREFIX}{solved.knob}": value, f"{TRIED_PREFIX}{solved.target}": cost}, step)
        planned = epsilon(plan.ledger(), self.facts["delta"], self.facts["accountants"][0])
        self.metrics({"epsilon_planned": planned} | metrics_of_figures(figures), 0)

    def add_result(self, result: Mapping[str, Any]) -> None:
        """Writes the final figures of `result.json`."""
        spent = result.get("epsilon", {})
        # That of the first accountant is the metric `epsilon`, or `epsilon_planned`.
        values = {f"epsilon_{name}": spent[name] for name in self.facts["accountants"][1:]}
        found = result.get("risk", {}) | {f"audit/{name}": value for name, value in result.get("audit", {}).items()}
        if "learning_rate" in result:
            found |= {"learning_rate": result["learning_rate"]}
        released = result.get("preprocessing", {})
        for name, entries in released.items():
            found |= {f"{valid_name(name)}/{k}": entry for k, entry in enumerate(entries)}
        self.metrics(values | metrics_of_figures(found), result["rounds"])
        self.add("result.json", "audit.png", "released.png", *(f"{name}.png" for name in released))

    def add_model(self, tags: Mapping[str, str], rounds: int, register: str | None) -> None:
        """Adds the model's files, and what its entry in MLflow gets.

        Args:
            tags: of the model.
            rounds: after how many of them it is.
            register: the name in the model registry under which it becomes a version, or None.
        """
        self.add(
            "weights.safetensors", "card.md", "adapter", "generated.txt", "mlflow_model",
            tags={"mlflow.note.content": card_of(self.folder)},
            model={"rounds": rounds, "tags": dict(tags), "name": register},
        )  # fmt: skip

    def add_figure(self) -> None:
        """Draws ε by round up to the last release, however the job ended."""
        try:
            ledger = ledger_so_far(self.folder / LEDGER)
        except ConfigError:  # missing or damaged; the job's own error says so
            return
        figure = epsilon_over_rounds(ledger, self.facts["delta"], self.facts["accountants"])
        with suppress(OSError):  # a full disk; the job's own error says so
            if ledger.not_private_reason is not None:  # whatever the configuration says by now
                self.add(tags={"dpexp.private": f"no: {ledger.not_private_reason}"})
            figure.savefig(self.folder / "epsilon.png", dpi=150)
            self.add("epsilon.png")

    def end(self, status: str, reason: str | None) -> dict[str, Any]:
        """Writes how the job ended, and returns it."""
        said = {"status": status, "reason": reason, "time": int(time.time() * 1000)}
        with suppress(OSError):  # a full disk; the job's own error says so
            write_json(self.folder / STATUS, said)
        return said


class Run(Protocol):
    """A run in a store that mirrors a record while the job trains."""

    run_id: str
    address: str

    def follow(self) -> None:
        """Begins to send what the record gets."""

    def end(self, said: Mapping[str, Any]) -> None:
        """Sends the rest, and how the job ended."""


@contextmanager
def recorded(
    folder: Path,
    facts: dict[str, Any],
    resumes: bool,
    start_run: Callable[[dict[str, Any]], Run] | None,
    stopped_by: Callable[[], str],
) -> Iterator[tuple[Record, Run | None]]:
    """Records a job, which ends FINISHED, FAILED, or, after an interrupt (Ctrl-C, SIGTERM), KILLED.

    Args:
        facts: see `dpexp.commands.description.facts`.
        resumes: goes on with the record in the folder.
        start_run: starts the run that mirrors a record with these facts; None: the job is not tracked.
        stopped_by: names the signal that interrupted the job.
    """
    with exclusive(folder):
        facts["tags"][OUTPUT_TAG] = str(folder.resolve())
        earlier = read_json(folder / RECORD) if resumes else {}
        if earlier:
            now = provenance_of_resume() | {OUTPUT_TAG: facts["tags"][OUTPUT_TAG]}
            kept = {name: earlier[name] for name in OF_THE_START if name in earlier}
            facts = facts | kept | {"tags": earlier["tags"] | now}
        facts["tags"][START_TAG] = secrets.token_hex(8)
        facts["starts"] = [*earlier.get("starts", ()), facts["tags"][START_TAG]]
        # The folder gets the number of this start before the run does. If the job is killed in between, the run has an
        # older number, which the folder has, too. Otherwise the folder would look like an earlier copy of its job.
        record = Record(folder, facts)
        run = start_run(facts) if start_run else None
        (folder / STATUS).unlink(missing_ok=True)  # of a job that is resumed
        if run:
            run.follow()
        status, reason = "FAILED", None
        try:
            yield record, run
            status = "FINISHED"
        except (KeyboardInterrupt, SystemExit):  # Lightning raises SystemExit after KeyboardInterrupt
            status, reason = "KILLED", f"interrupted by {stopped_by()}"
            raise
        except Exception as error:
            reason = published_error(error, folder)
            error.tracked = True  # type: ignore[attr-defined]  # so that dpexp.__main__ creates no second failed run
            raise
        finally:
            try:
                record.add_figure()
            finally:
                said = record.end(status, reason)
                if run:
                    run.end(said)


class MetricsLogger(pl.loggers.logger.Logger):
    """A Lightning logger that sends metrics and nothing else, without the epoch that Lightning adds to them.

    Their step is the number of completed rounds. Lightning's own step of a validation is one less; accuracy and ε must
    have the same step to be charted together.

    Args:
        send: is called with metrics and their step.
    """

    rounds: Callable[[], int] | None = None

    def __init__(self, send: Callable[[dict[str, float], int], None], name: str = "record") -> None:
        super().__init__()
        self._send, self._name = send, name

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> Any:
        return _NoExperiment()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        done = self.rounds() if self.rounds is not None else step or 0
        self._send({name: float(value) for name, value in metrics.items() if name != "epoch"}, done)


class _NoExperiment:
    """What hooks of a module get as `self.logger.experiment`: every attribute of it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"self.logger.experiment.{name}: what it writes is not accounted; log values by self.log.")


def card_of(folder: Path) -> str:
    """The model card in a job's folder, cut to the length that MLflow allows."""
    text = (folder / "card.md").read_text()
    return text if len(text) <= _MAX_DESCRIPTION else text[:_MAX_DESCRIPTION] + "…\n\nThe rest is in card.md."


def published_error(error: Exception, folder: Path) -> str:
    """The text of an error for the server: the message of a `ConfigError` by dpexp; of other errors, type and place.

    The message of another error may quote a training record. It is written to `error.txt` in the job's folder.
    """
    root = root_of(error)
    if isinstance(error, ConfigError) and is_own(error) and type(root).__module__.partition(".")[0] in _OWN_PACKAGES:
        return one_line(error)
    with suppress(OSError):  # the disk may be full
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error.txt").write_text("".join(traceback.format_exception(error)))
    return f"{place_of(root)}; see error.txt in the job's folder"
