"""Sequences: language models written by hand, time series, recommendations, tagging."""

import inspect
import math
import random

import pytorch_lightning as pl
import torch
from ordinary import N, case
from steps import WORDS, Base, Rows, Text, pad_fixed
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Subset

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


@case("makemore, GRU cell", "karpathy/makemore")
def _():
    class GRUCell(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.xh_to_z, self.xh_to_r = nn.Linear(a + b, b), nn.Linear(a + b, b)
            self.xh_to_hbar = nn.Linear(a + b, b)

        def forward(self, xt, hprev):
            xh = torch.cat([xt, hprev], dim=1)
            r = torch.sigmoid(self.xh_to_r(xh))
            hbar = torch.tanh(self.xh_to_hbar(torch.cat([xt, r * hprev], dim=1)))
            z = torch.sigmoid(self.xh_to_z(xh))
            return (1 - z) * hprev + z * hbar

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.start = nn.Parameter(torch.zeros(1, 32))
            self.wte, self.cell, self.lm_head = nn.Embedding(WORDS, 32), GRUCell(32, 32), nn.Linear(32, WORDS)

        def training_step(self, batch, batch_idx):
            idx, targets = batch
            b, t = idx.size()
            emb, hprev = self.wte(idx), self.start.expand((b, -1))
            hiddens = []
            for i in range(t):
                hprev = self.cell(emb[:, i, :], hprev)
                hiddens.append(hprev)
            logits = self.lm_head(torch.stack(hiddens, 1))
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=5e-4, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)

    return Module(), Characters(12), {}


@case("word language model, LSTM", "pytorch/examples word_language_model")
def _():
    class RnnModel(pl.LightningModule):
        def __init__(self, ninp=32, nhid=32, nlayers=2, dropout=0.5):
            super().__init__()
            self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(WORDS, ninp)
            self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
            self.decoder = nn.Linear(nhid, WORDS)
            self.decoder.weight = self.encoder.weight
            self.nhid, self.nlayers = nhid, nlayers
            nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
            nn.init.zeros_(self.decoder.bias)

        def init_hidden(self, bsz):
            weight = next(self.parameters())
            return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))

        def training_step(self, batch, batch_idx):
            data, targets = batch[0].t(), batch[1].t()
            emb = self.drop(self.encoder(data))
            output, _ = self.rnn(emb, self.init_hidden(data.size(1)))
            decoded = self.decoder(self.drop(output)).view(-1, WORDS)
            return F.nll_loss(F.log_softmax(decoded, dim=1), targets.reshape(-1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=20)

    return RnnModel(), Characters(), {}


@case("LSTM cells, sine waves", "pytorch/examples time_sequence_prediction")
def _():
    class Sequence(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 24), nn.LSTMCell(24, 24), nn.Linear(24, 1)
            self.criterion = nn.MSELoss()

        def forward(self, x):
            outputs = []
            h_t, c_t = torch.zeros(x.size(0), 24), torch.zeros(x.size(0), 24)
            h_t2, c_t2 = torch.zeros(x.size(0), 24), torch.zeros(x.size(0), 24)
            for input_t in x.split(1, dim=1):
                h_t, c_t = self.lstm1(input_t, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                outputs += [self.linear(h_t2)]
            return torch.cat(outputs, dim=1)

        def training_step(self, batch, batch_idx):
            wave, _ = batch
            return self.criterion(self(wave[:, :-1]), wave[:, 1:])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.08)

    return Sequence(), Rows(20), {}


@case("SNLI classifier", "pytorch/examples snli")
def _():
    class Pairs(Characters):
        def __getitem__(self, i):
            return {"premise": self.ids[i, :12], "hypothesis": self.ids[i, 12:20], "label": self.ids[i, 0] % 3}

    class Bottle(nn.Module):
        def forward(self, input):
            if len(input.size()) <= 2:
                return super().forward(input)
            size = input.size()[:2]
            out = super().forward(input.view(size[0] * size[1], -1))
            return out.view(size[0], size[1], -1)

    class Linear(Bottle, nn.Linear):
        pass

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(input_size=32, hidden_size=24, num_layers=1, bidirectional=True)

        def forward(self, inputs):
            batch_size = inputs.size()[1]
            h0 = c0 = inputs.new_zeros((2, batch_size, 24))
            _, (ht, _) = self.rnn(inputs, (h0, c0))
            return ht[-2:].transpose(0, 1).contiguous().view(batch_size, -1)

    class Module(Base):
        def __init__(self):
            super().__init__()
            self.embed, self.projection, self.encoder = nn.Embedding(WORDS, 32), Linear(32, 32), Encoder()
            self.embed.weight.requires_grad_(False)
            self.relu, self.dropout = nn.ReLU(), nn.Dropout(p=0.2)
            self.out = nn.Sequential(Linear(96, 96), self.relu, self.dropout, Linear(96, 3))
            self.criterion = nn.CrossEntropyLoss()

        def training_step(self, batch, batch_idx):
            prem_embed, hypo_embed = self.embed(batch["premise"].t()), self.embed(batch["hypothesis"].t())
            prem_embed = self.relu(self.projection(prem_embed.detach()))
            hypo_embed = self.relu(self.projection(hypo_embed.detach()))
            scores = self.out(torch.cat([self.encoder(prem_embed), self.encoder(hypo_embed)], 1))
            return self.criterion(scores, batch["label"])

    return Module(), Pairs(), {}


@case("Transformer with label smoothing", "harvardnlp/annotated-transformer")
def _():
    def subsequent_mask(size):
        return torch.triu(torch.ones((1, size, size)), diagonal=1).type(torch.uint8) == 0

    class LayerNorm(nn.Module):
        def __init__(self, features, eps=1e-6):
            super().__init__()
            self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
            self.eps = eps

        def forward(self, x):
            mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
            return self.a_2 * (x - mean) / (std + self.eps) + self.b_2

    class Attention(nn.Module):
        def __init__(self, d, h=4):
            super().__init__()
            self.d_k, self.h = d // h, h
            self.linears = nn.ModuleList([nn.Linear(d, d) for _ in range(4)])
            self.attn, self.dropout = None, nn.Dropout(0.1)

        def forward(self, query, key, value, mask=None):
            if mask is not None:
                mask = mask.unsqueeze(1)
            n = query.size(0)
            query, key, value = [
                lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
                for lin, x in zip(self.linears, (query, key, value), strict=False)
            ]
            scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e9)
            x = torch.matmul(self.dropout(scores.softmax(dim=-1)), value)
            return self.linears[-1](x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))

    class Layer(nn.Module):
        def __init__(self, d, decodes):
            super().__init__()
            self.self_attn, self.src_attn = Attention(d), Attention(d) if decodes else None
            self.norms = nn.ModuleList([LayerNorm(d) for _ in range(3 if decodes else 2)])
            self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * d, d))
            self.dropout = nn.Dropout(0.1)

        def forward(self, x, mask, memory=None, src_mask=None):
            h = self.norms[0](x)
            x = x + self.dropout(self.self_attn(h, h, h, mask))
            if self.src_attn is not None:
                x = x + self.dropout(self.src_attn(self.norms[1](x), memory, memory, src_mask))
            return x + self.dropout(self.ff(self.norms[-1](x)))

    class LabelSmoothing(nn.Module):
        def __init__(self, size, padding_idx, smoothing=0.1):
            super().__init__()
            self.criterion = nn.KLDivLoss(reduction="sum")
            self.padding_idx, self.confidence, self.smoothing, self.size = padding_idx, 1 - smoothing, smoothing, size

        def forward(self, x, target):
            assert x.size(1) == self.size
            true_dist = x.data.clone()
            true_dist.fill_(self.smoothing / (self.size - 2))
            true_dist.scatter_(1, target.data.unsqueeze(1), self.confidence)
            true_dist[:, self.padding_idx] = 0
            mask = torch.nonzero(target.data == self.padding_idx)
            if mask.dim() > 0:
                true_dist.index_fill_(0, mask.squeeze(), 0.0)
            return self.criterion(x, true_dist.clone().detach())

    class Module(pl.LightningModule):
        def __init__(self, d=32):
            super().__init__()
            self.embed, self.generator = nn.Embedding(WORDS, d), nn.Linear(d, WORDS)
            pe = torch.zeros(64, d)
            position = torch.arange(0, 64).unsqueeze(1)
            div_term = torch.exp(torch.arange(0, d, 2) * -(math.log(10000.0) / d))
            pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
            self.register_buffer("pe", pe.unsqueeze(0))
            self.encoder, self.decoder = nn.ModuleList([Layer(d, False)]), nn.ModuleList([Layer(d, True)])
            self.criterion = LabelSmoothing(WORDS, 0)

        def embedded(self, x):
            return self.embed(x) * math.sqrt(32) + self.pe[:, : x.size(1)].requires_grad_(False)

        def training_step(self, batch, batch_idx):
            src, tgt = batch["src"], batch["tgt"]
            tgt, tgt_y = tgt[:, :-1], tgt[:, 1:]
            src_mask, tgt_mask = (src != 0).unsqueeze(-2), (tgt != 0).unsqueeze(-2)
            tgt_mask = tgt_mask & subsequent_mask(tgt.size(-1)).type_as(tgt_mask.data)
            memory, x = self.embedded(src), self.embedded(tgt)
            for layer in self.encoder:
                memory = layer(memory, src_mask)
            for layer in self.decoder:
                x = layer(x, tgt_mask, memory, src_mask)
            out = F.log_softmax(self.generator(x), dim=-1)
            norm = (tgt_y != 0).data.sum()
            return self.criterion(out.contiguous().view(-1, out.size(-1)), tgt_y.contiguous().view(-1)) / norm

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
            rate = lambda step: 32**-0.5 * min(max(step, 1) ** -0.5, max(step, 1) * 400**-1.5)  # noqa: E731
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=rate)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Module(), Translations(), {}


class Translations(Characters):
    """Padded pairs of sentences."""

    def __getitem__(self, i):
        src, tgt = self.ids[i, :12].clone(), self.ids[i, 12:22].clone()
        src[8 + i % 5 :] = 0
        tgt[6 + i % 5 :] = 0
        return {"src": src, "tgt": tgt}


@case("seq2seq with attention, teacher forcing", "bentrevett/pytorch-seq2seq")
def _():
    class Encoder(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.embedding, self.rnn = nn.Embedding(WORDS, d), nn.GRU(d, d, bidirectional=True)
            self.fc, self.dropout = nn.Linear(2 * d, d), nn.Dropout(0.5)

        def forward(self, src):
            outputs, hidden = self.rnn(self.dropout(self.embedding(src)))
            return outputs, torch.tanh(self.fc(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1)))

    class Attention(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.attn_fc, self.v_fc = nn.Linear(3 * d, d), nn.Linear(d, 1, bias=False)

        def forward(self, hidden, encoder_outputs):
            src_length = encoder_outputs.shape[0]
            hidden = hidden.unsqueeze(1).repeat(1, src_length, 1)
            encoder_outputs = encoder_outputs.permute(1, 0, 2)
            energy = torch.tanh(self.attn_fc(torch.cat((hidden, encoder_outputs), dim=2)))
            return torch.softmax(self.v_fc(energy).squeeze(2), dim=1)

    class Decoder(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.embedding, self.attention = nn.Embedding(WORDS, d), Attention(d)
            self.rnn, self.fc_out, self.dropout = nn.GRU(3 * d, d), nn.Linear(4 * d, WORDS), nn.Dropout(0.5)

        def forward(self, token, hidden, encoder_outputs):
            embedded = self.dropout(self.embedding(token.unsqueeze(0)))
            a = self.attention(hidden, encoder_outputs).unsqueeze(1)
            weighted = torch.bmm(a, encoder_outputs.permute(1, 0, 2)).permute(1, 0, 2)
            output, hidden = self.rnn(torch.cat((embedded, weighted), dim=2), hidden.unsqueeze(0))
            prediction = self.fc_out(torch.cat((output.squeeze(0), weighted.squeeze(0), embedded.squeeze(0)), dim=1))
            return prediction, hidden.squeeze(0)

    class Seq2Seq(Base):
        def __init__(self, d=24):
            super().__init__()
            self.encoder, self.decoder = Encoder(d), Decoder(d)
            self.criterion = nn.CrossEntropyLoss(ignore_index=0)

        def forward(self, src, trg, teacher_forcing_ratio=0.5):
            batch_size, trg_length = src.shape[1], trg.shape[0]
            outputs = torch.zeros(trg_length, batch_size, WORDS).to(self.device)
            encoder_outputs, hidden = self.encoder(src)
            token = trg[0, :]
            for t in range(1, trg_length):
                output, hidden = self.decoder(token, hidden, encoder_outputs)
                outputs[t] = output
                teacher_force = random.random() < teacher_forcing_ratio
                token = trg[t] if teacher_force else output.argmax(1)
            return outputs

        def training_step(self, batch, batch_idx):
            src, trg = batch["src"].t(), batch["tgt"].t()
            output = self(src, trg)[1:].view(-1, WORDS)
            return self.criterion(output, trg[1:].reshape(-1))

    return Seq2Seq(), Translations(), {}


@case("sentiment CNN", "bentrevett/pytorch-sentiment-analysis")
def _():
    class Cnn(Base):
        def __init__(self, d=32, filters=16, sizes=(3, 4, 5)):
            super().__init__()
            self.embedding = nn.Embedding(WORDS, d, padding_idx=0)
            self.convs = nn.ModuleList([nn.Conv2d(1, filters, (size, d)) for size in sizes])
            self.fc, self.dropout = nn.Linear(len(sizes) * filters, 1), nn.Dropout(0.5)
            self.criterion = nn.BCEWithLogitsLoss()

        def training_step(self, batch, batch_idx):
            embedded = self.embedding(batch["input_ids"]).unsqueeze(1)
            conved = [F.relu(conv(embedded)).squeeze(3) for conv in self.convs]
            pooled = [F.max_pool1d(conv, conv.shape[2]).squeeze(2) for conv in conved]
            predictions = self.fc(self.dropout(torch.cat(pooled, dim=1))).squeeze(1)
            acc = (torch.round(torch.sigmoid(predictions)) == batch["labels"]).float().mean()
            self.log("train_acc", acc)
            return self.criterion(predictions, batch["labels"].float())

    return Cnn(), Text(), {"collate_fn": pad_fixed}


@case("N-BEATS", "philipperemy/n-beats")
def _():
    class Block(nn.Module):
        def __init__(self, kind, units=32, backcast_length=30, forecast_length=10, theta=4):
            super().__init__()
            self.kind = kind
            self.fc1, self.fc2 = nn.Linear(backcast_length, units), nn.Linear(units, units)
            self.fc3, self.fc4 = nn.Linear(units, units), nn.Linear(units, units)
            self.theta_b_fc, self.theta_f_fc = nn.Linear(units, theta, bias=False), nn.Linear(units, theta, bias=False)
            self.backcast_linspace = torch.arange(backcast_length) / backcast_length
            self.forecast_linspace = torch.arange(forecast_length) / forecast_length
            if kind == "generic":
                self.backcast_fc = nn.Linear(theta, backcast_length)
                self.forecast_fc = nn.Linear(theta, forecast_length)

        def basis(self, thetas, t):
            p = thetas.shape[-1]
            if self.kind == "trend":
                return thetas.mm(torch.stack([t**i for i in range(p)]).to(thetas.device))
            s1 = torch.stack([torch.cos(2 * math.pi * i * t) for i in range(p // 2)])
            s2 = torch.stack([torch.sin(2 * math.pi * i * t) for i in range(p - p // 2)])
            return thetas.mm(torch.cat([s1, s2]).to(thetas.device))

        def forward(self, x):
            x = F.relu(self.fc1(x.to(self.fc1.weight.device)))
            x = F.relu(self.fc4(F.relu(self.fc3(F.relu(self.fc2(x))))))
            b, f = self.theta_b_fc(x), self.theta_f_fc(x)
            if self.kind == "generic":
                return self.backcast_fc(b), self.forecast_fc(f)
            return self.basis(b, self.backcast_linspace), self.basis(f, self.forecast_linspace)

    class NBeats(Base):
        def __init__(self):
            super().__init__()
            self.stacks = nn.ModuleList([Block(kind) for kind in ("trend", "trend", "seasonality", "generic")])

        def training_step(self, batch, batch_idx):
            backcast, target = batch[0][:, :30], batch[0][:, 30:]
            forecast = torch.zeros(size=(backcast.size()[0], 10))
            for block in self.stacks:
                b, f = block(backcast)
                backcast = backcast.to(self.device) - b
                forecast = forecast.to(self.device) + f
            return F.mse_loss(forecast, target)

    return NBeats(), Rows(40), {}


@case("Temporal Fusion Transformer", "jdb78/pytorch-forecasting")
def _():
    class GatedResidual(nn.Module):
        def __init__(self, a, d, context=False):
            super().__init__()
            self.fc1, self.elu, self.fc2 = nn.Linear(a, d), nn.ELU(), nn.Linear(d, d)
            self.context = nn.Linear(d, d, bias=False) if context else None
            self.skip = nn.Linear(a, d) if a != d else nn.Identity()
            self.glu, self.dropout, self.norm = nn.Linear(d, 2 * d), nn.Dropout(0.1), nn.LayerNorm(d)

        def forward(self, x, context=None):
            h = self.fc1(x)
            if context is not None:
                h = h + self.context(context)
            h = F.glu(self.glu(self.dropout(self.fc2(self.elu(h)))), dim=-1)
            return self.norm(h + self.skip(x))

    class Selection(nn.Module):
        def __init__(self, k, d):
            super().__init__()
            self.single = nn.ModuleList([GatedResidual(d, d) for _ in range(k)])
            self.flattened, self.weights = GatedResidual(k * d, d, context=True), nn.Linear(d, k)

        def forward(self, x, context):
            outputs = torch.stack([grn(x[..., i, :]) for i, grn in enumerate(self.single)], dim=-1)
            weights = self.weights(self.flattened(x.flatten(-2), context[:, None])).softmax(-1).unsqueeze(-2)
            return (outputs * weights).sum(-1)

    class Tft(pl.LightningModule):
        def __init__(self, d=16, k=4, encoder_length=16):
            super().__init__()
            self.encoder_length, self.hidden_size = encoder_length, d
            self.prescalers = nn.ModuleList([nn.Linear(1, d) for _ in range(k)])
            self.static = nn.Embedding(10, d)
            self.encoder_selection, self.decoder_selection = Selection(k, d), Selection(k, d)
            self.lstm_encoder = nn.LSTM(d, d, batch_first=True)
            self.lstm_decoder = nn.LSTM(d, d, batch_first=True)
            self.attention = nn.MultiheadAttention(d, 4, batch_first=True, dropout=0.1)
            self.post, self.output_layer = GatedResidual(d, d), nn.Linear(d, 7)
            self.quantiles = [0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98]

        def loss_of(self, batch):
            x, y = batch
            static = self.static(y)
            inputs = torch.stack([layer(x[..., i : i + 1]) for i, layer in enumerate(self.prescalers)], dim=-2)
            encoded = self.encoder_selection(inputs[:, : self.encoder_length], static)
            decoded = self.decoder_selection(inputs[:, self.encoder_length :], static)
            encoder_output, state = self.lstm_encoder(encoded, (static[None].contiguous(), static[None].contiguous()))
            decoder_output, _ = self.lstm_decoder(decoded, state)
            h = torch.cat([encoder_output, decoder_output], dim=1)
            t = h.shape[1] - self.encoder_length
            mask = torch.arange(h.shape[1])[None] > torch.arange(t)[:, None] + self.encoder_length
            attended, _weights = self.attention(h[:, self.encoder_length :], h, h, attn_mask=mask)
            y_pred = self.output_layer(self.post(attended + decoder_output))
            target = x[:, self.encoder_length :, 0]
            losses = []
            for i, q in enumerate(self.quantiles):
                errors = target - y_pred[..., i]
                losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(-1))
            return torch.cat(losses, dim=2).mean()

        def training_step(self, batch, batch_idx):
            loss = self.loss_of(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss_of(batch))

        def val_dataloader(self):
            return DataLoader(Subset(Rows(24, 4, classes=10), range(64)), 32)

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=3e-2)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    return Tft(), Rows(24, 4, classes=10), {}


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


@case("Informer, ProbSparse attention", "zhouhaoyi/Informer2020")
def _():
    class ProbAttention(nn.Module):
        def __init__(self, factor=2):
            super().__init__()
            self.factor = factor

        def forward(self, q, k, v):
            b, h, length, e = q.shape
            samples = min(self.factor * math.ceil(math.log(length)), length)
            expanded = k.unsqueeze(-3).expand(b, h, length, length, e)
            index_sample = torch.randint(length, (length, samples))
            k_sample = expanded[:, :, torch.arange(length).unsqueeze(1), index_sample, :]
            q_k_sample = torch.matmul(q.unsqueeze(-2), k_sample.transpose(-2, -1)).squeeze(-2)
            m = q_k_sample.max(-1)[0] - torch.div(q_k_sample.sum(-1), length)
            top = m.topk(samples, sorted=False)[1]
            batches, heads = torch.arange(b)[:, None, None], torch.arange(h)[None, :, None]
            q_reduce = q[batches, heads, top, :]
            scores = torch.matmul(q_reduce, k.transpose(-2, -1)) / math.sqrt(e)
            context = v.mean(dim=-2).unsqueeze(-2).expand(b, h, length, v.shape[-1]).clone()
            context[batches, heads, top, :] = torch.matmul(torch.softmax(scores, dim=-1), v).type_as(context)
            return context

    class Layer(nn.Module):
        def __init__(self, d, heads=4):
            super().__init__()
            self.heads, self.inner = heads, ProbAttention()
            self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
            self.conv1, self.conv2 = nn.Conv1d(d, 2 * d, 1), nn.Conv1d(2 * d, d, 1)
            self.norm1, self.norm2, self.dropout = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(0.05)

        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
            x = x + self.dropout(self.out(self.inner(q, k, v).transpose(1, 2).flatten(2)))
            y = x = self.norm1(x)
            y = self.dropout(F.gelu(self.conv1(y.transpose(-1, 1))))
            return self.norm2(x + self.dropout(self.conv2(y).transpose(-1, 1)))

    class Informer(Base):
        def __init__(self, d=32):
            super().__init__()
            self.token = nn.Conv1d(7, d, 3, padding=1, padding_mode="circular", bias=False)
            self.layers, self.projection = nn.ModuleList([Layer(d), Layer(d)]), nn.Linear(d, 7)

        def training_step(self, batch, batch_idx):
            x, y = batch[0][:, :24], batch[0][:, 24:]
            h = self.token(x.permute(0, 2, 1)).transpose(1, 2)
            for layer in self.layers:
                h = layer(h)
            return F.mse_loss(self.projection(h)[:, -12:], y)

    return Informer(), Rows(36, 7), {}


@case("SASRec", "pmixer/SASRec.pytorch")
def _():
    class Histories(Characters):
        def __getitem__(self, i):
            length = 4 + i % 12
            seq, pos = torch.zeros(16, dtype=torch.long), torch.zeros(16, dtype=torch.long)
            seq[-length:], pos[-length:] = self.ids[i, :length], self.ids[i, 1 : length + 1]
            return seq, pos, self.ids[(i + 1) % N, :16] * (pos != 0)

    class SasRec(pl.LightningModule):
        def __init__(self, d=32):
            super().__init__()
            self.item_emb, self.pos_emb = nn.Embedding(WORDS + 1, d, padding_idx=0), nn.Embedding(17, d, padding_idx=0)
            self.emb_dropout = nn.Dropout(p=0.2)
            self.attention_layernorms = nn.ModuleList([nn.LayerNorm(d, eps=1e-8) for _ in range(2)])
            self.attention_layers = nn.ModuleList([nn.MultiheadAttention(d, 1, 0.2) for _ in range(2)])
            self.forward_layernorms = nn.ModuleList([nn.LayerNorm(d, eps=1e-8) for _ in range(2)])
            self.conv1 = nn.ModuleList([nn.Conv1d(d, d, kernel_size=1) for _ in range(2)])
            self.conv2 = nn.ModuleList([nn.Conv1d(d, d, kernel_size=1) for _ in range(2)])
            self.last_layernorm = nn.LayerNorm(d, eps=1e-8)
            self.bce_criterion = nn.BCEWithLogitsLoss()

        def log2feats(self, log_seqs):
            seqs = self.item_emb(log_seqs)
            seqs *= self.item_emb.embedding_dim**0.5
            poss = torch.arange(1, log_seqs.shape[1] + 1).repeat(log_seqs.shape[0], 1)
            poss = poss * (log_seqs != 0)
            seqs = self.emb_dropout(seqs + self.pos_emb(poss))
            tl = seqs.shape[1]
            attention_mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool))
            for i in range(len(self.attention_layers)):
                seqs = torch.transpose(seqs, 0, 1)
                q = self.attention_layernorms[i](seqs)
                mha_outputs, _ = self.attention_layers[i](q, seqs, seqs, attn_mask=attention_mask)
                seqs = torch.transpose(q + mha_outputs, 0, 1)
                seqs = self.forward_layernorms[i](seqs)
                outputs = self.conv2[i](F.relu(self.conv1[i](seqs.transpose(-1, -2)))).transpose(-1, -2)
                seqs = outputs + seqs
            return self.last_layernorm(seqs)

        def training_step(self, batch, batch_idx):
            seq, pos, neg = batch
            log_feats = self.log2feats(seq)
            pos_logits = (log_feats * self.item_emb(pos)).sum(dim=-1)
            neg_logits = (log_feats * self.item_emb(neg)).sum(dim=-1)
            indices = torch.where(pos != 0)
            loss = self.bce_criterion(pos_logits[indices], torch.ones_like(pos_logits)[indices])
            loss += self.bce_criterion(neg_logits[indices], torch.zeros_like(neg_logits)[indices])
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3, betas=(0.9, 0.98))

    return SasRec(), Histories(), {}


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
