"""`python -m dpexp certificate` and `verify`: what a certificate says, that it can be checked, and what refutes it."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from jobs import result_of
from runs import ledger, round_of, write_run

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.independent import estimates
from dpexp.accounting.ledger import Ledger, OneTimeQueryEvent, Round, SumQueryEvent, read_ledger, write_ledger
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.releases import releases
from dpexp.accounting.risk import risk
from dpexp.accounting.sampling import sampling_event
from dpexp.commands import certificate as command
from dpexp.commands.account import source_of
from dpexp.commands.certificate import LOOSEST, certificate, verify
from dpexp.errors import ClaimRefuted
from tests.pages import DOCS, blocks

ONCE = (OneTimeQueryEvent("counts", "laplace", 1.0, 2.0, 4.0), OneTimeQueryEvent("pca", "gaussian", 1.0, 2**0.5, 7.0))
BEFORE_TRAINING = {Round(sampling_event("all", 1.0, 1000), (query,)): 1 for query in ONCE}
RUNS = {
    "poisson": ledger(z=2.0),
    "poisson_replaced": ledger(adjacency="replace_one"),
    "full_batch": ledger(policy="all", z=8.0),
    "shuffle": Ledger("replace_one", {round_of(4.0, 0.25, "shuffle", epoch=k): 4 for k in range(3)}),
    "truncated_poisson": ledger(policy="truncated_poisson", adjacency="replace_null", z=2.0, maximum=110, rounds=2),
    "few_of_a_sample": ledger(policy="truncated_poisson", adjacency="replace_null", z=2.0, maximum=5, rounds=2),
    "cyclic_poisson": ledger(policy="cyclic_poisson", z=2.0, parts=5),
    "several": Ledger("add_remove", BEFORE_TRAINING | {round_of(1.1, 0.01): 10}),
    "none": Ledger("add_remove", {}),
}


@pytest.fixture
def certified(tmp_path, monkeypatch):
    """Goes to an empty folder; writes a run's ledger and its certificate, and returns what that says."""
    monkeypatch.chdir(tmp_path)

    def write(run, delta=1e-5):
        write_run(tmp_path / "ledger.jsonl", run)
        return json.loads(certificate(["ledger.jsonl", f"delta={delta}"]).read_text())

    return write


@pytest.mark.parametrize("name", RUNS)
def test_a_certificate_of_each_policy_agrees_with_dp_accounting(name, certified, printed, monkeypatch):
    found = []
    monkeypatch.setattr(command, "estimates", lambda *asked: found.append(estimates(*asked)) or found[-1])
    claimed = certified(RUNS[name])["guarantee"]["epsilon"]
    verify(["ledger.certificate.json"])
    shown = printed()
    assert "(optimistic) and" in shown and "Verified: the certificate says what its ledger does" in shown
    ((low, high),) = found
    assert low <= epsilon(RUNS[name], 1e-5) <= claimed <= LOOSEST * high
    if name not in ("truncated_poisson", "few_of_a_sample"):  # whose lower estimate is that without a maximum
        assert high * 0.98 <= low <= high * (1 + 1e-9)


@pytest.mark.parametrize(
    "run, delta, missing",
    [
        (ledger(policy="fixed_size", adjacency="replace_one"), 1e-5, "it has no privacy loss distribution for fixed_s"),
        (ledger(), 1e-12, "it is not exact at a δ below 1e-10"),
        (ledger(policy="all", z=1e-7), 1e-5, "it is not exact at a δ below 1e-10 or an ε above 500"),
    ],
)
def test_what_dp_accounting_lacks_is_named(run, delta, missing, certified, printed):
    certified(run, delta)
    verify(["."])
    shown = printed()
    assert f"Not recomputed by dp-accounting {version('dp-accounting')}: {missing}" in shown
    assert "Verified: the certificate says what its ledger does" in shown


# The noise multiplier is 1/√((1/5)² + (3/20)²) = 4, over a sensitivity of 2.
SAID_OF_A_RUN = """{
    "private": true, "not_private_reason": null, "privacy_unit": "user", "adjacency": "replace_one",
    "holds": "for replacing one user by another", "sensitivity_in_S": 2, "accountant": "pld",
    "releases": [{"count": 30, "q": 0.1, "policy": "poisson_replaced", "z": 2.0}],
    "rounds": [{
        "count": 30, "sampling": {"policy": "poisson", "q": 0.1, "n": 700},
        "queries": [{"group": "conv", "S": 1.0, "sigma": 5.0}, {"group": "fc", "S": 3.0, "sigma": 20.0}]
    }]
}"""


def test_what_a_certificate_says(certified, tmp_path):
    both = SumQueryEvent("conv", 1.0, 5.0), SumQueryEvent("fc", 3.0, 20.0)
    rounds = {Round(sampling_event("poisson", 0.1, 700), both): 30}
    run = Ledger("replace_one", rounds, record={"kind": "user", "most": 9})
    said = certified(run)
    assert [*said] == ["dpexp_certificate", "guarantee", "run", "terms", "made"] and said["dpexp_certificate"] == 1
    guarantee, about = said["guarantee"], said["run"]
    exact = {"epsilon": epsilon(run, 1e-5), **risk(run).figures()}
    exact |= {f"epsilon_at_delta_{delta:g}": epsilon(run, delta) for delta in (float(f"1e-{k}") for k in range(3, 13))}
    assert guarantee.pop("delta") == 1e-5 and guarantee.keys() == exact.keys()
    assert all(value * (1 - 1e-6) <= guarantee[name] <= value * (1 + 1e-4) for name, value in exact.items())
    assert guarantee["epsilon"] >= exact["epsilon"]
    content = (tmp_path / "ledger.jsonl").read_bytes()
    assert about.pop("ledger") == {
        "file": "ledger.jsonl", "sha256": hashlib.sha256(content).hexdigest(), "complete": True, "part_of_data": None,
        "run": json.loads(content.splitlines()[0])["run"],
    }  # fmt: skip
    assert about == json.loads(SAID_OF_A_RUN)
    assert {"trust_model", "public", "assumed", "several_runs", "floating_point"} <= {*said["terms"]}
    assert said["made"]["dpexp"] == version("dpexp") and said["made"]["date"].startswith("20")


MORE = "More may have been spent: there is no ledger.end.json next to it, so that it may have"


@pytest.mark.parametrize(
    "state, name, is_complete, words",
    [
        ("whole", "ledger.jsonl", True, "Certificate: "),
        ("cut at an earlier end", "ledger.jsonl", False, MORE),  # nothing else shows that
        ("cut within", "ledger.jsonl", False, "The ledger ends early: the run was"),
        ("planned", "ledger.jsonl", False, "A plan, not a run: ε = "),
        ("planned", "planned_ledger.jsonl", False, "A plan, not a run: ε = "),
        ("seeded", "ledger.jsonl", False, "ε does not cover all that the run shows: the noise seed is known"),
    ],
)
def test_what_a_ledger_does_not_guarantee_is_said(state, name, is_complete, words, tmp_path, printed):
    reason = "the noise seed is known" if state == "seeded" else None
    path, run = tmp_path / name, replace(ledger(2.0, 1.0, 10), not_private_reason=reason)  # whose ε takes no time
    write_run(path, run)
    first = path.read_bytes()
    write_run(path, run, resume=True)
    if state != "whole":
        end_of(path).unlink()
    if state.startswith("cut"):
        path.write_bytes(first if state == "cut at an earlier end" else first[:-2])
    if state == "planned":
        write_ledger(path, run)
    file = certificate([str(path), "delta=1e-5"])
    said = json.loads(file.read_text())
    verify([str(file)])
    shown = printed()
    assert shown.count(words) == 1 + (not is_complete)  # by both commands
    assert (MORE in shown) == (state in ("cut at an earlier end", "seeded"))
    assert ("Verified: " in shown) != ("A plan, not a run: the certificate says" in shown) == (state == "planned")
    about = said["run"]["ledger"]
    assert about["complete"] == is_complete and (about["run"] is None) == (state == "planned")
    assert said["run"]["not_private_reason"] == reason
    for key, other in (("complete", not is_complete), ("run", "2635b557161c4bdc5eaed8cd3e173bc6")):
        file.write_text(json.dumps(said | {"run": said["run"] | {"ledger": about | {key: other}}}))
        with pytest.raises(ClaimRefuted, match=r"run\.ledger is not what the ledger says"):
            verify([str(file)])


def test_a_run_is_certified_by_its_folder_or_id_and_verified_by_ten_lines(job, monkeypatch, capsys):
    """The lines of docs/certificates.md, which import neither dpexp nor what reads a ledger."""
    run_id, path = result_of(job)["mlflow_run_id"], job / "ledger.certificate.json"
    assert certificate([str(job)]) == path
    said = json.loads(path.read_text())
    assert said["guarantee"]["delta"] == 1e-4 and said["made"]["mlflow_run_id"] == run_id
    job.rename("elsewhere")
    fetched = certificate([run_id])
    assert fetched == Path(run_id, path.name) and json.loads(fetched.read_text()) | {"made": said["made"]} == said
    verify([run_id])

    monkeypatch.chdir(run_id)
    ((title, lines),) = blocks(DOCS / "certificates.md", "python")
    assert title == "check.py" and len([line for line in lines.splitlines() if line.strip()]) == 10
    imports = [line for line in lines.splitlines() if "import" in line]
    assert imports == [
        "import json, numpy as np",
        "from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld",
    ]
    for factor, verdict in ((1, "agrees"), (0.98, "disagrees")):
        said["guarantee"]["epsilon"] *= factor
        Path(path.name).write_text(json.dumps(said))
        capsys.readouterr()
        exec(compile(lines, "check.py", "exec"), {})
        claimed, found, *_, word = capsys.readouterr().out.split()
        assert (float(claimed), word) == (said["guarantee"]["epsilon"], verdict)
        assert float(found) == pytest.approx(epsilon(read_ledger("ledger.jsonl"), 1e-4), rel=1e-3)


@pytest.mark.parametrize(
    "factor, said",
    [
        (0.99, "its epsilon is .*, where the ledger costs .*; dp-accounting .* is claimed"),
        (0.9995, "its epsilon is .*, where the ledger costs [0-9.]+\\.$"),
        (1.005, None),
        (1.2, "is refuted: dp-accounting .* is claimed"),  # the accountant claims no such value
    ],
)
def test_an_epsilon_that_differs_is_refuted(factor, said, certified):
    run = ledger(z=2.0, rounds=4)
    changed = certified(run)
    changed["guarantee"]["epsilon"] = factor * epsilon(run, 1e-5)
    Path("ledger.certificate.json").write_text(json.dumps(changed))
    if said is None:
        return verify(["."])
    with pytest.raises(ClaimRefuted, match=said):
        verify(["."])


# a pattern of a certificate's text, what takes its place, and what refutes it. In Python, JSON's 1 equals true.
DOCTORED = [
    ('"epsilon": [0-9.e+]+', '"epsilon": 0.5', "its epsilon is 0.5, where the ledger costs"),
    ('"mu": [0-9.e+]+', '"mu": 0.1', "its mu is 0.1, where the ledger costs"),
    ('"mu": [0-9.e+]+', '"mu": "little"', "its mu is little, where the ledger costs"),
    ('"advantage": 1.0', '"advantage": true', "its advantage is True, where"),
    ('"advantage": 1.0', '"advantage": "1.0"', "its advantage is 1.0, where"),
    ('"epsilon_at_delta_1e-12": [0-9.e+]+', '"epsilon_at_delta_1e-12": 1', "its epsilon_at_delta_1e-12 is 1, where"),
    ('"delta"', '"epsilon_at_delta_0.5": 0, "delta"', "its epsilon_at_delta_0.5 is 0, where the ledger costs None"),
    ('"delta": 1e-05', '"delta": 1e-07', "its epsilon is .*, where the ledger costs"),
    ('"adjacency": "add_remove"', '"adjacency": "replace_one"', r"run.adjacency is not what the ledger says"),
    ('"private": true', '"private": false', "run.private is not"),
    ('"private": true', '"private": 1', "run.private is not"),
    ('"private": true', '"private": "true"', "run.private is not"),
    ('"complete": true', '"complete": 1', "run.ledger is not"),
    ('"sensitivity_in_S": 1', '"sensitivity_in_S": true', "run.sensitivity_in_S is not"),
    (r'"releases": \[.*?\]', '"releases": []', "run.releases is not"),
    ('"q": 1.0, "policy"', '"q": true, "policy"', "run.releases is not"),
    ('"rounds": \\[\\{', '"public": [{', "run.rounds is not .*run.public is not"),
    ('"S": 1.0', '"S": true', "run.rounds is not"),
    ('"trust_model": "Central', '"trust_model": "Local', "terms.trust_model is not"),
    ('"trust_model": "[^"]*"', '"trust_model": true', "terms.trust_model is not"),
    ('"guarantee": {', '"headline": {"epsilon": 0.01}, "guarantee": {', "headline is not part of it"),
]  # fmt: skip


@pytest.mark.parametrize("old, new, words", DOCTORED)
def test_a_doctored_certificate_is_refuted_without_dp_accounting_too(old, new, words, certified):
    text, count = re.subn(old, lambda _: new, json.dumps(certified(ledger(policy="all", z=1e-3))))
    assert count == 1
    Path("ledger.certificate.json").write_text(text)
    with pytest.raises(ClaimRefuted, match=f"is refuted: .*{words}"):
        verify(["."])


def test_neither_imports_torch_nor_mlflow(certified):
    certified(ledger(2.0, 1.0, 3))
    code = "import sys; from dpexp.commands.certificate import verify; verify(['ledger.jsonl']); "
    code += "print([name for name in ('torch', 'mlflow', 'pytorch_lightning') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    "z, q, rounds, delta", [(4.0, 0.01, 200, 1e-10), (20.0, 0.5, 300, 1e-8), (0.3, 1.0, 1, 1e-5), (0.1, 0.5, 2, 1e-3)]
)
def test_dp_accountings_estimates_are_close_on_all_scales(z, q, rounds, delta):
    run = ledger(z, q, rounds)
    ours = epsilon(run, delta)
    low, high = estimates(releases(run), delta, ours)
    assert 0.99 * ours <= low <= ours * (1 + 1e-9) and ours <= high * 1.001 < 1.01 * ours


def test_a_job_that_writes_meanwhile_is_certified_with_no_fewer_rounds_than_are_hashed(certified, monkeypatch):
    certified(ledger(2.0, 1.0, 20))
    path = Path("ledger.jsonl")
    before = path.read_bytes()

    def source_after_more_rounds(*arguments):
        write_ledger(path, ledger(2.0, 1.0, 40))
        return source_of(*arguments)

    monkeypatch.setattr(command, "source_of", source_after_more_rounds)
    said = json.loads(certificate(["ledger.jsonl", "delta=1e-5"]).read_text())
    assert said["run"]["ledger"]["sha256"] == hashlib.sha256(before).hexdigest()
    assert said["guarantee"]["epsilon"] > epsilon(ledger(2.0, 1.0, 20), 1e-5) * 1.1
    with pytest.raises(ClaimRefuted, match="is not the one that"):
        verify(["."])
