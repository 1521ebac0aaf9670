"""Images, tables and fields: classifiers, autoencoders, flows, diffusion, recommenders, SIREN, KAN, NeRF."""

import copy
import math
import random
from collections import OrderedDict
from functools import partial
from itertools import pairwise

import numpy as np
import pytorch_lightning as pl
import torch
from ordinary import GROUP_NORM, N, case
from torch import einsum, nn
from torch.nn import functional as F
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader, Subset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy


class Images:
    """Random images of ten classes."""

    def __init__(self, channels=1, side=28, transform=None):
        g = torch.Generator().manual_seed(0)
        self.x = torch.rand(N, channels, side, side, generator=g)
        self.y = torch.randint(10, (N,), generator=g)
        self.transform = transform or (lambda x: x)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.transform(self.x[i]), self.y[i]


class Table:
    """Random rows: numbers, categories, a target."""

    def __init__(self, numbers, sizes, classes=2):
        g = torch.Generator().manual_seed(0)
        self.numbers = torch.randn(N, numbers, generator=g)
        self.categories = torch.stack([torch.randint(size, (N,), generator=g) for size in sizes], 1)
        self.y = torch.randint(classes, (N,), generator=g).float() if classes else torch.randn(N, generator=g)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.numbers[i], self.categories[i], self.y[i]


def centred(x):
    return (x - 0.5) / 0.5


@case("MNIST, hydra template", "ashleve/lightning-hydra-template src/models/mnist_module.py", GROUP_NORM)
def _():
    class Dense(nn.Module):
        def __init__(self, sizes=(784, 64, 128, 64, 10)):
            super().__init__()
            layers = []
            for a, b in pairwise(sizes[:-1]):
                layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
            self.model = nn.Sequential(*layers, nn.Linear(*sizes[-2:]))

        def forward(self, x):
            count, _, _, _ = x.size()
            return self.model(x.view(count, -1))

    class Digits(pl.LightningModule):
        def __init__(self, net, optimizer, scheduler):
            super().__init__()
            self.save_hyperparameters(logger=False)
            self.net = net
            self.criterion = nn.CrossEntropyLoss()
            self.train_acc, self.val_acc = (Accuracy(task="multiclass", num_classes=10) for _ in range(2))
            self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
            self.val_acc_best = MaxMetric()

        def forward(self, x):
            return self.net(x)

        def on_train_start(self):
            for metric in (self.val_loss, self.val_acc, self.val_acc_best):
                metric.reset()

        def model_step(self, batch):
            x, y = batch
            logits = self.forward(x)
            return self.criterion(logits, y), torch.argmax(logits, dim=1), y

        def training_step(self, batch, batch_idx):
            loss, preds, targets = self.model_step(batch)
            self.train_loss(loss)
            self.train_acc(preds, targets)
            self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
            self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
            return loss

        def validation_step(self, batch, batch_idx):
            loss, preds, targets = self.model_step(batch)
            self.val_loss(loss)
            self.val_acc(preds, targets)
            self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
            self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

        def on_validation_epoch_end(self):
            self.val_acc_best(self.val_acc.compute())
            self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

        def val_dataloader(self):
            return DataLoader(Subset(Images(), range(64)), 32)

        def configure_optimizers(self):
            optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
            if self.hparams.scheduler is None:
                return {"optimizer": optimizer}
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            schedule = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    plateau = partial(ReduceLROnPlateau, mode="min", factor=0.1, patience=10)
    return Digits(Dense(), partial(Adam, lr=1e-3, weight_decay=0.0), plateau), Images(), {}


@case("autoencoder", "Lightning-AI/pytorch-lightning examples/pytorch/basics/autoencoder.py")
def _():
    class Squeeze(pl.LightningModule):
        def __init__(self, width=64, rate=0.01):
            super().__init__()
            self.save_hyperparameters()
            pixels = 28 * 28
            self.encoder = nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, 3))
            self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, pixels))

        def forward(self, x):
            return self.decoder(self.encoder(x))

        def flat(self, batch):
            x, _ = batch
            return x.view(x.size(0), -1)

        def common(self, batch, stage):
            x = self.flat(batch)
            loss = F.mse_loss(x, self(x))
            self.log(f"{stage}_loss", loss, on_step=True)
            return loss

        def training_step(self, batch, batch_idx):
            return self.common(batch, "train")

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=self.hparams.rate)

    return Squeeze(), Images(), {}


@case("backbone classifier", "Lightning-AI/pytorch-lightning examples/pytorch/basics/backbone_image_classifier.py")
def _():
    class Backbone(nn.Module):
        def __init__(self, width=256):
            super().__init__()
            self.first, self.second = nn.Linear(784, width), nn.Linear(width, 10)

        def forward(self, x):
            h = torch.relu(self.first(x.view(x.size(0), -1)))
            return torch.relu(self.second(h))  # a ReLU on the scores, as there

    class Classifier(pl.LightningModule):
        def __init__(self, backbone=None, rate=1e-4):
            super().__init__()
            self.save_hyperparameters(ignore=["backbone"])
            self.backbone = Backbone() if backbone is None else backbone

        def forward(self, x):
            return self.backbone(x)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            self.log("train_loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=self.hparams.rate)

    return Classifier(), Images(), {}


@case("deep autoencoder, CIFAR10", "Lightning-AI/tutorials course_UvA-DL/08-deep-autoencoders")
def _():
    half = partial(nn.Conv2d, kernel_size=3, padding=1, stride=2)
    same = partial(nn.Conv2d, kernel_size=3, padding=1)
    double = partial(nn.ConvTranspose2d, kernel_size=3, output_padding=1, padding=1, stride=2)

    class Encoder(nn.Module):
        def __init__(self, channels, c, latent, act=nn.GELU):
            super().__init__()
            convs = [half(channels, c), same(c, c), half(c, 2 * c), same(2 * c, 2 * c), half(2 * c, 2 * c)]
            layers = [layer for conv in convs for layer in (conv, act())]
            self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * c, latent))

        def forward(self, x):
            return self.net(x)

    class Decoder(nn.Module):
        def __init__(self, channels, c, latent, act=nn.GELU):
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(latent, 32 * c), act())
            convs = [double(2 * c, 2 * c), same(2 * c, 2 * c), double(2 * c, c), same(c, c)]
            layers = [layer for conv in convs for layer in (conv, act())]
            self.net = nn.Sequential(*layers, double(c, channels), nn.Tanh())

        def forward(self, z):
            h = self.linear(z)
            return self.net(h.reshape(h.shape[0], -1, 4, 4))

    class Reconstruct(pl.LightningModule):
        def __init__(self, c=8, latent=32, encoder=Encoder, decoder=Decoder, channels=3, side=32):
            super().__init__()
            self.save_hyperparameters()
            self.encoder, self.decoder = encoder(channels, c, latent), decoder(channels, c, latent)
            self.example_input_array = torch.zeros(2, channels, side, side)

        def forward(self, x):
            return self.decoder(self.encoder(x))

        def error(self, batch):
            x, _ = batch
            each = F.mse_loss(x, self.forward(x), reduction="none")
            return each.sum(dim=[1, 2, 3]).mean(dim=[0])

        def training_step(self, batch, batch_idx):
            loss = self.error(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.error(batch))

        def val_dataloader(self):
            return DataLoader(Subset(Images(3, 32, centred), range(64)), 32)

        def configure_optimizers(self):
            optimizer = Adam(self.parameters(), lr=1e-3)
            scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.2, patience=20, min_lr=5e-5)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

    return Reconstruct(), Images(3, 32, centred), {}


@case("normalizing flow", "Lightning-AI/tutorials course_UvA-DL/09-normalizing-flows")
def _():
    pixels = [1, 2, 3]

    class Dequantize(nn.Module):
        def __init__(self, alpha=1e-5, levels=256):
            super().__init__()
            self.alpha, self.levels = alpha, levels

        def forward(self, z, ldj, reverse=False):
            if reverse:
                z, ldj = self.squash(z, ldj)
                ldj += np.log(self.levels) * np.prod(z.shape[1:])
                return torch.floor(z * self.levels).clamp(min=0, max=self.levels - 1).to(torch.int32), ldj
            return self.unsquash(*self.add_noise(z, ldj))

        def add_noise(self, z, ldj):
            z = z.to(torch.float32)
            z = z + torch.rand_like(z).detach()
            ldj -= np.log(self.levels) * np.prod(z.shape[1:])
            return z / self.levels, ldj

        def squash(self, z, ldj):
            ldj += (-z - 2 * F.softplus(-z)).sum(dim=pixels)
            return torch.sigmoid(z), ldj

        def unsquash(self, z, ldj):
            z = z * (1 - self.alpha) + self.alpha / 2
            ldj += np.log(1 - self.alpha) * np.prod(z.shape[1:])
            ldj += (-torch.log(z) - torch.log(1 - z)).sum(dim=pixels)
            return torch.log(z) - torch.log(1 - z), ldj

    class Coupling(nn.Module):
        def __init__(self, network, mask, channels):
            super().__init__()
            self.network = network
            self.scaling_factor = nn.Parameter(torch.zeros(channels))
            self.register_buffer("mask", mask)

        def forward(self, z, ldj, reverse=False):
            scale, shift = self.network(z * self.mask).chunk(2, dim=1)
            bound = self.scaling_factor.exp().view(1, -1, 1, 1)
            scale = torch.tanh(scale / bound) * bound
            free = 1 - self.mask
            scale, shift = scale * free, shift * free
            if reverse:
                ldj -= scale.sum(dim=pixels)
                return z * torch.exp(-scale) - shift, ldj
            ldj += scale.sum(dim=pixels)
            return (z + shift) * torch.exp(scale), ldj

    def checkerboard(side, invert):
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        mask = torch.fmod(rows + columns, 2).to(torch.float32).view(1, 1, side, side)
        return 1 - mask if invert else mask

    class BothElu(nn.Module):
        def forward(self, x):
            return torch.cat([F.elu(x), F.elu(-x)], dim=1)

    class ChannelNorm(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.layer_norm = nn.LayerNorm(channels)

        def forward(self, x):
            return self.layer_norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class Gated(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(c, c, 3, padding=1), BothElu(), nn.Conv2d(2 * c, 2 * c, 1))

        def forward(self, x):
            value, gate = self.net(x).chunk(2, dim=1)
            return x + value * torch.sigmoid(gate)

    class GatedNet(nn.Module):
        def __init__(self, channels, c=8, depth=2):
            super().__init__()
            layers = [nn.Conv2d(channels, c, 3, padding=1)]
            for _ in range(depth):
                layers += [Gated(c), ChannelNorm(c)]
            self.nn = nn.Sequential(*layers, BothElu(), nn.Conv2d(2 * c, 2 * channels, 3, padding=1))
            self.nn[-1].weight.data.zero_()
            self.nn[-1].bias.data.zero_()

        def forward(self, x):
            return self.nn(x)

    class Flow(pl.LightningModule):
        def __init__(self, flows):
            super().__init__()
            self.flows = nn.ModuleList(flows)
            self.prior = torch.distributions.normal.Normal(loc=0.0, scale=1.0)

        def encode(self, images):
            z, ldj = images, torch.zeros(images.shape[0], device=self.device)
            for flow in self.flows:
                z, ldj = flow(z, ldj, reverse=False)
            return z, ldj

        def forward(self, images):
            z, ldj = self.encode(images)
            nll = -(ldj + self.prior.log_prob(z).sum(dim=pixels))
            bits = nll * np.log2(np.exp(1)) / np.prod(images.shape[1:])
            return bits.mean()

        def training_step(self, batch, batch_idx):
            loss = self(batch[0])
            self.log("train_bpd", loss)
            return loss

        def configure_optimizers(self):
            optimizer = Adam(self.parameters(), lr=1e-3)
            return [optimizer], [StepLR(optimizer, 1, gamma=0.99)]

    couplings = [Coupling(GatedNet(1), checkerboard(14, invert=k % 2 == 1), 1) for k in range(4)]
    return Flow([Dequantize(), *couplings]), Images(1, 14, lambda x: (x * 255).to(torch.int32)), {}


@case("Vision Transformer", "Lightning-AI/tutorials course_UvA-DL/11-vision-transformer")
def _():
    def patches(x, p):
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        return x.flatten(1, 2).flatten(2, 4)

    class Block(nn.Module):
        def __init__(self, dim, hidden, heads, dropout):
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.attn = nn.MultiheadAttention(dim, heads)
            self.linear = nn.Sequential(
                nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, dim), nn.Dropout(dropout)
            )

        def forward(self, x):
            h = self.norm_1(x)
            x = x + self.attn(h, h, h)[0]
            return x + self.linear(self.norm_2(x))

    class Transformer(nn.Module):
        def __init__(self, dim=32, hidden=64, heads=4, depth=3, classes=10, patch=4, count=64, dropout=0.2):
            super().__init__()
            self.patch = patch
            self.input_layer = nn.Linear(3 * patch**2, dim)
            self.transformer = nn.Sequential(*(Block(dim, hidden, heads, dropout) for _ in range(depth)))
            self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))
            self.dropout = nn.Dropout(dropout)
            self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
            self.pos_embedding = nn.Parameter(torch.randn(1, 1 + count, dim))

        def forward(self, x):
            x = patches(x, self.patch)
            b, t, _ = x.shape
            x = torch.cat([self.cls_token.repeat(b, 1, 1), self.input_layer(x)], dim=1)
            x = self.dropout(x + self.pos_embedding[:, : t + 1])
            x = self.transformer(x.transpose(0, 1))  # MultiheadAttention here has the records second
            return self.mlp_head(x[0])

    class Vit(pl.LightningModule):
        def __init__(self, options, lr=3e-4):
            super().__init__()
            self.save_hyperparameters()
            self.model = Transformer(**options)
            self.example_input_array = torch.zeros(2, 3, 32, 32)

        def forward(self, x):
            return self.model(x)

        def step(self, batch, mode):
            images, labels = batch
            scores = self.model(images)
            loss = F.cross_entropy(scores, labels)
            self.log(f"{mode}_loss", loss)
            self.log(f"{mode}_acc", (scores.argmax(dim=-1) == labels).float().mean())
            return loss

        def training_step(self, batch, batch_idx):
            return self.step(batch, mode="train")

        def configure_optimizers(self):
            optimizer = AdamW(self.parameters(), lr=self.hparams.lr)
            return [optimizer], [MultiStepLR(optimizer, milestones=[100, 150], gamma=0.1)]

    return Vit({"dim": 32, "dropout": 0.2}), Images(3, 32), {}


class Residual(nn.Module):
    """A basic block of torchvision's resnet18."""

    def __init__(self, a, b, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or a != b:
            self.downsample = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet18(nn.Module):
    """torchvision's resnet18, narrow."""

    def __init__(self, classes=10, c=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, c, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(c)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Residual(c, c), Residual(c, c))
        self.layer2 = nn.Sequential(Residual(c, 2 * c, 2), Residual(2 * c, 2 * c))
        self.layer3 = nn.Sequential(Residual(2 * c, 4 * c, 2), Residual(4 * c, 4 * c))
        self.layer4 = nn.Sequential(Residual(4 * c, 8 * c, 2), Residual(8 * c, 8 * c))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * c, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


@case("SimCLR", "Lightning-AI/tutorials course_UvA-DL/13-contrastive-learning", GROUP_NORM)
def _():
    class Views:
        def __init__(self, transform, n=2):
            self.transform, self.n = transform, n

        def __call__(self, x):
            return [self.transform(x) for _ in range(self.n)]

    def augment(x):
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        top, left = torch.randint(0, 9, (2,)).tolist()
        x = F.interpolate(x[None, :, top : top + 24, left : left + 24], size=32, mode="bilinear")[0]
        if torch.rand(()) < 0.8:
            x = (x * (0.5 + torch.rand(3, 1, 1))).clamp(0, 1)
        if torch.rand(()) < 0.2:
            x = x.mean(0, keepdim=True).expand(3, -1, -1)
        return centred(x)

    class Contrast(pl.LightningModule):
        def __init__(self, dim=16, lr=5e-4, temperature=0.07, weight_decay=1e-4, max_epochs=500):
            super().__init__()
            self.save_hyperparameters()
            self.convnet = ResNet18(4 * dim)
            self.convnet.fc = nn.Sequential(self.convnet.fc, nn.ReLU(inplace=True), nn.Linear(4 * dim, dim))

        def training_step(self, batch, batch_idx):
            views, _ = batch
            features = self.convnet(torch.cat(views, dim=0))
            similar = F.cosine_similarity(features[:, None, :], features[None, :, :], dim=-1)
            itself = torch.eye(similar.shape[0], dtype=torch.bool, device=similar.device)
            similar.masked_fill_(itself, -9e15)
            partner = itself.roll(shifts=similar.shape[0] // 2, dims=0)
            similar = similar / self.hparams.temperature
            loss = (-similar[partner] + torch.logsumexp(similar, dim=-1)).mean()
            self.log("train_loss", loss)
            ordered = torch.cat([similar[partner][:, None], similar.masked_fill(partner, -9e15)], dim=-1)
            rank = ordered.argsort(dim=-1, descending=True).argmin(dim=-1)
            self.log("train_acc_top1", (rank == 0).float().mean())
            self.log("train_acc_top5", (rank < 5).float().mean())
            self.log("train_acc_mean_pos", 1 + rank.float().mean())
            return loss

        def configure_optimizers(self):
            h = self.hparams
            optimizer = AdamW(self.parameters(), lr=h.lr, weight_decay=h.weight_decay)
            return [optimizer], [CosineAnnealingLR(optimizer, T_max=h.max_epochs, eta_min=h.lr / 50)]

    return Contrast(), Images(3, 32, Views(augment)), {}


@case("logistic regression", "Lightning-Universe/lightning-bolts src/pl_bolts/models/regression/logistic_regression.py")
def _():
    class Logistic(pl.LightningModule):
        def __init__(self, inputs, classes, bias=True, lr=1e-4, optimizer=Adam, l1=0.0, l2=0.0):
            super().__init__()
            self.save_hyperparameters()
            self.optimizer = optimizer
            self.criterion = nn.CrossEntropyLoss()
            self.linear = nn.Linear(inputs, classes, bias=bias)

        def prepare(self, batch):
            x, y = batch
            x = x.view(x.size(0), -1)
            return self.linear(x), torch.tensor(y, dtype=torch.long)  # a copy of a tensor, as there

        def penalize(self, loss):
            if self.hparams.l1 > 0:
                loss += self.hparams.l1 * self.linear.weight.abs().sum()
            if self.hparams.l2 > 0:
                loss += self.hparams.l2 * self.linear.weight.pow(2).sum()
            return loss

        def training_step(self, batch, batch_idx):
            scores, y = self.prepare(batch)
            loss = self.penalize(self.criterion(scores, y))
            loss /= scores.size(0)  # once more, as there
            metrics = {"loss": loss}
            self.log_dict(metrics, on_step=True)
            return metrics

        def configure_optimizers(self):
            return self.optimizer(self.parameters(), lr=self.hparams.lr)

    class Flowers(Table):
        def __getitem__(self, i):
            return self.numbers[i], self.y[i].long()

    return Logistic(4, 3, l1=0.01, lr=0.01), Flowers(4, [2], classes=3), {}


@case("GAN, manual optimization", "Lightning-AI/tutorials lightning_examples/basic-gan", GROUP_NORM)
def _():
    class Generator(nn.Module):
        def __init__(self, latent, shape, widths=(16, 32, 64, 128)):
            super().__init__()
            self.shape = shape

            def block(a, b, normalize=True):
                norm = [nn.BatchNorm1d(b, 0.8)] if normalize else []  # 0.8 is the epsilon, as there
                return [nn.Linear(a, b), *norm, nn.LeakyReLU(0.2, inplace=True)]

            layers = block(latent, widths[0], normalize=False)
            for a, b in pairwise(widths):
                layers += block(a, b)
            self.model = nn.Sequential(*layers, nn.Linear(widths[-1], int(np.prod(shape))), nn.Tanh())

        def forward(self, z):
            return self.model(z).view(z.size(0), *self.shape)

    class Discriminator(nn.Module):
        def __init__(self, shape):
            super().__init__()
            slope = partial(nn.LeakyReLU, 0.2, inplace=True)
            self.model = nn.Sequential(
                nn.Linear(int(np.prod(shape)), 64), slope(), nn.Linear(64, 32), slope(), nn.Linear(32, 1), nn.Sigmoid()
            )

        def forward(self, image):
            return self.model(image.view(image.size(0), -1))

    class Gan(pl.LightningModule):
        def __init__(self, *shape, latent=100, lr=2e-4, betas=(0.5, 0.999)):
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = False
            self.generator, self.discriminator = Generator(latent, shape), Discriminator(shape)
            self.validation_z = torch.randn(8, latent)
            self.example_input_array = torch.zeros(2, latent)

        def forward(self, z):
            return self.generator(z)

        def adversarial_loss(self, judged, truth):
            return F.binary_cross_entropy(judged, truth)

        def update(self, optimizer, loss, name):
            self.log(name, loss, prog_bar=True)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

        def training_step(self, batch):
            images, _ = batch
            for_g, for_d = self.optimizers()
            z = torch.randn(images.shape[0], self.hparams.latent).type_as(images)
            valid = torch.ones(images.size(0), 1).type_as(images)
            fake = torch.zeros(images.size(0), 1).type_as(images)

            self.toggle_optimizer(for_g)
            self.generated = self(z)
            self.update(for_g, self.adversarial_loss(self.discriminator(self(z)), valid), "g_loss")

            self.toggle_optimizer(for_d)
            real_loss = self.adversarial_loss(self.discriminator(images), valid)
            fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
            self.update(for_d, (real_loss + fake_loss) / 2, "d_loss")

        def configure_optimizers(self):
            options = {"lr": self.hparams.lr, "betas": self.hparams.betas}
            return [Adam(net.parameters(), **options) for net in (self.generator, self.discriminator)], []

    return Gan(1, 28, 28), Images(), {}


@case("MNIST convnet", "pytorch/examples mnist/main.py")
def _():
    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(2304, 64), nn.Linear(64, 10)

        def forward(self, x):
            x = F.relu(self.conv1(x))
            x = F.relu(self.conv2(x))
            x = self.dropout1(F.max_pool2d(x, 2))
            x = F.relu(self.fc1(torch.flatten(x, 1)))
            return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.nll_loss(self(x), y)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = Adadelta(self.parameters(), lr=1.0)
            return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.7)]

    return Net(), Images(), {}


@case("VAE", "pytorch/examples vae/main.py")
def _():
    class Vae(pl.LightningModule):
        def __init__(self, width=256, latent=20):
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(784, width), nn.Linear(width, latent), nn.Linear(width, latent)
            self.fc3, self.fc4 = nn.Linear(latent, width), nn.Linear(width, 784)

        def encode(self, x):
            h = F.relu(self.fc1(x))
            return self.fc21(h), self.fc22(h)

        def sample(self, mu, logvar):
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std

        def decode(self, z):
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

        def forward(self, x):
            mu, logvar = self.encode(x.view(-1, 784))
            return self.decode(self.sample(mu, logvar)), mu, logvar

        def training_step(self, batch, batch_idx):
            x, _ = batch
            seen, mu, logvar = self(x)
            error = F.binary_cross_entropy(seen, x.view(-1, 784), reduction="sum")
            kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = error + kl
            self.log("train_loss", loss / len(x))
            return loss

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=1e-3)

    return Vae(), Images(), {}


@case("super resolution", "pytorch/examples super_resolution")
def _():
    class Upscale(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.relu = nn.ReLU()
            self.conv1, self.conv2 = nn.Conv2d(1, 16, (5, 5), (1, 1), (2, 2)), nn.Conv2d(16, 16, (3, 3), (1, 1), (1, 1))
            self.conv3 = nn.Conv2d(16, 8, (3, 3), (1, 1), (1, 1))
            self.conv4 = nn.Conv2d(8, factor**2, (3, 3), (1, 1), (1, 1))
            self.pixel_shuffle = nn.PixelShuffle(factor)
            for conv in (self.conv1, self.conv2, self.conv3):
                nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))
            nn.init.orthogonal_(self.conv4.weight)

        def forward(self, x):
            for conv in (self.conv1, self.conv2, self.conv3):
                x = self.relu(conv(x))
            return self.pixel_shuffle(self.conv4(x))

    class Resolve(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.criterion = Upscale(2), nn.MSELoss()

        def training_step(self, batch, batch_idx):
            coarse, fine = batch[0], batch[1]
            loss = self.criterion(self.model(coarse), fine)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=0.01)

    class Crops(Images):
        def __getitem__(self, i):
            return F.avg_pool2d(self.x[i], 2), self.x[i]

    return Resolve(), Crops(1, 32), {}


@case("Siamese network", "pytorch/examples siamese_network", GROUP_NORM)
def _():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            resnet = ResNet18()
            resnet.conv1 = nn.Conv2d(1, 8, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
            self.resnet = nn.Sequential(*list(resnet.children())[:-1])
            self.fc = nn.Sequential(nn.Linear(2 * resnet.fc.in_features, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
            self.sigmoid = nn.Sigmoid()
            self.resnet.apply(self.initialize)
            self.fc.apply(self.initialize)

        def initialize(self, m):
            if isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                m.bias.data.fill_(0.01)

        def once(self, x):
            h = self.resnet(x)
            return h.view(h.size()[0], -1)

        def forward(self, first, second):
            both = torch.cat((self.once(first), self.once(second)), 1)
            return self.sigmoid(self.fc(both))

    class Matcher(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.criterion = Siamese(), nn.BCELoss()

        def training_step(self, batch, batch_idx):
            first, second, same = batch
            loss = self.criterion(self.model(first, second).squeeze(), same)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = Adadelta(self.model.parameters(), lr=1.0)
            return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.7)]

    class Pairs(Images):
        def __init__(self):
            super().__init__()
            self.data = (self.x * 255).to(torch.uint8)
            self.of_class = [np.flatnonzero(self.y.numpy() == c).tolist() for c in range(10)]

        def __getitem__(self, i):
            draw = random.Random(i)
            a, b = draw.sample(range(10), 2)
            one, two = draw.sample(self.of_class[a], 2)
            if i % 2:
                two = draw.choice(self.of_class[b])
            return self.data[one].clone().float(), self.data[two].clone().float(), torch.tensor(1.0 - i % 2)

    return Matcher(), Pairs(), {}


@case("U-Net, Dice and cross entropy", "milesial/Pytorch-UNet", GROUP_NORM)
def _():
    def twice(a, b, middle=None):
        layers = []
        for i, o in pairwise((a, middle or b, b)):
            layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    class Up(nn.Module):
        def __init__(self, a, b, bilinear):
            super().__init__()
            if bilinear:
                self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
                self.conv = twice(a, b, a // 2)
            else:
                self.up = nn.ConvTranspose2d(a, a // 2, kernel_size=2, stride=2)
                self.conv = twice(a, b)

        def forward(self, low, skip):
            low = self.up(low)
            dy, dx = skip.size()[2] - low.size()[2], skip.size()[3] - low.size()[3]
            low = F.pad(low, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            return self.conv(torch.cat([skip, low], dim=1))

    class UNet(nn.Module):
        def __init__(self, channels, classes, bilinear=False, c=4):
            super().__init__()
            self.channels, self.classes = channels, classes
            shrink = 2 if bilinear else 1
            self.first = twice(channels, c)
            widths = [c, 2 * c, 4 * c, 8 * c, 16 * c // shrink]
            self.downs = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), twice(a, b)) for a, b in pairwise(widths))
            ups = [(16 * c, 8 * c // shrink), (8 * c, 4 * c // shrink), (4 * c, 2 * c // shrink), (2 * c, c)]
            self.ups = nn.ModuleList(Up(a, b, bilinear) for a, b in ups)
            self.last = nn.Conv2d(c, classes, kernel_size=1)

        def forward(self, x):
            kept = [self.first(x)]
            for down in self.downs:
                kept.append(down(kept[-1]))
            x = kept.pop()
            for up in self.ups:
                x = up(x, kept.pop())
            return self.last(x)

    def dice_coeff(guess, truth, whole_batch=False, epsilon=1e-6):
        assert guess.size() == truth.size()
        over = (-1, -2, -3) if whole_batch else (-1, -2)
        common = 2 * (guess * truth).sum(dim=over)
        total = guess.sum(dim=over) + truth.sum(dim=over)
        total = torch.where(total == 0, common, total)
        return ((common + epsilon) / (total + epsilon)).mean()

    def dice_loss(guess, truth, multiclass):
        if multiclass:
            guess, truth = guess.flatten(0, 1), truth.flatten(0, 1)
        return 1 - dice_coeff(guess, truth, whole_batch=True)

    class Segment(pl.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.criterion = nn.CrossEntropyLoss() if model.classes > 1 else nn.BCEWithLogitsLoss()

        def training_step(self, batch, batch_idx):
            images, masks = batch["image"], batch["mask"]
            assert images.shape[1] == self.model.channels
            images = images.to(dtype=torch.float32, memory_format=torch.channels_last)
            masks = masks.to(dtype=torch.long)
            scores = self.model(images)
            if self.model.classes == 1:
                loss = self.criterion(scores.squeeze(1), masks.float())
                loss += dice_loss(torch.sigmoid(scores.squeeze(1)), masks.float(), multiclass=False)
            else:
                loss = self.criterion(scores, masks)
                truth = F.one_hot(masks, self.model.classes).permute(0, 3, 1, 2).float()
                loss += dice_loss(F.softmax(scores, dim=1).float(), truth, multiclass=True)
            self.log("train loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            masks = F.one_hot(batch["mask"].long(), 2).permute(0, 3, 1, 2).float()
            scores = self.model(batch["image"])
            guess = F.one_hot(scores.argmax(dim=1), 2).permute(0, 3, 1, 2).float()
            self.log("validation Dice", dice_coeff(guess[:, 1:], masks[:, 1:], whole_batch=False))

        def val_dataloader(self):
            return DataLoader(Subset(Masks(3, 32), range(64)), 32)

        def configure_optimizers(self):
            optimizer = RMSprop(self.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
            scheduler = ReduceLROnPlateau(optimizer, "max", patience=5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "validation Dice"}}

    class Masks(Images):
        def __getitem__(self, i):
            return {"image": self.x[i], "mask": (self.x[i].mean(0) > 0.5).long()}

    return Segment(UNet(3, 2)), Masks(3, 32), {}


@case("ResNet, CIFAR10", "kuangliu/pytorch-cifar", GROUP_NORM)
def _():
    class Block(nn.Module):
        def __init__(self, a, b, stride):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(b)
            self.conv2, self.bn2 = nn.Conv2d(b, b, 3, stride=1, padding=1, bias=False), nn.BatchNorm2d(b)
            project = [nn.Conv2d(a, b, 1, stride=stride, bias=False), nn.BatchNorm2d(b)]
            self.shortcut = nn.Sequential(*(project if stride != 1 or a != b else []))

        def forward(self, x):
            out = F.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += self.shortcut(x)
            return F.relu(out)

    class ResNet(nn.Module):
        def __init__(self, counts=(2, 2, 2, 2), classes=10, c=4):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, c, 3, stride=1, padding=1, bias=False), nn.BatchNorm2d(c)
            layers, a = [], c
            for k, count in enumerate(counts):
                b = c * 2**k
                strides = [2 if k else 1] + [1] * (count - 1)
                layers.append(nn.Sequential(*(Block(a if j == 0 else b, b, s) for j, s in enumerate(strides))))
                a = b
            self.layer1, self.layer2, self.layer3, self.layer4 = layers
            self.linear = nn.Linear(a, classes)

        def forward(self, x):
            out = F.relu(self.bn1(self.conv1(x)))
            out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
            out = F.avg_pool2d(out, 4)
            return self.linear(out.view(out.size(0), -1))

    class Cifar(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.criterion = ResNet(), nn.CrossEntropyLoss()
            self.lost, self.correct, self.total = 0, 0, 0

        def on_train_epoch_start(self):
            self.lost, self.correct, self.total = 0, 0, 0

        def training_step(self, batch, batch_idx):
            x, y = batch
            scores = self.net(x)
            loss = self.criterion(scores, y)
            self.lost += loss.item()
            _, guess = scores.max(1)
            self.total += y.size(0)
            self.correct += guess.eq(y).sum().item()
            self.log_dict({"loss": self.lost / (batch_idx + 1), "acc": 100.0 * self.correct / self.total})
            return loss

        def configure_optimizers(self):
            optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
            return [optimizer], [CosineAnnealingLR(optimizer, T_max=200)]

    def augment(x):
        top, left = torch.randint(0, 9, (2,)).tolist()
        x = F.pad(x, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        return x.flip(-1) if torch.rand(()) < 0.5 else x

    return Cifar(), Images(3, 32, augment), {}


@case("masked autoencoder", "lucidrains/vit-pytorch vit_pytorch/mae.py")
def _():
    def feed_forward(dim, hidden, dropout=0.0):
        return nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, dim),
            nn.Dropout(dropout),
        )

    class Attention(nn.Module):
        def __init__(self, dim, heads, size, dropout=0.0):
            super().__init__()
            self.heads, self.scale = heads, size**-0.5
            self.norm, self.attend, self.dropout = nn.LayerNorm(dim), nn.Softmax(dim=-1), nn.Dropout(dropout)
            self.to_qkv = nn.Linear(dim, 3 * heads * size, bias=False)
            self.to_out = nn.Sequential(nn.Linear(heads * size, dim), nn.Dropout(dropout))

        def forward(self, x):
            b, n, _ = x.shape
            qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
            q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in qkv)
            weights = self.dropout(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
            return self.to_out(torch.matmul(weights, v).transpose(1, 2).reshape(b, n, -1))

    class Transformer(nn.Module):
        def __init__(self, dim, depth, heads, size, hidden):
            super().__init__()
            self.norm = nn.LayerNorm(dim)
            pair = [(Attention(dim, heads, size), feed_forward(dim, hidden)) for _ in range(depth)]
            self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in pair)

        def forward(self, x):
            for attn, ff in self.layers:
                x = attn(x) + x
                x = ff(x) + x
            return self.norm(x)

    class Cut(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p = p

        def forward(self, x):
            b, c, h, w = x.shape
            x = x.reshape(b, c, h // self.p, self.p, w // self.p, self.p)
            return x.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, self.p**2 * c)

    class Vit(nn.Module):
        """Its token and its head get no gradient: the masked autoencoder does not use them."""

        def __init__(self, side=32, p=8, classes=10, dim=48, depth=2, heads=4, size=12, hidden=96):
            super().__init__()
            count, values = (side // p) ** 2, 3 * p**2
            self.pool = "cls"
            self.to_patch_embedding = nn.Sequential(
                Cut(p), nn.LayerNorm(values), nn.Linear(values, dim), nn.LayerNorm(dim)
            )
            self.pos_embedding = nn.Parameter(torch.randn(1, count + 1, dim))
            self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
            self.transformer = Transformer(dim, depth, heads, size, hidden)
            self.mlp_head = nn.Linear(dim, classes)

    class Mae(nn.Module):
        def __init__(self, encoder, dim, ratio=0.75, depth=2, heads=8, size=8):
            super().__init__()
            self.ratio, self.encoder, self.dim = ratio, encoder, dim
            count, wide = encoder.pos_embedding.shape[-2:]
            self.to_patch = encoder.to_patch_embedding[0]
            self.patch_to_emb = nn.Sequential(*encoder.to_patch_embedding[1:])
            values = encoder.to_patch_embedding[2].weight.shape[-1]
            self.enc_to_dec = nn.Linear(wide, dim) if wide != dim else nn.Identity()
            self.mask_token = nn.Parameter(torch.randn(dim))
            self.decoder = Transformer(dim, depth, heads, size, 4 * dim)
            self.decoder_pos_emb = nn.Embedding(count, dim)
            self.to_pixels = nn.Linear(dim, values)

        def forward(self, images):
            patches = self.to_patch(images)
            b, n, *_ = patches.shape
            tokens = self.patch_to_emb(patches)
            if self.encoder.pool == "cls":
                tokens += self.encoder.pos_embedding[:, 1 : n + 1]
            elif self.encoder.pool == "mean":
                tokens += self.encoder.pos_embedding
            hide = int(self.ratio * n)
            order = torch.rand(b, n, device=images.device).argsort(dim=-1)
            hidden, seen = order[:, :hide], order[:, hide:]
            rows = torch.arange(b, device=images.device)[:, None]
            encoded = self.encoder.transformer(tokens[rows, seen])

            known = self.enc_to_dec(encoded) + self.decoder_pos_emb(seen)
            unknown = self.mask_token.expand(b, hide, -1) + self.decoder_pos_emb(hidden)
            everything = torch.zeros(b, n, self.dim, device=images.device)
            everything[rows, seen] = known
            everything[rows, hidden] = unknown
            guess = self.to_pixels(self.decoder(everything)[rows, hidden])
            return F.mse_loss(guess, patches[rows, hidden])

    class Pretrain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.mae = Mae(Vit(), dim=32)

        def training_step(self, batch, batch_idx):
            loss = self.mae(batch[0])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return Adam(self.mae.parameters(), lr=3e-4)

    return Pretrain(), Images(3, 32), {}


@case("DDPM", "lucidrains/denoising-diffusion-pytorch")
def _():
    class Add(nn.Module):
        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def forward(self, x):
            return self.fn(x) + x

    class StandardConv(nn.Conv2d):
        def forward(self, x):
            eps = 1e-5 if x.dtype == torch.float32 else 1e-3
            mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
            var = torch.var(self.weight, dim=(1, 2, 3), unbiased=False, keepdim=True)
            weight = (self.weight - mean) * (var + eps).rsqrt()
            return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    class ChannelNorm(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.g = nn.Parameter(torch.ones(1, dim, 1, 1))

        def forward(self, x):
            eps = 1e-5 if x.dtype == torch.float32 else 1e-3
            var = torch.var(x, dim=1, unbiased=False, keepdim=True)
            return (x - torch.mean(x, dim=1, keepdim=True)) * (var + eps).rsqrt() * self.g

    class Waves(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.half = dim // 2

        def forward(self, t):
            rates = torch.exp(torch.arange(self.half, device=t.device) * -(math.log(10000) / (self.half - 1)))
            angles = t[:, None] * rates[None, :]
            return torch.cat((angles.sin(), angles.cos()), dim=-1)

    class Block(nn.Module):
        def __init__(self, a, b, groups):
            super().__init__()
            self.proj, self.norm, self.act = StandardConv(a, b, 3, padding=1), nn.GroupNorm(groups, b), nn.SiLU()

        def forward(self, x, scale_shift=None):
            x = self.norm(self.proj(x))
            if scale_shift is not None:
                scale, shift = scale_shift
                x = x * (scale + 1) + shift
            return self.act(x)

    class ResBlock(nn.Module):
        def __init__(self, a, b, time, groups=8):
            super().__init__()
            self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time, 2 * b))
            self.block1, self.block2 = Block(a, b, groups), Block(b, b, groups)
            self.res_conv = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

        def forward(self, x, t):
            h = self.block1(x, scale_shift=self.mlp(t)[:, :, None, None].chunk(2, dim=1))
            return self.block2(h) + self.res_conv(x)

    class Heads(nn.Module):
        def __init__(self, dim, heads=2, size=8):
            super().__init__()
            self.heads, self.scale, hidden = heads, size**-0.5, heads * size
            self.norm = ChannelNorm(dim)
            self.to_qkv = nn.Conv2d(dim, 3 * hidden, 1, bias=False)
            self.to_out = self.out(hidden, dim)

        def forward(self, x):
            b, _, h, w = x.shape
            qkv = self.to_qkv(self.norm(x)).chunk(3, dim=1)
            out = self.mix(*(t.reshape(b, self.heads, -1, h * w) for t in qkv))
            return self.to_out(out.reshape(b, -1, h, w))

    class Linearly(Heads):
        def out(self, hidden, dim):
            return nn.Sequential(nn.Conv2d(hidden, dim, 1), ChannelNorm(dim))

        def mix(self, q, k, v):
            q, k = q.softmax(dim=-2) * self.scale, k.softmax(dim=-1)
            context = torch.einsum("bhdn,bhen->bhde", k, v / v.shape[-1])
            return torch.einsum("bhde,bhdn->bhen", context, q)

    class Fully(Heads):
        def out(self, hidden, dim):
            return nn.Conv2d(hidden, dim, 1)

        def mix(self, q, k, v):
            weights = einsum("bhdi,bhdj->bhij", q * self.scale, k).softmax(dim=-1)
            return einsum("bhij,bhdj->bhid", weights, v).transpose(2, 3)

    class Unet(nn.Module):
        def __init__(self, dim=8, multiples=(1, 2), channels=1):
            super().__init__()
            self.init_conv = nn.Conv2d(channels, dim, 7, padding=3)
            time = 4 * dim
            self.time_mlp = nn.Sequential(Waves(dim), nn.Linear(dim, time), nn.GELU(), nn.Linear(time, time))
            block = partial(ResBlock, time=time)
            steps = list(pairwise([dim, *(dim * m for m in multiples)]))
            self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
            for k, (a, b) in enumerate(steps):
                last = k == len(steps) - 1
                change = nn.Conv2d(a, b, 3, padding=1) if last else nn.Conv2d(a, b, 4, 2, 1)
                self.downs.append(nn.ModuleList([block(a, a), block(a, a), Add(Linearly(a)), change]))
            self.mid_block1, self.mid_attn, self.mid_block2 = block(b, b), Add(Fully(b)), block(b, b)
            for k, (a, b) in enumerate(reversed(steps)):
                change = nn.Conv2d(b, a, 3, padding=1)
                if k < len(steps) - 1:
                    change = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), change)
                self.ups.append(nn.ModuleList([block(a + b, b), block(a + b, b), Add(Linearly(b)), change]))
            self.final_res_block, self.final_conv = block(2 * dim, dim), nn.Conv2d(dim, channels, 1)

        def forward(self, x, time):
            x = self.init_conv(x)
            start, t, kept = x.clone(), self.time_mlp(time), []
            for block1, block2, attn, change in self.downs:
                x = block1(x, t)
                kept.append(x)
                x = attn(block2(x, t))
                kept.append(x)
                x = change(x)
            x = self.mid_block2(self.mid_attn(self.mid_block1(x, t)), t)
            for block1, block2, attn, change in self.ups:
                x = block1(torch.cat((x, kept.pop()), dim=1), t)
                x = block2(torch.cat((x, kept.pop()), dim=1), t)
                x = change(attn(x))
            return self.final_conv(self.final_res_block(torch.cat((x, start), dim=1), t))

    def extract(values, t, shape):
        return values.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))

    def cosine_betas(steps, s=0.008):
        x = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        left = torch.cos((x + s) / (1 + s) * math.pi / 2) ** 2
        return torch.clip(1 - left[1:] / left[:-1], 0, 0.999)

    class Diffusion(nn.Module):
        def __init__(self, model, side, steps=1000, gamma=0.0, k=1):
            super().__init__()
            self.model, self.side, self.steps = model, side, steps
            betas = cosine_betas(steps)
            left = torch.cumprod(1 - betas, dim=0)

            def keep(name, values):
                self.register_buffer(name, values.to(torch.float32))

            keep("betas", betas)
            keep("signal", torch.sqrt(left))
            keep("spread", torch.sqrt(1 - left))
            keep("loss_weight", (k + left / (1 - left)) ** -gamma)

        def losses(self, start, t, noise=None):
            noise = torch.randn_like(start) if noise is None else noise
            x = extract(self.signal, t, start.shape) * start + extract(self.spread, t, start.shape) * noise
            loss = F.l1_loss(self.model(x, t), noise, reduction="none").flatten(1).mean(1)
            return (loss * extract(self.loss_weight, t, loss.shape)).mean()

        def forward(self, images):
            b, _, h, w = images.shape
            assert h == w == self.side
            t = torch.randint(0, self.steps, (b,), device=images.device).long()
            return self.losses(images * 2 - 1, t)

    class Train(pl.LightningModule):
        def __init__(self, decay=0.995, every=10):
            super().__init__()
            self.save_hyperparameters()
            self.diffusion = Diffusion(Unet(), side=16)
            self.ema = copy.deepcopy(self.diffusion).requires_grad_(False)

        def training_step(self, batch, batch_idx):
            loss = self.diffusion(batch)
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.global_step % self.hparams.every == 0:
                new = 1 - self.hparams.decay if self.global_step > 100 else 1.0
                with torch.no_grad():
                    for mean, p in zip(self.ema.parameters(), self.diffusion.parameters(), strict=True):
                        mean.lerp_(p, new)

        def configure_optimizers(self):
            return Adam(self.diffusion.parameters(), lr=1e-4, betas=(0.9, 0.99))

    class Alone(Images):
        def __getitem__(self, i):
            return self.x[i]

    return Train(), Alone(1, 16), {}


def deit(mixup):
    class DropPath(nn.Module):
        def __init__(self, rate):
            super().__init__()
            self.rate = rate

        def forward(self, x):
            if self.rate == 0.0 or not self.training:
                return x
            kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
            kept.div_(1 - self.rate)
            return x * kept

    class Attention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads, self.scale = heads, (dim // heads) ** -0.5
            self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

        def forward(self, x):
            b, n, c = x.shape
            qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv[0], qkv[1], qkv[2]
            weights = self.attn_drop(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1))
            return self.proj_drop(self.proj((weights @ v).transpose(1, 2).reshape(b, n, c)))

    class Block(nn.Module):
        def __init__(self, dim, heads, rate):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
            self.attn = Attention(dim, heads)
            self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            self.drop_path = DropPath(rate) if rate > 0.0 else nn.Identity()

        def forward(self, x):
            x = x + self.drop_path(self.attn(self.norm1(x)))
            return x + self.drop_path(self.mlp(self.norm2(x)))

    class Student(nn.Module):
        def __init__(self, side=32, p=8, dim=48, depth=3, heads=3, classes=10, rate=0.1):
            super().__init__()
            self.patch_embed = nn.Conv2d(3, dim, kernel_size=p, stride=p)
            self.cls_token, self.dist_token = (nn.Parameter(torch.zeros(1, 1, dim)) for _ in range(2))
            self.pos_embed = nn.Parameter(torch.zeros(1, (side // p) ** 2 + 2, dim))
            self.pos_drop = nn.Dropout(0.0)
            rates = torch.linspace(0, rate, depth).tolist()
            self.blocks = nn.ModuleList(Block(dim, heads, r) for r in rates)
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.head, self.head_dist = nn.Linear(dim, classes), nn.Linear(dim, classes)
            for token in (self.cls_token, self.dist_token, self.pos_embed):
                nn.init.trunc_normal_(token, std=0.02)
            self.apply(self.initialize)

        def initialize(self, m):
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)
                nn.init.constant_(m.bias, 0)

        def features(self, x):
            b = x.shape[0]
            x = self.patch_embed(x).flatten(2).transpose(1, 2)
            tokens = self.cls_token.expand(b, -1, -1), self.dist_token.expand(b, -1, -1)
            x = self.pos_drop(torch.cat((*tokens, x), dim=1) + self.pos_embed)
            for block in self.blocks:
                x = block(x)
            x = self.norm(x)
            return x[:, 0], x[:, 1]

        def forward(self, x):
            x, distilled = self.features(x)
            x, distilled = self.head(x), self.head_dist(distilled)
            if self.training:
                return x, distilled
            return (x + distilled) / 2

    class SoftTargets(nn.Module):
        def forward(self, scores, target):
            return torch.sum(-target * F.log_softmax(scores, dim=-1), dim=-1).mean()

    class Smoothed(nn.Module):
        def __init__(self, smoothing=0.1):
            super().__init__()
            self.smoothing = smoothing

        def forward(self, scores, target):
            logs = F.log_softmax(scores, dim=-1)
            nll = -logs.gather(dim=-1, index=target.unsqueeze(1)).squeeze(1)
            return ((1 - self.smoothing) * nll - self.smoothing * logs.mean(dim=-1)).mean()

    class Distillation(nn.Module):
        def __init__(self, base, teacher, kind, alpha, tau):
            super().__init__()
            self.base, self.teacher, self.kind, self.alpha, self.tau = base, teacher, kind, alpha, tau

        def forward(self, inputs, outputs, labels):
            distilled = None
            if not isinstance(outputs, torch.Tensor):
                outputs, distilled = outputs
            base = self.base(outputs, labels)
            if self.kind == "none":
                return base
            if distilled is None:
                raise ValueError("The student has no head for its teacher.")
            with torch.no_grad():
                taught = self.teacher(inputs)
            if self.kind == "soft":
                logs = [F.log_softmax(scores / self.tau, dim=1) for scores in (distilled, taught)]
                second = F.kl_div(*logs, reduction="sum", log_target=True) * self.tau**2 / distilled.numel()
            elif self.kind == "hard":
                second = F.cross_entropy(distilled, taught.argmax(dim=1))
            return base * (1 - self.alpha) + second * self.alpha

    def soft(target, smoothing=0.1, classes=10):
        off = smoothing / classes
        return torch.full((target.size()[0], classes), off).scatter_(1, target.view(-1, 1), 1 - smoothing + off)

    def mix(x, target):
        assert len(x) % 2 == 0, "timm wants an even number of records."
        if np.random.rand() < 0.5:
            h, w = x.shape[-2:]
            ratio = np.sqrt(1 - np.random.beta(1.0, 1.0))
            y0, x0 = np.random.randint(0, h), np.random.randint(0, w)
            top, bottom = np.clip((y0 - int(h * ratio) // 2, y0 + int(h * ratio) // 2), 0, h).tolist()
            left, right = np.clip((x0 - int(w * ratio) // 2, x0 + int(w * ratio) // 2), 0, w).tolist()
            x[:, :, top:bottom, left:right] = x.flip(0)[:, :, top:bottom, left:right]
            lam = 1 - (bottom - top) * (right - left) / (h * w)
        else:
            lam = float(np.random.beta(0.8, 0.8))
            others = x.flip(0).mul_(1 - lam)
            x.mul_(lam).add_(others)
        return x, soft(target) * lam + soft(target.flip(0)) * (1 - lam)

    class Deit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Student()
            teacher = ResNet18().eval()  # not trained: in no group below, though its requires_grad stays
            self.criterion = Distillation(SoftTargets() if mixup else Smoothed(), teacher, "hard", alpha=0.5, tau=1.0)

        def training_step(self, batch, batch_idx):
            samples, targets = batch
            if mixup:
                samples, targets = mix(samples, targets)
            loss = self.criterion(samples, self.model(samples), targets)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            decay, no_decay = [], []
            for name, p in self.model.named_parameters():
                plain = p.ndim == 1 or name.endswith(".bias") or name in ("cls_token", "dist_token", "pos_embed")
                (no_decay if plain else decay).append(p)
            groups = [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.05}]
            optimizer = AdamW(groups, lr=5e-4, eps=1e-8)
            return [optimizer], [CosineAnnealingLR(optimizer, T_max=300, eta_min=1e-5)]

    return Deit(), Images(3, 32), {}


case("DeiT distillation", "facebookresearch/deit")(partial(deit, mixup=False))
case("DeiT distillation with Mixup", "facebookresearch/deit")(partial(deit, mixup=True))


@case("FT-Transformer", "yandex-research/rtdl rtdl/modules.py")
def _():
    def uniform(*shape):
        bound = 1 / math.sqrt(shape[-1])
        return nn.Parameter(nn.init.uniform_(torch.empty(*shape), a=-bound, b=bound))

    class Numbers(nn.Module):
        def __init__(self, count, d):
            super().__init__()
            self.weight, self.bias = uniform(count, d), uniform(count, d)

        def forward(self, x):
            return self.weight[None] * x[..., None] + self.bias[None]

    class Categories(nn.Module):
        def __init__(self, sizes, d):
            super().__init__()
            self.register_buffer("offsets", torch.tensor([0, *sizes[:-1]]).cumsum(0), persistent=False)
            self.embeddings = nn.Embedding(sum(sizes), d)
            self.embeddings.weight = uniform(sum(sizes), d)
            self.bias = uniform(len(sizes), d)

        def forward(self, x):
            return self.embeddings(x + self.offsets[None]) + self.bias[None]

    class Tokens(nn.Module):
        def __init__(self, count, sizes, d):
            super().__init__()
            self.num_tokenizer = Numbers(count, d) if count else None
            self.cat_tokenizer = Categories(sizes, d) if sizes else None

        def forward(self, numbers, categories):
            pairs = (self.num_tokenizer, numbers), (self.cat_tokenizer, categories)
            tokens = [tokenizer(x) for tokenizer, x in pairs if tokenizer is not None]
            return tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1)

    class Last(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.weight = uniform(d)

        def forward(self, x):
            return torch.cat([x, self.weight.view(1, -1).expand(len(x), 1, -1)], dim=1)

    class ReGlu(nn.Module):
        def forward(self, x):
            a, b = x.chunk(2, dim=-1)
            return a * F.relu(b)

    class Attention(nn.Module):
        def __init__(self, d, heads, dropout):
            super().__init__()
            self.W_q, self.W_k, self.W_v, self.W_out = (nn.Linear(d, d) for _ in range(4))
            self.heads, self.dropout = heads, nn.Dropout(dropout) if dropout else None
            for layer in (self.W_q, self.W_k, self.W_v, self.W_out):
                nn.init.zeros_(layer.bias)

        def apart(self, x):
            b, n, d = x.shape
            x = x.reshape(b, n, self.heads, d // self.heads).transpose(1, 2)
            return x.reshape(b * self.heads, n, d // self.heads)  # records and heads in one dimension

        def forward(self, asked, x):
            q, k, v = self.W_q(asked), self.W_k(x), self.W_v(x)
            b, n, d = q.shape
            logits = self.apart(q) @ self.apart(k).transpose(1, 2) / math.sqrt(d // self.heads)
            weights = F.softmax(logits, dim=-1)
            if self.dropout is not None:
                weights = self.dropout(weights)
            out = (weights @ self.apart(v)).reshape(b, self.heads, n, d // self.heads)
            return self.W_out(out.transpose(1, 2).reshape(b, n, d)), {"logits": logits, "weights": weights}

    class Transformer(nn.Module):
        def __init__(self, d, depth, heads, drop_attention, hidden, drop_ffn, last_query, outputs):
            super().__init__()
            self.last_query = last_query
            self.blocks = nn.ModuleList()
            for k in range(depth):
                wide, narrow = nn.Linear(d, 2 * hidden), nn.Linear(hidden, d)
                layer = nn.ModuleDict(
                    {
                        "attention": Attention(d, heads, drop_attention),
                        "ffn": nn.Sequential(wide, ReGlu(), nn.Dropout(drop_ffn), narrow),
                        "attention_residual_dropout": nn.Dropout(0.0),
                        "ffn_residual_dropout": nn.Dropout(0.0),
                        "ffn_normalization": nn.LayerNorm(d),
                    }
                )
                if k:
                    layer["attention_normalization"] = nn.LayerNorm(d)
                self.blocks.append(layer)
            self.head_normalization = nn.LayerNorm(d)
            self.head = nn.Sequential(nn.ReLU(), nn.Linear(d, outputs))

        def normal(self, layer, stage, x):
            key = f"{stage}_normalization"
            return layer[key](x) if key in layer else x

        def forward(self, x):
            assert x.ndim == 3
            for k, layer in enumerate(self.blocks):
                h = self.normal(layer, "attention", x)
                last = self.last_query is not None and k == len(self.blocks) - 1
                h, _ = layer["attention"](h[:, self.last_query] if last else h, h)
                if last:
                    x = x[:, self.last_query]
                x = x + layer["attention_residual_dropout"](h)
                h = layer["ffn"](self.normal(layer, "ffn", x))
                x = x + layer["ffn_residual_dropout"](h)
            return self.head(self.head_normalization(x[:, -1]))

    class FtTransformer(pl.LightningModule):
        def __init__(self, count, sizes, d=32, depth=3):
            super().__init__()
            self.feature_tokenizer, self.cls_token = Tokens(count, sizes, d), Last(d)
            self.transformer = Transformer(d, depth, 8, 0.2, d * 4 // 3, 0.1, [-1], 1)

        def forward(self, numbers, categories):
            return self.transformer(self.cls_token(self.feature_tokenizer(numbers, categories)))

        def training_step(self, batch, batch_idx):
            numbers, categories, y = batch
            loss = F.mse_loss(self(numbers, categories).squeeze(1), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            free = ("feature_tokenizer", "normalization", ".bias")
            groups = {True: [], False: []}
            for name, p in self.named_parameters():
                groups[any(part in name for part in free)].append(p)
            groups = [{"params": groups[False]}, {"params": groups[True], "weight_decay": 0.0}]
            return AdamW(groups, lr=1e-4, weight_decay=1e-5)

    return FtTransformer(8, [3, 10, 5]), Table(8, [3, 10, 5], classes=0), {}


@case("TabTransformer", "lucidrains/tab-transformer-pytorch")
def _():
    class Add(nn.Module):
        def __init__(self, dim, fn):
            super().__init__()
            self.norm, self.fn = nn.LayerNorm(dim), fn

        def forward(self, x, **kwargs):
            return self.fn(self.norm(x), **kwargs) + x

    class GeGlu(nn.Module):
        def forward(self, x):
            x, gates = x.chunk(2, dim=-1)
            return x * F.gelu(gates)

    class Attention(nn.Module):
        def __init__(self, dim, heads, size, dropout):
            super().__init__()
            self.heads, self.scale = heads, size**-0.5
            self.to_qkv, self.to_out = nn.Linear(dim, 3 * heads * size, bias=False), nn.Linear(heads * size, dim)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x):
            b, n, _ = x.shape
            q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
            weights = (einsum("bhid,bhjd->bhij", q, k) * self.scale).softmax(dim=-1)
            out = einsum("bhij,bhjd->bhid", self.dropout(weights), v)
            return self.to_out(out.transpose(1, 2).reshape(b, n, -1))

    class Transformer(nn.Module):
        def __init__(self, tokens, dim, depth, heads, size, dropout):
            super().__init__()
            self.embeds = nn.Embedding(tokens, dim)
            self.layers = nn.ModuleList()
            for _ in range(depth):
                wide, narrow = nn.Linear(dim, 8 * dim), nn.Linear(4 * dim, dim)
                ff = nn.Sequential(wide, GeGlu(), nn.Dropout(dropout), narrow)
                self.layers.append(nn.ModuleList([Add(dim, Attention(dim, heads, size, dropout)), Add(dim, ff)]))

        def forward(self, x):
            x = self.embeds(x)
            for attn, ff in self.layers:
                x = ff(attn(x))
            return x

    class TabTransformer(nn.Module):
        def __init__(self, sizes, numbers, dim, depth, heads, size, act, mean_std=None, special=2, dropout=0.1):
            super().__init__()
            self.sizes, self.numbers = sizes, numbers
            offsets = F.pad(torch.tensor(list(sizes)), (1, 0), value=special).cumsum(dim=-1)[:-1]
            self.register_buffer("offsets", offsets)
            self.register_buffer("mean_std", mean_std)
            self.norm = nn.LayerNorm(numbers)
            self.transformer = Transformer(sum(sizes) + special, dim, depth, heads, size, dropout)
            width = dim * len(sizes) + numbers
            widths = [width, width // 8 * 4, width // 8 * 2, 1]
            layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), act)]  # one act, used twice
            self.mlp = nn.Sequential(*layers[:-1])

        def forward(self, categories, numbers):
            assert categories.shape[-1] == len(self.sizes) and numbers.shape[1] == self.numbers
            categories += self.offsets
            x = self.transformer(categories).flatten(1)
            if self.mean_std is not None:
                mean, std = self.mean_std.unbind(dim=-1)
                numbers = (numbers - mean) / std
            return self.mlp(torch.cat((x, self.norm(numbers)), dim=-1))

    sizes = (10, 5, 6, 5, 8)

    class Clicks(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = TabTransformer(sizes, 10, 16, 3, 4, 8, nn.ReLU(), mean_std=torch.rand(10, 2) + 0.5)

        def training_step(self, batch, batch_idx):
            numbers, categories, y = batch
            loss = F.binary_cross_entropy_with_logits(self.model(categories, numbers).squeeze(-1), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=1e-3)

    return Clicks(), Table(10, sizes), {}


@case("DeepFM", "shenweichen/DeepCTR-Torch deepctr_torch/models/deepfm.py")
def _():
    sparse = {f"C{k}": size for k, size in enumerate((10, 20, 50, 100, 30, 5))}
    dense = [f"I{k}" for k in range(4)]
    place = {name: slice(k, k + 1) for k, name in enumerate([*sparse, *dense])}  # of each feature in a row

    def tables(width, std=1e-4):
        found = nn.ModuleDict({name: nn.Embedding(size, width) for name, size in sparse.items()})
        for table in found.values():
            nn.init.normal_(table.weight, mean=0, std=std)
        return found

    def look_up(x, found):
        return [found[name](x[:, place[name]].long()) for name in sparse], [x[:, place[name]] for name in dense]

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding_dict = tables(1)
            self.weight = nn.Parameter(nn.init.normal_(torch.empty(len(dense), 1), mean=0, std=1e-4))

        def forward(self, x):
            embedded, numbers = look_up(x, self.embedding_dict)
            logit = torch.zeros([x.shape[0], 1])
            logit += torch.sum(torch.cat(embedded, dim=-1), dim=-1)
            logit += torch.cat(numbers, dim=-1).matmul(self.weight)
            return logit

    class Dnn(nn.Module):
        def __init__(self, widths, dropout=0.0, bn=False):
            super().__init__()
            self.dropout = nn.Dropout(dropout)
            self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
            self.bn = nn.ModuleList(nn.BatchNorm1d(b) for b in widths[1:]) if bn else None
            self.activations = nn.ModuleList(nn.ReLU(inplace=True) for _ in widths[1:])
            for linear in self.linears:
                nn.init.normal_(linear.weight, mean=0, std=1e-4)

        def forward(self, x):
            for k in range(len(self.linears)):
                x = self.linears[k](x)
                if self.bn is not None:
                    x = self.bn[k](x)
                x = self.dropout(self.activations[k](x))
            return x

    class Fm(nn.Module):
        def forward(self, x):
            of_sum = torch.pow(torch.sum(x, dim=1, keepdim=True), 2)
            of_each = torch.sum(x * x, dim=1, keepdim=True)
            return 0.5 * torch.sum(of_sum - of_each, dim=2)

    class Predict(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros((1,)))

        def forward(self, logit):
            logit += self.bias
            return torch.sigmoid(logit)

    class DeepFm(pl.LightningModule):
        def __init__(self, width=8, hidden=(256, 128), l2_linear=1e-5, l2_embedding=1e-5, l2_dnn=0.0):
            super().__init__()
            self.embedding_dict, self.linear_model = tables(width), Linear()
            self.fm, self.out = Fm(), Predict()
            self.dnn = Dnn([width * len(sparse) + len(dense), *hidden])
            self.dnn_linear = nn.Linear(hidden[-1], 1, bias=False)
            self.aux_loss = torch.zeros((1,))
            self.regularized = [
                (list(self.embedding_dict.parameters()), l2_embedding),
                (list(self.linear_model.parameters()), l2_linear),
                ([linear.weight for linear in self.dnn.linears], l2_dnn),
                ([self.dnn_linear.weight], l2_dnn),
            ]

        def regularization(self):
            total = torch.zeros((1,))
            for parameters, l2 in self.regularized:
                for p in parameters:
                    if l2 > 0:
                        total += torch.sum(l2 * torch.square(p))
            return total

        def forward(self, x):
            embedded, numbers = look_up(x, self.embedding_dict)
            logit = self.linear_model(x)
            logit += self.fm(torch.cat(embedded, dim=1))
            flat = [torch.flatten(torch.cat(part, dim=-1), start_dim=1) for part in (embedded, numbers)]
            logit += self.dnn_linear(self.dnn(torch.cat(flat, dim=-1)))
            return self.out(logit)

        def training_step(self, batch, batch_idx):
            x, y = batch[0].float(), batch[1].float()
            guess = self(x).squeeze()
            loss = F.binary_cross_entropy(guess, y.squeeze(), reduction="sum")
            loss = loss + self.regularization() + self.aux_loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return Adagrad(self.parameters())

    class Criteo(Table):
        def __getitem__(self, i):
            return torch.cat([self.categories[i].double(), self.numbers[i].double()]), self.y[i : i + 1].double()

    return DeepFm(), Criteo(len(dense), list(sparse.values())), {}


@case("DLRM", "facebookresearch/dlrm dlrm_s_pytorch.py")
def _():
    sizes, width = [10, 20, 50, 100, 30, 5, 200, 40], 16

    def drawn(values):
        return torch.tensor(values.astype(np.float32), requires_grad=True)

    def mlp(widths, sigmoid=-1):
        layers = nn.ModuleList()
        for k, (n, m) in enumerate(pairwise(widths)):
            layer = nn.Linear(n, m, bias=True)
            layer.weight.data = drawn(np.random.normal(0.0, np.sqrt(2 / (m + n)), size=(m, n)))
            layer.bias.data = drawn(np.random.normal(0.0, np.sqrt(1 / m), size=m))
            layers.append(layer)
            layers.append(nn.Sigmoid() if k == sigmoid else nn.ReLU())
        return nn.Sequential(*layers)

    def bag(n):
        table = nn.EmbeddingBag(n, width, mode="sum", sparse=True)
        table.weight.data = drawn(np.random.uniform(-np.sqrt(1 / n), np.sqrt(1 / n), size=(n, width)))
        return table

    class Dlrm(pl.LightningModule):
        def __init__(self, bottom, top, itself=False, threshold=0.0):
            super().__init__()
            self.itself, self.threshold = itself, threshold
            self.emb_l = nn.ModuleList(bag(n) for n in sizes)
            self.bot_l, self.top_l = mlp(bottom), mlp(top, sigmoid=len(top) - 2)
            self.loss_fn = nn.BCELoss(reduction="mean")

        def embed(self, offsets, indices):
            found = []
            for k, of_feature in enumerate(indices):
                found.append(self.emb_l[k](of_feature, offsets[k]))
            return found

        def interact(self, x, embedded):
            count, d = x.shape
            t = torch.cat([x, *embedded], dim=1).view((count, -1, d))
            products = torch.bmm(t, torch.transpose(t, 1, 2))
            _, n, _ = products.shape
            extra = 1 if self.itself else 0
            rows = torch.tensor([i for i in range(n) for _ in range(i + extra)])
            columns = torch.tensor([j for i in range(n) for j in range(i + extra)])
            return torch.cat([x, products[:, rows, columns]], dim=1)

        def forward(self, x, offsets, indices):
            x = self.bot_l(x)
            p = self.top_l(self.interact(x, self.embed(offsets, indices)))
            if 0.0 < self.threshold < 1.0:
                p = torch.clamp(p, min=self.threshold, max=1 - self.threshold)
            return p

        def training_step(self, batch, batch_idx):
            x, offsets, indices, y = batch
            loss = self.loss_fn(self(x, offsets, indices), y)
            self.log("loss", loss, batch_size=len(y))
            return loss

        def configure_optimizers(self):
            return SGD(self.parameters(), lr=0.1)

    def collate(rows):
        """Offsets and indices have the features first and the records second, as there."""
        numbers, categories, y = zip(*rows, strict=True)
        categories = torch.stack(categories)
        count, features = categories.shape
        offsets = torch.stack([torch.tensor(range(count)) for _ in range(features)])
        indices = torch.stack([categories[:, k] for k in range(features)])
        return torch.log(torch.stack(numbers) + 1), offsets, indices, torch.stack(y).view(-1, 1)

    pairs = (len(sizes) + 1) * len(sizes) // 2
    data = Table(13, sizes)
    data.numbers = data.numbers.mul(5).abs().floor()
    return Dlrm([13, 128, 64, width], [width + pairs, 128, 64, 1]), data, {"collate_fn": collate}


@case("neural collaborative filtering", "guoyang9/NCF")
def _():
    users, items, negatives = 600, 800, 3

    class Ncf(nn.Module):
        def __init__(self, factors=32, depth=3, dropout=0.0, kind="NeuMF-end"):
            super().__init__()
            self.kind = kind
            wide = factors * 2 ** (depth - 1)
            self.user_gmf, self.item_gmf = nn.Embedding(users, factors), nn.Embedding(items, factors)
            self.user_mlp, self.item_mlp = nn.Embedding(users, wide), nn.Embedding(items, wide)
            layers = []
            for k in range(depth, 0, -1):
                layers += [nn.Dropout(p=dropout), nn.Linear(factors * 2**k, factors * 2 ** (k - 1)), nn.ReLU()]
            self.layers = nn.Sequential(*layers)
            self.predict = nn.Linear(factors if kind in ("MLP", "GMF") else 2 * factors, 1)
            for m in self.modules():
                if isinstance(m, nn.Embedding):
                    nn.init.normal_(m.weight, std=0.01)
                elif isinstance(m, nn.Linear):
                    nn.init.xavier_uniform_(m.weight)
                    m.bias.data.zero_()
            nn.init.kaiming_uniform_(self.predict.weight, a=1, nonlinearity="sigmoid")

        def forward(self, user, item):
            found = []
            if self.kind != "MLP":
                found.append(self.user_gmf(user) * self.item_gmf(item))
            if self.kind != "GMF":
                found.append(self.layers(torch.cat((self.user_mlp(user), self.item_mlp(item)), -1)))
            return self.predict(torch.cat(found, -1)).view(-1)

    class Ratings:
        def __init__(self):
            self.draw = np.random.RandomState(0)
            seen = self.draw.choice(users * items, N // (negatives + 1), replace=False)
            self.liked = [divmod(int(k), items) for k in seen]
            self.sample()

        def sample(self):
            """Draws other items that the users did not like."""
            liked, others = set(self.liked), []
            for user, _ in self.liked:
                for _ in range(negatives):
                    item = int(self.draw.randint(items))
                    while (user, item) in liked:
                        item = int(self.draw.randint(items))
                    others.append((user, item))
            self.pairs = self.liked + others

        def __len__(self):
            return (negatives + 1) * len(self.liked)

        def __getitem__(self, i):
            return *self.pairs[i], int(i < len(self.liked))

    class Recommend(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.loss_function = Ncf(), nn.BCEWithLogitsLoss()

        def on_train_epoch_start(self):
            self.trainer.train_dataloader.dataset.sample()

        def training_step(self, batch, batch_idx):
            user, item, label = batch
            loss = self.loss_function(self.model(user, item), label.float())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return Adam(self.model.parameters(), lr=0.001)

    return Recommend(), Ratings(), {}


@case("SIREN", "vsitzmann/siren")
def _():
    def below(params, name):
        start = name + "."
        return OrderedDict((key.removeprefix(start), p) for key, p in params.items() if key.startswith(start))

    class MetaLinear(nn.Linear):
        def forward(self, x, params=None):
            params = OrderedDict(self.named_parameters()) if params is None else params
            weight = params["weight"]
            out = x.matmul(weight.permute(*range(len(weight.shape) - 2), -1, -2))
            out += params["bias"].unsqueeze(-2)
            return out

    class MetaSequential(nn.Sequential):
        def forward(self, x, params=None):
            for name, module in self._modules.items():
                meta = isinstance(module, MetaLinear | MetaSequential)
                x = module(x, params=below(params, name)) if meta else module(x)
            return x

    class Sine(nn.Module):
        def forward(self, x):
            return torch.sin(30 * x)

    def spread(m, first=False):
        if isinstance(m, nn.Linear):
            inputs = m.weight.size(-1)
            bound = 1 / inputs if first else np.sqrt(6 / inputs) / 30
            with torch.no_grad():
                m.weight.uniform_(-bound, bound)

    class Block(nn.Module):
        def __init__(self, inputs, outputs, hidden, width):
            super().__init__()
            sine = Sine()
            layers = [MetaSequential(MetaLinear(inputs, width), sine)]
            layers += [MetaSequential(MetaLinear(width, width), sine) for _ in range(hidden)]
            self.net = MetaSequential(*layers, MetaSequential(MetaLinear(width, outputs)))
            self.net.apply(spread)
            self.net[0].apply(partial(spread, first=True))

        def forward(self, x, params=None):
            params = OrderedDict(self.named_parameters()) if params is None else params
            return self.net(x, params=below(params, "net"))

    class Field(nn.Module):
        def __init__(self, inputs=2, outputs=1, width=128, hidden=3):
            super().__init__()
            self.net = Block(inputs, outputs, hidden, width)

        def forward(self, model_input, params=None):
            params = OrderedDict(self.named_parameters()) if params is None else params
            coords = model_input["coords"].clone().detach().requires_grad_(True)
            return {"model_in": coords, "model_out": self.net(coords, below(params, "net"))}

    class Fit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Field()

        def losses(self, found, truth):
            return {"img_loss": ((found["model_out"] - truth["img"]) ** 2).mean()}

        def training_step(self, batch, batch_idx):
            model_input, truth = batch
            total = 0.0
            for name, loss in self.losses(self.model(model_input), truth).items():
                single = loss.mean()
                self.log(name, single)
                total += single
            self.log("total_train_loss", total)
            return total

        def configure_optimizers(self):
            return Adam(lr=1e-4, params=self.model.parameters())

    class Pixels:
        def __init__(self, height=16, width=32):
            g = torch.Generator().manual_seed(0)
            axes = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
            self.coords = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, 2)
            self.image = 2 * torch.rand(N, 1, generator=g) - 1

        def __len__(self):
            return N

        def __getitem__(self, i):
            return {"idx": i, "coords": self.coords[i]}, {"img": self.image[i]}

    return Fit(), Pixels(), {}


@case("KAN", "Blealtan/efficient-kan")
def _():
    class KanLinear(nn.Module):
        def __init__(self, inputs, outputs, cells=5, order=3, noise=0.1, low=-1, high=1):
            super().__init__()
            self.inputs, self.outputs, self.cells, self.order = inputs, outputs, cells, order
            knots = torch.arange(-order, cells + order + 1) * ((high - low) / cells) + low
            self.register_buffer("grid", knots.expand(inputs, -1).contiguous())
            self.base_weight = nn.Parameter(torch.empty(outputs, inputs))
            self.spline_weight = nn.Parameter(torch.empty(outputs, inputs, cells + order))
            self.spline_scaler = nn.Parameter(torch.empty(outputs, inputs))
            self.base_activation = nn.SiLU()
            nn.init.kaiming_uniform_(self.base_weight, a=math.sqrt(5))
            nn.init.kaiming_uniform_(self.spline_scaler, a=math.sqrt(5))
            with torch.no_grad():
                values = (torch.rand(cells + 1, inputs, outputs) - 0.5) * noise / cells
                self.spline_weight.data.copy_(self.fit(self.grid.T[order:-order], values))

        def bases(self, x):
            assert x.dim() == 2 and x.size(1) == self.inputs
            grid, x = self.grid, x.unsqueeze(-1)
            found = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
            for k in range(1, self.order + 1):
                rise = (x - grid[:, : -k - 1]) / (grid[:, k:-1] - grid[:, : -k - 1])
                fall = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k])
                found = rise * found[:, :, :-1] + fall * found[:, :, 1:]
            assert found.size() == (x.size(0), self.inputs, self.cells + self.order)
            return found.contiguous()

        def fit(self, x, values):
            solution = torch.linalg.lstsq(self.bases(x).transpose(0, 1), values.transpose(0, 1)).solution
            return solution.permute(2, 0, 1).contiguous()

        @property
        def scaled(self):
            return self.spline_weight * self.spline_scaler.unsqueeze(-1)

        def forward(self, x):
            assert x.size(-1) == self.inputs
            shape = x.shape
            x = x.reshape(-1, self.inputs)
            base = F.linear(self.base_activation(x), self.base_weight)
            spline = F.linear(self.bases(x).view(x.size(0), -1), self.scaled.view(self.outputs, -1))
            return (base + spline).reshape(*shape[:-1], self.outputs)

    class Kan(nn.Module):
        def __init__(self, widths):
            super().__init__()
            self.layers = nn.ModuleList(KanLinear(a, b) for a, b in pairwise(widths))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    class Classify(pl.LightningModule):
        def __init__(self, side=14):
            super().__init__()
            self.pixels = side * side
            self.model, self.criterion = Kan([self.pixels, 32, 10]), nn.CrossEntropyLoss()

        def training_step(self, batch, batch_idx):
            images, labels = batch
            scores = self.model(images.view(-1, self.pixels))
            loss = self.criterion(scores, labels)
            self.log_dict({"loss": loss, "accuracy": (scores.argmax(dim=1) == labels).float().mean()})
            return loss

        def configure_optimizers(self):
            optimizer = AdamW(self.model.parameters(), lr=1e-3, weight_decay=1e-4)
            return [optimizer], [ExponentialLR(optimizer, gamma=0.8)]

    return Classify(), Images(1, 14, centred), {}


@case("NeRF", "yenchenlin/nerf-pytorch")
def _():
    class Embedder:
        def __init__(self, octaves):
            self.fns = [lambda x: x]
            for freq in 2.0 ** torch.linspace(0, octaves - 1, steps=octaves):
                self.fns += [lambda x, f=f, freq=freq: f(x * freq) for f in (torch.sin, torch.cos)]
            self.width = 3 * len(self.fns)

        def __call__(self, x):
            return torch.cat([f(x) for f in self.fns], -1)

    class Field(nn.Module):
        def __init__(self, of_point, of_view, depth=8, w=32, skips=(4,)):
            super().__init__()
            self.split, self.skips = [of_point, of_view], skips
            inner = [nn.Linear(w + of_point * (k in skips), w) for k in range(depth - 1)]
            self.pts_linears = nn.ModuleList([nn.Linear(of_point, w), *inner])
            self.views_linears = nn.ModuleList([nn.Linear(of_view + w, w // 2)])
            self.feature_linear, self.alpha_linear = nn.Linear(w, w), nn.Linear(w, 1)
            self.rgb_linear = nn.Linear(w // 2, 3)

        def forward(self, x):
            point, view = torch.split(x, self.split, dim=-1)
            h = point
            for k, layer in enumerate(self.pts_linears):
                h = F.relu(layer(h))
                if k in self.skips:
                    h = torch.cat([point, h], -1)
            alpha = self.alpha_linear(h)
            h = torch.cat([self.feature_linear(h), view], -1)
            for layer in self.views_linears:
                h = F.relu(layer(h))
            return torch.cat([self.rgb_linear(h), alpha], -1)

    def in_chunks(fn, x, size):
        return torch.cat([fn(x[k : k + size]) for k in range(0, x.shape[0], size)], 0)

    def composite(raw, depths, directions, noise_std=0.0):
        gaps = depths[..., 1:] - depths[..., :-1]
        gaps = torch.cat([gaps, torch.Tensor([1e10]).expand(gaps[..., :1].shape)], -1)
        gaps = gaps * torch.norm(directions[..., None, :], dim=-1)
        density = raw[..., 3]
        if noise_std > 0.0:
            density = density + torch.randn(density.shape) * noise_std
        alpha = 1 - torch.exp(-F.relu(density) * gaps)
        through = torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1)), 1 - alpha + 1e-10], -1), -1)
        weights = alpha * through[:, :-1]
        rgb = torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2)
        depth, total = torch.sum(weights * depths, -1), torch.sum(weights, -1)
        disparity = 1 / torch.max(1e-10 * torch.ones_like(depth), depth / total)
        return {"rgb": rgb, "disparity": disparity, "total": total}, weights

    def draw_from(edges, weights, count):
        weights = weights + 1e-5
        cdf = torch.cumsum(weights / torch.sum(weights, -1, keepdim=True), -1)
        cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
        u = torch.rand([*cdf.shape[:-1], count]).contiguous()
        place = torch.searchsorted(cdf, u, right=True)
        below = torch.max(torch.zeros_like(place), place - 1)
        above = torch.min((cdf.shape[-1] - 1) * torch.ones_like(place), place)
        around = torch.stack([below, above], -1)
        shape = [*around.shape[:2], cdf.shape[-1]]
        c, e = (torch.gather(values.unsqueeze(1).expand(shape), 2, around) for values in (cdf, edges))
        span = c[..., 1] - c[..., 0]
        span = torch.where(span < 1e-5, torch.ones_like(span), span)
        return e[..., 0] + (u - c[..., 0]) / span * (e[..., 1] - e[..., 0])

    class Nerf(pl.LightningModule):
        def __init__(self, coarse=16, fine=16, perturb=1.0, rate=5e-4, decay=250):
            super().__init__()
            self.save_hyperparameters()
            self.embed, self.embed_view = Embedder(6), Embedder(3)
            self.model, self.model_fine = (Field(self.embed.width, self.embed_view.width) for _ in range(2))

        def query(self, field, points, views, chunk=1024 * 64):
            flat = self.embed(torch.reshape(points, [-1, points.shape[-1]]))
            views = torch.reshape(views[:, None].expand(points.shape), [-1, points.shape[-1]])
            raw = in_chunks(field, torch.cat([flat, self.embed_view(views)], -1), chunk)
            return torch.reshape(raw, [*points.shape[:-1], raw.shape[-1]])

        def render_rays(self, rays):
            count = rays.shape[0]
            origins, directions, views = rays[:, 0:3], rays[:, 3:6], rays[:, -3:]
            bounds = torch.reshape(rays[..., 6:8], [-1, 1, 2])
            t = torch.linspace(0, 1, steps=self.hparams.coarse)
            depths = (bounds[..., 0] * (1 - t) + bounds[..., 1] * t).expand([count, self.hparams.coarse])
            if self.hparams.perturb > 0.0:
                middles = 0.5 * (depths[..., 1:] + depths[..., :-1])
                upper = torch.cat([middles, depths[..., -1:]], -1)
                lower = torch.cat([depths[..., :1], middles], -1)
                depths = lower + (upper - lower) * torch.rand(depths.shape)
            points = origins[..., None, :] + directions[..., None, :] * depths[..., :, None]
            first, weights = composite(self.query(self.model, points, views), depths, directions)

            middles = 0.5 * (depths[..., 1:] + depths[..., :-1])
            more = draw_from(middles, weights[..., 1:-1], self.hparams.fine).detach()
            depths, _ = torch.sort(torch.cat([depths, more], -1), -1)
            points = origins[..., None, :] + directions[..., None, :] * depths[..., :, None]
            found, _ = composite(self.query(self.model_fine, points, views), depths, directions)
            return found | {"rgb0": first["rgb"]}

        def render(self, origins, directions, near=2.0, far=6.0, chunk=1024 * 32):
            views = directions / torch.norm(directions, dim=-1, keepdim=True)
            ones = torch.ones_like(directions[..., :1])
            rays = torch.cat([origins, directions, near * ones, far * ones, views], -1)
            parts = [self.render_rays(rays[k : k + chunk]) for k in range(0, rays.shape[0], chunk)]
            return {key: torch.cat([part[key] for part in parts], 0) for key in parts[0]}

        def training_step(self, batch, batch_idx):
            origins, directions, target = torch.transpose(batch, 0, 1)
            found = self.render(origins, directions)
            fine = torch.mean((found["rgb"] - target) ** 2)
            loss = fine + torch.mean((found["rgb0"] - target) ** 2)
            psnr = -10.0 * torch.log(fine) / torch.log(torch.Tensor([10.0]))
            self.log_dict({"loss": loss, "psnr": psnr})
            return loss

        def configure_optimizers(self):
            parameters = list(self.model.parameters())
            parameters += list(self.model_fine.parameters())
            optimizer = Adam(params=parameters, lr=self.hparams.rate, betas=(0.9, 0.999))
            steps = self.hparams.decay * 1000
            scheduler = LambdaLR(optimizer, lambda step: 0.1 ** (step / steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Rays:
        def __init__(self):
            g = torch.Generator().manual_seed(0)
            self.rays = torch.cat([torch.randn(N, 2, 3, generator=g), torch.rand(N, 1, 3, generator=g)], 1)

        def __len__(self):
            return N

        def __getitem__(self, i):
            return self.rays[i]

    return Nerf(), Rays(), {}
