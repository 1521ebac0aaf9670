"""A mistake in a command's arguments, or in the files that it reads, is one sentence, and nothing is written."""

import json
import shlex

import numpy as np
import pytest
from made import made_job, write_run
from runs import ledger

from dpexp.accounting.ledger import write_ledger
from dpexp.commands.certificate import certificate
from dpexp.commands.copy_options import copy

# command line -> words of the sentence
ACCOUNT = {
    "account": "needs a ledger file",
    "account nowhere.jsonl delta=1e-5": "cannot be read",
    "account 0123abcd delta=1e-5": "no file or folder here, and no run",
    "account ledger.jsonl": "delta must be given",
    "account ledger.jsonl delta=2": "at least 1e-300 and below 1",
    "account ledger.jsonl delta=x": "could not be converted to Float",
    "account ledger.jsonl delta=1e-5 accountant=prv": "known: pld, rdp",
    "account ledger.jsonl delta=1e-5 acountant=rdp": "there is no key 'acountant'; did you mean 'accountant'",
    "account ledger.jsonl delta=1e-5 figure=x.docx": "figure=x.docx cannot be written (Format 'docx' is not supported",
    "account ledger.jsonl delta=1e-5 figure=nowhere/x.png": "figure=nowhere/x.png cannot be written (No such file",
    "account ledger.jsonl delta=1e-5 adjacency=remove": "known: add_remove",
}
CERTIFICATE = {
    "certificate": "one run must be given, not none",
    "certificate ledger.jsonl": "delta must be given: no run states it",
    "certificate ledger.jsonl delta=2": "at least 1e-300 and below 1",
    "certificate ledger.jsonl detla=1e-5": "there is no key 'detla'; did you mean 'delta'",
    "certificate nowhere.jsonl delta=1e-5": "nowhere.jsonl cannot be read",
    "certificate nowhere": "nowhere is no file or folder here, and no run",
    "certificate empty": "empty/ledger.jsonl cannot be read",
    "verify a b": "one run must be given, not a and b",
    "verify nowhere.json": "nowhere.json is no certificate of version 1 that can be read; name one that",
    "verify empty": "empty/ledger.certificate.json is no certificate",
    "verify text.json": "text.json is no certificate",
    "verify list.json": "list.json is no certificate",
    "verify words.json": "words.json is no certificate",
    "verify later.json": "later.json is no certificate",
    "verify twice.json": "twice.json is no certificate",
    "verify null.json": "null.json is no certificate",
    "verify alone/ledger.certificate.json": "alone/ledger.jsonl cannot be read",
    "verify of_another.json": "ledger.jsonl is not the one that of_another.json certifies: its SHA-256 is ",
    "verify edited": "was edited",
}
SAVED_JOBS = {
    "evaluate": "needs one job's folder",
    "evaluate a b": "needs one job's folder",
    "evaluate job size=3": "size is unknown; known: uri",
    "evaluate empty": "only a job that has finished its training",
    "evaluate nowhere": "nowhere is no file or folder here, and no run of sqlite:///",
    "predict job": "needs data=FILE",
    "predict job data=x.txt": "must be a file that ends in .npy",
    "predict job data=missing.npy": "cannot be read",
    "predict job data=none.npy": "holds no inputs",
    "predict job data=wrong.npy": "does not fit the model",
    "predict job data=fits.npy out=nowhere/x.csv": "out=nowhere/x.csv cannot be written",
    "report": "name folders of jobs or sweeps, or MLflow run ids",
    "report empty": "name folders of jobs or sweeps, or MLflow run ids",
    "report nowhere": "nowhere is no file or folder here, and no run of",
    "report damaged": "damaged has a damaged file of its job",
    "report made out=empty": "out=empty cannot be read or written: Is a directory",
    "report made out=/proc/x.html": "out=/proc/x.html cannot be read or written: No such file",
}
OPTIONS = {
    "copy list.yaml": "list.yaml exists already; name another file",
    "copy": "give the options of one job, and one FILE.yaml",
    "copy seed=1 my.txt": "one FILE.yaml",
    "copy -m my.yaml": "give the options of one job",
    "copy sweep=digits my.yaml": "give the options of one job",
    "copy ~model.shape my.yaml": "a file takes no ~key and no new +key",
    "copy '+trainer.max_time=00:01:00:00' my.yaml": "a file takes no ~key and no new +key",
    "copy model=cn my.yaml": "model has no option 'cn'; did you mean 'cnn'",
    **{f"{name}.yaml": f"{name}.yaml is no file of options, as python -m dpexp copy"
       for name in ("nowhere", "folder", "list", "latin", "values")},
    "copied.yaml model=mlp": "model=mlp would not replace the values in copied.yaml; edit it, or",
    "unknown.yaml": "sede: there is no key 'sede'; did you mean 'seed'?",
    "word.yaml": "seed: Value 'many' of type 'str' could not be converted to Integer",
}  # fmt: skip


@pytest.fixture(scope="module")
def command(trained, tmp_path_factory, jobs_in):
    """Runs a command in a folder of ledgers, certificates, inputs, options, and a trained `job`."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in ("empty", "alone", "edited", "folder.yaml"):
        (folder / name).mkdir()
    (result,) = trained.glob("outputs/*/*/result.json")
    (folder / "job").symlink_to(result.parent)
    for name in ("made", "damaged"):
        made_job(folder / name)
    (folder / "damaged" / "result.json").write_text("{")
    write_ledger(folder / "other.jsonl", ledger(2.0, 1.0, 4))
    write_run(folder / "ledger.jsonl", ledger(2.0, 1.0, 3))
    of_another = certificate([str(folder / "other.jsonl"), "delta=1e-5"]).read_text().replace("other.j", "ledger.j")
    text = certificate([str(folder / "ledger.jsonl"), "delta=1e-5"]).read_text()
    copy([str(folder / "copied.yaml")])
    options = (folder / "copied.yaml").read_text()
    for name, content in {
        "text.json": "ε = 1",
        "list.json": "[1]",
        "words.json": json.dumps(json.loads(text) | {"guarantee": {"epsilon": "1", "delta": 1e-5}}),
        "later.json": text.replace('"dpexp_certificate": 1', '"dpexp_certificate": 2'),
        "twice.json": text.replace('"epsilon": ', '"epsilon": 0.01, "epsilon": '),
        "null.json": text.replace('"ledger.jsonl"', r'"led\u0000ger"'),
        "of_another.json": of_another,
        "alone/ledger.certificate.json": text,
        "edited/ledger.certificate.json": text,
        "edited/ledger.jsonl": (folder / "ledger.jsonl").read_text().replace('"sigma": 2.0', '"sigma": 3.0'),
        "list.yaml": "[1]",
        "values.yaml": "seed: 1",
        "unknown.yaml": options.replace("\nseed: 0", "\nsede: 0"),
        "word.yaml": options.replace("\nseed: 0", "\nseed: many"),
    }.items():
        (folder / name).write_text(content)
    (folder / "latin.yaml").write_bytes(b"seed: \xe9")
    for name, shape in (("wrong", (2, 3, 5)), ("fits", (2, 64)), ("none", (0, 64))):
        np.save(folder / f"{name}.npy", np.resize(np.float32([-1, 1]), shape))
    with jobs_in(folder) as run:
        yield run
    assert not [*folder.glob("my.*"), *folder.glob("*.html"), *folder.glob("*.docx")]


@pytest.mark.parametrize("arguments, words", (ACCOUNT | CERTIFICATE | SAVED_JOBS | OPTIONS).items())
def test_a_mistake_is_one_sentence(arguments, words, command):
    with pytest.raises(SystemExit) as stopped:
        command(*shlex.split(arguments))
    said = str(stopped.value)
    assert said.startswith("dpexp: ") and words in said and "\n" not in said
