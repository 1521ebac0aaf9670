"""Texts as embeddings by a public transformer: their values, records that cannot be used, sensitivity, a job."""

import mlflow
import pandas as pd
import pytest
import torch
from files import save, word_tokenizer, write_lines
from jobs import refusal_of, result_of
from pages import composed
from safetensors.torch import load_file
from sensitivity import moved_by
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel

from dpexp.commands.saved_jobs import evaluate, predict
from dpexp.errors import ConfigError, RecordError
from dpexp.training.data.features import Features
from dpexp.training.data.text_features import TextEmbedding, TokenRows, labels_in

WORDS = [*"abcdefgh"]
JOB = (
    "experiment=text_features", "data.encoder=bert", "data.path=train.jsonl", "data.test_path=test.jsonl", "data.n=60",
    "data.label=kind", "data.length=6", "trainer.num_evaluations=0",
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
    special = ["[PAD]", "<unknown>", "[CLS]", "[SEP]"]
    tokenizer = word_tokenizer([*special, *WORDS], pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save_pretrained(path)
    return path


def rows(count, seed=0):
    """Texts of one to eight of the words, labelled by whether they begin with one of the first four."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(8, (1 + int(k) % 8,), generator=generator).tolist() for k in range(count)]
    return [
        {"text": " ".join(WORDS[k] for k in of), "kind": "early" if of[0] < 4 else "late", "who": f"{seed} {k // 3}"}
        for k, of in enumerate(drawn)
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch, bert):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bert").symlink_to(bert)
    write_lines("train.jsonl", rows(60))
    write_lines("test.jsonl", rows(20, seed=1))
    return tmp_path


def texts():
    return TokenRows("train.jsonl", "test.jsonl", "bert", 6, "kind", ["early", "late"])


def by_hand(text):
    """The embedding of a text in float64, of its first six tokens alone."""
    model = BertModel.from_pretrained("bert").double().eval()
    tokens = [*[2, *(4 + WORDS.index(word) for word in text.split())][:5], 3]
    with torch.no_grad():
        states = model(torch.tensor([tokens])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.sum(0), dim=0)


def test_a_text_becomes_the_mean_of_its_hidden_states_of_length_1(folder):
    write_lines("train.jsonl", [*rows(19), {"text": "[PAD] a", "kind": "late"}])
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
    write_lines("train.jsonl", [*odd, *rows(20)])
    with open("train.jsonl", "a") as file:
        file.write("\n{\n")
    train = Features(texts(), TextEmbedding("bert"), "cache").train
    assert train.usable.tolist() == [False] * 4 + [True] * 20 + [False] * 2 and len(train) == 26
    with pytest.raises(RecordError, match="has no text, or none of the labels"):
        train[0]
    assert train.tensors[0].isfinite().all()
    write_lines("test.jsonl", [{"text": "a", "kind": "new"}])
    with pytest.raises(ConfigError, match=r"data\.test_path=test\.jsonl: a record's field kind is none of"):
        texts().test  # noqa: B018


@pytest.mark.usefixtures("bare")
def test_a_user_who_has_texts_no_longer_moves_the_released_sum_by_at_most_s(folder, dpexp_job):
    def without_texts_of_one():
        odd = [{"text": "a", "kind": "unknown", "who": "0 0"}, {"text": "", "kind": "late", "who": "0 0"}]
        write_lines("train.jsonl", [*odd, *rows(60)[3:]])

    job = (
        *JOB,
        "privacy_unit=user",
        "data.user=who",
        "data.users=20",
        "clip_norm.value=0.5",
        "~sampling.sampling_rate",
    )
    assert 0.01 < moved_by(without_texts_of_one, dpexp_job, 20, *job) <= 0.5 * 1.0001


def test_a_job_learns_and_predicts_from_raw_texts(folder, dpexp_job):
    write_lines("train.jsonl", rows(600))
    options = (
        "data.n=600", "privacy.epsilon=null", "privacy.noise_multiplier=0.01", "privacy.noise_seed=1",
        "privacy.delta=1e-5", "optimizer.lr=2", "sampling.sampling_rate=0.2", "accountant=moments",
    )  # fmt: skip
    job = dpexp_job(*JOB, *options)
    result = result_of(job)
    assert result["class_names"] == ["early", "late"] and result["metrics"]["test_accuracy"] > 0.6
    assert evaluate([str(job)])["test_accuracy"] == pytest.approx(result["metrics"]["test_accuracy"])
    (folder / "train.jsonl").unlink()
    (folder / "test.jsonl").unlink()  # what predicts needs neither
    new = pd.DataFrame({"text": ["a b", "h"], "id": [7, 8]})
    found = predict([str(job), save(new, "new.csv")])
    assert list(found) == ["text", "id", "prediction", "p_early", "p_late"]
    linear = load_file(job / "weights.safetensors")
    scores = torch.stack([*map(by_hand, new["text"])]) @ linear["1.weight"].double().T + linear["1.bias"]
    assert torch.tensor(found[["p_early", "p_late"]].to_numpy()).sub(scores.softmax(1)).abs().max() < 1e-6
    served = mlflow.pyfunc.load_model(str(job / "mlflow_model")).predict(new[["text"]])
    assert served["prediction"].tolist() == found["prediction"].tolist()


def test_classes_are_by_default_the_labels_of_the_test_texts(folder):
    write_lines("test.jsonl", [{"kind": kind, "text": "a"} for kind in ("b", 1.0, "b", "a", " ", None)])
    assert labels_in("test.jsonl", "kind") == ["1", "a", "b"]


@pytest.fixture(scope="module")
def options():
    return composed(JOB)


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("data.encoder=./nowhere", "data.encoder=./nowhere is neither a folder nor a name on the hub"),
        ("data.label=none", "data.test_path=test.jsonl has no column none, which data.label names"),
        ("data.length=17", "data.length=17 must lie between 2 and the 16 tokens"),
        ("data.class_names=[early,early]", "data.class_names=['early', 'early'] must be at least two different"),
    ],
)
def test_bad_input_gets_one_sentence(folder, options, override, sentence):
    assert refusal_of(options, [override], folder).startswith(sentence)
