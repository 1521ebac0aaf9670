"""The composed options of a job in one file, to edit and run."""

import re

import pytest
from hydra import compose as compose_by_hydra
from hydra import initialize_config_dir
from jobs import result_of
from omegaconf import OmegaConf

from dpexp.commands.command_line import compose, with_config_file
from dpexp.commands.copy_options import copy
from dpexp.commands.saved_jobs import resume
from dpexp.config import CONF, register

JOBS = [
    (),
    ("experiment=table", "data.path=rows, of 1 (new).csv", "data.id=1e5"),
    ("experiment=mnist_frontier", "callbacks=[ema,learning_rate]", "optimizer.lr=auto", "trainer=gpu"),
    ("experiment=mnist_users", "privacy.budget={epsilon: 8, delta: 1e-5}", "noise=banded", "preprocessing=[pca]",
     "audit=dirac", "logger=[csv,tensorboard]", "batchnorm=private"),
    ("mechanism=joint", "clip_norm=fixed", "alpha=fixed", "clip_norm.value=0.5", "+model.width=3",
     "data.id='two\nlines: x'", "schedule.z={linear: [2, 1]}", "privacy_unit=user"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    register()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("overrides", JOBS, ids=str)
def test_a_copy_composes_to_the_same_options(overrides):
    copy([*overrides, "my own.yaml"])
    _, folder, _, name, *searchpath = with_config_file(["my own.yaml"])
    with initialize_config_dir(folder, version_base="1.3"):
        copied = OmegaConf.to_container(compose_by_hydra(name, searchpath, return_hydra_config=True))
    options = copied.pop("hydra")["runtime"]["choices"]
    assert copied == OmegaConf.to_container(compose(*overrides))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        first = compose_by_hydra("config", [one for one in overrides if "(" not in one], return_hydra_config=True)
    choices = OmegaConf.to_container(first.hydra.runtime.choices) | {"experiment": None}
    assert choices.items() <= options.items()


def test_comments_stand_above_the_keys_that_they_explain(tmp_path):
    copy(["model=logistic", "experiment=finetune_lm", "data.path=x.csv", "my.yaml"])
    text = (tmp_path / "my.yaml").read_text()
    for lines in (
        "# of model initialisation and everything else that need not be secret\nseed: 0\n",
        "\n  # z itself\n  noise_multiplier: null\n",
        "\n# same noise σ̃_g on the sums. All but the first need a given noise\ncalibrate: noise_multiplier\n",
    ):
        assert lines in text
    about = re.findall("(?<!\\S)# .*", (CONF / "sampling" / "poisson.yaml").read_text())[0]
    assert f"\n{about}\n" in text.partition("sampling:\n")[0] and "@package" not in text
    assert str(CONF) not in text, "so that it runs on another machine"


def test_an_edited_copy_runs_with_overrides_and_goes_on_with_its_options_when_interrupted(dpexp_job, tmp_path, capsys):
    dpexp_job("copy", "model=logistic", "tracking=none", "sampling.steps=3", "privacy.noise_multiplier=2", "my.yaml")
    assert capsys.readouterr().out == "Edit my.yaml, and run it: python -m dpexp my.yaml\n"
    file = tmp_path / "my.yaml"
    file.write_text(file.read_text().replace("steps: 3", "steps: 2"))
    output = dpexp_job("my.yaml", "trainer.num_evaluations=0", "seed=7")
    result, before = result_of(output), OmegaConf.to_container(OmegaConf.load(output / "config.yaml"))
    assert (result["rounds"], result["noise_multiplier"], before["seed"]) == (2, 2.0, 7)
    assert (output / "card.md").read_text().startswith("# logistic on digits")
    (output / "last.ckpt").touch()  # as if it had been killed
    _, folder, _, name, *others = resume([str(output)])
    with initialize_config_dir(folder, version_base="1.3"):
        again = OmegaConf.to_container(compose_by_hydra(name, others), resolve=True)
    assert again.pop("checkpoint")["resume"] and before.pop("checkpoint") and before.pop("rounds") == 2
    assert again.pop("rounds") is None and again == before


def test_a_copy_takes_another_sweeper():
    copy(["my.yaml"])
    assert "hydra/sweeper=grid" in with_config_file(["my.yaml", "hydra/sweeper=grid"])
