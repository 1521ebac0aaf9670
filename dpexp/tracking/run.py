"""One experiment as an MLflow run."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from mlflow.entities import Dataset, DatasetInput, InputTag, Run
from mlflow.exceptions import MlflowException
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers.logger import Logger

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, ledger_so_far, write_ledger
from dpexp.config import COMMAND, exposed
from dpexp.errors import ConfigError
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.reporting.run_figures import epsilon_over_rounds
from dpexp.reporting.terminal import kept_for_later, plan_json
from dpexp.tracking.client import (
    ERROR,
    OUTPUT,
    SAME,
    TRIED,
    Outbox,
    address,
    end_dead_runs,
    keep_error,
    open_store,
    send_unsent,
    show_columns,
)
from dpexp.tracking.data_budget import reserved, tags_of
from dpexp.tracking.job_folder import BEGUN, PROMISED, RUN, alone
from dpexp.tracking.provenance import HOST, PATCH_RESUMED, origin, without_passwords, write_patch
from dpexp.tracking.registered_model import check_name, description
from dpexp.tracking.resumed_run import reopened
from dpexp.tracking.run_costs import RELEASED
from dpexp.tracking.sweep_keys import swept_keys

_PARAM_LIMIT = 6000
NAME = 250  # characters of a run's name
_NAMELESS = (
    "sweep=",
    "tracking",
    "hydra",
    "checkpoint",
    "data.id",
    "privacy.budget",
)  # overrides that do not tell runs apart
PARENT = "DPEXP_PARENT_RUN"  # an environment variable, which reaches the processes of every launcher


class _MetricsLogger(Logger):
    """Lightning's metrics, but not its count of epochs; the configuration is logged elsewhere.

    Everything is logged at the number of rounds done, which for validation Lightning itself counts one short: only then
    has accuracy the ε of the same step beside it.
    """

    rounds: Callable[[], int] | None = None

    def __init__(self, outbox: Outbox, run_id: str) -> None:
        super().__init__()
        self._outbox = outbox
        self._run_id = run_id

    @property
    def name(self) -> str:
        return "mlflow"

    @property
    def version(self) -> str:
        return self._run_id

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        done = self.rounds() if self.rounds is not None else step or 0
        names = sorted(metrics, key=lambda name: not name.endswith("accuracy"))  # listed first
        self._outbox.metrics({name: metrics[name] for name in names if name != "epoch"}, done)


class Tracked:
    """A run that has begun. What goes wrong with the server from then on does not reach the training."""

    def __init__(
        self,
        cfg: DictConfig,
        plan: PrivacyPlan | None,
        output: Path,
        accountants: Sequence[str],
        promised: Ledger | None,
    ) -> None:
        self._cfg = cfg
        self._plan = plan
        self._accountants = accountants
        self._output = output
        uri = cfg.tracking.uri
        client, experiment_id = open_store(uri, cfg.tracking.experiment, cfg.tracking.artifacts)
        if cfg.register is not None:
            check_name(client, cfg.register)
        try:
            end_dead_runs(client, experiment_id)
            with reserved(cfg, client, promised, output):
                earlier = reopened(client, output) if cfg.checkpoint.resume else None
                about = tags(cfg, plan) | tags_of(cfg) | {OUTPUT: str(output.resolve())}
                run = earlier or client.create_run(experiment_id, tags=about, run_name=_run_name(cfg))
                (output / RUN).write_text(run.info.run_id)
        except MlflowException as error:
            raise ConfigError(f"tracking.uri={uri} cannot be used: {' '.join(str(error).split())}") from error
        self.resumed = earlier is not None
        self.run_id: str = run.info.run_id
        client.set_tag(self.run_id, OUTPUT, str(output.resolve()))
        self._unsent = Path(cfg.tracking.offline_dir)
        send_unsent(client, uri, self._unsent)
        show_columns(client, experiment_id)
        self.address = address(uri, experiment_id)
        self._outbox = Outbox(client, uri, self.run_id, self._unsent / f"{self.run_id}.jsonl")
        if (output / PROMISED).exists():
            self._outbox.file(output / PROMISED)
        self.logger = _MetricsLogger(self._outbox, self.run_id)
        if earlier is not None and (patch := write_patch(output, PATCH_RESUMED)) is not None:
            self._outbox.file(patch)
        source = json.dumps({"module": cfg.data.module.get("_target_")})
        dataset = Dataset(
            _choices().get("data", "data"), f"n={cfg.data.n}", "code", source, profile=json.dumps({"n": cfg.data.n})
        )
        client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])

    def log_start(self) -> None:
        self._outbox.params(params(OmegaConf.to_container(self._cfg, resolve=True)))
        overrides = self._output / "overrides.yaml"
        overrides.write_text(without_passwords(OmegaConf.to_yaml(HydraConfig.get().overrides.task)))
        self._outbox.file(overrides)
        patch = write_patch(self._output)
        if patch is not None:
            self._outbox.file(patch)
        self._outbox.file(self._output / "config.yaml")
        if self._plan is not None:
            self._log_plan(self._plan)

    def _log_plan(self, plan: PrivacyPlan) -> None:
        planned = plan.ledger()
        told = {"z": plan.noise_multiplier, "q": plan.sampling.q}
        for group in plan.groups:
            name = _plain(group.name)
            told |= {f"S.{name}": group.S, f"sigma.{name}": group.sigma, f"share.{name}": group.share}
        self._outbox.params({f"plan.{name}": f"{value:.6g}" for name, value in told.items()})
        if len(plan.bands) > 1:
            self._outbox.params({"plan.bands": str(len(plan.bands))})
        (self._output / "plan.json").write_text(plan_json(plan))
        write_ledger(self._output / "planned_ledger.jsonl", planned)
        self._outbox.file(self._output / "plan.json")
        self._outbox.file(self._output / "planned_ledger.jsonl")

    def log_planned(self) -> None:
        """Figures of the plan, after those of what happened: MLflow lists what was logged first on top."""
        if (plan := self._plan) is None:
            return
        values = {
            "noise_multiplier": plan.noise_multiplier,
            "sampling_rate": plan.sampling.q,
            "rounds": plan.rounds,
            "delta": self._cfg.privacy.delta,
            "epsilon_planned": epsilon(plan.ledger(), self._cfg.privacy.delta, self._accountants[0]),
        }
        for event in plan.preprocessing:
            figure = "epsilon" if event.noise == "laplace" else "mu"
            values |= {f"preprocessing/{_plain(event.query)}/{figure}": event.ratio(plan.adjacency)}
        solved = plan.calibration
        if solved is not None and solved.knob not in {*SAME, "noise_multiplier"}:
            values[solved.knob] = solved.value
        self._outbox.metrics(values, 0)
        if solved is None:
            return
        for step, (value, cost) in enumerate(solved.trace):
            self._outbox.metrics({f"{TRIED}{solved.knob}": value, f"{TRIED}{solved.target}": cost}, step)

    def finish(self, result: dict[str, Any]) -> None:
        """Logs what is known at the end."""
        others = {f"epsilon_{key}": value for key, value in result.get("epsilon", {}).items()}
        others.pop(
            f"epsilon_{self._accountants[0]}" if self._accountants else "", None
        )  # `epsilon`, or the planned one
        others |= result.get("risk", {}) | {f"audit/{name}": value for name, value in result.get("audit", {}).items()}
        told = result.get("prepared", {})
        others |= {f"{_plain(name)}/{k}": number for name, told_ in told.items() for k, number in enumerate(told_)}
        self._outbox.metrics(others, result["rounds"])
        if "step" in result:
            self._outbox.tags({"dpexp.step": result["step"]})
        figures = ["audit.png", "released.png", "signal.png", *(f"{name}.png" for name in told)]
        for name in ("result.json", *figures):
            if (self._output / name).exists():
                self._outbox.file(self._output / name)

    def log_model(self, about: Mapping[str, str], rounds: int) -> None:
        """Logs the model that lies in the job's folder, and registers it if that is asked for."""
        for name in ("weights.safetensors", "card.md"):
            self._outbox.file(self._output / name)
        self._outbox.tags({"mlflow.note.content": description(self._output)})
        folder = self._output / "mlflow_model"
        if folder.exists():
            self._outbox.model(folder, rounds, about, self._cfg.register)

    def log_ledger(self) -> None:
        """The ledger up to the last release and its figure, however the run ended; if it lost its ledger, the one that
        was rescued."""
        if (self._output / PROMISED).exists() and not (self._output / BEGUN).exists():
            self._outbox.tags({RELEASED: "nothing"})
        for pattern in ("ledger*.jsonl", "ledger*.end.json"):  # in this order: a ledger may have gone on after its end
            for path in sorted(self._output.glob(pattern)):
                self._outbox.file(path)
        try:
            ledger = ledger_so_far(self._output / "ledger.jsonl")
        except ConfigError:  # none was begun, or it was damaged; the run's own end says so
            return
        if ledger.not_private_reason is not None:  # whatever the configuration says by now
            self._outbox.tags({"dpexp.private": f"no: {ledger.not_private_reason}"})
        figure = epsilon_over_rounds(ledger, self._cfg.privacy.delta, self._accountants)
        with suppress(OSError):  # a full disk; the run's own end says so
            figure.savefig(self._output / "epsilon.png", dpi=150)
            self._outbox.file(self._output / "epsilon.png")

    def end(self, status: str, reason: str | None = None) -> None:
        if reason is not None:
            self._outbox.tags({ERROR: reason})
        if not self._outbox.close(status):
            kept_for_later(self._unsent)


@contextmanager
def track(
    cfg: DictConfig,
    plan: PrivacyPlan | None,
    output: Path,
    accountants: Sequence[str],
    promised: Ledger | None = None,
    stopped_by: Callable[[], str] = lambda: "the keyboard",
) -> Iterator[Tracked]:
    """A run that ends FINISHED, FAILED or KILLED, as it was. An interrupt (Ctrl-C, SIGTERM) is KILLED.

    Args:
        promised: what the job will have released at its end, at most.
        stopped_by: names the signal that interrupted it.
    """
    with alone(output), _tracked(Tracked(cfg, plan, output, accountants, promised), output, stopped_by) as run:
        yield run


@contextmanager
def _tracked(run: Tracked, output: Path, stopped_by: Callable[[], str]) -> Iterator[Tracked]:
    status, reason = "FAILED", None
    try:
        if not run.resumed:
            run.log_start()
        yield run
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit):  # Lightning makes one of the other
        status, reason = "KILLED", f"interrupted by {stopped_by()}"
        raise
    except Exception as error:
        reason = keep_error(error, output)
        error.tracked = True  # type: ignore[attr-defined]
        raise
    finally:
        try:
            run.log_planned()
            run.log_ledger()
        finally:
            run.end(status, reason)


def parent_id() -> str | None:
    """The sweep that this trial belongs to."""
    return os.environ.get(PARENT) if HydraConfig.get().mode == RunMode.MULTIRUN else None


def trial_key(cfg: DictConfig) -> str:
    """Trials of the same resolved configuration are the same trial, wherever they are tracked."""
    content = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(content, dict)
    aside = ["tracking", "rounds", "checkpoint", "register", "verbose"]
    if not cfg.privacy.enabled:  # twins of whatever is private
        aside += [
            "privacy",
            "privacy_unit",
            "group",
            "clip_norm",
            "mechanism",
            "clip_rule",
            "allocation",
            "accountant",
            "calibrate",
            "schedule",
        ]
    content = {section: value for section, value in content.items() if section not in aside}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def finished_trial(cfg: DictConfig) -> Run | None:
    """This trial, if an earlier start of the same sweep has finished it."""
    if parent_id() is None:
        return None
    client, experiment_id = open_store(cfg.tracking.uri, cfg.tracking.experiment, cfg.tracking.artifacts)
    found = client.search_runs(
        [experiment_id],
        f"attributes.status = 'FINISHED' and tags.`mlflow.parentRunId` = '{parent_id()}' "
        f"and tags.`dpexp.config_hash` = '{trial_key(cfg)}'",
        max_results=1,
    )
    return found[0] if found else None


def unfinished_trial(cfg: DictConfig) -> Path | None:
    """The folder of this trial, if an earlier start of the same sweep began it on this machine and was interrupted."""
    if parent_id() is None:
        return None
    client, experiment_id = open_store(cfg.tracking.uri, cfg.tracking.experiment, cfg.tracking.artifacts)
    end_dead_runs(client, experiment_id)
    found = client.search_runs(
        [experiment_id],
        f"attributes.status = 'KILLED' and tags.`mlflow.parentRunId` = '{parent_id()}' "
        f"and tags.`dpexp.config_hash` = '{trial_key(cfg)}' and tags.`dpexp.host` = '{HOST}'",
        max_results=1,
    )
    return Path(found[0].data.tags[OUTPUT]) if found and OUTPUT in found[0].data.tags else None


def record_failure(cfg: DictConfig, error: Exception) -> None:
    """Leaves a run that says why a trial of a sweep never came to training."""
    if cfg.tracking.uri is None or parent_id() is None or getattr(error, "tracked", False):
        return
    client, experiment_id = open_store(cfg.tracking.uri, cfg.tracking.experiment, cfg.tracking.artifacts)
    reason = keep_error(error, Path(HydraConfig.get().runtime.output_dir))
    run = client.create_run(experiment_id, tags=tags(cfg, None) | {ERROR: reason}, run_name=_run_name(cfg))
    client.set_terminated(run.info.run_id, "FAILED")


def tags(cfg: DictConfig, plan: PrivacyPlan | None) -> dict[str, str]:
    choices = _choices()
    privacy = (
        ("group", "clip_norm", "mechanism", "clip_rule", "allocation", "noise", "sampling")
        if cfg.privacy.enabled
        else ()
    )
    found = {f"dpexp.{name}": str(choices.get(name)) for name in ("data", "model", *privacy)}
    why = exposed(cfg)
    private = "yes" if why is None else f"no: {why}"
    found |= origin() | {"dpexp.private": private, "dpexp.pid": str(os.getpid())}
    found |= {"dpexp.config_hash": trial_key(cfg), "dpexp.seed": str(cfg.seed)}
    if plan is not None:
        found |= {
            "dpexp.adjacency": plan.adjacency,
            "dpexp.privacy_unit": str(plan.privacy_unit),
            "dpexp.calibrate": cfg.calibrate,
        }
    parent = parent_id()
    return found | ({"mlflow.parentRunId": parent} if parent else {})


def _run_name(cfg: DictConfig) -> str:
    """What was asked for; what a sweep varies comes first, since the list of runs cuts names off."""
    if cfg.tracking.run_name:
        return str(cfg.tracking.run_name)[:NAME]
    asked = [override for override in map(str, HydraConfig.get().overrides.task) if not override.startswith(_NAMELESS)]
    if parent_id():
        given = [word for word in shlex.split(os.environ.get(COMMAND, "")) if "=" in word and word[0] != "-"]
        swept = swept_keys(given, HydraConfig.get().sweeper)
        asked.sort(key=lambda override: (_key(override) not in swept, _key(override) == "seed"))
    keys = [_key(override).rpartition(".")[2] for override in asked]
    short = [o[o.index(key) :] if keys.count(key) == 1 else o for o, key in zip(asked, keys, strict=True)]
    of_all = [_choices().get(name) for name in ("data", "model", "group", "mechanism")]
    return without_passwords(", ".join(short))[:NAME] or " ".join(map(str, of_all))


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _choices() -> dict[str, str]:
    """Which option of each configuration group was chosen."""
    return dict(HydraConfig.get().runtime.choices)


def params(values: Any) -> dict[str, str]:
    """A configuration as parameters that MLflow takes, without passwords."""
    return {_plain(key): without_passwords(str(value))[:_PARAM_LIMIT] for key, value in _flatten(values).items()}


def _flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
        return {prefix: json.dumps(node) if isinstance(node, list | dict) else node}
    return {
        key: value
        for name, child in node.items()
        for key, value in _flatten(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _plain(name: str) -> str:
    """With no characters but those that MLflow takes in names."""
    return re.sub(r"[^\w.\- :/]", "", name)
