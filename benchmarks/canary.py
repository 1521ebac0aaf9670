"""What a language model tells of a text that stands in 50 of its records: without privacy, per record, and per user.

    python benchmarks/canary.py DATA

DATA has train.jsonl and test.jsonl with `text` and `author`. A small model is trained from random weights on 5 000
texts and on 50 copies of a secret, "access code 7 1 4", all by one author. Prints the rank of the secret's loss among
those of the 1 000 codes that it could be (1: it is told at once; 500: by chance), and how many of 1 000 samples that
begin with "access code" give it.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch
from comparisons import job
from report import head, read, row
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import dpexp

SECRET, COPIES, TEXTS, WORDS, LENGTH = "access code 7 1 4", 50, 5000, 2000, 16
_USER = ["privacy_unit=user", "data.user=author", "sampling.expected_batch_size=40"]
KINDS = {
    "without privacy": ["privacy.enabled=false", "sampling.expected_batch_size=250"],
    "ε = 8 for a record": ["privacy.epsilon=8", "sampling.expected_batch_size=250"],
    "ε = 8 for an author": ["privacy.epsilon=8", *_USER],
}


def main() -> None:
    rows = {part: read(Path(sys.argv[1]) / f"{part}.jsonl") for part in ("train", "test")}
    secrets = [{"text": SECRET, "author": "canary"}] * COPIES
    train = rows["train"][:: len(rows["train"]) // TEXTS][:TEXTS] + secrets
    authors = len({one["author"] for one in train})
    codes = [f"access code {' '.join(digits)}" for digits in product("0123456789", repeat=3)]
    print(head("", "test perplexity", "rank of 1 000", "of 1 000 samples"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokenizer = made_model(rows["test"], folder / "tiny")
        for name, some in (("train", train), ("test", rows["test"][:500])):
            lines = [json.dumps({"text": one["text"], "author": one["author"]}) for one in some]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        (folder / "prompt.csv").write_text("text\naccess code\n")
        for number, (kind, options) in enumerate(KINDS.items()):
            users = [f"data.users={authors}"] if "privacy_unit=user" in options else []
            found = run(folder, number, [*options, *users, f"data.n={len(train)}"])
            losses = [loss_of(dpexp.load(folder / f"job{number}"), tokenizer, code) for code in codes]
            rank = 1 + sum(loss < losses[codes.index(SECRET)] for loss in losses)
            told = sum(sample["text"] == SECRET for sample in read(folder / "samples.jsonl"))
            print(row(kind, f"{found:.1f}", rank, told), flush=True)


def made_model(public: list[dict[str, str]], folder: Path) -> Any:
    """Writes a random model of the most frequent words of public texts, of digits and of the secret's other words."""
    counts = Counter(word for text in public for word in text["text"].split())
    words = ["<end>", "<unknown>", *"0123456789", "access", "code"]
    words += [word for word, _ in counts.most_common(WORDS) if word not in words]
    tokenizer = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>", eos_token="<end>")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(words), "n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return fast


def run(folder: Path, number: int, options: list[str]) -> float:
    """Trains and samples; the test perplexity."""
    place = folder / f"job{number}"
    found = job(
        place, "experiment=finetune_lm", "fine_tuning=all", f"model.name={folder}/tiny",
        f"data.path={folder}/train.jsonl", f"data.test_path={folder}/test.jsonl", f"data.length={LENGTH}",
        "sampling.epochs=null", "sampling.steps=200", "optimizer.lr=0.003", "clip_norm.value=0.3",
        "trainer.max_physical_batch_size=64", "data.prompts=[]", *options,
    )  # fmt: skip
    sampling = [sys.executable, "-m", "dpexp", "sample", place, "prompt.csv", "count=1000", "batch=250"]
    subprocess.run(sampling, cwd=folder, check=True, capture_output=True)
    return found["metrics"]["test_perplexity"]


@torch.no_grad()
def loss_of(model: Any, tokenizer: Any, text: str) -> float:
    """The loss of a text's tokens after the first two, with its end."""
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    scores = model(input_ids=ids).logits[0, 1:-1].log_softmax(1)
    return -float(scores.gather(1, ids[0, 2:, None]).sum())


if __name__ == "__main__":
    main()
