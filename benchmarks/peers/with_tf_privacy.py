"""TensorFlow Privacy, by its private form of a Keras model."""

import re  # measured

import tensorflow as tf
import tensorflow_privacy
from setting import BATCH, BOUND, DELTA, EPOCHS, EPSILON, LR, MOMENTUM, N, report
from tensorflow_privacy import DPSequential, compute_dp_sgd_privacy_statement
from tensorflow_privacy.privacy.analysis.compute_noise_from_budget_lib import compute_noise
from tf_work import Tick, accuracy, architecture, begin, data

z = compute_noise(N, BATCH, EPSILON, EPOCHS, DELTA, noise_lbd=1e-5)
module = DPSequential(l2_norm_clip=BOUND, noise_multiplier=z, layers=architecture())
begin(module)
module.compile(
    optimizer=tf.keras.optimizers.SGD(LR, MOMENTUM),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
x, y = data("train")
module.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[Tick()])
said = compute_dp_sgd_privacy_statement(N, BATCH, EPOCHS, z, DELTA, used_microbatching=False)
print(said)
epsilon = float(re.search(r"Poisson sampling \(\*\):\s+([\d.]+)", said)[1])  # measured
report(tensorflow_privacy.__version__, accuracy(module), z, epsilon)
