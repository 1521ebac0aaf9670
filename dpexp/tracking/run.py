"""A training job as an MLflow run."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from omegaconf import DictConfig, OmegaConf

from dpexp._lightning_compat import pl
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, ledger_so_far
from dpexp.config import replaced
from dpexp.errors import ConfigError
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.reporting.run_figures import epsilon_over_rounds
from dpexp.reporting.terminal import print_missed
from dpexp.tracking.client import (
    ERROR,
    OUTPUT,
    TRIED,
    address,
    constants,
    end_dead_runs,
    metric_of,
    one_line,
    open_store,
    published_error,
)
from dpexp.tracking.job_folder import PLANNED_LEDGER, RECORD, RUN, exclusive, read_json
from dpexp.tracking.mirror import Mirror, Record, created, earlier_run
from dpexp.tracking.provenance import (
    choices,
    params,
    parent_id,
    provenance_of_resume,
    run_name,
    tags,
    valid_name,
    without_passwords,
)
from dpexp.tracking.registered_model import check_name, description


class MetricsLogger(pl.loggers.logger.Logger):
    """Sends Lightning's metrics, except its epoch count, at the number of completed rounds, and nothing else.

    Lightning logs validation one step early; accuracy and ε must have the same step to be charted together.
    """

    rounds: Callable[[], int] | None = None

    def __init__(self, send: Callable[[dict[str, float], int], None], name: str = "mlflow") -> None:
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
    """What hooks get as `self.logger.experiment`: every attribute of it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"self.logger.experiment.{name}: what it writes is not accounted; log values by self.log.")


class TrackedRun:
    """A started job's record, and its run. Errors of the tracking server after the start never reach the training."""

    def __init__(
        self,
        cfg: DictConfig,
        plan: PrivacyPlan | None,
        output: Path,
        accountants: Sequence[str],
        planned: Ledger | None,
    ) -> None:
        self._cfg, self._plan, self._accountants, self._output = cfg, plan, accountants, output
        uri = cfg.tracking.uri
        client, experiment_id = open_store(uri, cfg.tracking.experiment, cfg.tracking.artifacts)
        if cfg.register is not None:
            check_name(client, cfg.register)
        try:
            end_dead_runs(client, experiment_id)
            earlier = earlier_run(client, output) if cfg.checkpoint.resume else None
            facts = self._facts()
            if earlier is None:
                begin = partial(created, client, experiment_id, facts)
            else:
                own = provenance_of_resume() | {OUTPUT: facts["tags"][OUTPUT]}
                facts |= read_json(output / RECORD) | {"files": facts["files"]}
                facts["tags"] |= own
                begin = partial(_reopen, client, earlier, own)
            if cfg.data.id is None:
                self.run_id = begin()
            else:
                from dpexp.tracking import data_budget

                self.run_id = data_budget.start(cfg, client, planned, output, earlier, begin)
            (output / RUN).write_text(self.run_id)
            self._mirror = Mirror(client, self.run_id, output, facts)
        except (MlflowException, OSError) as error:
            raise ConfigError(f"tracking.uri={without_passwords(uri)} cannot be used: {one_line(error)}") from error
        self.resumed = earlier is not None
        self.address = address(uri, experiment_id)
        self._client = client
        self.record = Record(output, facts)
        self.logger = MetricsLogger(self.record.metrics)
        self._mirror.follow()

    def _facts(self) -> dict[str, Any]:
        """Name, tags and parameters, and the files that are closed before the first round."""
        cfg, plan = self._cfg, self._plan
        given, others = params(OmegaConf.to_container(cfg, resolve=True)), replaced(cfg)
        values = {f"replaced.{key}" if key in others else key: value for key, value in given.items()}
        source, profile = json.dumps({"module": cfg.data.module.get("_target_")}), json.dumps({"n": cfg.data.n})
        return {
            "name": run_name(cfg),
            "start": int(time.time() * 1000),
            "tags": tags(cfg, plan) | {OUTPUT: str(self._output.resolve())},
            "params": values | (_planned_params(plan) if plan else {}),
            "data": {
                "name": choices().get("data", "data"), "digest": f"n={cfg.data.n}", "source_type": "code",
                "source": source, "profile": profile,
            },
            "files": ["config.yaml", "overrides.yaml", "plan.json", PLANNED_LEDGER],
        }  # fmt: skip

    def log_start(self) -> None:
        """Writes overrides and plan."""
        hydra = HydraConfig.get()
        file = [] if hydra.job.config_name == "config" else [f"{hydra.job.config_name}.yaml"]
        overrides = OmegaConf.to_yaml([*file, *hydra.overrides.task])
        (self._output / "overrides.yaml").write_text(without_passwords(overrides))
        if self._plan is not None:
            self._log_plan(self._plan)

    def _log_plan(self, plan: PrivacyPlan) -> None:
        z, ledger = plan.noise_multiplier, plan.ledger()
        described = asdict(plan) | {"noise_multiplier": z if math.isfinite(z) else None}
        (self._output / "plan.json").write_text(json.dumps(described, indent=2))
        figures: dict[str, float] = {"noise_multiplier": z, "sampling_rate": plan.sampling.q, "rounds": plan.rounds}
        for round_ in plan.before_training:
            (query,) = round_.queries
            figure = "epsilon" if query.noise == "laplace" else "mu"
            figures[f"preprocessing/{valid_name(query.name)}/{figure}"] = 1 / round_.z(plan.adjacency)
        if (solved := plan.calibration) is not None:
            figures.setdefault(metric_of(solved.knob), solved.value)
            for step, (value, cost) in enumerate(solved.trace):
                self.record.metrics({f"{TRIED}{solved.knob}": value, f"{TRIED}{solved.target}": cost}, step)
        planned = epsilon(ledger, self._cfg.privacy.delta, self._accountants[0])
        self.record.metrics({"epsilon_planned": planned} | constants(figures), 0)

    def finish(self, result: dict[str, Any]) -> None:
        """Logs the final figures of `result.json`."""
        values = {f"epsilon_{key}": value for key, value in result.get("epsilon", {}).items()}
        if self._accountants:  # its ε is the metric `epsilon`, or `epsilon_planned`
            values.pop(f"epsilon_{self._accountants[0]}", None)
        found = result.get("risk", {}) | {f"audit/{name}": value for name, value in result.get("audit", {}).items()}
        found |= {"learning_rate": result["learning_rate"]} if "learning_rate" in result else {}
        released = result.get("preprocessing", {})
        found |= {f"{valid_name(name)}/{k}": one for name, entries in released.items() for k, one in enumerate(entries)}
        self.record.metrics(values | constants(found), result["rounds"])
        self.record.add("result.json", "audit.png", "released.png", *(f"{name}.png" for name in released))

    def log_model(self, model_tags: Mapping[str, str], rounds: int) -> None:
        """Logs the model in the job's folder, and registers it under `register`."""
        self.record.add(
            "weights.safetensors", "card.md", "adapter", "generated.txt", "mlflow_model",
            tags={"mlflow.note.content": description(self._output)},
            model={"rounds": rounds, "tags": dict(model_tags), "name": self._cfg.register},
        )  # fmt: skip

    def log_ledger(self) -> None:
        """Draws the ledger up to the last release; however the run ended."""
        try:
            ledger = ledger_so_far(self._output / "ledger.jsonl")
        except ConfigError:  # missing or damaged; the run's own error says so
            return
        figure = epsilon_over_rounds(ledger, self._cfg.privacy.delta, self._accountants)
        with suppress(OSError):  # a full disk; the run's own error says so
            if ledger.not_private_reason is not None:  # whatever the configuration says by now
                self.record.add(tags={"dpexp.private": f"no: {ledger.not_private_reason}"})
            figure.savefig(self._output / "epsilon.png", dpi=150)
            self.record.add("epsilon.png")

    def end(self, status: str, reason: str | None = None) -> None:
        """Writes how the job ended, and waits for the server to get the rest."""
        rounds = self.logger.rounds() if self.logger.rounds else 0
        answered = self._mirror.close(self.record.end(status, reason, rounds), 2.0 if status == "KILLED" else 20.0)
        if answered and self._cfg.data.id is not None:
            from dpexp.tracking import data_budget

            data_budget.end(self._client, self._cfg.tracking.uri, self.run_id, self._output)
        if self._mirror.missed is not None:
            print_missed(self._mirror.missed, self._output)


def _planned_params(plan: PrivacyPlan) -> dict[str, str]:
    values = {"z": plan.noise_multiplier, "q": plan.sampling.q}
    if len(plan.bands) > 1:
        values["bands"] = len(plan.bands)
    for group in plan.groups:
        name = valid_name(group.name)
        values |= {f"S.{name}": group.S, f"sigma.{name}": group.sigma, f"share.{name}": group.share}
    return {f"plan.{name}": f"{value:.6g}" for name, value in values.items()}


@contextmanager
def track(
    cfg: DictConfig,
    plan: PrivacyPlan | None,
    output: Path,
    accountants: Sequence[str],
    planned: Ledger | None = None,
    stopped_by: Callable[[], str] = lambda: "the keyboard",
) -> Iterator[TrackedRun]:
    """Tracks a job; its run ends FINISHED, FAILED, or, after an interrupt (Ctrl-C, SIGTERM), KILLED.

    Args:
        planned: the most that the job will have released at its end; None if it is not private.
        stopped_by: names the signal that interrupted the job.
    """
    with exclusive(output):
        run = TrackedRun(cfg, plan, output, accountants, planned)
        status, reason = "FAILED", None
        try:
            if not run.resumed:
                run.log_start()
            yield run
            status = "FINISHED"
        except (KeyboardInterrupt, SystemExit):  # Lightning raises SystemExit after KeyboardInterrupt
            status, reason = "KILLED", f"interrupted by {stopped_by()}"
            raise
        except Exception as error:
            reason = published_error(error, output)
            error.tracked = True  # type: ignore[attr-defined]
            raise
        finally:
            try:
                run.log_ledger()
            finally:
                run.end(status, reason)


def _reopen(client: MlflowClient, run: Run, own: Mapping[str, str]) -> str:
    run_id: str = run.info.run_id
    client.update_run(run_id, status="RUNNING")
    for tag, value in own.items():
        client.set_tag(run_id, tag, value)
    if ERROR in run.data.tags:
        client.delete_tag(run_id, ERROR)
    return run_id


def record_failure(cfg: DictConfig, error: Exception) -> None:
    """Creates a FAILED run for a trial of a sweep whose training never started."""
    if cfg.tracking.uri is None or parent_id() is None or getattr(error, "tracked", False):
        return
    client, experiment_id = open_store(cfg.tracking.uri, cfg.tracking.experiment, cfg.tracking.artifacts)
    reason = published_error(error, Path(HydraConfig.get().runtime.output_dir))
    run = client.create_run(experiment_id, tags=tags(cfg, None) | {ERROR: reason}, run_name=run_name(cfg))
    client.set_terminated(run.info.run_id, "FAILED")
