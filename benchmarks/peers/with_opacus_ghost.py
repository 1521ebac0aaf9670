"""Opacus, with ghost clipping."""

import opacus
import torch
from opacus import PrivacyEngine
from setting import BATCH, BOUND, DELTA, EPOCHS, EPSILON, LR, MOMENTUM, report, tick
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader
from torch_work import accuracy, data, model

module = model()
engine = PrivacyEngine()
module, optimizer, criterion, loader = engine.make_private_with_epsilon(
    module=module,
    optimizer=torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM),
    criterion=CrossEntropyLoss(),
    data_loader=DataLoader(data("train"), batch_size=BATCH),
    target_epsilon=EPSILON,
    target_delta=DELTA,
    epochs=EPOCHS,
    max_grad_norm=BOUND,
    grad_sample_mode="ghost",
)
for _ in range(EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
        tick()  # measured
report(opacus.__version__, accuracy(module), optimizer.noise_multiplier, engine.get_epsilon(DELTA))
