"""One row's content replaced changes nothing else: neither the units, order and number of the others, nor whether a job
starts; and what is summed moves by at most S if the row then contributes nothing, and 2 S otherwise.

All sources, privacy units and policies are tried with next to no noise: the sums are compared before any is added.
"""

import json
import math
from contextlib import nullcontext
from io import BytesIO
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, List, Value
from PIL import Image
from plans import plan_of
from pyarrow import parquet
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, PreTrainedTokenizerFast

from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.physical_batch import Performance
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.round import RoundEngine
from dpexp.privacy.sampling.batches import FailedRecord
from dpexp.privacy.sampling.loader import RoundLoader
from dpexp.privacy.sampling.privacy_unit import Example, Microbatch, User
from dpexp.training.data import HuggingFace, Images, Table
from dpexp.training.data.documents import Documents, LabelledTexts

N, K, S, ROUNDS = 24, 3, 0.05, 2
COLUMNS = {
    "age": {"kind": "number", "min": 0, "max": 100},
    "colour": {"kind": "category", "values": ["red", "blue"]},
    "who": {"kind": "ignored"},
    "ill": {"kind": "category", "values": ["no", "yes"]},
}
UNITS = {"example": Example(), "microbatch": Microbatch(K), "user": User(K + 1, "user_of")}
# Policy -> the adjacency that is claimed, and options; q is 1/2.
POLICIES = {
    "poisson": ("add_remove", {}),
    "truncated_poisson": ("replace_null", {"max_batch_size": N // 2 + 2}),
    "fixed_size": ("replace_one", {}),
    "shuffle": ("replace_one", {}),
    "full_batch": ("add_remove", {}),
}
WORST = {}  # adjacency, bound -> the number of comparisons, and the largest move, in S


# Sources: a function of (folder, {row: fault}) that gives the training set, and faults: name -> (what stands in the
# row's place, whether the row then contributes nothing, whether its user is known).


def row_of(k):
    random = np.random.default_rng(k)
    age, colour = int(random.integers(0, 101)), ["red", "blue"][k % 2]
    return {"age": age, "colour": colour, "who": f"u{k % (N // K)}", "ill": ["no", "yes"][int(random.integers(2))]}


def replaced(k, faults, rows):
    return faults[k](rows[k]) if k in faults else rows[k]


def csv(folder, faults):
    lines = [",".join(map(str, row_of(k).values())).encode() for k in range(N)]
    lines = [b"age,colour,who,ill", *(replaced(k, faults, lines) for k in range(N))]
    (folder / "train.csv").write_bytes(b"\n".join(lines) + b"\n")
    return table(folder, "train.csv")


def table(folder, name):
    (folder / "test.csv").write_text("age,colour,who,ill\n1,red,a,no\n2,blue,b,yes\n")
    return Table(str(folder / name), COLUMNS, "ill", "who", str(folder / "test.csv"))


def cell(place, value):
    """A line of CSV with another value in a place."""
    return lambda line: b",".join([*line.split(b",")[:place], value, *line.split(b",")[place + 1 :]])


CSV = {
    "blank line": (lambda line: b"", True, False),
    "no target": (cell(3, b""), True, True),
    "another target": (cell(3, b"perhaps"), True, True),
    "a field too many": (lambda line: line + b",more", True, False),
    "a field too few": (lambda line: line.rpartition(b",")[0], True, False),
    "one byte": (lambda line: b"\0", True, False),
    "bytes of latin1": (cell(1, "blü".encode("latin1")), False, True),
    "no number": (cell(0, b"x"), False, True),
    "NaN": (cell(0, b"nan"), False, True),
    "a long field": (cell(0, b"9" * 200_000), False, True),
    "quotes": (cell(0, b'5"'), False, True),
    "no person": (cell(2, b" "), True, False),
}


def jsonl(folder, faults):
    lines = [json.dumps(row_of(k)) for k in range(N)]
    (folder / "train.jsonl").write_text("".join(replaced(k, faults, lines) + "\n" for k in range(N)))
    return table(folder, "train.jsonl")


def field(name, value):
    """A line of JSON with another value of a field, as JSON."""
    return lambda line: json.dumps(json.loads(line) | {name: None}).replace(f'"{name}": null', f'"{name}": {value}')


JSONL = {
    "blank line": (lambda line: "", True, False),
    "no object": (lambda line: "[1]", True, False),
    "half an object": (lambda line: line[:9], True, False),
    "no field": (lambda line: "{}", True, False),
    "one field more": (field("odd", "1"), None, True),
    "a target of another type": (field("ill", '{"yes": 1}'), True, True),
    "a deep list": (field("ill", "[" * 900 + "]" * 900), True, True),
    "many digits": (field("age", "9" * 5000), True, False),
    "no number": (field("age", "[3]"), False, True),
    "half of a surrogate pair": (field("colour", r'"\ud800"'), False, True),
    "NaN": (field("age", "NaN"), False, True),
}


def parquet_file(folder, faults):
    rows = [row_of(k) for k in range(N)]
    rows = [replaced(k, faults, rows) for k in range(N)]
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    parquet.write_table(pa.table(columns), folder / "train.parquet")
    return table(folder, "train.parquet")


PARQUET = {
    "no value": (lambda row: dict.fromkeys(row), True, False),
    "no target": (lambda row: row | {"ill": None}, True, True),
    "no number": (lambda row: row | {"age": None}, False, True),
    "far off": (lambda row: row | {"age": 2**62}, False, True),
}


def image_files(folder, faults):
    content = BytesIO()
    for k in range(N):
        name, content = "ab"[k % 2], BytesIO()
        grey = np.random.default_rng(k).integers(0, 256, (2, 2)).astype(np.uint8)
        Image.fromarray(grey).save(content, "png")
        name, data = replaced(k, faults, {k: (name, content.getvalue())})
        (folder / "train" / name).mkdir(parents=True, exist_ok=True)
        (folder / "train" / name / f"{k:02}.png").write_bytes(data)
    return Images(str(folder / "train"), "", ["a", "b"], [1, 2, 2])


IMAGES = {
    "empty file": (lambda file: (file[0], b""), True, True),
    "half a file": (lambda file: (file[0], file[1][:40]), True, True),
    "no image": (lambda file: (file[0], b"text"), True, True),
    "no known class": (lambda file: ("c", file[1]), True, True),
    "another class": (lambda file: ("ba"[file[0] == "b"], file[1]), False, True),
}


def hub(folder, faults):
    rows = [(np.random.default_rng(k).normal(0, 3, 4).tolist(), ("no", "yes")[k % 2]) for k in range(N)]
    rows = [replaced(k, faults, rows) for k in range(N)]
    made = Dataset.from_dict(
        {"v": [v for v, _ in rows], "y": [y for _, y in rows]},
        Features({"v": List(Value("float32")), "y": Value("string")}),
    )
    DatasetDict({"train": made, "test": made}).save_to_disk(folder / "saved")
    return HuggingFace(str(folder / "saved"), ["no", "yes"], [4], "v", "y")


HUB = {
    "no vector": (lambda row: (None, row[1]), True, True),
    "a short vector": (lambda row: ([1.0], row[1]), True, True),
    "NaN": (lambda row: ([math.nan] * 4, row[1]), True, True),
    "no label": (lambda row: (row[0], None), True, True),
    "another label": (lambda row: (row[0], "maybe"), True, True),
}


def text_of(k):
    return " ".join("abcdefgh"[(3 * k + j + k // 8) % 8] for j in range(2 + k % 5))


def text_lines(folder, faults):
    lines = [json.dumps({"text": text_of(k), "who": f"u{k % (N // K)}", "kind": ["x", "y"][k % 2]}) for k in range(N)]
    for name, some in (("train", [replaced(k, faults, lines) for k in range(N)]), ("test", lines)):
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in some))
    return str(folder / "train.jsonl"), str(folder / "test.jsonl"), str(folder.parent / "tokenizer"), 8


def documents(folder, faults):
    return Documents(*text_lines(folder, faults), user="who")


def labelled(folder, faults):
    return LabelledTexts(*text_lines(folder, faults), "kind", ["x", "y"])


DOCUMENTS = {
    "blank line": (lambda line: "", True, False),
    "no object": (lambda line: "3", True, False),
    "no text": (field("text", "null"), True, True),
    "a number": (field("text", "3"), True, True),
    "blanks": (field("text", '"  "'), True, True),
    "another text": (field("text", '"h h h h h h h h h h h h"'), False, True),
}
LABELLED = {name: DOCUMENTS[name] for name in ("blank line", "no text", "another text")} | {
    "no label": (field("kind", "null"), True, True),
    "another label": (field("kind", '"z"'), True, True),
}


class Arrays:
    def __init__(self, train):
        self.train = train


def arrays(folder, faults):
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(4, generator=generator), torch.tensor(k % 2)) for k in range(N)]
    x, y = zip(*(replaced(k, faults, rows) for k in range(N)), strict=True)
    train = TensorDataset(torch.stack(x), torch.stack(y))
    train.user_of = [k % (N // K) for k in range(N)]
    return Arrays(train)


ARRAYS = {
    "NaN": (lambda row: (row[0] * math.nan, row[1]), True, True),
    "no class": (lambda row: (row[0], row[1] + 9), True, True),
    "far off": (lambda row: (row[0] * 1e30, row[1]), False, True),
}

SOURCES = {
    "csv": (csv, CSV, UNITS),
    "jsonl": (jsonl, JSONL, UNITS),
    "parquet": (parquet_file, PARQUET, UNITS),
    "images": (image_files, IMAGES, ("example", "microbatch")),
    "huggingface": (hub, HUB, ("example", "microbatch")),
    "documents": (documents, DOCUMENTS, UNITS),
    "labelled_texts": (labelled, LABELLED, ("example", "microbatch")),
    "arrays": (arrays, ARRAYS, UNITS),
}
CASES = [
    pytest.param(source, unit, id=f"{source}-{unit}") for source, (_, _, units) in SOURCES.items() for unit in units
]


class OfVectors(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, one):
        return F.cross_entropy(self.net(one[0]), one[1])


class OfTokens(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.words, self.last, self.classes = nn.Embedding(10, 3), nn.Linear(3, classes or 10), classes

    def forward(self, one):
        words = self.words(one["input_ids"])
        if self.classes:
            mask = one["attention_mask"][..., None]
            return F.cross_entropy(self.last((words * mask).sum(1) / mask.sum(1)), one["labels"])
        return F.cross_entropy(self.last(words[:, :-1]).flatten(0, 1), one["labels"][:, 1:].flatten())


def module_for(train):
    torch.manual_seed(0)
    if isinstance(train, TensorDataset):
        return OfVectors(train.tensors[0][0].numel()).double()
    return OfTokens(0 if train.labels is None else 2).double()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder beside that of a tokenizer."""
    path = tmp_path_factory.mktemp("rows")
    vocabulary = {word: k for k, word in enumerate(["<end>", "<unknown>", *"abcdefgh"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>", eos_token="<end>")
    fast.save_pretrained(path / "tokenizer")
    GPT2Config(n_positions=8, vocab_size=10).save_pretrained(path / "tokenizer")
    yield path
    for (adjacency, bound), (count, most) in sorted(WORST.items()):
        print(
            f"\n{adjacency}, bound {bound} S: {count} comparisons, the largest move is {most:.6f} S"
        )  # with pytest -s


class Job:
    """The rounds of a training set under every policy; the weights stay as they are."""

    def __init__(self, unit, train):
        self.unit, module = UNITS[unit], module_for(train)
        self.n, self.users = N, N // K if unit == "user" else None
        self.records = N if unit == "example" else N // K
        self.plans = {
            policy: plan_of(
                module, policy, 1.0 if policy == "full_batch" else 0.5, n=self.n, users=self.users, steps=ROUNDS,
                privacy_unit=self.unit, adjacency=adjacency, noise_multiplier=1.0, clip_norm=FixedClipNorm(S),
                **{key: min(value, self.records // 2 + 2) for key, value in options.items()},
            )
            for policy, (adjacency, options) in POLICIES.items()
        }  # fmt: skip
        self.engine = RoundEngine(self.plans["poisson"], module, GaussianNoise(), performance=Performance(64, False))

    def sums(self, train, policy):
        """What each round sums, as one vector; an error ends the job."""
        keys = [KeyStream.known(0, purpose, 0) for purpose in ("sampling", "loader")]
        tested = policy == "poisson"  # for state, which takes time
        with nullcontext() if tested else mock.patch("dpexp.privacy.sampling.loader.refuse_state"):
            rounds, found = RoundLoader(DataLoader(train, 2), self.plans[policy], 64, *keys), []
        while rounds.sampler.completed < ROUNDS:
            for _ in rounds:
                self.engine.begin()
                for _, parts in rounds.sample(torch.device("cpu")):
                    for part in parts:
                        self.add(part)
                self.engine.raise_if_none_contributed()
                total = [self.engine._sums.get(name, torch.zeros(1)) for name in self.engine.parameters]
                found.append(torch.cat([one.flatten().double() for one in total]))
                rounds.sampler.completed += 1
        return found

    def add(self, part):
        if isinstance(part, FailedRecord):
            self.engine.skip(1, part.reason)
        else:
            self.engine.add_chunk(lambda module, one: module(as_double(one)), part.batch, part.size)

    def units(self, train):
        """The positions of each unit's examples."""
        units = self.unit.units(train)
        return [[k] for k in range(len(train))] if units is None else [[*one] for one in units._positions]


def as_double(one):
    return [one[0].double(), one[1]] if isinstance(one, list | tuple) else one


def tried(units, unit):
    """The rows that a fault strikes: one, and all of a unit."""
    struck = units[2] if unit != "example" else [4]
    return [struck[:1], struck] if unit != "example" else [struck]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("source, unit", CASES)
def test_a_rows_content_changes_nothing_else(folder, source, unit):
    make, faults, _ = SOURCES[source]
    fresh = (folder / f"{source}-{unit}-{k}" for k in range(99))

    def made(changed):
        path = next(fresh)
        path.mkdir()
        return make(path, changed).train

    train = made({})
    job = Job(unit, train)
    before, units = {policy: job.sums(train, policy) for policy in POLICIES}, job.units(train)
    assert len(train) == N and len(units) == job.records
    for fault, (change, is_null, keeps_user) in faults.items():
        for rows in tried(units, unit):
            other, lost = made(dict.fromkeys(rows, change)), unit == "user" and not keeps_user
            assert len(other) == N, fault
            expected = [[k for k in one if not (lost and k in rows)] for one in units]
            assert job.units(other) == [one for one in expected if one], fault
            others = [k for k in range(N) if k not in rows]
            assert all(torch.equal(a[others], b[others]) for a, b in zip(parts_of(train), parts_of(other), strict=True))
            if [] in expected:  # a user less: another number of users, and so other draws
                continue
            bound = 2 - (is_null is True and len(rows) == len(units[2 if unit != "example" else 4]))
            policies = POLICIES if len(rows) > 1 or unit == "example" else ("poisson", "fixed_size")
            moves = {policy: move(before[policy], job.sums(other, policy)) for policy in policies}
            for policy, moved in moves.items():
                assert moved <= bound * (1 + 1e-6) if is_null is not None else moved == 0, (fault, rows, moves)
                key = POLICIES[policy][0], bound
                count, most = WORST.get(key, (0, 0.0))
                WORST[key] = count + 1, max(most, moved)
            assert is_null is None or max(moves.values()) > 0.01, (fault, rows)


def parts_of(train):
    """The tensors of a training set."""
    if isinstance(train, TensorDataset):
        return train.tensors
    return (train.ids, torch.tensor(train.sizes), *([torch.tensor(train.labels)] if train.labels else []))


def move(some, others):
    """The largest distance of two rounds' sums, in S."""
    return max(float((one - other).norm()) / S for one, other in zip(some, others, strict=True))
