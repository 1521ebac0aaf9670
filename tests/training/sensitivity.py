"""How far one record more or less moves what a whole job releases."""

from itertools import count

from reference import norm_of
from safetensors.torch import load_file

# A step of rate 1 by the average of all clipped gradients, next to without noise.
ONE_ROUND = (
    "optimizer=sgd", "optimizer.lr=1", "optimizer.momentum=0", "sampling=full_batch", "sampling.steps=1",
    "sampling.epochs=null", "privacy.epsilon=null", "privacy.noise_multiplier=1e-6", "privacy.delta=1e-5",
    "privacy.noise_seed=1", "tracking=none", "accountant=moments",
)  # fmt: skip
NUMBERS = count()  # of folders


def moved_by(change, job, n, *arguments):
    """The distance of the sums that two jobs release, before and after `change()`; n: the published count."""
    weights = []
    for folder in (f"round{next(NUMBERS)}", f"round{next(NUMBERS)}"):
        job(*arguments, *ONE_ROUND, f"hydra.run.dir={folder}")
        weights.append(load_file(f"{folder}/weights.safetensors"))
        change()
    return n * norm_of(*weights)
