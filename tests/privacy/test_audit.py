"""Audits of the real training refute no claim; audits of sabotaged code do, or a named test fails."""

import itertools
import math

import audited
import numpy as np
import pytest
import test_callback
import torch
from jobs import result_of, store_of
from rich.progress import Progress
from torch import nn
from torch.utils.data import DataLoader

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.privacy.plan import groups
from dpexp.training.classifier import Classifier
from dpexp.training.data import Synthetic
from tests.audited import ALLOCATIONS, CLIPS, MECHANISMS, RELEASED, SAMPLINGS, VECTORS, attacked, check, trained

# Samplings, with the other choices in turn; benchmarks/audit.py has all combinations.
SOME = ("poisson", "poisson, replaced", "fixed_size", "shuffle", "cyclic_poisson")
HONEST = [
    (sampling, mechanism, VECTORS[k % 2], [*ALLOCATIONS][k % 4])
    for k, (sampling, mechanism) in enumerate(zip(SOME, itertools.cycle(MECHANISMS), strict=False))
]


def adjacency_of(sampling):
    return SAMPLINGS[sampling].get("adjacency") or {"fixed_size": "replace_one", "shuffle": "replace_one"}.get(sampling)


def as_planned(found):
    """Whether the scores are as far apart as claimed, but for chance: four standard errors."""
    one = check(found, "distance of scores")
    return abs(one.found - one.planned) < 0.75 * (one.detectable - one.planned)


@pytest.mark.parametrize("sampling, mechanism, vectors, allocation", HONEST)
def test_an_honest_training_refutes_no_claim(sampling, mechanism, vectors, allocation, tmp_path):
    found = attacked(
        tmp_path, vectors=vectors, allocation=ALLOCATIONS[allocation], **MECHANISMS[mechanism], **SAMPLINGS[sampling]
    )
    assert not found.exceeded
    factor = {"replace_one": 2}.get(adjacency_of(sampling), 1)
    mu = factor * (math.sqrt(2) / 2 if sampling == "cyclic_poisson" else 2.0)  # √(two turns, or 16 rounds) / z
    assert found.mu_claimed == pytest.approx(mu, rel=1e-3)
    assert as_planned(found)
    for one in found.checks:
        assert abs(one.found - one.planned) < 1.2 * abs(one.detectable - one.planned)
    for group in ("model.0", "model.2"):
        assert check(found, f"contribution to {group}").found == pytest.approx(1.0, abs=0.02)


def test_metrics_refute_no_claim(tmp_path):
    found = attacked(tmp_path, **RELEASED["metrics"])
    assert not found.exceeded
    assert as_planned(found)


def test_correlated_noise_refutes_no_claim(tmp_path):
    """Each record participates four times, and sensitivity is 2S; noise after the last round is cut off."""
    found = attacked(tmp_path, adjacency="replace_one", **audited.FULL_CYCLES, **RELEASED["adaptive"])
    assert not found.exceeded
    assert found.mu_claimed == pytest.approx(2.0, rel=1e-3)  # 2 √4 participations / z
    assert check(found, "distance of scores").found > 0.85 * 2


@pytest.mark.parametrize(
    "clip_rule, mechanism",
    [(CLIPS["psac"], "separate"), (audited.Unbounded(), "joint")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_clip_rule_refutes_no_claim(clip_rule, mechanism, tmp_path):
    """A canary is as long as the rule lets it contribute the most; one without a bound is bounded all the same."""
    found = attacked(tmp_path, clip_rule=clip_rule, **MECHANISMS[mechanism])
    assert not found.exceeded
    assert as_planned(found)


JOINT = MECHANISMS["joint"]
CAUGHT = [  # benchmarks/audit.py has more, under every sampling
    (audited.half_the_noise, SAMPLINGS["shuffle"]),
    (audited.the_same_noise_each_round, {}),
    (audited.a_group_unclipped, {}),
    (audited.a_rule_that_is_trusted, {"clip_rule": audited.Unbounded()}),
    (audited.each_vector_clipped_alone, {"vectors": "parameter"} | JOINT),
    (audited.alpha_forgotten_in_the_noise, JOINT),
    (audited.twice_the_rate, SAMPLINGS["poisson"]),
    (audited.a_round_missing_in_the_ledger, {}),
    (audited.a_metric_unclipped, RELEASED["metrics"]),
    (audited.a_forgotten_column_norm, audited.FULL_CYCLES),
]


@pytest.mark.parametrize("sabotage, choices", CAUGHT, ids=lambda value: getattr(value, "__name__", ""))
def test_the_audit_catches(sabotage, choices, tmp_path, monkeypatch):
    sabotage(monkeypatch)
    assert attacked(tmp_path, canaries=1000, **choices).exceeded


@pytest.mark.parametrize(
    "sabotage, test",
    [
        (audited.the_true_size_as_divisor, test_callback.test_the_denominator_is_the_plans_n),
        (audited.no_noise_for_an_empty_sample, test_callback.test_an_empty_sample_is_noised_accounted_and_stepped),
        (audited.a_round_missing_in_the_ledger, test_callback.test_an_empty_sample_is_noised_accounted_and_stepped),
    ],
)
def test_what_no_audit_shows_another_test_catches(sabotage, test, tmp_path, monkeypatch):
    test(tmp_path)
    sabotage(monkeypatch)
    (tmp_path / "sabotaged").mkdir()
    with pytest.raises(AssertionError):
        test(tmp_path / "sabotaged")


def test_small_errors_are_found(tmp_path, monkeypatch):
    """Noise of 0.95 times the planned standard deviation, and inclusion at 1.1 q."""
    audited.less_noise(monkeypatch)
    audited.a_larger_rate(monkeypatch)
    found = attacked(tmp_path, canaries=4000, sampling="poisson", q=0.1, steps=100)
    assert [one.name for one in found.checks if one.refuted] == ["noise", "rate of inclusion"]
    assert check(found, "noise").found == pytest.approx(0.95, abs=0.02)
    assert check(found, "rate of inclusion").found == pytest.approx(1.1, abs=0.02)


def test_canaries_leave_the_ledger_as_it_is(tmp_path):
    run = trained(tmp_path, 100)
    assert read_ledger(tmp_path / "ledger.jsonl") == run.plan.ledger()
    assert [query.group for round_ in run.plan.ledger().rounds for query in round_.queries] == ["model.0", "model.2"]


class Named(test_callback.Model):
    """Takes batches by name, and returns its loss by name."""

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step((batch["x"], batch["y"]), batch_idx)}


class NamedData(test_callback.Data):
    def train_dataloader(self):
        loader = super().train_dataloader()
        return DataLoader(loader.dataset, 3, shuffle=True, num_workers=self.workers, collate_fn=by_name)


def by_name(items):
    x, y = zip(*items, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


def test_custom_modules_data_and_collate_functions_are_audited(tmp_path):
    found = attacked(
        tmp_path, module=Named, data=NamedData, group=groups.flat(), sampling="poisson", q=0.5
    )  # fmt: skip
    assert not found.exceeded and as_planned(found)


def test_another_type_is_audited(tmp_path):
    found = attacked(tmp_path, precision="bf16-true")
    assert not found.exceeded and as_planned(found)


def test_a_schedule_is_audited(tmp_path):
    factors = {"z": [2, 1], "q": [1, 2], "S": [1, 3]}
    choices = {"sampling": "poisson", "q": 0.4, "steps": 2, "noise_multiplier": 1.0, "schedules": factors}
    found = attacked(tmp_path, **choices)
    assert not found.exceeded and as_planned(found)


SMALL = ("model=logistic", "sampling.steps=2", "sampling=full_batch", "audit.num_canaries=1000", "privacy.noise_seed=1")
FEW = (*SMALL, "audit.num_canaries=100")


def test_the_command_shows_what_the_attacker_got(dpexp_job, capsys):
    output = dpexp_job("audit", "audit=dirac", *SMALL)
    said = capsys.readouterr().out
    assert "μ claimed" in said and "contribution to all" in said and "That proves no ε" in said
    result = result_of(output)
    assert not result["trained"] and result["audit"]["refuted"] == 0 and result["audit"]["canaries"] == 1000
    assert 0.98 < result["audit"]["noise"] < 1.02 and 0.98 < result["audit"]["contribution_to_all"] < 1.02
    assert (output / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert not (output / "weights.safetensors").exists()
    attacked, samples = (read_ledger(output / "audit" / name) for name in ("ledger.jsonl", "samples.jsonl"))
    planned = read_ledger(output / "planned_ledger.jsonl")
    (of_plan,), (of_attack,), (of_samples,) = planned.rounds, attacked.rounds, samples.rounds
    assert of_attack == of_plan and samples.rounds[of_samples] == planned.rounds[of_plan] == 2
    assert of_samples.queries[0].sigma == pytest.approx(0.05 * of_plan.queries[0].S)
    client = store_of(output.parents[2])
    run = client.get_run(result["mlflow_run_id"])
    assert run.data.metrics["with audit mu_at_least"] == pytest.approx(result["audit"]["mu_at_least"])
    assert run.info.status == "FINISHED"
    assert "audit.png" in {file.path for file in client.list_artifacts(run.info.run_id)}


def test_the_command_fails_if_a_claim_is_refuted(dpexp_job, capsys, monkeypatch):
    audited.half_the_noise(monkeypatch)
    with pytest.raises(SystemExit) as end:
        dpexp_job("audit", "audit=dirac", *FEW, "tracking=none")
    assert "the audit refutes what is claimed" in str(end.value.code)


def test_an_audit_shows_nothing_that_all_records_had_a_part_in(dpexp_job, monkeypatch):
    """Neither values that the plan releases nor the bounds that follow them: nobody counts its training."""
    shown, update = [], Progress.update
    monkeypatch.setattr(
        Progress, "update", lambda *args, **fields: (shown.append(fields["shown"]), update(*args, **fields))
    )
    released = ("private_metrics=train", "clip_norm=adaptive", "tracking=none")
    dpexp_job("audit", "audit=dirac", *FEW, *released)
    assert shown and not any("clip_norm" in one or "ε" in one for one in shown)
    dpexp_job(*SMALL[:3], *released)
    assert "clip_norm/all" in shown[-1]


def test_a_job_is_trained_and_then_audited(dpexp_job, capsys):
    output = dpexp_job("audit=dirac", *FEW, "sampling=poisson", "sampling.epochs=null", "tracking=none")
    assert "rate of inclusion" in capsys.readouterr().out
    result = result_of(output)
    assert result["trained"] and "test_accuracy" in result["metrics"] and result["audit"]["refuted"] == 0
    weights = dpexp.load(output).state_dict()
    assert not any("canaries" in name for name in weights)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["privacy.enabled=false"], "no claim to test"),
        (["audit.num_canaries=10"], "at least 100"),
        (["audit.confidence=1"], "strictly between"),
    ],
)
def test_what_cannot_be_audited_is_refused(arguments, message, dpexp_job):
    with pytest.raises(SystemExit, match=message):
        dpexp_job("audit", "audit=dirac", *arguments)


def test_a_canary_has_no_record_of_the_users(tmp_path):
    """What an audit shows depends on the canaries, the noise and the samples alone: here a record is not finite."""
    found = []
    for factor in (1.0, torch.nan):
        data = Synthetic(50, [4], 3)
        data.train_dataloader().dataset.tensors[0][0] *= factor
        folder = tmp_path / str(factor)
        folder.mkdir()
        found.append(trained(folder, canaries=200, data=lambda data=data: data).reader.scores(200))
    assert np.allclose(*found)


def test_large_tensors_are_audited_by_the_way_that_they_get_their_noise(tmp_path, monkeypatch):
    audited.half_the_noise_of_large_tensors(monkeypatch)
    net = nn.Linear(200, 100)
    plan = {"group": groups.flat(), "noise_multiplier": 2.5}
    found = attacked(
        tmp_path, module=lambda: Classifier(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        data=lambda: Synthetic(50, [200], 100), **plan,
    )  # fmt: skip
    assert found.exceeded
