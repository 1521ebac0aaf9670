"""The price of privacy in a training step of other people's models, against plain SGD and Opacus' best mode.

    python benchmarks/models.py                # all
    python benchmarks/models.py BERT ViT       # those whose names begin so

As benchmarks/step.py does it: candidates take turns in one process, ratios are of minima. For Opacus the models are
rewritten where it needs that: positions are given for each record, weights are not tied, nothing is done in place, and
parameters without a layer of their own are frozen.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import step

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import zoo  # noqa: F401  # makes torchvision importable, whatever torch was built for

# isort: split
import timm
import torch
from timm.layers import ScaledStdConv2d
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

WORDS = 512


class Scores(nn.Module):
    """A model of transformers: words [B, T], or with their mask [B, 2, T], to scores."""

    def __init__(self, model: nn.Module, four: bool = False) -> None:
        super().__init__()
        self.model, self.four = model, four

    def forward(self, x: Tensor) -> Tensor:
        words, mask = (x, None) if x.dim() == 2 else x.unbind(1)
        places = torch.arange(words.shape[1]).expand_as(words)
        if mask is not None and self.four:
            mask = mask[:, None, None].expand(-1, 1, words.shape[1], -1).bool()
        return self.model(words, attention_mask=mask, position_ids=places).logits


def gpt2(layers: int, width: int, tied: bool = True) -> nn.Module:
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": WORDS, "n_positions": 128, "n_embd": width, "n_layer": layers, "n_head": 4}
    return Scores(GPT2LMHeadModel(GPT2Config(**sizes, **off, use_cache=False, tie_word_embeddings=tied)))


def bert(four: bool = False) -> nn.Module:
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Scores(BertForSequenceClassification(BertConfig(**sizes, intermediate_size=128, **off)), four)


def written(b: int, t: int, mask: bool = False) -> Tensor:
    """Words; with a mask, half of the records are shorter by up to a half."""
    x = torch.randint(1, WORDS, (b, t))
    lengths = t - torch.randint(0, t // 2, (b, 1)) * (torch.arange(b) % 2)[:, None]
    return torch.stack([x, (torch.arange(t) < lengths).long()], 1) if mask else x


def language(b: int, t: int, mask: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (written(b, t, mask), torch.randint(WORDS, (b, t)))


def classified(mask: bool = False) -> tuple[Tensor, Tensor]:
    return written(32, 128, mask), torch.randint(2, (32,))


def resnet(block: type[BasicBlock] = BasicBlock) -> nn.Module:
    """ResNet18."""
    return ResNet(block, [2, 2, 2, 2], num_classes=10, norm_layer=lambda channels: nn.GroupNorm(16, channels))


class OutOfPlace(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (h + (x if self.downsample is None else self.downsample(x))).relu()


def resnet_for_opacus() -> nn.Module:
    module = resnet(OutOfPlace)
    module.relu.inplace = False
    return module


def vit(frozen: bool = False) -> nn.Module:
    module = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=10)
    if frozen:
        module.cls_token.requires_grad_(False)
        module.pos_embed.requires_grad_(False)
    return module


def standardised() -> nn.Module:
    layers: list[nn.Module] = []
    for d, p, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)):
        layers += [ScaledStdConv2d(d, p, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(128, 4, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 128), nn.Linear(128, WORDS)
        self.coder = nn.Transformer(128, 4, 2, 2, 256, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.coder(x, x, tgt_mask=causal, tgt_is_causal=True))


step.WORKLOADS = {
    "GPT-2 4×192, 16×128": (lambda: gpt2(4, 192), language(16, 128)),
    "GPT-2 2×128, 8×64": (lambda: gpt2(2, 128), language(8, 64)),
    "GPT-2 2×128, 8×64, 2-D mask": (lambda: gpt2(2, 128), language(8, 64, True)),
    "BERT 2×64, 32×128": (bert, classified),
    "BERT 2×64, 32×128, 4-D mask": (lambda: bert(True), lambda: classified(True)),
    "BERT 2×64, 32×128, 2-D mask": (bert, lambda: classified(True)),
    "ResNet18-GN, 32×32, B 32": (resnet, lambda: step.images(32, 3, 32, 32)),
    "ViT-tiny, depth 3, B 8": (vit, lambda: step.images(8, 3, 224, 224)),
    "weight-standardised convolutions, B 64": (standardised, lambda: step.images(64, 3, 32, 32)),
    "nn.MultiheadAttention, 32×64×128": (Attention, lambda: step.images(32, 64, 128)),
    "encoder and decoder, 16×64": (EncoderDecoder, language(16, 64)),
}
step.FOR_OPACUS = {
    "GPT-2 4×192, 16×128": lambda: gpt2(4, 192, False),
    "GPT-2 2×128, 8×64": lambda: gpt2(2, 128, False),
    "GPT-2 2×128, 8×64, 2-D mask": lambda: gpt2(2, 128, False),
    "ResNet18-GN, 32×32, B 32": resnet_for_opacus,
    "ViT-tiny, depth 3, B 8": lambda: vit(True),
}
THEIRS = ("Opacus hooks, flat", "Opacus ghost, flat")
step.CANDIDATES = {name: step.CANDIDATES[name] for name in ("plain SGD", "dpexp flat", *THEIRS)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--turns", type=int, default=step.TURNS)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    step.DEVICE = arguments.device
    print(f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads\n")
    print("| | plain SGD, ms | dpexp | Opacus, best | |\n|---|---|---|---|---|")
    for name in step.WORKLOADS:
        if not name.startswith(tuple(arguments.names)):
            continue
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            measured = step.times(name, arguments.turns)
        slow = [str(w.message) for w in told if "one at a time" in str(w.message)]
        least = {candidate: min(values) for candidate, values in measured.items() if not isinstance(values, str)}
        ratios = {candidate: f"{value / least['plain SGD']:.2f}" for candidate, value in least.items()}
        theirs = min((c for c in THEIRS if c in least), key=least.__getitem__, default=None)
        notes = [f"{c}: {v[:70]}" for c, v in measured.items() if isinstance(v, str)] + slow
        best = f"{ratios[theirs]} ({theirs.split()[1].rstrip(',')})" if theirs else "–"
        ours = ratios.get("dpexp flat", "–")
        print(f"| {name} | {least['plain SGD']:.1f} | {ours} | {best} | {'; '.join(notes)} |", flush=True)
