"""Hydra sweepers: all trials of a grid, or a random number of draws from it. All are checked before the first starts.

Imports nothing slow, since every press of Tab runs it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf, open_dict

from dpexp._hydra_compat import BasicSweeper
from dpexp.commands import sweep, trial
from dpexp.errors import ConfigError

if TYPE_CHECKING:
    from dpexp.accounting.ledger import Ledger


class Grid(BasicSweeper):
    """`hydra/sweeper=grid`: Hydra's `basic`, which checks every trial before the first starts."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Checks the trials of all batches when the first batch is about to start."""
        if self.batch_index > 1:
            return
        assert self.overrides is not None
        members = [list(overrides) for batch in self.overrides for overrides in batch]
        trial.begin(members)
        from dpexp.commands.train import check_trial

        refused = []
        for number, overrides in enumerate(members):
            try:
                check_trial(self._compose(overrides, number))
            except ConfigError as error:
                refused.append(f"trial {number + 1} of {len(members)} ({trial.name_of(overrides)}): {error}")
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
        batch = sweep.earlier_draws()
        if batch is None:
            from numpy.random import default_rng

            from dpexp.accounting.multiple_runs import draw_repetitions, worst_case_rdp

            (grid,) = BasicSweeper.split_arguments(overrides, None)
            rdp = worst_case_rdp([self._ledger(member) for member in grid])
            random = default_rng()  # the operating system's entropy: the draws must be secret
            count = draw_repetitions(self._mean, self._shape, random)
            chosen = [grid[random.integers(len(grid))] for _ in range(count)]
            batch = [[*map(str, overrides), f"draw={k}"] for k, overrides in enumerate(chosen)]
            sweep.remember_draws(batch, rdp.tolist())
        return [batch] if batch else []

    def _ledger(self, member: list[str]) -> "Ledger":
        """The ledger that a member of the grid would write."""
        from dpexp.commands.build import planned

        try:
            return planned(self._compose(member)).ledger()
        except ConfigError as error:
            raise ConfigError(
                f"hydra/sweeper=private_selection also draws from {', '.join(member)}: {error}"
            ) from error


def register() -> None:
    """Registers the sweepers with Hydra, which only accepts plugins whose name begins with `hydra_plugins`."""
    for sweeper in (Grid, PrivateSelection):
        Plugins.instance().class_name_to_class[f"hydra_plugins.dpexp.{sweeper.__name__}"] = sweeper
