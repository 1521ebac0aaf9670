"""Scripts of transformers' and TRL's tutorials, made private by the lines of docs/from_others.md."""

import math
import runpy
import sys
from pathlib import Path
from unittest import mock

import mlflow
import pytest
import torch
from datasets import Dataset
from files import word_tokenizer, write_lines
from pages import DOCS, blocks
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from trl import SFTConfig

import dpexp
from dpexp.integrations.trl import PrivateSFTTrainer

SCRIPTS = Path(__file__).parent / "tutorials"
DIFFS = dict(blocks(DOCS / "from_others.md", "diff"))
WORDS = [*"abcdefghijklmno", "cat"]
N = 80
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"


def words(i, count):
    return " ".join(WORDS[(i + k) % 16] for k in range(count))


def messages(i):
    return [{"role": "user", "content": words(i, 2)}, {"role": "assistant", "content": words(i + 2, 2)}]


ROWS = {
    "sequence_classification.py": lambda i: {"text": words(i, 5 + i % 3), "label": i % 2},
    "language_modeling.py": lambda i: {"answers": [words(i, 5), words(i, 2)]},
    "sft_adapters.py": lambda i: {"prompt": words(i, 2), "completion": f" {words(i + 2, 2)}"},
    "sft_messages.py": lambda i: {"messages": messages(i)},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny Qwen2 and its tokenizer."""
    words = ["<end>", "<pad>", "<unknown>", "user", "assistant", *WORDS]
    tokenizer = word_tokenizer(words, eos_token="<end>", pad_token="<pad>", model_max_length=16, chat_template=TEMPLATE)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, pad_token_id=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16, initializer_range=0.5,
        )
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def private(name):
    """A tutorial's script with the lines of docs/from_others.md, and how many these are."""
    script = (SCRIPTS / name).read_text()
    for hunk in DIFFS[name].split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
        assert script.count(before) == 1, f"{name} has not the lines\n{before}"
        script = script.replace(before, after)
    return script, sum(line[0] == "+" for line in DIFFS[name].splitlines())


@pytest.mark.parametrize("name", ROWS)
def test_a_tutorial_trains_privately_with_four_changed_lines(name, tiny, tmp_path, monkeypatch, capsys, empty_store):
    (tmp_path / "data").mkdir()
    for part, count in (("train", N), ("test", 16)):
        write_lines(tmp_path / "data" / f"{part}.jsonl", map(ROWS[name], range(count)))
    script, changed = private(name)
    (tmp_path / name).write_text(script)
    output = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", [name, str(tiny), str(tmp_path / "data"), str(output)])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/runs.db")
    trainer = runpy.run_path(str(tmp_path / name))["trainer"]
    assert changed <= 4

    ledger = dpexp.read_ledger(output / "ledger.jsonl")
    assert ledger.rounds == trainer.plan.ledger().rounds and trainer.private.rounds_done == trainer.plan.rounds == 4
    epsilon = dpexp.epsilon(ledger, delta=1e-3)
    assert 7 < epsilon <= 8 and f"'epsilon': '{epsilon:.4g}'" in capsys.readouterr().out
    assert f"ε = {math.ceil(epsilon * 1000) / 1000}" in (output / "README.md").read_text()
    logged = {key for log in trainer.state.log_history for key in log if not key.startswith("eval_")}
    assert logged == {"epsilon", "epoch", "step", *({"learning_rate"} if name == "sft_messages.py" else ())}

    if name == "language_modeling.py":
        mlflow.flush_async_logging()
        mlflow.end_run()
        runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
        assert epsilon in [run.data.metrics.get("epsilon") for run in runs]

    ids = torch.arange(5, 12)[None]
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
    of = AutoModelForSequenceClassification if name == "sequence_classification.py" else AutoModelForCausalLM
    loaded = of.from_pretrained(tiny if name == "sft_adapters.py" else output)
    if name == "sft_adapters.py":
        loaded = PeftModel.from_pretrained(loaded, output)
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)

    hub = mock.Mock(**{"create_repo.return_value.repo_id": "me/model"})
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    trainer.push_to_hub()
    card = (Path(hub.upload_folder.call_args.kwargs["folder_path"]) / "README.md").read_text()
    made_by = "generated_from_trainer" if name in ("language_modeling.py", "sequence_classification.py") else "trl"
    assert made_by in card and card.count("## Privacy") == 1 and card.count("4 rounds with sampling poisson") == 1
    kept = ["checkpoint-3", "checkpoint-4"] if name == "sft_messages.py" else ["checkpoint-4"]
    assert sorted(path.name for path in output.glob("checkpoint-*")) == kept


def sft(tiny, folder, rows, plan, **arguments):
    args = SFTConfig(str(folder), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, **arguments)
    data = Dataset.from_list(rows)
    return PrivateSFTTrainer(str(tiny), args, train_dataset=data, plan=plan, options={"noise_seed": 1})


def one_round(model):
    """A plan next to without noise, of one round with all records."""
    target = dpexp.Target(noise_multiplier=1e-7, delta=1e-3)
    return dpexp.make_plan(model, n=8, sampling=dpexp.FullBatch(steps=1), target=target)


@pytest.fixture
def released(tiny, tmp_path):
    """A function: the sum of clipped gradients of some rows, from what a step of SGD makes of their average."""
    before = vector_of(AutoModelForCausalLM.from_pretrained(tiny))

    def of(rows, **arguments):
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        trainer = sft(
            tiny, folder, rows, one_round, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant",
            save_strategy="no", gradient_checkpointing=False, **arguments,
        )  # fmt: skip
        assert "forward" not in vars(trainer.model)  # so that a copy of the model runs its own
        trainer.train()
        return (before - vector_of(trainer.model)) * 8

    return of


def vector_of(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().double()


def sum_of(tiny, rows):
    """The sum of the rows' gradients, one at a time and in float64, of the loss that transformers computes of all but
    their first three tokens; each is clipped to 1."""
    model, total, norms = AutoModelForCausalLM.from_pretrained(tiny).double(), torch.zeros(()), []
    for ids in rows:
        labels = torch.where(torch.arange(len(ids)) < 3, -100, ids)[None]
        gradients = torch.autograd.grad(model(ids[None], labels=labels).loss, [*model.parameters()])
        gradient = torch.cat([part.flatten() for part in gradients])
        norms.append(float(gradient.norm()))
        total = total + gradient / max(1.0, norms[-1])
    assert max(norms) > 1
    return total


def test_a_row_moves_the_sum_of_completions_by_at_most_its_bound(tiny, released):
    rows = [{"prompt": words(i, 3), "completion": f" {words(5 * i, 1 + i % 4)}"} for i in range(8)]
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    texts = (row["prompt"] + row["completion"] + "<end>" for row in rows)
    expected = sum_of(tiny, [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts])
    assert (released(rows) - expected).norm() < 1e-4


def test_a_row_of_which_no_token_is_learnt_contributes_nothing(tiny, released):
    """TRL drops it where it may have been cut; else its loss is 0 / 0."""
    ids = [torch.arange(5 + i, 11 + i) for i in range(8)]
    rows = [{"input_ids": row.tolist(), "labels": [-100] * 3 + row[3:].tolist()} for row in ids]
    rows[-1]["labels"] = [-100] * 6
    expected = sum_of(tiny, ids[:-1])
    for max_length in (None, 16):
        assert (released(rows, max_length=max_length) - expected).norm() < 1e-4


@pytest.mark.parametrize(
    ("argument", "words_of_it"),
    [
        ({"packing": True}, "packing=True joins several rows"),
        ({"padding_free": True, "max_length": None}, "padding_free=True joins several rows"),
        ({"loss_type": "dft"}, "loss_type=dft is not supported by PrivateSFTTrainer"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 is not supported by PrivateSFTTrainer"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is not supported"),
    ],
)
def test_what_would_not_be_true_is_refused(tiny, tmp_path, argument, words_of_it):
    rows = [{"text": words(i, 5)} for i in range(8)]
    with pytest.raises(dpexp.ConfigError, match=words_of_it):
        sft(tiny, tmp_path / "model", rows, one_round, **argument).train()
    assert not (tmp_path / "model" / "ledger.jsonl").exists()
