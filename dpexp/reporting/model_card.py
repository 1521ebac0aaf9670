"""The model card: accuracy, privacy guarantee and use of a trained model, in Markdown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from shlex import quote
from typing import Any

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger
from dpexp.accounting.ledger.events import neighbours
from dpexp.accounting.risk import risk
from dpexp.accounting.rounding import up
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.reporting.wording import RECALL, before_training, guarantee_in_words, measured, range_of

NOT_COVERED = """\
- choosing this model by looking at several private runs, each of which has its own ε;
- the test set and the initial weights, which are taken as public;
- `data.n` and normalisation constants, which must be published facts;
- whatever the training code itself writes to files or to the network."""


def card(
    names: Mapping[str, str],
    result: Mapping[str, Any],
    plan: PrivacyPlan | None,
    load: str,
    lost: Sequence[str] = (),
    file: str = "inputs.npy",
    one_input: str = "",
) -> str:
    """The model card.

    Args:
        names: the options of `data` and `model`, and the `schedule` in words, if there is one.
        result: as in `result.json`.
        plan: None for a model that was trained without privacy.
        load: the argument of `dpexp.load`.
        lost: names of state that is not saved.
        file: a name for a file of inputs.
        one_input: what one of the inputs is, in words.
    """
    lines = [f"# {names.get('model', 'model')} on {names.get('data', 'data')}", ""]
    metrics = result.get("metrics", {})
    if "test_accuracy" in metrics:  # the line that MLflow shows without a click
        majority = metrics.get("test_majority_accuracy")
        always = "" if majority is None else f"; always the most frequent class: {majority:.2%}"
        lines += [f"**Test accuracy {metrics['test_accuracy']:.2%}**{always}  "]
    if plan is None:
        lines += ["**Not private**: trained without noise, as a baseline for private models.", ""]
    elif not result["private"]:
        lines += ["**Not private**: the noise seed is known, or private statistics were shown.", ""]
    elif "epsilon" in result:
        adjacency = neighbours(plan.adjacency, str(plan.privacy_unit))
        spent = next(iter(result["epsilon"].values()))
        together = f" All runs: {result['all_runs']}." if "all_runs" in result else ""
        lines += [f"**ε = {up(spent, 4)}** at δ = {up(result['delta'], 4)}, {adjacency}.{together}", ""]
    if metrics:
        lines += ["| measured on the test set | |", "|---|---|"]
        lines += [f"| {_named(name, result)} | {measured(name, metrics[name])} |" for name in sorted(metrics)]
        lines.append("")
    if plan is not None and result["private"] and "epsilon" in result:
        lines += _guarantee(names, result, plan)
    if lost:
        lines += [f"**Not saved**: {', '.join(lost)}, which are no tensors; a loaded model starts them anew.", ""]
    lines += [
        "## Use", "", "```python", "import dpexp", "",
        f"model = dpexp.load({json.dumps(load, ensure_ascii=False)})", "```", "", "```sh",
        f"python -m dpexp evaluate {quote(load)}", f"python -m dpexp predict {quote(load)} {file}", "```", "",
        f"One input: {one_input}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def privacy_section(ledger: Ledger, plan: PrivacyPlan, rounds: int, delta: float, accountant: str) -> str:
    """The card's section on privacy, of a training without `result.json`."""
    if ledger.not_private_reason:
        return f"## Privacy\n\n**Not private**: {ledger.not_private_reason}.\n"
    result = {
        "rounds": rounds, "epsilon": {accountant: epsilon(ledger, delta, accountant)}, "delta": delta,
        "risk": risk(ledger, accountant).figures(), "adjacency": plan.adjacency, "unit": str(plan.privacy_unit),
    }  # fmt: skip
    return "\n".join(_guarantee({}, result, plan))


def _guarantee(names: Mapping[str, str], result: Mapping[str, Any], plan: PrivacyPlan) -> list[str]:
    guarantee, words, likewise = guarantee_in_words(result)
    lines = ["## Privacy", "", f"(ε, δ)-differentially private: {guarantee}.", "", f"In words: {words} {likewise}", ""]
    stages = [plan.at_round(start) for start, _ in plan.schedule.segments(max(1, result["rounds"]))]
    q = range_of((event.q for event in replace(plan, rounds=max(1, result["rounds"])).sampling_events()), 5)
    sampled = f"with sampling {plan.sampling.name} at q = {q} of n = {plan.n} {plan.privacy_unit.plural}"
    said = []
    if len(plan.bands) > 1:
        shown = [f"{c:.4g}" for c in plan.bands[:8]]
        if len(plan.bands) > len(shown):
            shown.append("…")
        said.append(f"noise correlated over b = {len(plan.bands)} rounds, c = ({', '.join(shown)})")
    if plan.clip_rules:
        said.append(f"clip {plan.clip_rules}")
    said.append(f"noise multiplier z = {range_of((now.noise_multiplier for now in stages), 4)}")
    if names.get("schedule"):
        said.append(f"on the schedule {names['schedule']}")
    lines.append(f"{result['rounds']} rounds {sampled}; {', '.join(said)}.")
    if plan.part:
        lines.append(f"Only training records of {plan.part} were used.")
    lines.append("")
    if plan.groups:
        lines += ["| group | parameters | S_g | σ̃_g |", "|---|---|---|---|"]
    for group in plan.groups:
        same = [one for now in stages for one in now.groups if one.name == group.name] or [group]
        S, sigma = (range_of((getattr(one, name) for one in same), 4) for name in ("S", "sigma"))
        lines.append(f"| {group.name} | {group.d:,} | {S} | {sigma} |")
    for line in before_training(plan, result["delta"]):
        lines += ["", f"{line}."]
    lines += [
        "", "The guarantee covers the weights, and every checkpoint of the run until then. It does not cover", "",
        NOT_COVERED, "",
    ]  # fmt: skip
    return lines


def _named(name: str, result: Mapping[str, Any]) -> str:
    """A metric's name; of a recall, with the name of its class."""
    classes, k = result.get("class_names"), name.removeprefix(RECALL)
    return f"{name} ({classes[int(k)]})" if classes and k.isdecimal() else name
