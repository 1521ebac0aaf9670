"""`python -m dpexp certificate` and `verify`: what a certificate says, that it can be checked, and what refutes it."""

import ast
import hashlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from jobs import result_of
from made import tracked_job, write_run
from runs import ledger
from test_one_time_queries import TRAINING, gaussian, laplace, once

from dpexp.__main__ import main
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.independent import estimates
from dpexp.accounting.ledger import (
    Ledger,
    Round,
    SumQueryEvent,
    ledger_so_far,
    read_ledger,
    write_ledger,
)
from dpexp.accounting.ledger.integrity import end_of
from dpexp.accounting.releases import releases
from dpexp.accounting.risk import risk
from dpexp.accounting.sampling import sampling_event
from dpexp.commands import certificate as command
from dpexp.commands.account import source_of
from dpexp.commands.certificate import LOOSEST, certificate, verify
from dpexp.errors import ClaimRefuted, ConfigError
from tests.pages import DOCS, blocks

pytestmark = pytest.mark.usefixtures("bare")
SHUFFLED = Ledger(
    "replace_one",
    {Round(sampling_event("shuffle", 0.25, 1000, epoch=k), (SumQueryEvent("all", 1.0, 4.0),)): 4 for k in range(3)},
)
RUNS = {
    "poisson": ledger(policy="poisson", adjacency="add_remove", z=2.0),
    "poisson_replaced": ledger(policy="poisson", adjacency="replace_one", z=4.0),
    "full_batch": ledger(policy="all", adjacency="add_remove", z=8.0, q=1.0),
    "shuffle": SHUFFLED,
    "truncated_poisson": ledger(policy="truncated_poisson", adjacency="replace_null", z=2.0, maximum=110, rounds=5),
    "few_of_a_sample": ledger(policy="truncated_poisson", adjacency="replace_null", z=2.0, maximum=5, rounds=5),
    "cyclic_poisson": ledger(policy="cyclic_poisson", adjacency="add_remove", z=2.0, parts=5, block=0),
    "several": Ledger("add_remove", {once(laplace(4.0)): 1, once(gaussian(7.0)): 1, TRAINING: 10}),
    "none": Ledger("add_remove", {}),
}


@pytest.fixture
def certified(tmp_path, monkeypatch):
    """Goes to an empty folder; writes a run's ledger and its certificate, and returns what that says."""
    monkeypatch.chdir(tmp_path)

    def write(run, *options):
        (tmp_path / "ledger.jsonl").unlink(missing_ok=True)
        write_run(tmp_path / "ledger.jsonl", run)
        return json.loads(certificate(["ledger.jsonl", "delta=1e-5", *options]).read_text())

    return write


@pytest.mark.parametrize("name", RUNS)
def test_a_certificate_of_each_policy_agrees_with_dp_accounting(name, certified, capsys, monkeypatch):
    found = []
    monkeypatch.setattr(command, "estimates", lambda *asked: found.append(estimates(*asked)) or found[-1])
    claimed = certified(RUNS[name])["guarantee"]["epsilon"]
    verify(["ledger.certificate.json"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "(optimistic) and" in printed and "Verified: the certificate says what its ledger does" in printed
    ((low, high),) = found
    assert low <= epsilon(RUNS[name], 1e-5) <= claimed <= LOOSEST * high
    if name not in ("truncated_poisson", "few_of_a_sample"):  # whose lower estimate is that without a maximum
        assert high * 0.98 <= low <= high * (1 + 1e-9)


@pytest.mark.parametrize(
    "run, delta, missing",
    [
        (
            ledger(policy="fixed_size", adjacency="replace_one"),
            "1e-5",
            "it has no privacy loss distribution for fixed_size",
        ),
        (ledger(policy="poisson", adjacency="add_remove"), "1e-12", "it is not exact at a δ below 1e-10"),
        (
            ledger(policy="all", adjacency="add_remove", z=1e-7, q=1.0),
            "1e-5",
            "it is not exact at a δ below 1e-10 or an ε above 500",
        ),
    ],
)
def test_what_dp_accounting_lacks_is_named(run, delta, missing, certified, capsys):
    certified(run, f"delta={delta}")
    verify(["."])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Not recomputed by dp-accounting {version('dp-accounting')}: {missing}" in printed
    assert "Verified: the certificate says what its ledger does" in printed


def test_what_a_certificate_says(certified, tmp_path):
    part = SumQueryEvent("conv", 1.0, 5.0), SumQueryEvent("fc", 3.0, 20.0)
    run = Ledger(
        "replace_one", {Round(sampling_event("poisson", 0.1, 700), part): 30}, record={"kind": "user", "most": 9}
    )
    said = certified(run)
    assert [*said] == ["dpexp_certificate", "guarantee", "run", "terms", "made"] and said["dpexp_certificate"] == 1
    guarantee, about = said["guarantee"], said["run"]
    exact = {"epsilon": epsilon(run, 1e-5), **risk(run).figures()}
    exact |= {f"epsilon_at_delta_1e-{k:02}": epsilon(run, float(f"1e-{k}")) for k in range(5, 13)}
    assert guarantee["delta"] == 1e-5 and len(guarantee) == 1 + len(exact) + 2  # δ, and ε at 0.001 and 0.0001
    assert all(value * (1 - 1e-6) <= guarantee[name] <= value * (1 + 1e-4) for name, value in exact.items())
    assert guarantee["epsilon"] >= exact["epsilon"] and guarantee["epsilon_at_delta_0.001"] < guarantee["epsilon"]
    assert (about["privacy_unit"], about["adjacency"]) == ("user", "replace_one")
    assert (about["holds"], about["sensitivity_in_S"]) == ("for replacing one user by another", 2)
    assert about["private"] and about["ledger"]["complete"]
    assert about["ledger"]["sha256"] == hashlib.sha256((tmp_path / "ledger.jsonl").read_bytes()).hexdigest()
    (round_,), (release,) = about["rounds"], about["releases"]
    assert round_ == {
        "count": 30,
        "sampling": {"policy": "poisson", "q": 0.1, "n": 700},
        "queries": [{"group": "conv", "S": 1.0, "sigma": 5.0}, {"group": "fc", "S": 3.0, "sigma": 20.0}],
    }
    z = math.hypot(1 / 5, 3 / 20) ** -1 / 2
    assert release == {"count": 30, "q": 0.1, "policy": "poisson_replaced", "z": pytest.approx(z, rel=1e-11)}
    assert {"trust_model", "public", "assumed", "several_runs", "floating_point"} <= {*said["terms"]}
    assert said["made"]["dpexp"] == version("dpexp") and said["made"]["date"].startswith("20")


def test_what_a_run_does_not_guarantee_is_said(certified, tmp_path, capsys):
    said = certified(ledger(policy="fixed_size", adjacency="replace_one"))
    lines = (tmp_path / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    end_of(tmp_path / "ledger.jsonl").unlink()
    certificate(["ledger.jsonl", "delta=1e-5"])
    verify(["ledger.certificate.json"])
    assert (
        said["run"]["ledger"]["complete"] and capsys.readouterr().out.count("The ledger ends early: the run was") == 2
    )
    seeded = DOCS.parent / "tests/ledgers/trained.jsonl"
    (tmp_path / "ledger.jsonl").write_bytes(seeded.read_bytes())
    said = json.loads(certificate(["ledger.jsonl", "delta=1e-5"]).read_text())
    assert not said["run"]["private"] and said["run"]["not_private_reason"] == "the noise seed is known"
    verify(["ledger.certificate.json"])
    assert capsys.readouterr().out.count("ε does not cover all that the run shows: the noise seed is known") == 2


@pytest.mark.usefixtures("dpexp_job")
def test_a_certificate_is_at_the_delta_of_its_run(tmp_path):
    folder = tracked_job(tmp_path / "made", "privacy.delta=1e-6")
    for named in (str(folder), (folder / "mlflow_run_id").read_text()):
        assert json.loads(certificate([named]).read_text())["guarantee"]["delta"] == 1e-6


def test_a_run_is_certified_by_its_folder_or_id_and_verified_by_ten_lines(job, monkeypatch, capsys):
    """The lines of docs/certificates.md, which import neither dpexp nor what reads a ledger."""
    output, run_id = job, result_of(job)["mlflow_run_id"]
    path = output / "ledger.certificate.json"
    assert certificate([str(output)]) == path
    said = json.loads(path.read_text())
    output.rename("elsewhere")
    fetched = certificate([run_id])
    assert fetched == Path(run_id, path.name) and json.loads(fetched.read_text()) | {"made": said["made"]} == said
    Path("elsewhere").rename(output)
    assert said["made"]["mlflow_run_id"] == run_id and said["guarantee"]["delta"] == 1e-4
    assert said["run"]["ledger"]["run"] == json.loads((output / "ledger.jsonl").open().readline())["run"]
    for named in (run_id, str(path)):
        verify([named])

    monkeypatch.chdir(output)
    ((title, lines),) = blocks(DOCS / "certificates.md", "python")
    assert title == "check.py" and len([line for line in lines.splitlines() if line.strip()]) == 10
    imported = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or [each.name for each in node.names] for node in imported]
    assert names == [["json", "numpy"], "dp_accounting"]
    for factor, verdict in ((1, "agrees"), (0.98, "disagrees")):
        said["guarantee"]["epsilon"] *= factor
        path.write_text(json.dumps(said))
        capsys.readouterr()
        exec(compile(lines, "check.py", "exec"), {})
        claimed, found, *_, word = capsys.readouterr().out.split()
        assert (float(claimed), word) == (said["guarantee"]["epsilon"], verdict)
        assert float(found) == pytest.approx(epsilon(read_ledger("ledger.jsonl"), 1e-4), rel=1e-3)


def test_an_epsilon_that_differs_is_refuted(certified, tmp_path):
    """Also one that is larger: dp-accounting finds that so much is not claimed by the accountant."""
    run = ledger(policy="poisson", adjacency="add_remove", z=2.0, rounds=4)
    said, exact = certified(run), epsilon(run, 1e-5)
    for factor, refuted in ((0.99, True), (0.9995, True), (1.005, False), (1.2, True)):
        said["guarantee"]["epsilon"] = factor * exact
        (tmp_path / "ledger.certificate.json").write_text(json.dumps(said))
        if not refuted:
            verify(["ledger.certificate.json"])
            continue
        with pytest.raises(ClaimRefuted, match=r"ledger\.certificate\.json is refuted: .*epsilon|is claimed") as told:
            verify(["ledger.certificate.json"])
        assert ("where the ledger costs" in str(told.value)) == (factor < 1)
        assert ("dp-accounting" in str(told.value)) == (factor in (0.99, 1.2))


DOCTORED = [
    ("guarantee", "epsilon", 0.5, "its epsilon is 0.5, where the ledger costs"),
    ("guarantee", "mu", 0.1, "its mu is 0.1, where the ledger costs"),
    ("guarantee", "mu", "little", "its mu is little, where the ledger costs"),
    ("guarantee", "epsilon_at_delta_1e-12", 1, "its epsilon_at_delta_1e-12 is 1, where the ledger costs"),
    ("guarantee", "epsilon_at_delta_0.5", 0, "its epsilon_at_delta_0.5 is 0, where the ledger costs None"),
    ("guarantee", "delta", 1e-7, "its epsilon is 1.118.*, where the ledger costs 1.494"),
    ("run", "adjacency", "add_remove", "run.adjacency is not what the ledger says"),
    ("run", "private", False, "run.private is not what the ledger says"),
    ("run", "releases", [], "run.releases is not what the ledger says"),
    ("run", "rounds", None, "run.rounds is not what the ledger says"),
    ("run", "public", True, "run.public is not what the ledger says"),
]


def test_a_doctored_certificate_is_refuted_without_dp_accounting_too(certified, tmp_path):
    """With one value changed, or left out."""
    text = json.dumps(certified(ledger(policy="fixed_size", adjacency="replace_one")))
    for section, name, value, words in DOCTORED:
        said = json.loads(text)
        said[section][name] = value
        if value is None:
            del said[section][name]
        (tmp_path / "ledger.certificate.json").write_text(json.dumps(said))
        with pytest.raises(ClaimRefuted, match=f"is refuted: {words}"):
            verify(["ledger.certificate.json"])


def test_true_is_not_one_nor_a_word(certified, tmp_path):
    """JSON's 1 equals true in Python, also within lists."""
    text = json.dumps(certified(ledger(policy="poisson", adjacency="add_remove", z=1e-3, q=1.0)))
    for path, values in {
        "run.private": (1, "true", 1.0), "run.ledger.complete": (1, "true"), "run.sensitivity_in_S": (True, "1"),
        "run.rounds.0.queries.0.S": (True,), "run.releases.0.q": (True,), "guarantee.advantage": (True, "1.0"),
        "terms.trust_model": (True,),
    }.items():  # fmt: skip
        for value in values:
            said = inner = json.loads(text)
            *within, last = (int(key) if key.isdigit() else key for key in path.split("."))
            for key in within:
                inner = inner[key]
            assert inner[last] == value or isinstance(value, str) or path.startswith("terms")
            inner[last] = value
            (tmp_path / "ledger.certificate.json").write_text(json.dumps(said))
            with pytest.raises(ClaimRefuted, match=r"is refuted: (run|terms|its advantage)"):
                verify(["ledger.certificate.json"])


def test_a_ledger_is_complete_only_with_its_end_file(tmp_path, monkeypatch, capsys):
    """Of a resumed run, cut at its first closing line: nothing else shows that."""
    monkeypatch.chdir(tmp_path)
    path, run = tmp_path / "ledger.jsonl", ledger(2.0, 1.0, 10)  # whose certificate takes no time
    write_run(path, run)
    first = path.read_bytes()
    write_run(path, ledger(2.0, 1.0, 20), resume=True)
    said = json.loads(certificate([".", "delta=1e-5"]).read_text())
    verify(["."])
    assert said["run"]["ledger"]["complete"] is True and "More may have been" not in capsys.readouterr().out
    path.write_bytes(first)
    assert "are left" in ledger_so_far(path).lost
    end_of(path).unlink()
    cut = json.loads(certificate([".", "delta=1e-5"]).read_text())
    verify(["."])
    assert cut["run"]["ledger"]["complete"] is False and cut["guarantee"]["epsilon"] < said["guarantee"]["epsilon"]
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("More may have been spent: there is no ledger.end.json next to it, so that it may have") == 2
    cut["run"]["ledger"]["complete"] = True
    (tmp_path / "ledger.certificate.json").write_text(json.dumps(cut))
    with pytest.raises(ClaimRefuted, match=r"run\.ledger is not what the ledger says"):
        verify(["."])


def test_a_plan_is_no_run_whatever_its_file_is_called(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("planned_ledger.jsonl", "ledger.jsonl"):
        write_ledger(tmp_path / name, ledger(2.0, 1.0, 3))
        capsys.readouterr()
        said = json.loads(certificate([name, "delta=1e-5"]).read_text())
        assert said["run"]["ledger"]["run"] is None and not said["run"]["ledger"]["complete"]
        verify([f"{Path(name).stem}.certificate.json"])
        shown = capsys.readouterr().out
        assert shown.count("A plan, not a run: ε = ") == 2 and "A plan, not a run: the certificate says" in shown
        assert "Verified" not in shown and "end.json" not in shown
        said["run"]["ledger"]["run"] = "2635b557161c4bdc5eaed8cd3e173bc5"
        (tmp_path / f"{Path(name).stem}.certificate.json").write_text(json.dumps(said))
        with pytest.raises(ClaimRefuted, match=r"run\.ledger is not what"):
            verify([f"{Path(name).stem}.certificate.json"])


def test_a_changed_ledger_is_refused(certified, tmp_path):
    run = ledger(2.0, 0.1, 5)
    certified(run)
    write_ledger(tmp_path / "ledger.jsonl", ledger(2.0, 0.1, 6))
    with pytest.raises(
        ClaimRefuted, match=r"ledger\.jsonl is not the one that .* certifies: its SHA-256 is [0-9a-f]{64}"
    ):
        verify(["ledger.certificate.json"])
    edited = (tmp_path / "ledger.jsonl").read_text().replace('"q": 0.1', '"q": 0.2')
    (tmp_path / "ledger.jsonl").write_text(edited)
    with pytest.raises(ConfigError, match="was edited"):
        verify(["ledger.certificate.json"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["certificate"], "one run must be given, not none"),
        (["certificate", "ledger.jsonl"], "delta must be given: no run states it"),
        (["certificate", "ledger.jsonl", "delta=2"], "at least 1e-300 and below 1"),
        (["certificate", "ledger.jsonl", "detla=1e-5"], "there is no key 'detla'; did you mean 'delta'"),
        (["certificate", "nowhere.jsonl", "delta=1e-5"], "nowhere.jsonl cannot be read"),
        (["certificate", "nowhere"], "nowhere is no file or folder here, and no run"),
        (["certificate", "empty"], "empty/ledger.jsonl cannot be read"),
        (["verify", "a", "b"], "one run must be given, not a and b"),
        (["verify", "nowhere.json"], "nowhere.json is no certificate of version 1 that can be read"),
        (["verify", "empty"], "empty/ledger.certificate.json is no certificate"),
        (["verify", "text.json"], "text.json is no certificate of version 1 that can be read; name one that"),
        (["verify", "list.json"], "list.json is no certificate"),
        (["verify", "numbers.json"], "numbers.json is no certificate"),
        (["verify", "later.json"], "later.json is no certificate"),
        (["verify", "alone/ledger.certificate.json"], "alone/ledger.jsonl cannot be read"),
        (["verify", "ledger.certificate.json"], "is not the one that ledger.certificate.json certifies"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message, certified, tmp_path, monkeypatch):
    said = certified(ledger(2.0, 1.0, 3))
    for name in ("empty", "alone"):
        (tmp_path / name).mkdir()
    without = replace(ledger(2.0, 1.0, 3), adjacency="replace_null")
    for name, content in {
        "text.json": "ε = 1",
        "list.json": "[1]",
        "numbers.json": json.dumps(said | {"guarantee": {"epsilon": "1", "delta": 1e-5}}),
        "later.json": json.dumps(said | {"dpexp_certificate": 2}),
        "alone/ledger.certificate.json": json.dumps(said),
    }.items():
        (tmp_path / name).write_text(content)
    write_ledger(tmp_path / "ledger.jsonl", without)
    monkeypatch.setattr(sys, "argv", ["dpexp", *arguments])
    with pytest.raises(SystemExit, match=f"(?s)^dpexp: [^\n]*{message}"):
        main()


def test_neither_imports_torch_nor_mlflow(certified):
    certified(ledger(2.0, 1.0, 3))
    code = "import sys; from dpexp.commands.certificate import verify; verify(['ledger.jsonl']); "
    code += "print([name for name in ('torch', 'mlflow', 'pytorch_lightning') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


# dp-accounting's estimates


@pytest.mark.parametrize(
    "z, q, rounds, delta", [(4.0, 0.01, 200, 1e-10), (20.0, 0.5, 300, 1e-8), (0.3, 1.0, 1, 1e-5), (0.1, 0.5, 2, 1e-3)]
)
def test_estimates_are_close_on_all_scales(z, q, rounds, delta):
    run = ledger(z, q, rounds)
    ours = epsilon(run, delta)
    low, high = estimates(releases(run), delta, ours)
    assert 0.99 * ours <= low <= ours * (1 + 1e-9) and ours <= high * 1.001 < 1.01 * ours


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"guarantee": {', '"headline": {"epsilon": 0.01}, "guarantee": {', "headline is not part of it"),
        ('"trust_model": "Central', '"trust_model": "Local', "terms.trust_model is not what the ledger says"),
        ('"epsilon": ', '"epsilon": 0.01, "epsilon": ', "is no certificate of version 1"),
        ('"ledger.jsonl"', r'"led\u0000ger"', "is no certificate of version 1"),
    ],
)
def test_nothing_is_added_to_a_certificate(old, new, said, certified, tmp_path):
    certified(ledger(policy="fixed_size", adjacency="replace_one"))
    path = tmp_path / "ledger.certificate.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises((ClaimRefuted, ConfigError), match=said):
        verify(["."])


def test_a_job_that_writes_meanwhile_is_certified_with_no_fewer_rounds_than_are_hashed(
    certified, tmp_path, monkeypatch
):
    certified(ledger(2.0, 1.0, 20))
    path = tmp_path / "ledger.jsonl"
    before = path.read_bytes()

    def source_after_more_rounds(*arguments):
        path.unlink()
        write_ledger(path, ledger(2.0, 1.0, 40))
        return source_of(*arguments)

    monkeypatch.setattr(command, "source_of", source_after_more_rounds)
    said = json.loads(certificate(["ledger.jsonl", "delta=1e-5"]).read_text())
    assert said["run"]["ledger"]["sha256"] == hashlib.sha256(before).hexdigest()
    assert said["guarantee"]["epsilon"] > epsilon(ledger(2.0, 1.0, 20), 1e-5) * 1.1
    with pytest.raises(ClaimRefuted, match="is not the one that"):
        verify(["."])
