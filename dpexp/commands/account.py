"""`python -m dpexp account SOURCE [SOURCE ...] [key=value ...]` says what ledgers cost, by any accountant, afterwards.

A SOURCE is a ledger file, a job's output folder or an MLflow run id. Several are composed, as runs on the same data.
With data.id=NAME it says what all runs on that data set have spent, by whom, and what a budget leaves:
see `account data.id=NAME --help`.

    accountant=pld    or rdp, moments, strong, basic, gdp; several as pld,rdp; or all
    delta=1e-5        default: the run's own
    epsilon=1         print the δ for this ε too
    adjacency=…       add_remove, replace_one or replace_null; default: the ledger's own
    figure=F.png      draw ε(δ), and the errors of whoever tests for one record
    write=true        log ε and the risk in words as metrics to the MLflow run
    uri=…             where MLflow runs are; default: $MLFLOW_TRACKING_URI, or outputs/mlflow.db here
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.claims import APPROXIMATIONS, check_delta, check_names, claimable, unamplified
from dpexp.accounting.ledger import ADJACENCIES, Ledger, early, joined, ledger_so_far
from dpexp.accounting.risk import risk
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError
from dpexp.showing.rounding import up
from dpexp.showing.words import in_words



@dataclass
class Options:
    accountant: str = "pld"
    delta: float | None = None
    epsilon: float | None = None
    adjacency: str | None = None
    figure: str | None = None
    write: bool = False
    uri: str | None = None


@dataclass(frozen=True)
class Source:
    """A ledger with where it came from; δ and the MLflow run where they are known."""

    name: str
    ledger: Ledger
    delta: float | None = None
    run_id: str | None = None


def account(arguments: Sequence[str]) -> dict[str, float]:
    """Prints the cost of the ledgers that are named, and returns ε by accountant.

    Args:
        arguments: sources and options, as on the command line.

    Raises:
        ConfigError: a source that cannot be read, or a claim that cannot be made.
    """
    if any(argument.startswith("data.id=") for argument in arguments):
        from dpexp.commands import odometer

        return odometer.spent(arguments)
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return {}
    given = OmegaConf.from_dotlist([argument for argument in arguments if "=" in argument])
    cfg: Options = OmegaConf.to_object(OmegaConf.merge(Options, given))  # type: ignore[assignment]
    cfg.uri = cfg.uri or tracking_uri()
    sources = [_source(argument, cfg.uri) for argument in arguments if "=" not in argument]
    if not sources:
        raise ConfigError("account needs a ledger file, an output folder or an MLflow run id; see account --help.")
    ledger = joined([source.ledger for source in sources])
    if cfg.adjacency is not None:
        if cfg.adjacency not in ADJACENCIES:
            raise ConfigError(f"adjacency={cfg.adjacency} is unknown; known: {', '.join(ADJACENCIES)}.")
        ledger = replace(ledger, adjacency=cfg.adjacency)
    at = cfg.delta if cfg.delta is not None else _common_delta(sources)
    check_delta(at)
    names = _accountants(cfg, ledger)
    costs = {name: epsilon(ledger, at, name) for name in names}
    if cfg.figure is not None:
        from dpexp.showing.spending import trade_off

        figure = trade_off(ledger, at, names)
        try:
            figure.savefig(cfg.figure, dpi=150)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"figure={cfg.figure} cannot be written ({reason}); name a .png or .pdf.") from error
    _print(ledger, sources, at, costs, cfg.epsilon)
    figures = risk(ledger, names[0]).figures()
    least = "by" if names[0] not in APPROXIMATIONS else "about, by"
    console.print(f"In words, {least} {names[0]}: {in_words(figures, ledger.unit)}", soft_wrap=True)
    if cfg.figure is not None:
        console.print(f"Figure: {cfg.figure}", soft_wrap=True)
    if cfg.write:
        _write(sources, costs, {f"{name}_{names[0]}": figure for name, figure in figures.items()}, at, cfg)
    return costs


def _source(name: str, uri: str) -> Source:
    path = Path(name)
    if path.is_dir():
        return Source(name, ledger_so_far(path / "ledger.jsonl"), _delta_of(path))
    if path.exists() or path.suffix:
        return Source(name, ledger_so_far(path))
    from dpexp.tracking.read import downloaded_run

    with downloaded_run(uri, name) as folder:
        return Source(name, ledger_so_far(folder / "ledger.jsonl"), _delta_of(folder), name)


def _delta_of(folder: Path) -> float | None:
    path = folder / "config.yaml"
    if not path.exists():
        return None
    value = yaml.safe_load(path.read_text()).get("privacy", {}).get("delta")
    return float(value) if value is not None else None


def _common_delta(sources: Sequence[Source]) -> float:
    deltas = {source.delta for source in sources} - {None}
    if len(deltas) != 1:
        raise ConfigError("delta must be given: " + ("the runs differ in it." if deltas else "no run tells it."))
    (value,) = deltas
    return float(value)  # type: ignore[arg-type]


def _accountants(cfg: Options, ledger: Ledger) -> list[str]:
    allowed = claimable(ledger)
    if cfg.accountant == "all":
        return allowed
    names = [name.strip() for name in cfg.accountant.split(",")]
    check_names(names)
    return names


def _print(ledger: Ledger, sources: Sequence[Source], at: float, costs: dict[str, float], e: float | None) -> None:
    for source in sources:
        if source.ledger.truncated:
            console.print(
                f"[bold red]The ledger of {escape(source.name)} ends early[/], after {len(source.ledger)} rounds: "
                f"{escape(early(source.ledger))}."
            )
        elif source.ledger.untold is not None:
            console.print(f"{escape(source.name)}: {escape(source.ledger.untold)}.", soft_wrap=True)
    runs = f"{len(sources)} runs, " if len(sources) > 1 else ""
    distinct = sum(round_.one_off is None for round_ in ledger.rounds)
    kinds = f"{distinct} distinct" if distinct > 1 else "all alike"
    once = len(ledger) - ledger.trained
    before = f", {once} release{'s' * (once > 1)} before training" if once else ""
    of = f" of a {ledger.unit}" if ledger.record else ""
    console.print(f"{runs}{ledger.trained} rounds ({kinds}){before}, adjacency {ledger.adjacency}{of}, δ = {up(at, 4)}")
    table = Table("accountant", "ε", *([f"δ at ε = {up(e, 6)}"] if e is not None else []), "")
    for name, cost in costs.items():
        also = [up(delta(ledger, e, name), 4)] if e is not None else []
        table.add_row(name, up(cost, 6), *also, "an approximation, no bound" if name in APPROXIMATIONS else "")
    console.print(table)
    if (without := unamplified(ledger)) is not None:
        console.print(without, soft_wrap=True)


def _write(
    sources: Sequence[Source], costs: dict[str, float], risks: dict[str, float], at: float, cfg: Options
) -> None:
    from dpexp.tracking.read import log_cost

    runs = [source.run_id for source in sources if source.run_id]
    if len(sources) != 1 or not runs:
        raise ConfigError("write=true needs exactly one source, an MLflow run id.")
    adjacency = f"_{cfg.adjacency}" if cfg.adjacency else ""
    delta_ = f"_delta_{at:g}" if cfg.delta is not None else ""
    metrics = {f"epsilon_{name}{adjacency}{delta_}": cost for name, cost in costs.items()}
    metrics |= {f"{name}{adjacency}": figure for name, figure in risks.items()}
    log_cost(str(cfg.uri), runs[0], metrics, len(sources[0].ledger))
    console.print(f"Logged to run {runs[0]}: {', '.join(metrics)}", soft_wrap=True)
