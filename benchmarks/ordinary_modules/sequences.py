"""Sequences of symbols, by modules written by hand."""

import math

import pytorch_lightning as pl
import torch
from ordinary import N, case
from records import WORDS, Base, Records, T, Text, characters, columns, padded, seeded
from torch import nn
from torch.nn import functional as F


@case("makemore, GRU cell", "karpathy/makemore")
def _():
    class Cell(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.xh_to_z, self.xh_to_r, self.xh_to_hbar = (nn.Linear(a + b, b) for _ in range(3))

        def forward(self, x, h):
            both = torch.cat([x, h], dim=1)
            reset = F.sigmoid(self.xh_to_r(both))
            candidate = F.tanh(self.xh_to_hbar(torch.cat([x, reset * h], dim=1)))
            update = F.sigmoid(self.xh_to_z(both))
            return (1 - update) * h + update * candidate

    class Makemore(pl.LightningModule):
        def __init__(self, d=32):
            super().__init__()
            self.start, self.wte = nn.Parameter(torch.zeros(1, d)), nn.Embedding(27, d)
            self.cell, self.lm_head = Cell(d, d), nn.Linear(d, 27)

        def training_step(self, batch, batch_idx):
            idx, targets = batch
            embedded, h = self.wte(idx), self.start.expand((idx.size(0), -1))
            states = []
            for i in range(idx.size(1)):
                h = self.cell(embedded[:, i, :], h)
                states.append(h)
            logits = self.lm_head(torch.stack(states, 1))
            return F.cross_entropy(logits.view(-1, 27), targets.view(-1), ignore_index=-1)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=5e-4, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8)

    g = seeded()
    words = [torch.randint(1, 27, (int(n),), generator=g) for n in torch.randint(3, 10, (N,), generator=g)]

    def shifted(i):
        """A word after a start token, and the same shifted; targets past the end are -1."""
        word, x, y = words[i], torch.zeros(10, dtype=torch.long), torch.zeros(10, dtype=torch.long)
        x[1 : 1 + len(word)] = word
        y[: len(word)] = word
        y[len(word) + 1 :] = -1
        return x, y

    return Makemore(), Records(shifted), {}


@case("word language model, LSTM", "pytorch/examples word_language_model")
def _():
    def time_first(items):
        pieces = torch.stack(items, dim=1)
        return pieces[:-1], pieces[1:].reshape(-1)

    def repackage(h):
        return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage(v) for v in h)

    class Lstm(pl.LightningModule):
        def __init__(self, d=32, layers=2, dropout=0.2):
            super().__init__()
            self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(WORDS, d)
            self.rnn, self.decoder = nn.LSTM(d, d, layers, dropout=dropout), nn.Linear(d, WORDS)
            self.d, self.layers, self.hidden = d, layers, None
            nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
            nn.init.zeros_(self.decoder.bias)
            nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

        def init_hidden(self, size):
            weight = next(self.parameters())
            return weight.new_zeros(self.layers, size, self.d), weight.new_zeros(self.layers, size, self.d)

        def on_train_epoch_start(self):
            self.hidden = None

        def training_step(self, batch, batch_idx):
            data, targets = batch
            # The state goes on from batch to batch, as in the original.
            hidden = self.init_hidden(data.size(1)) if self.hidden is None else repackage(self.hidden)
            output, self.hidden = self.rnn(self.drop(self.encoder(data)), hidden)
            decoded = self.decoder(self.drop(output)).view(-1, WORDS)
            loss = F.nll_loss(F.log_softmax(decoded, dim=1), targets)
            self.log("ppl", math.exp(loss.item()))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=20)

    return Lstm(), characters(12, lambda ids: ids), {"collate_fn": time_first}


class CausalSelfAttention(nn.Module):
    def __init__(self, d, n_head, dropout):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.resid_dropout, self.n_head, self.n_embd, self.dropout = nn.Dropout(dropout), n_head, d, dropout

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
        self.ln_1, self.ln_2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.attn = CausalSelfAttention(d, 4, dropout)
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
                "ln_f": nn.LayerNorm(d, bias=False),
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
        return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))


@case("nanoGPT", "karpathy/nanoGPT")
def _():

    return Gpt(), characters(), {}


def pad_tagged(items):
    sentences, _ = columns(items)
    ids = padded(sentences)
    return ids, padded([sentence % 5 for sentence in sentences]), ids > 0


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


@case("deep knowledge tracing", "pykt-team/pykt-toolkit")
def _():
    answers = characters(16, lambda ids: ids[:16])

    def record(i):
        return answers[i] % 20, answers[i] % 2, torch.arange(16) < 6 + i % 10

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

    return Dkt(), Records(record), {}
