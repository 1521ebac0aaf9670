"""dpexp: differentially private training, declared and accounted.

As a library: `make_plan` for a module, `PrivacyCallback` for a Lightning Trainer, `read_ledger` and `epsilon`
for what it cost. In a notebook, `compose` is the configuration of a job, `plan` what it would do, and `load` the
model of a finished one.
"""

import lazy_loader

__version__ = "0.2.0"

# Torch and Lightning are imported only when a name of the stub, __init__.pyi, is used first.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
