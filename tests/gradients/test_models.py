"""Other people's models, as they are: right against one record at a time, and processed as is said here.

    python -m pytest tests/gradients/test_models.py          # some of them
    python -m pytest tests/gradients/test_models.py -m ''    # all
    python tests/gradients/test_models.py                    # writes docs/zoo.md

The image models are tried where timm and torchvision are installed: extra [models].
"""

import zoo  # first: pytorch_lightning imports torchvision, where there is one

# isort: split
import importlib
import re
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from plans import plan_of
from reference import clipped_sums, stacked
from test_clipped_sums import relative_error
from torch.utils._pytree import tree_map

from dpexp.errors import ConfigError
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan import clipping, groups
from dpexp.privacy.round import PrivateRound

FAMILIES = {
    "written": "By hand: images, rows, sets",
    "sequences": "By hand: sequences",
    "text": "transformers",
    "adapters": "peft",
    "images": "timm and torchvision",
}
HERE = [family for family in FAMILIES if family != "images" or find_spec("timm")]
MODELS = {family: importlib.import_module(f"zoo.{family}").MODELS for family in HERE}

ALWAYS = {
    "encoder, boolean mask", "LSTM, packed", "early exits", "weight-standardized convolutions", "checkpointed",
    "tied language model", "Fourier layer, complex", "BERT, classes, mask", "DeBERTa", "GPT-2, mask", "Mixtral",
    "Wav2Vec2, CTC", "LoRA on Llama", "prefix tuning on Llama", "timm ViT", "timm ResNet",
    "torchvision ResNet, GroupNorm",
}  # fmt: skip
# What is not traced (see the page).
EXPECTED = {
    "checkpointed, reentrant": "singly",
    "early exits": "singly",
    "Fourier layer, complex": "refused",
    "LSTM, packed": "singly",
    "GRU, both ways, packed": "singly",
    "experts, routed": "singly",
    "ELECTRA, discriminator": "singly",
    "DeBERTa": "singly",
    "DeBERTa-v2": "singly",
    "Bloom": "singly",
    "Mixtral": "singly",
    "Wav2Vec2, CTC": "singly",
    "LoHa on Llama": "singly",
    "LoKr on Llama": "singly",
    "timm ResNet": "refused",
    "torchvision ResNet": "refused",
}
NAMES = [
    pytest.param(family, name, id=name, marks=[] if name in ALWAYS else pytest.mark.whole)
    for family, models in MODELS.items()
    for name in models
]


def tried(model, dropout, dtype):
    """How its records are processed, why they are not traced, and the relative error of the clipped sums."""
    torch.manual_seed(0)
    module = model.build(dropout)
    module = module.double() if dtype == torch.float64 else module
    for p in module.parameters():
        p.data = p.data.to(torch.promote_types(p.dtype, dtype))
    batch = tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, model.batch())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = plan_of(
                module,
                n=20,
                q=0.3,
                steps=1,
                noise_multiplier=1.0,
                group=groups.per_layer(),
                clip_norm=clipping.FixedClipNorm(0.01),
            )
            engine = PrivateRound(plan, module, GaussianNoise())
            engine.begin()
            engine.add_chunk(lambda one: model.loss(module, one), stacked(batch), zoo.B)
            engine.end()
        except ConfigError as refusal:
            return "refused", str(refusal), 0.0
    wrong = 0.0
    if not dropout:
        reference = clipped_sums(plan, module, lambda one: model.loss(module, one), batch, zoo.B)
        wrong = relative_error(engine._sums, reference)
    return SHORT[engine.mode], engine.reason, wrong


SHORT = {"traced": "traced", "vmap": "together", "one at a time": "singly"}


@pytest.mark.parametrize("family, name", NAMES)
def test_right_and_processed_as_said(family, name):
    verdict, why, error = tried(MODELS[family][name], False, torch.float64)
    assert error < 1e-9
    assert verdict == EXPECTED.get(name, "traced"), why


@pytest.mark.whole
@pytest.mark.parametrize("family, name", NAMES)
def test_with_dropout_as_it_is_used(family, name):
    verdict, why, _ = tried(MODELS[family][name], True, torch.float32)
    assert verdict == EXPECTED.get(name, "traced"), why


def test_images_are_tried():
    pytest.importorskip("timm", reason="timm and torchvision come with the extra [models], which is not installed")
    assert {"timm ResNet", "torchvision ResNet"} <= {name for models in MODELS.values() for name in models}


def test_the_page_says_what_is_expected():
    told = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", PAGE.read_text(), re.M))
    for models in MODELS.values():
        assert {name: told.get(name) for name in models} == {name: EXPECTED.get(name, "traced") for name in models}


PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
INTRODUCTION = """# Models that were tried

Tiny ones, as the libraries that have them make them, on records of several lengths where they are sequences: masks,
labels of -100, the usual loss. For each, `tests/gradients/test_models.py` compares the clipped sums with those of one
record at a time in float64, at 1e-9, and holds how its records are processed, with dropout and without:

- *traced*: by a graph of the step, all records together;
- *together*: by the step as it is written, under vmap;
- *singly*: one at a time by ordinary autograd, which is slow;
- *refused*.

What a model is made of decides, and [speed](speed.md) says how. `python tests/gradients/test_models.py` writes this
page; with `pip install -e '.[test,models]'`, `python -m pytest tests/gradients/test_models.py -m ''` tries all of them,
and without `-m ''` some."""


def page():
    """docs/zoo.md, of which every row is found by trying."""
    yield INTRODUCTION
    for family, models in MODELS.items():
        yield f"\n## {FAMILIES[family]}\n\n| | | why |\n|---|---|---|"
        for name, model in models.items():
            verdict, why, _ = tried(model, False, torch.float64)
            yield f"| {name} | {verdict} | {why.replace('|', '∣')} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PAGE.write_text("\n".join(page()) + "\n")
