"""Writes the initial weights for all libraries: python initial.py WORK SEED FOLDER DATA."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch_work import FOLDER, SEED, WORK, architecture

torch.manual_seed(int(SEED))
weights = architecture(WORK).state_dict()
stem = Path(FOLDER) / f"{WORK}-{SEED}"
np.savez(f"{stem}.npz", **{name: value.numpy() for name, value in weights.items()})
save_file(weights, f"{stem}.safetensors")
