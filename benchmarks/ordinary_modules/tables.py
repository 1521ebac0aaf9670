"""Rows of numbers and categories, points, graphs, fields and time series."""

import math
from itertools import pairwise

import numpy as np
import pytorch_lightning as pl
import torch
from ordinary import GROUP_NORM, case
from records import Base, Records, Rows, Table, centred, images
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR


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


@case("PointNet", "fxia22/pointnet.pytorch", GROUP_NORM)
def _():
    class STN3d(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
            self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 9)
            self.bn1, self.bn2, self.bn3 = nn.BatchNorm1d(16), nn.BatchNorm1d(32), nn.BatchNorm1d(16)

        def forward(self, x):
            batchsize = x.size()[0]
            x = F.relu(self.bn1(self.conv1(x)))
            x = F.relu(self.bn2(self.conv2(x)))
            x = torch.max(x, 2, keepdim=True)[0]
            x = F.relu(self.bn3(self.fc1(x.view(-1, 32))))
            iden = torch.eye(3).flatten().view(1, 9).repeat(batchsize, 1)
            return (self.fc2(x) + iden).view(-1, 3, 3)

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.stn, self.conv1, self.conv2 = STN3d(), nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
            self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)
            self.fc1, self.fc2, self.dropout = nn.Linear(32, 16), nn.Linear(16, 5), nn.Dropout(p=0.3)

        def training_step(self, batch, batch_idx):
            points, target = batch
            x = points.transpose(2, 1)
            x = torch.bmm(x.transpose(2, 1), self.stn(x)).transpose(2, 1)
            x = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            x = torch.max(x, 2, keepdim=True)[0].view(-1, 32)
            pred = F.log_softmax(self.fc2(F.relu(self.dropout(self.fc1(x)))), dim=1)
            return F.nll_loss(pred, target)

    return Module(), Rows(64, 3, classes=5), {}


@case("graph isomorphism network, dense", "pyg-team/pytorch_geometric examples")
def _():
    rows = Rows(12, 8)

    def graph(i):
        x, y = rows[i]
        return {"x": x, "adj": (x @ x.T > 2.2).float(), "mask": torch.arange(12) < 6 + i % 7, "y": y}

    class DenseGinConv(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.nn = nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))
            self.eps = nn.Parameter(torch.empty(1))
            self.eps.data.fill_(0.0)

        def forward(self, x, adj, mask):
            out = torch.matmul(adj, x)
            out = (1 + self.eps) * x + out
            return self.nn(out) * mask.view(x.shape[0], -1, 1).to(x.dtype)

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([DenseGinConv(8, 32), DenseGinConv(32, 32)])
            self.lin1, self.lin2 = nn.Linear(64, 32), nn.Linear(32, 3)

        def training_step(self, batch, batch_idx):
            x, adj, mask = batch["x"], batch["adj"], batch["mask"]
            xs = []
            for conv in self.convs:
                x = F.relu(conv(x, adj, mask))
                xs.append(x.sum(dim=1))
            h = F.dropout(F.relu(self.lin1(torch.cat(xs, -1))), 0.5, self.training)
            return F.nll_loss(F.log_softmax(self.lin2(h), dim=-1), batch["y"].view(-1))

    return Module(), Records(graph), {}


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

    return Classify(), images(1, 14, lambda x, y: (centred(x), y)), {}


@case("VAE by rsample", "Lightning-Universe/lightning-bolts VAE")
def _():
    class Vae(Base):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
            self.mu, self.log_var = nn.Linear(64, 8), nn.Linear(64, 8)
            self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

        def training_step(self, batch, batch_idx):
            x, _ = batch
            h = self.encoder(x)
            std = torch.exp(self.log_var(h) / 2)
            p = Normal(torch.zeros_like(std), torch.ones_like(std))
            q = Normal(self.mu(h), std)
            z = q.rsample()
            recon = F.mse_loss(self.decoder(z), x, reduction="mean")
            kl = kl_divergence(q, p).mean()
            loss = recon + 0.1 * kl
            self.log_dict({"recon": recon, "kl": kl, "loss": loss})
            return loss

    return Vae(), Rows(64), {}


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


@case("gradient penalty", "eriklindernoren/PyTorch-GAN wgan_gp critic")
def _():
    class Critic(Base):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

        def training_step(self, batch, batch_idx):
            real, _ = batch
            fake = torch.randn_like(real)
            alpha = torch.rand(real.size(0), 1)
            mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
            out = self.net(mixed)
            grads = torch.autograd.grad(out, mixed, torch.ones_like(out), create_graph=True, retain_graph=True)[0]
            penalty = ((grads.view(grads.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
            return self.net(fake).mean() - self.net(real).mean() + 10 * penalty

    return Critic(), Rows(16), {}


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

        def forward(self, x):
            trend_init = self.moving_avg(x)
            seasonal_init = (x - trend_init).permute(0, 2, 1)
            trend_init = trend_init.permute(0, 2, 1)
            shape = [seasonal_init.size(0), seasonal_init.size(1), self.pred_len]
            seasonal = torch.zeros(shape, dtype=seasonal_init.dtype).to(seasonal_init.device)
            trend = torch.zeros(shape, dtype=trend_init.dtype).to(trend_init.device)
            for i in range(len(self.seasonal)):
                seasonal[:, i, :] = self.seasonal[i](seasonal_init[:, i, :])
                trend[:, i, :] = self.trend[i](trend_init[:, i, :])
            return (seasonal + trend).permute(0, 2, 1)

        def training_step(self, batch, batch_idx):
            x, y = batch[0][:, : self.seq_len], batch[0][:, self.seq_len :]
            return F.mse_loss(self(x.float())[:, -self.pred_len :], y)

    return DLinear(), Rows(120, 7), {}
