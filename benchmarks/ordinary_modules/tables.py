"""Tables, recommendations and fields: rows of numbers and categories, coordinates, graphs."""

import math

import pytorch_lightning as pl
import torch
from ordinary import N, case
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


@case("FT-Transformer", "yandex-research/rtdl")
def _():
    class Tokenizer(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(9, d))
            self.bias = nn.Parameter(torch.empty(13, d))
            offsets = torch.tensor([0, *Mixed.sizes[:-1]]).cumsum(0)
            self.register_buffer("category_offsets", offsets)
            self.category_embeddings = nn.Embedding(sum(Mixed.sizes), d)
            for parameter in (self.weight, self.bias, self.category_embeddings.weight):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))

        def forward(self, x_num, x_cat):
            x_num = torch.cat([torch.ones(len(x_num), 1, device=x_num.device), x_num], dim=1)
            x = self.weight[None] * x_num[:, :, None]
            x = torch.cat([x, self.category_embeddings(x_cat + self.category_offsets[None])], dim=1)
            bias = torch.cat([torch.zeros(1, self.bias.shape[1], device=x.device), self.bias])
            return x + bias[None]

    class Block(nn.Module):
        def __init__(self, d, first):
            super().__init__()
            self.norm0 = None if first else nn.LayerNorm(d)
            self.attention = nn.MultiheadAttention(d, 4, dropout=0.2, batch_first=True)
            self.norm1, self.linear0, self.linear1 = nn.LayerNorm(d), nn.Linear(d, 2 * 64), nn.Linear(64, d)

        def forward(self, x):
            h = x if self.norm0 is None else self.norm0(x)
            x = x + self.attention(h, h, h, need_weights=False)[0]
            a, b = self.linear0(self.norm1(x)).chunk(2, dim=-1)
            return x + self.linear1(F.dropout(a * F.relu(b), 0.1, self.training))

    class Module(pl.LightningModule):
        def __init__(self, d=32):
            super().__init__()
            self.tokenizer = Tokenizer(d)
            self.layers = nn.ModuleList([Block(d, k == 0) for k in range(2)])
            self.last_normalization, self.head = nn.LayerNorm(d), nn.Linear(d, 1)

        def forward(self, x_num, x_cat):
            x = self.tokenizer(x_num, x_cat)
            for layer in self.layers:
                x = layer(x)
            return self.head(F.relu(self.last_normalization(x[:, 0]))).squeeze(-1)

        def training_step(self, batch, batch_idx):
            x_num, x_cat, y = batch
            return F.binary_cross_entropy_with_logits(self(x_num, x_cat), y)

        def configure_optimizers(self):
            no_decay = ["tokenizer", ".norm", ".bias"]
            rest = [p for n, p in self.named_parameters() if all(word not in n for word in no_decay)]
            zero = [p for n, p in self.named_parameters() if any(word in n for word in no_decay)]
            groups = [{"params": rest}, {"params": zero, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=1e-4, weight_decay=1e-5)

    return Module(), Mixed(), {}


@case("TabTransformer", "lucidrains/tab-transformer-pytorch")
def _():
    class GEGLU(nn.Module):
        def forward(self, x):
            x, gates = x.chunk(2, dim=-1)
            return x * F.gelu(gates)

    class Attention(nn.Module):
        def __init__(self, dim, heads=4, dim_head=8):
            super().__init__()
            self.heads, self.scale = heads, dim_head**-0.5
            self.norm = nn.LayerNorm(dim)
            self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
            self.to_out, self.dropout = nn.Linear(heads * dim_head, dim, bias=False), nn.Dropout(0.1)

        def forward(self, x):
            q, k, v = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
            attn = (torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale).softmax(dim=-1)
            out = torch.einsum("b h i j, b h j d -> b h i d", self.dropout(attn), v)
            return self.to_out(out.transpose(1, 2).flatten(2))

    class Module(Base):
        def __init__(self, dim=32):
            super().__init__()
            offsets = torch.tensor([2, *Mixed.sizes[:-1]]).cumsum(0)
            self.register_buffer("categories_offset", offsets)
            self.category_embed = nn.Embedding(sum(Mixed.sizes) + 2, dim - 4)
            self.shared_category_embed = nn.Parameter(torch.zeros(5, 4))
            self.layers = nn.ModuleList([])
            for _ in range(2):
                ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 8 * dim), GEGLU(), nn.Linear(4 * dim, dim))
                self.layers.append(nn.ModuleList([Attention(dim), ff]))
            self.norm = nn.LayerNorm(8)
            self.mlp = nn.Sequential(nn.Linear(5 * dim + 8, 64), nn.SELU(), nn.Linear(64, 1))

        def training_step(self, batch, batch_idx):
            x_cont, x_categ, y = batch
            x_categ = x_categ + self.categories_offset
            embed = self.category_embed(x_categ)
            shared = self.shared_category_embed.expand(x_categ.shape[0], -1, -1)
            x = torch.cat((embed, shared), dim=-1)
            for attn, ff in self.layers:
                x = attn(x) + x
                x = ff(x) + x
            x = torch.cat((x.flatten(1), self.norm(x_cont)), dim=-1)
            return F.binary_cross_entropy_with_logits(self.mlp(x).squeeze(1), y)

    return Module(), Mixed(), {}


@case("category embedding, MLP", "manujosephv/pytorch_tabular")
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


@case("DeepFM", "shenweichen/DeepCTR-Torch")
def _():
    class Module(pl.LightningModule):
        def __init__(self, d=8):
            super().__init__()
            self.embedding_dict = nn.ModuleDict({f"C{i}": nn.Embedding(n, d) for i, n in enumerate(Mixed.sizes)})
            self.linear_dict = nn.ModuleDict({f"C{i}": nn.Embedding(n, 1) for i, n in enumerate(Mixed.sizes)})
            self.linear_weight = nn.Parameter(torch.zeros(8, 1))
            self.dnn = nn.ModuleList([nn.Linear(5 * d + 8, 64), nn.Linear(64, 32)])
            self.dnn_linear = nn.Linear(32, 1, bias=False)
            self.bias = nn.Parameter(torch.zeros((1,)))
            for tensor in self.embedding_dict.parameters():
                nn.init.normal_(tensor, mean=0, std=0.0001)

        def fm(self, inputs):
            square_of_sum = torch.pow(torch.sum(inputs, dim=1, keepdim=True), 2)
            sum_of_square = torch.sum(inputs * inputs, dim=1, keepdim=True)
            return 0.5 * torch.sum(square_of_sum - sum_of_square, dim=2, keepdim=False)

        def get_regularization_loss(self):
            total = torch.zeros((1,), device=self.device)
            for parameter in [*self.embedding_dict.parameters(), *self.linear_dict.parameters()]:
                total += torch.sum(1e-5 * torch.square(parameter))
            return total

        def training_step(self, batch, batch_idx):
            dense, sparse, y = batch
            embedded = torch.cat([self.embedding_dict[f"C{i}"](sparse[:, i : i + 1].long()) for i in range(5)], 1)
            linear = [self.linear_dict[f"C{i}"](sparse[:, i : i + 1].long()) for i in range(5)]
            logit = torch.sum(torch.cat(linear, dim=-1), dim=-1) + dense.matmul(self.linear_weight)
            logit += self.fm(embedded)
            h = torch.cat([embedded.flatten(1), dense], dim=-1)
            for layer in self.dnn:
                h = F.relu(layer(h))
            logit += self.dnn_linear(h)
            y_pred = torch.sigmoid(logit + self.bias).squeeze()
            loss = F.binary_cross_entropy(y_pred, y.squeeze(), reduction="sum")
            return loss + self.get_regularization_loss()

        def configure_optimizers(self):
            return torch.optim.Adagrad(self.parameters(), lr=0.01)

    return Module(), Mixed(), {}


@case("DLRM, EmbeddingBag", "facebookresearch/dlrm")
def _():
    class Module(pl.LightningModule):
        def __init__(self, m=8):
            super().__init__()
            self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, m, mode="sum", sparse=False) for n in Mixed.sizes])
            self.bot_l = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, m), nn.ReLU())
            self.top_l = nn.Sequential(nn.Linear(m + 15, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
            self.loss_fn = nn.BCELoss(reduction="mean")

        def interact_features(self, x, ly):
            batch_size, d = x.shape
            t = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
            z = torch.bmm(t, torch.transpose(t, 1, 2))
            _, ni, nj = z.shape
            li = torch.tensor([i for i in range(ni) for j in range(i)])
            lj = torch.tensor([j for i in range(nj) for j in range(i)])
            return torch.cat([x, z[:, li, lj]], dim=1)

        def training_step(self, batch, batch_idx):
            dense_x, sparse, y = batch
            x = self.bot_l(torch.log(dense_x.abs() + 1))
            offset = torch.arange(sparse.shape[0])
            ly = [emb(sparse[:, k], offset) for k, emb in enumerate(self.emb_l)]
            p = self.top_l(self.interact_features(x, ly))
            p = torch.clamp(p, min=1e-6, max=1 - 1e-6)
            return self.loss_fn(p, y.view(-1, 1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module(), Mixed(), {}


@case("neural collaborative filtering", "guoyang9/NCF")
def _():
    class Ratings:
        def __len__(self):
            return N

        def __getitem__(self, i):
            return i % 100, (i * 37) % 150, float(i % 5 == 0)

    class Ncf(Base):
        def __init__(self, factors=8, layers=3):
            super().__init__()
            self.embed_user_GMF, self.embed_item_GMF = nn.Embedding(100, factors), nn.Embedding(150, factors)
            wide = factors * 2 ** (layers - 1)
            self.embed_user_MLP, self.embed_item_MLP = nn.Embedding(100, wide), nn.Embedding(150, wide)
            modules = []
            for i in range(layers):
                size = factors * 2 ** (layers - i)
                modules += [nn.Dropout(p=0.1), nn.Linear(size, size // 2), nn.ReLU()]
            self.MLP_layers = nn.Sequential(*modules)
            self.predict_layer = nn.Linear(2 * factors, 1)
            self.loss_function = nn.BCEWithLogitsLoss()

        def forward(self, user, item):
            gmf = self.embed_user_GMF(user) * self.embed_item_GMF(item)
            interaction = torch.cat((self.embed_user_MLP(user), self.embed_item_MLP(item)), -1)
            prediction = self.predict_layer(torch.cat((gmf, self.MLP_layers(interaction)), -1))
            return prediction.view(-1)

        def training_step(self, batch, batch_idx):
            user, item, label = batch
            return self.loss_function(self(user, item), label.float())

    return Ncf(), Ratings(), {}


@case("SIREN, image fitting", "vsitzmann/siren")
def _():
    class SineLayer(nn.Module):
        def __init__(self, a, b, is_first=False, omega_0=30):
            super().__init__()
            self.omega_0, self.linear = omega_0, nn.Linear(a, b)
            bound = 1 / a if is_first else math.sqrt(6 / a) / omega_0
            with torch.no_grad():
                self.linear.weight.uniform_(-bound, bound)

        def forward(self, x):
            return torch.sin(self.omega_0 * self.linear(x))

    class Pixels(Rows):
        def __getitem__(self, i):
            return {"coords": self.x[i], "img": self.x[i].prod(-1, keepdim=True)}

    class Siren(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(SineLayer(2, 64, True), SineLayer(64, 64), nn.Linear(64, 1))

        def training_step(self, batch, batch_idx):
            coords = batch["coords"].clone().detach().requires_grad_(True)
            return ((self.net(coords) - batch["img"]) ** 2).mean()

        def configure_optimizers(self):
            return torch.optim.Adam(lr=1e-4, params=self.parameters())

    return Siren(), Pixels(2), {}


@case("KAN", "Blealtan/efficient-kan")
def _():
    class KanLinear(nn.Module):
        def __init__(self, a, b, grid_size=5, spline_order=3):
            super().__init__()
            self.a, self.b, self.grid_size, self.spline_order = a, b, grid_size, spline_order
            h = 2 / grid_size
            grid = (torch.arange(-spline_order, grid_size + spline_order + 1) * h - 1).expand(a, -1).contiguous()
            self.register_buffer("grid", grid)
            self.base_weight = nn.Parameter(torch.empty(b, a))
            self.spline_weight = nn.Parameter(0.1 * torch.randn(b, a, grid_size + spline_order))
            self.spline_scaler = nn.Parameter(torch.empty(b, a))
            nn.init.kaiming_uniform_(self.base_weight, a=math.sqrt(5))
            nn.init.kaiming_uniform_(self.spline_scaler, a=math.sqrt(5))

        def b_splines(self, x):
            assert x.dim() == 2 and x.size(1) == self.a
            grid, x = self.grid, x.unsqueeze(-1)
            bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
            for k in range(1, self.spline_order + 1):
                left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1]
                right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:(-k)]) * bases[:, :, 1:]
                bases = left + right
            assert bases.size() == (x.size(0), self.a, self.grid_size + self.spline_order)
            return bases.contiguous()

        def forward(self, x):
            shape = x.shape
            x = x.reshape(-1, self.a)
            base_output = F.linear(F.silu(x), self.base_weight)
            scaled = self.spline_weight * self.spline_scaler.unsqueeze(-1)
            spline_output = F.linear(self.b_splines(x).view(x.size(0), -1), scaled.view(self.b, -1))
            return (base_output + spline_output).reshape(*shape[:-1], self.b)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([KanLinear(64, 32), KanLinear(32, 10)])

        def training_step(self, batch, batch_idx):
            x, y = batch
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(x, y)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-4)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)]

    return Module(), Rows(64, classes=10), {}


@case("NeRF", "yenchenlin/nerf-pytorch")
def _():
    class Embedder:
        def __init__(self, freqs):
            self.bands = 2.0 ** torch.linspace(0.0, freqs - 1, steps=freqs)

        def __call__(self, inputs):
            return torch.cat([inputs] + [f(inputs * freq) for freq in self.bands for f in (torch.sin, torch.cos)], -1)

    class Field(nn.Module):
        def __init__(self, w=32):
            super().__init__()
            self.pts_linears = nn.ModuleList(
                [nn.Linear(27, w)] + [nn.Linear(w + (27 if i == 1 else 0), w) for i in (0, 1)]
            )
            self.feature_linear, self.alpha_linear = nn.Linear(w, w), nn.Linear(w, 1)
            self.views_linears, self.rgb_linear = nn.ModuleList([nn.Linear(w + 15, w // 2)]), nn.Linear(w // 2, 3)

        def forward(self, x):
            input_pts, input_views = torch.split(x, [27, 15], dim=-1)
            h = input_pts
            for i, layer in enumerate(self.pts_linears):
                h = F.relu(layer(h))
                if i == 1:
                    h = torch.cat([input_pts, h], -1)
            alpha = self.alpha_linear(h)
            h = torch.cat([self.feature_linear(h), input_views], -1)
            for layer in self.views_linears:
                h = F.relu(layer(h))
            return torch.cat([self.rgb_linear(h), alpha], -1)

    class Rays:
        def __init__(self):
            g = torch.Generator().manual_seed(0)
            self.rays, self.rgb = torch.randn(N, 2, 3, generator=g), torch.rand(N, 3, generator=g)

        def __len__(self):
            return N

        def __getitem__(self, i):
            return self.rays[i], self.rgb[i]

    class Nerf(pl.LightningModule):
        def __init__(self, samples=16):
            super().__init__()
            self.embed, self.embed_dirs, self.network_fn, self.samples = Embedder(4), Embedder(2), Field(), samples

        def run_network(self, inputs, viewdirs):
            flat = torch.reshape(inputs, [-1, inputs.shape[-1]])
            dirs = viewdirs[:, None].expand(inputs.shape)
            dirs = torch.reshape(dirs, [-1, dirs.shape[-1]])
            outputs = self.network_fn(torch.cat([self.embed(flat), self.embed_dirs(dirs)], -1))
            return torch.reshape(outputs, [*inputs.shape[:-1], outputs.shape[-1]])

        def raw2outputs(self, raw, z_vals, rays_d):
            dists = z_vals[..., 1:] - z_vals[..., :-1]
            dists = torch.cat([dists, torch.Tensor([1e10]).expand(dists[..., :1].shape)], -1)
            dists = dists * torch.norm(rays_d[..., None, :], dim=-1)
            rgb = torch.sigmoid(raw[..., :3])
            alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
            ones = torch.ones((alpha.shape[0], 1))
            weights = alpha * torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
            return torch.sum(weights[..., None] * rgb, -2)

        def training_step(self, batch, batch_idx):
            rays, target = batch
            rays_o, rays_d = rays[:, 0], rays[:, 1]
            viewdirs = rays_d / torch.norm(rays_d, dim=-1, keepdim=True)
            z_vals = (2.0 + 4.0 * torch.linspace(0.0, 1.0, steps=self.samples)).expand([rays.shape[0], self.samples])
            mids = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
            upper, lower = torch.cat([mids, z_vals[..., -1:]], -1), torch.cat([z_vals[..., :1], mids], -1)
            z_vals = lower + (upper - lower) * torch.rand(z_vals.shape)
            pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
            rgb = self.raw2outputs(self.run_network(pts, viewdirs), z_vals, rays_d)
            return torch.mean((rgb - target) ** 2)

        def configure_optimizers(self):
            return torch.optim.Adam(params=self.parameters(), lr=5e-4, betas=(0.9, 0.999))

    return Nerf(), Rays(), {}


@case("PointNet", "fxia22/pointnet.pytorch")
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
