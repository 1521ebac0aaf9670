"""Models of other libraries: clipped sums against one record at a time, and the execution mode listed here.

    python -m pytest tests/gradients/test_models.py          # some
    python -m pytest tests/gradients/test_models.py -m ''    # all
    python tests/gradients/test_models.py                    # writes docs/zoo.md
    python tests/gradients/test_models.py cuda [FAMILY]      # prints what is otherwise on a GPU, and errors above 1e-9

Image models need timm and torchvision: extra [models].
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # as a script, which pytest's path is not for

import zoo  # noqa: F401  # first: pytorch_lightning imports torchvision, where there is one

# isort: split
import importlib
import re
import warnings
from importlib.util import find_spec

import pytest
import torch
from reference import engine_of, sums_of
from test_clipped_sums import KINDS, error_of, of_kind
from torch.utils._pytree import tree_map

from dpexp.errors import ConfigError

FAMILIES = {
    "written": "By hand: images, rows, sets", "sequences": "By hand: sequences", "text": "transformers",
    "adapters": "peft", "images": "timm and torchvision",
}  # fmt: skip
HERE = [family for family in FAMILIES if family != "images" or find_spec("timm")]
MODELS = {family: importlib.import_module(f"zoo.{family}").MODELS for family in HERE}

ALWAYS = {
    "MLP, two losses", "attention with its weights",
    "LSTM, projected", "GRU, both ways", "checkpointed", "checkpointed, reentrant", "channels last",
    "attention pooling", "matrix factorization, Bilinear", "LSTM, packed", "early exits",
    "weight-standardized convolutions", "Fourier layer, complex", "DeBERTa", "GPT-2, mask", "Mixtral", "Wav2Vec2, CTC",
    "LoRA on Llama", "timm ViT", "timm ResNet", "torchvision ResNet, GroupNorm",
}  # fmt: skip
# All others are traced.
EXPECTED = {
    "LSTM, packed": "one at a time", "GRU, both ways, packed": "one at a time",
    "ELECTRA, discriminator": "one at a time", "early exits": "one at a time", "Fourier layer, complex": "refused",
    "experts, routed": "one at a time", "DeBERTa": "one at a time",
    "DeBERTa-v2": "one at a time", "Mixtral": "one at a time",
    "Wav2Vec2, CTC": "one at a time", "LoHa on Llama": "one at a time", "LoKr on Llama": "one at a time",
    "timm ResNet": "refused", "torchvision ResNet": "refused",
}  # fmt: skip
NAMES = [
    pytest.param(family, name, id=name, marks=[] if name in ALWAYS else pytest.mark.whole)
    for family, models in MODELS.items()
    for name in models
]


def run(family, name, dropout, dtype, device="cpu"):
    """The execution mode, the reason why it is not traced, and the relative error of the clipped sums."""
    torch.manual_seed(0)
    model, kind = MODELS[family][name], KINDS[[*MODELS[family]].index(name) % 4]
    module = model.build(dropout)
    module = module.double() if dtype == torch.float64 else module
    for p in module.parameters():
        p.data = p.data.to(torch.promote_types(p.dtype, dtype))
    module.to(device)
    batch = tree_map(lambda t: t.to(device, dtype if t.is_floating_point() else None), model.batch())
    try:
        engine = engine_of(module, 0.01, **of_kind(*kind))
        sums_of(engine, model.loss, batch)
    except ConfigError as refusal:
        return "refused", str(refusal), 0.0
    return engine.step.mode, engine.step.reason, 0.0 if dropout else error_of(engine, model.loss, batch)


@pytest.mark.parametrize("family, name", NAMES)
def test_clipped_sums_and_execution_mode(family, name):
    mode, reason, error = run(family, name, False, torch.float64)
    assert error < 1e-9
    assert mode == EXPECTED.get(name, "traced"), reason


@pytest.mark.whole
@pytest.mark.parametrize("family, name", NAMES)
def test_execution_mode_with_dropout(family, name):
    mode, reason, _ = run(family, name, True, torch.float32)
    assert mode == EXPECTED.get(name, "traced"), reason


def test_images_are_tried():
    pytest.importorskip("timm", reason="timm and torchvision come with the extra [models], which is not installed")
    assert {"timm ResNet", "torchvision ResNet"} <= {name for models in MODELS.values() for name in models}


def test_the_page_says_what_is_expected():
    lines = re.findall(r"^(Traced|One at a time|Refused): (.*)\.$", PAGE.read_text(), re.M)
    listed = {name: mode.lower() for mode, names in lines for name in names.split("; ")}
    for models in MODELS.values():
        assert {name: listed.get(name) for name in models} == {name: EXPECTED.get(name, "traced") for name in models}


PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
INTRODUCTION = """# Supported models

These tiny models were tested, with the losses of their libraries, sequences of several lengths, masks and dropout.
Their clipped sums agree with those of one record at a time in float64, up to a relative error of 1e-9.

- *Traced*: all records are processed together.
- *One at a time*: the step branches on data, or its shapes depend on them, which is
  [slow](refused_or_slow.md#slow). A warning names the line of code.
- *Refused*: BatchNorm mixes records ([GroupNorm](refused_or_slow.md#refused) may replace it), or a parameter is
  complex."""


def page():
    """docs/zoo.md, from a run of every model."""
    yield INTRODUCTION
    for family, models in MODELS.items():
        yield f"\n## {FAMILIES[family]}"
        modes = {name: run(family, name, False, torch.float64)[0] for name in models}
        for mode in ("traced", "one at a time", "refused"):
            names = [name for name in models if modes[name] == mode]
            if names:
                yield f"\n{mode.capitalize()}: {'; '.join(names)}."


def on_device(device, *families):
    """Prints the models whose mode is not the one listed above, or whose sums are wrong; returns whether any are."""
    wrong = False
    for family in families or MODELS:
        for name in MODELS[family]:
            mode, reason, error = run(family, name, False, torch.float64, device)
            wrong |= error > 1e-9
            if mode != EXPECTED.get(name, "traced") or error > 1e-9:
                print(f"{name}: {mode}, error {error:.0e}; {reason}", flush=True)
    return wrong


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:]:
        sys.exit(on_device(*sys.argv[1:]))
    else:
        PAGE.write_text("\n".join(page()) + "\n")
