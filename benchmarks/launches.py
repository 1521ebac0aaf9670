"""How many kernels a private pass launches, against a plain step's forward and backward passes.

    python benchmarks/launches.py                 # every model
    python benchmarks/launches.py cnn bert

Counted are calls of PyTorch's operators that are no views, on a CPU, where nothing is launched; within dpexp's own
operators, too. On a CPU norms of large chunks are taken a few records at a time, which a GPU's are not: the last column
is without that.
"""

import collections
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from quiet import quiet, trainer
from report import head, parser, row
from step import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from workloads import WORKLOADS

import dpexp
from dpexp.privacy.fit import DryRunDone
from dpexp.privacy.gradients import norms, recurrent

VIEWS = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "squeeze", "unsqueeze", "expand", "as_strided",
    "alias", "detach", "select", "slice", "split", "split_with_sizes", "unbind", "diagonal", "unfold", "movedim",
    "lift_fresh", "empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like", "_local_scalar_dense",
    "is_same_size", "_reshape_alias", "resize_",
}  # fmt: skip
OWN = {"recurrence": recurrent._steps, "recurrence_backward": recurrent._steps_backward}


class Count(TorchDispatchMode):
    """Counts calls by the operator's name."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "dpexp" and name in OWN:
            with self:
                return OWN[name]._init_fn(*args, **(kwargs or {}))
        self.calls[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self):
        return sum(count for name, count in self.calls.items() if name not in VIEWS)


def plain(work):
    module, data = Module(work.build()), work.data(work.batch)
    with Count() as count:
        module.training_step([*data]).backward()
    return count.kernels


def private(work):
    """Of the graph of a chunk of the usual size, and how records are processed."""
    module, records = Module(work.build()), TensorDataset(*work.data(4 * work.batch))
    sampling = dpexp.Poisson(sampling_rate=0.25, steps=4)
    plan = dpexp.make_plan(module, n=len(records), sampling=sampling, target=dpexp.Target(noise_multiplier=1.0))
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        callback = dpexp.PrivacyCallback(plan, ledger, max_physical_batch_size=2 * work.batch, compile=False)
        callback.options = replace(callback.options, dry_run_only=True)
        try:
            trainer(callback).fit(module, DataLoader(records, batch_size=work.batch))
        except DryRunDone as done:
            step = done.step
    if step.mode != "traced":
        return step.reason
    graphs = step._usual_shape
    graph, rows = graphs._by_rows[graphs._usual], graphs._usual
    inputs = graphs._inputs(graphs.synthetic.records(step._reference, rows, 0))
    with Count() as count:
        graph(inputs, torch.device("cpu"))
    return count.kernels


def main():
    options = parser(__doc__)
    options.add_argument("workloads", nargs="*", default=[*WORKLOADS], help=f"of {', '.join(WORKLOADS)}")
    names = options.parse_args().workloads
    quiet()
    print(head("model", "plain", "private", "over plain", "as on a GPU"))
    for name in names:
        work = WORKLOADS[name]
        usual, counted = plain(work), private(work)
        with patch.object(norms, "_CACHED", 2**62):
            at_once = private(work)
        ratios = ("", "") if isinstance(counted, str) else (f"{counted / usual:.2f}", f"{at_once / usual:.2f}")
        print(row(work.title, usual, counted, *ratios), flush=True)


if __name__ == "__main__":
    main()
