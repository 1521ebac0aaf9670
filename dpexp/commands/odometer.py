"""`python -m dpexp account data.id=NAME [SOURCE ...] [key=value ...]` says what has been spent on a data set, by whom,
and what a budget leaves.

Counted is every run of the store with that data.id: finished, failed, killed, deleted from the list, trials of sweeps;
a run that is under way, or lost its ledger, as its whole plan. SOURCEs are further ledger files and jobs' folders.

    uri=…             where MLflow runs are, several as A,B; default: $MLFLOW_TRACKING_URI, or outputs/mlflow.db here
    budget='{epsilon: 8, delta: 1e-5}'   what it leaves; default: the one that its jobs kept
    delta=1e-5        default: the budget's, or the runs' own
    accountant=pld    that of the plain composition, and of each run
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from rich.console import Console
from rich.markup import escape

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.claims import APPROXIMATIONS, check_delta, check_names
from dpexp.accounting.filter import Budget, budget
from dpexp.accounting.ledger import joined
from dpexp.config import tracking_uri
from dpexp.errors import ConfigError
from dpexp.showing.rounding import up



console = Console()


@dataclass
class OfData:
    id: str = MISSING


@dataclass
class DataOptions:
    data: OfData = field(default_factory=OfData)
    uri: str | None = None
    budget: Any = None
    delta: float | None = None
    accountant: str = "pld"


def spent(arguments: Sequence[str]) -> dict[str, float]:
    """Prints what has been spent on a data set.

    Args:
        arguments: sources and options, as on the command line.

    Returns:
        `composed`: ε of the plain composition; where there is a budget, `spent` and `limit`: ρ and B of its filter; and
        `whole`: ε by pld of the whole plan that keeps it, if one does.
        Where a run is unknown these are of the others alone, and `unknown` says how many are.

    Raises:
        ConfigError: a store that cannot be read, or runs that cannot be composed.
    """
    from dpexp.tracking.charges import adjacencies, charge_at, charge_from, charges_in, kept_in, once

    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return {}
    cfg = _options([argument for argument in arguments if "=" in argument])
    stores = (cfg.uri or tracking_uri()).split(",")
    charges = [charge for uri in stores for charge in charges_in(uri, cfg.data.id)]
    for name in (argument for argument in arguments if "=" not in argument):
        charges.append(charge_at(Path(name)) if Path(name).is_dir() else charge_from(Path(name)))
    charges = once(charges)
    if not charges:
        raise ConfigError(f"data.id={cfg.data.id} has no runs in {', '.join(stores)}; give the jobs that name.")
    given = OmegaConf.to_container(cfg.budget) if OmegaConf.is_config(cfg.budget) else cfg.budget
    before = {one for uri in stores for one in kept_in(uri, cfg.data.id)}
    kept = budget(given) if given is not None else _kept([*before])
    delta = cfg.delta if cfg.delta is not None else kept.delta if kept else _common([c.delta for c in charges])
    check_delta(delta)
    known = [charge.ledger for charge in charges if charge.ledger is not None and charge.ledger.rounds]
    runs = f"{len(charges)} run{'s' * (len(charges) != 1)}"
    console.print(f"[bold]data.id={escape(cfg.data.id)}[/]: {runs}; ε by {cfg.accountant} at δ = {up(delta, 4)}")
    for charge in charges:
        if charge.ledger is None:
            rounds, cost = "?", "unknown"
        else:
            rounds = str(charge.ledger.trained)
            cost = up(epsilon(charge.ledger, delta, cfg.accountant), 4) if charge.ledger.rounds else "0"
            cost = f"unknown, at most {cost}" if charge.lost else cost
        matter = [f"({charge.note})"] if charge.note else []
        facts = [
            charge.run_id,
            charge.user,
            charge.status.lower(),
            f"{rounds} rounds",
            f"ε = {cost}",
            charge.name,
            *matter,
        ]
        console.print(escape("  ".join(fact for fact in facts if fact)), soft_wrap=True, highlight=False)
    for charge in charges:
        if charge.lost:
            console.print(
                f"[bold red]What {escape(charge.name)} spent is unknown[/]: {escape(charge.note)}.", soft_wrap=True
            )
        if charge.exposed:
            console.print(
                f"[bold red]No ε covers what {escape(charge.name)} shows[/]: {escape(charge.exposed)}.", soft_wrap=True
            )
    stated = list(adjacencies(charges))
    if len(stated) > 1:
        raise ConfigError(
            f"data.id={cfg.data.id}: no theorem composes runs that are stated for different adjacencies: "
            + ", ".join(f"{name} for {adjacency}" for adjacency, name in stated)
            + "."
        )
    unknown = sum(charge.ledger is None or charge.exposed is not None for charge in charges)
    composed = epsilon(joined(known), delta, cfg.accountant) if known else 0.0
    found = {"composed": composed, "unknown": float(unknown)}
    lost = any(charge.lost for charge in charges)
    more = f"at most {up(composed, 4)}" if lost else up(composed, 4)
    if unknown:
        more = f"more than {up(composed, 4)}, by an amount that nobody knows"
    console.print(
        f"Plain composition by {cfg.accountant}: ε = {more}. It holds if what each run was to do had been fixed before "
        "the first was looked at.",
        soft_wrap=True,
    )
    if kept is None:
        console.print(
            "No budget was kept: budget='{epsilon: 8, delta: 1e-5}' says what one would leave.", soft_wrap=True
        )
        return found
    for other in (one for one in map(_budget, sorted(before)) if one != kept):
        console.print(
            f"[bold red]Not the budget that the jobs kept[/], which is {other}, and holds only if it stays as it was "
            "fixed before the first run:",
            soft_wrap=True,
        )
        _against(other, charges, cfg.data.id)
    return found | _against(kept, charges, cfg.data.id)


def _against(kept: Budget, charges: Sequence[Any], data_id: str) -> dict[str, float]:
    from dpexp.tracking.budget import tally

    counted = [charge for charge in charges if charge.ledger is not None and charge.exposed is None]
    taken = tally(counted, kept, data_id)
    if len(counted) < len(charges):
        console.print(f"[bold red]The budget of {kept} cannot be kept any more[/]; see the runs above.", soft_wrap=True)
    if taken.whole is not None:
        console.print(
            f"Budget of {kept}: {taken.said}. That holds because all of its rounds were fixed before the first result "
            "on these data, if all runs on them are counted here.",
            soft_wrap=True,
        )
        return {"spent": taken.spent, "limit": kept.limit, "whole": taken.whole}
    console.print(
        f"Budget of {kept}, by a Rényi filter of order {kept.order:g}: {taken.said}. "
        + (
            "[bold red]It is overdrawn[/], so that it holds for nothing."
            if not kept.holds(taken.spent)
            else "The budget holds also where runs were planned by looking at those before, if it was fixed before the "
            "first, and all of them are counted here."
        ),
        soft_wrap=True,
    )
    return {"spent": taken.spent, "limit": kept.limit}


def _options(given: list[str]) -> DataOptions:
    cfg = OmegaConf.to_object(OmegaConf.merge(DataOptions, OmegaConf.from_dotlist(given)))
    assert isinstance(cfg, DataOptions)
    check_names([cfg.accountant])
    if cfg.accountant in APPROXIMATIONS:
        raise ConfigError(f"accountant={cfg.accountant} is an approximation, no bound; choose another.")
    return cfg


def _kept(found: Sequence[str]) -> Budget | None:
    """The budget that the runs kept.

    Raises:
        ConfigError: they kept different ones.
    """
    budgets = [*map(_budget, sorted(set(found)))]
    if len(budgets) > 1:
        raise ConfigError(f"the runs kept different budgets ({'; '.join(map(str, budgets))}); choose one by budget=….")
    return budgets[0] if budgets else None


def _budget(kept: str) -> Budget:
    return Budget(**json.loads(kept))


def _common(deltas: Sequence[float | None]) -> float:
    told = {delta for delta in deltas if delta is not None}
    if len(told) != 1:
        raise ConfigError("delta must be given: " + ("the runs differ in it." if told else "no run tells it."))
    return told.pop()
