"""Sweeps: one MLflow parent run above the trials.

Imports nothing slow, since every press of Tab runs it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from dpexp.commands import trial
from dpexp.commands.validate import refuse_taken
from dpexp.errors import ConfigError


class SweepCallback(Callback):
    """Begins the parent run, and refuses a folder that holds another run before Hydra writes into it.

    `conclude` ends the parent run, since Hydra calls no hook after a failed or interrupted sweep."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not OmegaConf.select(config, "checkpoint.resume"):
            _refuse_taken(Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global _sweep
        _refuse_other_sweep(config)
        if config.tracking.uri is not None:
            try:
                _sweep = Sweep(config)
            except Exception as error:  # Hydra would continue without a parent; it lets SystemExit through
                raise SystemExit(f"dpexp: {' '.join(str(error).split())}") from error


def _refuse_taken(folder: Path) -> None:
    try:
        refuse_taken(folder)
    except ConfigError as error:  # Hydra would continue; it lets SystemExit through
        raise SystemExit(f"dpexp: {error}") from error


def _refuse_other_sweep(config: DictConfig) -> None:
    """A sweep's folder may only be used again by the same sweep, which continues in it."""
    before = Path(config.hydra.sweep.dir) / "multirun.yaml"
    if before.exists():
        overrides = OmegaConf.select(OmegaConf.load(before), "hydra.overrides.task")
        if overrides != config.hydra.overrides.task:
            _refuse_taken(before.parent)


_sweep: "Sweep | None" = None


class Sweep:
    """The sweep that runs in this process."""

    def __init__(self, config: DictConfig) -> None:
        from dpexp.tracking.provenance import without_passwords
        from dpexp.tracking.run_labels import swept_keys
        from dpexp.tracking.sweep_run import SweepRun

        sweeper = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
        overrides = sorted(str(override) for override in config.hydra.overrides.task)
        question = config.hydra.runtime.choices.get("sweep")
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("hydra", "tracking")])
        content = [overrides, sweeper, OmegaConf.to_container(own, resolve=False)]
        key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
        swept = swept_keys(overrides, config.hydra.sweeper)
        varied_first = sorted(overrides, key=lambda override: override.lstrip("+").partition("=")[0] not in swept)
        name = question or without_passwords(", ".join(varied_first)) or "sweep"
        selects = str(config.hydra.runtime.choices.get("hydra/sweeper")) == "private_selection"
        facts = {
            "question": question,
            "overrides": [*map(without_passwords, overrides)],
            "selects": sweeper if selects else None,
        }
        self.parent = SweepRun(config, name, key, facts)
        self._output = Path(config.hydra.sweep.dir).resolve()

    @property
    def draws(self) -> list[list[str]] | None:
        """The trials that private selection has drawn in an earlier start of this sweep."""
        found = self.parent.facts.get("draws")
        if found is None and self.parent.resumed:
            raise ConfigError(
                "the draws of this sweep's earlier start are lost, and new ones would not be those accounted for; "
                "start again with tracking.resume=false."
            )
        return found

    def conclude(self, interrupted: bool, has_failed: bool) -> None:
        from dpexp.commands.selection import cost
        from dpexp.reporting import terminal
        from dpexp.reporting.comparisons import best_of_trials

        frame = self.parent.trials()
        if has_failed and frame.empty and not self.parent.resumed:
            self.parent.discard()
            return
        failed = frame[frame["status"] != "FINISHED"] if not frame.empty else frame
        costs, sentence = cost(frame, self.parent.ledgers(), self.parent.facts)
        best = None if frame.empty else best_of_trials(frame)
        note = _note(frame, failed, best, costs, sentence)
        status = "KILLED" if interrupted else "FAILED" if len(failed) or has_failed else "FINISHED"
        metrics = {f"selection/{key}": value for key, value in costs.items()}
        self.parent.conclude(frame, metrics, note, status, self._output)
        terminal.print_sweep(frame, failed, best, costs, sentence, self.parent.address)


def earlier_draws() -> list[list[str]] | None:
    """The trials that private selection has drawn in an earlier start of the sweep in this process."""
    return _sweep.draws if _sweep is not None else None


def remember_draws(draws: list[list[str]], worst_case_rdp: list[float]) -> None:
    """Stores the draws and their cost for a later start, which must neither draw nor account anew."""
    if _sweep is not None:
        _sweep.parent.remember({"draws": draws, "worst_case_rdp": worst_case_rdp})


def under_way() -> bool:
    """Whether this process runs a sweep whose trials are tracked."""
    return _sweep is not None


def conclude(interrupted: bool, failed: bool) -> None:
    """Ends the parent run of the sweep in this process, if there is one.

    Args:
        interrupted, failed: the sweep was interrupted; it ended with an error.

    Raises:
        ConfigError: the tracking server cannot be reached.
    """
    global _sweep
    ended, _sweep = _sweep, None
    trial.end()
    if ended is None:
        return
    try:
        ended.conclude(interrupted, failed)
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split()[:30])
        raise ConfigError(
            f"the sweep's parent run could not be ended; start the same command again. {words}"
        ) from error


def _note(frame: Any, failed: Any, best: Any, costs: dict[str, float], sentence: str) -> str:
    lines = [f"{len(frame)} trials, {len(failed)} of which did not finish."]
    if best is not None:
        lines.append(f"Best: **{best['name']}**, test accuracy {best['test_accuracy']:.2%}.")
    lines += [sentence, ""]
    lines += [f"- {row['name']}: {row['status']}: {row['error'] or 'unknown reason'}" for _, row in failed.iterrows()]
    return "\n".join(lines)
