"""Whatever happens to a job or its server: `mirror` makes run, folder and ledger agree."""

import json
import os
import shutil
import signal

import pytest
from jobs import store_of
from made import made_job, tracked_job
from mlflow import MlflowClient
from test_run_costs import first_lines

from dpexp.accounting.ledger import LedgerWriter, ledger_so_far
from dpexp.errors import ConfigError
from dpexp.tracking.data_budget import COUNTS_AS, costs_in
from dpexp.tracking.job_folder import LEDGER, METRICS, PLANNED_LEDGER, RUN, START_TAG, exclusive
from dpexp.tracking.mirror import mirror_folder, shown

QUICK = (
    "model=logistic", "sampling.steps=6", "trainer.num_evaluations=2", "data.id=digits", "privacy.epsilon=2",
    "sampling.expected_batch_size=512",
)  # fmt: skip


@pytest.fixture
def uri(tmp_path):
    """The address of a store: that of the jobs, or another."""
    return lambda name="outputs/mlflow": f"sqlite:///{tmp_path}/{name}.db"


@pytest.fixture
def counts(uri):
    """As what the only run of a store on the data set counts: so many rounds, and whether they are its plan's."""

    def in_store(*name):
        (cost,) = costs_in(uri(*name), "digits")
        return len(cost.ledger), "as its plan" in cost.note

    return in_store


def told(uri, folder):
    """All that the only run of a store shows, without what depends on the store."""
    client = MlflowClient(uri)
    (run,) = client.search_runs(["1"])
    run_id = run.info.run_id
    history = {
        (name, point.step, point.value, point.timestamp)
        for name in run.data.metrics
        for point in client.get_metric_history(run_id, name)
    }
    folder.mkdir()
    client.download_artifacts(run_id, "", str(folder))
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    own = ("dpexp.resumed", "dpexp.pid", "mlflow.artifactLocation")
    return {
        "name": run.info.run_name, "params": run.data.params, "history": history, "files": files,
        "tags": {tag: value for tag, value in run.data.tags.items() if not tag.startswith(own)},
        "status": run.info.status, "times": (run.info.start_time, run.info.end_time),
        "inputs": [one.dataset.to_dictionary() for one in run.inputs.dataset_inputs],
        "models": [
            {tag: value for tag, value in model.tags.items() if not tag.startswith("mlflow")}
            for model in client.search_logged_models(["1"])
        ],
    }  # fmt: skip


def agrees(folder, uri, status):
    """The job's run says what its folder does, and what another store gets that never knew it."""
    run_id, copy = (folder / RUN).read_text(), folder.with_name(f"{folder.name} {status}")
    shutil.copytree(folder, copy)
    (copy / "last.ckpt").unlink(missing_ok=True)  # else it is for no other store
    for _ in range(2):  # the second time, it is there
        mirror_folder(copy, uri(status))
    assert (copy / RUN).read_text() == run_id, "that of its own store"
    found, expected = (told(uri(*name), copy / str(len(name))) for name in ((), (status,)))
    differing = {key for key in found if found[key] != expected[key]}
    assert differing <= ({"times"} if status == "KILLED" else set())
    assert found["status"] == status and found["files"][LEDGER] == (folder / LEDGER).read_bytes()
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    written = {(name, row["step"], shown(name, value)) for row in rows for name, value in row["metrics"].items()}
    assert written == {point[:3] for point in found["history"]} and {step for _, step, _ in written} >= {0, 1}
    return found


def away(patch, since, until):
    """Lets the server of a job be away between the ends of two rounds."""
    commit, done = LedgerWriter.commit, []

    def unless_away(request):
        def asked(*given, **named):
            if since <= len(done) < until:
                raise ConnectionError("no route to host")
            return request(*given, **named)

        return asked

    patch.setattr(LedgerWriter, "commit", lambda self: done.append(commit(self)))
    for name in ("log_batch", "log_artifact", "log_text", "set_terminated", "set_tag"):
        patch.setattr(MlflowClient, name, unless_away(getattr(MlflowClient, name)))


@pytest.mark.parametrize("back", [5, 99])
def test_a_server_that_was_away_gets_everything_later(dpexp_job, uri, counts, monkeypatch, capsys, back):
    """It is back in the fifth round, or after the job."""
    with monkeypatch.context() as patch:
        patch.setattr("dpexp.tracking.mirror.INTERVAL", 0.01)
        away(patch, 2, back)
        folder = dpexp_job(*QUICK)
    printed, run_id = capsys.readouterr().out, (folder / RUN).read_text()
    lacks = "The tracking server lacks some of this run: no route to host" in " ".join(printed.split())
    assert lacks is (f"python -m dpexp mirror {folder}" in printed) is (back == 99)
    if lacks:
        assert MlflowClient(uri()).get_run(run_id).info.status == "RUNNING"
        assert counts() == (6, True)
        dpexp_job("mirror", str(folder))
    found = agrees(folder, uri, "FINISHED")
    assert found["tags"][COUNTS_AS] == LEDGER and len(found["models"]) == 1
    assert counts() == counts("FINISHED") == (6, False)
    dpexp_job("mirror", str(folder))
    assert f"The run {run_id} has all that {folder} has." in capsys.readouterr().out.replace("\n", "")


def test_a_job_without_a_store_leaves_the_same_record_which_a_store_and_a_logger_get(dpexp_job, uri, counts, tmp_path):
    folder = dpexp_job(*QUICK, "tracking=none", "logger=csv")
    (file,) = folder.glob("csv/*/metrics.csv")
    assert "epsilon" in file.read_text().splitlines()[0] and not (folder / RUN).exists()
    with pytest.raises(SystemExit, match=r"had no store; give uri="):
        dpexp_job("mirror", str(folder))
    dpexp_job("mirror", str(folder), f"uri={uri('later')}")
    found = told(uri("later"), tmp_path / "later")
    assert found["status"] == "FINISHED" and found["files"][LEDGER] == (folder / LEDGER).read_bytes()
    assert {"epsilon", "epsilon_planned", "test_accuracy"} <= {name for name, *_ in found["history"]}
    assert {"plan.json", "epsilon.png", "result.json", "config.yaml", "overrides.yaml"} <= {*found["files"]}
    assert counts("later") == (6, False)


def kill_after(owner, name, number):
    """Kills a job of this process just after a call, which its folder then does not know of."""
    method, calls = getattr(owner, name), []

    def counted(*given, **named):
        calls.append(method(*given, **named))
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return calls[-1]

    setattr(owner, name, counted)


@pytest.mark.parametrize(
    "call", [(LedgerWriter, "commit", 3), (MlflowClient, "log_artifact", 4), (MlflowClient, "set_terminated", 1)],
    ids=lambda call: call[1],
)  # fmt: skip
def test_a_job_that_was_killed_outright_is_mirrored_as_it_was_and_again_once_it_has_gone_on(
    forked, dpexp_job, tmp_path, uri, counts, call
):
    job = forked(*QUICK, "checkpoint.every_n_rounds=1", first=(kill_after, *call))
    said = job.ended()
    assert job.exitcode == -signal.SIGKILL, said
    assert counts() == (6, True)
    (path,) = tmp_path.glob(f"outputs/*/*/{RUN}")
    folder = path.parent
    mirror_folder(folder, None)
    finished = (folder / "status.json").exists()  # killed while the rest was sent
    assert finished or call[1] != "set_terminated"
    if (folder / LEDGER).exists():
        agrees(folder, uri, "FINISHED" if finished else "KILLED")
    assert counts() == (6, not finished)
    if (folder / "last.ckpt").exists():
        dpexp_job("resume", str(folder))
        found = agrees(folder, uri, "FINISHED")
        assert counts() == (len(ledger_so_far(folder / LEDGER)), False)
        assert "dpexp.error" not in found["tags"]


def test_a_job_that_can_go_on_is_mirrored_to_no_store_that_would_not_know_of_it(tmp_path, dpexp_job, uri, counts):
    for own in ("null", uri("own")):
        folder = made_job(tmp_path / own[:4], "data.id=digits", f"tracking.uri={own}")
        (folder / "last.ckpt").touch()
        with pytest.raises(SystemExit, match=r"can be resumed, and .* would not know of its rounds on data\.id=digits"):
            dpexp_job("mirror", str(folder), f"uri={uri('another')}")
    mirror_folder(folder, None)  # to its own, where it goes on
    (folder / "last.ckpt").unlink()
    mirror_folder(folder, uri("another"))
    assert counts("another") == (3, False)


@pytest.mark.usefixtures("dpexp_job")
def test_an_earlier_copy_of_a_folder_takes_nothing_back(tmp_path, counts):
    """Its ledger shows that, or only its run: its job went on elsewhere, for rounds that no store knows yet."""
    folder = tracked_job(tmp_path / "job", "data.id=digits", rounds=6)
    whole = (folder / LEDGER).read_bytes()
    first_lines(folder / LEDGER, 4)
    with pytest.raises(ConfigError, match=r"lacks rounds that the ledger of its run .* in MLflow holds"):
        mirror_folder(folder, None)
    assert counts() == (6, False)
    (folder / LEDGER).write_bytes(whole)
    client, run_id = store_of(tmp_path), (folder / RUN).read_text()
    for tag, value in {"dpexp.pid": "1", "dpexp.host": "far", START_TAG: "5a", COUNTS_AS: PLANNED_LEDGER}.items():
        client.set_tag(run_id, tag, value)
    with pytest.raises(ConfigError, match=r"is an earlier copy of its job, whose run .* went on in process 1 of far"):
        mirror_folder(folder, None)
    assert client.get_run(run_id).data.tags[COUNTS_AS] == PLANNED_LEDGER


def test_mistakes_are_one_sentence(tmp_path, dpexp_job):
    planned = tracked_job(tmp_path / "planned", "data.id=digits", "train=false")
    made_job(tmp_path / "untracked", "tracking=none")
    (tmp_path / "masked").mkdir()
    text = (planned / "run.json").read_text()
    (tmp_path / "masked" / "run.json").write_text(text.replace("sqlite:///", "postgresql://me:…@db/"))
    for arguments, said in (
        ([], "mirror needs one job's folder, not none"),
        (["untracked"], r"the job in untracked had no store; give uri="),
        (["nowhere"], r"nowhere holds no run\.json, the record of a job; name"),
        (["masked"], "the password of postgresql://me:…@.* is not kept; give uri="),
        (["planned", "uri=x:y"], "x:y cannot be used"),
    ):
        with pytest.raises(SystemExit, match=f"^dpexp: [^\n]*{said}[^\n]*$"):
            dpexp_job("mirror", *arguments)
    with exclusive(planned), pytest.raises(SystemExit, match="is running in another process"):
        dpexp_job("mirror", "planned")
    artifacts = store_of(tmp_path).list_artifacts((planned / RUN).read_text())
    assert PLANNED_LEDGER in {item.path for item in artifacts}
