"""Opake, by its functional interface: gradients of each record by vmap."""

from importlib.metadata import version  # measured

import opake.accounting as accounting
import opake.dpsgd.accounting as dpsgd
from opake.dpsgd.clipping import clipped_grad
from opake.dpsgd.noise import gaussian_noise
from opake.dpsgd.sampling import PoissonSampler
from opake.functional import make_functional, with_batch_dim
from opake.optimizers import sgd
from opake.random import random_key
from setting import BATCH, BOUND, DELTA, EPSILON, LR, MOMENTUM, ROUNDS, N, report, tick
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch_work import accuracy, data, model
from torchopt import apply_updates


def process(z):
    return dpsgd.poisson(dpsgd.gaussian(z), sample_rate=BATCH / N) * ROUNDS


budget = accounting.epsilon_budget(EPSILON, delta=DELTA)
z = accounting.calibrate(budget, process, param_min=0.1, param_max=10.0).param
module = model()
forward, w, _ = make_functional(module, disable_autograd_tracking=True, partition_trainable=True)
gradient, clip_state = clipped_grad(
    with_batch_dim(lambda w, x, y: cross_entropy(forward(w, x), y), batch_argnums=(1, 2)),
    clipping_norm=BOUND,
    batch_argnums=(1, 2),
    normalize_by=BATCH,
)
noise, noise_state = gaussian_noise(noise_multiplier=z, key=random_key())
optimizer = sgd(LR, MOMENTUM)
optimizer_state = optimizer.init(w)
train = data("train")
sampler = PoissonSampler(train, BATCH / N, ROUNDS, key=random_key())
for x, y in DataLoader(train, batch_sampler=sampler):
    clipped, clip_state = gradient(w, x, y, state=clip_state)
    noisy, noise_state = noise(clipped, noise_state)
    change, optimizer_state = optimizer.update(noisy, optimizer_state, params=w)
    w = apply_updates(w, change)
    tick()  # measured
module.load_state_dict(w)
report(version("opake"), accuracy(module), z, process(z).epsilon_at(DELTA))
