"""What small trainings of this folder's tests release."""

import pytorch_lightning as pl
import torch

from dpexp.accounting.ledger import LedgerWriter
from dpexp.accounting.sampling import event_of


class Gradients(pl.Callback):
    """The gradients that each step gets, as one vector; it stands behind the PrivacyCallback."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]).clone())


def released_averages(engine, folder, rounds=1, loss_of=None, batch=None):
    """The noisy averages of each round by the names of parameters and values, all rounds on the same sample, or on
    empty ones; `loss_of` is of the module and one record."""
    plan = engine.plan
    ledger = LedgerWriter(folder / f"{len([*folder.iterdir()])}.jsonl", plan.adjacency, plan.sampling_events())
    for t in range(rounds):
        ledger.sample(event_of(plan.at_round(t).sampling, plan.n, 0))
        engine.begin(t)
        if batch:
            engine.add_chunk(loss_of, batch, len(batch[0]))
        engine.raise_if_none_contributed()
        yield engine.release(ledger)
    ledger.close()


def released_sums(engine, folder, loss_of, batch, rounds=1):
    """The sums of the last of these rounds."""
    *_, averages = released_averages(engine, folder, rounds, loss_of, batch)
    return {name: average * engine.plan.sampling.q * engine.plan.n for name, average in averages.items()}
