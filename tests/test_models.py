"""Other people's models, as they are: right against one record at a time, and processed as is said here.

    python -m pytest tests/test_models.py          # some of them
    python -m pytest tests/test_models.py -m ''    # all
    python tests/test_models.py                    # writes docs/zoo.md

The image models are tried where timm and torchvision are installed: extra [models].
"""

import zoo  # first: pytorch_lightning imports torchvision, where there is one

# isort: split
import importlib
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from reference import clipped_sums, stacked
from test_engine import relative_error
from torch.utils._pytree import tree_map

from dpexp.errors import ConfigError
from dpexp.privacy import bounds, groups
from dpexp.privacy.engine import engine as engine_module
from dpexp.privacy.engine.engine import Engine
from dpexp.privacy.noise import GaussianNoise
from dpexp.privacy.plan import make_plan

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
    "encoder and decoder", "encoder, boolean mask", "attention with its weights", "LSTM", "LSTM, packed", "early exits",
    "experts, all asked", "weight-standardised convolutions", "wide residual network", "weight norm", "checkpointed",
    "tied language model", "variational autoencoder", "Fourier layer, complex", "U-Net",
    "BERT, classes, mask", "RoBERTa, tags", "DeBERTa", "GPT-2, mask", "Llama", "Mistral", "Bloom", "Mixtral", "BART",
    "T5", "Whisper", "Wav2Vec2, CTC", "CLIP", "ViT",
    "LoRA on Llama", "DoRA on Llama", "IA3 on Llama", "prompt tuning on Llama", "prefix tuning on Llama", "LoRA on T5",
    "timm ViT", "timm Swin", "timm ConvNeXt", "timm NF-ResNet", "timm ResNet", "torchvision ResNet, GroupNorm",
    "torchvision MobileNetV2, GroupNorm", "torchvision Swin",
}  # fmt: skip
# "in parts": those together that answer alike, here few. "part: …": all together, but for these modules, or operators
# that PyTorch loops over. "singly": one at a time.
EXPECTED = {
    "MLP, two losses": "part: aten::multi_margin_loss",
    "checkpointed, reentrant": "singly",
    "Fourier layer, complex": "refused",
    "LSTM, packed": "singly",
    "GRU, both ways, packed": "singly",
    "experts, routed": "in parts",
    "ELECTRA, discriminator": "in parts",
    "Bloom": "part: transformer.h.*.mlp.gelu_impl",
    "Mixtral": "in parts",
    "Wav2Vec2, CTC": "part: aten::ctc_loss",
    "LoHa on Llama": "part: base_model.model.model.layers.*.self_attn.q_proj",
    "LoKr on Llama": "part: base_model.model.model.layers.*.self_attn.q_proj",
    "torchvision Swin": "part: aten::as_strided_",
    "torchvision ConvNeXt": "part: aten::as_strided_",
    "timm ResNet": "refused",
    "torchvision ResNet": "refused",
}
DROPPING = {
    "Wav2Vec2, CTC": "part: aten::ctc_loss, wav2vec2.encoder",
}  # where dropout makes a difference
NAMES = [
    pytest.param(family, name, id=name, marks=[] if name in ALWAYS else pytest.mark.whole)
    for family, models in MODELS.items()
    for name in models
]


def tried(model, dropout, dtype):
    """What becomes of its records: the verdict, why, and the relative error of the clipped sums."""
    torch.manual_seed(0)
    module = model.build(dropout)
    module = module.double() if dtype == torch.float64 else module
    for p in module.parameters():
        p.data = p.data.to(torch.promote_types(p.dtype, dtype))
    batch = tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, model.batch())
    # Of many records 16 parts are said nothing of, so of few it must be fewer than there are.
    with warnings.catch_warnings(record=True) as said, mock.patch.object(engine_module, "_PARTS", 4):
        warnings.simplefilter("always")
        try:
            plan = make_plan(
                module, n=20, q=0.3, steps=1, noise_multiplier=1.0, group=groups.per_layer(), bound=bounds.Fixed(0.01)
            )
            engine = Engine(plan, module, GaussianNoise())
            engine.start()
            engine.accumulate(lambda one: model.loss(module, one), stacked(batch), zoo.B)
            engine.finish()
        except ConfigError as refusal:
            return "refused", str(refusal), 0.0
    texts = [str(warning.message) for warning in said]
    ours = [text for text in texts if OURS.search(text)]
    slow = [found for text in ours if (found := SLOW.fullmatch(text))]
    assert len(slow) == len(ours) <= 1, ours
    looped = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for found in slow for name in MODULE.findall(found[1])}
    looped |= {operator for text in texts for operator in OPERATOR.findall(text)}
    verdict = f"part: {', '.join(sorted(looped))}" if looped else "fast"
    if slow and not MODULE.search(slow[0][1]):
        verdict = {"one at a time": "singly", "in many parts": "in parts"}[slow[0][2]]
    why = slow[0][3] if slow else ""
    wrong = 0.0
    if not dropout:
        reference = clipped_sums(plan, module, lambda one: model.loss(module, one), batch, zoo.B)
        wrong = relative_error(engine._sums, reference)
    return verdict, why, wrong


OURS = re.compile("records|training_step")
SLOW = re.compile(r"(.*) are processed (one at a time|in many parts), .* together: (.*)")
MODULE = re.compile(r"(\S+) \(\w+\)")
OPERATOR = re.compile(r"batching rule for (aten::\w+)")  # of PyTorch's own warning


@pytest.mark.parametrize("family, name", NAMES)
def test_right_and_no_slower_than_said(family, name):
    verdict, why, error = tried(MODELS[family][name], False, torch.float64)
    assert error < 1e-9
    assert verdict == EXPECTED.get(name, "fast"), why


@pytest.mark.parametrize("family, name", NAMES)
def test_with_dropout_as_it_is_used(family, name):
    verdict, why, _ = tried(MODELS[family][name], True, torch.float32)
    assert verdict == (EXPECTED | DROPPING).get(name, "fast"), why


def test_images_are_tried():
    pytest.importorskip("timm", reason="timm and torchvision come with the extra [models], which is not installed")
    assert {"timm ResNet", "torchvision ResNet"} <= {name for models in MODELS.values() for name in models}


def test_the_page_says_what_is_expected():
    told = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", PAGE.read_text(), re.M))
    for models in MODELS.values():
        assert {name: told.get(name) for name in models} == {name: EXPECTED.get(name, "fast") for name in models}


PAGE = Path(__file__).parent.parent / "docs" / "zoo.md"
INTRODUCTION = """# Models that were tried

Tiny ones, as the libraries that have them make them, on records of several lengths where they are sequences: masks,
labels of -100, the usual loss. For each, `tests/test_models.py` compares the clipped sums with those of one record at a
time in float64, at 1e-9, and holds how its records are processed, with dropout and without:

- *fast*: together, or where the model asks its data, those that answer alike together;
- *in parts*: likewise, but nearly every one of these records answers otherwise; of more records, more may answer alike;
- *part*: together, but for these modules, or operators (`aten::…`) that PyTorch runs record by record under vmap;
- *singly*: one at a time, which is right but slow;
- *refused*.

What a model is made of decides, and [speed](speed.md) says how. `python tests/test_models.py` writes this page; with
`pip install -e '.[test,models]'`, `python -m pytest tests/test_models.py -m ''` tries them all, and without `-m ''`
some."""


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
