"""How far a record moves the sum that Opake releases, in units of the bound: python neighbour_opake.py.

One record is added to a batch of eight: an ordinary one, a huge one, one of NaN; to a model with a layer that the loss
does not use, and to one with BatchNorm. No noise is added.
"""

import torch
from opake.dpsgd.clipping import clipped_grad
from opake.functional import make_functional, with_batch_dim
from torch import nn
from torch.nn.functional import cross_entropy

BOUND = 0.1


def moved(module, record):
    forward, w, _ = make_functional(module, disable_autograd_tracking=True, partition_trainable=True)
    loss = with_batch_dim(lambda w, x, y: cross_entropy(forward(w, x), y), batch_argnums=(1, 2))
    gradient, state = clipped_grad(loss, clipping_norm=BOUND, batch_argnums=(1, 2))
    x, y = torch.randn(8, 20), torch.arange(8) % 3
    without, state = gradient(w, x, y, state=state)
    added, _ = gradient(w, torch.cat([x, record]), torch.cat([y, y[:1]]), state=state)
    return sum((added.pytree[k] - without.pytree[k]).square().sum() for k in w).sqrt().item() / BOUND


class Unused(nn.Linear):
    def __init__(self):
        super().__init__(20, 3)
        self.other = nn.Linear(20, 3)


torch.manual_seed(0)
records = {"ordinary": torch.randn(1, 20), "huge": torch.full((1, 20), 1e30), "NaN": torch.full((1, 20), torch.nan)}
cases = {name: (nn.Linear(20, 3), record) for name, record in records.items()}
cases["unused layer"] = (Unused(), records["ordinary"])
cases["BatchNorm"] = (nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), records["ordinary"])
for name, case in cases.items():
    try:
        print(f"{name}: {moved(*case):.6f}")
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
