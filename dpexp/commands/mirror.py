"""`python -m dpexp mirror`: sends MLflow what a job's run lacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpexp.commands.account import console
from dpexp.commands.command_line import is_option, read_options
from dpexp.errors import ConfigError


@dataclass
class Options:
    uri: str | None = None


def mirror(arguments: Sequence[str]) -> None:
    """Sends what the run of the job in a folder lacks."""
    cfg: Options = read_options(Options, [*filter(is_option, arguments)])
    named = [argument for argument in arguments if not is_option(argument)]
    if len(named) != 1:
        raise ConfigError(f"mirror needs one job's folder, not {' and '.join(named) or 'none'}; see mirror --help.")
    from dpexp.tracking.mirror import mirror_folder

    run_id = mirror_folder(Path(named[0]), cfg.uri)
    console.print(f"The run {run_id} has all that {named[0]} has.", markup=False, highlight=False)
