"""The parts of Hydra's private interface that dpexp uses. No other module imports them."""

import logging

from hydra._internal.utils import get_args_parser  # so that arguments are parsed as Hydra parses them
from hydra.core.plugins import Plugins

logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it prints each error that it raises
Plugins.instance()  # Hydra loads its plugins' modules again here: a class imported before would be another one
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402

__all__ = ["BasicSweeper", "get_args_parser"]
