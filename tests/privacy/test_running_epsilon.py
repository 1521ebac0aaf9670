"""What is shown of ε while a training goes on is never below what is spent, and at the end it is what was spent."""

import math

import pytest
import pytorch_lightning as pl
from test_callback import Data, Model, N, fit, plan_for, trainer
from torch import nn

import dpexp
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import ledger_so_far
from dpexp.privacy import running_epsilon
from dpexp.privacy.plan.adaptive_clipping import AdaptiveClipNorm
from dpexp.privacy.plan.options import Banded

DELTA, ROUNDS = 1e-5, 12
CHOICES = {
    "schedule": {"schedules": {"z": {"step": {0: 2, 6: 0.5}}, "q": {"step": {0: 1, 9: 2}}}},
    "measured": {"clip_norm": AdaptiveClipNorm(0.4)},
    "now and then": {"private_metrics": {"train_loss": {"clip_norm": 1.0, "budget_share": 0.1, "every_n_rounds": 4}}},
    "shuffle": {"n": N, "sampling": "shuffle", "q": 4 / N, "noise_multiplier": 2.0},
    "random allocation": {
        "sampling": "random_allocation", "q": 0.25, "steps": 16, "noise_multiplier": 2.0, "accountant": "pld",
    },
    "banded": {"noise": Banded(4), "sampling": "cyclic_poisson", "q": 0.05},
}  # fmt: skip


@pytest.mark.parametrize("spent", [0.0, 0.0004, 0.0523, 0.9994, 1.97308, 9.999, 12.3456, 123.4, 1234.5, math.inf])
def test_progress_bars_show_no_less(spent):
    """tqdm shows three digits, and rich three decimals."""
    bar = running_epsilon.RunningEpsilon(plan_for(Model()), DELTA, "moments")
    bar.at_most = spent
    assert spent <= float(f"{bar.shown:.3g}") and spent <= float(f"{bar.shown:.3f}")
    assert bar.shown <= 1.01 * spent + 1e-3


class Shown(pl.Callback):
    """Compares what is shown with what is spent, whenever a round is in the ledger and when it ends."""

    def __init__(self, privacy):
        self.privacy, self.shown, self.over = privacy, [], []

    def on_before_optimizer_step(self, *_):
        self.spent = epsilon(ledger_so_far(self.privacy.ledger_path), DELTA, self.privacy.accountant)
        self.compare()

    def on_train_batch_end(self, *_):
        self.compare()

    def compare(self):
        self.shown.append(self.privacy.readings.at_most)
        self.over.append(self.shown[-1] - self.spent)


def watched(folder, checkpoint=None, stop=-1, accountant="moments", **choices):
    module = Model(nn.Linear(4, 3))
    plan = plan_for(module, **{"steps": ROUNDS} | choices)
    privacy = dpexp.PrivacyCallback(plan, folder / "l.jsonl", delta=DELTA, accountant=accountant, noise_seed=1)
    shown = Shown(privacy)
    run = trainer(privacy, shown, max_steps=stop)
    run.fit(module, Data(), ckpt_path=checkpoint, weights_only=False)
    return run, shown


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_what_is_shown_is_never_below_what_is_spent(choices, tmp_path):
    run, shown = watched(tmp_path, stop=5, **choices)
    assert min(shown.over) >= -1e-9
    run.save_checkpoint(tmp_path / "5.ckpt")
    _, undone = watched(tmp_path, tmp_path / "5.ckpt", 8, **choices)  # 3 rounds that no checkpoint knows of
    _, last = watched(tmp_path, tmp_path / "5.ckpt", **choices)
    assert min(undone.over) >= -1e-9 and min(last.over) >= -1e-9
    assert last.shown[0] > undone.shown[0] > 0
    assert last.over[-1] == pytest.approx(0, abs=1e-9)


def test_it_is_no_more_than_the_plan_at_the_end_and_takes_few_readings(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(running_epsilon, "epsilon", lambda ledger, *a: asked.append(len(ledger)) or epsilon(ledger, *a))
    module = Model()
    plan = plan_for(module, steps=60)
    _, _, privacy = fit(tmp_path, module, plan=plan, delta=DELTA, accountant="moments")
    assert privacy.readings.at_most == privacy.readings.epsilon == epsilon(plan.ledger(), DELTA, "moments")
    assert len(set(asked)) <= 28 and len(asked) <= 57
