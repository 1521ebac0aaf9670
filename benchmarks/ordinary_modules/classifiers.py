"""Classifiers of images, and views that are told apart."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytorch_lightning as pl
import torch
from ordinary import GROUP_NORM, case
from records import centred, images
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adadelta, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Subset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy


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
        return DataLoader(Subset(images(), range(64)), 32)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is None:
            return {"optimizer": optimizer}
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        schedule = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@case("MNIST, hydra template", "ashleve/lightning-hydra-template src/models/mnist_module.py", GROUP_NORM)
def _():

    plateau = partial(ReduceLROnPlateau, mode="min", factor=0.1, patience=10)
    return Digits(Dense(), partial(Adam, lr=1e-3, weight_decay=0.0), plateau), images(), {}


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

    return Net(), images(), {}


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


def cropped(x, side):
    """A square of an image that has 8 pixels more."""
    top, left = torch.randint(0, 9, (2,)).tolist()
    return x[:, top : top + side, left : left + side]


@case("ResNet, CIFAR10", "kuangliu/pytorch-cifar", GROUP_NORM)
def _():
    class Cifar(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.criterion = ResNet18(), nn.CrossEntropyLoss()
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
        x = cropped(F.pad(x, (4, 4, 4, 4)), 32)
        return x.flip(-1) if torch.rand(()) < 0.5 else x

    return Cifar(), images(3, 32, lambda x, y: (augment(x), y)), {}


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


def patches(x, p):
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
    return x.flatten(1, 2).flatten(2, 4)


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


@case("Vision Transformer", "Lightning-AI/tutorials course_UvA-DL/11-vision-transformer")
def _():

    return Vit({"dim": 32, "dropout": 0.2}), images(3, 32), {}


@case("Mixup", "facebookresearch/deit", GROUP_NORM)
def _():
    def soft(target, smoothing=0.1, classes=10):
        off = smoothing / classes
        return torch.full((target.size()[0], classes), off).scatter_(1, target.view(-1, 1), 1 - smoothing + off)

    def mix(x, target):
        assert len(x) % 2 == 0, "timm wants an even number of records."
        lam = float(np.random.beta(0.8, 0.8))
        others = x.flip(0).mul_(1 - lam)
        x.mul_(lam).add_(others)
        return x, soft(target) * lam + soft(target.flip(0)) * (1 - lam)

    class Mixed(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = ResNet18()

        def training_step(self, batch, batch_idx):
            samples, targets = mix(*batch)
            loss = torch.sum(-targets * F.log_softmax(self.model(samples), dim=-1), dim=-1).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return AdamW(self.parameters(), lr=5e-4, eps=1e-8)

    return Mixed(), images(3, 32), {}


@case("SimCLR", "Lightning-AI/tutorials course_UvA-DL/13-contrastive-learning", GROUP_NORM)
def _():
    def augment(x):
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        x = F.interpolate(cropped(x, 24)[None], size=32, mode="bilinear")[0]
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
            rank = (similar > similar[partner][:, None]).sum(dim=-1)
            self.log_dict({"train_acc_top1": (rank == 0).float().mean(), "train_acc_mean_pos": 1 + rank.float().mean()})
            return loss

        def configure_optimizers(self):
            h = self.hparams
            optimizer = AdamW(self.parameters(), lr=h.lr, weight_decay=h.weight_decay)
            return [optimizer], [CosineAnnealingLR(optimizer, T_max=h.max_epochs, eta_min=h.lr / 50)]

    return Contrast(), images(3, 32, lambda x, y: ([augment(x) for _ in range(2)], y)), {}
