"""The privacy cost of choosing among the trials of a sweep."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from pandas import DataFrame

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, concatenate
from dpexp.accounting.multiple_runs import run_rdp, selection_epsilon
from dpexp.errors import ConfigError
from dpexp.reporting.wording import up
from dpexp.tracking.sweep_run import TrialLedgers


def cost(frame: DataFrame, spent: TrialLedgers, facts: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """ε of a single trial, of all trials composed, and of private selection if it drew the trials.

    Args:
        frame: one row per trial.
        spent: the ledgers of all runs that the sweep has ever started.
        facts: of the sweep: `selects`, the sweeper's mean and shape or None; its `draws`; and `worst_case_rdp`, the
            largest Rényi DP of the grid's members at each order.

    Returns:
        ε by type of claim, and a sentence that says which of them hold.
    """
    if spent.not_private:
        return {}, f"Nothing may be claimed: {', '.join(spent.not_private)} show more than their (ε, δ) covers."
    if spent.missing:
        return {}, f"Nothing may be claimed: the ledgers of {', '.join(spent.missing)} are missing."
    every = spent.ledgers
    if not every:
        return {}, "No private trial has trained, so nothing has been spent."
    private = frame[(frame["status"] == "FINISHED") & frame["epsilon"].notna()]
    adjacencies = sorted({ledger.adjacency for ledger in every.values()})
    if len(adjacencies) > 1:
        stated = ", ".join(adjacencies)
        return {}, f"The trials are stated for different adjacencies ({stated}) and cannot be composed."
    units = sorted({ledger.unit for ledger in every.values()})
    if len(units) > 1:
        return {}, f"The trials have different privacy units ({', '.join(units)}) and cannot be composed."
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
        costs["all_runs_epsilon"] = epsilon(concatenate(list(every.values())), delta)
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
    """Adds the ε of private selection to `costs` if it may be claimed; returns a sentence that says so, or why not."""
    try:
        reason = _unclaimable(finished, begun, facts)
    except ConfigError as error:
        reason = str(error)
    if reason is not None:
        return f"private selection cannot be claimed, because {reason}"
    mean, shape = float(facts["selects"]["mean"]), float(facts["selects"]["shape"])
    costs["private_selection_epsilon"] = selection_epsilon(
        np.array(facts["worst_case_rdp"]), costs["delta"], mean, shape
    )
    return (
        f"ε = {up(costs['private_selection_epsilon'], 3)} (private selection) may be claimed for the best trial, if "
        "the others and their number stay secret"
    )


def _unclaimable(finished: list[Ledger], begun: int, facts: Mapping[str, Any]) -> str | None:
    """Why the ε of private selection may not be claimed; None if it may."""
    if facts.get("worst_case_rdp") is None:
        return "its ε was not fixed before the trials were drawn"
    if len(finished) != len(facts.get("draws") or []):
        return "the trials are not those that were drawn"
    if begun > len(finished):
        return "some trials were started more than once"
    if any((run_rdp(ledger) > np.array(facts["worst_case_rdp"]) * (1 + 1e-9)).any() for ledger in finished):
        return "a trial cost more than the planned worst case of the grid"
    return None
