"""dpexp as a library: one plan and one callback."""

import pytorch_lightning as pl
import torch
from setting import BATCH, BOUND, DELTA, EPOCHS, EPSILON, LR, MOMENTUM, N, report
from ticking import Tick  # measured
from torch.utils.data import DataLoader
from torch_work import FOLDER, accuracy, data, model

import dpexp
from dpexp import Clipping, FixedClipNorm, Poisson, Target

module = dpexp.Classifier(model(), lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM))
plan = dpexp.make_plan(
    module,
    n=N,
    sampling=Poisson(expected_batch_size=BATCH, epochs=EPOCHS),
    target=Target(epsilon=EPSILON, delta=DELTA),
    clipping=Clipping(clip_norm=FixedClipNorm(BOUND)),
)
privacy = dpexp.PrivacyCallback(plan, f"{FOLDER}/ledger.jsonl")
trainer = pl.Trainer(max_epochs=-1, callbacks=[privacy, Tick()], logger=False, enable_checkpointing=False)
trainer.fit(module, DataLoader(data("train")))
spent = dpexp.epsilon(dpexp.read_ledger(f"{FOLDER}/ledger.jsonl"), DELTA)
report(dpexp.__version__, accuracy(module), plan.noise_multiplier, spent)
