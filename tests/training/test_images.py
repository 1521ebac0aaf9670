"""Images in folders and data sets in Hugging Face's format: what is read, what contributes nothing, what is refused."""

import json
import math
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image
from safetensors.torch import load_file

from dpexp.accounting.ledger import read_ledger
from dpexp.commands.saved_jobs import evaluate, predict
from dpexp.errors import ConfigError
from dpexp.training.data import HuggingFace, Images
from dpexp.training.data.images import class_names

JOB = ("data=images", "data.path=train", "data.test_path=test", "data.n=60", "data.shape=[1,8,8]", "model=logistic",
       "trainer.num_evaluations=0", "privacy.delta=1e-3")  # fmt: skip
QUICK = ("privacy.noise_multiplier=1.0", "sampling.sampling_rate=0.5", "sampling.expected_batch_size=null",
         "sampling.steps=2", "tracking=none", "accountant=moments")  # fmt: skip


def images_in(folder, count, seed):
    """Noise, darker in folder a than in b."""
    random = np.random.default_rng(seed)
    for k in range(count):
        grey = random.integers(0, 128, (9, 12)) + (0, 120)[k % 2]
        (folder / "ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(grey.astype(np.uint8)).save(folder / "ab"[k % 2] / f"{k:02}.png")


@pytest.fixture
def folders(tmp_path, monkeypatch):
    images_in(tmp_path / "train", 60, 0)
    images_in(tmp_path / "test", 20, 1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_class_is_one_in_either_form_of_unicode(folders):
    for folder, name in (("train", "U\u0308bung"), ("test", "\u00dcbung")):
        (folders / folder / "a").rename(folders / folder / name)
    (folders / "train" / "b").rename(folders / "train" / "TRUE")
    (folders / "test" / "b").rename(folders / "test" / "true")
    assert class_names("train", "test") == ["True", "\u00dcbung"]
    for names in (["true", "U\u0308bung"], [True, "\u00dcbung"]):
        data = Images("train", "test", names, (1, 8, 8))
        assert data.train.usable.all() and data.train.tensors[1].sum() == 30 and data.test.tensors[1].sum() == 10


def of(path="train", shape=(1, 8, 8)):
    return Images(path, "test", ["a", "b"], shape)


def weights_after_one_round(job, folder, *arguments):
    """Those after a step by the sum of all clipped gradients, over n, almost without noise."""
    job(*JOB, *arguments, *QUICK, "privacy.noise_multiplier=1e-6", "privacy.noise_seed=1", "sampling.sampling_rate=1.0",
        "sampling.steps=1", "optimizer.lr=1", "optimizer.momentum=0", f"hydra.run.dir={folder}")  # fmt: skip
    return load_file(f"{folder}/weights.safetensors")


def distance(one, other):
    return math.sqrt(sum(float((one[name] - other[name]).double().square().sum()) for name in one))


def test_a_folder_of_images_trains_and_predicts_new_ones(folders, dpexp_job):
    output = dpexp_job(*JOB, "privacy.noise_multiplier=1", "sampling.expected_batch_size=30", "sampling.steps=30",
                       "accountant=moments")  # fmt: skip
    metrics = json.loads((output / "result.json").read_text())["metrics"]
    assert metrics["test_accuracy"] > 0.9
    shutil.rmtree("train")
    assert evaluate([str(output)])["test_accuracy"] == metrics["test_accuracy"]
    found = predict([str(output), "test"])
    assert [*found] == ["image", "prediction", "p_a", "p_b"] and [*found["image"].str[:6]] == ["test/a"] * 10 + [
        "test/b"
    ] * 10
    assert [*pd.read_csv("predictions.csv")["prediction"]] == [*found["prediction"]]
    found[["image"]].iloc[3:5].to_csv("new.csv", index=False)
    for inputs in ("new.csv", found["image"][3]):
        assert predict([str(output), inputs])["p_a"][0] == pytest.approx(found["p_a"][3], rel=1e-5)
    contents = pd.DataFrame({"image": [(folders / path).read_bytes() for path in found["image"]]})
    served = mlflow.pyfunc.load_model(str(output / "mlflow_model")).predict(contents)
    np.testing.assert_allclose(served["p_b"], found["p_b"], rtol=1e-5)


def test_images_are_resized_turned_and_scaled_by_constants(folders):
    grey = np.array([[0, 255], [128, 64], [16, 32]], np.uint8)
    Image.fromarray(grey).save("test/a/00.png")
    Image.fromarray(grey.astype(np.uint16) * 256 + 7).save("test/a/02.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    Image.fromarray(grey).save("test/a/04.png", exif=exif)
    Image.fromarray(np.stack([grey, grey * 0, 255 - grey], 2)).save("test/a/06.png")
    x = of(shape=[1, 3, 2]).test.tensors[0]
    assert torch.equal(x[0, 0], torch.tensor(grey) / 127.5 - 1) and torch.equal(x[0], x[2])
    turned = of(shape=[1, 2, 3]).test.tensors[0][4, 0]
    assert torch.equal(turned, torch.tensor(np.rot90(grey, -1).copy()) / 127.5 - 1)
    red, green, blue = of(shape=[3, 3, 2]).test.tensors[0][6]
    assert torch.allclose(red, -blue, atol=1e-6) and (green == -1).all()
    Image.fromarray(np.full((90, 120), 51, np.uint8)).save("test/a/00.png")
    assert of().test.tensors[0][0].flatten().tolist() == pytest.approx([51 / 127.5 - 1] * 64)


def test_training_images_that_cannot_be_read_contribute_nothing(folders):
    before = of().train.tensors
    (folders / "train" / "a" / "empty.png").touch()
    (folders / "train" / "a" / "cut.png").write_bytes((folders / "train" / "a" / "02.png").read_bytes()[:90])
    (folders / "train" / "b" / "text.jpg").write_text("no image")
    Image.fromarray(np.full((9, 9), 0.5, np.float32)).save("train/b/floats.tif")
    (folders / "train" / "b" / "notes.txt").write_text("no image either")
    (folders / "train" / "c").mkdir()
    shutil.copy("train/a/02.png", "train/c")
    shutil.copy("train/a/02.png", "train")
    train = of().train
    names = [file.name for file, _ in map(of()._records(in_test=False)[2], range(len(train)))]
    assert names == sorted(names) and len(train) == 65
    odd = {name for name, usable in zip(names, train.usable, strict=True) if not usable}
    assert odd == {"empty.png", "cut.png", "text.jpg", "floats.tif", "02.png"} and train.usable.sum() == 60
    assert all(torch.equal(part[train.usable], known) for part, known in zip(train.tensors, before, strict=True))


def test_an_image_less_moves_the_sum_by_at_most_s(folders, dpexp_job):
    before, image, left = weights_after_one_round(dpexp_job, "before"), folders / "train" / "b" / "31.png", []
    image.rename(folders / "31.png")
    left.append(of().train)
    (folders / "train" / "other").mkdir()
    shutil.copy("31.png", "train/other")
    left.append(of().train)
    image.write_bytes((folders / "31.png").read_bytes()[:80])
    left.append(of().train)
    usable = [[part[train.usable] for part in train.tensors] for train in left]
    assert [len(train) for train in left] == [59, 60, 61] and {len(x) for x, _ in usable} == {59}
    assert all(map(torch.equal, usable[0] + usable[1], usable[1] + usable[2]))
    assert 0.5 < 60 * distance(before, weights_after_one_round(dpexp_job, "after")) <= 1.0001


@pytest.mark.parametrize(
    "hidden", [".ipynb_checkpoints", "__MACOSX", "a/.ipynb_checkpoints", "b/x/__MACOSX/b", "b/.x/y"]
)
def test_folders_of_editors_and_systems_hold_no_images(folders, dpexp_job, hidden):
    before = [*of().train.tensors, *of().test.tensors]
    for part in ("train", "test"):
        folder = folders / part / hidden
        folder.mkdir(parents=True)
        (folder / "00.png").write_bytes((folders / "test" / "a" / "00.png").read_bytes())
        for name in ("._00.png", ".DS_Store", "Thumbs.db"):
            (folders / part / "a" / name).write_text("no image")
    assert all(map(torch.equal, before, [*of().train.tensors, *of().test.tensors]))
    assert class_names("train", "test") == ["a", "b"] and len(of().read_inputs(folders / "test")) == 20


def removed(*folders):
    for folder in folders:
        shutil.rmtree(folder)
        Path(folder).mkdir()


MISTAKES = {
    "cut.png cannot be read: ": lambda: shutil.move("train/a/cut.png", "test/a/cut.png"),
    "data.test_path=test: test/c/00.png cannot be read: c is none of": lambda: shutil.copytree("test/a", "test/c"),
    "data.test_path=test must be a folder that": lambda: shutil.rmtree("test"),
    "data.path=train must be a folder that": lambda: shutil.rmtree("train"),
    "data.test_path=test holds no record that can be read": lambda: removed("test/a", "test/b"),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_in_the_folders_are_refused_in_one_sentence(folders, said):
    (folders / "train" / "a" / "cut.png").write_bytes((folders / "train" / "a" / "02.png").read_bytes()[:90])
    MISTAKES[said]()
    with pytest.raises(ConfigError) as raised:
        assert of().train_dataloader()
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "argument, said",
    [
        ("data.path=train/a/00.png", "data.path=train/a/00.png must be a folder"),
        ("data.path=nowhere data.class_names=[a,b]", "data.path=nowhere cannot be read: No such file"),
        ("data.test_path=null", "data.test_path=None must be a folder"),
        ("data.test_path=test/a", "data.class_names=[] must be at least two different names"),
        ("data.class_names=[a,a]", "data.class_names=['a', 'a'] must be at least two"),
        ("data.shape=[4,8,8]", "data.shape=[4, 8, 8] must be [channels, height, width] with 1 or 3 channels"),
    ],
)
def test_mistakes_in_the_configuration_are_refused_in_one_sentence(folders, dpexp_job, argument, said):
    assert said in refusal(dpexp_job, *JOB, *argument.split())


def refusal(job, *arguments):
    """The sentence by which a job ends, with nothing in its ledger."""
    shutil.rmtree("refused", ignore_errors=True)
    with pytest.raises(SystemExit) as stopped:
        job(*arguments, *QUICK, "hydra.run.dir=refused")
    assert "\n" not in stopped.value.code and stopped.value.code.endswith(".")
    assert not Path("refused/ledger.jsonl").exists() or not read_ledger("refused/ledger.jsonl")
    return stopped.value.code


def test_folders_may_be_named_by_numbers(folders):
    for part in ("train", "test"):
        shutil.move(f"{part}/a", f"{part}/0")
        shutil.move(f"{part}/b", f"{part}/1")
    assert Images("train", "test", [1, 0], [1, 8, 8]).train.tensors[1].tolist() == [1, 0] * 30


def test_new_inputs_that_cannot_be_read_are_named(folders):
    data = of()
    with pytest.raises(ConfigError, match=r"data has no column image, which data\.module\.input names"):
        data.encode(pd.DataFrame({"path": ["test/a/00.png"]}))
    with pytest.raises(ConfigError, match=r"nowhere\.png cannot be read"):
        data.encode(pd.DataFrame({"image": ["test/a/00.png", "nowhere.png"]}))


HUB = ("data=huggingface", "data.path=saved", "data.n=60", "model=logistic", "trainer.num_evaluations=0",
       "privacy.delta=1e-3")  # fmt: skip


def saved(features, rows):
    """A data set of 60 training and 20 test records in the folder `saved`."""
    parts = {"train": rows[:60], "test": rows[60:]}
    columns = {
        part: {name: [row[k] for row in some] for k, name in enumerate(features)} for part, some in parts.items()
    }
    DatasetDict({p: Dataset.from_dict(c, Features(features)) for p, c in columns.items()}).save_to_disk("saved")


def test_images_of_a_data_set_train_and_files_are_predicted(folders, dpexp_job):
    files = [str(path) for part in ("train", "test") for path in sorted((folders / part).rglob("*.png"))]
    rows = [(file, file.split("/")[-2]) for file in files]
    rows[5] = (files[5], None)
    saved({"scan": ImageFeature(), "kind": ClassLabel(names=["a", "b"])}, rows)
    output = dpexp_job(*HUB, "data.input=scan", "data.label=kind", "data.shape=[1,8,8]", "privacy.noise_multiplier=1",
                       "sampling.expected_batch_size=30", "sampling.steps=30", "accountant=moments")  # fmt: skip
    assert json.loads((output / "result.json").read_text())["metrics"]["test_accuracy"] > 0.9
    shutil.rmtree("saved")
    found = predict([str(output), "test"])
    assert (found["prediction"] == found["scan"].str[-8]).sum() > 17 and [*found][2:] == ["p_a", "p_b"]
    assert mlflow.pyfunc.load_model(str(output / "mlflow_model")).predict(found[["scan"]]).equals(found[[*found][1:]])


def test_vectors_of_a_data_set_train(folders, dpexp_job):
    random = np.random.default_rng(0)
    rows = [([*random.normal(3 * (k % 2), 1, 4)], ("no", "yes")[k % 2]) for k in range(80)]
    rows[0], rows[1], rows[2] = ([1.0], "no"), (None, "no"), (rows[2][0], "maybe")
    saved({"v": List(Value("float32")), "y": Value("string")}, rows)
    job = (*HUB, "data.input=v", "data.label=y", "data.shape=[4]")
    data = HuggingFace("saved", ["no", "yes"], [4], "v", "y")
    assert len(data.train) == 60 and len(data.test) == 20 and data.train[3][0].tolist() == pytest.approx(rows[3][0])
    assert data.train.usable.tolist() == [False] * 3 + [True] * 57
    output = dpexp_job(*job, "data.class_names=[no,yes]", "privacy.noise_multiplier=1", "tracking=none",
                       "sampling.expected_batch_size=30", "sampling.steps=30", "accountant=moments")  # fmt: skip
    assert json.loads((output / "result.json").read_text())["metrics"]["test_accuracy"] > 0.9
    pd.DataFrame({"v": [row[0] for row in rows[60:]]}).to_parquet("new.parquet")
    assert (predict([str(output), "new.parquet"])["prediction"] == [row[1] for row in rows[60:]]).sum() > 17
    for arguments, said in (
        ((), "data.class_names=[] must be at least two"),
        (("data.class_names=[no,yes]", "data.input=w"), "data.path=saved, split test: w and y cannot be read: "),
        (("data.path=null",), "data.path, data.input and data.label must be given"),
    ):
        assert said in refusal(dpexp_job, *job, *arguments)
    for names, shape, split, said in (
        (["no", "yes"], [5], "test", "data.path=saved, split test: record 0 cannot be read: "),
        (["no", "ja"], [4], "test", "split test: record 1 cannot be read: yes is none of the classes no, ja"),
        (["no", "yes"], [4], "other", "data.path=saved, split other: "),
    ):
        with pytest.raises(ConfigError, match=said):
            assert HuggingFace("saved", names, shape, "v", "y", test_split=split).train_dataloader()


def test_a_folder_whose_classes_hugging_face_would_take_from_private_files_is_refused(tmp_path):
    for name in ("train/cat/a.png", "train/dog/b.png", "test/cat/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / name)
    data = HuggingFace(str(tmp_path), ["cat", "dog"], [1, 2, 2], "image", "label")
    with pytest.raises(ConfigError, match=r"of kind imagefolder.*data=images"):
        data.train  # noqa: B018
