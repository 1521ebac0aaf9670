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
from files import word_tokenizer
from PIL import Image
from plans import plan_of
from pyarrow import parquet
from reference import norm_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config

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


# Sources: a function of (folder, {row: fault}) that gives the training set, and faults: by what becomes of the row, the
# name of the fault and what stands in the row's place: some other cells, or a function of the row.

NULL = True, True  # the row then contributes nothing
LOST = True, False  # nor is its user known
USED = False, True  # it contributes
AS_BEFORE = None, True  # what is summed does not move


def row_of(k):
    random = np.random.default_rng(k)
    age, colour = int(random.integers(0, 101)), ["red", "blue"][k % 2]
    return {"age": age, "colour": colour, "who": f"u{k % (N // K)}", "ill": ["no", "yes"][int(random.integers(2))]}


def with_faults(faults, row_of, whole=dict):
    """All rows as they stand in a file, with the faults of some."""
    rows = []
    for k in range(N):
        change = faults.get(k, {})
        rows.append(change(whole(row_of(k))) if callable(change) else whole(row_of(k) | change))
    return rows


def csv(folder, faults):
    """Cells are bytes."""
    cells = lambda k: {name: str(value).encode() for name, value in row_of(k).items()}  # noqa: E731
    lines = with_faults(faults, cells, lambda row: b",".join(row.values()))
    (folder / "train.csv").write_bytes(b"\n".join([b"age,colour,who,ill", *lines]) + b"\n")
    return table(folder, "train.csv")


def table(folder, name):
    (folder / "test.csv").write_text("age,colour,who,ill\n1,red,a,no\n2,blue,b,yes\n")
    return Table(str(folder / name), COLUMNS, "ill", "who", str(folder / "test.csv"))


CSV = {
    LOST: {
        "blank line": lambda line: b"", "one byte": lambda line: b"\0", "no person": {"who": b" "},
        "a field too many": lambda line: line + b",more", "a field too few": lambda line: line.rpartition(b",")[0],
    },
    NULL: {"no target": {"ill": b""}, "another target": {"ill": b"perhaps"}},
    USED: {
        "bytes of latin1": {"colour": "blü".encode("latin1")}, "no number": {"age": b"x"}, "NaN": {"age": b"nan"},
        "a long field": {"age": b"9" * 200_000}, "quotes": {"age": b'5"'},
    },
}  # fmt: skip


def json_line(cells):
    return "{" + ", ".join(f'"{name}": {value}' for name, value in cells.items()) + "}"


def in_json(row):
    return {name: json.dumps(value) for name, value in row.items()}


def jsonl(folder, faults):
    """Cells are JSON."""
    lines = with_faults(faults, lambda k: in_json(row_of(k)), json_line)
    (folder / "train.jsonl").write_text("".join(line + "\n" for line in lines))
    return table(folder, "train.jsonl")


JSONL = {
    LOST: {
        "blank line": lambda line: "", "no object": lambda line: "[1]", "no field": lambda line: "{}",
        "half an object": lambda line: line[:9], "many digits": {"age": "9" * 5000},
    },
    AS_BEFORE: {"one field more": {"odd": "1"}},
    NULL: {"a target of another type": {"ill": '{"yes": 1}'}, "a deep list": {"ill": "[" * 900 + "]" * 900}},
    USED: {"no number": {"age": "[3]"}, "half of a surrogate pair": {"colour": r'"\ud800"'}, "NaN": {"age": "NaN"}},
}  # fmt: skip


def parquet_file(folder, faults):
    rows = with_faults(faults, row_of)
    columns = {name: [row[name] for row in rows] for name in COLUMNS}
    parquet.write_table(pa.table(columns), folder / "train.parquet")
    return table(folder, "train.parquet")


PARQUET = {
    LOST: {"no value": dict.fromkeys(COLUMNS)}, NULL: {"no target": {"ill": None}},
    USED: {"no number": {"age": None}, "far off": {"age": 2**62}},
}  # fmt: skip


def image_of(k):
    grey, content = np.random.default_rng(k).integers(0, 256, (2, 2)).astype(np.uint8), BytesIO()
    Image.fromarray(grey).save(content, "png")
    return {"class": "ab"[k % 2], "file": content.getvalue()}


def image_files(folder, faults):
    for k, row in enumerate(with_faults(faults, image_of)):
        (folder / "train" / row["class"]).mkdir(parents=True, exist_ok=True)
        (folder / "train" / row["class"] / f"{k:02}.png").write_bytes(row["file"])
    return Images(str(folder / "train"), "", ["a", "b"], [1, 2, 2])


IMAGES = {
    NULL: {
        "empty file": {"file": b""}, "half a file": lambda row: row | {"file": row["file"][:40]},
        "no image": {"file": b"text"}, "no known class": {"class": "c"},
    },
    USED: {"another class": lambda row: row | {"class": "ba"[row["class"] == "b"]}},
}  # fmt: skip


def vector_of(k):
    return {"v": np.random.default_rng(k).normal(0, 3, 4).tolist(), "y": ("no", "yes")[k % 2]}


def hub(folder, faults):
    features = Features({"v": List(Value("float32")), "y": Value("string")})
    made = Dataset.from_list(with_faults(faults, vector_of), features)
    DatasetDict({"train": made, "test": made}).save_to_disk(folder / "saved")
    return HuggingFace(str(folder / "saved"), ["no", "yes"], [4], "v", "y")


HUB = {
    NULL: {
        "no vector": {"v": None}, "a short vector": {"v": [1.0]}, "NaN": {"v": [math.nan] * 4}, "no label": {"y": None},
        "another label": {"y": "maybe"},
    },
}  # fmt: skip


def text_of(k):
    words = " ".join("abcdefgh"[(3 * k + j + k // 8) % 8] for j in range(2 + k % 5))
    return in_json({"text": words, "who": f"u{k % (N // K)}", "kind": ["x", "y"][k % 2]})


def text_lines(folder, faults):
    for name, some in (("train", faults), ("test", {})):
        lines = with_faults(some, text_of, json_line)
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    return str(folder / "train.jsonl"), str(folder / "test.jsonl"), str(folder.parent / "tokenizer"), 8


def documents(folder, faults):
    return Documents(*text_lines(folder, faults), user="who")


def labelled(folder, faults):
    return LabelledTexts(*text_lines(folder, faults), "kind", ["x", "y"])


BLANK, NO_TEXT = {"blank line": lambda line: ""}, {"no text": {"text": "null"}}
OTHER_TEXT = {USED: {"another text": {"text": '"h h h h h h h h h h h h"'}}}
DOCUMENTS = {
    LOST: BLANK | {"no object": lambda line: "3"},
    NULL: NO_TEXT | {"a number": {"text": "3"}, "blanks": {"text": '"  "'}},
} | OTHER_TEXT
LABELLED = {
    LOST: BLANK, NULL: NO_TEXT | {"no label": {"kind": "null"}, "another label": {"kind": '"z"'}},
} | OTHER_TEXT  # fmt: skip


class Arrays:
    def __init__(self, train):
        self.train = train


def arrays(folder, faults):
    generator = torch.Generator().manual_seed(0)
    rows = with_faults(faults, lambda k: {"x": torch.randn(4, generator=generator), "y": torch.tensor(k % 2)})
    train = TensorDataset(*(torch.stack([row[name] for row in rows]) for name in "xy"))
    train.user_of = [k % (N // K) for k in range(N)]
    return Arrays(train)


ARRAYS = {
    NULL: {"NaN": lambda row: row | {"x": row["x"] * math.nan}, "no class": lambda row: row | {"y": row["y"] + 9}},
    USED: {"far off": lambda row: row | {"x": row["x"] * 1e30}},
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


def module_for(train):
    torch.manual_seed(0)
    if isinstance(train, TensorDataset):
        inputs = train.tensors[0][0].numel()
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return nn.Sequential(nn.Embedding(10, 3), nn.Linear(3, 2 if train.labels else 10)).double()


def loss_of(module, one):
    """Of the class of a vector or a text, or of each next token."""
    if not isinstance(one, dict):
        return F.cross_entropy(module(one[0].double()), one[1])
    scores, labels = module(one["input_ids"]), one["labels"]
    if labels.dim() > 1:
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    mask = one["attention_mask"][..., None]
    return F.cross_entropy((scores * mask).sum(1) / mask.sum(1), labels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder beside that of a tokenizer."""
    path = tmp_path_factory.mktemp("rows")
    word_tokenizer(["<end>", "<unknown>", *"abcdefgh"], eos_token="<end>").save_pretrained(path / "tokenizer")
    GPT2Config(n_positions=8, vocab_size=10).save_pretrained(path / "tokenizer")
    return path


class Job:
    """The rounds of a training set under every policy; the weights stay as they are."""

    def __init__(self, unit, train):
        self.unit, module = UNITS[unit], module_for(train)
        self.records, users = N if unit == "example" else N // K, N // K if unit == "user" else None
        self.plans = {
            policy: plan_of(
                module, policy, 1.0 if policy == "full_batch" else 0.5, n=N, users=users, steps=ROUNDS,
                privacy_unit=self.unit, adjacency=adjacency, noise_multiplier=1.0, clip_norm=FixedClipNorm(S),
                **{key: min(value, self.records // 2 + 2) for key, value in options.items()},
            )
            for policy, (adjacency, options) in POLICIES.items()
        }  # fmt: skip
        self.engine = RoundEngine(self.plans["poisson"], module, GaussianNoise(), performance=Performance(64, False))

    def sums(self, train, policy):
        """What each round sums, by parameter; an error ends the job."""
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
                found.append({name: self.engine._sums[name].clone() for name in self.engine.parameters})
                rounds.sampler.completed += 1
        return found

    def add(self, part):
        if isinstance(part, FailedRecord):
            self.engine.skip(1, part.reason)
        else:
            self.engine.add_chunk(loss_of, part.batch, part.size)

    def units(self, train):
        """The positions of each unit's examples."""
        units = self.unit.units(train)
        return [[k] for k in range(len(train))] if units is None else [[*one] for one in units._positions]


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
    for (is_null, keeps_user), fault, change in [(end, *one) for end, some in faults.items() for one in some.items()]:
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
            bound = bound * (1 + 1e-6) if is_null is not None else 0
            assert all(moved <= bound for moved in moves.values()), (fault, rows, moves)
            assert is_null is None or max(moves.values()) > 0.01, (fault, rows)


def parts_of(train):
    """The tensors of a training set."""
    if isinstance(train, TensorDataset):
        return train.tensors
    return (train.ids, torch.tensor(train.sizes), *([torch.tensor(train.labels)] if train.labels else []))


def move(some, others):
    """The largest distance of two rounds' sums, in S."""
    return max(norm_of(one, other) / S for one, other in zip(some, others, strict=True))
