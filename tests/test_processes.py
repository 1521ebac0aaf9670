"""Several processes release what one does, for the same key, and one ledger says so."""

import json
import re

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from several import ROUNDS, N, Net, all_of, layers, mistaken, start

import dpexp
from dpexp.accounting.ledger import ledger_so_far, read_ledger

KINDS = ("plain", "adaptive", "metrics", "exact", "shuffled", "batchnorm", "prepared")


@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_do_what_one_does(tmp_path, count):
    """One start for all: it takes seconds."""
    (one,) = start(all_of, 1, tmp_path / "1", KINDS)
    found = start(all_of, count, tmp_path / "several", KINDS)
    for what in KINDS:
        releases_are_those_of_one_process(one[what], [each[what] for each in found])
        all_have_the_same_bits([each[what] for each in found])
        ledgers = [(tmp_path / folder / f"{what}.jsonl").read_bytes() for folder in ("1", "several")]
        assert ledgers[0] == ledgers[1], "but for the run's number, which here is the same"
    assert len([*(tmp_path / "several").glob("*.jsonl")]) == len(KINDS)
    each_takes_its_part(one["plain"]["sizes"], [each["plain"]["sizes"] for each in found])


def releases_are_those_of_one_process(one, found):
    assert len(one["released"]) == ROUNDS
    for each in found:
        torch.testing.assert_close(each["released"], one["released"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(each["weights"], one["weights"], rtol=1e-5, atol=1e-5)
        (epsilon, rounds, values, S), (epsilon_of_one, rounds_of_one, values_of_one, S_of_one) = (
            each["told"], one["told"],
        )  # fmt: skip
        assert epsilon == epsilon_of_one > 0 and rounds == rounds_of_one and values.keys() == values_of_one.keys()
        assert pytest.approx(S_of_one) == S
        for name, history in values.items():
            assert torch.tensor(history).allclose(torch.tensor(values_of_one[name]), rtol=1e-5, atol=1e-5)


def all_have_the_same_bits(found):
    for other in found[1:]:
        assert other["told"] == found[0]["told"]
        torch.testing.assert_close(other["weights"], found[0]["weights"], rtol=0, atol=0)
        torch.testing.assert_close(other["released"], found[0]["released"], rtol=0, atol=0)


def each_takes_its_part(whole, parts):
    """Of the same sample, empty ones among them."""
    together = [*zip(*parts, strict=True)]
    assert [sum(sizes) for sizes in together] == whole
    assert 0 in whole and max(whole) < N
    assert any(len(set(sizes)) > 1 for sizes in together) and any(0 in sizes and sum(sizes) for sizes in together)


def test_a_mistake_of_one_process_is_a_sentence_in_all_and_a_resumed_fit_goes_on(tmp_path):
    found = start(mistaken, 2, tmp_path)
    for each in found:
        assert "training sets of the processes hold other records" in each["records"]
        assert "different plans" in each["plan"]
        assert "ledger: no space is left." in each["commit"]
        assert "the processes' weights differ" in each["weights"]
        assert "model: it breaks." in each["step"]
        before, after = each["resumed"]
        assert len(before) == 4 and len(after) == ROUNDS - 4
    assert found[1]["commit"].startswith("process 0 of 2 stopped: ")
    assert found[0]["step"].startswith("process 1 of 2 stopped: ")
    rounds = {name: len(ledger_so_far(tmp_path / name / "plain.jsonl")) for name in ("commit", "weights")}
    assert rounds == {"commit": 3, "weights": 3}
    assert not (tmp_path / "plan" / "plain.jsonl").exists() and not len(
        ledger_so_far(tmp_path / "step" / "plain.jsonl")
    )
    assert len(read_ledger(tmp_path / "resumed" / "plain.jsonl")) == ROUNDS


JOB = ("tracking=none", "privacy.noise_multiplier=1.0", "model=logistic", "sampling.steps=3", "trainer.evaluations=1")


def test_a_job_of_two_processes_leaves_one_folder(dpexp_job, tmp_path):
    output = dpexp_job(*JOB, "trainer.strategy=ddp", "trainer.devices=2")
    result = json.loads((output / "result.json").read_text())
    assert result["rounds"] == 3 == len(read_ledger(output / "ledger.jsonl")) and result["private"]
    assert len([*tmp_path.rglob("config.yaml")]) == 2, "Hydra's, and the job's"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("trainer.strategy=fsdp", "trainer.devices=2"), "gives each process a part of every weight"),
        (("trainer.strategy=deepspeed_stage_3",), "gives each process a part of every weight"),
        (("trainer.strategy=ddp_spawn", "trainer.devices=2"), "choose ddp"),
        (("trainer.devices=2",), "several processes need trainer.strategy=ddp"),
        (("trainer.devices=0",), "trainer.devices=0 must be at least 1"),
        (("trainer.strategy=ddp", "trainer.num_nodes=2"), "start it on every node"),
        (("trainer.strategy=ddp", "trainer.devices=2", "diagnostics=unsafe"), "one process's records"),
        (("trainer.strategy=ddp", "trainer.devices=2", "audit=dirac"), "choose trainer.devices=1"),
        (("trainer.strategy=ddp", "trainer.devices=2", "privacy.enabled=false"), "choose trainer.devices=1"),
    ],
)
def test_what_cannot_be_had_is_refused_before_a_process_starts(dpexp_job, arguments, words):
    given = [argument for argument in JOB if "enabled" not in str(arguments) or "noise" not in argument]
    with pytest.raises(SystemExit, match=re.escape(words)):
        dpexp_job(*given, *arguments)


def test_another_number_of_processes_than_asked_for_is_refused(dpexp_job, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="2 processes were started"):
        dpexp_job(*JOB)


def test_lightnings_other_strategies_are_refused_by_the_callback(tmp_path):
    class Sharded(DDPStrategy):
        pass

    module = Net(layers())
    plan = dpexp.make_plan(module, n=N, q=0.1, steps=1, noise_multiplier=1.0)
    for strategy, words in ((Sharded(), "Sharded cannot be honoured"), ("ddp_fork", "ddp_fork trains in processes")):
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
        privacy = dpexp.PrivacyCallback(plan, tmp_path / "l.jsonl")
        with pytest.raises(dpexp.ConfigError, match=words):
            privacy.setup(trainer, module, "fit")
