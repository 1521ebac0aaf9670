"""Hydra's private interface, as far as dpexp uses it: here and nowhere else."""

from hydra._internal.utils import get_args_parser  # arguments must be read as Hydra reads them
from hydra.core.plugins import Plugins

Plugins.instance()  # loads Hydra's own plugins anew; a class imported before would not be theirs
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402

__all__ = ["BasicSweeper", "get_args_parser"]
