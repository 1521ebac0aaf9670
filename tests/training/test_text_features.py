"""Texts as embeddings by a public transformer: their values, records that cannot be used, sensitivity, a job."""

import json
import math

import mlflow
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from dpexp.commands.saved_jobs import evaluate, predict
from dpexp.errors import ConfigError, RecordError
from dpexp.training.data.features import Features
from dpexp.training.data.text_features import TextEmbedding, TokenRows, labels_in

WORDS = [*"abcdefgh"]
JOB = (
    "experiment=text_features", "data.encoder=bert", "data.path=train.jsonl", "data.test_path=test.jsonl", "data.n=60",
    "data.label=kind", "data.length=6", "trainer.num_evaluations=0",
)  # fmt: skip
ONE_ROUND = (
    "optimizer.lr=1", "optimizer.momentum=0", "sampling=full_batch", "~sampling.sampling_rate", "sampling.steps=1",
    "sampling.epochs=null", "privacy.epsilon=null",
    "privacy.noise_multiplier=1e-6", "privacy.delta=1e-5", "privacy.noise_seed=4", "tracking=none",
    "accountant=moments", "clip_norm.value=0.5",
)  # fmt: skip


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tiny BERT, whose tokenizer puts [CLS] and [SEP] around a text."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "bert"
    config = BertConfig(
        vocab_size=12, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(WordLevel({word: k for k, word in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(path)
    return path


def rows(count, seed=0):
    """Texts of one to eight of the words, labelled by whether they begin with one of the first four."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(8, (1 + int(k) % 8,), generator=generator).tolist() for k in range(count)]
    return [
        {"text": " ".join(WORDS[k] for k in of), "kind": "early" if of[0] < 4 else "late", "who": f"{seed} {k // 3}"}
        for k, of in enumerate(drawn)
    ]


def write(path, some):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in some)


@pytest.fixture
def folder(tmp_path, monkeypatch, bert):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bert").symlink_to(bert)
    write("train.jsonl", rows(60))
    write("test.jsonl", rows(20, seed=1))
    return tmp_path


def texts(**options):
    return TokenRows("train.jsonl", "test.jsonl", "bert", 6, "kind", options.pop("class_names", ["early", "late"]))


def by_hand(text):
    """The embedding of a text in float64, of its first six tokens alone."""
    model = BertModel.from_pretrained("bert").double().eval()
    tokens = [*[2, *(4 + WORDS.index(word) for word in text.split())][:5], 3]
    with torch.no_grad():
        states = model(torch.tensor([tokens])).last_hidden_state[0]
    total = sum(states, torch.zeros(8, dtype=torch.float64)) / len(tokens)
    return total / math.sqrt(sum(float(value) ** 2 for value in total))


def test_a_text_becomes_the_mean_of_its_hidden_states_of_length_1(folder):
    write("train.jsonl", [*rows(19), {"text": "[PAD] a", "kind": "late"}])
    data = Features(texts(), TextEmbedding("bert"), "cache")
    for row, (x, y) in zip(rows(19), data.train, strict=False):
        assert torch.allclose(x.double(), by_hand(row["text"]), atol=1e-6)
        assert x.double().norm().item() == pytest.approx(1, abs=1e-6) and y == (row["kind"] == "late")
    x, _ = data.train[19]
    alone = TextEmbedding("bert")(torch.tensor([[2, 0, 4, 3, -1, -1]]))[0]
    assert torch.equal(x, alone), "a padding token that a text has is one of its tokens"
    assert len(data.test) == 20 and len([*(folder / "cache").iterdir()]) == 2


def test_the_length_to_which_texts_are_padded_changes_no_feature(folder):
    by = TextEmbedding("bert")
    x = texts().train.tensors[0]
    padded = torch.nn.functional.pad(x, (0, 5), value=-1)
    assert torch.equal(by(x), by(padded)) and torch.equal(by(x[3:4]), by(x)[3:4])


def test_records_without_a_text_or_a_known_label_keep_their_places_and_contribute_nothing(folder):
    odd = [{"text": 3, "kind": "late"}, {"text": " ", "kind": "late"}, {"text": "a", "kind": "new"}, {"kind": "late"}]
    write("train.jsonl", [*odd, *rows(20)])
    with open("train.jsonl", "a") as file:
        file.write("\n{\n")
    data = Features(texts(), TextEmbedding("bert"), "cache")
    assert len(data.train) == 26
    assert data.train.usable.tolist() == [False] * 4 + [True] * 20 + [False] * 2
    for k in (0, 1, 2, 3, 24, 25):
        with pytest.raises(RecordError, match="has no text, or none of the labels"):
            data.train[k]
    assert data.train.tensors[0].isfinite().all()
    write("test.jsonl", [{"text": "a", "kind": "new"}])
    with pytest.raises(ConfigError, match=r"data\.test_path=test\.jsonl: a record's field kind is none of"):
        texts().test  # noqa: B018


@pytest.mark.parametrize("change", ["a record", "a record's label", "a user"])
def test_one_record_or_user_moves_the_released_sum_by_at_most_s(folder, dpexp_job, change):
    unit = ("privacy_unit=user", "data.user=who", "data.users=20") if change == "a user" else ()
    weights = []
    for changed in (False, True):
        own = rows(3 if unit else 1, seed=2)
        other = [{"text": "a", "kind": "unknown"}] if change == "a record's label" else []
        write("train.jsonl", [*(other if changed else own), *rows(57)])
        dpexp_job(*JOB, *ONE_ROUND, *unit, f"hydra.run.dir=out{changed}")
        weights.append(load_file(folder / f"out{changed}" / "weights.safetensors"))
    moved = math.sqrt(sum(float((weights[0][name] - weights[1][name]).double().square().sum()) for name in weights[0]))
    assert 0.01 * 0.5 < moved * (20 if unit else 60) <= 0.5 * 1.0001


def test_a_job_learns_and_predicts_from_raw_texts(folder, dpexp_job):
    write("train.jsonl", rows(600))
    options = (
        "privacy.epsilon=null", "privacy.noise_multiplier=0.01", "privacy.noise_seed=1", "privacy.delta=1e-5",
        "optimizer.lr=2", "sampling.sampling_rate=0.2", "accountant=moments",
    )  # fmt: skip
    job = dpexp_job(*JOB, "data.n=600", *options)
    result = json.loads((job / "result.json").read_text())
    assert result["class_names"] == ["early", "late"] and result["metrics"]["test_accuracy"] > 0.6
    assert evaluate([str(job)])["test_accuracy"] == pytest.approx(result["metrics"]["test_accuracy"])
    (folder / "train.jsonl").unlink()
    (folder / "test.jsonl").unlink()  # what predicts needs neither
    pd.DataFrame({"text": ["a b", "h"], "id": [7, 8]}).to_csv("new.csv", index=False)
    found = predict([str(job), "new.csv"])
    assert list(found) == ["text", "id", "prediction", "p_early", "p_late"]
    linear = load_file(job / "weights.safetensors")
    weight, bias = linear["1.weight"].double(), linear["1.bias"].double()
    for k, text in enumerate(["a b", "h"]):
        p = (weight @ by_hand(text) + bias).softmax(0)
        assert [found["p_early"][k], found["p_late"][k]] == pytest.approx(p.tolist(), abs=1e-6)
    served = mlflow.pyfunc.load_model(str(job / "mlflow_model")).predict(pd.read_csv("new.csv")[["text"]])
    assert served["prediction"].tolist() == found["prediction"].tolist()


def test_classes_are_by_default_the_labels_of_the_test_texts(folder):
    write("test.jsonl", [{"kind": kind, "text": "a"} for kind in ("b", 1.0, "b", "a", " ", None)])
    assert labels_in("test.jsonl", "kind") == ["1", "a", "b"]


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("data.encoder=./nowhere", "data.encoder=./nowhere is neither a folder nor a name on the hub"),
        ("data.label=none", "data.test_path=test.jsonl has no column none, which data.label names"),
        ("data.length=17", "data.length=17 must lie between 2 and the 16 tokens"),
        ("data.class_names=[early,early]", "data.class_names=['early', 'early'] must be at least two different"),
    ],
)
def test_bad_input_gets_one_sentence(folder, dpexp_job, override, sentence):
    with pytest.raises(SystemExit, match=rf"^dpexp: {sentence}".replace("[", r"\[")):
        dpexp_job(*JOB, *ONE_ROUND, override)
