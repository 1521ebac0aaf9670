"""Multiruns: one parent above the trials.

Imports nothing slow, since every press of Tab runs it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from pandas import DataFrame

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, joined
from dpexp.accounting.multiple_runs import selection_epsilon, trial_curve
from dpexp.commands import trial
from dpexp.commands.validate import refuse_taken
from dpexp.errors import ConfigError
from dpexp.reporting.comparisons import best_of_trials as _best
from dpexp.reporting.wording import up
from dpexp.tracking.sweep_run import Spent


def cost(frame: DataFrame, spent: Spent, facts: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """ε of one trial, of all of them, and of private selection where the trials were drawn for it.

    Args:
        frame: the trials, each once; spent: everything that was ever spent on them.
        facts: of the sweep: `selects`, the sweeper's mean and shape or null, its `draws`, and `dearest`, the Rényi DP
            of what they were drawn from.

    Returns:
        ε by kind of claim, and the sentence that says which of them may be made.
    """
    if spent.exposed:
        return {}, f"Nothing may be claimed: {', '.join(spent.exposed)} show more than their (ε, δ) covers."
    if spent.missing:
        return {}, f"Nothing may be claimed: the ledgers of {', '.join(spent.missing)} are not at hand."
    every = spent.ledgers
    if not every:
        return {}, "No private trial has trained, so nothing has been spent."
    private = frame[(frame["status"] == "FINISHED") & frame["epsilon"].notna()]
    adjacencies = sorted({ledger.adjacency for ledger in every.values()})
    if len(adjacencies) > 1:
        return (
            {},
            f"The trials are stated for different adjacencies ({', '.join(adjacencies)}) and cannot be composed.",
        )
    units = sorted({ledger.unit for ledger in every.values()})
    if len(units) > 1:
        return {}, f"The trials are about different privacy units ({', '.join(units)}) and cannot be composed."
    delta = float(frame["delta"].max())
    costs, sentences = {"delta": delta}, []
    if len(private):
        costs["one_trial"] = float(private["epsilon"].max())
        sentences.append(
            f"ε = {up(costs['one_trial'], 3)} (one trial) may be claimed only if the choice used no private data"
        )
    if facts.get("selects"):
        sentences = [_selection(costs, [every[run_id] for run_id in private["run_id"]], len(every), facts)]
    try:
        costs["all_composed"] = epsilon(joined(list(every.values())), delta)
        early = sum(ledger.truncated for ledger in every.values())
        begun = f", {len(every) - len(private)} unfinished included" if len(every) > len(private) else ""
        begun += f", {early} with a ledger that ends early" if early else ""
        sentences.append(
            f"ε = {up(costs['all_composed'], 3)} (all private trials composed{begun}) covers any choice among them"
        )
    except ConfigError as error:
        sentences.append(f"the trials cannot be composed: {error}")
    return costs, f"At δ = {up(delta, 4)}, adjacency {adjacencies[0]}: " + "; ".join(sentences) + "."


def _selection(costs: dict[str, float], finished: list[Ledger], begun: int, facts: Mapping[str, Any]) -> str:
    """Adds the price of private selection to `costs` if it may be claimed; says so, or why not."""
    try:
        why = _unclaimable(finished, begun, facts)
    except ConfigError as error:
        why = str(error)
    if why is not None:
        return f"private selection cannot be claimed, because {why}"
    mean, shape = float(facts["selects"]["mean"]), float(facts["selects"]["shape"])
    costs["private"] = selection_epsilon(np.array(facts["dearest"]), costs["delta"], mean, shape)
    return (
        f"ε = {up(costs['private'], 3)} (private selection) may be claimed for the best trial, if the others and their "
        "number stay secret"
    )


def _unclaimable(finished: list[Ledger], begun: int, facts: Mapping[str, Any]) -> str | None:
    """Why the price of private selection may not be claimed."""
    if facts.get("dearest") is None:
        return "its price was not fixed before trials were drawn"
    if len(finished) != len(facts.get("draws") or []):
        return "the trials are not those that were drawn"
    if begun > len(finished):
        return "some trials were begun more than once"
    if any((trial_curve(ledger) > np.array(facts["dearest"]) * (1 + 1e-9)).any() for ledger in finished):
        return "a trial cost more than the dearest of the grid was to cost"
    return None


class SweepCallback(Callback):
    """Begins the parent run; `conclude` ends it, since Hydra calls no hook after a failed or interrupted sweep. Keeps
    Hydra from writing into a folder that is taken."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not OmegaConf.select(config, "checkpoint.resume"):
            _free(Path(config.hydra.run.dir))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global _sweep
        _same_sweep(config)
        if config.tracking.uri is not None:
            try:
                _sweep = Sweep(config)
            except Exception as error:  # Hydra would go on without a parent; it lets SystemExit through
                raise SystemExit(f"dpexp: {' '.join(str(error).split())}") from error


def _free(folder: Path) -> None:
    try:
        refuse_taken(folder)
    except ConfigError as error:  # Hydra would go on; it lets SystemExit through
        raise SystemExit(f"dpexp: {error}") from error


def _same_sweep(config: DictConfig) -> None:
    """A sweep's folder may only be used again by the same sweep, which goes on in it."""
    before = Path(config.hydra.sweep.dir) / "multirun.yaml"
    if before.exists():
        asked = OmegaConf.select(OmegaConf.load(before), "hydra.overrides.task")
        if asked != config.hydra.overrides.task:
            _free(before.parent)


_sweep: "Sweep | None" = None


class Sweep:
    """The multirun under way in this process."""

    def __init__(self, config: DictConfig) -> None:
        from dpexp.tracking.provenance import without_passwords
        from dpexp.tracking.sweep_keys import swept_keys
        from dpexp.tracking.sweep_run import Parent

        sweeper = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
        asked = sorted(str(override) for override in config.hydra.overrides.task)
        question = config.hydra.runtime.choices.get("sweep")
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("hydra", "tracking")])
        content = [asked, sweeper, OmegaConf.to_container(own, resolve=False)]
        key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
        swept = swept_keys(asked, config.hydra.sweeper)
        varied_first = sorted(asked, key=lambda override: override.lstrip("+").partition("=")[0] not in swept)
        name = question or without_passwords(", ".join(varied_first)) or "sweep"
        selects = str(config.hydra.runtime.choices.get("hydra/sweeper")) == "private_select"
        facts = {
            "question": question,
            "overrides": [*map(without_passwords, asked)],
            "selects": sweeper if selects else None,
        }
        self.parent = Parent(config, name, key, facts)
        self._output = Path(config.hydra.sweep.dir).resolve()

    @property
    def draws(self) -> list[list[str]] | None:
        """What private selection has drawn in an earlier start.

        Raises:
            ConfigError: it is lost.
        """
        found = self.parent.facts.get("draws")
        if found is None and self.parent.resumed:
            raise ConfigError(
                "the draws of this sweep's earlier start are lost, and others would not be those accounted for; "
                "start afresh with tracking.resume=false."
            )
        return found

    def conclude(self, interrupted: bool, broken: bool) -> None:
        from dpexp.commands.sweep import cost
        from dpexp.reporting import terminal

        frame = self.parent.trials()
        if broken and frame.empty and not self.parent.resumed:
            self.parent.withdraw()
            return
        failed = frame[frame["status"] != "FINISHED"] if not frame.empty else frame
        costs, sentence = cost(frame, self.parent.spent(), self.parent.facts)
        best = None if frame.empty else _best(frame)
        note = _note(frame, failed, best, costs, sentence)
        status = "KILLED" if interrupted else "FAILED" if len(failed) or broken else "FINISHED"
        metrics = {f"selection/{key}": value for key, value in costs.items()}
        self.parent.conclude(frame, metrics, note, status, self._output)
        terminal.swept(frame, failed, best, costs, sentence, self.parent.address)


def earlier_draws() -> list[list[str]] | None:
    """What private selection has drawn in an earlier start of the sweep in this process."""
    return _sweep.draws if _sweep is not None else None


def remember_draws(draws: list[list[str]], dearest: list[float]) -> None:
    """A second draw would not be the one that is accounted; nor would a price of later be that of the draw."""
    if _sweep is not None:
        _sweep.parent.remember({"draws": draws, "dearest": dearest})


def under_way() -> bool:
    """Whether this process has begun a multirun whose trials are tracked."""
    return _sweep is not None


def conclude(interrupted: bool, broken: bool) -> None:
    """Ends the parent of the multirun in this process, if there is one.

    Args:
        broken: the sweep ended with an error.

    Raises:
        ConfigError: the tracking server cannot be reached.
    """
    global _sweep
    ended, _sweep = _sweep, None
    trial.end()
    if ended is None:
        return
    try:
        ended.conclude(interrupted, broken)
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
    lines += [f"- {row['name']}: {row['status']}: {row['error'] or 'no reason known'}" for _, row in failed.iterrows()]
    return "\n".join(lines)
