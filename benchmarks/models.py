"""The price of privacy in a training step of other people's models, against plain SGD and Opacus' best mode.

    python benchmarks/models.py                # all
    python benchmarks/models.py BERT ViT       # those whose names begin so

As benchmarks/step.py does it: whole rounds, in turn, against a plain Lightning fit, ratios of means. For Opacus the
models are rewritten where it needs that: positions are given for each record, weights are not tied, nothing is done in
place, and parameters without a layer of their own are frozen.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import step
from workloads import WORDS, Data, Workload, vectors

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import zoo  # noqa: F401  # makes torchvision importable, whatever torch was built for

# isort: split
import timm
import torch
from timm.layers import ScaledStdConv2d
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel


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


def language(t: int, mask: bool = False) -> Data:
    return lambda n: (written(n, t, mask), torch.randint(WORDS, (n, t)))


def classified(mask: bool = False) -> Data:
    return lambda n: (written(n, 128, mask), torch.randint(2, (n,)))


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


def standardized() -> nn.Module:
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


OWN: dict[str, tuple[Callable[[], nn.Module], Data, int]] = {
    "GPT-2 4×192, 16×128": (lambda: gpt2(4, 192), language(128), 16),
    "GPT-2 2×128, 8×64": (lambda: gpt2(2, 128), language(64), 8),
    "GPT-2 2×128, 8×64, 2-D mask": (lambda: gpt2(2, 128), language(64, True), 8),
    "BERT 2×64, 32×128": (bert, classified(), 32),
    "BERT 2×64, 32×128, 4-D mask": (lambda: bert(True), classified(True), 32),
    "BERT 2×64, 32×128, 2-D mask": (bert, classified(True), 32),
    "ResNet18-GN, 32×32, B 32": (resnet, vectors(3, 32, 32), 32),
    "ViT-tiny, depth 3, B 8": (vit, vectors(3, 224, 224), 8),
    "weight-standardized convolutions, B 64": (standardized, vectors(3, 32, 32), 64),
    "nn.MultiheadAttention, 32×64×128": (Attention, vectors(64, 128), 32),
    "encoder and decoder, 16×64": (EncoderDecoder, language(64), 16),
}
FOR_OPACUS = {
    "GPT-2 4×192, 16×128": lambda: gpt2(4, 192, False),
    "GPT-2 2×128, 8×64": lambda: gpt2(2, 128, False),
    "GPT-2 2×128, 8×64, 2-D mask": lambda: gpt2(2, 128, False),
    "ResNet18-GN, 32×32, B 32": resnet_for_opacus,
    "ViT-tiny, depth 3, B 8": lambda: vit(True),
}
step.WORKLOADS = {name: Workload(name, *own, rounds=10, opacus=FOR_OPACUS.get(name)) for name, own in OWN.items()}
THEIRS = (step.HOOKS, step.GHOST)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repeat", type=int, default=step.REPEAT)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    step.DEVICE = arguments.device
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", ".*one at a time")
    logging.disable(logging.WARNING)
    print(f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads\n")
    print("| | plain, ms | dpexp | Opacus, best | |\n|---|---|---|---|---|")
    for name in step.WORKLOADS:
        if not name.startswith(tuple(arguments.names)):
            continue
        results = step.in_turn(name, arguments.repeat, step.WARM_UP, arguments.rounds)
        run = [way for way in THEIRS if not isinstance(results[way], str)]
        theirs = min(run, key=lambda way: step.mean(results, way), default=None)
        notes = [f"{way}: {why[:90]}" for way, why in results.items() if isinstance(why, str)]
        best = f"{step.ratio(results, theirs)} ({theirs.split()[1]})" if theirs else "–"
        took = f"{1000 * step.mean(results, 'plain'):.1f}"
        print(step.line(name, took, step.ratio(results, "dpexp"), best, "; ".join(notes)), flush=True)
