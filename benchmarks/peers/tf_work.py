"""The data and the models of the script that uses TensorFlow."""

import numpy as np
import tensorflow as tf
from setting import arguments, images, initial, tick
from tensorflow.keras import layers

WORK, SEED, FOLDER, DATA = arguments()


def data(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images with their channels last."""
    x, y = images(part, DATA)
    return x.transpose(0, 2, 3, 1), y


def architecture() -> list[layers.Layer]:
    """With weights of its own, which `begin` replaces."""
    if WORK == "mlp":
        return [layers.Flatten(), layers.DenseGradient(256, "tanh"), layers.DenseGradient(10)]
    return [
        layers.ZeroPadding2D(3), layers.Conv2D(16, 8, 2, activation="tanh"), layers.MaxPool2D(2, 1),
        layers.Conv2D(32, 4, 2, activation="tanh"), layers.MaxPool2D(2, 1),
        layers.Flatten(), layers.DenseGradient(32, "tanh"), layers.DenseGradient(10),
    ]  # fmt: skip


def begin(module: tf.keras.Model) -> None:
    """With the initial weights: [H, W, d, p] of convolutions, and [d, p] of linear layers."""
    module.build((None, 28, 28, 1))
    ours = []
    for name, value in initial(WORK, SEED, FOLDER).items():
        if name == "7.weight":  # behind the convolutions: [p, 32, 4, 4]
            value = value.reshape(-1, 32, 4, 4).transpose(2, 3, 1, 0).reshape(512, -1)
        elif value.ndim == 4:
            value = value.transpose(2, 3, 1, 0)
        ours.append(value.T if name.endswith("weight") and name != "7.weight" and value.ndim == 2 else value)
    module.set_weights(ours)


def accuracy(module: tf.keras.Model) -> float:
    x, y = data("t10k")
    return float((module.predict(x, batch_size=1000, verbose=0).argmax(1) == y).mean())


class Tick(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        tick()
