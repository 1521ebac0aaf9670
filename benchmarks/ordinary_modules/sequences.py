"""Sequences: language models written by hand, time series, recommendations, tagging."""

import inspect
import math

import pytorch_lightning as pl
import torch
from ordinary import N, case
from steps import WORDS, Base, Rows, Text
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

T = 24


class Characters:
    """Sequences of T symbols and the same shifted by one."""

    def __init__(self, length=T):
        self.ids = torch.randint(1, WORDS, (N, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.ids[i, :-1], self.ids[i, 1:]


@case("nanoGPT", "karpathy/nanoGPT")
def _():
    class LayerNorm(nn.Module):
        def __init__(self, ndim, bias):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(ndim))
            self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

        def forward(self, x):
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)

    class CausalSelfAttention(nn.Module):
        def __init__(self, d, n_head, dropout):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
            self.resid_dropout, self.n_head, self.n_embd, self.dropout = nn.Dropout(dropout), n_head, d, dropout
            self.flash = hasattr(F, "scaled_dot_product_attention")

        def forward(self, x):
            b, t, c = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            dropout = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
            y = y.transpose(1, 2).contiguous().view(b, t, c)
            return self.resid_dropout(self.c_proj(y))

    class Block(nn.Module):
        def __init__(self, d, dropout):
            super().__init__()
            self.ln_1, self.attn, self.ln_2 = (
                LayerNorm(d, False),
                CausalSelfAttention(d, 4, dropout),
                LayerNorm(d, False),
            )
            self.c_fc, self.gelu = nn.Linear(d, 4 * d, bias=False), nn.GELU()
            self.c_proj, self.drop = nn.Linear(4 * d, d, bias=False), nn.Dropout(dropout)

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.drop(self.c_proj(self.gelu(self.c_fc(self.ln_2(x)))))

    class Gpt(pl.LightningModule):
        def __init__(self, d=64, dropout=0.1):
            super().__init__()
            self.block_size = T
            self.transformer = nn.ModuleDict(
                {
                    "wte": nn.Embedding(WORDS, d),
                    "wpe": nn.Embedding(T, d),
                    "drop": nn.Dropout(dropout),
                    "h": nn.ModuleList([Block(d, dropout) for _ in range(2)]),
                    "ln_f": LayerNorm(d, False),
                }
            )
            self.lm_head = nn.Linear(d, WORDS, bias=False)
            self.transformer.wte.weight = self.lm_head.weight
            self.apply(self._init_weights)
            for pn, p in self.named_parameters():
                if pn.endswith("c_proj.weight"):
                    nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * 2))

        def _init_weights(self, module):
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, mean=0.0, std=0.02)

        def forward(self, idx, targets):
            _b, t = idx.size()
            assert t <= self.block_size, f"Cannot forward sequence of length {t}, block size is only {self.block_size}"
            pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
            x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
            for block in self.transformer.h:
                x = block(x)
            logits = self.lm_head(self.transformer.ln_f(x))
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

        def training_step(self, batch, batch_idx):
            _logits, loss = self(*batch)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            params = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
            decay = [p for p in params.values() if p.dim() >= 2]
            nodecay = [p for p in params.values() if p.dim() < 2]
            groups = [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}]
            fused = "fused" in inspect.signature(torch.optim.AdamW).parameters and self.device.type == "cuda"
            return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), **({"fused": True} if fused else {}))

    return Gpt(), Characters(), {}


@case("minGPT", "karpathy/minGPT")
def _():
    class NewGELU(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    class Block(nn.Module):
        def __init__(self, d, n_head=4):
            super().__init__()
            self.n_head = n_head
            self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
            self.register_buffer("bias", torch.tril(torch.ones(T, T)).view(1, 1, T, T))
            self.mlp = nn.ModuleDict(
                {"c_fc": nn.Linear(d, 4 * d), "c_proj": nn.Linear(4 * d, d), "act": NewGELU(), "drop": nn.Dropout(0.1)}
            )
            m = self.mlp
            self.mlpf = lambda x: m.drop(m.c_proj(m.act(m.c_fc(x))))

        def attn(self, x):
            b, t, c = x.size()
            q, k, v = self.c_attn(x).split(c, dim=2)
            k, q, v = (a.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for a in (k, q, v))
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            att = self.attn_dropout(F.softmax(att, dim=-1))
            return self.resid_dropout(self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c)))

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlpf(self.ln_2(x))

    class Gpt(pl.LightningModule):
        def __init__(self, d=64):
            super().__init__()
            self.wte, self.wpe, self.drop = nn.Embedding(WORDS, d), nn.Embedding(T, d), nn.Dropout(0.1)
            self.h, self.ln_f = nn.ModuleList([Block(d) for _ in range(2)]), nn.LayerNorm(d)
            self.lm_head = nn.Linear(d, WORDS, bias=False)

        def training_step(self, batch, batch_idx):
            idx, targets = batch
            pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device).unsqueeze(0)
            x = self.drop(self.wte(idx) + self.wpe(pos))
            for block in self.h:
                x = block(x)
            logits = self.lm_head(self.ln_f(x))
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

        def configure_optimizers(self):
            decay, no_decay = set(), set()
            for mn, m in self.named_modules():
                for pn, _ in m.named_parameters(recurse=False):
                    fpn = f"{mn}.{pn}" if mn else pn
                    kept = pn.endswith("weight") and isinstance(m, nn.Linear)
                    (decay if kept else no_decay).add(fpn)
            params = dict(self.named_parameters())
            assert not decay & no_decay and len(params.keys() - (decay | no_decay)) == 0
            groups = [
                {"params": [params[pn] for pn in sorted(decay)], "weight_decay": 0.1},
                {"params": [params[pn] for pn in sorted(no_decay)], "weight_decay": 0.0},
            ]
            return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))

    return Gpt(), Characters(), {}


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


def pad_tagged(items):
    ids = pad_sequence([item["input_ids"] for item in items], batch_first=True)
    tags = pad_sequence([item["input_ids"] % 5 for item in items], batch_first=True)
    return ids, tags, ids > 0


@case("CRF tagger", "kmkurn/pytorch-crf")
def _():
    class Crf(nn.Module):
        def __init__(self, num_tags):
            super().__init__()
            self.start_transitions = nn.Parameter(torch.empty(num_tags))
            self.end_transitions = nn.Parameter(torch.empty(num_tags))
            self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
            for parameter in self.parameters():
                nn.init.uniform_(parameter, -0.1, 0.1)

        def forward(self, emissions, tags, mask):
            emissions, tags, mask = emissions.transpose(0, 1), tags.transpose(0, 1), mask.transpose(0, 1)
            if not mask[0].all():
                raise ValueError("mask of the first timestep must all be on")
            return (self._score(emissions, tags, mask) - self._normalizer(emissions, mask)).mean()

        def _score(self, emissions, tags, mask):
            seq_length, batch_size = tags.shape
            mask = mask.type_as(emissions)
            score = self.start_transitions[tags[0]]
            score += emissions[0, torch.arange(batch_size), tags[0]]
            for i in range(1, seq_length):
                score += self.transitions[tags[i - 1], tags[i]] * mask[i]
                score += emissions[i, torch.arange(batch_size), tags[i]] * mask[i]
            seq_ends = mask.long().sum(dim=0) - 1
            last_tags = tags[seq_ends, torch.arange(batch_size)]
            score += self.end_transitions[last_tags]
            return score

        def _normalizer(self, emissions, mask):
            score = self.start_transitions + emissions[0]
            for i in range(1, emissions.size(0)):
                next_score = torch.logsumexp(score.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1), dim=1)
                score = torch.where(mask[i].unsqueeze(1), next_score, score)
            return torch.logsumexp(score + self.end_transitions, dim=1)

    class Tagger(Base):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(WORDS, 24), nn.LSTM(24, 16, batch_first=True, bidirectional=True)
            self.hidden2tag, self.crf = nn.Linear(32, 5), Crf(5)

        def training_step(self, batch, batch_idx):
            ids, tags, mask = batch
            return -self.crf(self.hidden2tag(self.lstm(self.embedding(ids))[0]), tags, mask)

    return Tagger(), Text(low=4, high=13), {"collate_fn": pad_tagged}


@case("Mamba, minimal", "johnma2006/mamba-minimal")
def _():
    class RMSNorm(nn.Module):
        def __init__(self, d, eps=1e-5):
            super().__init__()
            self.eps, self.weight = eps, nn.Parameter(torch.ones(d))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    class MambaBlock(nn.Module):
        def __init__(self, d=24, n=8, rank=4):
            super().__init__()
            self.d_inner, self.rank, self.n = 2 * d, rank, n
            self.in_proj = nn.Linear(d, 2 * self.d_inner, bias=False)
            self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, 4, groups=self.d_inner, padding=3)
            self.x_proj, self.dt_proj = nn.Linear(self.d_inner, rank + 2 * n, bias=False), nn.Linear(rank, self.d_inner)
            self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float().repeat(self.d_inner, 1)))
            self.D, self.out_proj = nn.Parameter(torch.ones(self.d_inner)), nn.Linear(self.d_inner, d, bias=False)

        def forward(self, x):
            _, length, _ = x.shape
            x, res = self.in_proj(x).split(split_size=[self.d_inner, self.d_inner], dim=-1)
            x = self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2)
            return self.out_proj(self.ssm(F.silu(x)) * F.silu(res))

        def ssm(self, x):
            a = -torch.exp(self.A_log.float())
            delta, b, c = self.x_proj(x).split(split_size=[self.rank, self.n, self.n], dim=-1)
            return self.selective_scan(x, F.softplus(self.dt_proj(delta)), a, b, c, self.D.float())

        def selective_scan(self, u, delta, a, b, c, d):
            batch, length, d_in = u.shape
            delta_a = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
            delta_b_u = torch.einsum("bld,bln,bld->bldn", delta, b, u)
            x, ys = torch.zeros((batch, d_in, a.shape[1]), device=delta_a.device), []
            for i in range(length):
                x = delta_a[:, i] * x + delta_b_u[:, i]
                ys.append(torch.einsum("bdn,bn->bd", x, c[:, i, :]))
            return torch.stack(ys, dim=1) + u * d

    class Mamba(Base):
        def __init__(self, d=24):
            super().__init__()
            self.embedding, self.norms = nn.Embedding(WORDS, d), nn.ModuleList([RMSNorm(d), RMSNorm(d)])
            self.layers, self.norm_f = nn.ModuleList([MambaBlock(d), MambaBlock(d)]), RMSNorm(d)
            self.lm_head = nn.Linear(d, WORDS, bias=False)
            self.lm_head.weight = self.embedding.weight

        def training_step(self, batch, batch_idx):
            x = self.embedding(batch[0])
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = layer(norm(x)) + x
            logits = self.lm_head(self.norm_f(x))
            return F.cross_entropy(logits.view(-1, WORDS), batch[1].reshape(-1))

    return Mamba(), Characters(16), {}


@case("deep knowledge tracing", "pykt-team/pykt-toolkit")
def _():
    class Answers(Characters):
        def __getitem__(self, i):
            q = self.ids[i, :16] % 20
            return q, self.ids[i, :16] % 2, torch.arange(16) < 6 + i % 10

    class Dkt(Base):
        def __init__(self, num_c=20, d=32):
            super().__init__()
            self.num_c, self.interaction_emb = num_c, nn.Embedding(num_c * 2, d)
            self.lstm_layer, self.dropout_layer = nn.LSTM(d, d, batch_first=True), nn.Dropout(0.1)
            self.out_layer = nn.Linear(d, num_c)

        def training_step(self, batch, batch_idx):
            q, r, sm = batch
            h, _ = self.lstm_layer(self.interaction_emb(q[:, :-1] + self.num_c * r[:, :-1]))
            y = torch.sigmoid(self.out_layer(self.dropout_layer(h)))
            y = (y * F.one_hot(q[:, 1:], self.num_c)).sum(-1)
            mask = sm[:, 1:]
            y, t = torch.masked_select(y, mask), torch.masked_select(r[:, 1:], mask)
            return F.binary_cross_entropy(y.double(), t.double())

    return Dkt(), Answers(), {}


@case("Transformer that reverses", "Lightning-AI/tutorials course_UvA-DL/05-transformers-and-MH-attention")
def _():
    class CosineWarmup(torch.optim.lr_scheduler._LRScheduler):
        def __init__(self, optimizer, warmup, max_iters):
            self.warmup, self.max_num_iters = warmup, max_iters
            super().__init__(optimizer)

        def get_lr(self):
            factor = 0.5 * (1 + math.cos(math.pi * self.last_epoch / self.max_num_iters))
            if self.last_epoch <= self.warmup:
                factor *= self.last_epoch * 1.0 / self.warmup
            return [base_lr * factor for base_lr in self.base_lrs]

    class MultiheadAttention(nn.Module):
        def __init__(self, d, heads):
            super().__init__()
            self.num_heads, self.head_dim = heads, d // heads
            self.qkv_proj, self.o_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
            nn.init.xavier_uniform_(self.qkv_proj.weight)
            self.qkv_proj.bias.data.fill_(0)

        def forward(self, x):
            batch_size, seq_length, _ = x.size()
            qkv = self.qkv_proj(x).reshape(batch_size, seq_length, self.num_heads, 3 * self.head_dim)
            q, k, v = qkv.permute(0, 2, 1, 3).chunk(3, dim=-1)
            attn_logits = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size()[-1])
            values = torch.matmul(F.softmax(attn_logits, dim=-1), v).permute(0, 2, 1, 3)
            return self.o_proj(values.reshape(batch_size, seq_length, -1))

    class ReversePredictor(pl.LightningModule):
        def __init__(self, d=32, classes=10):
            super().__init__()
            self.save_hyperparameters()
            self.input_net = nn.Sequential(nn.Dropout(0.0), nn.Linear(classes, d))
            self.self_attn = MultiheadAttention(d, 1)
            self.linear_net = nn.Sequential(
                nn.Linear(d, 2 * d), nn.Dropout(0.0), nn.ReLU(inplace=True), nn.Linear(2 * d, d)
            )
            self.norm1, self.norm2, self.dropout = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(0.0)
            self.output_net = nn.Sequential(
                nn.Linear(d, d), nn.LayerNorm(d), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(d, classes)
            )

        def training_step(self, batch, batch_idx):
            inp_data, labels = batch
            inp_data = F.one_hot(inp_data, num_classes=self.hparams.classes).float()
            x = self.input_net(inp_data)
            x = self.norm1(x + self.dropout(self.self_attn(x)))
            x = self.norm2(x + self.dropout(self.linear_net(x)))
            preds = self.output_net(x)
            loss = F.cross_entropy(preds.view(-1, preds.size(-1)), labels.view(-1))
            acc = (preds.argmax(dim=-1) == labels).float().mean()
            self.log("train_loss", loss)
            self.log("train_acc", acc)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=5e-4)
            self.lr_scheduler = CosineWarmup(optimizer, warmup=50, max_iters=1000)
            return optimizer

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            self.lr_scheduler.step()

    class Reversed(Characters):
        def __getitem__(self, i):
            digits = self.ids[i, :16] % 10
            return digits, torch.flip(digits, dims=(0,))

    return ReversePredictor(), Reversed(), {}


@case("LitGPT", "Lightning-AI/litgpt")
def _():
    class RMSNorm(nn.Module):
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

        def forward(self, x):
            dtype = x.dtype
            x = x.float()
            norm_x = torch.mean(x * x, dim=-1, keepdim=True)
            return (x * torch.rsqrt(norm_x + self.eps)).to(dtype=dtype) * self.weight.float()

    def apply_rope(x, cos, sin):
        head_size = x.size(-1)
        rotated = torch.cat((-x[..., head_size // 2 :], x[..., : head_size // 2]), dim=-1)
        return ((x * cos) + (rotated * sin)).to(dtype=x.dtype)

    class Block(nn.Module):
        def __init__(self, d=48, heads=4, groups=2):
            super().__init__()
            self.heads, self.groups, self.size = heads, groups, d // heads
            self.norm_1, self.norm_2 = RMSNorm(d), RMSNorm(d)
            self.qkv, self.proj = (
                nn.Linear(d, (heads + 2 * groups) * self.size, bias=False),
                nn.Linear(d, d, bias=False),
            )
            self.fc_1, self.fc_2 = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
            self.down = nn.Linear(2 * d, d, bias=False)

        def forward(self, x, cos, sin):
            b, t, c = x.size()
            q, k, v = self.qkv(self.norm_1(x)).split([c, self.groups * self.size, self.groups * self.size], dim=-1)
            q = q.view(b, t, self.heads, self.size).transpose(1, 2)
            k, v = (a.view(b, t, self.groups, self.size).transpose(1, 2) for a in (k, v))
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            k, v = (a.repeat_interleave(self.heads // self.groups, dim=1) for a in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, scale=1.0 / math.sqrt(self.size), is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
            h = self.norm_2(x)
            return x + self.down(F.silu(self.fc_1(h)) * self.fc_2(h))

    def chunked_cross_entropy(logits, targets, chunk_size=8, ignore_index=-100):
        logit_chunks = [chunk.reshape(-1, chunk.size(-1)) for chunk in logits]
        target_chunks = [chunk.reshape(-1) for chunk in targets.split(chunk_size, dim=1)]
        loss_chunks = [
            F.cross_entropy(logit, target, ignore_index=ignore_index, reduction="none")
            for logit, target in zip(logit_chunks, target_chunks, strict=True)
        ]
        non_masked = (targets != ignore_index).sum()
        return torch.cat(loss_chunks).sum() / non_masked.maximum(torch.ones_like(non_masked))

    class Litgpt(pl.LightningModule):
        def __init__(self, d=48):
            super().__init__()
            self.wte, self.ln_f, self.lm_head = nn.Embedding(WORDS, d), RMSNorm(d), nn.Linear(d, WORDS, bias=False)
            self.h = nn.ModuleList([Block(d), Block(d)])
            theta = 1.0 / (10000 ** (torch.arange(0, d // 4, 2).float() / (d // 4)))
            idx_theta = torch.outer(torch.arange(T), theta).repeat(1, 2)
            self.register_buffer("cos", torch.cos(idx_theta), persistent=False)
            self.register_buffer("sin", torch.sin(idx_theta), persistent=False)

        def forward(self, idx, lm_head_chunk_size=0):
            x = self.wte(idx)
            cos, sin = self.cos[: idx.size(1)], self.sin[: idx.size(1)]
            for block in self.h:
                x = block(x, cos, sin)
            x = self.ln_f(x)
            if lm_head_chunk_size > 0:
                return [self.lm_head(x_i) for x_i in x.split(lm_head_chunk_size, dim=1)]
            return self.lm_head(x)

        def training_step(self, batch, batch_idx):
            logits = self(batch[0], lm_head_chunk_size=8)
            logits[-1] = logits[-1][..., :-1, :]
            loss = chunked_cross_entropy(logits, batch[0][..., 1:])
            self.log("train_loss", loss, on_step=True, on_epoch=False, prog_bar=True)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=2e-4, weight_decay=0.0, betas=(0.9, 0.95))
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
            return [optimizer], [scheduler]

    return Litgpt(), Characters(), {}
