"""Weights to begin from, and which parameters are trained."""

import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dpexp
from dpexp.commands.saved_jobs import predict
from dpexp.errors import ConfigError
from dpexp.reporting.terminal import print_trained_parameters
from dpexp.training.data import Backbone, Digits
from dpexp.training.models import cnn, mlp
from dpexp.training.pretrained import (
    All,
    Bias,
    Head,
    Lora,
    Modules,
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


@pytest.mark.parametrize(
    "tuning, expected",
    [
        (All(), "1.weight 1.bias 3.weight 3.bias 5.weight 5.bias"), (Head(), "5.weight 5.bias"),
        (Head("3"), "3.weight 3.bias"), (Modules([5, 1]), "1.weight 1.bias 5.weight 5.bias"),
        (Bias(), "1.bias 3.bias 5.weight 5.bias"),
    ],
)  # fmt: skip
def test_what_each_way_of_tuning_trains(tuning, expected):
    assert trained(tuning(body())) == expected.split()


def test_a_named_module_is_trained_with_all_that_is_in_it():
    assert trained(Modules(["0"])(nn.Sequential(body(), nn.Linear(3, 2)))) == [f"0.{name}" for name in trained(body())]


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


def test_a_head_that_is_tied_to_the_embedding_is_trained():
    model = nn.Sequential(OrderedDict(embedding=nn.Embedding(4, 3), body=nn.Linear(3, 3), head=nn.Linear(3, 4)))
    model.head.weight = model.embedding.weight
    assert {*trained(Head()(model))} == {"embedding.weight", "head.bias"}


@pytest.mark.parametrize(
    "tune, words",
    [
        (lambda: Head("classifier")(body()), "fine_tuning: classifier is no module with parameters; those are 1, 3, 5"),
        (lambda: Modules(["3", "2"])(body()), "fine_tuning: 2 is no module with parameters; those are 1, 3, 5"),
        (lambda: Modules("conv"), r"fine_tuning.names=conv must be a list of modules, such as \[0,9\]"),
        (lambda: Modules([]), r"fine_tuning.names=\[\] must be a list"),
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
    other, same = mlp([6], 7, [5, 4]), mlp([6], 3, [5, 4])
    its_head = other[5].weight.clone()
    with pytest.warns(UserWarning, match=r"has no 5\.weight, 5\.bias of this shape"):
        load_initial_weights(other, path, head_parameters(other))
    assert torch.equal(other[1].weight, first[1].weight) and torch.equal(other[3].bias, first[3].bias)
    assert torch.equal(other[5].weight, its_head) and read_metadata(path) == {"private": "True"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_initial_weights(same, path, head_parameters(same))
    assert all(map(torch.equal, same.parameters(), first.parameters()))


@pytest.mark.parametrize(
    "file, hidden, said",
    [
        ("weights", 9, r"is of another model: they differ in 1\.bias"), ("odd", 5, "they differ in odd"),
        ("nowhere", 5, "model.weights=.*nowhere cannot be read"),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_refused(tmp_path, file, hidden, said):
    save_weights(body(), tmp_path / "weights", {})
    save_file({**load_file(tmp_path / "weights"), "odd": torch.zeros(1)}, tmp_path / "odd")
    with pytest.raises(ConfigError, match=said):
        load_initial_weights(mlp([6], 3, [hidden, 4]), tmp_path / file, ["5.weight", "5.bias"])


FAST = ("model=mlp", "sampling.steps=2", "tracking=none", "trainer.num_evaluations=0", "privacy.noise_multiplier=1",
        "accountant=moments")  # fmt: skip
NETWORK = "{_target_: dpexp.training.models.mlp, shape: [1, 8, 8], classes: 10}"
BACKBONE = (
    "data.cache=cache",
    f"+data.features_of={{_target_: dpexp.training.data.Backbone, layer: '2', model: {NETWORK}}}",
)  # fmt: skip


def test_of_many_trained_parameters_each_kind_is_counted(capsys):
    blocks = [nn.ModuleDict({"lora_A": nn.Linear(2, 2), "base": nn.Linear(2, 2)}) for _ in range(12)]
    module = nn.ModuleDict({"h": nn.ModuleList(blocks), "head": nn.Linear(2, 1, bias=False)})
    for block in blocks:
        block["base"].requires_grad_(False)
    print_trained_parameters(module)
    said = "Trained: 74 of 146 weights: 12 × h.*.lora_A.weight, 12 × h.*.lora_A.bias, 1 × head.weight"
    assert capsys.readouterr().out.strip() == said


def public_weights(model, path, **about):
    """A file of weights as a job without privacy on other data keeps it."""
    save_weights(model, path, {"private": "False"} | about)
    return path


@pytest.mark.usefixtures("bare")
def test_named_modules_are_trained_around_frozen_public_ones_and_may_be_new(dpexp_job, tmp_path, capsys):
    """As in the slides: new first and last layers, for other images and classes, around frozen ones."""
    job = ("model=cnn", *FAST[1:], "data.id=rows")
    public = public_weights(cnn([3, 8, 8], 5), tmp_path / "public.safetensors")
    with pytest.warns(UserWarning, match=r"has no 0\.weight, 9\.weight, 9\.bias of this shape"):
        private = dpexp_job(*job, f"model.weights={public}", "fine_tuning=modules", "fine_tuning.names=[0,9]")
    said = "Trained: 490 of 9,258 weights: model.0.weight, model.0.bias, model.9.weight, model.9.bias"
    assert said in " ".join(capsys.readouterr().out.split())
    given, found = load_file(public), load_file(private / "weights.safetensors")
    kept = {name for name in given if given[name].shape == found[name].shape and torch.equal(given[name], found[name])}
    assert kept == {"3.weight", "3.bias", "7.weight", "7.bias"}
    about = read_metadata(private / "weights.safetensors")
    assert (about["private"], about["data_id"]) == ("True", "rows")
    public.unlink()  # which is not needed any more
    assert dpexp.load(private)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    "tuning, hidden, said",
    [
        (
            "fine_tuning=modules fine_tuning.names=[3]",
            128,
            r"they differ in 1\.weight, and only 3\.weight, 3\.bias may",
        ),
        (
            "fine_tuning=lora fine_tuning.head=false",
            7,
            r"they differ in 1\.bias, 1\.weight, and only 3\.weight, 3\.bias",
        ),
    ],
)
def test_of_public_weights_only_what_is_trained_and_the_head_may_differ(dpexp_job, tmp_path, tuning, hidden, said):
    shape = [1, 8, 8] if hidden == 7 else [3, 8, 8]
    public = public_weights(mlp(shape, 5, [hidden]), tmp_path / "public.safetensors")
    with pytest.raises(SystemExit, match=said):
        dpexp_job(*FAST, *tuning.split(), f"model.weights={public}")


TELLING = {"private": "False", "data_id": "rows"}


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "about, overrides",
    [
        (TELLING, "check=true"), (TELLING, "data.id=others check=true"), ({"private": "False"}, "check=true"),
        (TELLING, "data.id=rows privacy.enabled=false"), (TELLING | {"private": "True"}, "data.id=rows check=true"),
    ],
)  # fmt: skip
def test_weights_of_other_data_and_private_ones_are_taken(dpexp_job, tmp_path, about, overrides):
    path = public_weights(mlp([1, 8, 8], 10), tmp_path / "given.safetensors", **about)
    dpexp_job(*FAST, *overrides.split(), f"model.weights={path}")


def test_weights_of_a_job_without_privacy_on_the_same_data_id_are_refused(dpexp_job, tmp_path):
    path = public_weights(mlp([1, 8, 8], 10), tmp_path / "given.safetensors", **TELLING)
    said = r"come from a training without privacy on the records of data\.id=rows; use"
    with pytest.raises(SystemExit, match=f"model.weights=.*{said}"):
        dpexp_job(*FAST, "data.id=rows", f"model.weights={path}")
    features = (*BACKBONE, f"+data.features_of.weights={path}", "data.shape=[128]", "data.id=rows")
    with pytest.raises(SystemExit, match=f"data.features_of.weights=.*{said}"):
        dpexp_job("model=logistic", *FAST[1:], *features)


@pytest.mark.usefixtures("bare")
def test_features_of_a_public_network(dpexp_job, tmp_path):
    public = public_weights(mlp([1, 8, 8], 10), tmp_path / "public.safetensors")
    job = ("model=logistic", *FAST[1:], *BACKBONE, f"+data.features_of.weights={public}", "data.shape=[128]")
    private = dpexp_job(*job)
    assert load_file(private / "weights.safetensors")["1.weight"].shape == (10, 128)
    assert len(list((tmp_path / "cache").iterdir())) == 2  # training and test set
    by, head = Backbone(mlp([1, 8, 8], 10), "2", weights=str(public)), dpexp.load(private).model
    images = Digits().test.tensors[0][:3]
    assert torch.allclose(dpexp.load(private)(images), head(by(images)), atol=1e-5), "it takes what the network takes"
    np.save(tmp_path / "images.npy", images.numpy())
    found = predict([str(private), f"data={tmp_path}/images.npy", f"out={tmp_path}/found.csv"])
    assert np.allclose(found.filter(like="p_"), dpexp.load(private)(images).detach().softmax(1), atol=1e-6)
