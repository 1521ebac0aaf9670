"""The same private adapters of a text classifier by dpexp and Opacus, and by peft without privacy.

    python benchmarks/texts.py MODEL DATA [--rounds 20]

MODEL is a folder of transformers with an encoder; DATA has train.jsonl and test.jsonl with `text` and `label`. Each
library runs in a process of its own on one core: model, initial adapters, texts, batch, rounds, clipping norm and ε are
the same, and each calibrates z by its own accountant. Prints accuracy on 1 000 test texts, the z and ε that each says,
CPU seconds a record of a round (the median of rounds), and peak memory.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from report import Result, answer, head, parser, read, row

LIBRARIES = ("peft", "dpexp", "Opacus")
LENGTH, BATCH, PHYSICAL, TESTED = 32, 256, 32, 1000
EPSILON, DELTA, BOUND, RATE, RANK = 8.0, 1e-6, 0.5, 2e-3, 8
_ticks: list[float] = []


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model")
    options.add_argument("data")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--one", choices=LIBRARIES, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        print(json.dumps(trained(given.one, given.model, Path(given.data), given.rounds)))
        return
    print(head("library", "accuracy, %", "z; ε", "CPU ms a record", "MiB"))
    for name in LIBRARIES:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        found = answer(command, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        print(row(name, *cells(found)), flush=True)


def cells(found: Result) -> tuple[str, ...]:
    """Of a library's row."""
    if "error" in found:
        return found["error"][:150], "", "", ""
    noise = f"{found['z']:.4f}; {found['epsilon']:.3f}" if "z" in found else "–"
    return f"{100 * found['accuracy']:.1f}", noise, f"{found['ms']:.1f}", f"{found['MiB']:.0f}"


def trained(name: str, folder: str, data: Path, rounds: int) -> dict[str, Any]:
    """What a library's training of the adapters gives."""
    import torch

    torch.set_num_threads(1)
    rows = {part: read(data / f"{part}.jsonl") for part in ("train", "test")}
    names = sorted({row["label"] for row in rows["test"]})
    train, test = (tensors(rows[part], folder, names) for part in ("train", "test"))
    model = adapted(folder, len(names))
    found = {"peft": by_peft, "dpexp": by_dpexp, "Opacus": by_opacus}[name](model, train, rounds)
    model.eval()
    ids, mask, y = (tensor[:TESTED] for tensor in test)
    with torch.no_grad():
        scores = [
            model(input_ids=a, attention_mask=b).logits for a, b in zip(ids.split(100), mask.split(100), strict=True)
        ]
    accuracy = (torch.cat(scores).argmax(1) == y).float().mean().item()
    seconds = statistics.median(after - before for before, after in pairwise(_ticks))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found | {"accuracy": accuracy, "ms": 1000 * seconds / BATCH, "MiB": peak}


def tensors(rows: list[dict[str, str]], folder: str, names: list[str]) -> Any:
    """Tokens [N, T], masks [N, T] and classes [N]; a label that no test text has counts as the first."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=LENGTH, padding="max_length")
    codes = {label: k for k, label in enumerate(names)}
    classes = [codes.get(row["label"], 0) for row in rows]
    return [torch.tensor(values) for values in (encoded["input_ids"], encoded["attention_mask"], classes)]


def adapted(folder: str, classes: int) -> Any:
    """The classifier with adapters of query and value, and a new head; without dropout, which each draws otherwise."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=classes, dtype=torch.float32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(model, config)


def trainable(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of(model: Any, record: Any) -> Any:
    from torch.nn.functional import cross_entropy

    ids, mask, y = record
    return cross_entropy(model(input_ids=ids, attention_mask=mask).logits, y)


def tick() -> None:
    _ticks.append(time.process_time())


def by_peft(model: Any, train: Any, rounds: int) -> dict[str, float]:
    """Batches of BATCH texts, in parts of PHYSICAL."""
    import torch

    optimizer = torch.optim.Adam(trainable(model), lr=RATE)
    tick()
    for _ in range(rounds):
        places = torch.randperm(len(train[0]))[:BATCH]
        for part in places.split(PHYSICAL):
            (loss_of(model, [tensor[part] for tensor in train]) * len(part) / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        tick()
    return {}


def by_dpexp(model: Any, train: Any, rounds: int) -> dict[str, float]:
    import torch
    from torch.utils.data import TensorDataset

    import dpexp

    plan = dpexp.make_plan(
        model, n=len(train[0]), sampling=dpexp.Poisson(expected_batch_size=BATCH, steps=rounds),
        target=dpexp.Target(epsilon=EPSILON, delta=DELTA),
        clipping=dpexp.Clipping(clip_norm=dpexp.FixedClipNorm(BOUND)),
    )  # fmt: skip
    optimizer = torch.optim.Adam(trainable(model), lr=RATE)
    with tempfile.TemporaryDirectory() as folder:
        private = dpexp.Private(model, optimizer, plan, f"{folder}/ledger.jsonl", max_physical_batch_size=PHYSICAL)
        for sample in private.rounds(TensorDataset(*train)):
            private.step(loss_of, sample)
            tick()
        return {"z": plan.noise_multiplier, "epsilon": private.epsilon()}


def by_opacus(model: Any, train: Any, rounds: int) -> dict[str, float]:
    import torch
    from opacus import PrivacyEngine
    from opacus.accountants.utils import get_noise_multiplier
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from torch.utils.data import DataLoader, TensorDataset

    n = len(train[0])
    z = get_noise_multiplier(
        target_epsilon=EPSILON, target_delta=DELTA, sample_rate=BATCH / n, steps=rounds, accountant="prv"
    )
    engine = PrivacyEngine(accountant="prv")
    private, optimizer, loader = engine.make_private(
        module=model.train(), optimizer=torch.optim.Adam(trainable(model), lr=RATE), noise_multiplier=z,
        data_loader=DataLoader(TensorDataset(*train), batch_size=BATCH), max_grad_norm=BOUND,
    )  # fmt: skip
    done = 0
    tick()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=PHYSICAL, optimizer=optimizer) as parts:
        for record in parts:
            loss_of(private, record).backward()
            skipped = optimizer._check_skip_next_step(pop_next=False)
            optimizer.step()
            optimizer.zero_grad()
            if not skipped:
                tick()
                done += 1
            if done == rounds:
                break
    return {"z": z, "epsilon": engine.get_epsilon(DELTA)}


if __name__ == "__main__":
    main()
