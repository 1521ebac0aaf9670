"""Multiruns: one parent above the trials, and private selection.

Imports nothing slow, since every press of Tab runs it.
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from dpexp.commands.values import refuse_taken
from dpexp.errors import ConfigError
from dpexp.showing.best import best_of_trials as _best

if TYPE_CHECKING:
    from dpexp.accounting.ledger import Ledger

Plugins.instance()  # loads Hydra's own plugins anew; a class imported before would not be theirs
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402


class PrivateSelect(BasicSweeper):
    """`hydra/sweeper=private_select`: a random number of trials, each with a configuration drawn at random from the
    grid. Only then may the best one be chosen at a known price, which is that of the grid's dearest: every member is
    planned before any is drawn.

    Args:
        mean: of the number of trials; shape: η, 1 for geometric, inf for Poisson (see accounting.selection).
    """

    draws: "list[list[str]] | None" = None  # of an earlier start of the same sweep

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None, mean: float, shape: float) -> None:
        from dpexp.accounting.selection import check_repetitions

        super().__init__(max_batch_size, params)
        check_repetitions(mean, shape)
        self._mean, self._shape = mean, shape

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        if PrivateSelect.draws is None:
            if _sweep is not None and _sweep.parent.resumed:
                raise ConfigError(
                    "the draws of this sweep's earlier start are lost, and others would not be those accounted for; "
                    "start afresh with tracking.resume=false."
                )
            from numpy.random import default_rng

            from dpexp.accounting.selection import dearest_curve, draw_repetitions

            (grid,) = BasicSweeper.split_arguments(overrides, None)
            dearest = dearest_curve([self._planned(member) for member in grid])
            random = default_rng()  # the operating system's entropy: the draws must be secret
            count = draw_repetitions(self._mean, self._shape, random)
            chosen = [grid[random.integers(len(grid))] for _ in range(count)]
            PrivateSelect.draws = [[*map(str, overrides), f"draw={k}"] for k, overrides in enumerate(chosen)]
            if _sweep is not None:
                _sweep.remember_draws(PrivateSelect.draws, dearest.tolist())
        batch = PrivateSelect.draws
        return [batch] if batch else []

    def _planned(self, member: list[str]) -> "Ledger":
        """What a member of the grid would write.

        Raises:
            ConfigError: it is not private, or cannot be planned.
        """
        from dpexp.commands.building import planned

        assert self.hydra_context is not None and self.config is not None
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, member)
        try:
            return planned(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])).ledger()
        except ConfigError as error:
            raise ConfigError(f"hydra/sweeper=private_select draws from {', '.join(member)} too: {error}") from error


# Hydra only takes plugins whose name begins so; it finds the class itself where it is.
Plugins.instance().class_name_to_class["hydra_plugins.dpexp.PrivateSelect"] = PrivateSelect


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
        from dpexp.tracking.origin import without_passwords
        from dpexp.tracking.parent import Parent
        from dpexp.tracking.unswept import swept_keys

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
        if selects and self.parent.resumed:
            PrivateSelect.draws = self.parent.facts.get("draws")

    def remember_draws(self, draws: list[list[str]], dearest: list[float]) -> None:
        """A second draw would not be the one that is accounted; nor would a price of later be that of the draw."""
        self.parent.remember({"draws": draws, "dearest": dearest})

    def conclude(self, interrupted: bool, broken: bool) -> None:
        from dpexp.commands.choosing import cost
        from dpexp.showing import terminal

        frame = self.parent.trials()
        failed = frame[frame["status"] != "FINISHED"] if not frame.empty else frame
        costs, sentence = cost(frame, self.parent.spent(), self.parent.facts)
        best = None if frame.empty else _best(frame)
        note = _note(frame, failed, best, costs, sentence)
        status = "KILLED" if interrupted else "FAILED" if len(failed) or broken else "FINISHED"
        metrics = {f"selection/{key}": value for key, value in costs.items()}
        self.parent.conclude(frame, metrics, note, status, self._output)
        terminal.swept(frame, failed, best, costs, sentence, self.parent.address)


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
    ended, _sweep, PrivateSelect.draws = _sweep, None, None
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
