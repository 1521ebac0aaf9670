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
from files import save, word_tokenizer, write_lines
from jobs import refusal_of, result_of
from pages import composed
from peft import PeftModel
from reference import engine_of, norm_of, relative_error, rows_of, sums_apart, sums_of
from sensitivity import ONE_ROUND, moved_by
from torch.nn import functional as F
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.commands.sample import sample
from dpexp.commands.saved_jobs import predict
from dpexp.errors import ConfigError, RecordError
from dpexp.training.data.documents import Documents, LabelledTexts
from dpexp.training.language import LanguageModel, causal_lm, is_causal
from dpexp.training.pretrained import Lora

WORDS = [*"abcdefghijklmno", "cat"]
TOKENS = ["<end>", "<unknown>", *WORDS]
KINDS = "kind", ["cat", "other"]
LENGTH = 12
JOB = (
    "experiment=finetune_lm", "model.name=tiny", "data.path=train.txt", "data.test_path=test.txt", "data.n=60",
    f"data.length={LENGTH}", "data.prompts=[a b]", "trainer.num_evaluations=0",
)  # fmt: skip
ALL_AT_ONCE = (*ONE_ROUND, "~sampling.expected_batch_size")


def texts(count, seed=0):
    """Sentences of one to twelve words, each of which the next word in WORDS follows."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1, 13, (2, count), generator=generator).T.tolist()
    return [" ".join(WORDS[(first + k) % 16] for k in range(length)) for first, length in drawn]


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
    word_tokenizer(TOKENS, eos_token="<end>").save_pretrained(path)
    return path


def fill(folder, tiny):
    """Puts the model in `tiny`, and texts, into a folder."""
    shutil.copytree(tiny, folder / "tiny")
    for name, some, between in (("train", texts(60), "\n\n"), ("test", texts(20, seed=1), "\n \n\n")):
        (folder / f"{name}.txt").write_text(between.join(some))
        write(folder / f"{name}.jsonl", some)


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny):
    """Such a folder; file names are relative to it."""
    fill(tmp_path, tiny)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


def write(path, some):
    """Records of three to a user, with a label."""
    kinds = ["cat" if "cat" in text else "other" for text in some]
    write_lines(path, [{"text": text, "who": f"u{k // 3}", "kind": kinds[k]} for k, text in enumerate(some)])


def documents(path="train.txt", test="test.txt", length=LENGTH, **options):
    return Documents(path, test, "tiny", length, **options)


def labelled(path, column="kind", names=KINDS[1], **options):
    return LabelledTexts(path, "test.jsonl", "tiny", LENGTH, column, names, **options)


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
    seen = [(user, {*item["labels"].tolist()} - {0, -100}) for user, item in zip(blocks.user_of, blocks, strict=True)]
    assert {(user, *words) for user, words in seen} == {(k // 3, k + 2) for k in range(len(some))}


def asked(path, rows):
    write_lines(path, [{"ask": ask, "text": text} for ask, text in rows])


CHAT = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}a {% endif %}"


def turns(*said):
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[k % 2], "content": content} for k, content in enumerate(said)]


def words_of(item):
    """The words that are read, and those with a loss."""
    kept = {"input_ids": item["input_ids"][item["attention_mask"].bool()], "labels": item["labels"]}
    return [[TOKENS[k] for k in ids.tolist() if k != -100] for ids in kept.values()]


def assert_read(data, expected):
    """expected: the words of the first record, those with a loss after |; None: it cannot be used."""
    assert data.usable.tolist() == [expected is not None]
    if expected is None:
        with pytest.raises(RecordError, match="has no text, no token to predict, or none of the labels"):
            data[0]
    else:
        words = expected.split()
        assert words_of(data[0]) == [[word for word in words if word != "|"], words[words.index("|") + 1 :]]


FILLED = "{kind} b {number}"


@pytest.mark.parametrize(
    "prompt, row, expected",
    [
        ("ask", '{"ask": "a b", "text": "c d"}', "a b | c d <end>"),
        ("ask", '{"ask": "a b c", "text": "d d d d d d d d d d d d d d"}', "a b c | d d d d d d d d d"),
        ("ask", '{"ask": "a a a a a a a a a a a a a", "text": "c"}', None),
        ("ask", '{"ask": "a", "text": null}', None),
        ("ask", '{"ask": null, "text": "c d"}', None),
        ("missing", '{"ask": "a", "text": "c d"}', None),
        (FILLED, '{"text": "c d", "kind": "a", "number": 3}', "a b <unknown> | c d <end>"),
        (FILLED, '{"text": "c d", "kind": "a", "number": 3.0}', "a b <unknown> | c d <end>"),
        (FILLED, '{"text": "c d", "kind": " ", "number": 3}', None),
        (FILLED, '{"text": "c d", "kind": ["a"], "number": 3}', None),
        (FILLED, '{"text": "c d", "kind": "a"}', None),
        (FILLED, '{"text": 3, "kind": "a", "number": 3}', None),
        (FILLED, '{"text": "c d", "kind": "a a a a a a a a a a a a", "number": 3}', None),
    ],
)
def test_a_prompt_is_filled_with_fields_and_has_no_loss(folder, prompt, row, expected):
    (folder / "train.jsonl").write_text(row)
    assert_read(documents("train.jsonl", prompt=prompt).train, expected)


@pytest.mark.parametrize(
    "said, expected",
    [
        (turns("b c", "d e"), "<unknown> b c a | d e"),
        (turns("b", "c", "d", "e"), "<unknown> b a c <unknown> d a | e"),
        (turns("b c"), None),
        (turns("b c", ""), None),
        (turns("b c", 3), None),
        ("b c", None),
        ([{"role": "assistant"}], None),
        ([3], None),
        (None, None),
    ],
)
def test_the_assistants_last_turn_has_a_loss(folder, said, expected):
    (folder / "chat.jinja").write_text(CHAT)
    write_lines("train.jsonl", [{"talk": said}])
    assert_read(documents("train.jsonl", messages="talk", chat_template="chat.jinja").train, expected)


def test_a_template_that_rewrites_earlier_turns_leaves_no_text(folder):
    (folder / "chat.jinja").write_text("{{ messages | length }} " + CHAT)
    write_lines("train.jsonl", [{"talk": turns("b", "c")}])
    assert_read(documents("train.jsonl", messages="talk", chat_template="chat.jinja").train, None)


@pytest.mark.usefixtures("bare")
def test_conversations_train_the_tokenizers_template_and_predict_answers(folder, dpexp_job):
    word_tokenizer(TOKENS, eos_token="<end>", chat_template=CHAT).save_pretrained("tiny")
    for name, count in (("train.jsonl", 60), ("test.jsonl", 20)):
        write_lines(name, [{"talk": turns(WORDS[k % 4], "cat")} for k in range(count)])
    output = dpexp_job(
        *JOB, "data.path=train.jsonl", "data.test_path=test.jsonl", "data.messages=talk", "data.prompts=[b]",
        "privacy.enabled=false", "sampling.expected_batch_size=20", "sampling.epochs=20", "optimizer.lr=0.1",
        "tracking=none",
    )  # fmt: skip
    assert (output / "generated.txt").read_text().startswith("b → cat")
    write_lines("new.jsonl", [{"talk": turns("c")}])
    dpexp_job("predict", str(output), "new.jsonl", "out=found.jsonl.csv")
    assert "cat" in (folder / "found.jsonl.csv").read_text().splitlines()[1]


def test_the_records_of_every_kind_of_file_are_the_same(folder):
    """Several files, tables, and data sets of Hugging Face, in which a label may be a number with a name."""
    rows = pd.read_json("train.jsonl", lines=True)
    for path, some in (
        ("part-1.jsonl", rows[:7]),
        ("part-2.jsonl", rows[7:]),
        ("some.csv", rows),
        ("some.parquet", rows),
    ):
        save(some, path)
    (folder / "some.txt").write_text("\n\n".join(rows["text"]))
    saved = datasets.Dataset.from_pandas(rows).cast_column("kind", datasets.ClassLabel(names=KINDS[1]))
    datasets.DatasetDict({"train": saved, "test": saved.select([0, 1])}).save_to_disk("saved")
    whole, by_kind = documents("train.jsonl", user="who").train, labelled("train.jsonl", user="who").train
    for path in ("part-*.jsonl", "some.csv", "some.parquet", "saved"):
        found, labels = documents(path, user="who").train, labelled(path, user="who").train
        assert torch.equal(found.ids, whole.ids) and labels.labels == by_kind.labels
        assert found.user_of == labels.user_of == whole.user_of
    assert torch.equal(documents("some.txt").train.ids, whole.ids) and len(documents("saved", "saved").test) == 2


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
        ({"prompt": "kind", "unit": "block"}, "data.prompt with data.unit=block"),
        ({"prompt": "missing"}, "data.test_path=test.jsonl has no column missing, which data.prompt names"),
        ({"unit": "packed"}, "data.unit=packed is unknown; choose one of document, block, and privacy_unit=user for"),
        ({"prompt": "{kind}{who}", "prompts": ["a"]}, "data.prompts: a must have the fields kind, who"),
    ],
)
def test_prompts_and_conversations_that_cannot_be_used_are_refused(folder, options, sentence):
    (folder / "bad.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        made = documents("train.jsonl", "test.jsonl", **options)
        _ = made.test, made.example()


@pytest.mark.usefixtures("bare")
def test_samples_are_records_of_the_labels_asked_for(folder, dpexp_job, capsys):
    for name, count in (("train.jsonl", 60), ("test.jsonl", 20)):
        write_lines(name, [{"kind": "ab"[k % 2], "text": "cat cat" if k % 2 else "d"} for k in range(count)])
    options = ("data.path=train.jsonl", "data.test_path=test.jsonl", "data.prompt='{kind} c'", "data.prompts=[]")
    job = dpexp_job(
        *JOB, *options, "privacy.enabled=false", "sampling.expected_batch_size=30", "sampling.epochs=60",
        "fine_tuning=all", "optimizer.lr=0.03", "tracking=none",
    )  # fmt: skip
    labels = pd.DataFrame({"kind": ["a", "b", "c"], "share": [1, 3, 0]})
    command = [str(job), save(labels, "labels.csv"), "count=80", "batch=32", "temperature=0.3"]
    found = sample(command)
    assert "The model is not private, and nor are they" in capsys.readouterr().out
    lines = (folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found == sample(command) and len(found) == 80
    kinds = Counter(record["kind"] for record in found)
    assert {*found[0]} == {"kind", "text"} and kinds.keys() == {"a", "b"} and 48 <= kinds["b"] <= 70  # 60 are expected
    answers = {"a": "d", "b": "cat cat"}
    assert sum(record["text"] == answers[record["kind"]] for record in found) > 72
    assert predict([str(job), "labels.csv"])["continuation"].str.strip().tolist()[:2] == [*answers.values()]
    assert documents("samples.jsonl", prompt="{kind} c").train.usable.all(), "they may be trained on"


@pytest.fixture(scope="module")
def prompted_home(tmp_path_factory, jobs_in, tiny):
    """A folder with a trained job on prompts of two fields, in the folder `job`; its frozen weights are in bfloat16."""
    home = tmp_path_factory.mktemp("prompted")
    fill(home, tiny)
    options = ("data.path=train.jsonl", "data.test_path=test.jsonl", "data.prompt='{kind} {who}'", "data.prompts=[]")
    with jobs_in(home) as run:
        run(*JOB, *ALL_AT_ONCE, *options, "model.dtype=bfloat16", "hydra.run.dir=job")
    for name, content in (
        ("labels", "kind,who\na,c\nb,d\n"), ("shares", "kind,who,share\na,c,1\nb,d,-1\n"), ("some", "who\nc\nd\n"),
        ("half", "kind,who\na,c\n,d\n"), ("empty", "kind,who\n"),
    ):  # fmt: skip
        (home / f"{name}.csv").write_text(content)
    return home


@pytest.fixture
def prompted(prompted_home, monkeypatch):
    monkeypatch.chdir(prompted_home)
    return prompted_home


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("", "sample needs FILE, public prompts with the fields kind, who"),
        ("train.jsonl", "sample: train.jsonl holds the training records, and a prompt must be public"),
        ("some.csv", "data has no column kind, which data.prompt names"),
        ("half.csv", "data: row 1 has no prompt: kind, who must be there"),
        ("empty.csv", "sample: empty.csv holds no prompt"),
        ("shares.csv count=3", "sample: each share in shares.csv must be a finite number of at least 0"),
        ("labels.csv count=0", "sample.count=0 must be an integer of at least 1"),
        ("labels.csv temperature=0", "sample.temperature=0 must be a finite number above 0"),
        ("labels.csv top_p=warm", "sample.top_p=warm must lie in (0, 1]"),
        ("labels.csv seed=-1", "sample.seed=-1 must lie in [0, "),
        ("labels.csv lenght=3", "sample: lenght is unknown; known: data, uri, count, temperature, top_p"),
        ("labels.csv out=none/samples.jsonl", "out=none/samples.jsonl cannot be written (No such file"),
    ],
)
def test_samples_that_cannot_be_made_are_refused(prompted, arguments, sentence):
    with pytest.raises(ConfigError, match=rf"^{re.escape(sentence)}"):
        sample(["job", *arguments.split()])


def test_a_job_with_a_known_noise_seed_and_its_samples_are_not_called_private(prompted, capsys):
    sample(["job", "labels.csv"])
    assert "The model is not private, and nor are they" in capsys.readouterr().out
    card = (prompted / "job" / "card.md").read_text()
    assert "**Not private**" in card and "ε" not in card


def test_training_records_are_no_prompts_from_another_folder_or_by_another_name(prompted, monkeypatch):
    os.link("train.jsonl", "linked.jsonl")
    Path("other").mkdir()
    os.symlink(prompted / "tiny", "other/tiny")
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
    save(pd.DataFrame({"text": ["a b", "c d"], "who": [2**53 + 1, 2**53]}), f"part-1.{kind}")
    read = []
    for last in (7, None):
        save(pd.DataFrame({"text": ["e f", "g h"], "who": [6, last]}), f"part-2.{kind}")
        data = documents(f"part-*.{kind}", user="who").train
        read.append(data.ids.tolist())
        assert data.user_of[0] != data.user_of[1] and (data.user_of[3] >= 0) == (last is not None)
    assert read[0] == read[1]


def test_the_loss_is_that_of_the_texts_tokens(folder):
    """Of each text alone, without padding."""
    asked("train.jsonl", [("a b c", "d e f"), ("g", "h")])
    module = LanguageModel(causal_lm("tiny"), torch.optim.SGD)
    for item in documents("train.jsonl", prompt="ask").train:
        size = int(item["attention_mask"].sum())
        scores = module.model(item["input_ids"][None, :size]).logits[0, :-1]
        expected = F.cross_entropy(scores, item["labels"][1:size], ignore_index=-100)
        loss, _ = module.loss_and_scores({name: value[None] for name, value in item.items()})
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.usefixtures("bare")
def test_another_block_moves_the_released_sum_by_at_most_2_s(folder, dpexp_job):
    def with_document(text):
        (folder / "train.txt").write_text("\n\n".join([text, *texts(60)[1:]]))

    with_document("a b c d e f g h i")  # of which a block has six words
    block = ("data.unit=block", "data.length=6", "privacy.adjacency=replace_one", "~sampling.expected_batch_size")
    moved = moved_by(lambda: with_document("o n m l k j g h i"), dpexp_job, 60, *JOB, *block)
    assert 0.01 * 0.1 < moved <= 2 * 0.1 * 1.0001


def test_parts_of_documents_divide_their_users(folder):
    of = {"user": "who", "privacy_unit": "dpexp.User"}
    whole, *parts = (
        documents("train.jsonl", **of, part=part).train
        for part in (None, {"column": "who", "low": 0, "high": 0.4}, {"column": "who", "low": 0.4, "high": 1})
    )
    assert all(parts) and sum(len({*part.user_of}) for part in parts) == 20
    assert sorted(ids.tolist() for part in parts for ids in part.ids) == sorted(whole.ids.tolist())


def test_fields_labels_and_users_have_one_spelling(folder):
    some = {"\u00fc": ["a b c"] * 3, "kind": ["true", "TRUE", "False"], "who": ["\u00e9", "e\u0301", "x"]}
    for path in ("train.jsonl", "test.jsonl"):
        save(pd.DataFrame(some), path)
    found = labelled("train.jsonl", names=[True, "FALSE"], text="u\u0308")
    assert found.train.labels == found.test.labels == [0, 0, 1] and found.class_names == ["True", "False"]
    train = documents("train.jsonl", text="u\u0308", user="who", privacy_unit="dpexp.User").train
    assert train.usable.all() and train.user_of == [1, 1, 0]


def test_frozen_weights_in_bfloat16_have_adapters_in_float32(prompted):
    model = dpexp.load("job")
    kinds = {(".lora_" in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    base, tokens = AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.bfloat16), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        before = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, "job/adapter").eval()(tokens).logits
        assert torch.equal(adapted, model(tokens).logits) and not torch.equal(adapted, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_record_moves_the_adapters_sum_by_at_most_s_in_either_dtype(folder, dtype):
    torch.manual_seed(0)
    model = Lora(rank=2, head=False)(causal_lm("tiny", dtype))
    assert is_causal(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
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
    expected = "Test texts have 10.3 tokens on average, at most 22; data.length=12 cuts 1 of 3. A round has about 210 "
    assert expected in said


PROMPTS = pd.DataFrame({"text": ["a b", "c d e f", "b c", "k l m"], "id": [*range(4)]})


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
    job = dpexp_job(
        *JOB, "sampling.expected_batch_size=30", "optimizer.lr=0.05", "sampling.epochs=10", "privacy.epsilon=100",
        "tracking.uri=sqlite:///runs.db",
    )  # fmt: skip
    model, test = dpexp.load(job), documents().test
    metrics = result_of(job)["metrics"]
    assert metrics["test_perplexity"] == pytest.approx(perplexity(model, test), rel=1e-5)
    assert metrics["test_perplexity"] < 0.9 * perplexity(causal_lm("tiny"), test)
    counts = Counter(token for item in test for token in item["labels"][1:].tolist() if token != -100)
    shares = torch.tensor([*counts.values()]).double() / counts.total()
    unigram = float(shares.pow(-shares).prod())
    assert metrics["test_unigram_perplexity"] == pytest.approx(unigram, rel=1e-5)
    assert f"; always the frequencies of its tokens: {unigram:.4g}" in capsys.readouterr().out
    base, tokens = AutoModelForCausalLM.from_pretrained("tiny").eval(), test[0]["input_ids"][None]
    with torch.no_grad():
        before = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, job / "adapter").eval()(tokens).logits
        assert torch.allclose(adapted, model(tokens).logits, atol=1e-6)
        assert not torch.allclose(adapted, before, atol=1e-3)
    assert "ε" in (job / "adapter" / "README.md").read_text()
    found = predict([str(job), save(PROMPTS, "prompts.csv")])
    assert list(found) == ["text", "id", "continuation"] and len(found) == 4
    likeliest = sample([str(job), "prompts.csv", "temperature=0.0001"])
    assert {record["text"] for record in likeliest} == {*(found["text"] + found["continuation"])}
    said = "They cost no ε of their own: if the prompts are public, they and the model are (ε = 99.9"
    assert said in capsys.readouterr().out and len(sample([str(job), "count=5"])) == 5
    whole = model.generate(torch.tensor([[2, 3]]), max_length=LENGTH, do_sample=False, pad_token_id=0)
    assert found["continuation"][0].split() == [TOKENS[k] for k in whole[0, 2:].tolist() if k > 1]
    assert (job / "generated.txt").read_text().startswith("a b → ")
    served = mlflow.pyfunc.load_model(str(job / "mlflow_model")).predict(PROMPTS[["text"]])
    assert served["continuation"].tolist() == found["continuation"].tolist()
    run, client = (job / "mlflow_run_id").read_text(), mlflow.MlflowClient(f"sqlite:///{folder}/runs.db")
    assert {"generated.txt", "adapter", "card.md"} <= {artifact.path for artifact in client.list_artifacts(run)}


@pytest.mark.usefixtures("bare")
def test_a_classifier_of_texts_predicts_names_and_its_adapter_has_the_head(folder, dpexp_job):
    job = dpexp_job(
        "experiment=finetune_classifier", "model.name=tiny", "data.path=train.jsonl", "data.test_path=test.jsonl",
        "data.n=60", "data.label=kind", "data.class_names=[cat,other]", f"data.length={LENGTH}", "tracking=none",
        "sampling.expected_batch_size=30", "sampling.epochs=2", "trainer.num_evaluations=0",
    )  # fmt: skip
    assert "test_accuracy" in result_of(job)["metrics"]
    found = predict([str(job), save(PROMPTS, "prompts.csv")])
    assert {*found["prediction"]} <= {"cat", "other"}
    assert [*(found["p_cat"] + found["p_other"])] == pytest.approx([1] * 4)
    base = AutoModelForSequenceClassification.from_pretrained("tiny", num_labels=2, pad_token_id=0)
    model, adapted = dpexp.load(job), PeftModel.from_pretrained(base, job / "adapter").eval()
    tokens = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.allclose(adapted(tokens).logits, model(tokens).logits, atol=1e-6)


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        ("data.path=empty.txt", "data.module: the training set is empty"),
        ("data.test_path=empty.txt", "data.test_path=empty.txt has no record with a text in text"),
        ("data.path=train.jsonl data.text=body", "data: none of the records tried, spread over the"),
        ("data.test_path=test.jsonl data.text=body", "data.test_path=test.jsonl has no column body"),
        ("data.path=train.jsonl data.user=name privacy_unit=user data.users=20",
         "data: the training set is empty, or no record has a known user"),
        ("privacy_unit=user data.users=20", "data.user=null: privacy_unit=user needs the name of the field"),
        ("data.path=tiny", "data.path=tiny is a data set of kind json"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence_before_any_release(folder, dpexp_job, overrides, sentence):
    (folder / "empty.txt").write_text("\n\n")
    with pytest.raises(SystemExit, match=rf"^dpexp: {re.escape(sentence)}"):
        dpexp_job(*JOB, *ALL_AT_ONCE, *overrides.split(), "hydra.run.dir=out")
    assert not (ledger := folder / "out" / "ledger.jsonl").exists() or not read_ledger(ledger)


@pytest.fixture(scope="module")
def options():
    return composed([*JOB, *ALL_AT_ONCE])


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("data.path=none.txt", "data.path=none.txt cannot be read: No such file"),
        ("data.unit=line", "data.unit=line is unknown; choose one of document, block"),
        ("data.unit=block", "data.unit=block with privacy.adjacency=None: neighbours differ by one block"),
        ("model.dtype=float16", "model.dtype=float16 is unknown; choose float32 or bfloat16"),
        ("data.length=33", "data.length=33 must lie between 2 and the 32 tokens"),
        ("data.n=???", "data.n must be given"),
        ("model.name=./nowhere", "model.name=./nowhere is neither a folder nor a name on the hub"),
    ],
)
def test_options_that_cannot_be_used_get_one_sentence(folder, options, override, sentence):
    assert refusal_of(options, [override], folder).startswith(sentence)


def test_a_tokenizer_without_any_token_to_pad_with_and_a_long_prompt_are_refused(folder):
    with pytest.raises(ConfigError, match=r"leaves none of data.length=12"):
        documents().encode(pd.DataFrame({"text": ["a " * 12]}))
    word_tokenizer(TOKENS).save_pretrained("bare")
    AutoModelForCausalLM.from_pretrained("tiny").config.save_pretrained("bare")
    with pytest.raises(ConfigError, match="neither a padding nor an end-of-text token"):
        Documents("train.txt", "test.txt", "bare", LENGTH)


def test_unknown_labels_of_test_texts_are_refused(folder):
    with pytest.raises(ConfigError, match=r"a record's field kind is none of data.class_names"):
        labelled("train.jsonl", names=["cat", "dog"]).test  # noqa: B018
