"""Mechanisms, clipping norms and clip rules that a command line gives, for all groups or by group."""

import json

import pytest
from test_by_group import ROOTS

import dpexp
from dpexp.tracking.read import trials


@pytest.mark.parametrize("first", ROOTS)
@pytest.mark.parametrize("last", ROOTS)
def test_a_groups_default_is_that_of_its_mechanism_however_that_was_chosen(first, last):
    """By one word for all groups or one for each."""
    each = ("mechanism=by_group", f"mechanism.by_group={{conv: {first}, fc: {last}}}")
    for chosen in (each, (f"mechanism={first}",))[: 1 + (first == last)]:
        plan = dpexp.plan(dpexp.compose("group=conv_fc", "privacy.noise_multiplier=1", *chosen))
        assert [group.S for group in plan.groups] == pytest.approx([ROOTS[first], ROOTS[last]])


def test_a_job_says_its_clip_rule(dpexp_job, capsys):
    output = dpexp_job(
        "clip_rule=global", "clip_rule.threshold=8", "model=logistic", "group=per_layer",
        "trainer.num_evaluations=0", "sampling.steps=1", "tracking=none",
    )  # fmt: skip
    assert "clip global (threshold = 8" in capsys.readouterr().out
    assert "clip global (threshold = 8), noise multiplier" in (output / "card.md").read_text()


def test_a_job_shows_them_by_group(dpexp_job, capsys):
    folder = dpexp_job(
        "group=conv_fc", "sampling.steps=2", "sampling.epochs=null", "trainer.num_evaluations=0", "alpha=adaptive",
        "mechanism=by_group", "mechanism.by_group={conv: joint, fc: separate}",
        "clip_norm=by_group", "clip_norm.by_group={conv: null, fc: {_target_: dpexp.FixedClipNorm, value: 0.5}}",
        "clip_rule=by_group", "clip_rule.by_group={conv: abadi, fc: automatic}",
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "clip abadi of conv and automatic (gamma = 0.01) of fc" in shown
    card = (folder / "card.md").read_text()
    assert "abadi of conv and automatic (gamma = 0.01) of fc" in card
    plan = json.loads((folder / "plan.json").read_text())
    conv, fc, _ = (group["clip_rule"] for group in plan["groups"])
    assert conv == {"name": "abadi"} and fc == {"gamma": 0.01, "name": "automatic"}
    (row,) = trials(f"sqlite:///{folder.parents[1]}/mlflow.db", ["dpexp"]).to_dict("records")
    assert row["mechanism"] == "conv: joint, fc: separate" and row["alpha"] == "adaptive"
    assert row["clip_rule"] == "conv: abadi, fc: automatic"
