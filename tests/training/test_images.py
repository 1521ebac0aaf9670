"""Images in folders and data sets in Hugging Face's format: what is read, what contributes nothing, what is refused."""

import shutil
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from datasets import Image as ImageFeature
from files import save
from jobs import refusal_of, result_of
from pages import composed
from PIL import Image

from dpexp.accounting.ledger import read_ledger
from dpexp.commands.saved_jobs import evaluate, predict
from dpexp.errors import ConfigError
from dpexp.training.data import HuggingFace, Images
from dpexp.training.data.images import class_names

MODEL = ("data.n=60", "model=logistic", "trainer.num_evaluations=0", "privacy.delta=1e-3")
JOB = ("data=images", "data.path=train", "data.test_path=test", "data.shape=[1,8,8]", *MODEL)
LEARN = ("privacy.noise_multiplier=1", "sampling.expected_batch_size=30", "sampling.steps=30", "accountant=moments")


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


SCANS = ("data=huggingface", "data.path=saved", "data.input=scan", "data.label=kind", *JOB[3:])


@pytest.mark.parametrize("column, job", [("image", JOB), ("scan", SCANS)])
def test_images_of_a_folder_or_a_data_set_train_and_new_ones_are_predicted(folders, dpexp_job, column, job):
    files = [str(path) for part in ("train", "test") for path in sorted((folders / part).rglob("*.png"))]
    rows = [(file, file.split("/")[-2] if k != 5 else None) for k, file in enumerate(files)]
    saved({"scan": ImageFeature(), "kind": ClassLabel(names=["a", "b"])}, rows)
    output = str(dpexp_job(*job, *LEARN))
    shutil.rmtree("train")
    accuracy = result_of(Path(output))["metrics"]["test_accuracy"]
    assert evaluate([output])["test_accuracy"] == accuracy > 0.9
    shutil.rmtree("saved")
    found = predict([output, "test"])
    assert [*found] == [column, "prediction", "p_a", "p_b"]
    assert [*found[column].str[:6]] == ["test/a"] * 10 + ["test/b"] * 10
    assert (found["prediction"] == found[column].str[5]).sum() > 17
    assert [*pd.read_csv("predictions.csv")["prediction"]] == [*found["prediction"]]
    for inputs in (save(found[[column]].iloc[3:5], "new.csv"), found[column][3]):
        assert predict([output, inputs])["p_a"][0] == pytest.approx(found["p_a"][3], rel=1e-5)
    served = mlflow.pyfunc.load_model(f"{output}/mlflow_model")
    for contents in (found[[column]], pd.DataFrame({column: [Path(path).read_bytes() for path in found[column]]})):
        np.testing.assert_allclose(served.predict(contents)["p_b"], found["p_b"], rtol=1e-5)


def test_images_are_resized_turned_and_scaled_by_constants(folders):
    grey = np.array([[0, 255], [128, 64], [16, 32]], np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    arrays = [grey, grey.astype(np.uint16) * 256 + 7, grey, np.stack([grey, grey * 0, 255 - grey], 2)]
    arrays += [np.full((90, 120), 51, np.uint8)]
    for k, array in enumerate(arrays):
        Image.fromarray(array).save(f"test/a/{2 * k:02}.png", exif=exif if k == 2 else None)
    as_tensor = torch.tensor(grey) / 127.5 - 1
    x = of(shape=[1, 3, 2]).test.tensors[0]
    assert torch.equal(x[0, 0], as_tensor) and torch.equal(x[0], x[2])
    assert torch.equal(of(shape=[1, 2, 3]).test.tensors[0][4, 0], as_tensor.rot90(-1))
    red, green, blue = of(shape=[3, 3, 2]).test.tensors[0][6]
    assert torch.allclose(red, -blue, atol=1e-6) and (green == -1).all()
    assert of().test.tensors[0][8].flatten().tolist() == pytest.approx([51 / 127.5 - 1] * 64)


def test_training_images_that_cannot_be_read_contribute_nothing(folders):
    before, a, b = of().train.tensors, folders / "train" / "a", folders / "train" / "b"
    (a / "empty.png").touch()
    (a / "cut.png").write_bytes((a / "02.png").read_bytes()[:90])
    (b / "text.jpg").write_text("no image")
    Image.fromarray(np.full((9, 9), 0.5, np.float32)).save(b / "floats.tif")
    (b / "notes.txt").write_text("no image either")
    (folders / "train" / "c").mkdir()
    for other in ("train/c", "train"):
        shutil.copy(a / "02.png", other)
    train = of().train
    names = [file.name for file, _ in map(of()._records(in_test=False)[2], range(len(train)))]
    assert names == sorted(names) and len(train) == 65
    odd = {name for name, usable in zip(names, train.usable, strict=True) if not usable}
    assert odd == {"empty.png", "cut.png", "text.jpg", "floats.tif", "02.png"} and train.usable.sum() == 60
    assert all(torch.equal(part[train.usable], known) for part, known in zip(train.tensors, before, strict=True))


def test_folders_of_editors_and_systems_hold_no_images(folders):
    before = [*of().train.tensors, *of().test.tensors]
    for part in (folders / "train", folders / "test"):
        for name in (".ipynb_checkpoints", "__MACOSX", "a/.ipynb_checkpoints", "b/x/__MACOSX/b", "b/.x/y"):
            (part / name).mkdir(parents=True)
            shutil.copy("test/a/00.png", part / name)
        for name in ("._00.png", ".DS_Store", "Thumbs.db"):
            (part / "a" / name).write_text("no image")
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


@pytest.fixture(scope="module")
def options():
    return composed([*JOB, *LEARN, "tracking=none"])


@pytest.mark.parametrize(
    "argument, said",
    [
        ("data.path=train/a/00.png", "data.path=train/a/00.png must be a folder"),
        ("data.path=nowhere data.class_names=[a,b]", "data.path=nowhere cannot be read: No such file"),
        ("data.test_path=null", "data.test_path=None must be a folder"),
        ("data.test_path=test/a", "data.class_names=[] must be at least two different names"),
        ("data.class_names=[a,a]", "data.class_names=['a', 'a'] must be at least two"),
    ],
)
def test_mistakes_in_the_configuration_are_refused_in_one_sentence(folders, options, argument, said):
    assert said in refusal_of(options, argument.split(), folders)


def test_images_of_four_channels_are_refused(folders, dpexp_job):
    said = "data.shape=[4, 8, 8] must be [channels, height, width] with 1 or 3 channels"
    assert said in refusal(dpexp_job, *JOB, "data.shape=[4,8,8]")


def refusal(job, *arguments):
    """The sentence by which a job ends, with nothing in its ledger."""
    with pytest.raises(SystemExit) as stopped:
        job(*arguments, *LEARN, "tracking=none", "hydra.run.dir=refused")
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


def saved(features, rows):
    """A data set of 60 training and 20 test records in the folder `saved`."""
    made = Dataset.from_list([dict(zip(features, row, strict=True)) for row in rows], Features(features))
    DatasetDict({"train": made.select(range(60)), "test": made.select(range(60, 80))}).save_to_disk("saved")


def vectors():
    """Of two classes apart, of which the first three cannot be used."""
    random = np.random.default_rng(0)
    rows = [(random.normal(3 * (k % 2), 1, 4).tolist(), ("no", "yes")[k % 2]) for k in range(80)]
    rows[0], rows[1], rows[2] = ([1.0], "no"), (None, "no"), (rows[2][0], "maybe")
    saved({"v": List(Value("float32")), "y": Value("string")}, rows)
    return pd.DataFrame(rows, columns=["v", "y"])


OF_VECTORS = ("data=huggingface", "data.path=saved", "data.input=v", "data.label=y", "data.shape=[4]", *MODEL)


@pytest.mark.usefixtures("bare")
def test_vectors_of_a_data_set_train(folders, dpexp_job):
    rows = vectors()
    data = HuggingFace("saved", ["no", "yes"], [4], "v", "y")
    assert len(data.test) == 20 and data.train[3][0].tolist() == pytest.approx(rows["v"][3])
    assert data.train.usable.tolist() == [False] * 3 + [True] * 57
    output = dpexp_job(*OF_VECTORS, "data.class_names=[no,yes]", *LEARN, "tracking=none")
    assert result_of(output)["metrics"]["test_accuracy"] > 0.9
    found = predict([str(output), save(rows[["v"]][60:], "new.parquet")])
    assert (found["prediction"].to_numpy() == rows["y"][60:].to_numpy()).sum() > 17


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("data.class_names=[no,yes] data.input=w", "data.path=saved, split test: w and y cannot be read: "),
        ("data.class_names=[no,yes] data.shape=[5]", "data.path=saved, split test: record 0 cannot be read: "),
        ("data.class_names=[no,ja]", "record 1 cannot be read: yes is none of the classes no, ja"),
        ("data.class_names=[no,yes] data.module.test_split=other", "data.path=saved, split other: "),
    ],
)
def test_mistakes_in_a_data_set_are_refused_in_one_sentence(folders, dpexp_job, arguments, said):
    vectors()
    assert said in refusal(dpexp_job, *OF_VECTORS, *arguments.split())


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "data.class_names=[] must be at least two"),
        (["data.path=null"], "data.path, data.input and data.label must be given"),
    ],
)
def test_options_of_a_data_set_are_refused(folders, arguments, said):
    vectors()
    assert said in refusal_of(composed([*OF_VECTORS, *LEARN, "tracking=none"]), arguments, folders)


def test_a_folder_whose_classes_hugging_face_would_take_from_private_files_is_refused(tmp_path):
    for name in ("train/cat/a.png", "train/dog/b.png", "test/cat/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / name)
    data = HuggingFace(str(tmp_path), ["cat", "dog"], [1, 2, 2], "image", "label")
    with pytest.raises(ConfigError, match=r"of kind imagefolder.*data=images"):
        data.train  # noqa: B018
