"""Images in pairs, made, restored or segmented."""

import copy
import math
import random
from itertools import pairwise

import numpy as np
import pytorch_lightning as pl
import torch
from classifiers import ResNet18
from ordinary import GROUP_NORM, case
from records import Records, images
from torch import nn
from torch.nn import functional as F
from torch.optim import Adadelta, Adam, RMSprop
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Subset


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        resnet = ResNet18()
        resnet.conv1 = nn.Conv2d(1, 8, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
        self.resnet = nn.Sequential(*list(resnet.children())[:-1])
        self.fc = nn.Sequential(nn.Linear(2 * resnet.fc.in_features, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
        self.sigmoid = nn.Sigmoid()
        self.fc.apply(self.initialize)

    def initialize(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def once(self, x):
        h = self.resnet(x)
        return h.view(h.size()[0], -1)

    def forward(self, first, second):
        return self.sigmoid(self.fc(torch.cat((self.once(first), self.once(second)), 1)))


@case("Siamese network", "pytorch/examples siamese_network", GROUP_NORM)
def _():
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

    of = images()

    def pair(i):
        """A record, and one that is of its class if i is even."""
        is_alike = (of.y == of.y[i]).numpy() == (i % 2 == 0)
        other = random.Random(i).choice(np.flatnonzero(is_alike).tolist())
        return of.x[i], of.x[other], torch.tensor(1.0 - i % 2)

    return Matcher(), Records(pair), {}


def generator(latent, widths=(16, 32, 64, 128)):
    layers = [nn.Linear(latent, widths[0]), nn.LeakyReLU(0.2, inplace=True)]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 784), nn.Tanh(), nn.Unflatten(1, (1, 28, 28)))


def discriminator():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Sigmoid())


class Gan(pl.LightningModule):
    def __init__(self, latent=100, lr=2e-4, betas=(0.5, 0.999)):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = generator(latent), discriminator()

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

        self.toggle_optimizer(for_g)
        self.update(for_g, F.binary_cross_entropy(self.discriminator(self.generator(z)), valid), "g_loss")

        self.toggle_optimizer(for_d)
        real_loss = F.binary_cross_entropy(self.discriminator(images), valid)
        fake = self.discriminator(self.generator(z).detach())
        self.update(for_d, (real_loss + F.binary_cross_entropy(fake, 0 * valid)) / 2, "d_loss")

    def configure_optimizers(self):
        options = {"lr": self.hparams.lr, "betas": self.hparams.betas}
        return [Adam(net.parameters(), **options) for net in (self.generator, self.discriminator)], []


@case("GAN, manual optimization", "Lightning-AI/tutorials lightning_examples/basic-gan", GROUP_NORM)
def _():

    return Gan(), images(), {}


def twice(a, b):
    layers = []
    for i, o in pairwise((a, b, b)):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Up(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(a, a // 2, kernel_size=2, stride=2), twice(a, b)

    def forward(self, low, skip):
        low = self.up(low)
        dy, dx = skip.size()[2] - low.size()[2], skip.size()[3] - low.size()[3]
        low = F.pad(low, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([skip, low], dim=1))


class UNet(nn.Module):
    def __init__(self, channels, classes, c=4):
        super().__init__()
        self.classes, self.first = classes, twice(channels, c)
        widths = [c, 2 * c, 4 * c, 8 * c, 16 * c]
        self.downs = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), twice(a, b)) for a, b in pairwise(widths))
        self.ups = nn.ModuleList(Up(a, b) for a, b in pairwise(widths[::-1]))
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


class Segment(pl.LightningModule):
    def __init__(self, model, validation):
        super().__init__()
        self.model, self.criterion, self.validation = model, nn.CrossEntropyLoss(), validation

    def training_step(self, batch, batch_idx):
        images, masks = batch["image"], batch["mask"]
        images = images.to(dtype=torch.float32, memory_format=torch.channels_last)
        masks = masks.to(dtype=torch.long)
        scores = self.model(images)
        loss = self.criterion(scores, masks)
        truth = F.one_hot(masks, self.model.classes).permute(0, 3, 1, 2).float()
        guess = F.softmax(scores, dim=1).float()
        loss += 1 - dice_coeff(guess.flatten(0, 1), truth.flatten(0, 1), whole_batch=True)
        self.log("train loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        masks = F.one_hot(batch["mask"].long(), 2).permute(0, 3, 1, 2).float()
        scores = self.model(batch["image"])
        guess = F.one_hot(scores.argmax(dim=1), 2).permute(0, 3, 1, 2).float()
        self.log("validation Dice", dice_coeff(guess[:, 1:], masks[:, 1:], whole_batch=False))

    def val_dataloader(self):
        return DataLoader(self.validation, 32)

    def configure_optimizers(self):
        optimizer = RMSprop(self.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
        scheduler = ReduceLROnPlateau(optimizer, "max", patience=5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "validation Dice"}}


@case("U-Net, Dice and cross entropy", "milesial/Pytorch-UNet", GROUP_NORM)
def _():

    masks = images(3, 32, lambda x, _: {"image": x, "mask": (x.mean(0) > 0.5).long()})
    return Segment(UNet(3, 2), Subset(masks, range(64))), masks, {}


class Waves(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.half = dim // 2

    def forward(self, t):
        rates = torch.exp(torch.arange(self.half, device=t.device) * -(math.log(10000) / (self.half - 1)))
        angles = t[:, None] * rates[None, :]
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self, a, b, time, groups=8):
        super().__init__()
        self.mlp, self.act = nn.Linear(time, 2 * b), nn.SiLU()
        self.conv1, self.norm1 = nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(groups, b)
        self.conv2, self.norm2 = nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(groups, b)
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x, t):
        scale, shift = self.mlp(self.act(t))[:, :, None, None].chunk(2, dim=1)
        h = self.act(self.norm1(self.conv1(x)) * (scale + 1) + shift)
        return self.act(self.norm2(self.conv2(h))) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, dim, heads=2, size=8):
        super().__init__()
        self.heads, self.scale = heads, size**-0.5
        self.to_qkv = nn.Conv2d(dim, 3 * heads * size, 1, bias=False)
        self.to_out = nn.Conv2d(heads * size, dim, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in self.to_qkv(x).chunk(3, dim=1))
        weights = torch.einsum("bhdi,bhdj->bhij", q * self.scale, k).softmax(dim=-1)
        out = torch.einsum("bhij,bhdj->bhdi", weights, v)
        return x + self.to_out(out.reshape(b, -1, h, w))


class Denoiser(nn.Module):
    def __init__(self, dim=8, time=32):
        super().__init__()
        self.time_mlp = nn.Sequential(Waves(dim), nn.Linear(dim, time), nn.GELU(), nn.Linear(time, time))
        self.first, self.last = nn.Conv2d(1, dim, 7, padding=3), nn.Conv2d(dim, 1, 1)
        self.down, self.attention, self.up = Block(dim, 2 * dim, time), Attention(2 * dim), Block(3 * dim, dim, time)

    def forward(self, x, time):
        t, kept = self.time_mlp(time), self.first(x)
        x = self.attention(self.down(kept, t))
        return self.last(self.up(torch.cat((x, kept), dim=1), t))


def extract(values, t, shape):
    return values.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))


def cosine_betas(steps, s=0.008):
    x = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    left = torch.cos((x + s) / (1 + s) * math.pi / 2) ** 2
    return torch.clip(1 - left[1:] / left[:-1], 0, 0.999)


class Diffusion(nn.Module):
    def __init__(self, model, steps=1000):
        super().__init__()
        self.model, self.steps = model, steps
        left = torch.cumprod(1 - cosine_betas(steps), dim=0)
        self.register_buffer("signal", torch.sqrt(left).float())
        self.register_buffer("spread", torch.sqrt(1 - left).float())

    def forward(self, images):
        start = images * 2 - 1
        t = torch.randint(0, self.steps, (len(start),), device=start.device).long()
        noise = torch.randn_like(start)
        x = extract(self.signal, t, start.shape) * start + extract(self.spread, t, start.shape) * noise
        return F.l1_loss(self.model(x, t), noise)


class Train(pl.LightningModule):
    def __init__(self, decay=0.995, every=10):
        super().__init__()
        self.save_hyperparameters()
        self.diffusion = Diffusion(Denoiser())
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


@case("DDPM", "lucidrains/denoising-diffusion-pytorch")
def _():

    return Train(), images(1, 16, lambda x, _: x), {}
