"""fastDP, whose engine is attached to the optimizer of an ordinary loop over a shuffled loader."""

import fastDP
import torch
from fastDP import PrivacyEngine
from setting import BATCH, BOUND, DELTA, EPOCHS, EPSILON, LR, MOMENTUM, N, report, tick
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch_work import accuracy, data, model

module = model()
optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
engine = PrivacyEngine(
    module,
    batch_size=BATCH,
    sample_size=N,
    epochs=EPOCHS,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    max_grad_norm=BOUND,
    clipping_fn="Abadi",
)
engine.attach(optimizer)
loader = DataLoader(data("train"), batch_size=BATCH, shuffle=True)
for _ in range(EPOCHS):
    for x, y in loader:
        cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        tick()  # measured
report(fastDP.__version__, accuracy(module), engine.noise_multiplier, engine.get_privacy_spent()["eps_rdp"])
