"""The data and the models of the script that uses JAX."""

import jax
import jax.numpy as jnp
from jax.lax import conv_general_dilated, max, reduce_window
from setting import arguments, images, initial

WORK, SEED, FOLDER, DATA = arguments()


def data(part: str):
    return images(part, DATA)


def parameters() -> dict[str, jax.Array]:
    """The initial weights."""
    return {name: jnp.asarray(value) for name, value in initial(WORK, SEED, FOLDER).items()}


def scores(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """[B, 1, 28, 28] -> [B, 10]."""

    def linear(h, i):
        return h @ w[f"{i}.weight"].T + w[f"{i}.bias"]

    def convolved(h, i, stride, padding):
        h = conv_general_dilated(h, w[f"{i}.weight"], (stride, stride), [(padding, padding)] * 2)
        h = jnp.tanh(h + w[f"{i}.bias"][:, None, None])
        return reduce_window(h, -jnp.inf, max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")

    if WORK == "mlp":
        return linear(jnp.tanh(linear(x.reshape(len(x), -1), 1)), 3)
    h = convolved(convolved(x, 0, 2, 3), 3, 2, 0)
    return linear(jnp.tanh(linear(h.reshape(len(x), -1), 7)), 9)


def accuracy(w: dict[str, jax.Array]) -> float:
    x, y = data("t10k")
    return float((scores(w, x).argmax(1) == y).mean())
