"""dpexp: differentially private training, declared and accounted.

As a library: `make_plan` for a module, `PrivacyCallback` for a Lightning Trainer, `read_ledger` and `epsilon`
for what it cost. In a notebook, `compose` is the configuration of a job, `plan` what it would do, and `load` the
model of a finished one.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "dpexp.privacy.plan.make": "make_plan Clipping",
    "dpexp.privacy.plan.plan": "PrivacyPlan",
    "dpexp.privacy.plan.options": "Sampling Target Noise Schedules",
    "dpexp.privacy.plan.clipping":
        "FixedClipNorm UniformClipNorm DimensionClipNorm Separate Joint Abadi Automatic Psac Global",
    "dpexp.privacy.plan.adaptive_clipping": "AdaptiveClipNorm",
    "dpexp.privacy.plan.allocation":
        "Proportional DimensionAdjusted MinVariance Weighted Explicit",
    "dpexp.privacy.plan.groups": "Groups flat per_layer conv_fc",
    "dpexp.privacy.sampling.privacy_unit": "Example Microbatch User LocalTraining",
    "dpexp.privacy.callback": "PrivacyCallback",
    "dpexp.privacy.private": "Private",
    "dpexp.privacy.private_metrics": "release weigh",
    "dpexp.privacy.normalization": "GroupNormalization FrozenBatchNorm PrivateBatchNorm",
    "dpexp.training.classifier": "Classifier views",
    "dpexp.accounting.ledger": "Ledger read_ledger",
    "dpexp.accounting.accountants": "delta epsilon",
    "dpexp.commands.command_line": "compose",
    "dpexp.commands.build": "plan",
    "dpexp.commands.saved_jobs": "load",
    "dpexp.errors": "ConfigError",
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports torch and Lightning only when they are needed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dpexp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
