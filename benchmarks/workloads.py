"""The models whose rounds benchmarks/step.py and benchmarks/gpu.py time, and their data."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from opacus.layers import DPLSTM
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from dpexp.training.models import StandardizedConv2d, cnn, wrn

WORDS = 512


class Scores(nn.Module):
    """A model of transformers, of words [B, T] and maybe their mask; Opacus needs the other `ids` of each record."""

    def __init__(self, model: nn.Module, *ids: str) -> None:
        super().__init__()
        self.model, self.ids = model, ids

    def forward(self, words: Tensor, mask: Tensor | None = None) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device).repeat(len(words), 1) if self.ids else None
        ids = {"position_ids": places, "token_type_ids": torch.zeros_like(words)}
        return self.model(words, attention_mask=mask, **{name: ids[name] for name in self.ids}).logits


class OfImages(Scores):
    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        return self.model(images).logits


class Recurrent(nn.Module):
    """A 2-layer LSTM of width 128; the last state is classified."""

    def __init__(self, lstm: Callable[..., nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.lstm, self.head = lstm(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def dense(*widths: int) -> nn.Module:
    layers = [layer for d, p in pairwise(widths) for layer in (nn.Linear(d, p), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def bert(*ids: str) -> nn.Module:
    off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Scores(BertForSequenceClassification(BertConfig(**sizes, intermediate_size=256, **off)), *ids)


TINY_GPT2 = {"vocab_size": WORDS, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}


def gpt2(*ids: str, tied: bool = True, sizes: dict[str, int] = TINY_GPT2) -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return Scores(GPT2LMHeadModel(GPT2Config(**sizes, **off, use_cache=False, tie_word_embeddings=tied)), *ids)


def llama(lora: bool = False) -> nn.Module:
    sizes = {"vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    return Scores(get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])) if lora else model)


def wide_resnet(standardized: bool, width: int = 2) -> nn.Module:
    """WRN-16 with GroupNorm, as dpexp has it with standardized weights, or with ordinary ones."""
    module = wrn([3, 32, 32], 10, depth=16, width=width)
    for parent in [] if standardized else [*module.modules()]:
        for name, c in parent.named_children():
            if isinstance(c, StandardizedConv2d):
                own = nn.Conv2d(c.in_channels, c.out_channels, c.kernel_size, c.stride, c.padding, bias=False)
                setattr(parent, name, own)
    return module


Data = Callable[[int], tuple[Tensor, ...]]  # of n records; labels come last


def vectors(*shape: int, classes: int = 10) -> Data:
    return lambda n: (torch.randn(n, *shape), torch.randint(classes, (n,)))


def texts(n: int, t: int = 64, words: int = WORDS) -> tuple[Tensor, ...]:
    """Words and the next ones."""
    x = torch.randint(words, (n, t + 1))
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def masked(shorter: bool) -> Data:
    """Words with a mask [T]: of ones, or every other record is shorter, by up to a half."""

    def of(n: int, t: int = 64) -> tuple[Tensor, ...]:
        lengths = t - shorter * torch.randint(0, t // 2, (n, 1)) * (torch.arange(n) % 2)[:, None]
        return torch.randint(1, WORDS, (n, t)), (torch.arange(t) < lengths).long(), torch.randint(2, (n,))

    return of


@dataclass(frozen=True)
class Workload:
    title: str
    build: Callable[[], nn.Module]
    data: Data
    batch: int  # B
    rounds: int = 100
    opacus: Callable[[], nn.Module] | None = None  # what it is given instead, and how that differs
    differs: str = ""
    batches: int = 50  # of B, in the data set
    precision: str = "32-true"  # a Trainer's


IDS = ("position_ids", "token_type_ids")
WORKLOADS: dict[str, Workload] = {
    "logistic": Workload("logistic 784-10", lambda: dense(784, 10), vectors(784), 256, 200),
    "probe": Workload("linear probe 384-10", lambda: dense(384, 10), vectors(384), 1024, 100),
    "tabular": Workload("MLP 14-64-64-2", lambda: dense(14, 64, 64, 2), vectors(14, classes=2), 256, 200),
    "mlp": Workload("MLP 784-1000-10", lambda: dense(784, 1000, 10), vectors(784), 512, 100),
    "cnn": Workload("CNN, 28×28", lambda: cnn([1, 28, 28], 10), vectors(1, 28, 28), 256, 100),
    "lstm": Workload(
        "LSTM 2×128, T 32", Recurrent, vectors(32, 64), 64, 60, lambda: Recurrent(DPLSTM), "its own DPLSTM"
    ),
    "bert": Workload("BERT 2×64, T 64", bert, masked(False), 32, 60, lambda: bert(*IDS), "all ids given"),
    "padded": Workload("the same, padded", bert, masked(True), 32, 60, opacus=lambda: bert(*IDS), differs="likewise"),
    "gpt2": Workload(
        "GPT-2 2×128, T 64", gpt2, texts, 16, 60, lambda: gpt2(IDS[0], tied=False), "untied, all ids given"
    ),
    "llama": Workload("Llama 2×128, T 64", llama, texts, 16, 60),
    "lora": Workload("the same, LoRA", lambda: llama(lora=True), texts, 16, 60),
    "wrn": Workload("WRN-16-2, 32×32", lambda: wide_resnet(False), vectors(3, 32, 32), 32, 20),
    "wrn_ws": Workload("the same, standardized", lambda: wide_resnet(True), vectors(3, 32, 32), 32, 20),
}


def real_sizes(small: bool) -> dict[str, Workload]:
    """Models of the sizes that people train, with random weights, in order of worth; or the same, shrunk."""
    shrunk = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}

    def sizes(**real: int) -> dict[str, int]:
        return {name: shrunk.get(name, min(size, 128)) for name, size in real.items()} if small else real

    def vit() -> nn.Module:
        wide = sizes(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
        return OfImages(ViTForImageClassification(ViTConfig(**wide, image_size=pixels, num_labels=100)))

    def roberta() -> nn.Module:
        off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        wide = sizes(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=50265
        )
        model = RobertaForSequenceClassification(RobertaConfig(**wide, **off, max_position_embeddings=514))
        lora = LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["classifier"])
        return Scores(get_peft_model(model, lora))

    def llama_1b() -> nn.Module:
        """Llama 3.2's widths."""
        wide = sizes(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, intermediate_size=8192)
        wide |= sizes(vocab_size=128256) | {"num_key_value_heads": 2 if small else 8}
        model = LlamaForCausalLM(LlamaConfig(**wide, use_cache=False, tie_word_embeddings=True)).to(torch.bfloat16)
        return Scores(get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])))

    def words(t: int, vocabulary: int) -> Data:
        return lambda n: texts(n, min(t, 16) if small else t, 128 if small else vocabulary)

    def labelled(n: int) -> tuple[Tensor, ...]:
        return torch.randint(5, 128 if small else 50265, (n, 16 if small else 256)), torch.randint(2, (n,))

    pixels = 32 if small else 224
    gpt2_124m = TINY_GPT2 | {"vocab_size": 128, "n_embd": 32, "n_layer": 1} if small else {}
    wrn_width = 1 if small else 4

    def of(title: str, build: Callable[[], nn.Module], data: Data, batch: int, **more: Any) -> Workload:
        return Workload(title, build, data, 4 if small else batch, batches=8, **more)

    return {
        "gpt2_124m": of(
            "GPT-2 124 M, T 512, bf16-mixed", lambda: gpt2(sizes=gpt2_124m), words(512, 50257), 16,
            opacus=lambda: gpt2(IDS[0], tied=False, sizes=gpt2_124m), differs="untied, all ids given",
            precision="bf16-mixed",
        ),
        "wrn_16_4": of("WRN-16-4, 32×32", lambda: wide_resnet(False, wrn_width), vectors(3, 32, 32), 256),
        "roberta_lora": of("RoBERTa-large, T 256, LoRA", roberta, labelled, 32),
        "vit": of("ViT-B/16, 224×224", vit, vectors(3, pixels, pixels, classes=100), 32),
        "llama_lora": of("Llama 1 B, T 512, LoRA, bf16", llama_1b, words(512, 128256), 8),
    }  # fmt: skip
