"""MLflow: the only place that knows it."""

import json
import logging
import os
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param
from mlflow.exceptions import MlflowException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import MLFlowLogger

from dpexp.accounting.calibration import Calibration
from dpexp.accounting.ledger import read_ledger
from dpexp.display import plan_json
from dpexp.errors import ConfigError
from dpexp.figures import epsilon_over_rounds
from dpexp.privacy.plan import PrivacyPlan

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
_PARAM_LIMIT = 6000


class _MetricsLogger(MLFlowLogger):
    """Metrics only, since the whole configuration is logged as such; and not Lightning's count of epochs."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)


class Run:
    """One MLflow run."""

    def __init__(
        self, cfg: DictConfig, plan: PrivacyPlan | None, output: Path, accountants: Sequence[str]
    ) -> None:  # fmt: skip
        self._cfg = cfg
        self._accountants = accountants
        self._output = output
        uri = cfg.tracking.uri
        with _first_use(uri):
            self._client = MlflowClient(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name(cfg.tracking.experiment)
            experiment_id = (
                experiment.experiment_id
                if experiment
                else self._client.create_experiment(cfg.tracking.experiment, artifact_location=cfg.tracking.artifacts)
            )
        self._end_dead_runs(experiment_id)
        run = self._client.create_run(experiment_id, tags=_tags(cfg, plan), run_name=_run_name(cfg))
        self.run_id: str = run.info.run_id
        self.logger = _MetricsLogger(experiment_name=cfg.tracking.experiment, tracking_uri=uri, run_id=self.run_id)

    def log_start(self, cfg: DictConfig, plan: PrivacyPlan | None) -> None:
        flat = _flatten(OmegaConf.to_container(cfg, resolve=True))
        params = [Param(_metric_name(key), str(value)[:_PARAM_LIMIT]) for key, value in flat.items()]
        metrics = []
        if plan is not None:
            values = {"noise_multiplier": plan.noise_multiplier, "q": plan.sampling.q}
            for group in plan.groups:
                name = _metric_name(group.name)
                values |= {f"S/{name}": group.S, f"sigma/{name}": group.sigma, f"share/{name}": group.share}
            metrics = [Metric(key, value, 0, 0) for key, value in values.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self.run_id, params=params[start : start + 100])
        self._client.log_batch(self.run_id, metrics=metrics)
        source = json.dumps({"module": cfg.data.module.get("_target_")})
        facts = json.dumps({"n": cfg.data.n})
        name = _choices().get("data", "data")
        dataset = Dataset(name, f"n={cfg.data.n}", "code", source, profile=facts)
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
        self._client.log_text(self.run_id, OmegaConf.to_yaml(HydraConfig.get().overrides.task), "overrides.yaml")
        self._client.log_artifact(self.run_id, str(self._output / "config.yaml"))
        if plan is not None:
            if plan.calibration is not None:
                self._log_calibration(plan.calibration)
            (self._output / "plan.json").write_text(plan_json(plan))
            self._client.log_artifact(self.run_id, str(self._output / "plan.json"))

    def _log_calibration(self, solved: Calibration) -> None:
        """Each probe is a step, so that the UI draws how the knob was found."""
        self._client.log_batch(
            self.run_id,
            metrics=[
                Metric(key, value, 0, step)
                for step, probe in enumerate(solved.trace)
                for key, value in zip((f"calibration/{solved.knob}", "calibration/epsilon"), probe, strict=True)
            ],
        )
        self._client.log_batch(self.run_id, metrics=[Metric(solved.knob, solved.value, 0, 0)])

    def finish(self, result: dict[str, Any], output: Path) -> None:
        """Logs what is known at the end."""
        for key, value in result.get("epsilon", {}).items():
            self._client.log_batch(self.run_id, metrics=[Metric(f"epsilon_{key}", value, 0, result["rounds"])])
        self._client.log_artifact(self.run_id, str(output / "result.json"))

    def log_ledger(self) -> None:
        """The ledger up to the last release and its figure, however the run ended."""
        ledger_path = self._output / "ledger.jsonl"
        if not ledger_path.exists():
            return
        self._client.log_artifact(self.run_id, str(ledger_path))
        figure = epsilon_over_rounds(read_ledger(ledger_path), self._cfg.privacy.delta, self._accountants)
        figure.savefig(self._output / "epsilon.png", dpi=150)
        self._client.log_artifact(self.run_id, str(self._output / "epsilon.png"))

    def end(self, status: str) -> None:
        self._client.set_terminated(self.run_id, status)

    def _end_dead_runs(self, experiment_id: str) -> None:
        """A run killed outright stays RUNNING for ever; ends those whose process on this machine is gone."""
        running = self._client.search_runs(
            [experiment_id],
            f"attributes.status = 'RUNNING' and tags.`dpexp.host` = '{socket.gethostname()}'",
        )
        for run in running:
            if not _alive(int(run.data.tags.get("dpexp.pid", "0"))):
                self._client.set_terminated(run.info.run_id, "KILLED")


@contextmanager
def downloaded_run(uri: str, run_id: str) -> Iterator[Path]:
    """A folder with a run's ledger and configuration.

    Raises:
        ConfigError: there is no such run, or it has no ledger.
    """
    client = MlflowClient(tracking_uri=uri)
    with tempfile.TemporaryDirectory() as folder:
        try:
            files = {artifact.path for artifact in client.list_artifacts(run_id)}
            if "ledger.jsonl" not in files:
                raise ConfigError(f"the MLflow run {run_id} has no ledger.jsonl among its artifacts.")
            for name in sorted(files & {"ledger.jsonl", "config.yaml"}):
                client.download_artifacts(run_id, name, folder)
        except MlflowException as error:
            raise ConfigError(
                f"{run_id} is neither a file, nor a folder, nor a run of {uri}: {' '.join(str(error).split())}"
            ) from error
        yield Path(folder)


def log_cost(uri: str, run_id: str, costs: Mapping[str, float], rounds: int) -> None:
    """Adds metrics to a run that has ended."""
    MlflowClient(tracking_uri=uri).log_batch(
        run_id, metrics=[Metric(key, value, int(time.time() * 1000), rounds) for key, value in costs.items()]
    )


@contextmanager
def track(cfg: DictConfig, plan: PrivacyPlan | None, output: Path, accountants: Sequence[str]) -> Iterator[Run | None]:
    """A run that ends FINISHED, FAILED or KILLED, as it was. An interrupt (Ctrl-C, SIGTERM) is KILLED."""
    if cfg.tracking.uri is None:
        yield None
        return
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="mlflow")
    try:
        run = Run(cfg, plan, output, accountants)
    except (MlflowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"tracking.uri={cfg.tracking.uri} cannot be used: {reason}") from error
    status = "FAILED"
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        run.log_start(cfg, plan)
        yield run
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        try:
            run.log_ledger()
        finally:
            run.end(status)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _tags(cfg: DictConfig, plan: PrivacyPlan | None) -> dict[str, str]:
    choices = _choices()
    privacy = ("group", "bound", "mechanism", "allocation", "sampling") if plan else ()
    tags = {f"dpexp.{name}": str(choices.get(name)) for name in ("data", "model", *privacy)}
    private = "yes"
    if plan is None:
        private = "no: trained without privacy"
    elif cfg.diagnostics == "unsafe":
        private = "no: unsafe diagnostics"
    elif cfg.privacy.noise_seed is not None:
        private = "no: the noise seed is known"
    return tags | {
        "dpexp.private": private,
        "dpexp.pid": str(os.getpid()),
        "dpexp.host": socket.gethostname(),
    }


def _run_name(cfg: DictConfig) -> str:
    if cfg.tracking.run_name:
        return cfg.tracking.run_name
    choices = _choices()
    if not cfg.privacy.enabled:
        return f"{choices.get('data')} non-private"
    return f"{choices.get('data')} {choices.get('group')} {choices.get('mechanism')}"


def _choices() -> dict[str, str]:
    """Which option of each configuration group was chosen."""
    return dict(HydraConfig.get().runtime.choices)


@contextmanager
def _first_use(uri: str) -> Iterator[None]:
    """Several processes that create the same SQLite store at once would break each other."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(database.with_suffix(".lock")):
        yield


def _flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
        return {prefix: json.dumps(node) if isinstance(node, list | dict) else node}
    return {
        key: value
        for name, child in node.items()
        for key, value in _flatten(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _metric_name(group: str) -> str:
    return group.replace("(", "").replace(")", "")


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
