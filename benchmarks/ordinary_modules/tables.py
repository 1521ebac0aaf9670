"""Tables, recommendations and fields: rows of numbers and categories, coordinates, graphs."""

import torch
from ordinary import GROUP_NORM, N, case
from steps import Base, Rows
from torch import nn
from torch.nn import functional as F


class Mixed:
    """Rows of 8 numbers and 5 categories, with a label of two classes."""

    sizes = (10, 20, 7, 30, 4)

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.numbers = torch.randn(N, 8, generator=g)
        self.categories = torch.stack([torch.randint(size, (N,), generator=g) for size in self.sizes], 1)
        self.y = torch.randint(2, (N,), generator=g).float()

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.numbers[i], self.categories[i], self.y[i]


@case("category embedding, MLP", "manujosephv/pytorch_tabular", GROUP_NORM)
def _():
    class Module(Base):
        def __init__(self):
            super().__init__()
            self.cat_embedding_layers = nn.ModuleList([nn.Embedding(n, min(50, (n + 1) // 2)) for n in Mixed.sizes])
            width = sum(min(50, (n + 1) // 2) for n in Mixed.sizes) + 8
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

    return Module(), Mixed(), {}


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
    class Graphs(Rows):
        def __getitem__(self, i):
            adjacency = (self.x[i] @ self.x[i].T > 2.2).float()
            return {"x": self.x[i], "adj": adjacency, "mask": torch.arange(12) < 6 + i % 7, "y": self.y[i]}

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

    return Module(), Graphs(12, 8), {}
