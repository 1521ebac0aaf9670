"""Models of images, rows and sets written by hand."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from dpexp.training.models import wrn
from zoo import CLASSES, B, classes, images, of, plain


def without(build):
    return lambda dropout: build()


class StandardizedConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


def weight_standardized():
    return nn.Sequential(
        StandardizedConv(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), StandardizedConv(8, 8, 3, 2),
        nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def convolutions(wrapped=lambda layer: layer):
    return nn.Sequential(
        wrapped(nn.Conv2d(3, 8, 3, padding=1)), nn.ReLU(inplace=True), nn.MaxPool2d(2), wrapped(nn.Conv2d(8, 8, 3)),
        nn.ELU(), nn.Flatten(), nn.LazyLinear(CLASSES),
    )  # fmt: skip


def run_once(module, *shape):
    module(torch.zeros(1, *shape))
    return module


def frozen_spectral():
    """In evaluation mode: in training, power iteration would change its buffers in each step."""
    module = nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, CLASSES))
    return module.eval()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(8, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(checkpoint(self.body, self.first(x), use_reentrant=self.reentrant))


class EarlyExit(nn.Module):
    """Returns the first scores that are confident."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.exits = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(3))

    def forward(self, x):
        for layer, out in zip(self.body, self.exits, strict=True):
            x = layer(x).tanh()
            scores = out(x)
            if scores.detach().softmax(-1).max() > 0.45:
                break
        return scores


class Spectral(nn.Module):
    """A Fourier layer: its parameters are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, 16, 9, dtype=torch.complex64))
        self.head = nn.Linear(3 * 16 * 16, CLASSES)

    def forward(self, x):
        return self.head(torch.fft.irfft2(torch.fft.rfft2(x) * self.filter, s=x.shape[-2:]).flatten(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(2, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x):
        a = F.silu(self.norm1(self.down1(x)))
        b = F.silu(self.norm2(self.down2(a)))
        return self.out(torch.cat([a, self.up(b)], 1)).movedim(1, -1).flatten(1, 2)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coder = nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.PReLU(), nn.Linear(16, 768), nn.Sigmoid())

    def forward(self, x):
        return self.coder(x).view_as(x)


class Variational(nn.Module):
    """Its loss draws noise if `rate` is positive."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.noise = 10 * rate
        self.coder, self.decoder = nn.Linear(768, 2 * 6), nn.Linear(6, 768)

    def forward(self, x):
        mean, log = self.coder(x.flatten(1)).chunk(2, 1)
        z = mean + self.noise * (log / 2).exp() * torch.randn_like(mean)
        return self.decoder(z).view_as(x), (mean.square() + log.exp() - log - 1).sum(1).mean() / 2


class Graph(nn.Module):
    """Two graph convolutions; a record is a whole graph, with its adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, CLASSES)

    def forward(self, batch):
        x, near = batch
        return self.second(near @ F.relu(self.first(near @ x))).mean(1)


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16))
        self.all = nn.Sequential(nn.Linear(32, 16), nn.Mish(), nn.Linear(16, CLASSES))

    def forward(self, x):
        h = self.each(x)
        return self.all(torch.cat([h.sum(1), h.amax(1)], 1))


class Factorized(nn.Module):
    """A recommender: a record is one user, one item and a rating."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(30, 8)
        self.bias = nn.Embedding(30, 1)
        self.mix = nn.Bilinear(8, 8, CLASSES)

    def forward(self, batch):
        user, item = batch
        u, i = self.users(user), self.items(item)
        return self.mix(u, i) + (u * i).sum(1, keepdim=True) + self.bias(item)


class Kolmogorov(nn.Module):
    """Learned splines: an einsum of a parameter and data."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(CLASSES, 8, 5) / 5)
        self.register_buffer("knots", torch.linspace(-2, 2, 5))

    def forward(self, x):
        return torch.einsum("bik,oik->bo", (-((x[..., None] - self.knots) ** 2)).exp(), self.weights)


def rows():
    return torch.randn(B, 8), classes()


def pictures():
    return images(), classes()


def pixels():
    return images(), torch.randint(CLASSES, (B, 256))


def squared(module, batch):
    return F.mse_loss(module(batch[0]), batch[0].sigmoid())


def bounded(module, batch):
    seen, price = module(batch[0])
    return F.mse_loss(seen, batch[0]) + price


def known(module, batch):
    """The sum of two losses."""
    x, y = batch
    scores = module(x)
    return F.cross_entropy(scores, y, label_smoothing=0.1) + F.multi_margin_loss(scores, y)


MODELS = {
    "MLP, two losses": plain(
        without(lambda: nn.Sequential(nn.Linear(8, 6), nn.SELU(), nn.Linear(6, 3))), rows, loss=known
    ),
    "weight-standardized convolutions": plain(without(weight_standardized), pictures),
    "wide residual network": plain(
        without(lambda: wrn([3, 8, 8], CLASSES, depth=10, width=1)), lambda: (images(8), classes())
    ),
    "weight norm": plain(without(lambda: run_once(convolutions(parametrizations.weight_norm), 3, 16, 16)), pictures),
    "spectral norm, evaluated": plain(without(frozen_spectral), rows),
    "orthogonal weights": plain(
        without(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3))), rows
    ),
    "checkpointed": plain(of(Checkpointed, False), rows),
    "checkpointed, reentrant": plain(of(Checkpointed, True), rows),
    "early exits": plain(of(EarlyExit), rows),
    "Fourier layer, complex": plain(of(Spectral), pictures),
    "channels last": plain(
        without(lambda: run_once(convolutions(), 3, 16, 16).to(memory_format=torch.channels_last)), pictures
    ),
    "U-Net": plain(of(UNet), pixels),
    "autoencoder, PReLU": plain(of(Autoencoder), pictures, loss=squared),
    "variational autoencoder": plain(of(Variational), pictures, loss=bounded),
    "graph convolutions": plain(of(Graph), lambda: ((torch.randn(B, 5, 6), torch.rand(B, 5, 5)), classes())),
    "deep sets": plain(of(DeepSets), lambda: (torch.randn(B, 5, 6), classes())),
    "matrix factorization, Bilinear": plain(
        of(Factorized), lambda: ((torch.randint(20, (B,)), torch.randint(30, (B,))), classes())
    ),
    "Kolmogorov-Arnold": plain(of(Kolmogorov), rows),
}
