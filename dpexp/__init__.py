"""dpexp: differentially private training, declared and accounted.

As a library: `make_plan` for a module, `PrivacyCallback` for a Lightning Trainer, `read_ledger` and `epsilon`
for what it cost. In a notebook, `compose` is the configuration of a job, `plan` what it would do, and `load` the
model of a finished one.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "make_plan": "dpexp.privacy.plan.plan",
    "PrivacyPlan": "dpexp.privacy.plan.plan",
    "PrivacyCallback": "dpexp.privacy.callback",
    "release": "dpexp.privacy.private_metrics",
    "weigh": "dpexp.privacy.private_metrics",
    "views": "dpexp.training.classifier",
    "read_ledger": "dpexp.accounting.ledger",
    "epsilon": "dpexp.accounting.accountants",
    "compose": "dpexp.commands.notebook",
    "plan": "dpexp.commands.notebook",
    "load": "dpexp.commands.saved_jobs",
    "ConfigError": "dpexp.errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports torch and Lightning only when they are needed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dpexp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
