"""Configurations and plans in Python, outside of any job."""

import subprocess
import sys

import pytest
import yaml

import dpexp
from dpexp.config import CONF
from dpexp.errors import ConfigError


def test_a_configuration_is_composed_and_planned():
    cfg = dpexp.compose("group=conv_fc", "mechanism=joint", "sampling.steps=40", "privacy.epsilon=2")
    plan = dpexp.plan(cfg)
    assert cfg.mechanism._target_.endswith("Joint") and plan.rounds == 40
    assert [group.name for group in plan.groups] == ["conv", "fc"]
    assert 1.99 < dpexp.epsilon(plan.ledger(), cfg.privacy.delta) <= 2


def test_one_composes_again_and_with_options_of_ones_own(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "wide.yaml").write_text(
        "_target_: dpexp.training.models.mlp\nshape: ${data.shape}\nclasses: ${data.classes}\nhidden: [16]\n"
    )
    cfg = dpexp.compose("model=wide", "group=per_layer", "privacy.noise_multiplier=1", config_dir=tmp_path)
    assert [group.d for group in dpexp.plan(cfg).groups] == [64 * 16 + 16, 16 * 10 + 10]
    with pytest.raises(ConfigError, match="model has no option 'wide'"):
        dpexp.compose("model=wide")


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["group=per_layr"], "did you mean 'per_layer'"),
        (["privacy.epsilom=1"], "privacy has no key 'epsilom'"),
        (["rounds=40"], "give sampling.steps"),
        (["privacy.epsilon=-1"], "privacy.epsilon=-1"),
        (["privacy.enabled=false"], "has no privacy plan"),
    ],
)
def test_what_is_wrong_is_one_sentence(overrides, said):
    with pytest.raises(ConfigError, match=said):
        dpexp.plan(dpexp.compose(*overrides))


def test_composing_needs_no_torch_and_no_job(tmp_path):
    code = (
        "import sys, dpexp; assert dpexp.compose('mechanism=joint').data.n == 1437;"
        "print([m for m in ('torch', 'mlflow') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert shown.stdout == "[]\n", shown.stderr


@pytest.mark.parametrize("path", sorted(CONF.glob("experiment/*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes(path):
    assert dpexp.compose(f"experiment={path.stem}", "data.root=.").data.n > 0


@pytest.mark.parametrize("path", sorted(CONF.glob("sweep/*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_composes_with_each_value_that_it_varies(path):
    params = yaml.safe_load(path.read_text())["hydra"]["sweeper"]["params"]
    values = {key: str(given).split(", ") for key, given in params.items() if "(" not in str(given)}
    for k in range(max(map(len, values.values()), default=1)):
        assert dpexp.compose(f"sweep={path.stem}", *(f"{key}={each[k % len(each)]}" for key, each in values.items()))
