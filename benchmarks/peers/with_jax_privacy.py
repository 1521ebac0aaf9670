"""JAX Privacy, by an execution plan of one band, which is DP-SGD."""

import jax
import jax_privacy
import optax
from dp_accounting.pld import PLDAccountant
from jax_privacy.batch_selection import PartitionType, pad_to_multiple_of
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig
from jax_work import accuracy, data, parameters, scores
from setting import BATCH, BOUND, DELTA, EPSILON, LR, MOMENTUM, ROUNDS, N, report, tick


def loss(w, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(scores(w, x), y).mean()


plan = BandMFExecutionPlanConfig.default(
    num_bands=1,
    iterations=ROUNDS,
    epsilon=EPSILON,
    delta=DELTA,
    sampling_prob=BATCH / N,
    l2_clip_norm=BOUND,
    rescale_to_unit_norm=False,
    normalize_by=BATCH,
    accountant=PLDAccountant(),
    partition_type=PartitionType.INDEPENDENT,
).plan
gradient = plan.clipped_grad(loss, batch_argnums=(1, 2))
noise, optimizer = plan.noise_addition_transform, optax.sgd(LR, MOMENTUM)


@jax.jit
def update(w, x, y, padding, noise_state, optimizer_state):
    noisy, noise_state = noise.update(gradient(w, x, y, is_padding_example=padding), noise_state)
    change, optimizer_state = optimizer.update(noisy, optimizer_state)
    return optax.apply_updates(w, change), noise_state, optimizer_state


w, (images, labels) = parameters(), data("train")
noise_state, optimizer_state = noise.init(w), optimizer.init(w)
for sample in plan.batch_selection_strategy.batch_iterator(N):
    padded = pad_to_multiple_of(sample, 32)
    w, noise_state, optimizer_state = update(
        w, images[padded], labels[padded], padded == -1, noise_state, optimizer_state
    )
    jax.block_until_ready(w)  # measured
    tick()  # measured
z = plan.dp_event.event.event.noise_multiplier
report(jax_privacy.__version__, accuracy(w), z, PLDAccountant().compose(plan.dp_event).get_epsilon(DELTA))
