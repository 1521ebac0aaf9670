"""Fine-tuning language models on texts of one's own: documents, blocks, users; perplexity, adapters, predictions."""

import json
import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import datasets
import mlflow
import pandas as pd
import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from reference import engine_of, norm_of, relative_error, rows_of, sums_apart, sums_of
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, PreTrainedTokenizerFast

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.commands.sample import sample
from dpexp.commands.saved_jobs import predict
from dpexp.errors import ConfigError, RecordError
from dpexp.training.data.documents import Documents, LabelledTexts
from dpexp.training.language import LanguageModel, causal_lm, is_causal
from dpexp.training.pretrained import Lora

WORDS = [*"abcdefghijklmno", "cat"]
LENGTH = 12
JOB = (
    "experiment=finetune_lm", "model.name=tiny", "data.path=train.txt", "data.test_path=test.txt", "data.n=60",
    f"data.length={LENGTH}", "data.prompts=[a b]", "trainer.num_evaluations=0",
)  # fmt: skip
ONE_ROUND = (
    "optimizer=sgd", "optimizer.lr=1", "optimizer.momentum=0", "sampling.steps=1", "sampling.epochs=null",
    "~sampling.expected_batch_size", "privacy.epsilon=null", "privacy.noise_multiplier=1e-6", "privacy.delta=1e-5",
    "privacy.noise_seed=1", "tracking=none", "accountant=moments",
)  # fmt: skip


def texts(count, seed=0):
    """Sentences of one to twelve words, each of which the next word in WORDS follows."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, 13, (2, count), generator=generator).T.tolist()
    return [" ".join(WORDS[(first + k) % 16] for k in range(length)) for first, length in drawn]


def tokenizer_with(**special):
    vocabulary = {word: k for k, word in enumerate(["<end>", "<unknown>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>", **special)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny GPT-2 and its tokenizer without a padding token."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=18, n_positions=32, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer_with(eos_token="<end>").save_pretrained(path)
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny):
    """A folder with the model in `tiny`, and texts; file names are relative to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    shutil.copytree(tiny, "tiny")
    (tmp_path / "train.txt").write_text("\n\n".join(texts(60)))
    (tmp_path / "test.txt").write_text("\n \n\n".join(texts(20, seed=1)))
    write("train.jsonl", texts(60))
    write("test.jsonl", texts(20, seed=1))
    return tmp_path


def write(path, some):
    """Records of three to a user, with a label."""
    rows = [
        {"text": text, "who": f"u{k // 3}", "kind": "cat" if "cat" in text else "other"} for k, text in enumerate(some)
    ]
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def documents(path="train.txt", test="test.txt", **options):
    return Documents(path, test, "tiny", options.pop("length", LENGTH), **options)


def test_a_document_is_cut_at_the_length_and_padded(folder):
    (folder / "train.txt").write_text("a c\nf\n\n\n" + "d " * 30)
    short, long = (documents().train[k] for k in range(2))
    assert short["input_ids"].tolist() == [2, 4, 7] + [0] * 9
    assert short["labels"].tolist() == [2, 4, 7, 0] + [-100] * 8 and short["attention_mask"].sum() == 4
    assert long["labels"].tolist() == [5] * LENGTH and long["attention_mask"].all()


def test_a_block_never_crosses_documents_or_users(folder):
    some = [" ".join([word] * m) for word, m in zip(WORDS, [1, 3, 4, 5, 7, 8, 9, 2, 6, 3, 4, 5], strict=False)]
    write("train.jsonl", some)
    blocks = documents("train.jsonl", length=4, unit="block", user="who", privacy_unit="dpexp.User").train
    assert len(blocks) == len(blocks.user_of) == 19
    seen = []
    for k, user in enumerate(blocks.user_of):
        words = {w for w in blocks[k]["labels"].tolist() if w not in (0, -100)}
        assert len(words) == 1, "a block has the words of one document"
        seen += [(user, *words)]
    assert {*seen} == {(k // 3, k + 2) for k in range(len(some))}


def asked(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps({"ask": ask, "text": text}) + "\n" for ask, text in rows)


def test_only_the_text_after_a_prompt_has_a_loss(folder):
    rows = [("a b", "c d"), ("a " * 30, "c"), ("a", None), (None, "c d"), ("a b c", "d " * 30)]
    asked("train.jsonl", rows)
    data = documents("train.jsonl", prompt="ask").train
    assert data[0]["input_ids"].tolist()[:6] == [2, 3, 4, 5, 0, 0]
    assert data[0]["labels"].tolist() == [-100, -100, 4, 5, 0] + [-100] * 7
    assert data.usable.tolist() == [True, False, False, False, True]
    for k in (1, 2, 3):
        with pytest.raises(RecordError):
            data[k]
    assert data[4]["labels"].tolist() == [-100] * 3 + [5] * 9
    with pytest.raises(ConfigError, match=r"data\.prompt with data\.unit=block"):
        documents("train.jsonl", prompt="ask", unit="block", adjacency="replace_one")
    assert not documents("train.jsonl", prompt="missing").train.usable.any()
    with pytest.raises(ConfigError, match=r"no column missing, which data\.prompt names"):
        documents(test="train.jsonl", prompt="missing").test.usable.any()


CHAT = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}a {% endif %}"


def turns(*said):
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[k % 2], "content": content} for k, content in enumerate(said)]


def write_rows(path, rows):
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def words_of(item):
    """The words that are read, and those with a loss."""
    kept = {"input_ids": item["input_ids"][item["attention_mask"].bool()], "labels": item["labels"]}
    return [[["<end>", "<unknown>", *WORDS][k] for k in ids.tolist() if k != -100] for ids in kept.values()]


@pytest.mark.parametrize(
    "row, read, with_loss",
    [
        ({"text": "c d", "kind": "a", "number": 3}, "a b <unknown> c d <end>", "c d <end>"),
        ({"text": "c d", "kind": "a", "number": 3.0}, "a b <unknown> c d <end>", "c d <end>"),
        ({"text": "c d", "kind": " ", "number": 3}, None, None),
        ({"text": "c d", "kind": ["a"], "number": 3}, None, None),
        ({"text": "c d", "kind": "a"}, None, None),
        ({"text": 3, "kind": "a", "number": 3}, None, None),
        ({"text": "c d", "kind": "a " * 20, "number": 3}, None, None),
    ],
)
def test_a_prompt_is_filled_with_fields(folder, row, read, with_loss):
    write_rows("train.jsonl", [row])
    data = documents("train.jsonl", prompt="{kind} b {number}").train
    assert data.usable.tolist() == [read is not None]
    if read is not None:
        assert words_of(data[0]) == [read.split(), with_loss.split()]


@pytest.mark.parametrize(
    "said, read, with_loss",
    [
        (turns("b c", "d e"), "<unknown> b c a d e", "d e"),
        (turns("b", "c", "d", "e"), "<unknown> b a c <unknown> d a e", "e"),
        (turns("b c"), None, None),
        (turns("b c", ""), None, None),
        (turns("b c", 3), None, None),
        ("b c", None, None),
        ([{"role": "assistant"}], None, None),
        ([3], None, None),
        (None, None, None),
    ],
)
def test_the_assistants_last_turn_has_a_loss(folder, said, read, with_loss):
    (folder / "chat.jinja").write_text(CHAT)
    write_rows("train.jsonl", [{"talk": said}])
    data = documents("train.jsonl", messages="talk", chat_template="chat.jinja").train
    assert data.usable.tolist() == [read is not None]
    if read is not None:
        assert words_of(data[0]) == [read.split(), with_loss.split()]


def test_a_template_that_rewrites_earlier_turns_leaves_no_text(folder):
    (folder / "chat.jinja").write_text("{{ messages | length }} " + CHAT)
    write_rows("train.jsonl", [{"talk": turns("b", "c")}])
    data = documents("train.jsonl", messages="talk", chat_template="chat.jinja").train
    assert not data.usable.any()


def test_conversations_train_the_tokenizers_template_and_predict_answers(folder, dpexp_job):
    tokenizer_with(eos_token="<end>", chat_template=CHAT).save_pretrained("tiny")
    for name, count in (("train.jsonl", 60), ("test.jsonl", 20)):
        write_rows(name, [{"talk": turns(WORDS[k % 4], "cat")} for k in range(count)])
    output = dpexp_job(
        *JOB, "data.path=train.jsonl", "data.test_path=test.jsonl", "data.messages=talk", "data.prompts=[b]",
        "privacy.enabled=false", "sampling.expected_batch_size=20", "sampling.epochs=20", "optimizer.lr=0.1",
    )  # fmt: skip
    assert (output / "generated.txt").read_text().startswith("b → cat")
    write_rows("new.jsonl", [{"talk": turns("c")}])
    dpexp_job("predict", str(output), "new.jsonl", "out=found.jsonl.csv")
    assert "cat" in (folder / "found.jsonl.csv").read_text().splitlines()[1]


def test_several_files_and_data_sets_of_hugging_face_hold_the_same_records(folder):
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    write_rows("part-1.jsonl", rows[:7])
    write_rows("part-2.jsonl", rows[7:])
    kinds = datasets.ClassLabel(names=["cat", "other"])
    saved = datasets.Dataset.from_list(rows).cast_column("kind", kinds)
    datasets.DatasetDict({"train": saved, "test": saved.select([0, 1])}).save_to_disk("saved")
    whole = documents("train.jsonl", user="who").train
    for path in ("part-*.jsonl", "saved"):
        found = documents(path, path, user="who")
        assert torch.equal(found.train.ids, whole.ids) and found.train.user_of == whole.user_of
    assert len(found.test) == 2
    labelled = [LabelledTexts(path, "test.jsonl", "tiny", LENGTH, "kind", ["cat", "other"], user="who").train
                for path in ("train.jsonl", "saved")]  # fmt: skip
    assert labelled[0].labels == labelled[1].labels and labelled[0].user_of == labelled[1].user_of == whole.user_of


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"prompt": "{"}, "data.prompt={ is no text with fields such as {label}"),
        ({"prompt": "{}"}, "data.prompt={}: braces must hold the name of a field"),
        ({"prompt": "{kind:5}"}, "data.prompt={kind:5}: braces must hold the name of a field"),
        ({"prompt": "kind", "messages": "talk"}, "data.prompt=kind and data.messages=talk: choose one"),
        ({"messages": "talk"}, "data.chat_template=null: the model's tokenizer has no chat template"),
        ({"messages": "talk", "chat_template": "none"}, "data.chat_template=none cannot be used: [Errno 2]"),
        ({"messages": "talk", "chat_template": "bad.jinja"}, "data.chat_template=bad.jinja cannot be used"),
        ({"messages": "talk", "unit": "block"}, "data.messages with data.unit=block: a block may lack its prompt"),
        ({"unit": "packed"}, "data.unit=packed is unknown; choose one of document, block, and privacy_unit=user for"),
        ({"prompt": "{kind}{who}", "prompts": ["a"]}, "data.prompts: a must have the fields kind, who"),
    ],
)
def test_prompts_and_conversations_that_cannot_be_used_are_refused(folder, options, sentence):
    (folder / "bad.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        documents("train.jsonl", "test.jsonl", **options).example()


def write_labels(path, **columns):
    pd.DataFrame(columns).to_csv(path, index=False)


def test_samples_are_records_of_the_labels_asked_for(folder, dpexp_job, capsys):
    for name, count in (("train.jsonl", 60), ("test.jsonl", 20)):
        write_rows(name, [{"kind": "ab"[k % 2], "text": "cat cat" if k % 2 else "d"} for k in range(count)])
    options = ("data.path=train.jsonl", "data.test_path=test.jsonl", "data.prompt='{kind} c'", "data.prompts=[]")
    job = dpexp_job(
        *JOB, *options, "privacy.enabled=false", "sampling.expected_batch_size=30", "sampling.epochs=60",
        "fine_tuning=all",
        "optimizer.lr=0.03", "tracking=none",
    )  # fmt: skip
    write_labels("labels.csv", kind=["a", "b", "c"], share=[1, 3, 0])
    found = sample([str(job), "labels.csv", "count=80", "batch=32", "temperature=0.3"])
    assert "The model is not private, and nor are they" in capsys.readouterr().out
    lines = (folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found and len(found) == 80
    assert {*found[0]} == {"kind", "text"} and {record["kind"] for record in found} == {"a", "b"}
    assert 48 <= sum(record["kind"] == "b" for record in found) <= 70  # 60 of 80 are expected
    right = sum(record["text"] == {"a": "d", "b": "cat cat"}[record["kind"]] for record in found)
    assert right > 72
    assert sample([str(job), "labels.csv", "count=80", "batch=32", "temperature=0.3"]) == found
    trained_on = documents("samples.jsonl", "samples.jsonl", prompt="{kind} c").train
    assert trained_on.usable.all() and len(trained_on) == 80


def test_the_likeliest_words_are_what_predict_continues_with(folder, dpexp_job, capsys):
    """Of prompts of several lengths, and as many at once as may be."""
    job = dpexp_job(*JOB, "fine_tuning=lora", "sampling.expected_batch_size=30", "optimizer.lr=0.05", "tracking=none")
    write_labels("some.csv", text=["a", "c d e f", "b c", "k l m"])
    alone = predict([str(job), "some.csv"])
    found = sample([str(job), "some.csv", "temperature=0.0001"])
    assert {record["text"] for record in found} == {*(alone["text"] + alone["continuation"])}
    assert (
        "They cost no ε of their own: if the prompts are public, they and the model are (ε = 7.9"
        in capsys.readouterr().out
    )
    assert len(sample([str(job), "count=5"])) == 5


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ((), "sample needs FILE, public prompts with the fields kind, who"),
        (("train.jsonl",), "sample: train.jsonl holds the training records, and a prompt must be public"),
        (("some.csv",), "data has no column kind, which data.prompt names"),
        (("half.csv",), "data: row 1 has no prompt: kind, who must be there"),
        (("empty.csv",), "sample: empty.csv holds no prompt"),
        (("shares.csv", "count=3"), "sample: each share in shares.csv must be a finite number of at least 0"),
        (("labels.csv", "count=0"), "sample.count=0 must be an integer of at least 1"),
        (("labels.csv", "temperature=0"), "sample.temperature=0 must be a finite number above 0"),
        (("labels.csv", "top_p=warm"), "sample.top_p=warm must lie in (0, 1]"),
        (("labels.csv", "seed=-1"), "sample.seed=-1 must lie in [0, "),
        (("labels.csv", "lenght=3"), "sample: lenght is unknown; known: data, uri, count, temperature, top_p"),
        (("labels.csv", "out=none/samples.jsonl"), "out=none/samples.jsonl cannot be written (No such file"),
    ],
)
def test_samples_that_cannot_be_made_are_refused(prompted, arguments, sentence):
    with pytest.raises(SystemExit, match=rf"^dpexp: {re.escape(sentence)}"):
        prompted("sample", "job", *arguments)


def test_a_job_with_a_known_noise_seed_and_its_samples_are_not_called_private(folder, prompted, capsys):
    prompted("sample", "job", "labels.csv")
    assert "The model is not private, and nor are they" in capsys.readouterr().out
    card = (folder / "job" / "card.md").read_text()
    assert "**Not private**" in card and "ε" not in card


def test_training_records_are_no_prompts_from_another_folder_or_by_another_name(folder, prompted, monkeypatch):
    os.link("train.jsonl", "linked.jsonl")
    Path("other").mkdir()
    os.symlink(folder / "tiny", "other/tiny")
    monkeypatch.chdir("other")
    for name in ("../train.jsonl", "../linked.jsonl"):
        with pytest.raises(ConfigError, match="holds the training records, and a prompt must be public"):
            sample(["../job", name])


def test_a_value_that_python_has_not_leaves_other_records_of_hugging_face_in_their_places(folder):
    far = pa.array([0, 2**62], pa.timestamp("s"))
    table = pa.table({"text": pa.array([b"a b", b"\xff"]).view(pa.string()), "kind": ["cat", "other"], "when": far})
    datasets.DatasetDict({"train": datasets.Dataset(table)}).save_to_disk("saved")
    assert documents("saved").train.usable.tolist() == [True, False]
    assert documents("saved", prompt="when").train.usable.tolist() == [False, False]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_missing_value_in_one_file_changes_no_record_of_another(folder, kind):
    """In Parquet, pandas writes a column of integers with a missing one as floats."""
    read = []
    for last in (7, None):
        first = {"text": ["a b", "c d"], "who": [2**53 + 1, 2**53]}
        for name, rows in (("part-1", first), ("part-2", {"text": ["e f", "g h"], "who": [6, last]})):
            table = pd.DataFrame(rows)
            if kind == "parquet":
                table.to_parquet(f"{name}.parquet")
            elif kind == "csv":
                table.to_csv(f"{name}.csv", index=False)
            else:
                table.to_json(f"{name}.jsonl", orient="records", lines=True)
        data = documents(f"part-*.{kind}", user="who").train
        read.append((data.ids.tolist(), data.user_of[:2], data.user_of[3] >= 0))
    assert read[0][0] == read[1][0] and len({*read[0][1]}) == len({*read[1][1]}) == 2
    assert read[0][2] and not read[1][2]


@pytest.fixture
def prompted(folder, dpexp_job):
    """A trained job on prompts of two fields, in the folder `job`."""
    options = ("data.path=train.jsonl", "data.test_path=test.jsonl", "data.prompt='{kind} {who}'", "data.prompts=[]")
    dpexp_job(*JOB, *ONE_ROUND, "sampling=full_batch", *options, "hydra.run.dir=job")
    write_labels("labels.csv", kind=["a", "b"], who=["c", "d"])
    write_labels("shares.csv", kind=["a", "b"], who=["c", "d"], share=[1, -1])
    write_labels("half.csv", kind=["a", None], who=["c", "d"])
    write_labels("some.csv", who=["c", "d"])
    write_labels("empty.csv", kind=[], who=[])
    return dpexp_job


def test_the_loss_is_that_of_the_texts_tokens(folder):
    """Computed by hand from the scores of the model."""
    asked("train.jsonl", [("a b c", "d e f"), ("g", "h")])
    module = LanguageModel(causal_lm("tiny"), torch.optim.SGD)
    for item in documents("train.jsonl", prompt="ask").train:
        batch = {name: value[None] for name, value in item.items()}
        loss, _ = module.loss_and_scores(batch)
        ids, labels = item["input_ids"], item["labels"]
        scores = module.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0].double()
        places = [t for t in range(1, LENGTH) if labels[t] != -100]
        by_hand = [-scores[t - 1].log_softmax(0)[ids[t]] for t in places]
        assert len(places) == int((labels != -100).sum()) and loss.item() == pytest.approx(
            torch.stack(by_hand).mean().item(), rel=1e-5
        )


def test_a_job_learns_to_answer_and_predicts_from_prompts(folder, dpexp_job):
    for name, count in (("train.jsonl", 60), ("test.jsonl", 20)):
        asked(name, [(WORDS[k % 4], "cat") for k in range(count)])
    options = ("data.path=train.jsonl", "data.test_path=test.jsonl", "data.prompt=ask", "data.prompts=[a,b]")
    output = dpexp_job(
        *JOB,
        *options,
        "privacy.enabled=false",
        "sampling.expected_batch_size=20",
        "sampling.epochs=20",
        "optimizer.lr=0.1",
        "tracking=none",
    )
    assert (output / "generated.txt").read_text() == "a → cat\n\nb → cat\n"
    asked("new.jsonl", [("c", "")])
    dpexp_job("predict", str(output), "new.jsonl", "out=found.csv")
    assert (folder / "found.csv").read_text().splitlines()[1].endswith("cat")


@pytest.mark.parametrize("tuning", ["all", "lora"])
def test_every_fine_tuning_fits_the_experiment(folder, dpexp_job, tuning):
    output = dpexp_job(*JOB, f"fine_tuning={tuning}", "data.n=640", "train=false", "tracking=none")
    assert json.loads((output / "result.json").read_text())["rounds"] == 30


@pytest.mark.parametrize("unit", ["block", "user", "prompt"])
def test_one_more_or_less_moves_the_released_sum_by_at_most_s(folder, dpexp_job, unit):
    options = {
        "block": ("data.path=train.txt", "data.unit=block", "data.length=6", "privacy.adjacency=replace_one"),
        "user": ("data.path=train.jsonl", "data.user=who", "data.users=20", "privacy_unit=user"),
        "prompt": ("data.path=train.jsonl", "data.prompt=kind", "data.test_path=test.jsonl"),
    }[unit]
    weights = []
    for changed in (False, True):
        some = texts(60)[(1 if unit == "prompt" else 3) :] if changed else texts(60)
        if unit == "block":  # all words of the first block of a document replaced
            some = [*texts(60)[1:], "o n m l k j g h i" if changed else "a b c d e f g h i"]
        (folder / "train.txt").write_text("\n\n".join(some))
        write("train.jsonl", some)
        dpexp_job(*JOB, *options, *ONE_ROUND, "sampling=full_batch", f"hydra.run.dir=out{changed}")
        weights.append(load_file(folder / f"out{changed}" / "weights.safetensors"))
    moved = math.sqrt(sum(float((weights[0][name] - weights[1][name]).double().square().sum()) for name in weights[0]))
    S, n, replaced = 0.1, 20 if unit == "user" else 60, 1 + (unit == "block")
    assert 0.01 * S < moved * n <= replaced * S * 1.0001


def test_a_document_is_one_record_and_one_without_a_text_contributes_nothing(folder):
    data = documents("train.jsonl").train
    with open("train.jsonl", "a") as file:
        file.write('{"text": 3}\n[1]\n{"text": " "}\n{"text": "a"}\n{"tex\n')
    odd = documents("train.jsonl").train
    assert len(data) == 60 and len(odd) == 65 and torch.equal(odd.ids[:60], data.ids)
    for k in (60, 61, 62, 64):
        with pytest.raises(dpexp.errors.RecordError, match="has no text"):
            odd[k]
    assert odd[63]["attention_mask"].sum() == 2  # a word and the end


def test_without_privacy_records_without_a_text_are_left_out(folder, dpexp_job):
    with open("train.jsonl", "a") as file:
        file.write('{"text": 3}\n\n{"text": " "}\n' * 9)
    job = (*JOB, "data.path=train.jsonl", "data.n=87", "privacy.enabled=false", "tracking=none")
    output = dpexp_job(*job, "sampling.expected_batch_size=30", "sampling.epochs=null", "sampling.steps=2")
    assert json.loads((output / "result.json").read_text())["rounds"] == 2


def test_parts_of_documents_divide_their_users(folder):
    of = {"user": "who", "privacy_unit": "dpexp.User"}
    whole = documents("train.jsonl", **of).train
    parts = [documents("train.jsonl", **of, part={"column": "who", "low": a, "high": b}).train
             for a, b in ((0, 0.4), (0.4, 1))]  # fmt: skip
    assert sum(map(len, parts)) == len(whole) == 60 and all(parts)
    assert sum(len({*part.user_of}) for part in parts) == 20
    assert sorted(ids.tolist() for part in parts for ids in part.ids) == sorted(ids.tolist() for ids in whole.ids)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "txt"])
def test_texts_in_other_files_are_the_same(folder, suffix):
    some = pd.read_json("train.jsonl", lines=True)
    if suffix == "txt":
        (folder / "other.txt").write_text("\n\n".join(some["text"]))
    else:
        some.to_csv("other.csv", index=False) if suffix == "csv" else some.to_parquet("other.parquet")
        labelled = [LabelledTexts(path, "test.jsonl", "tiny", LENGTH, "kind", ["cat", "other"]).train
                    for path in ("train.jsonl", f"other.{suffix}")]  # fmt: skip
        assert labelled[0].labels == labelled[1].labels
    assert torch.equal(documents(f"other.{suffix}").train.ids, documents("train.jsonl").train.ids)


def test_fields_labels_and_users_have_one_spelling(folder):
    for path in ("train.jsonl", "test.jsonl"):
        some = {"\u00fc": ["a b c"] * 3, "kind": ["true", "TRUE", "False"], "who": ["\u00e9", "e\u0301", "x"]}
        pd.DataFrame(some).to_json(path, orient="records", lines=True)
    labelled = LabelledTexts("train.jsonl", "test.jsonl", "tiny", LENGTH, "kind", [True, "FALSE"], text="u\u0308")
    assert labelled.train.labels == labelled.test.labels == [0, 0, 1] and labelled.class_names == ["True", "False"]
    some = Documents("train.jsonl", "test.jsonl", "tiny", LENGTH, "u\u0308", user="who", privacy_unit="dpexp.User")
    assert some.train.usable.all() and some.train.user_of == [1, 1, 0]


def test_the_step_of_gpt2_is_traced(folder):
    torch.manual_seed(0)
    model = Lora(rank=2, head=False)(causal_lm("tiny"))
    assert is_causal(model) and all(".lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    engine, batch = engine_of(LanguageModel(model)), default_collate([documents().train[k] for k in range(4)])
    sums_of(engine, lambda own, record: own.loss_and_scores(record)[0], batch)
    assert engine.step.mode == "traced"


def test_frozen_weights_in_bfloat16_have_adapters_in_float32(folder, dpexp_job):
    options = ("model.dtype=bfloat16", "sampling.expected_batch_size=30", "optimizer.lr=0.05", "tracking=none")
    job = dpexp_job(*JOB, *options, "sampling.epochs=10", "privacy.epsilon=100", "data.prompts=[a b]")
    model = dpexp.load(job)
    kinds = {(".lora_" in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    metrics = json.loads((job / "result.json").read_text())["metrics"]
    before = perplexity(causal_lm("tiny"), documents().test)
    assert metrics["test_perplexity"] < 0.9 * before
    base = AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.bfloat16)
    adapted, tokens = PeftModel.from_pretrained(base, job / "adapter").eval(), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(adapted(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_record_moves_the_adapters_sum_by_at_most_s_in_either_dtype(folder, dtype):
    torch.manual_seed(0)
    model = Lora(rank=2, head=False)(causal_lm("tiny", dtype))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    module = LanguageModel(model)
    batch = default_collate([documents().train[k] for k in range(6)])

    def loss_of(own, record):
        return own.loss_and_scores(record)[0]

    S, engine = 0.1, engine_of(module, S=0.1)
    found = sums_of(engine, loss_of, batch)
    assert engine.step.mode == "traced" and {value.dtype for value in found.values()} == {torch.float32}
    assert relative_error(found, sums_apart(engine, loss_of, batch)) < {"float32": 1e-5, "bfloat16": 0.02}[dtype]
    for k in range(6):
        others = sums_of(engine, loss_of, rows_of(batch, [j for j in range(6) if j != k]))
        alone = sums_of(engine, loss_of, rows_of(batch, [k]))
        assert 0.01 * S < norm_of(alone) <= S and norm_of(found, without=others) <= S * (1 + 1e-6)


def test_the_plan_says_how_long_test_texts_are_and_how_many_are_cut(folder, dpexp_job, capsys):
    asked("test.jsonl", [("a", "b c"), ("a", "b " * 20), ("a b c", "d")])  # 4, 22 and 5 tokens, with the end
    options = ("data.path=train.jsonl", "data.test_path=test.jsonl", "data.prompt=ask", "train=false", "tracking=none")
    dpexp_job(*JOB, *options, "sampling.expected_batch_size=30")
    said = capsys.readouterr().out
    assert (
        "Test texts have 10.3 tokens on average, at most 22; data.length=12 cuts 1 of 3. A round has about 210 " in said
    )


def write_prompts():
    pd.DataFrame({"text": ["a b", "d e f"], "id": [7, 8]}).to_csv("prompts.csv", index=False)


def perplexity(model, texts):
    """exp of the mean loss of all tokens but each text's first, one text at a time."""
    loss, count = 0.0, 0
    with torch.no_grad():
        for ids, size in zip(texts.ids.long(), texts.sizes, strict=True):
            scores = model.eval()(ids[None, :size]).logits[0, :-1]
            loss += torch.nn.functional.cross_entropy(scores, ids[1:size], reduction="sum").item()
            count += size - 1
    return math.exp(loss / count)


def test_a_job_gives_perplexity_adapter_continuations_and_a_served_model(folder, dpexp_job, capsys):
    write_prompts()
    job = dpexp_job(
        *JOB, "sampling.expected_batch_size=30", "optimizer.lr=0.05", "sampling.epochs=10", "privacy.epsilon=100"
    )
    model, ids = dpexp.load(job), documents().test
    metrics = json.loads((job / "result.json").read_text())["metrics"]
    assert metrics["test_perplexity"] == pytest.approx(perplexity(model, ids), rel=1e-5)
    counts = Counter(token for text, size in zip(ids.ids, ids.sizes, strict=True) for token in text[1:size].tolist())
    shares = [count / counts.total() for count in counts.values()]
    unigram = math.exp(-sum(share * math.log(share) for share in shares))
    assert metrics["test_unigram_perplexity"] == pytest.approx(unigram, rel=1e-5)
    assert f"; always the frequencies of its tokens: {unigram:.4g}" in capsys.readouterr().out
    assert metrics["test_perplexity"] < 0.9 * perplexity(causal_lm("tiny"), ids)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained("tiny")
        adapted = PeftModel.from_pretrained(base, job / "adapter").eval()
        tokens = ids[0]["input_ids"][None]
        before = causal_lm("tiny").eval()(tokens).logits
        assert torch.allclose(adapted(tokens).logits, model(tokens).logits, atol=1e-6)
        assert not torch.allclose(before, model(tokens).logits, atol=1e-3)
    assert "ε" in (job / "adapter" / "README.md").read_text()
    found = predict([str(job), "prompts.csv"])
    assert list(found) == ["text", "id", "continuation"] and len(found) == 2
    whole = model.generate(torch.tensor([[2, 3]]), max_length=LENGTH, do_sample=False, pad_token_id=0)
    assert found["continuation"][0].split() == [WORDS[k - 2] for k in whole[0, 2:].tolist() if k > 1]
    assert (job / "generated.txt").read_text().startswith("a b → ")
    served = mlflow.pyfunc.load_model(str(job / "mlflow_model")).predict(pd.read_csv("prompts.csv")[["text"]])
    assert served["continuation"].tolist() == found["continuation"].tolist()
    mlflow.set_tracking_uri(f"sqlite:///{folder}/outputs/mlflow.db")
    run = (job / "mlflow_run_id").read_text()
    names = {artifact.path for artifact in mlflow.MlflowClient().list_artifacts(run)}
    assert {"generated.txt", "adapter", "card.md"} <= names


def test_a_classifier_of_texts_predicts_names_and_its_adapter_has_the_head(folder, dpexp_job):
    write_prompts()
    job = dpexp_job(
        "experiment=finetune_classifier", "model.name=tiny", "data.path=train.jsonl", "data.test_path=test.jsonl",
        "data.n=60", "data.label=kind", "data.class_names=[cat,other]", f"data.length={LENGTH}", "tracking=none",
        "sampling.expected_batch_size=30", "sampling.epochs=2", "trainer.num_evaluations=0",
    )  # fmt: skip
    assert "test_accuracy" in json.loads((job / "result.json").read_text())["metrics"]
    found = predict([str(job), "prompts.csv"])
    assert {*found["prediction"]} <= {"cat", "other"} and [*(found["p_cat"] + found["p_other"])] == pytest.approx(
        [1, 1]
    )
    base = AutoModelForSequenceClassification.from_pretrained("tiny", num_labels=2, pad_token_id=0)
    model, adapted = dpexp.load(job), PeftModel.from_pretrained(base, job / "adapter").eval()
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.allclose(adapted(tokens).logits, model(tokens).logits, atol=1e-6)


@pytest.mark.parametrize(
    "overrides, content, sentence",
    [
        ((), "\n\n", "data.module: the training set is empty"),
        (("data.test_path=train.txt",), "\n\n", "data.test_path=train.txt has no record with a text in text"),
        (("data.path=none.txt",), None, "data.path=none.txt cannot be read: No such file"),
        (("data.path=train.jsonl", "data.text=body"), None, "data: none of the records tried, spread over the"),
        (("data.test_path=test.jsonl", "data.text=body"), None, "data.test_path=test.jsonl has no column body"),
        (("data.path=train.jsonl", "data.user=name", "privacy_unit=user", "data.users=20"), None,
         "data: the training set is empty, or no record has a known user"),
        (("privacy_unit=user", "data.users=20"), None, "data.user=null: privacy_unit=user needs the name of the field"),
        (("data.unit=line",), None, "data.unit=line is unknown; choose one of document, block"),
        (("data.unit=block",), None, "data.unit=block with privacy.adjacency=None: neighbours differ by one block"),
        (("model.dtype=float16",), None, "model.dtype=float16 is unknown; choose float32 or bfloat16"),
        (("data.length=33",), None, "data.length=33 must lie between 2 and the 32 tokens"),
        (("data.n=???",), None, "data.n must be given"),
        (("model.name=./nowhere",), None, "model.name=./nowhere is neither a folder nor a name on the hub"),
        (("data.path=tiny",), None, "data.path=tiny is a data set of kind json"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence_before_any_release(folder, dpexp_job, overrides, content, sentence):
    if content is not None:
        (folder / "train.txt").write_text(content)
    with pytest.raises(SystemExit, match=rf"^dpexp: {re.escape(sentence)}"):
        dpexp_job(*JOB, *ONE_ROUND, "sampling=full_batch", *overrides, "hydra.run.dir=out")
    assert not (ledger := folder / "out" / "ledger.jsonl").exists() or not read_ledger(ledger)


def test_a_tokenizer_without_any_token_to_pad_with_and_a_long_prompt_are_refused(folder):
    with pytest.raises(ConfigError, match=r"leaves none of data.length=12"):
        documents().encode(pd.DataFrame({"text": ["a " * 12]}))
    tokenizer_with().save_pretrained("bare")
    AutoModelForCausalLM.from_pretrained("tiny").config.save_pretrained("bare")
    with pytest.raises(ConfigError, match="neither a padding nor an end-of-text token"):
        Documents("train.txt", "test.txt", "bare", LENGTH)


def test_unknown_labels_of_test_texts_are_refused_and_of_training_texts_contribute_nothing(folder):
    data = LabelledTexts("train.jsonl", "test.jsonl", "tiny", LENGTH, "kind", ["cat", "dog"])
    with pytest.raises(ConfigError, match=r"a record's field kind is none of data.class_names"):
        data.test  # noqa: B018
    other = next(k for k, text in enumerate(texts(60)) if "cat" not in text)
    with pytest.raises(dpexp.errors.RecordError, match="none of the labels"):
        data.train[other]
