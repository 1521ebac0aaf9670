"""A model card: what a model was trained on, what it may cost those whose data that was, and how to use it."""

import math
from collections.abc import Mapping
from decimal import ROUND_UP, Context, Decimal
from typing import Any

from dpexp.privacy.plan import PrivacyPlan
from dpexp.showing.terminal import NEIGHBOURS

_NOT_COVERED = """\
- choosing this model by looking at several private runs, each of which has its own ε;
- the test set, which is taken as public, and `data.n` and normalisation constants, which must be published facts;
- whatever the training code itself writes to files or to the network."""


def card(
    names: Mapping[str, str],
    result: Mapping[str, Any],
    plan: PrivacyPlan | None,
    risk: Mapping[str, float],
    load: str,
) -> str:
    """Markdown.

    Args:
        names: which data, model, group, … were chosen.
        result: as in `result.json`.
        plan: None for a model that was trained without privacy.
        risk: at false positive rates, the most that a membership test can find; by name.
        load: the argument of `dpexp.load`.
    """
    lines = [f"# {names.get('model', 'model')} on {names.get('data', 'data')}", ""]
    if plan is None:
        lines += ["**Not private**: trained without noise, as the twin to compare private models with.", ""]
    elif not result["private"]:
        lines += ["**Not private**: the noise seed is known, or private statistics were shown.", ""]
    elif "epsilon" in result:
        adjacency, most = NEIGHBOURS[plan.adjacency], next(iter(result["epsilon"].values()))
        lines += [f"**ε = {_up(most, 4)}** at δ = {result['delta']:g}, {adjacency}.", ""]
    metrics = result.get("metrics", {})
    if metrics:
        lines += ["| measured on the test set | |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in metrics.items()]
        lines.append("")
    if plan is not None and "epsilon" in result:
        lines += _guarantee(result, plan, risk)
    lines += [
        "## Use", "", "```python", "import dpexp", "", f'model = dpexp.load("{load}")', "```", "", "```sh",
        f"python -m dpexp evaluate {load}", f"python -m dpexp predict {load} data=inputs.npy", "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _up(value: float, digits: int) -> str:
    """Rounded up, so that what is shown holds."""
    if not math.isfinite(value) or value <= 0:
        return f"{value:g}"
    return str(Decimal(value).normalize(Context(prec=digits, rounding=ROUND_UP)))


def _guarantee(result: Mapping[str, Any], plan: PrivacyPlan, risk: Mapping[str, float]) -> list[str]:
    adjacency = NEIGHBOURS[plan.adjacency]
    lines = ["## Privacy", "", f"(ε, δ)-differentially private {adjacency}, with δ = {result['delta']:g} and", ""]
    lines += ["| accountant | ε |", "|---|---|"]
    lines += [f"| {name} | {_up(value, 4)} |" for name, value in result["epsilon"].items()]
    lines.append("")
    if risk:
        lines += ["No test for whether a record was among the data does better than this:", ""]
        lines += ["| a test for membership that is wrong about | finds at most |", "|---|---|"]
        lines += [
            f"| {alpha} of those who were not there | {_up(100 * found, 3)} % of those who were |"
            for alpha, found in risk.items()
        ]
        lines.append("")
    q, n = plan.sampling.q, plan.n
    lines += [
        f"{result['rounds']} rounds with sampling {plan.sampling.name} at q = {q:.5g} of n = {n} records; "
        f"noise multiplier z = {plan.noise_multiplier:.4g}.", "",
        "| group | parameters | S_g | σ̃_g |", "|---|---|---|---|",
        *(f"| {group.name} | {group.d:,} | {group.S:.4g} | {group.sigma:.4g} |" for group in plan.groups), "",
        "The guarantee covers the weights, and every checkpoint of the same run. It does not cover", "",
        _NOT_COVERED, "",
    ]  # fmt: skip
    return lines
