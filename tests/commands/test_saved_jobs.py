"""A finished job's model: kept, loaded, measured and used again."""

import errno
import json
import re
from dataclasses import asdict
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from jobs import result_of, store_of
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.datasets import load_digits

import dpexp
from dpexp import Banded, FullBatch, Microbatch, RandomAllocation
from dpexp.accounting.rounding import up
from dpexp.commands.saved_jobs import _name_classes, evaluate, predict
from dpexp.commands.validate import noise_of, privacy_unit_of, sampling_of
from dpexp.errors import ConfigError
from dpexp.tracking.record import card_of
from dpexp.training.data import Digits
from dpexp.training.data.inputs import OneInput

QUICK = ("sampling.steps=4", "privacy.noise_multiplier=1.0", "trainer.num_evaluations=0", "model=logistic")


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def images(size=5):
    return np.random.default_rng(size).normal(size=(size, 1, 8, 8)).astype(np.float32).clip(-1, 1)


def test_weights_are_kept_with_what_they_cost_and_loaded_by_folder_or_run(job, tmp_path):
    about, result = metadata_of(job / "weights.safetensors"), result_of(job)
    assert about["private"] == "True" and about["adjacency"] == "add_remove" and about["accountant"] == "pld"
    assert float(about["epsilon"]) == pytest.approx(result["epsilon"]["pld"], rel=1e-5)
    weights, x = load_file(job / "weights.safetensors"), torch.from_numpy(images())
    run_id = result["mlflow_run_id"]
    for model in (dpexp.load(job), dpexp.load(run_id), dpexp.load(run_id, f"sqlite:///{tmp_path}/outputs/mlflow.db")):
        assert not model.training
        assert torch.allclose(model(x), x.flatten(1) @ weights["1.weight"].T + weights["1.bias"], atol=1e-6)


def test_evaluate_measures_what_the_job_measured(job, dpexp_job, capsys):
    result = result_of(job)
    for run in (str(job), result["mlflow_run_id"]):
        dpexp_job("evaluate", run)
        assert f"test_accuracy: {result['metrics']['test_accuracy']:.2%}" in capsys.readouterr().out


def table(x):
    return pd.DataFrame(x.reshape(len(x), -1))


# the end of a file's name -> what writes inputs of shape [1, 8, 8]
WRITERS = {
    "x.npy": np.save,
    "flat.npy": lambda path, x: np.save(path, x.reshape(5, -1)),
    "no_channel.npy": lambda path, x: np.save(path, x[:, 0]),
    "x.npz": np.savez,
    "x.pt": lambda path, x: torch.save(torch.from_numpy(x), path),
    "x.csv": lambda path, x: table(x).to_csv(path, index=False),
    "no_names.csv": lambda path, x: table(x).to_csv(path, index=False, header=False),
    "words.csv.gz": lambda path, x: table(x).add_prefix("pixel ").to_csv(path, index=False, sep=";"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_predictions_for_a_file(job, tmp_path, name):
    x = images()
    WRITERS[name](tmp_path / name, x)
    found = predict([str(job), f"data={tmp_path / name}", f"out={tmp_path}/p.csv"])
    assert np.allclose(pd.read_csv(tmp_path / "p.csv"), found)
    expected = dpexp.load(job)(torch.from_numpy(x)).softmax(1).detach().numpy()
    assert np.allclose(found.iloc[:, 1:], expected, atol=1e-5) and (found["class"] == expected.argmax(1)).all()


DIGITS = load_digits().data


@pytest.mark.parametrize("convert", [np.float64, np.float32, np.uint8, np.int64, lambda raw: raw / 8 - 1])
def test_scikit_learns_own_digits_are_predicted_as_the_records_are(job, tmp_path, convert):
    x = convert(DIGITS)
    np.save(tmp_path / "x.npy", x)
    found = predict([str(job), f"{tmp_path}/x.npy", f"out={tmp_path}/p.csv"])["class"]
    records = torch.tensor(DIGITS / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8)
    served = mlflow.pyfunc.load_model(str(job / "mlflow_model")).predict(x.reshape(-1, 1, 8, 8))
    assert (found == dpexp.load(job)(records).argmax(1).numpy()).all() and (served.argmax(1) == found).all()


WRONG = {
    "from 0 to 1": DIGITS / 16,
    "from 0 to 255": DIGITS * 255 / 16,
    "from -16 to": -DIGITS,
    "from nan to nan": np.where(DIGITS == 16, np.nan, DIGITS),
}


@pytest.mark.parametrize("said", WRONG)
def test_numbers_that_cannot_be_those_of_a_record_are_refused(job, tmp_path, said):
    np.save(tmp_path / "x.npy", WRONG[said])
    with pytest.raises(ConfigError, match=rf"numbers {said}.* one input is numbers of shape \[1, 8, 8\] from -1"):
        predict([str(job), f"{tmp_path}/x.npy"])
    card = (job / "card.md").read_text()
    assert "One input: numbers of shape [1, 8, 8] from -1 to 1, or raw ones from 0 to 16." in card


def test_one_input_is_known_from_the_test_set_and_few_others_may_be_unlike_it():
    one = OneInput.of([torch.tensor([[-2.0, 4.0], [-1.0, 6.0]]), torch.tensor([[0.0, 5.0]])])
    assert one == OneInput([2], False, [[-2.0, 0.0], [4.0, 6.0]])
    read = OneInput(**json.loads(json.dumps(asdict(one))))
    for fits in ([[-4.0, 8.0]], [[-1.0, 5.0], [-1.0, 1e6]]):
        assert read.converted(torch.tensor(fits)).tolist() == fits
    for alone in ([-1.0, 1e6], [-4.1, 5.0], [2.1, 5.0], [0.0, 1.9]):
        with pytest.raises(ConfigError, match="cannot be those"):
            one.converted(torch.tensor([alone]))
    tokens = OneInput.of([torch.tensor([[0, 64], [3, 50]])])
    assert tokens.converted(torch.tensor([[3.0, 60.0]])).dtype == torch.int64
    with pytest.raises(ConfigError, match="whole numbers of shape"):
        tokens.converted(torch.tensor([[3.5, 60.0]]))


def test_the_card_is_where_the_model_is_and_the_registry_knows_its_price(job, tmp_path, monkeypatch):
    result, card, store = result_of(job), (job / "card.md").read_text(), store_of(tmp_path)
    (shown,) = re.findall(r"ε = (\S+) by pld", card)
    assert shown == up(result["epsilon"]["pld"], 4) and str(tmp_path) not in card
    accuracy, told = card.splitlines()[2:4]
    assert accuracy.startswith("**Test accuracy ")
    assert told == f"**ε = {shown}** at δ = 0.0001, for adding or removing one record."
    use = f'dpexp.load("{result["mlflow_run_id"]}")'
    for expected in ("logistic on digits", "n = 1437", "at 0.1 % false alarms", use, "not cover"):
        assert expected in card
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (logged,) = mlflow.search_logged_models(["1"], output_format="list")
    served = mlflow.pyfunc.load_model("models:/digits/1").predict(images())
    assert np.allclose(served, dpexp.load(job)(torch.from_numpy(images())).detach(), rtol=1e-5)
    version, run = store.get_model_version("digits", "1"), store.get_run(result["mlflow_run_id"])
    assert float(version.tags["epsilon"]) == pytest.approx(result["epsilon"]["pld"], rel=1e-5)
    assert version.tags["delta"] == "0.0001" and version.tags["private"] == "True"
    notes = [of.tags["mlflow.note.content"] for of in (logged, run.data)]
    assert [*notes, version.description] == [card] * 3
    (named,) = json.loads(logged.tags["mlflow.modelVersions"])
    assert named["name"] == "digits" and int(named["version"]) == 1


def test_a_card_longer_than_mlflow_takes_is_cut_off(tmp_path):
    (tmp_path / "card.md").write_text("x" * 5000)
    assert card_of(tmp_path) == "x" * 5000
    (tmp_path / "card.md").write_text("x" * 9000)
    assert card_of(tmp_path) == "x" * 5000 + "…\n\nThe rest is in card.md."


def test_a_card_gives_a_clip_rule_a_schedule_in_full_and_no_delta_below_the_true_one(dpexp_job, read_lines, capsys):
    output = dpexp_job(
        *QUICK, "tracking=none", "group=per_layer", "clip_rule=global", "clip_rule.threshold=8",
        "schedule.z={linear: [2, 0.2]}", "privacy.delta=1.0000049e-5", "accountant=moments",
    )  # fmt: skip
    card = (output / "card.md").read_text()
    assert "clip global (threshold = 8" in capsys.readouterr().out and "clip global (threshold = 8), noise" in card
    assert "z = 0.2 – 2, on the schedule z: {'linear': [2, 0.2]}" in card and ", δ = 1.001e-05, for" in card
    sigmas = [line["queries"][0]["sigma"] for line in read_lines(output / "ledger.jsonl") if "queries" in line]
    assert f"| {min(sigmas):.4g} – {max(sigmas):.4g} |" in card
    assert float(metadata_of(output / "weights.safetensors")["delta"]) == 1.0000049e-5


def test_weights_of_another_model_are_refused(job):
    config = (job / "config.yaml").read_text()
    (job / "config.yaml").write_text(config.replace("classes: 10", "classes: 9"))
    with pytest.raises(ConfigError, match="does not fit the model"):
        dpexp.load(job)


HOLDING = """
import pytorch_lightning as pl, torch
from dpexp.training.data import Digits
from dpexp.training.data.inputs import OneInput
class Holding(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.mix = torch.nn.Linear(64, 10), torch.randn(64, 64)
        self.register_buffer("part", torch.zeros(100)[:3])
        self.register_buffer("bank", Digits().train.tensors[0], persistent=False)
        self.register_buffer("scale", torch.full((64,), 2.0), persistent=False)
    def setup(self, stage):
        self.train_set = self.trainer.datamodule.train
    def forward(self, x):
        return self.net(x.flatten(1) * self.scale @ self.mix)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
    def test_step(self, batch, batch_idx):
        self.log("test_accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def get_extra_state(self):
        return {"a": 1}
    def set_extra_state(self, state): ...
"""


def test_a_module_that_holds_records_keeps_them_to_itself_and_is_made_again(dpexp_job, tmp_path, monkeypatch, capsys):
    (tmp_path / "holding.py").write_text(HOLDING)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="cannot hold _extra_state"):
        output = dpexp_job(
            *QUICK, "~model.shape", "~model.classes", "model._target_=holding.Holding", "accountant=moments"
        )
    assert "**Not saved**: _extra_state" in (output / "card.md").read_text()
    records = [record.numpy().tobytes() for record in Digits().train.tensors[0][:50]]
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        assert not any(record in content for record in records), path
    served = mlflow.pyfunc.load_model(str(output / "mlflow_model")).predict(images())
    assert np.allclose(served, dpexp.load(output)(torch.from_numpy(images())).detach(), rtol=1e-5, atol=1e-5)
    dpexp_job("evaluate", str(output))
    assert f"test_accuracy: {result_of(output)['metrics']['test_accuracy']:.2%}" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_evaluate_and_predict_compute_features_and_scores_as_the_job_did(dpexp_job, tmp_path, precision):
    network = "{_target_:torch.nn.Linear,in_features:8,out_features:8}"  # its weights are drawn, in float32
    by = f"data.features_of={{_target_:dpexp.training.data.Backbone,model:{network}}}"
    output = dpexp_job(
        *QUICK, by, f"data.cache={tmp_path}/cache", f"trainer.precision={precision}", "accountant=moments"
    )
    metrics = result_of(output)["metrics"]
    assert evaluate([str(output)]) == metrics
    x, y = (part.numpy() for part in Digits().test.tensors)
    np.save(tmp_path / "x.npy", x)
    found = predict([str(output), f"data={tmp_path}/x.npy", f"out={tmp_path}/p.csv"])["class"]
    assert (found == y).mean() == pytest.approx(metrics["test_accuracy"], abs=1e-6)
    served = mlflow.pyfunc.load_model(str(output / "mlflow_model")).predict(x)
    assert served.dtype == (np.float64 if precision == "64-true" else np.float32)
    assert (served.argmax(1) == found).all()


def test_mlflows_model_takes_batches_of_any_size_through_preparations(dpexp_job):
    names = ("standardize", "pca")
    noise = [f"preprocessing.{name}.{key}" for name in names for key in ("budget_share=null", "noise_multiplier=1")]
    output = dpexp_job(*QUICK, f"preprocessing=[{','.join(names)}]", *noise, "model.shape=[60]", "accountant=moments")
    kept, own = mlflow.pyfunc.load_model(str(output / "mlflow_model")), dpexp.load(output)
    for size in (1, 2, 5):
        with torch.no_grad():
            assert np.allclose(kept.predict(images(size)), own(torch.from_numpy(images(size))), atol=1e-5)


def test_inputs_are_read_before_a_model_is_made(job, dpexp_job, monkeypatch):
    monkeypatch.setattr("dpexp.commands.saved_jobs.module_of", lambda cfg: pytest.fail("code of the configuration ran"))
    with pytest.raises(SystemExit, match="cannot be read"):
        dpexp_job("predict", str(job), "data=missing.npy")
    (job / "config.yaml").write_text("- 1\n")
    with pytest.raises(SystemExit, match="is not the configuration of a job"):
        dpexp_job("evaluate", str(job))


def test_a_model_that_cannot_be_kept_loses_no_result(dpexp_job, monkeypatch):
    def fails(module, path, said):
        raise OSError("disk full")

    monkeypatch.setattr("dpexp.commands.saved_jobs.save_weights", fails)
    with pytest.warns(UserWarning, match="could not be kept: OSError: disk full"):
        output = dpexp_job(*QUICK, "tracking=none")
    assert result_of(output)["rounds"] == 4 and not list(output.glob("weights*"))


def test_room_for_the_model_is_taken_before_the_first_round(dpexp_job, monkeypatch):
    def full(file, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(SystemExit, match=r"weights\.reserved cannot be read or written: No space left on device"):
        dpexp_job(*QUICK, "hydra.run.dir=job")
    assert not list(Path("job").glob("ledger.jsonl")) and not list(Path("job").glob("weights*"))


@pytest.mark.parametrize(
    "old, made",
    [
        ({"policy": "full_batch", "sampling_rate": 1.0, "max_batch_size": None, "steps": 3}, FullBatch(steps=3)),
        (
            {"policy": "random_allocation", "num_selected": 2, "epochs": 3.0},
            RandomAllocation(num_selected=2, epochs=3.0),
        ),
    ],
)
def test_a_configuration_that_0_1_saved_is_read(old, made):
    cfg = OmegaConf.create(
        {"sampling": old, "noise": {"kind": "banded", "bands": 4}, "privacy_unit": {"kind": "microbatch", "size": 2}}
    )
    _name_classes(cfg)
    assert (sampling_of(cfg), noise_of(cfg), privacy_unit_of(cfg)) == (made, Banded(bands=4), Microbatch(size=2))
