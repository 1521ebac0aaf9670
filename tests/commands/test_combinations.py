"""Each group, mechanism and allocation, from YAML to ε, judged from the ledger file alone."""

import math
from functools import cache

import dp_accounting
import pytest
from dp_accounting import pld
from jobs import result_of

Z, Q, ROUNDS = 1.3, 0.05, 3
NAMES = {"flat": ["all"], "per_layer": ["model.0", "model.3", "model.7", "model.9"], "conv_fc": ["conv", "fc"]}


def by_name(names, total):
    """{name: number} for the command line: 7/10 of the total for the first group, the rest for the others."""
    others = len(names) - 1
    numbers = [0.7 * total, *[0.3 * total / others] * others] if others else [total]
    return "{" + ",".join(f"{name}:{number:.15g}" for name, number in zip(names, numbers, strict=True)) + "}"


@pytest.mark.parametrize(
    ("group", "mechanism", "allocation"),
    [
        ("flat", "separate", "proportional"),
        ("per_layer", "joint", "dimension_adjusted"),
        ("per_layer", "separate", "min_variance"),
        ("conv_fc", "joint", "weighted"),
        ("conv_fc", "separate", "explicit"),
    ],
)
def test_the_ledger_says_what_was_asked_for(group, mechanism, allocation, dpexp_job, read_lines):
    noise, norm = [f"privacy.noise_multiplier={Z}"], "alpha" if mechanism == "joint" else "clip_norm"
    if allocation == "weighted":
        noise.append(f"allocation.weights={by_name(NAMES[group], 1)}")
    if allocation == "explicit":
        noise = ["privacy.epsilon=null", f"allocation.sigma={by_name(NAMES[group], 20)}"]
    output = dpexp_job(
        "tracking=none", "trainer.num_evaluations=0", f"{norm}=dimension", f"{norm}.total=0.6",
        f"sampling.sampling_rate={Q}", f"sampling.steps={ROUNDS}",
        f"group={group}", f"mechanism={mechanism}", f"allocation={allocation}", *noise,
    )  # fmt: skip

    header, spec, *rounds, closing = read_lines(output / "ledger.jsonl")
    planned = {"policy": "poisson", "n": 1437, "q": [Q]}
    said = {key: value for key, value in header.items() if key not in ("format", "link", "run")}
    assert said == {"line": 1, "dpexp_ledger": 2, "adjacency": "add_remove", "sampling": planned}
    assert spec["sampling"] == {"policy": "poisson", "q": Q, "n": 1437}
    assert [spec["line"], spec["spec"]] == [2, 0]
    assert [[line, kind] for line, kind, link in rounds] == [[3 + t, 0] for t in range(ROUNDS)]
    assert [closing["line"], closing["rounds"]] == [3 + ROUNDS, ROUNDS]
    assert [query["group"] for query in spec["queries"]] == NAMES[group]
    inverse_square = sum((query["S"] / query["sigma"]) ** 2 for query in spec["queries"])
    result = result_of(output)
    if allocation != "explicit":
        assert inverse_square == pytest.approx(1 / Z**2, rel=1e-12)
    assert result["noise_multiplier"] == pytest.approx(1 / math.sqrt(inverse_square), rel=1e-12)

    assert result["epsilon"]["pld"] == pytest.approx(directly(round(inverse_square**-0.5, 12)), rel=1e-4)


@cache
def directly(z):
    accountant = pld.PLDAccountant(value_discretization_interval=1e-5)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(Q, dp_accounting.GaussianDpEvent(z)), ROUNDS)
    return accountant.get_epsilon(1e-4)
