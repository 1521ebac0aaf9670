"""Weights to begin from, and which parameters are trained."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dpexp
from dpexp.errors import ConfigError
from dpexp.training.models import mlp
from dpexp.training.pretrained import (
    All,
    Bias,
    Head,
    Lora,
    head_parameters,
    load_initial_weights,
    read_metadata,
    save_weights,
)


def body():
    torch.manual_seed(0)
    return mlp([6], 3, [5, 4])


def trained(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_what_each_way_of_tuning_trains():
    assert len(trained(All()(body()))) == 6
    assert trained(Head()(body())) == ["5.weight", "5.bias"]
    assert trained(Head("3")(body())) == ["3.weight", "3.bias"]
    assert trained(Bias()(body())) == ["1.bias", "3.bias", "5.weight", "5.bias"]


def test_lora_trains_low_ranks_and_the_head_and_begins_where_the_model_was():
    model, x = body(), torch.randn(7, 6)
    before = model(x)
    model = Lora(rank=2)(model)
    assert torch.equal(model(x), before)
    names = trained(model)
    assert names[-2:] == ["5.weight", "5.bias"] and all(".lora_" in name for name in names[:-2])
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert numbers == 2 * (6 + 5) + 2 * (5 + 4) + 4 * 3 + 3
    assert [name for name in trained(Lora(layers=["3"])(body())) if "lora" in name] == [
        "3.lora_A.default.weight", "3.lora_B.default.weight"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "tune, words",
    [
        (lambda: Head("classifier")(body()), "fine_tuning.head=classifier names no module.* is 5"),
        (lambda: Lora(layers=["query"])(body()), r"the model has no layers \['query'\]"),
        (lambda: Lora()(nn.Sequential(nn.Linear(3, 2))), "no linear layer but its head"),
        (lambda: head_parameters(nn.Tanh()), "no parameters"),
    ],
)
def test_what_cannot_be_tuned_is_said(tune, words):
    with pytest.raises(ConfigError, match=words):
        tune()


def test_weights_are_taken_over_by_name_and_only_the_head_may_differ(tmp_path):
    path, first = tmp_path / "weights.safetensors", body()
    save_weights(first, path, {"private": "True"})
    torch.manual_seed(1)
    other = mlp([6], 7, [5, 4])
    its_head = other[5].weight.clone()
    with pytest.warns(UserWarning, match="another head"):
        load_initial_weights(other, path, head_parameters(other))
        assert read_metadata(path) == {"private": "True"}
    assert torch.equal(other[1].weight, first[1].weight) and torch.equal(other[3].bias, first[3].bias)
    assert torch.equal(other[5].weight, its_head)
    same = mlp([6], 3, [5, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_initial_weights(same, path, head_parameters(same))
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), first.parameters(), strict=True))
    save_file({**load_file(path), "odd": torch.zeros(1)}, tmp_path / "odd")
    for file, wrong, words in (
        ("weights.safetensors", mlp([6], 3, [9, 4]), r"is of another model: they differ in 1\.bias"),
        ("odd", same, "they differ in odd"),
        ("nowhere", same, "model.weights=.*nowhere cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_initial_weights(wrong, tmp_path / file, ["5.weight", "5.bias"])


FAST = ("model=mlp", "sampling.steps=2", "tracking=none", "trainer.num_evaluations=0")
PUBLIC = ("data=synthetic", "data.shape=[1,8,8]", "privacy.enabled=false")
NETWORK = "{_target_: dpexp.training.models.mlp, shape: [1, 8, 8], classes: 10}"
BACKBONE = (
    "data.module._target_=dpexp.training.data.Features", "~data.module.users", "+data.module.cache=cache",
    "+data.module.of={_target_: dpexp.training.data.Digits, users: 200}", "+data.module.at_once=8",
    f"+data.module.by={{_target_: dpexp.training.data.Backbone, model: {NETWORK}}}",
)  # fmt: skip


def test_a_second_job_tunes_what_a_first_one_trained(dpexp_job, capsys):
    first = dpexp_job(*FAST, *PUBLIC) / "weights.safetensors"
    capsys.readouterr()
    with pytest.warns(UserWarning, match="another head"):  # 5 classes, and 10
        second = dpexp_job(*FAST, "fine_tuning=head", f"model.weights={first}")
    given, found = load_file(first), load_file(second / "weights.safetensors")
    assert torch.equal(found["1.weight"], given["1.weight"]) and torch.equal(found["1.bias"], given["1.bias"])
    assert json.loads((second / "result.json").read_text())["groups"].keys() == {"all"}
    assert "Trained: 1,290 of 9,610 weights: model.3.weight, model.3.bias" in capsys.readouterr().out
    first.unlink()
    assert torch.equal(dpexp.load(second)[1].weight, given["1.weight"])  # the first job's file is not needed


def test_a_model_that_was_tuned_by_lora_is_found_again(dpexp_job):
    output = dpexp_job(*FAST, "fine_tuning=lora", "fine_tuning.rank=2")
    assert dpexp.load(output)(torch.randn(3, 1, 8, 8)).shape == (3, 10)
    assert load_file(output / "weights.safetensors")["1.lora_B.default.weight"].abs().sum() > 0  # was trained


def test_weights_of_a_job_without_privacy_on_the_same_data_id_are_refused(dpexp_job):
    named, other, nameless = ("data.id=rows",), ("data.id=others",), ()
    telling = dpexp_job(*FAST, *named, "privacy.enabled=false") / "weights.safetensors"
    said = r"come from a training without privacy on the records of data\.id=rows; use"
    with pytest.raises(SystemExit, match=said):
        dpexp_job(*FAST, *named, f"model.weights={telling}")
    for allowed in ((*other, "check=true"), (*nameless, "check=true"), (*named, "privacy.enabled=false")):
        dpexp_job(*FAST, *allowed, f"model.weights={telling}")
    for ids, about in ((named, {"private": "True", "data_id": "rows"}), (nameless, {"private": "False"})):
        save_file(load_file(telling), given := telling.with_name("given.safetensors"), about)
        dpexp_job(*FAST, *ids, "check=true", f"model.weights={given}")


def test_features_of_a_public_network(dpexp_job, tmp_path):
    public = dpexp_job(*FAST, *PUBLIC, "data.classes=10") / "weights.safetensors"
    job = ("model=logistic", *FAST[1:], *BACKBONE, f"+data.module.by.weights={public}", "data.shape=[128]")
    private = dpexp_job(*job)
    assert load_file(private / "weights.safetensors")["1.weight"].shape == (10, 128)
    assert len(list((tmp_path / "cache").iterdir())) == 2  # training and test set
