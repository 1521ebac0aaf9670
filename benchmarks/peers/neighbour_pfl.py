"""How far a record moves the sum that pfl releases, in units of the bound: python neighbour_pfl.py.

A record is a user, whose model change is clipped on its own: an ordinary one, a huge one, one of NaN. No noise
is added.
"""

import torch
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.stats import MappedVectorStatistics

BOUND = 0.1
set_framework_module(pytorch_ops)
torch.manual_seed(0)
changes = {"ordinary": torch.randn(60), "huge": torch.full((60,), 1e30), "NaN": torch.full((60,), torch.nan)}
for name, change in changes.items():
    clipped, _ = GaussianMechanism(BOUND, 1.0).constrain_sensitivity(MappedVectorStatistics({"w": change}))
    print(f"{name}: {clipped['w'].norm().item() / BOUND:.6f}")
