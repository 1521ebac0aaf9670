"""Audits of the real training refute no claim; audits of sabotaged code do."""

import math
from dataclasses import replace

import audited
import numpy as np
import pytest
import test_callback
import torch
from jobs import result_of, store_of
from rich.progress import Progress
from torch.utils.data import DataLoader

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.accounting.rounding import down
from dpexp.privacy.plan import groups
from dpexp.privacy.plan.clipping import Psac
from dpexp.privacy.sampling.privacy_unit import Microbatch, User
from dpexp.training.data import Synthetic
from tests.audited import ALLOCATIONS, MECHANISMS, SAMPLINGS, attacked, check, judged, noisy, shown


def as_planned(found):
    """Whether nothing is refuted, and the scores are as far apart as claimed, but for chance: four standard errors."""
    one = check(found.checks, "distance of scores")
    return not found.exceeded and abs(one.found - one.planned) < 0.75 * (one.detectable - one.planned)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """An honest training without sampling, and its ledger."""
    return noisy(tmp_path_factory.mktemp("recorded"), **MECHANISMS["separate"])


def test_an_honest_audit_refutes_a_smaller_claim_and_no_other(recorded):
    canaries, ledger = recorded
    assert ledger == canaries.plan.ledger()  # which canaries leave as it is
    assert [query.group for query in next(iter(ledger.rounds)).queries] == ["model.0", "model.1"]
    found = judged(canaries, ledger)
    assert as_planned(found) and found.mu_claimed == pytest.approx(2.0, rel=1e-3)
    missing = judged(canaries, replace(ledger, rounds=dict.fromkeys(ledger.rounds, 2)))  # of four rounds
    assert missing.exceeded and check(missing.checks, "distance of scores").refuted
    assert "4 noisy sums of model.0 were released, and the ledger has 2" in missing.exceeded


@pytest.mark.parametrize(
    "sampling, mechanism, vectors, allocation",
    [  # benchmarks/audit.py has all combinations
        ("poisson, replaced", "joint", "parameter", "dimension_adjusted"),
        ("cyclic_poisson", "joint by size", "layer", "min_variance"),
        ("random_allocation", "separate", "layer", "proportional"),
    ],
)
def test_an_honest_training_refutes_no_claim(sampling, mechanism, vectors, allocation, tmp_path):
    found = attacked(
        tmp_path, vectors=vectors, allocation=ALLOCATIONS[allocation], **MECHANISMS[mechanism], **SAMPLINGS[sampling]
    )
    assert as_planned(found)
    mu = {"poisson, replaced": 2 * math.sqrt(4), "cyclic_poisson": math.sqrt(2), "random_allocation": math.sqrt(4)}
    assert found.mu_claimed == pytest.approx(mu[sampling], rel=1e-3)  # of four rounds, or of two turns
    for one in found.checks:
        assert abs(one.found - one.planned) < 1.2 * abs(one.detectable - one.planned)


CYCLES = audited.FULL_CYCLES | {"steps": 12, "noise_multiplier": math.sqrt(3)}


def test_correlated_noise_refutes_no_claim(tmp_path):
    """Each record participates three times, and sensitivity is 2S; noise after the last round is cut off."""
    found = judged(*noisy(tmp_path, **CYCLES))
    assert not found.exceeded
    assert found.mu_claimed == pytest.approx(2.0, rel=1e-3)  # 2 √3 participations / z
    assert check(found.checks, "distance of scores").found > 0.85 * 2


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


@pytest.mark.parametrize(
    "choices",
    [
        {"private_metrics": audited.METRICS, "precision": "bf16-true"} | SAMPLINGS["poisson"],
        {"module": Named, "data": NamedData, "group": groups.flat(), "sampling": "poisson", "q": 0.4, "steps": 2,
         "schedules": {"z": [2, 1], "q": [1, 2], "S": [1, 3]}},
    ],
    ids=["metrics in bf16", "own module on a schedule"],
)  # fmt: skip
def test_other_choices_refute_no_claim(choices, tmp_path):
    assert as_planned(attacked(tmp_path, **choices))


def by_user():
    data = Synthetic(40, [4], 3)
    data.train.user_of = [i // 4 for i in range(40)]
    return data


USERS = {"privacy_unit": User(3, "user_of"), "data": by_user, "users": audited.N, "canaries": 200, "steps": 2}


@pytest.mark.parametrize(
    "choices",
    [
        SAMPLINGS["fixed_size"] | {"clip_rule": Psac()},  # under which a canary is as long as contributes the most
        SAMPLINGS["shuffle"] | MECHANISMS["joint"] | {
            "clip_rule": audited.Unbounded(), "vectors": "parameter", "allocation": ALLOCATIONS["weighted"],
        },
        {"sampling": "shuffle", "q": 0.4},
        {"sampling": "random_allocation", "q": 0.5, "num_selected": 2, "steps": 8},
        USERS,
        {"privacy_unit": Microbatch(4), "data": lambda: Synthetic(40, [4], 3), "canaries": 200,
         "steps": 2, "clip_norm": audited.FULL_CYCLES["clip_norm"]},
    ],
    ids=["psac", "unbounded", "a smaller last sample", "two rounds of four", "user", "microbatch"],
)  # fmt: skip
def test_a_record_contributes_all_that_it_may_and_no_more(choices, tmp_path):
    checks = shown(tmp_path, **choices)
    assert not any(one.refuted for one in checks)
    for group in ("model.0", "model.1"):
        assert check(checks, f"contribution to {group}").found == pytest.approx(1.0, abs=0.02)
    assert all(one.found == one.planned for one in checks if one.name in ("rounds of an epoch", "releases"))


JOINT = MECHANISMS["joint"]
FEW = {"canaries": 200, "steps": 1}  # are enough where no chance is in what is compared
CAUGHT = [  # what refutes them; benchmarks/audit.py has each by itself, under every sampling
    ({"noise": audited.less_noise, "correlation of noise": audited.the_same_noise_each_round}, {}),
    ({"noise": audited.half_the_noise_of_large_tensors}, {
        "module": lambda: audited.linear(200, 100), "data": lambda: Synthetic(50, [200], 100), "canaries": 200,
        "noise_multiplier": 1.1,
    }),
    ({"noise": audited.alpha_forgotten_in_the_noise}, JOINT),
    ({"noise": audited.a_forgotten_column_norm}, CYCLES),
    ({"contribution to model.0": audited.a_group_unclipped, "contribution to train_loss": audited.a_metric_unclipped},
     {"private_metrics": audited.METRICS} | FEW),
    ({"contribution to model.0": audited.a_rule_that_is_trusted}, {"clip_rule": audited.Unbounded()} | FEW),
    ({"contribution to model.0": audited.each_vector_clipped_alone}, {"vectors": "parameter"} | JOINT | FEW),
    ({"rate of inclusion": audited.a_larger_rate, "largest contribution": audited.some_records_twice},
     SAMPLINGS["poisson"]),
    ({"releases": audited.a_tenth_of_the_rounds_not_in_the_ledger},
     {"canaries": 200, "sampling": "poisson", "q": 0.1, "steps": 10}),
    ({"rounds of an epoch": audited.samples_of_an_epoch_that_overlap}, SAMPLINGS["shuffle"]),
    ({"rounds of an epoch": audited.some_records_that_draw_twice}, SAMPLINGS["random_allocation"]),
    ({"contribution to model.1": audited.twice_the_bound},
     USERS),
]  # fmt: skip


@pytest.mark.parametrize("sabotage, choices", CAUGHT, ids=lambda given: ", ".join(given) if given else "")
def test_the_audit_catches(sabotage, choices, tmp_path, monkeypatch):
    for sabotaged in sabotage.values():
        sabotaged(monkeypatch)
    of_noise = any("noise" in name for name in sabotage)
    checks = judged(*noisy(tmp_path, **choices)).checks if of_noise else shown(tmp_path, **choices)
    assert {*sabotage} <= {one.name for one in checks if one.refuted}


def test_a_canary_has_no_record_of_the_users(recorded, tmp_path):
    """What an audit shows depends on the canaries, the noise and the samples alone: here a record is not finite."""
    data = Synthetic(50, [4], 3)
    data.train_dataloader().dataset.tensors[0][0] *= torch.nan
    found, _ = noisy(tmp_path, data=lambda: data, **MECHANISMS["separate"])
    assert np.allclose(found.reader.scores(audited.N), recorded[0].reader.scores(audited.N))


SMALL = (
    "audit=dirac", "model=logistic", "sampling.steps=2", "privacy.epsilon=null", "privacy.noise_multiplier=1",
    "privacy.noise_seed=1",
)  # fmt: skip


def test_the_command_shows_what_the_attacker_got(dpexp_job, capsys):
    output = dpexp_job("audit", *SMALL, "sampling=full_batch", "audit.num_canaries=1000")
    said = capsys.readouterr().out
    assert "μ claimed" in said and "contribution to all" in said and "That proves no ε" in said
    result = result_of(output)
    assert not result["trained"] and result["audit"]["refuted"] == 0 and result["audit"]["canaries"] == 1000
    assert 0.98 < result["audit"]["noise"] < 1.02 and 0.98 < result["audit"]["contribution_to_all"] < 1.02
    assert (output / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert not (output / "weights.safetensors").exists()
    attacked, samples = (read_ledger(output / "audit" / name / "ledger.jsonl") for name in ("noise", "samples"))
    planned = read_ledger(output / "planned_ledger.jsonl")
    (of_plan,), (of_attack,), (of_samples,) = planned.rounds, attacked.rounds, samples.rounds
    assert of_attack == of_plan and samples.rounds[of_samples] == planned.rounds[of_plan] == 2
    assert of_samples.queries[0].sigma == pytest.approx(0.05 * of_plan.queries[0].S)
    client = store_of(output.parents[2])
    run = client.get_run(result["mlflow_run_id"])
    assert run.data.metrics["with audit mu_at_least"] == float(down(result["audit"]["mu_at_least"], 5))
    assert run.info.status == "FINISHED"
    assert "audit.png" in {file.path for file in client.list_artifacts(run.info.run_id)}


def test_a_job_is_trained_and_its_audit_shows_nothing_that_all_records_had_a_part_in(dpexp_job, capsys, monkeypatch):
    """Neither values that the plan releases nor the bounds that follow them: nobody counts the audit's training."""
    shown, update = [], Progress.update
    monkeypatch.setattr(
        Progress, "update", lambda *args, **fields: (shown.append(fields["shown"]), update(*args, **fields))
    )
    output = dpexp_job(
        *SMALL, "audit.num_canaries=100", "private_metrics=train", "clip_norm=adaptive", "tracking=none", "logger=csv"
    )  # fmt: skip
    assert (output / "csv").exists() and {path.name for path in output.glob("audit/*/*")} == {
        "ledger.jsonl", "ledger.end.json"
    }, "an audit releases with next to no noise"  # fmt: skip
    result = result_of(output)
    assert result["trained"] and "test_accuracy" in result["metrics"] and result["audit"]["refuted"] == 0
    assert not any("canaries" in name for name in dpexp.load(output).state_dict())
    assert "rate of inclusion" in capsys.readouterr().out
    trained, audits = shown[: result["rounds"]], shown[result["rounds"] :]
    assert "clip_norm/all" in trained[-1] and "ε" in trained[-1]
    assert audits and not any("clip_norm" in one or "ε" in one for one in audits)


def test_the_command_fails_if_a_claim_is_refuted(dpexp_job, monkeypatch):
    audited.half_the_noise(monkeypatch)
    with pytest.raises(SystemExit, match=r"the audit refutes what is claimed.*the noise is at most"):
        dpexp_job("audit", *SMALL, "audit.num_canaries=100", "tracking=none")


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
