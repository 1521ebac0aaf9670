"""Settings of transformers' models under which a record's loss is computed without branches on its data."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_EXPERTS = "dpexp_all_experts"


@contextmanager
def trained_privately(module: nn.Module) -> Iterator[None]:
    """Meanwhile models of transformers use settings under which their step is traced; a warning names them.

    Losses stay the same. `use_cache=False`: a cache of earlier positions only serves generation.
    `gradient_checkpointing=False`: in a graph, what is computed a second time would draw another dropout; the traced
    step is not checkpointed but by `memory="low"`. Experts are applied to all tokens and weighted by the router, as
    which tokens an expert gets depends on the data. DeBERTa counts labels unless `problem_type` says what they are:
    here, classes.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import PreTrainedModel

    before: list[tuple[Any, str, Any]] = []

    def set_value(config: Any, name: str, value: Any) -> None:
        before.append((config, name, getattr(config, name)))
        setattr(config, name, value)

    for model in (part for part in module.modules() if isinstance(part, PreTrainedModel)):
        config = model.config
        if getattr(config, "use_cache", False):
            set_value(config, "use_cache", False)
        for part in model.modules():
            if getattr(part, "gradient_checkpointing", False):
                set_value(part, "gradient_checkpointing", False)
        if any(hasattr(part, "_is_expert_parallel") for part in model.modules()):
            _register_experts()
            set_value(config, "_experts_implementation_internal", _EXPERTS)
        if type(model).__name__.startswith("Deberta") and config.problem_type is None and (config.num_labels or 0) > 1:
            set_value(config, "problem_type", "single_label_classification")
    names = dict.fromkeys(f"{name}={value}" for config, name, _ in before for value in [getattr(config, name)])
    if names:
        warnings.warn(f"model: while it trains, its configuration says {', '.join(names)}, so that its step is traced.")
    try:
        yield
    finally:
        for config, name, value in reversed(before):
            setattr(config, name, value)


def note_evaluation(trainer: Any, metrics: dict[str, float]) -> bool:
    """Notes in a Trainer's state if its model is the best so far, and says whether."""
    return trainer._determine_best_metric(metrics, None)


def load_best_model(trainer: Any) -> None:
    """Loads the checkpoint that the Trainer's state names as the best."""
    trainer._load_best_model()


def _register_experts() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _all_experts)


def _all_experts(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The outputs of all experts for tokens x [N, d], weighted by those of the chosen ones [N, k]."""
    shares = (F.one_hot(chosen, experts.num_experts).to(weights.dtype) * weights[..., None]).sum(1)
    projections = (experts.gate_up_proj if experts.has_gate else experts.up_proj), experts.down_proj
    names = ("gate_up_proj_bias" if experts.has_gate else "up_proj_bias"), "down_proj_bias"
    biases: list[Any] = [getattr(experts, name) if experts.has_bias else None for name in names]

    def project(x: Tensor, k: int, e: int) -> Tensor:
        matrix = projections[k][e]
        return F.linear(x, matrix.T if experts.is_transposed else matrix, None if biases[k] is None else biases[k][e])

    total = torch.zeros_like(x)
    for e in range(experts.num_experts):
        h = project(x, 0, e)
        h = project(experts._apply_gate(h) if experts.has_gate else experts.act_fn(h), 1, e)
        total = total + (experts.post_expert_norm(h) if experts.has_post_expert_norm else h) * shares[:, e, None]
    return total
