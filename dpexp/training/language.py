"""Language models of transformers, by a local folder or a name on the hub, and their perplexity."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from dpexp.errors import ConfigError, in_one_line
from dpexp.training.classifier import Classifier

IGNORED = -100  # label that has no loss


def causal_lm(name: str, dtype: str = "float32") -> nn.Module:
    """A causal language model with the weights of `name`, in float32 or bfloat16; adapters are in float32 either way.

    Raises:
        ConfigError: it cannot be loaded, or the dtype is another.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"model.dtype={dtype} is unknown; choose float32 or bfloat16.")
    model: Any = _from_pretrained("AutoModelForCausalLM", name, dtype=getattr(torch, dtype))
    model.loss_type = "ForCausalLM"  # transformers warns if it has to guess this
    return model  # type: ignore[no-any-return]


def sequence_classifier(name: str, class_names: list[Any]) -> nn.Module:
    """A classifier of texts in float32, with the weights of `name` and, unless these have one, a random head."""
    options: dict[str, Any] = {"num_labels": len(class_names), "problem_type": "single_label_classification"}
    tokenizer = tokenizer_of(name)
    return _from_pretrained(
        "AutoModelForSequenceClassification", name, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id, **options
    )


def encoder(name: str) -> Any:
    """A transformer without a head in float32, in evaluation mode."""
    return _from_pretrained("AutoModel", name, dtype=torch.float32).eval()


def hidden_size(name: str) -> int:
    """The number of values of a transformer's hidden state."""
    return _from_pretrained("AutoConfig", name, key="data.encoder").hidden_size  # type: ignore[no-any-return]


def tokenizer_of(name: str) -> Any:
    """The tokenizer of a model, which pads on the right: with its end-of-text token if it has none for padding."""
    tokenizer = _from_pretrained("AutoTokenizer", name)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"model.name={name}: its tokenizer has neither a padding nor an end-of-text token to pad with; give "
                "pad_token in its tokenizer_config.json."
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def max_positions(name: str) -> int | None:
    """The number of tokens that a model can take; None: its configuration names none."""
    return getattr(_from_pretrained("AutoConfig", name), "max_position_embeddings", None)


def _from_pretrained(class_name: str, name: str, key: str = "model.name", **options: Any) -> Any:
    try:
        auto_class = getattr(import_module("transformers"), class_name)
    except ImportError as error:
        raise ConfigError("language models need transformers and peft: pip install transformers peft.") from error
    import_module("transformers.utils.logging").disable_progress_bar()
    try:
        return auto_class.from_pretrained(name, **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = in_one_line(error)[:200]
        raise ConfigError(
            f"{key}={name} is neither a folder nor a name on the hub from which {class_name} can be loaded: {reason}"
        ) from error


def is_causal(model: nn.Module) -> bool:
    """Whether a model is a causal language model of transformers."""
    can_generate = getattr(model, "can_generate", None)
    return bool(callable(can_generate) and can_generate() and not model.config.is_encoder_decoder)  # type: ignore


class LanguageModel(Classifier):
    """Trains a causal language model of transformers, and measures its perplexity: exp of the mean loss of the test
    set's tokens, each record's first excepted; and that of always giving the frequencies of these tokens."""

    OBJECTIVES = ("test_loss", "test_perplexity")
    _total = 0.0
    _labels: tuple[Tensor, ...] = (torch.zeros(0),)

    def metrics(self, stage: str, batch: Any, loss: Tensor, scores: Tensor | None) -> dict[str, Tensor]:
        return {f"{stage}_loss": loss}

    def validation_step(self, batch: Any) -> None:
        loss, _ = self.loss_and_scores(batch)
        labels = batch["labels"][:, 1:]
        if len(labels := labels[labels != IGNORED]):
            self._total += float(loss) * len(labels)
            self._labels = (*self._labels, labels.cpu())

    def on_validation_epoch_end(self) -> None:
        labels = torch.cat(self._labels)
        if tokens := len(labels):
            loss = torch.tensor(self._total / tokens, dtype=torch.float64)
            entropy = Categorical(labels.unique(return_counts=True)[1].double()).entropy()
            found = {"loss": loss, "perplexity": loss.exp(), "unigram_perplexity": entropy.exp()}
            self.log_dict({f"test_{name}": value.float() for name, value in found.items()})
        self._total, self._labels = 0.0, (torch.zeros(0),)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()
