"""`python -m dpexp account`: what ledgers, all runs on a data set, or the choice among a sweep's trials cost."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import MISSING, DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpexp.accounting.accountants import delta, epsilon
from dpexp.accounting.coverage import check_delta, coverage
from dpexp.accounting.ledger import ADJACENCIES, Ledger, concatenate, incomplete_reason, ledger_so_far
from dpexp.accounting.ledger.events import neighbours
from dpexp.accounting.multiple_runs import Budget, run_rdp, runs_of_one_record, selection_epsilon
from dpexp.accounting.multiple_runs import budget as budget_of
from dpexp.accounting.releases import applicable_accountants
from dpexp.accounting.risk import gaussian, in_words, risk
from dpexp.accounting.rounding import counted, up
from dpexp.commands.command_line import is_option, read_options
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError

if TYPE_CHECKING:  # their modules import MLflow, which takes seconds
    from pandas import DataFrame

    from dpexp.tracking.sweep_run import SweepRun

console = Console(soft_wrap=True)


@dataclass
class Options:
    accountant: str = "pld"
    delta: float | None = None
    epsilon: float | None = None
    adjacency: str | None = None
    figure: str | None = None
    uri: str | None = None


@dataclass(frozen=True)
class Source:
    """A ledger with the name that it was given by; δ and the data set if they are known."""

    name: str
    ledger: Ledger
    delta: float | None = None
    data_id: str | None = None


def account(arguments: Sequence[str]) -> dict[str, float]:
    """Prints the cost of ledgers, and returns ε by accountant; with `data.id`, see `account_data_set`.

    Args:
        arguments: sources and options, as on the command line.
    """
    if any(argument.startswith("data.id=") for argument in arguments):
        return account_data_set(arguments)
    cfg: Options = read_options(Options, [*filter(is_option, arguments)])
    uri = cfg.uri or tracking_uri()
    sources = [source_of(argument, uri) for argument in arguments if not is_option(argument)]
    if not sources:
        raise ConfigError("account needs a ledger file, an output folder or an MLflow run id; see account --help.")
    if cfg.adjacency is not None:
        if cfg.adjacency not in ADJACENCIES:
            raise ConfigError(f"adjacency={cfg.adjacency} is unknown; known: {', '.join(ADJACENCIES)}.")
        sources = [replace(one, ledger=replace(one.ledger, adjacency=cfg.adjacency)) for one in sources]
    ledgers = [source.ledger for source in sources]
    ledger, together = concatenate(ledgers), _together(ledgers)
    at = delta_of(cfg.delta, [source.delta for source in sources])
    names = applicable_accountants(ledger) if cfg.accountant == "all" else cfg.accountant.replace(" ", "").split(",")
    costs = {name: max(epsilon(one, at, name) for one in together) for name in names}
    _print(ledger, sources, at, costs, cfg.epsilon)
    figures = [risk(one, names[0]).figures() for one in together]
    worst = {name: max(one[name] for one in figures) for name in figures[0] if all(name in one for one in figures)}
    console.print(f"In words, by {names[0]}: {in_words(worst, ledger.unit)}{gaussian(worst)}")
    if cfg.figure is not None:
        if len(together) > 1:
            raise ConfigError(f"figure={cfg.figure} shows one composition; give only runs on one part of the data.")
        from dpexp.reporting.run_figures import trade_off

        try:
            trade_off(ledger, at, names).savefig(cfg.figure, dpi=150)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"figure={cfg.figure} cannot be written ({reason}); name a .png or .pdf.") from error
        console.print(f"Figure: {cfg.figure}")
    return costs


def source_of(name: str, uri: str) -> Source:
    """The ledger of a file, of a job's folder, or of an MLflow run.

    Args:
        name: a path, or the id of a run.
        uri: the store of the run.
    """
    path = Path(name)
    if not path.exists() and not path.suffix:
        from dpexp.tracking.read import pulled

        with pulled(uri, name, "ledger.jsonl", "ledger.end.json", "config.yaml") as folder:
            return replace(source_of(str(folder), uri), name=name)
    if not path.is_dir():
        return Source(name, ledger_so_far(path))
    said = OmegaConf.load(path / "config.yaml") if (path / "config.yaml").exists() else OmegaConf.create()
    delta, data_id = OmegaConf.select(said, "privacy.delta"), OmegaConf.select(said, "data.id")
    return Source(name, ledger_so_far(path / "ledger.jsonl"), delta, data_id)


def _together(ledgers: Sequence[Ledger]) -> list[Ledger]:
    """One composed ledger for each set of runs that may have used one record."""
    return [concatenate([ledgers[k] for k in one]) for one in runs_of_one_record(ledgers)]


def _say_parts(ledgers: Sequence[Ledger]) -> None:
    """Prints whether runs on parts of the data are composed in parallel or in sequence."""
    sets, parts = runs_of_one_record(ledgers), [str(ledger.part or "all records") for ledger in ledgers]
    if len(sets) > 1:
        shown = "; or of ".join(" and ".join(dict.fromkeys(parts[k] for k in one)) for one in sets)
        console.print(f"In parallel: a record is at most in the runs of {escape(shown)}. The worst of them counts.")
    elif len({*parts}) > 1:
        console.print("In sequence: all costs add up, but for disjoint parts of one rule under add_remove.")


def delta_of(given: float | None, deltas: Sequence[float | None]) -> float:
    """The δ that is given, or that of all runs."""
    found = {delta for delta in deltas if delta is not None} if given is None else {given}
    if len(found) != 1:
        raise ConfigError("delta must be given: " + ("the runs differ in it." if found else "no run states it."))
    (at,) = found
    check_delta(at)
    return at


def _print(ledger: Ledger, sources: Sequence[Source], at: float, costs: dict[str, float], e: float | None) -> None:
    """Prints what is wrong with ledgers, what was composed, and the table of costs.

    Args:
        ledger: that of all sources together.
        at: δ.
        costs: ε by accountant.
        e: an ε at which δ is asked for, too.
    """
    ledgers = [source.ledger for source in sources]
    together = _together(ledgers)
    for source in sources:
        if source.ledger.incomplete:
            console.print(
                f"[bold red]The ledger of {escape(source.name)} ends early[/], after {len(source.ledger)} rounds: "
                f"{escape(incomplete_reason(source.ledger))}."
            )
        elif source.ledger.unverified is not None:
            console.print(f"{escape(source.name)}: {escape(source.ledger.unverified)}.")
    runs = f"{len(sources)} runs, " if len(sources) > 1 else ""
    distinct = len(ledger.training)
    kinds = {0: "", 1: ", all alike"}.get(distinct, f" of {distinct} kinds")
    trained = f"{ledger.training_rounds or 'no'} rounds{kinds}"
    adjacent = escape(neighbours(ledger.adjacency, ledger.unit))
    console.print(f"Privacy cost of {runs}{trained}{releases_before_training(ledger)}, {adjacent}, at δ = {up(at, 4)}:")
    _say_parts(ledgers)
    if len(named := {source.data_id for source in sources} - {None}) > 1:
        several = escape(", ".join(sorted(map(str, named))))
        console.print(f"The data sets differ ({several}): ε adds up what a person loses who may be in all of them.")
    table = Table("accountant", "ε", *([f"δ at ε = {up(e, 6)}"] if e is not None else []))
    for name, cost in costs.items():
        at_epsilon = [up(max(delta(one, e, name) for one in together), 4)] if e is not None else []
        table.add_row(name, up(cost, 6), *at_epsilon)
    console.print(table)


@dataclass
class DataSet:
    id: str = MISSING


@dataclass
class DataSetOptions:
    data: DataSet = field(default_factory=DataSet)
    uri: str | None = None
    budget: Any = None
    delta: float | None = None
    accountant: str = "pld"


def account_data_set(arguments: Sequence[str]) -> dict[str, float]:
    """Prints what all runs on a data set have spent, and how much of a budget remains.

    Args:
        arguments: sources and options, as on the command line.

    Returns:
        `composed`: ε of the plain composition. With a budget, `spent` and `limit`: ρ and B of its Rényi filter.
        `unknown`: the number of runs that these figures do not include, because what they spent is unknown.
    """
    from dpexp.tracking.data_budget import cost_at, costs_in, distinct_runs

    cfg: DataSetOptions = read_options(DataSetOptions, [*filter(is_option, arguments)])
    coverage(cfg.accountant)  # refuses an unknown one
    stores = (cfg.uri or tracking_uri()).split(",")
    costs = [cost for uri in stores for cost in costs_in(uri, cfg.data.id)]
    costs += [cost_at(Path(argument)) for argument in arguments if not is_option(argument)]
    costs = distinct_runs(costs)
    if not costs:
        raise ConfigError(f"data.id={cfg.data.id} has no runs in {', '.join(stores)}; give the jobs that name.")
    budgets = sorted({cost.budget for cost in costs if cost.budget is not None}, key=astuple)
    budget = budgets[0] if budgets else None
    if cfg.budget is not None:
        budget = budget_of(cfg.budget)
    elif len(budgets) > 1:
        raise ConfigError(f"the runs kept different budgets ({'; '.join(map(str, budgets))}); choose one by budget=….")
    given = budget.delta if cfg.delta is None and budget else cfg.delta
    at = delta_of(given, [cost.delta for cost in costs])
    runs = counted(len(costs), "run")
    console.print(f"[bold]data.id={escape(cfg.data.id)}[/]: {runs}; ε by {cfg.accountant} at δ = {up(at, 4)}")
    for cost in costs:
        _print_run(cost, at, cfg.accountant)
    unknown = [cost for cost in costs if cost.ledger is None]
    for cost in unknown:
        console.print(f"[bold red]What {escape(cost.name)} spent is unknown[/]: {escape(cost.note)}.")
    known = [cost.ledger for cost in costs if cost.ledger]
    composed = max(epsilon(one, at, cfg.accountant) for one in _together(known)) if known else 0.0
    _say_parts(known)
    total = up(composed, 4)
    if unknown:
        total += " and an unknown amount more"
    elif any(cost.note for cost in costs):
        total = f"at most {total}"
    console.print(
        f"Plain composition by {cfg.accountant}: ε = {total}. It holds if the plan of each run had been fixed before "
        "the first was looked at."
    )
    found = {"composed": composed, "unknown": float(len(unknown))}
    if budget is None:
        console.print("No budget was kept: budget='{epsilon: 8, delta: 1e-5}' computes what would remain of one.")
        return found
    for other in budgets:
        if other != budget:
            console.print(
                f"[bold red]Not the budget that the jobs kept[/], which is {other}, and holds only if it stays as it "
                "was fixed before the first run:"
            )
            _print_budget(other, costs, cfg.data.id)
    return found | _print_budget(budget, costs, cfg.data.id)


def earlier_on_data(cfg: DictConfig) -> list[Ledger | None]:
    """The ledgers of all earlier runs on a job's `data.id`, as far as its tracking store knows them.

    None stands for a run whose cost is unknown.
    """
    if cfg.tracking.uri is None:
        return []
    from dpexp.tracking.data_budget import costs_in

    try:
        costs = costs_in(cfg.tracking.uri, cfg.data.id)
    except ConfigError:  # there is no store yet; one that cannot be read is refused when the job's run starts
        return []
    return [cost.ledger for cost in costs if cost.ledger is None or cost.ledger]


def with_earlier(earlier: Sequence[Ledger | None], own: Ledger, delta: float) -> str:
    """ε of all runs on the same data together, in words; "" if there is no earlier one."""
    if not earlier:
        return ""
    together = f"with {counted(len(earlier), 'earlier run')} on these data"
    known = [ledger for ledger in earlier if ledger is not None]
    try:
        spent = up(max(epsilon(one, delta) for one in _together([*known, own])), 4)
    except ConfigError:  # they have different adjacencies
        return f"{together} no single ε can be stated"
    if lost := len(earlier) - len(known):
        return f"{together}, ε = {spent} ({lost} not covered: without privacy, or without a ledger)"
    return f"{together}, ε = {spent}"


def releases_before_training(ledger: Ledger) -> str:
    """How many queries were answered once, to be read after the number of rounds; "" if none."""
    if once := len(ledger) - ledger.training_rounds:
        return f", {counted(once, 'release')} before training"
    return ""


def _print_run(cost: Any, at: float, accountant: str) -> None:
    """Prints a line on one run of a data set; `cost` is a `RunCost`."""
    if cost.ledger is None:
        rounds, spent = "?", "unknown"
    else:
        rounds = str(cost.ledger.training_rounds)
        spent = up(epsilon(cost.ledger, at, accountant), 4) if cost.ledger.rounds else "0"
    note = f"({cost.note})" if cost.note else ""
    shown = [cost.shown, f"{rounds} rounds", f"ε = {spent}", cost.name, note]
    console.print(escape("  ".join(filter(None, shown))), highlight=False)


def _print_budget(budget: Budget, costs: Sequence[Any], data_id: str) -> dict[str, float]:
    """Prints how much of a budget the runs with these `RunCost` have used; returns ρ and its limit."""
    from dpexp.tracking.data_budget import budget_used

    counted = [cost for cost in costs if cost.ledger is not None]
    spent, description = budget_used(counted, budget, data_id)
    if len(counted) < len(costs):
        console.print(f"[bold red]The budget of {budget} cannot be kept any more[/]; see the runs above.")
    verdict = (
        "The budget also holds if runs were planned after looking at earlier ones, provided that it was fixed before "
        "the first, and all of them are counted here."
        if budget.holds(spent)
        else "[bold red]It is overdrawn[/], so that it guarantees nothing."
    )
    console.print(f"Budget of {budget}, by a Rényi filter of order {budget.order:g}: {description}. {verdict}")
    return {"spent": spent, "limit": budget.limit}


# Choosing among the trials of a sweep


def cost_of_choice(frame: "DataFrame", sweep: "SweepRun") -> tuple[dict[str, float], str]:
    """ε of choosing among a sweep's trials: of one trial, of all composed, and of private selection if it drew them.

    Args:
        frame: one row per trial.
        sweep: its parent run. Its facts: `selects`, the sweeper's mean and shape or None; its `draws`; and
            `worst_case_rdp`, the largest Rényi DP of the grid's members at each order.

    Returns:
        ε by type of claim, and a sentence that says which of them hold.
    """
    try:
        every = sweep.ledgers()
        if not every:
            return {}, "No private trial has trained, so nothing has been spent."
        together = concatenate([*every.values()])
    except ConfigError as error:
        return {}, f"Nothing may be claimed: {error}"
    private, facts = frame[(frame["status"] == "FINISHED") & frame["epsilon"].notna()], sweep.facts
    at = float(frame["delta"].max())
    costs, sentences = {"delta": at}, []
    if len(private):
        costs["single_run_epsilon"] = float(private["epsilon"].max())
        sentences.append(
            f"ε = {up(costs['single_run_epsilon'], 3)} (one trial) may be claimed only if the choice used no "
            f"private data"
        )
    if facts.get("selects"):
        sentences = [_selection(costs, [every[run_id] for run_id in private["run_id"]], len(every), facts)]
    covers = "all that was printed and logged of them" if facts.get("selects") else "any choice among them"
    try:
        costs["all_runs_epsilon"] = epsilon(together, at)
        early = sum(ledger.incomplete for ledger in every.values())
        begun = f", {len(every) - len(private)} unfinished included" if len(every) > len(private) else ""
        begun += f", {early} with a ledger that ends early" if early else ""
        sentences.append(f"ε = {up(costs['all_runs_epsilon'], 3)} (all private trials composed{begun}) covers {covers}")
    except ConfigError as error:
        sentences.append(f"the trials cannot be composed: {error}")
    if costs.get("private_selection_epsilon", 0.0) >= costs.get("all_runs_epsilon", np.inf):
        sentences.reverse()  # the smaller one first
    return costs, f"At δ = {up(at, 4)}, adjacency {together.adjacency}: " + "; ".join(sentences) + "."


def _selection(costs: dict[str, float], finished: list[Ledger], begun: int, facts: Mapping[str, Any]) -> str:
    """Adds the ε of private selection to `costs` if it may be claimed; returns a sentence that says so, or why not."""
    try:
        _check_selection(finished, begun, facts)
    except ConfigError as error:
        return f"private selection cannot be claimed, because {error}"
    mean, shape = float(facts["selects"]["mean"]), float(facts["selects"]["shape"])
    costs["private_selection_epsilon"] = selection_epsilon(
        np.array(facts["worst_case_rdp"]), costs["delta"], mean, shape
    )
    return (
        f"ε = {up(costs['private_selection_epsilon'], 3)} (private selection) covers the best trial alone, for "
        "those who see nothing of what was printed and logged of the others, not even their number"
    )


def _check_selection(finished: list[Ledger], begun: int, facts: Mapping[str, Any]) -> None:
    """Raises ConfigError: why the ε of private selection may not be claimed."""
    if facts.get("worst_case_rdp") is None:
        raise ConfigError("its ε was not fixed before the trials were drawn")
    if len(finished) != len(facts.get("draws") or []):
        raise ConfigError("the trials are not those that were drawn")
    if begun > len(finished):
        raise ConfigError("some trials were started more than once")
    if any((run_rdp(ledger) > np.array(facts["worst_case_rdp"]) * (1 + 1e-9)).any() for ledger in finished):
        raise ConfigError("a trial cost more than the planned worst case of the grid")
