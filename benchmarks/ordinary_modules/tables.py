"""Rows of numbers and categories, points, fields and time series."""

import math
from itertools import pairwise

import pytorch_lightning as pl
import torch
from ordinary import GROUP_NORM, case
from records import Base, Rows, Table
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD


@case("category embedding, MLP", "manujosephv/pytorch_tabular", GROUP_NORM)
def _():
    sizes = (10, 20, 7, 30, 4)

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.cat_embedding_layers = nn.ModuleList([nn.Embedding(n, min(50, (n + 1) // 2)) for n in sizes])
            width = sum(min(50, (n + 1) // 2) for n in sizes) + 8
            self.normalizing_batch_norm = nn.BatchNorm1d(8)
            self.embd_dropout = nn.Dropout(0.1)
            self.backbone = nn.Sequential(
                nn.Linear(width, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU()
            )
            self.head = nn.Linear(32, 2)
            self.loss = nn.CrossEntropyLoss()

        def training_step(self, batch, batch_idx):
            x_num, x_cat, y = batch
            embed = torch.cat([layer(x_cat[:, i]) for i, layer in enumerate(self.cat_embedding_layers)], 1)
            x = torch.cat([self.embd_dropout(embed), self.normalizing_batch_norm(x_num)], 1)
            loss = self.loss(self.head(self.backbone(x)), y.long())
            self.log("train_loss", loss, on_epoch=True, prog_bar=True)
            return loss

    return Module(), Table(8, sizes), {}


SIZES, WIDTH = [10, 20, 50, 100, 30, 5, 200, 40], 16  # of DLRM's categories, and of their embeddings


def mlp(widths, last):
    layers = []
    for a, b in pairwise(widths):
        layer = nn.Linear(a, b)
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (a + b)))
        nn.init.normal_(layer.bias, std=math.sqrt(1 / b))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1], last)


class Dlrm(pl.LightningModule):
    def __init__(self):
        super().__init__()
        pairs = len(SIZES) * (len(SIZES) + 1) // 2
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, WIDTH, mode="sum", sparse=True) for n in SIZES)
        self.bot_l, self.top_l = mlp([13, 128, 64, WIDTH], nn.ReLU()), mlp([WIDTH + pairs, 128, 64, 1], nn.Sigmoid())
        self.loss_fn = nn.BCELoss(reduction="mean")

    def interact(self, x, embedded):
        count, d = x.shape
        t = torch.cat([x, *embedded], dim=1).view((count, -1, d))
        products = torch.bmm(t, torch.transpose(t, 1, 2))
        _, n, _ = products.shape
        rows = torch.tensor([i for i in range(n) for _ in range(i)])
        columns = torch.tensor([j for i in range(n) for j in range(i)])
        return torch.cat([x, products[:, rows, columns]], dim=1)

    def forward(self, x, offsets, indices):
        embedded = []
        for k, of_feature in enumerate(indices):
            embedded.append(self.emb_l[k](of_feature, offsets[k]))
        return self.top_l(self.interact(self.bot_l(x), embedded))

    def training_step(self, batch, batch_idx):
        x, offsets, indices, y = batch
        loss = self.loss_fn(self(x, offsets, indices), y)
        self.log("loss", loss, batch_size=len(y))
        return loss

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)


def features_first(rows):
    """Offsets and indices have the features first and the records second, as there."""
    numbers, categories, y = zip(*rows, strict=True)
    indices = torch.stack(categories).T
    offsets = torch.arange(len(rows)).expand(len(SIZES), -1)
    return torch.log(torch.stack(numbers).abs() + 1), offsets, indices, torch.stack(y).view(-1, 1)


@case("DLRM", "facebookresearch/dlrm dlrm_s_pytorch.py")
def _():
    return Dlrm(), Table(13, SIZES), {"collate_fn": features_first}


@case("PINN, Burgers", "rezaakb/pinns-torch")
def _():
    class Pinn(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

        def training_step(self, batch, batch_idx):
            x, _ = batch
            x.requires_grad_(True)
            u = self.net(x)
            du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            d2u = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)[0][:, :1]
            loss = ((du[:, 1:] + u * du[:, :1] - 0.01 * d2u) ** 2).mean()
            self.log("loss", loss)
            return loss

    return Pinn(), Rows(2), {}


@case("DLinear", "cure-lab/LTSF-Linear")
def _():
    class MovingAverage(nn.Module):
        def __init__(self, kernel_size):
            super().__init__()
            self.kernel_size, self.avg = kernel_size, nn.AvgPool1d(kernel_size=kernel_size, stride=1, padding=0)

        def forward(self, x):
            front = x[:, 0:1, :].repeat(1, (self.kernel_size - 1) // 2, 1)
            end = x[:, -1:, :].repeat(1, (self.kernel_size - 1) // 2, 1)
            return self.avg(torch.cat([front, x, end], dim=1).permute(0, 2, 1)).permute(0, 2, 1)

    class DLinear(Base):
        def __init__(self, seq_len=96, pred_len=24, channels=7):
            super().__init__()
            self.moving_avg, self.pred_len, self.seq_len = MovingAverage(25), pred_len, seq_len
            self.seasonal = nn.ModuleList([nn.Linear(seq_len, pred_len) for _ in range(channels)])
            self.trend = nn.ModuleList([nn.Linear(seq_len, pred_len) for _ in range(channels)])

        def predicted(self, layers, x):
            out = torch.zeros([x.size(0), len(layers), self.pred_len], dtype=x.dtype).to(x.device)
            for i, layer in enumerate(layers):
                out[:, i, :] = layer(x[:, i, :])
            return out

        def forward(self, x):
            trend = self.moving_avg(x)
            seasonal = (x - trend).permute(0, 2, 1)
            trend = trend.permute(0, 2, 1)
            return (self.predicted(self.seasonal, seasonal) + self.predicted(self.trend, trend)).permute(0, 2, 1)

        def training_step(self, batch, batch_idx):
            x, y = batch[0][:, : self.seq_len], batch[0][:, self.seq_len :]
            return F.mse_loss(self(x.float())[:, -self.pred_len :], y)

    return DLinear(), Rows(120, 7), {}
