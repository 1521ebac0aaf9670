"""Several processes release what one does, for the same key, and one ledger says so."""

import re
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from jobs import result_of
from plans import plan_of
from pytorch_lightning.strategies import DDPStrategy
from several import ROUNDS, N, Net, all_of, layers, mistaken, start
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed import nn  # noqa: F401
from torch.utils.data import Dataset, Subset, TensorDataset

import dpexp
from dpexp.accounting.ledger import ledger_so_far, read_ledger
from dpexp.accounting.sampling import FullBatch
from dpexp.errors import ConfigError
from dpexp.privacy.distributed import Processes, collectives_refused, digest_of_plan, digest_of_records
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.adaptive_clipping import AdaptiveClipNorm
from dpexp.privacy.plan.clipping import FixedClipNorm, Global
from dpexp.privacy.sampling.loader import RoundSampler
from dpexp.privacy.sampling.privacy_unit import User
from dpexp.privacy.state_checks import digest_of_weights
from dpexp.rows import PlacedRows

KINDS = ("adaptive", "banded", "batchnorm", "prepared", "allocated")


@pytest.mark.parametrize("count, kinds", [(2, KINDS), pytest.param(4, KINDS, marks=pytest.mark.whole)])
def test_several_processes_do_what_one_does(tmp_path, count, kinds):
    """One start for all: it takes seconds."""
    (one,) = start(all_of, 1, tmp_path / "1", kinds)
    found = start(all_of, count, tmp_path / "several", kinds)
    for what in kinds:
        releases_are_those_of_one_process(one[what], [each[what] for each in found])
        all_have_the_same_bits([each[what] for each in found])
        ledgers = [(tmp_path / folder / f"{what}.jsonl").read_bytes() for folder in ("1", "several")]
        assert ledgers[0] == ledgers[1], "but for the run's number, which here is the same"
    assert len([*(tmp_path / "several").glob("*.jsonl")]) == len(kinds)
    each_takes_its_part(one["adaptive"]["sizes"], [each["adaptive"]["sizes"] for each in found])


def releases_are_those_of_one_process(one, found):
    assert len(one["released"]) == ROUNDS
    for each in found:
        torch.testing.assert_close(each["released"], one["released"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(each["weights"], one["weights"], rtol=1e-5, atol=1e-5)
        (epsilon, rounds, values, S), (epsilon_of_one, rounds_of_one, values_of_one, S_of_one) = (
            each["figures"], one["figures"],
        )  # fmt: skip
        assert epsilon == epsilon_of_one > 0 and rounds == rounds_of_one and values.keys() == values_of_one.keys()
        assert pytest.approx(S_of_one) == S
        for name, history in values.items():
            assert torch.tensor(history).allclose(torch.tensor(values_of_one[name]), rtol=1e-5, atol=1e-5)


def all_have_the_same_bits(found):
    for other in found[1:]:
        assert other["figures"] == found[0]["figures"]
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
        assert "training sets differ in records or order" in each["records"]
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


JOB = (
    "tracking=none", "privacy.noise_multiplier=1.0", "model=logistic", "sampling.steps=3",
    "trainer.num_evaluations=1",
)  # fmt: skip


def test_a_job_of_two_processes_leaves_one_folder(dpexp_job, tmp_path, monkeypatch):
    """Its processes are forked from one that has imported what is slow."""
    forked = partial(multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(
        multiprocessing, "start_processes", lambda *given, start_method, **named: forked(*given, **named)
    )
    output = dpexp_job(*JOB, "trainer.strategy=ddp", "trainer.devices=2")
    result = result_of(output)
    assert result["rounds"] == 3 == len(read_ledger(output / "ledger.jsonl")) and result["private"]
    assert len([*tmp_path.rglob("config.yaml")]) == 2, "Hydra's, and the job's"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("trainer.strategy=fsdp", "trainer.devices=2"), "it shards weights"),
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
    plan = plan_of(module, n=N, q=0.1, steps=1, noise_multiplier=1.0)
    for strategy, words in ((Sharded(), "Sharded is not supported"), ("ddp_fork", "ddp_fork trains in processes")):
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
        privacy = dpexp.PrivacyCallback(plan, tmp_path / "l.jsonl")
        with pytest.raises(dpexp.ConfigError, match=words):
            privacy.setup(trainer, module, "fit")


def a_plan(**choices):
    return plan_of(torch.nn.Linear(3, 2), n=40, q=0.5, steps=2, noise_multiplier=1.0, **choices)


def test_plans_that_differ_in_whatever_they_say_are_told_apart():
    others = [
        {"clip_norm": FixedClipNorm(1 + 1e-9)},
        {"schedules": {"S": [50, 50]}}, {"clip_norm": AdaptiveClipNorm()},
        {"clip_norm": AdaptiveClipNorm(target_quantile=0.9)},
        {"clip_rule": Global(3.0)},
        {"private_metrics": {"loss": {"clip_norm": 1, "budget_share": 0.1,
        "every_n_rounds": 2}}},
        {"private_metrics": {"loss": {"clip_norm": 1, "budget_share": 0.1}}},
    ]  # fmt: skip
    digests = [digest_of_plan(a_plan(**choices)) for choices in ({}, *others)]
    assert len(set(digests)) == len(digests) and digest_of_plan(a_plan()) == digests[0]


class Listed(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], "a name"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_data_in_another_order_are_told_apart(dtype):
    x = torch.randn(1000, 3).to(dtype)
    order = [*range(500), 501, 500, *range(502, 1000)]
    usable = [PlacedRows(x, usable=torch.arange(1000) != k, reason="") for k in range(2)]
    for a, b in (
        (TensorDataset(x), TensorDataset(x[order])), (Listed(x), Listed(x[order])),
        (Subset(Listed(x), range(1000)), Subset(Listed(x), [0, 2, 1, *range(3, 1000)])),  # neither is fetched
        usable,
    ):  # fmt: skip
        assert digest_of_records(a) != digest_of_records(b)
        assert digest_of_records(a) == digest_of_records(a)


def test_who_is_a_users_is_compared():
    data, digests = TensorDataset(torch.zeros(6, 2)), []
    for data.user_of in ([0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 2, 2]):
        digests.append(digest_of_records(data, User(2, "user_of").units(data)))
    assert digests[0] != digests[1]


def test_weights_that_differ_in_place_alone_are_told_apart():
    model = torch.nn.Sequential(torch.nn.Linear(2048, 5, bias=False), torch.nn.BatchNorm1d(5))
    weight, digests = model[0].weight.detach(), {digest_of_weights(model)}
    for change in (
        lambda: weight.copy_(weight.flip(0)), lambda: weight.copy_(weight.roll(1024)),
        lambda: model[1].running_mean.add_(1),
    ):  # fmt: skip
        change()
        digests.add(digest_of_weights(model))
    assert len(digests) == 4


EXCHANGES = {
    "the default group": lambda: dist.all_reduce(torch.zeros(1)),
    "gathering with gradients": lambda: dist.nn.all_gather(torch.zeros(1)),
    "objects": lambda: dist.broadcast_object_list([0]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", EXCHANGES)
def test_a_step_finds_no_other_process(tmp_path, way):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "meet"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="exchanges something"), collectives_refused():
            assert not dist.is_initialized()
            EXCHANGES[way]()
        EXCHANGES[way]()
    finally:
        dist.destroy_process_group()


def test_which_process_takes_a_record_is_chance_and_each_is_taken_once():
    key, count = KeyStream.known(0, "dealing", 0).key, 3
    taken = [
        RoundSampler(lambda t: FullBatch(), 3000, 2, 5000, KeyStream(), None, Processes(rank, count), KeyStream(key))
        for rank in range(count)
    ]
    rounds = [[set(part) for part in sampler] + [set(part) for part in sampler] for sampler in taken]
    for parts in zip(*rounds, strict=True):
        assert set.union(*parts) == {*range(3000)} and sum(map(len, parts)) == 3000
        assert all(abs(len(part) - 1000) < 130 for part in parts)  # five standard deviations
    first = rounds[0][0]
    assert 300 < len(first & rounds[0][1]) < 370, "a third of a third, drawn anew each round"
    odd = sum(record % 2 for record in first)
    assert abs(odd - len(first) / 2) < 80
