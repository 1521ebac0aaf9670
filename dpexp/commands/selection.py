"""What it costs to choose among the trials of a sweep."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from pandas import DataFrame

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, joined
from dpexp.accounting.multiple_runs import run_rdp, selection_epsilon
from dpexp.errors import ConfigError
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
        costs["single_run_epsilon"] = float(private["epsilon"].max())
        sentences.append(
            f"ε = {up(costs['single_run_epsilon'], 3)} (one trial) may be claimed only if the choice used no "
            f"private data"
        )
    if facts.get("selects"):
        sentences = [_selection(costs, [every[run_id] for run_id in private["run_id"]], len(every), facts)]
    try:
        costs["all_runs_epsilon"] = epsilon(joined(list(every.values())), delta)
        early = sum(ledger.incomplete for ledger in every.values())
        begun = f", {len(every) - len(private)} unfinished included" if len(every) > len(private) else ""
        begun += f", {early} with a ledger that ends early" if early else ""
        sentences.append(
            f"ε = {up(costs['all_runs_epsilon'], 3)} (all private trials composed{begun}) covers any choice among them"
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
    costs["private_selection_epsilon"] = selection_epsilon(np.array(facts["dearest"]), costs["delta"], mean, shape)
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
    if any((run_rdp(ledger) > np.array(facts["dearest"]) * (1 + 1e-9)).any() for ledger in finished):
        return "a trial cost more than the dearest of the grid was to cost"
    return None
