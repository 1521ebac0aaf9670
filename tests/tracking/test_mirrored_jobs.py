"""Whatever happens to a job or its server: `mirror` makes run, folder and ledger agree."""

import json
import os
import shutil
import signal
import sys

import pytest
from jobs import store_of
from made import made_job, tracked_job
from mlflow import MlflowClient
from test_data_budget import kill_before, kill_in_round

from dpexp.__main__ import main
from dpexp.accounting.ledger import LedgerWriter, ledger_so_far
from dpexp.tracking.data_budget import COUNTS_AS, costs_in
from dpexp.tracking.job_folder import LEDGER, PLANNED_LEDGER, RUN, START_TAG, exclusive
from dpexp.tracking.mirror import shown

QUICK = (
    "model=logistic", "sampling.steps=6", "trainer.num_evaluations=2", "data.id=digits", "privacy.epsilon=2",
    "sampling.expected_batch_size=512",
)  # fmt: skip


def told(client, run_id, folder):
    """All that a run shows, without what depends on its store."""
    run = client.get_run(run_id)
    history = {
        (name, point.step, point.value, point.timestamp)
        for name in run.data.metrics
        for point in client.get_metric_history(run_id, name)
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    client.download_artifacts(run_id, "", str(folder))
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    models = client.search_logged_models(["1"])
    return {
        "name": run.info.run_name, "params": run.data.params, "history": history, "files": files,
        "tags": run.data.tags, "status": run.info.status, "times": (run.info.start_time, run.info.end_time),
        "inputs": [one.dataset.to_dictionary() for one in run.inputs.dataset_inputs],
        "models": [model.tags for model in models if model.source_run_id == run_id],
    }  # fmt: skip


def mirror(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["dpexp", "mirror", *map(str, arguments)])
    main()


def agrees(tmp_path, folder, status):
    """A run says what its folder does, and what another store gets that never knew it."""
    run_id, another = (folder / RUN).read_text(), tmp_path / "copy"
    found = told(store_of(tmp_path), run_id, tmp_path / "found")
    shutil.rmtree(another, ignore_errors=True)
    shutil.copytree(folder, another)
    (another / "last.ckpt").unlink(missing_ok=True)  # else it is for no other store
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):  # it is the same run
            mirror(patch, another, f"uri=sqlite:///{tmp_path}/another.db")
    assert (another / RUN).read_text() == run_id, "that of its own store"
    other = MlflowClient(f"sqlite:///{tmp_path}/another.db")
    (run,) = other.search_runs(["1"])
    expected = told(other, run.info.run_id, tmp_path / "expected")
    other.delete_run(run.info.run_id)
    own = {tag for tag in found["tags"] if "resumed" in tag or tag in ("dpexp.pid", "mlflow.artifactLocation")}
    for one in (found, expected):
        one["tags"] = {tag: value for tag, value in one["tags"].items() if tag not in own}
        one["models"] = [{tag: one[tag] for tag in one if not tag.startswith("mlflow")} for one in one["models"]]
    differing = {key for key in found if found[key] != expected[key]}
    assert differing <= ({"times"} if status == "KILLED" else set())
    assert found["status"] == status and found["files"][LEDGER] == (folder / LEDGER).read_bytes()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    written = {(name, row["step"], shown(name, value)) for row in rows for name, value in row["metrics"].items()}
    assert written == {point[:3] for point in found["history"]} and {step for _, step, _ in written} >= {0, 1}
    return found


def test_a_run_is_what_its_folder_says_and_a_store_that_never_had_it_gets_the_same(
    dpexp_job, tmp_path, monkeypatch, capsys
):
    folder = dpexp_job(*QUICK)
    found = agrees(tmp_path, folder, "FINISHED")
    assert found["tags"][COUNTS_AS] == LEDGER and len(found["models"]) == 1
    (cost,) = costs_in(f"sqlite:///{tmp_path}/another.db", "digits")
    assert len(cost.ledger) == 6 and not cost.note
    mirror(monkeypatch, folder, f"uri=sqlite:///{tmp_path}/third.db")
    mirror(monkeypatch, folder)
    said = f"The run {(folder / RUN).read_text()} has all that {folder} has."
    assert said in capsys.readouterr().out.replace("\n", "")
    assert len(told(store_of(tmp_path), (folder / RUN).read_text(), tmp_path / "again")["models"]) == 1


def test_a_job_without_a_store_leaves_the_same_record_which_a_store_gets_later(dpexp_job, tmp_path, monkeypatch):
    folder = dpexp_job(*QUICK, "tracking=none")
    with pytest.raises(SystemExit, match=r"had no store; give uri="):
        mirror(monkeypatch, folder)
    uri = f"sqlite:///{tmp_path}/later.db"
    mirror(monkeypatch, folder, f"uri={uri}")
    client = MlflowClient(uri)
    (run,) = client.search_runs(["1"])
    found = told(client, run.info.run_id, tmp_path / "later")
    assert found["status"] == "FINISHED" and found["files"][LEDGER] == (folder / LEDGER).read_bytes()
    assert {"epsilon", "epsilon_planned", "test_accuracy"} <= {name for name, *_ in found["history"]}
    assert {"plan.json", "epsilon.png", "result.json"} <= {*found["files"]}
    (cost,) = costs_in(uri, "digits")
    assert cost.ledger == ledger_so_far(folder / LEDGER) and not cost.note


def test_a_job_that_can_go_on_is_mirrored_to_no_store_that_would_not_know_of_it(tmp_path, monkeypatch):
    for uri in ("null", f"sqlite:///{tmp_path}/own.db"):
        folder = made_job(tmp_path / uri[:4], "data.id=digits", f"tracking.uri={uri}")
        (folder / "last.ckpt").touch()
        with pytest.raises(SystemExit, match=r"can be resumed, and .* would not know of its rounds on data\.id=digits"):
            mirror(monkeypatch, folder, f"uri=sqlite:///{tmp_path}/another.db")
    mirror(monkeypatch, folder)  # to its own, where it goes on
    (folder / "last.ckpt").unlink()
    mirror(monkeypatch, folder, f"uri=sqlite:///{tmp_path}/another.db")
    (cost,) = costs_in(f"sqlite:///{tmp_path}/another.db", "digits")
    assert len(cost.ledger) == 3 and not cost.note


def away_after(rounds, until=10**9):
    """Lets the server of a job of this process be away from the end of a round on."""
    commit, requests = LedgerWriter.commit, ("log_batch", "log_artifact", "log_text", "set_terminated", "set_tag")
    done = []

    def noting(self):
        commit(self)
        done.append(1)

    def refusing(request):
        def asked(*given, **named):
            if rounds <= len(done) < until:
                raise ConnectionError("no route to host")
            return request(*given, **named)

        return asked

    yield LedgerWriter, "commit", noting
    for name in requests:
        yield MlflowClient, name, refusing(getattr(MlflowClient, name))


@pytest.mark.parametrize("back", ["in the fifth round", "after the job"])
def test_a_server_that_was_away_gets_everything_later(dpexp_job, tmp_path, monkeypatch, capsys, back):
    returns = back == "in the fifth round"
    with monkeypatch.context() as patch:
        patch.setattr("dpexp.tracking.mirror.INTERVAL", 0.01)
        for owner, name, change in away_after(2, 5 if returns else 10**9):
            patch.setattr(owner, name, change)
        folder = dpexp_job(*QUICK)
    printed = capsys.readouterr().out
    assert ("The tracking server lacks some of this run: no route to host" in " ".join(printed.split())) is not returns
    run_id, client = (folder / RUN).read_text(), store_of(tmp_path)
    if not returns:
        assert f"python -m dpexp mirror {folder}" in printed
        assert client.get_run(run_id).info.status == "RUNNING"
        (cost,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
        assert "as its plan" in cost.note
        mirror(monkeypatch, folder)
    (cost,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert len(cost.ledger) == 6 and not cost.note
    agrees(tmp_path, folder, "FINISHED")


def kill_at(request, number):
    """Kills a job of this process before a request, or just after it, which the folder then does not know."""
    original, asked = getattr(MlflowClient, request), []

    def counted(*given, **named):
        asked.append(1)
        if len(asked) == number:
            original(*given, **named)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*given, **named)

    setattr(MlflowClient, request, counted)


@pytest.mark.parametrize(
    "how",
    [(kill_in_round, 3), (kill_at, "log_batch", 3), (kill_at, "log_artifact", 4), (kill_before, "set_terminated")],
    ids=lambda how: " ".join(map(str, how[1:])),
)
def test_a_job_that_was_killed_outright_is_mirrored_as_it_was_and_again_once_it_has_gone_on(
    forked, tmp_path, monkeypatch, how
):
    job = forked(*QUICK, "checkpoint.every_n_rounds=1", first=how)
    said = job.ended()
    assert job.exitcode == -signal.SIGKILL, said
    (path,) = tmp_path.glob(f"outputs/*/*/{RUN}")
    folder, uri = path.parent, f"sqlite:///{tmp_path}/outputs/mlflow.db"
    monkeypatch.chdir(tmp_path)
    mirror(monkeypatch, folder)
    finished = (folder / "status.json").exists()  # killed before or while the rest was sent
    assert finished or how[0] != kill_before
    if (folder / LEDGER).exists():
        agrees(tmp_path, folder, "FINISHED" if finished else "KILLED")
    (cost,) = costs_in(uri, "digits")
    assert len(cost.ledger) == 6 and cost.note == ("" if finished else cost.note)
    if (folder / "last.ckpt").exists():
        monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(folder)])
        main()
        found = agrees(tmp_path, folder, "FINISHED")
        (cost,) = costs_in(uri, "digits")
        assert cost.ledger == ledger_so_far(folder / LEDGER) and not cost.note
        assert "dpexp.error" not in found["tags"]


@pytest.mark.usefixtures("dpexp_job")
def test_a_folder_that_is_older_than_its_run_takes_nothing_back(tmp_path, monkeypatch):
    folder = tracked_job(tmp_path / "job", "data.id=digits", rounds=6)
    whole = (folder / LEDGER).read_bytes()
    (folder / LEDGER).write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))
    with pytest.raises(SystemExit, match=r"lacks rounds that the ledger of its run .* in MLflow holds"):
        mirror(monkeypatch, folder)
    (cost,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert len(cost.ledger) == 6


@pytest.mark.usefixtures("dpexp_job")
def test_a_copy_from_before_the_job_went_on_elsewhere_takes_nothing_back(tmp_path, monkeypatch):
    """It went on for rounds that no store knows: its plan counts, and the copy's ledger is the one in MLflow."""
    folder = tracked_job(tmp_path / "job", "data.id=digits")
    client, run_id = store_of(tmp_path), (folder / RUN).read_text()
    for tag, value in {"dpexp.pid": "1", "dpexp.host": "far", START_TAG: "5a", COUNTS_AS: PLANNED_LEDGER}.items():
        client.set_tag(run_id, tag, value)
    with pytest.raises(SystemExit, match=r"is an earlier copy of its job, whose run .* went on in process 1 of far"):
        mirror(monkeypatch, folder)
    assert client.get_run(run_id).data.tags[COUNTS_AS] == PLANNED_LEDGER


@pytest.mark.usefixtures("dpexp_job")
def test_mistakes_are_one_sentence(tmp_path, monkeypatch):
    tracked_job(tmp_path / "planned", "data.id=digits", "train=false")
    made_job(tmp_path / "untracked", "tracking=none")
    (tmp_path / "masked").mkdir()
    for name in ("run.json", "config.yaml"):
        text = (tmp_path / "planned" / name).read_text()
        (tmp_path / "masked" / name).write_text(text.replace("sqlite:///", "postgresql://me:…@db/"))
    for arguments, said in (
        ([], "mirror needs one job's folder, not none"),
        (["untracked"], r"the job in untracked had no store; give uri="),
        (["nowhere"], r"nowhere holds no run\.json, the record of a job; name"),
        (["masked"], "the password of postgresql://me:…@.* is not kept; give uri="),
        (["planned", "uri=x:y"], "x:y cannot be used"),
    ):
        with pytest.raises(SystemExit, match=f"^dpexp: [^\n]*{said}[^\n]*$"):
            mirror(monkeypatch, *arguments)
    with exclusive(tmp_path / "planned"), pytest.raises(SystemExit, match="is running in another process"):
        mirror(monkeypatch, "planned")
    assert PLANNED_LEDGER in told(store_of(tmp_path), (tmp_path / "planned" / RUN).read_text(), tmp_path / "a")["files"]
