"""Configurations and plans in Python, outside of any job."""

import json
import re

import pytest
import yaml

import dpexp
from dpexp.commands.build import module_of
from dpexp.commands.command_line import check
from dpexp.config import CONF
from dpexp.errors import ConfigError


def test_one_composes_again_and_with_options_of_ones_own(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "wide.yaml").write_text(
        "_target_: dpexp.training.models.mlp\nshape: ${data.shape}\nclasses: ${data.classes}\nhidden: [16]\n"
    )
    cfg = dpexp.compose("model=wide", "group=per_layer", "privacy.noise_multiplier=1", config_dir=tmp_path)
    assert [group.d for group in dpexp.plan(cfg).groups] == [64 * 16 + 16, 16 * 10 + 10]
    with pytest.raises(ConfigError, match="model has no option 'wide'"):
        dpexp.compose("model=wide")
    with pytest.raises(ConfigError, match="has no privacy plan"):
        dpexp.plan(dpexp.compose("privacy.enabled=false"))


def test_every_experiment_and_sweep_composes_and_has_a_model():
    of_texts = ("finetune_lm", "finetune_classifier", "text_features", "text_lora", "text_synthetic")
    of_ones_own = ("table", *of_texts)  # users give what their data are
    for path in CONF.glob("experiment/*.yaml"):
        known = ["data.n=9"] if path.stem in of_ones_own else []
        cfg = dpexp.compose(f"experiment={path.stem}", "data.root=.", *known)
        assert cfg.data.n > 0
        if path.stem not in (*of_ones_own, "e2e_gpt2", "mnli_roberta"):  # whose models are files
            assert [*module_of(cfg).parameters()], path.stem
    for path in CONF.glob("sweep/*.yaml"):
        params = yaml.safe_load(path.read_text())["hydra"]["sweeper"]["params"]
        values = {key: str(given).split(", ") for key, given in params.items() if "(" not in str(given)}
        check([f"sweep={path.stem}", *(f"{key}={value}" for key, each in values.items() for value in each)])
        assert dpexp.compose(f"sweep={path.stem}", *(f"{key}={each[-1]}" for key, each in values.items()))


def test_every_tutorial_is_kept_with_the_outputs_of_its_commands():
    """And none has an error, colours, or a path of the machine that ran it (python benchmarks/tutorials.py --write)."""
    tutorials = [*(CONF.parent / "docs" / "tutorials").glob("*.ipynb")]
    assert len(tutorials) == 7
    for path in tutorials:
        cells = json.loads(path.read_text())["cells"]
        shown = json.dumps([cell.get("outputs") for cell in cells])
        assert not re.search('u001b|/tmp/|/home/|/root/|/Users/|"output_type": "error"', shown), path.name
        commands = [
            cell for cell in cells if cell["cell_type"] == "code" and "!python -m dpexp" in "".join(cell["source"])
        ]
        assert all(cell["outputs"] for cell in commands), path.name
