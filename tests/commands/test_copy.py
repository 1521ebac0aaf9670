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
from dpexp.config import CONF
from dpexp.errors import ConfigError

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
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("overrides", JOBS, ids=str)
def test_a_copy_composes_to_the_same_options(overrides):
    given = compose(*overrides)
    copy([*overrides, "my own.yaml"])
    _, folder, _, name, *searchpath = with_config_file(["my own.yaml"])
    with initialize_config_dir(folder, version_base="1.3"):
        copied = compose_by_hydra(name, searchpath, return_hydra_config=True)
    options = OmegaConf.to_container(copied)
    hydra = options.pop("hydra")
    assert options == OmegaConf.to_container(given)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        first = compose_by_hydra("config", [one for one in overrides if "(" not in one], return_hydra_config=True)
    choices = OmegaConf.to_container(first.hydra.runtime.choices) | {"experiment": None}
    assert {name: option for name, option in hydra["runtime"]["choices"].items() if name in choices} == choices


def test_comments_stand_above_the_keys_that_they_explain(tmp_path):
    copy(["model=logistic", "experiment=finetune_lm", "data.path=x.csv", "my.yaml"])
    lines = (tmp_path / "my.yaml").read_text().splitlines()
    for comment, key in (
        ("# of model initialisation and everything else that need not be secret", "seed: 0"),
        ("  # z itself", "  noise_multiplier: null"),
        ("# same noise σ̃_g on the sums. All but the first need a given noise", "calibrate: noise_multiplier"),
    ):
        assert lines[lines.index(key) - 1] == comment
    about = re.findall("(?<!\\S)# .*", (CONF / "sampling" / "poisson.yaml").read_text())[0]
    assert about in lines[: lines.index("sampling:")] and not any("@package" in line for line in lines)
    assert not any(str(CONF) in line for line in lines), "so that it runs on another machine"


def test_an_edited_copy_runs_with_overrides_and_goes_on_with_its_options_when_interrupted(dpexp_job, tmp_path, capsys):
    dpexp_job("copy", "model=logistic", "tracking=none", "sampling.steps=3", "privacy.noise_multiplier=2", "my.yaml")
    assert capsys.readouterr().out == "Edit my.yaml, and run it: python -m dpexp my.yaml\n"
    file = tmp_path / "my.yaml"
    file.write_text(file.read_text().replace("steps: 3", "steps: 2"))
    output = dpexp_job("my.yaml", "trainer.num_evaluations=0", "seed=7")
    result = result_of(output)
    assert (result["rounds"], result["noise_multiplier"]) == (2, 2.0)
    assert (output / "card.md").read_text().startswith("# logistic on digits")
    assert OmegaConf.load(output / "config.yaml").seed == 7
    with pytest.raises(SystemExit, match=r"^dpexp: model=cnn would not replace the values in my.yaml; edit it, or"):
        dpexp_job("my.yaml", "model=cnn")
    (output / "last.ckpt").touch()  # as if it had been killed
    _, folder, _, name, *others = resume([str(output)])
    with initialize_config_dir(folder, version_base="1.3"):
        again = OmegaConf.to_container(compose_by_hydra(name, others), resolve=True)
    before = OmegaConf.to_container(OmegaConf.load(output / "config.yaml"))
    assert again.pop("checkpoint")["resume"] and before.pop("checkpoint") and before.pop("rounds") == 2
    assert again.pop("rounds") is None and again == before


def test_only_a_file_of_options_is_run(dpexp_job, tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "list.yaml").write_text("[1]")
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xe9")
    (tmp_path / "values.yaml").write_text("seed: 1")
    for name in ("nowhere", "folder", "list", "latin", "values"):
        with pytest.raises(ConfigError, match=f"{name}.yaml is no file of options, as python -m dpexp copy"):
            with_config_file([f"{name}.yaml"])
    dpexp_job("copy", "my.yaml")
    whole = (tmp_path / "my.yaml").read_text()
    for old, new, said in (
        ("\nseed: 0", "\nsede: 0", r"^dpexp: sede: there is no key 'sede'; did you mean 'seed'\?"),
        ("\nseed: 0", "\nseed: many", "^dpexp: seed: Value 'many' .*Integer"),
    ):
        (tmp_path / "my.yaml").write_text(whole.replace(old, new))
        with pytest.raises(SystemExit, match=said):
            dpexp_job("my.yaml")
    assert "hydra/sweeper=grid" in with_config_file(["my.yaml", "hydra/sweeper=grid"])


def test_what_cannot_be_copied_is_refused(tmp_path):
    (tmp_path / "there.yaml").write_text("mine")
    for arguments, said in (
        (["there.yaml"], "there.yaml exists already; name another file"),
        ([], "give the options of one job, and one FILE.yaml"),
        (["seed=1", "my.txt"], "one FILE.yaml"),
        (["-m", "my.yaml"], "give the options of one job"),
        (["sweep=digits", "my.yaml"], "give the options of one job"),
        (["~model.shape", "my.yaml"], "a file takes no ~key and no new +key"),
        (["+trainer.max_time='00:01:00:00'", "my.yaml"], "a file takes no ~key and no new +key"),
        (["model=cn", "my.yaml"], "model has no option 'cn'; did you mean 'cnn'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            copy(arguments)
    assert (tmp_path / "there.yaml").read_text() == "mine" and [*tmp_path.iterdir()] == [tmp_path / "there.yaml"]
