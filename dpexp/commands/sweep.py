"""Sweeps: Hydra's sweepers, and one MLflow parent run above the trials.

All trials are checked before the first starts. Imports nothing slow, since every press of Tab runs it.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dpexp._hydra_compat import BasicSweeper
from dpexp.commands.trial import forget_trials, name_of, remember_trials
from dpexp.commands.validate import not_private_reason, taken
from dpexp.config import Tracking
from dpexp.errors import ConfigError, in_one_line

if TYPE_CHECKING:
    from dpexp.accounting.ledger import Ledger

# Sweepers


class Grid(BasicSweeper):
    """`hydra/sweeper=grid`: Hydra's `basic`, which checks every trial before the first starts."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Checks the trials of all batches when the first batch is about to start."""
        if self.batch_index > 1:
            return
        assert self.overrides is not None
        members = [list(overrides) for batch in self.overrides for overrides in batch]
        remember_trials(members)
        from dpexp.commands.train import refuse_impossible_trial

        refused = []
        for number, overrides in enumerate(members):
            try:
                refuse_impossible_trial(self._compose(overrides, number))
            except ConfigError as error:
                refused.append(f"trial {number + 1} of {len(members)} ({name_of(overrides)}): {error}")
        if refused:
            more = f" (Nor can {len(refused) - 1} more.)" if len(refused) > 1 else ""
            raise ConfigError(f"no trial was started, since one cannot run: {refused[0]}{more}")

    def _compose(self, overrides: list[str], number: int = 0) -> DictConfig:
        """The configuration of a trial, as its launcher will compose it."""
        assert self.hydra_context is not None and self.config is not None
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = number
        HydraConfig.instance().set_config(cfg)
        return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


class PrivateSelection(Grid):
    """`hydra/sweeper=private_selection`: a random number of trials, each drawn at random from the grid.

    The best trial then costs a known ε (Papernot & Steinke 2022), that of the grid's worst case: all members of the
    grid are planned before any is drawn.

    Args:
        mean: of the number of trials.
        shape: η; 1 for geometric, 0 for logarithmic, inf for Poisson (see accounting.multiple_runs).
    """

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None, mean: float, shape: float) -> None:
        from dpexp.accounting.multiple_runs import check_repetitions

        super().__init__(max_batch_size, params)
        check_repetitions(mean, shape)
        self._mean, self._shape = mean, shape

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Draws the trials of private selection; those of a sweep that is started again are the ones drawn before."""
        batch = _sweep.parent.facts.get("draws") if _sweep is not None else None
        if batch is None:
            from numpy.random import default_rng

            from dpexp.accounting.multiple_runs import draw_repetitions, worst_case_rdp

            (grid,) = BasicSweeper.split_arguments(overrides, None)
            rdp = worst_case_rdp([self._ledger(member) for member in grid])
            random = default_rng()  # the operating system's entropy: the draws must be secret
            count = draw_repetitions(self._mean, self._shape, random)
            chosen = [grid[random.integers(len(grid))] for _ in range(count)]
            batch = [[*map(str, overrides), f"draw={k}"] for k, overrides in enumerate(chosen)]
            if _sweep is not None:  # a later start must neither draw nor account anew
                _sweep.parent.remember({"draws": batch, "worst_case_rdp": rdp.tolist()})
        return [batch] if batch else []

    def _ledger(self, member: list[str]) -> "Ledger":
        """The ledger that a member of the grid would write."""
        from dpexp.commands.build import plan

        try:
            cfg = self._compose(member)
            if (reason := not_private_reason(cfg)) is not None:
                raise ConfigError(f"it is not private ({reason}).")
            return plan(cfg).ledger()
        except ConfigError as error:
            raise ConfigError(
                f"hydra/sweeper=private_selection also draws from {', '.join(member)}: {error}"
            ) from error


def register_sweepers() -> None:
    """Registers the sweepers with Hydra, which only accepts plugins whose name begins with `hydra_plugins`."""
    for sweeper in (Grid, PrivateSelection):
        Plugins.instance().class_name_to_class[f"hydra_plugins.dpexp.{sweeper.__name__}"] = sweeper


# The parent run


class SweepCallback(Callback):
    """Begins the parent run, and refuses a folder that holds another run before Hydra writes into it.

    `concluded` ends the parent run, since Hydra calls no hook after a failed or interrupted sweep. Hydra would continue
    after an error in a hook; it lets SystemExit through."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not OmegaConf.select(config, "checkpoint.resume"):
            _refuse_taken(Path(config.hydra.run.dir))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if config.tracking.uri is None:  # else `concluded` prints more
            from dpexp.reporting import terminal

            terminal.print_sweep_folder(Path(config.hydra.sweep.dir).resolve())

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        global _sweep
        before = Path(config.hydra.sweep.dir) / "multirun.yaml"
        if before.exists():  # a sweep's folder may only be used again by the same sweep, which continues in it
            overrides = OmegaConf.select(OmegaConf.load(before), "hydra.overrides.task")
            if overrides != config.hydra.overrides.task:
                _refuse_taken(before.parent)
        if config.tracking.uri is not None:
            try:
                _sweep = Sweep(config)
            except Exception as error:
                raise SystemExit(f"dpexp: {in_one_line(error)}.") from error


def _refuse_taken(folder: Path) -> None:
    """Ends dpexp if a folder already holds a run."""
    if found := taken(folder):
        raise SystemExit(
            f"dpexp: {folder} already holds a run, with its {found[0]}; choose another hydra.run.dir, or delete it."
        )


_sweep: "Sweep | None" = None  # the tracked sweep that runs in this process


class Sweep:
    """A tracked sweep: begins its parent run in MLflow, and ends it with the comparison of its trials."""

    def __init__(self, config: DictConfig) -> None:
        from dpexp.commands.description import short_name, swept_keys
        from dpexp.tracking.provenance import without_passwords
        from dpexp.tracking.sweep_run import SweepRun

        sweeper = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
        overrides = sorted(str(override) for override in config.hydra.overrides.task)
        question = config.hydra.runtime.choices.get("sweep")
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("hydra", "tracking")])
        content = [overrides, sweeper, OmegaConf.to_container(own, resolve=False)]
        key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
        swept = swept_keys(overrides, config.hydra.sweeper)
        name = question or short_name(overrides, swept) or "sweep"
        selects = str(config.hydra.runtime.choices.get("hydra/sweeper")) == "private_selection"
        facts = {
            "question": question,
            "overrides": [*map(without_passwords, overrides)],
            "selects": sweeper if selects else None,
        }
        self._output = Path(config.hydra.sweep.dir).resolve()
        self.parent = SweepRun(Tracking(**config.tracking), name, key, facts, self._output)

    def conclude(self, interrupted: bool, has_failed: bool) -> None:
        """Ends the parent run, and prints the best trials and what choosing among them costs.

        Args:
            interrupted: by Ctrl-C or a signal.
            has_failed: the sweep itself raised an error.
        """
        from dpexp.accounting.rounding import counted
        from dpexp.commands.account import cost_of_choice
        from dpexp.reporting import terminal
        from dpexp.reporting.comparisons import WHY, best_of_trials, described, summary

        frame = self.parent.trials()
        if has_failed and frame.empty and not self.parent.resumed:
            self.parent.discard()
            return
        failed = frame[frame["status"] != "FINISHED"] if not frame.empty else frame
        costs, sentence = cost_of_choice(frame, self.parent)
        # Private selection is accounted for one winner, of all trials.
        apart = () if self.parent.facts.get("selects") else ("data", "cost")
        tops = {} if frame.empty else best_of_trials(frame, apart)
        lines = [f"{counted(len(frame), 'trial')}, {len(frame) - len(failed)} finished."]
        lines += [f"{r['status']} {r['name']}: {r['error'] or 'no reason known'}" for _, r in failed.iterrows()]
        if len(failed):
            lines.append(f"What has not finished is done by the same command with hydra.sweep.dir={self._output}")
        lines += [*described(tops), *(WHY[knob] for knob in frame["knob"].unique() if knob in WHY), sentence]
        status = "FINISHED"
        if interrupted:
            status = "KILLED"
        elif len(failed) or has_failed:
            status = "FAILED"
        lines += self.parent.conclude(frame, tops, costs, lines, status, self._output)
        terminal.print_sweep(summary(frame), [*lines, f"Compare trials: {self.parent.address}"], self._output)


@contextmanager
def concluded() -> Iterator[None]:
    """Ends the parent run of the sweep that runs within it, if there is one: finished, failed or interrupted."""
    global _sweep
    interrupted, failed = True, False
    try:
        yield
        interrupted = False
    except Exception as error:
        interrupted, failed = False, True
        if _sweep is not None and not isinstance(error, ConfigError | HydraException | OmegaConfBaseException):
            raise ConfigError(
                f"the sweep did not finish: {type(error).__name__}: {in_one_line(error)[:300]}."
            ) from error
        raise
    finally:
        ended, _sweep = _sweep, None
        forget_trials()
        try:
            if ended is not None:
                ended.conclude(interrupted, failed)
        except Exception as error:
            raise ConfigError(
                "the sweep's parent run could not be ended; start the same command again in its folder. "
                f"{type(error).__name__}: {in_one_line(error)[:200]}."
            ) from error
