"""Sequences and text, closer to their sources than the modules of the same names in sequences.py and text.py."""

import copy
import math
import random
import warnings

import numpy as np
import pytorch_lightning as pl
import torch
import transformers
from ordinary import GROUP_NORM, N, case
from peft import LoraConfig, get_peft_model
from steps import WORDS, Base, Rows, Text, Tuned, bert, pad
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torchmetrics import Metric


class Names:
    """Words of 3 to 9 letters after a start token, and the same shifted; targets past the end are -1."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.words = [torch.randint(1, 27, (int(n),), generator=g) for n in torch.randint(3, 10, (N,), generator=g)]

    def __len__(self):
        return N

    def __getitem__(self, i):
        word = self.words[i]
        x, y = torch.zeros(10, dtype=torch.long), torch.zeros(10, dtype=torch.long)
        x[1 : 1 + len(word)] = word
        y[: len(word)] = word
        y[len(word) + 1 :] = -1
        return x, y


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

    return Makemore(), Names(), {}


class Stream:
    """Pieces of 12 words and the word after each."""

    def __init__(self):
        self.ids = torch.randint(WORDS, (N, 13), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.ids[i]


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

    return Lstm(), Stream(), {"collate_fn": time_first}


@case("LSTM cells, sine waves", "pytorch/examples time_sequence_prediction")
def _():
    class Waves:
        def __init__(self):
            shift = torch.randint(-80, 80, (N, 1), generator=torch.Generator().manual_seed(0))
            self.x = torch.sin((torch.arange(12) + shift) / 2.0).double()

        def __len__(self):
            return N

        def __getitem__(self, i):
            return self.x[i, :-1], self.x[i, 1:]

    class Sequence(pl.LightningModule):
        def __init__(self, d=16):
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, d), nn.LSTMCell(d, d), nn.Linear(d, 1)
            self.d, self.criterion = d, nn.MSELoss()
            self.double()

        def forward(self, x, future=0):
            outputs = []
            h1, c1, h2, c2 = (torch.zeros(x.size(0), self.d, dtype=torch.double, device=x.device) for _ in range(4))
            for now in x.split(1, dim=1):
                h1, c1 = self.lstm1(now, (h1, c1))
                h2, c2 = self.lstm2(h1, (h2, c2))
                output = self.linear(h2)
                outputs += [output]
            for _ in range(future):
                h1, c1 = self.lstm1(output, (h1, c1))
                h2, c2 = self.lstm2(h1, (h2, c2))
                output = self.linear(h2)
                outputs += [output]
            return torch.cat(outputs, dim=1)

        def training_step(self, batch, batch_idx):
            return self.criterion(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.8)

    return Sequence(), Waves(), {}


class SentencePairs(Text):
    """Two sentences each, not padded."""

    def __getitem__(self, i):
        return self.ids[i], self.ids[(i + 1) % N], self.y[i]


@case("SNLI classifier", "pytorch/examples snli")
def _():
    class Bottle(nn.Module):
        def forward(self, x):
            if len(x.size()) <= 2:
                return super().forward(x)
            t, b = x.size()[:2]
            return super().forward(x.view(t * b, -1)).view(t, b, -1)

    class Linear(Bottle, nn.Linear):
        pass

    class Encoder(nn.Module):
        def __init__(self, d_in, d):
            super().__init__()
            self.d, self.rnn = d, nn.LSTM(input_size=d_in, hidden_size=d, num_layers=1, dropout=0, bidirectional=True)

        def forward(self, x):
            size = x.size()[1]
            h0 = c0 = x.new_zeros((2, size, self.d))
            _, (ht, _) = self.rnn(x, (h0, c0))
            return ht[-2:].transpose(0, 1).contiguous().view(size, -1)

    class Classifier(Base):
        def __init__(self, d=24):
            super().__init__()
            self.embed, self.projection, self.encoder = nn.Embedding(WORDS, 32), Linear(32, 32), Encoder(32, d)
            self.dropout, self.relu = nn.Dropout(p=0.2), nn.ReLU()
            hidden = [4 * d] * 2
            self.out = nn.Sequential(
                Linear(*hidden), self.relu, self.dropout,
                Linear(*hidden), self.relu, self.dropout,
                Linear(*hidden), self.relu, self.dropout,
                Linear(4 * d, 3),
            )  # fmt: skip
            self.criterion = nn.CrossEntropyLoss()

        def forward(self, premise, hypothesis):
            both = [self.embed(x).detach() for x in (premise, hypothesis)]
            both = [self.relu(self.projection(x)) for x in both]
            return self.out(torch.cat([self.encoder(x) for x in both], 1))

        def training_step(self, batch, batch_idx):
            premise, hypothesis, label = batch
            answer = self(premise, hypothesis)
            correct = (torch.max(answer, 1)[1].view(label.size()) == label).sum()
            self.log("train_acc", 100.0 * correct / label.numel())
            return self.criterion(answer, label)

    def time_first(items):
        a, b, y = zip(*items, strict=True)
        return pad_sequence(a, padding_value=1), pad_sequence(b, padding_value=1), torch.stack(y)

    return Classifier(), SentencePairs(), {"collate_fn": time_first}


@case("Transformer with label smoothing", "harvardnlp/annotated-transformer")
def _():
    def clones(module, n):
        return nn.ModuleList([copy.deepcopy(module) for _ in range(n)])

    def attention(query, key, value, mask=None, dropout=None):
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        p_attn = scores.softmax(dim=-1)
        if dropout is not None:
            p_attn = dropout(p_attn)
        return torch.matmul(p_attn, value), p_attn

    class LayerNorm(nn.Module):
        def __init__(self, features, eps=1e-6):
            super().__init__()
            self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
            self.eps = eps

        def forward(self, x):
            mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
            return self.a_2 * (x - mean) / (std + self.eps) + self.b_2

    class Sublayer(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.norm, self.dropout = LayerNorm(d), nn.Dropout(0.1)

        def forward(self, x, sublayer):
            return x + self.dropout(sublayer(self.norm(x)))

    class Heads(nn.Module):
        def __init__(self, h, d):
            super().__init__()
            self.d_k, self.h, self.linears = d // h, h, clones(nn.Linear(d, d), 4)
            self.attn, self.dropout = None, nn.Dropout(p=0.1)

        def forward(self, query, key, value, mask=None):
            if mask is not None:
                mask = mask.unsqueeze(1)
            n = query.size(0)
            query, key, value = [
                f(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
                for f, x in zip(self.linears, (query, key, value), strict=False)
            ]
            x, self.attn = attention(query, key, value, mask=mask, dropout=self.dropout)
            return self.linears[-1](x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))

    class FeedForward(nn.Module):
        def __init__(self, d, d_ff):
            super().__init__()
            self.w_1, self.w_2, self.dropout = nn.Linear(d, d_ff), nn.Linear(d_ff, d), nn.Dropout(0.1)

        def forward(self, x):
            return self.w_2(self.dropout(self.w_1(x).relu()))

    class EncoderLayer(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.self_attn, self.feed_forward, self.sublayer = Heads(4, d), FeedForward(d, 64), clones(Sublayer(d), 2)

        def forward(self, x, mask):
            x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
            return self.sublayer[1](x, self.feed_forward)

    class DecoderLayer(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.self_attn, self.src_attn, self.feed_forward = Heads(4, d), Heads(4, d), FeedForward(d, 64)
            self.sublayer = clones(Sublayer(d), 3)

        def forward(self, x, memory, src_mask, tgt_mask):
            x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
            x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
            return self.sublayer[2](x, self.feed_forward)

    class Stack(nn.Module):
        def __init__(self, layer, d, n=2):
            super().__init__()
            self.layers, self.norm = clones(layer, n), LayerNorm(d)

        def forward(self, x, *others):
            for layer in self.layers:
                x = layer(x, *others)
            return self.norm(x)

    class Embeddings(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.lut, self.d = nn.Embedding(WORDS, d), d

        def forward(self, x):
            return self.lut(x) * math.sqrt(self.d)

    class Positions(nn.Module):
        def __init__(self, d, longest=64):
            super().__init__()
            pe, position = torch.zeros(longest, d), torch.arange(0, longest).unsqueeze(1)
            rate = torch.exp(torch.arange(0, d, 2) * -(math.log(10000.0) / d))
            pe[:, 0::2], pe[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
            self.dropout = nn.Dropout(p=0.1)
            self.register_buffer("pe", pe.unsqueeze(0))

        def forward(self, x):
            return self.dropout(x + self.pe[:, : x.size(1)].requires_grad_(False))

    class LabelSmoothing(nn.Module):
        def __init__(self, size, padding_idx, smoothing):
            super().__init__()
            self.criterion, self.padding_idx = nn.KLDivLoss(reduction="sum"), padding_idx
            self.confidence, self.smoothing, self.size, self.true_dist = 1.0 - smoothing, smoothing, size, None

        def forward(self, x, target):
            assert x.size(1) == self.size
            wanted = x.data.clone()
            wanted.fill_(self.smoothing / (self.size - 2))
            wanted.scatter_(1, target.data.unsqueeze(1), self.confidence)
            wanted[:, self.padding_idx] = 0
            mask = torch.nonzero(target.data == self.padding_idx)
            if mask.dim() > 0:
                wanted.index_fill_(0, mask.squeeze(), 0.0)
            self.true_dist = wanted
            return self.criterion(x, wanted.clone().detach())

    def rate(step, d=32, warmup=400):
        step = max(step, 1)
        return d**-0.5 * min(step**-0.5, step * warmup**-1.5)

    class Translator(pl.LightningModule):
        def __init__(self, d=32):
            super().__init__()
            self.encoder, self.decoder = Stack(EncoderLayer(d), d), Stack(DecoderLayer(d), d)
            position = Positions(d)
            self.src_embed = nn.Sequential(Embeddings(d), copy.deepcopy(position))
            self.tgt_embed = nn.Sequential(Embeddings(d), copy.deepcopy(position))
            self.generator, self.criterion = nn.Linear(d, WORDS), LabelSmoothing(WORDS, 0, 0.1)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.xavier_uniform_(p)

        def training_step(self, batch, batch_idx):
            src, tgt = batch
            tgt, tgt_y = tgt[:, :-1], tgt[:, 1:]
            src_mask, tgt_mask = (src != 0).unsqueeze(-2), (tgt != 0).unsqueeze(-2)
            future = torch.triu(torch.ones((1, tgt.size(-1), tgt.size(-1))), diagonal=1).type(torch.uint8)
            tgt_mask = tgt_mask & (future == 0).type_as(tgt_mask.data)
            memory = self.encoder(self.src_embed(src), src_mask)
            x = F.log_softmax(self.generator(self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)), dim=-1)
            norm = (tgt_y != 0).data.sum()
            loss = self.criterion(x.contiguous().view(-1, x.size(-1)), tgt_y.contiguous().view(-1)) / norm
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=rate)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def pad_to_length(items):
        sources, targets = [], []
        for a, b, _ in items:
            a, b = (torch.cat([torch.tensor([1]), x[:10], torch.tensor([2])]) for x in (a, b))
            sources.append(F.pad(a, (0, 16 - len(a)), value=0))
            targets.append(F.pad(b, (0, 16 - len(b)), value=0))
        return torch.stack(sources), torch.stack(targets)

    return Translator(), SentencePairs(low=5, high=15), {"collate_fn": pad_to_length}


@case("seq2seq with attention, teacher forcing", "bentrevett/pytorch-seq2seq")
def _():
    class Encoder(nn.Module):
        def __init__(self, d, hidden):
            super().__init__()
            self.embedding, self.rnn = nn.Embedding(WORDS, d), nn.GRU(d, hidden, bidirectional=True)
            self.fc, self.dropout = nn.Linear(2 * hidden, hidden), nn.Dropout(0.5)

        def forward(self, src):
            outputs, hidden = self.rnn(self.dropout(self.embedding(src)))
            return outputs, torch.tanh(self.fc(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1)))

    class Attention(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.attn, self.v = nn.Linear(3 * hidden, hidden), nn.Linear(hidden, 1, bias=False)

        def forward(self, hidden, encoded):
            hidden = hidden.unsqueeze(1).repeat(1, encoded.shape[0], 1)
            energy = torch.tanh(self.attn(torch.cat((hidden, encoded.permute(1, 0, 2)), dim=2)))
            return F.softmax(self.v(energy).squeeze(2), dim=1)

    class Decoder(nn.Module):
        def __init__(self, d, hidden):
            super().__init__()
            self.attention, self.embedding = Attention(hidden), nn.Embedding(WORDS, d)
            self.rnn, self.fc_out = nn.GRU(2 * hidden + d, hidden), nn.Linear(3 * hidden + d, WORDS)
            self.dropout = nn.Dropout(0.5)

        def forward(self, word, hidden, encoded):
            embedded = self.dropout(self.embedding(word.unsqueeze(0)))
            a = self.attention(hidden, encoded).unsqueeze(1)
            weighted = torch.bmm(a, encoded.permute(1, 0, 2)).permute(1, 0, 2)
            output, hidden = self.rnn(torch.cat((embedded, weighted), dim=2), hidden.unsqueeze(0))
            assert (output == hidden).all()
            parts = (output.squeeze(0), weighted.squeeze(0), embedded.squeeze(0))
            return self.fc_out(torch.cat(parts, dim=1)), hidden.squeeze(0)

    class Seq2Seq(Base):
        def __init__(self, d=24, hidden=24):
            super().__init__()
            self.encoder, self.decoder = Encoder(d, hidden), Decoder(d, hidden)
            self.criterion = nn.CrossEntropyLoss(ignore_index=0)
            for name, param in self.named_parameters():
                if "weight" in name:
                    nn.init.normal_(param.data, mean=0, std=0.01)
                else:
                    nn.init.constant_(param.data, 0)

        def forward(self, src, trg, teacher_forcing_ratio=0.5):
            length, size = trg.shape
            outputs = torch.zeros(length, size, WORDS).to(self.device)
            encoded, hidden = self.encoder(src)
            word = trg[0, :]
            for t in range(1, length):
                output, hidden = self.decoder(word, hidden, encoded)
                outputs[t] = output
                forced = random.random() < teacher_forcing_ratio
                best = output.argmax(1)
                word = trg[t] if forced else best
            return outputs

        def training_step(self, batch, batch_idx):
            src, trg = batch
            output = self(src, trg)
            return self.criterion(output[1:].view(-1, output.shape[-1]), trg[1:].view(-1))

    def time_first(items):
        a, b, _ = zip(*items, strict=True)
        return pad_sequence(a), pad_sequence(b)

    return Seq2Seq(), SentencePairs(low=5, high=11), {"collate_fn": time_first}


@case("sentiment CNN", "bentrevett/pytorch-sentiment-analysis")
def _():
    class Cnn(Base):
        def __init__(self, d=32, filters=16, sizes=(3, 4, 5)):
            super().__init__()
            self.embedding = nn.Embedding(WORDS, d, padding_idx=0)
            self.embedding.weight.data[0] = torch.zeros(d)
            self.convs = nn.ModuleList([nn.Conv2d(1, filters, kernel_size=(size, d)) for size in sizes])
            self.fc, self.dropout = nn.Linear(len(sizes) * filters, 1), nn.Dropout(0.5)
            self.criterion = nn.BCEWithLogitsLoss()

        def forward(self, text):
            embedded = self.embedding(text.permute(1, 0)).unsqueeze(1)
            conved = [F.relu(conv(embedded)).squeeze(3) for conv in self.convs]
            pooled = [F.max_pool1d(x, x.shape[2]).squeeze(2) for x in conved]
            return self.fc(self.dropout(torch.cat(pooled, dim=1)))

        def training_step(self, batch, batch_idx):
            text, label = batch
            predictions = self(text).squeeze(1)
            correct = (torch.round(torch.sigmoid(predictions)) == label).float()
            self.log("train_acc", (correct.sum() / len(correct)).item())
            return self.criterion(predictions, label)

    def time_first(items):
        labels = torch.stack([item["labels"] for item in items]).float()
        return pad_sequence([item["input_ids"] for item in items]), labels

    return Cnn(), Text(), {"collate_fn": time_first}


@case("N-BEATS", "philipperemy/n-beats")
def _():
    def seasonality(thetas, t, device):
        p = thetas.size()[-1]
        p1, p2 = (p // 2, p // 2) if p % 2 == 0 else (p // 2, p // 2 + 1)
        s1 = torch.tensor(np.array([np.cos(2 * np.pi * i * t) for i in range(p1)])).float()
        s2 = torch.tensor(np.array([np.sin(2 * np.pi * i * t) for i in range(p2)])).float()
        return thetas.mm(torch.cat([s1, s2]).to(device))

    def trend(thetas, t, device):
        p = thetas.size()[-1]
        assert p <= 4, "thetas_dim is too big."
        return thetas.mm(torch.tensor(np.array([t**i for i in range(p)])).float().to(device))

    class Block(nn.Module):
        def __init__(self, units, thetas, device, backcast, forecast, share_thetas=False):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(backcast, units), nn.Linear(units, units)
            self.fc3, self.fc4 = nn.Linear(units, units), nn.Linear(units, units)
            self.device = device
            line = np.arange(-backcast, forecast, 1) / forecast
            self.backcast_linspace, self.forecast_linspace = line[:backcast], line[backcast:]
            if share_thetas:
                self.theta_f_fc = self.theta_b_fc = nn.Linear(units, thetas, bias=False)
            else:
                self.theta_b_fc, self.theta_f_fc = (nn.Linear(units, thetas, bias=False) for _ in range(2))

        def forward(self, x):
            x = F.relu(self.fc1(x.to(self.device)))
            x = F.relu(self.fc2(x))
            x = F.relu(self.fc3(x))
            return F.relu(self.fc4(x))

    class SeasonalityBlock(Block):
        def __init__(self, units, thetas, device, backcast, forecast):
            super().__init__(units, forecast, device, backcast, forecast, share_thetas=True)

        def forward(self, x):
            x = super().forward(x)
            back = seasonality(self.theta_b_fc(x), self.backcast_linspace, self.device)
            return back, seasonality(self.theta_f_fc(x), self.forecast_linspace, self.device)

    class TrendBlock(Block):
        def __init__(self, units, thetas, device, backcast, forecast):
            super().__init__(units, thetas, device, backcast, forecast, share_thetas=True)

        def forward(self, x):
            x = super().forward(x)
            back = trend(self.theta_b_fc(x), self.backcast_linspace, self.device)
            return back, trend(self.theta_f_fc(x), self.forecast_linspace, self.device)

    class GenericBlock(Block):
        def __init__(self, units, thetas, device, backcast, forecast):
            super().__init__(units, thetas, device, backcast, forecast)
            self.backcast_fc, self.forecast_fc = nn.Linear(thetas, backcast), nn.Linear(thetas, forecast)

        def forward(self, x):
            x = super().forward(x)
            return self.backcast_fc(self.theta_b_fc(x)), self.forecast_fc(self.theta_f_fc(x))

    class Net(nn.Module):
        def __init__(self, kinds, thetas, backcast=10, forecast=5, units=32, blocks=2):
            super().__init__()
            self.forecast_length, self.device = forecast, torch.device("cpu")
            # The blocks stand in a plain list, and their parameters in a list named as the method: as in the original.
            self.stacks, self.parameters = [], []
            for kind, dim in zip(kinds, thetas, strict=True):
                stack = []
                for _ in range(blocks):
                    block = kind(units, dim, self.device, backcast, forecast)
                    self.parameters.extend(block.parameters())
                    stack.append(block)
                self.stacks.append(stack)
            self.parameters = nn.ParameterList(self.parameters)

        def forward(self, backcast):
            if len(backcast.shape) == 3 and backcast.shape[-1] == 1:
                backcast = backcast[..., 0]
            forecast = torch.zeros(size=(backcast.size()[0], self.forecast_length))
            for stack in self.stacks:
                for block in stack:
                    b, f = block(backcast)
                    backcast = backcast.to(self.device) - b
                    forecast = forecast.to(self.device) + f
            return backcast, forecast

    class NBeats(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net((TrendBlock, SeasonalityBlock, GenericBlock), (4, 8, 4))

        def training_step(self, batch, batch_idx):
            series = batch[0]
            _, forecast = self.net(series[:, :10].unsqueeze(-1))
            return F.mse_loss(forecast, series[:, 10:])

        def configure_optimizers(self):
            return torch.optim.Adam(lr=1e-4, params=self.parameters())

    return NBeats(), Rows(15), {}


@case("Temporal Fusion Transformer", "jdb78/pytorch-forecasting")
def _():
    def create_mask(size, lengths):
        return torch.arange(size, device=lengths.device).unsqueeze(0) >= lengths.unsqueeze(-1)

    class Interpolation(nn.Module):
        def __init__(self, output_size):
            super().__init__()
            self.output_size, self.mask = output_size, nn.Parameter(torch.zeros(output_size))
            self.gate = nn.Sigmoid()

        def forward(self, x):
            flat = x.contiguous().view(-1, x.size(-1))
            y = F.interpolate(flat.unsqueeze(1), self.output_size, mode="linear", align_corners=True).squeeze(1)
            y = y * self.gate(self.mask.unsqueeze(0)) * 2.0
            return y.contiguous().view(x.size(0), -1, y.size(-1)) if x.dim() > 2 else y

    class ResampleNorm(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.resample = Interpolation(b) if a != b else None
            self.mask, self.gate, self.norm = nn.Parameter(torch.zeros(b)), nn.Sigmoid(), nn.LayerNorm(b)

        def forward(self, x):
            if self.resample is not None:
                x = self.resample(x)
            return self.norm(x * self.gate(self.mask) * 2.0)

    class Glu(nn.Module):
        def __init__(self, a, b=None, dropout=0.1):
            super().__init__()
            self.dropout = nn.Dropout(dropout) if dropout is not None else None
            self.fc = nn.Linear(a, (b or a) * 2)
            nn.init.xavier_uniform_(self.fc.weight)
            nn.init.zeros_(self.fc.bias)

        def forward(self, x):
            if self.dropout is not None:
                x = self.dropout(x)
            return F.glu(self.fc(x), dim=-1)

    class AddNorm(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.norm = nn.LayerNorm(d)

        def forward(self, x, skip):
            return self.norm(x + skip)

    class GateAddNorm(nn.Module):
        def __init__(self, a, b=None, dropout=0.1):
            super().__init__()
            self.glu, self.add_norm = Glu(a, b, dropout), AddNorm(b or a)

        def forward(self, x, skip):
            return self.add_norm(self.glu(x), skip)

    class Grn(nn.Module):
        def __init__(self, a, hidden, b, context=None):
            super().__init__()
            self.resample_norm = ResampleNorm(a, b) if b != a else None
            self.fc1, self.elu = nn.Linear(a, hidden), nn.ELU()
            self.context = nn.Linear(context, hidden, bias=False) if context is not None else None
            self.fc2, self.gate_norm = nn.Linear(hidden, hidden), GateAddNorm(hidden, b)
            for name, p in self.named_parameters():
                if "bias" in name:
                    nn.init.zeros_(p)
                elif "fc1" in name or "fc2" in name:
                    nn.init.kaiming_normal_(p, a=0, mode="fan_in", nonlinearity="leaky_relu")
                elif "context" in name:
                    nn.init.xavier_uniform_(p)

        def forward(self, x, context=None, residual=None):
            if residual is None:
                residual = x
            if self.resample_norm is not None:
                residual = self.resample_norm(residual)
            x = self.fc1(x)
            if context is not None:
                x = x + self.context(context)
            return self.gate_norm(self.fc2(self.elu(x)), residual)

    class Selection(nn.Module):
        def __init__(self, sizes, d, prescalers, grns, context=None):
            super().__init__()
            self.sizes = sizes
            if len(sizes) > 1:
                self.flattened_grn = Grn(sum(sizes.values()), min(d, len(sizes)), len(sizes), context)
            self.single, self.prescalers = nn.ModuleDict(), nn.ModuleDict()
            for name, size in sizes.items():
                self.single[name] = grns[name] if name in grns else Grn(size, min(size, d), d)
                if name in prescalers:
                    self.prescalers[name] = prescalers[name]
            self.softmax = nn.Softmax(dim=-1)

        def forward(self, x, context=None):
            if len(self.sizes) == 1:
                name = next(iter(self.sizes))
                return self.single[name](x[name]), None
            outputs, weighted = [], []
            for name in self.sizes:
                one = self.prescalers[name](x[name]) if name in self.prescalers else x[name]
                weighted.append(one)
                outputs.append(self.single[name](one))
            weights = self.softmax(self.flattened_grn(torch.cat(weighted, dim=-1), context)).unsqueeze(-2)
            return (torch.stack(outputs, dim=-1) * weights).sum(dim=-1), weights

    class Lstm(nn.LSTM):
        def forward(self, x, hx, lengths):
            packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False, batch_first=True)
            out, state = super().forward(packed, hx)
            return pad_packed_sequence(out, batch_first=True)[0], state

    class Attention(nn.Module):
        def __init__(self, heads, d):
            super().__init__()
            self.dropout, self.heads, d_k = nn.Dropout(p=0.1), heads, d // heads
            self.v_layer = nn.Linear(d, d_k)
            self.q_layers = nn.ModuleList([nn.Linear(d, d_k) for _ in range(heads)])
            self.k_layers = nn.ModuleList([nn.Linear(d, d_k) for _ in range(heads)])
            self.w_h = nn.Linear(d_k, d, bias=False)
            for name, p in self.named_parameters():
                nn.init.zeros_(p) if "bias" in name else nn.init.xavier_uniform_(p)

        def forward(self, q, k, v, mask):
            heads, attns, vs = [], [], self.v_layer(v)
            for f, g in zip(self.q_layers, self.k_layers, strict=True):
                qs, ks = f(q), g(k)
                attn = torch.bmm(qs, ks.permute(0, 2, 1))
                attn = attn / torch.as_tensor(ks.size(-1), dtype=attn.dtype, device=attn.device).sqrt()
                attn = attn.masked_fill(mask, -1e9).softmax(dim=2)
                heads.append(self.dropout(torch.bmm(attn, vs)))
                attns.append(attn)
            out = torch.mean(torch.stack(heads, dim=2), dim=2)
            return self.dropout(self.w_h(out)), torch.stack(attns, dim=2)

    class QuantileLoss(Metric):
        full_state_update, is_differentiable, higher_is_better = False, True, False

        def __init__(self, quantiles):
            super().__init__()
            self.quantiles = quantiles
            self.add_state("losses", default=torch.tensor(0.0), dist_reduce_fx="sum")
            self.add_state("lengths", default=torch.tensor(0), dist_reduce_fx="sum")

        def update(self, y_pred, target, lengths):
            losses = []
            for i, q in enumerate(self.quantiles):
                errors = target - y_pred[..., i]
                losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(-1))
            losses = 2 * torch.cat(losses, dim=2)
            mask = create_mask(losses.size(1), lengths)
            losses = losses.masked_fill(mask.unsqueeze(-1), 0.0).sum()
            if not torch.isfinite(losses):
                losses = torch.tensor(1e9, device=losses.device)
                warnings.warn("loss is not finite")
            self.losses = self.losses + losses
            self.lengths = self.lengths + lengths.sum()

        def compute(self):
            return self.losses / self.lengths / len(self.quantiles)

    class Tft(pl.LightningModule):
        def __init__(self, d=16, continuous=8, reals=("value", "price", "trend")):
            super().__init__()
            self.save_hyperparameters()
            self.loss = QuantileLoss([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98])
            self.embeddings = nn.ModuleDict({"store": nn.Embedding(10, 6), "month": nn.Embedding(12, 6)})
            self.prescalers = nn.ModuleDict({name: nn.Linear(1, continuous) for name in reals})
            sizes = {"month": 6} | dict.fromkeys(reals, continuous)
            shared = nn.ModuleDict({name: Grn(size, min(size, d), d) for name, size in sizes.items()})
            known = {name: size for name, size in sizes.items() if name != "value"}
            self.static_selection = Selection({"store": 6}, d, {}, {})
            self.encoder_selection = Selection(sizes, d, self.prescalers, shared, d)
            self.decoder_selection = Selection(known, d, self.prescalers, shared, d)
            self.for_selection, self.for_hidden, self.for_cell, self.for_enrichment = (Grn(d, d, d) for _ in range(4))
            self.lstm_encoder, self.lstm_decoder = Lstm(d, d, batch_first=True), Lstm(d, d, batch_first=True)
            self.post_lstm_gate_encoder, self.post_lstm_norm_encoder = Glu(d), AddNorm(d)
            self.post_lstm_gate_decoder = self.post_lstm_gate_encoder
            self.post_lstm_norm_decoder = self.post_lstm_norm_encoder
            self.enrichment, self.attention = Grn(d, d, d, d), Attention(4, d)
            self.post_attn, self.pos_wise_ff = GateAddNorm(d), Grn(d, d, d)
            self.pre_output, self.output_layer = GateAddNorm(d, dropout=None), nn.Linear(d, 7)

        def forward(self, x):
            lengths, horizons = x["encoder_lengths"], x["decoder_lengths"]
            cat = torch.cat([x["encoder_cat"], x["decoder_cat"]], dim=1)
            cont = torch.cat([x["encoder_cont"], x["decoder_cont"]], dim=1)
            timesteps, cut = cont.size(1), int(lengths.max())
            vectors = {name: layer(cat[..., i]) for i, (name, layer) in enumerate(self.embeddings.items())}
            vectors |= {name: cont[..., i].unsqueeze(-1) for i, name in enumerate(self.hparams.reals)}
            static, _ = self.static_selection({"store": vectors["store"][:, 0]})
            context = self.for_selection(static)[:, None].expand(-1, timesteps, -1)
            seen = {name: vectors[name][:, :cut] for name in self.encoder_selection.sizes}
            seen, _ = self.encoder_selection(seen, context[:, :cut])
            ahead = {name: vectors[name][:, cut:] for name in self.decoder_selection.sizes}
            ahead, _ = self.decoder_selection(ahead, context[:, cut:])
            state = (self.for_hidden(static).expand(1, -1, -1), self.for_cell(static).expand(1, -1, -1))
            encoded, state = self.lstm_encoder(seen, state, lengths)
            decoded, _ = self.lstm_decoder(ahead, state, horizons)
            encoded = self.post_lstm_norm_encoder(self.post_lstm_gate_encoder(encoded), seen)
            decoded = self.post_lstm_norm_decoder(self.post_lstm_gate_decoder(decoded), ahead)
            h = torch.cat([encoded, decoded], dim=1)
            inner = self.enrichment(h, self.for_enrichment(static)[:, None].expand(-1, timesteps, -1))
            out, weights = self.attention(inner[:, cut:], inner, inner, self.mask(lengths, horizons))
            out = self.pos_wise_ff(self.post_attn(out, inner[:, cut:]))
            out = self.output_layer(self.pre_output(out, h[:, cut:]))
            scale = x["target_scale"]
            return out * scale[:, 1, None, None] + scale[:, 0, None, None], weights

        def mask(self, lengths, horizons):
            steps = int(horizons.max())
            step = torch.arange(steps, device=self.device)
            later = (step >= step[:, None]).unsqueeze(0).expand(lengths.size(0), -1, -1)
            padded = create_mask(int(lengths.max()), lengths).unsqueeze(1).expand(-1, steps, -1)
            return torch.cat((padded, later), dim=2)

        def training_step(self, batch, batch_idx):
            x, y = batch
            y_pred, _ = self(x)
            loss = self.loss(y_pred, y, x["decoder_lengths"])
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(y))
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1000, min_lr=1e-5)
            scheduler = {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    class Sales(Rows):
        """Histories of 10 to 16 steps, and 6 steps ahead."""

        def __getitem__(self, i):
            n = 10 + i % 7
            cont = self.x[i, 16 - n :]
            cat = torch.stack([self.y[i].expand(n + 6), (torch.arange(n + 6) + i) % 12], dim=-1)
            return cont, cat, n

    def collate(items):
        lengths = torch.tensor([n for _, _, n in items])
        x = {
            "encoder_lengths": lengths,
            "decoder_lengths": torch.full_like(lengths, 6),
            "encoder_cont": pad_sequence([cont[:n] for cont, _, n in items], batch_first=True),
            "decoder_cont": torch.stack([cont[n:] for cont, _, n in items]),
            "encoder_cat": pad_sequence([cat[:n] for _, cat, n in items], batch_first=True),
            "decoder_cat": torch.stack([cat[n:] for _, cat, n in items]),
            "target_scale": torch.tensor([[0.5, 0.3]]).expand(len(items), -1),
        }
        return x, torch.stack([cont[n:, 0] for cont, _, n in items])

    return Tft(), Sales(22, 3, classes=10), {"collate_fn": collate}


@case("Informer, ProbSparse attention", "zhouhaoyi/Informer2020", GROUP_NORM)
def _():
    class CausalMask:
        def __init__(self, b, length, device):
            with torch.no_grad():
                self.mask = torch.triu(torch.ones([b, 1, length, length], dtype=torch.bool), diagonal=1).to(device)

    class ProbMask:
        def __init__(self, b, h, length, index, scores, device):
            mask = torch.ones(length, scores.shape[-1], dtype=torch.bool).to(device).triu(1)
            mask = mask[None, None, :].expand(b, h, length, scores.shape[-1])
            rows = mask[torch.arange(b)[:, None, None], torch.arange(h)[None, :, None], index, :]
            self.mask = rows.to(device).view(scores.shape).to(device)

    class FullAttention(nn.Module):
        def __init__(self, mask_flag, dropout):
            super().__init__()
            self.mask_flag, self.dropout = mask_flag, nn.Dropout(dropout)

        def forward(self, queries, keys, values, attn_mask):
            b, length, _, e = queries.shape
            scores = torch.einsum("blhe,bshe->bhls", queries, keys)
            if self.mask_flag:
                if attn_mask is None:
                    attn_mask = CausalMask(b, length, queries.device)
                scores.masked_fill_(attn_mask.mask, -np.inf)
            attn = self.dropout(torch.softmax(1.0 / math.sqrt(e) * scores, dim=-1))
            return torch.einsum("bhls,bshd->blhd", attn, values).contiguous(), None

    class ProbAttention(nn.Module):
        def __init__(self, mask_flag, dropout, factor=2):
            super().__init__()
            self.mask_flag, self.factor, self.dropout = mask_flag, factor, nn.Dropout(dropout)

        def _prob_qk(self, q, k, sample_k, n_top):
            b, h, l_k, e = k.shape
            l_q = q.shape[2]
            expanded = k.unsqueeze(-3).expand(b, h, l_q, l_k, e)
            index = torch.randint(l_k, (l_q, sample_k))
            sampled = expanded[:, :, torch.arange(l_q).unsqueeze(1), index, :]
            sampled = torch.matmul(q.unsqueeze(-2), sampled.transpose(-2, -1)).squeeze(-2)
            sparsity = sampled.max(-1)[0] - torch.div(sampled.sum(-1), l_k)
            top = sparsity.topk(n_top, sorted=False)[1]
            reduced = q[torch.arange(b)[:, None, None], torch.arange(h)[None, :, None], top, :]
            return torch.matmul(reduced, k.transpose(-2, -1)), top

        def _initial_context(self, v, l_q):
            b, h, l_v, _ = v.shape
            if not self.mask_flag:
                mean = v.mean(dim=-2)
                return mean.unsqueeze(-2).expand(b, h, l_q, mean.shape[-1]).clone()
            assert l_q == l_v
            return v.cumsum(dim=-2)

        def _update_context(self, context, v, scores, index, l_q):
            b, h = v.shape[:2]
            if self.mask_flag:
                attn_mask = ProbMask(b, h, l_q, index, scores, v.device)
                scores.masked_fill_(attn_mask.mask, -np.inf)
            attn = torch.softmax(scores, dim=-1)
            rows, heads = torch.arange(b)[:, None, None], torch.arange(h)[None, :, None]
            context[rows, heads, index, :] = torch.matmul(attn, v).type_as(context)
            return context

        def forward(self, queries, keys, values, attn_mask):
            l_q, d, l_k = queries.shape[1], queries.shape[3], keys.shape[1]
            queries, keys, values = (x.transpose(2, 1) for x in (queries, keys, values))
            part = self.factor * np.ceil(np.log(l_k)).astype("int").item()
            u = self.factor * np.ceil(np.log(l_q)).astype("int").item()
            scores, index = self._prob_qk(queries, keys, sample_k=min(part, l_k), n_top=min(u, l_q))
            scores = scores * (1.0 / math.sqrt(d))
            context = self._update_context(self._initial_context(values, l_q), values, scores, index, l_q)
            return context.transpose(2, 1).contiguous(), None

    class AttentionLayer(nn.Module):
        def __init__(self, attention, d, heads=4, mix=False):
            super().__init__()
            self.inner, self.heads, self.mix = attention, heads, mix
            self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))

        def forward(self, queries, keys, values, attn_mask):
            b, length, _ = queries.shape
            s = keys.shape[1]
            queries = self.query(queries).view(b, length, self.heads, -1)
            keys, values = (f(x).view(b, s, self.heads, -1) for f, x in ((self.key, keys), (self.value, values)))
            out, attn = self.inner(queries, keys, values, attn_mask)
            if self.mix:
                out = out.transpose(2, 1).contiguous()
            return self.out(out.view(b, length, -1)), attn

    class ConvLayer(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.down = nn.Conv1d(d, d, kernel_size=3, padding=1, padding_mode="circular")
            self.norm, self.activation = nn.BatchNorm1d(d), nn.ELU()
            self.pool = nn.MaxPool1d(kernel_size=3, stride=2, padding=1)

        def forward(self, x):
            return self.pool(self.activation(self.norm(self.down(x.permute(0, 2, 1))))).transpose(1, 2)

    class FeedForward(nn.Module):
        def __init__(self, d, dropout):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv1d(d, 2 * d, kernel_size=1), nn.Conv1d(2 * d, d, kernel_size=1)
            self.dropout = nn.Dropout(dropout)

        def feed(self, y):
            y = self.dropout(F.gelu(self.conv1(y.transpose(-1, 1))))
            return self.dropout(self.conv2(y).transpose(-1, 1))

    class EncoderLayer(FeedForward):
        def __init__(self, attention, d, dropout):
            super().__init__(d, dropout)
            self.attention, self.norm1, self.norm2 = attention, nn.LayerNorm(d), nn.LayerNorm(d)

        def forward(self, x, attn_mask=None):
            new_x, _attn = self.attention(x, x, x, attn_mask=attn_mask)
            x = x + self.dropout(new_x)
            y = x = self.norm1(x)
            return self.norm2(x + self.feed(y))

    class DecoderLayer(FeedForward):
        def __init__(self, self_attention, cross_attention, d, dropout):
            super().__init__(d, dropout)
            self.self_attention, self.cross_attention = self_attention, cross_attention
            self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d) for _ in range(3))

        def forward(self, x, cross):
            x = x + self.dropout(self.self_attention(x, x, x, attn_mask=None)[0])
            x = self.norm1(x)
            x = x + self.dropout(self.cross_attention(x, cross, cross, attn_mask=None)[0])
            y = x = self.norm2(x)
            return self.norm3(x + self.feed(y))

    def sines(length, d):
        table, position = torch.zeros(length, d).float(), torch.arange(0, length).float().unsqueeze(1)
        rate = (torch.arange(0, d, 2).float() * -(math.log(10000.0) / d)).exp()
        table[:, 0::2], table[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        return table

    class FixedEmbedding(nn.Module):
        def __init__(self, c_in, d):
            super().__init__()
            self.emb = nn.Embedding(c_in, d)
            self.emb.weight = nn.Parameter(sines(c_in, d), requires_grad=False)

        def forward(self, x):
            return self.emb(x).detach()

    class DataEmbedding(nn.Module):
        def __init__(self, c_in, d, dropout):
            super().__init__()
            self.value = nn.Conv1d(c_in, d, kernel_size=3, padding=1, padding_mode="circular")
            nn.init.kaiming_normal_(self.value.weight, mode="fan_in", nonlinearity="leaky_relu")
            self.register_buffer("pe", sines(128, d).unsqueeze(0))
            self.hour, self.weekday = FixedEmbedding(24, d), FixedEmbedding(7, d)
            self.day, self.month, self.dropout = FixedEmbedding(32, d), FixedEmbedding(13, d), nn.Dropout(p=dropout)

        def forward(self, x, mark):
            mark = mark.long()
            time = self.hour(mark[:, :, 3]) + self.weekday(mark[:, :, 2])
            time = time + self.day(mark[:, :, 1]) + self.month(mark[:, :, 0])
            return self.dropout(self.value(x.permute(0, 2, 1)).transpose(1, 2) + self.pe[:, : x.size(1)] + time)

    class Informer(pl.LightningModule):
        def __init__(self, d=32, dropout=0.05, label_len=12, pred_len=12):
            super().__init__()
            self.label_len, self.pred_len = label_len, pred_len
            self.enc_embedding, self.dec_embedding = DataEmbedding(7, d, dropout), DataEmbedding(7, d, dropout)
            self.attn_layers = nn.ModuleList(
                [EncoderLayer(AttentionLayer(ProbAttention(False, dropout), d), d, dropout) for _ in range(2)]
            )
            self.conv_layers, self.enc_norm = nn.ModuleList([ConvLayer(d)]), nn.LayerNorm(d)
            own = AttentionLayer(ProbAttention(True, dropout), d, mix=True)
            cross = AttentionLayer(FullAttention(False, dropout), d)
            self.decoder = nn.ModuleList([DecoderLayer(own, cross, d, dropout)])
            self.dec_norm, self.projection, self.criterion = nn.LayerNorm(d), nn.Linear(d, 7), nn.MSELoss()

        def forward(self, x_enc, mark_enc, x_dec, mark_dec):
            enc = self.enc_embedding(x_enc, mark_enc)
            for attn_layer, conv_layer in zip(self.attn_layers, self.conv_layers, strict=False):
                enc = conv_layer(attn_layer(enc))
            enc = self.enc_norm(self.attn_layers[-1](enc))
            dec = self.dec_embedding(x_dec, mark_dec)
            for layer in self.decoder:
                dec = layer(dec, enc)
            return self.projection(self.dec_norm(dec))[:, -self.pred_len :, :]

        def training_step(self, batch, batch_idx):
            x, y, x_mark, y_mark = batch
            x, y = x.float(), y.float()
            blank = torch.zeros([y.shape[0], self.pred_len, y.shape[-1]]).float()
            blank = torch.cat([y[:, : self.label_len, :], blank.to(self.device)], dim=1).float()
            outputs = self(x, x_mark.float(), blank, y_mark.float())
            return self.criterion(outputs, y[:, -self.pred_len :, :])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-4)

    class Electricity(Rows):
        def __getitem__(self, i):
            t = torch.arange(36) + i
            mark = torch.stack([t // 720 % 12 + 1, t // 24 % 31 + 1, t // 24 % 7, t % 24], dim=-1)
            return self.x[i, :24].double(), self.x[i, 12:].double(), mark[:24], mark[12:]

    return Informer(), Electricity(36, 7), {}


@case("SASRec", "pmixer/SASRec.pytorch")
def _():
    class Histories:
        """The last 16 items, those after them, and as many that were not seen, filled with 0 at the left."""

        def __init__(self):
            self.ids = torch.randint(1, WORDS, (N, 17), generator=torch.Generator().manual_seed(0))

        def __len__(self):
            return N

        def __getitem__(self, i):
            length = 4 + i % 12
            seq, pos, neg = (torch.zeros(16, dtype=torch.long) for _ in range(3))
            seq[-length:], pos[-length:] = self.ids[i, :length], self.ids[i, 1 : length + 1]
            neg[-length:] = self.ids[(i + 1) % N, :length]
            return i, seq, pos, neg

    class FeedForward(nn.Module):
        def __init__(self, d, dropout):
            super().__init__()
            self.conv1, self.dropout1 = nn.Conv1d(d, d, kernel_size=1), nn.Dropout(p=dropout)
            self.relu = nn.ReLU()
            self.conv2, self.dropout2 = nn.Conv1d(d, d, kernel_size=1), nn.Dropout(p=dropout)

        def forward(self, x):
            out = self.dropout2(self.conv2(self.relu(self.dropout1(self.conv1(x.transpose(-1, -2))))))
            out = out.transpose(-1, -2)
            out += x
            return out

    class SasRec(pl.LightningModule):
        def __init__(self, d=32, blocks=2, dropout=0.5, length=16, l2_emb=0.0):
            super().__init__()
            self.l2_emb, self.item_emb = l2_emb, nn.Embedding(WORDS + 1, d, padding_idx=0)
            self.pos_emb, self.emb_dropout = nn.Embedding(length, d), nn.Dropout(p=dropout)
            self.attention_layernorms, self.attention_layers = nn.ModuleList(), nn.ModuleList()
            self.forward_layernorms, self.forward_layers = nn.ModuleList(), nn.ModuleList()
            self.last_layernorm, self.criterion = nn.LayerNorm(d, eps=1e-8), nn.BCEWithLogitsLoss()
            for _ in range(blocks):
                self.attention_layernorms.append(nn.LayerNorm(d, eps=1e-8))
                self.attention_layers.append(nn.MultiheadAttention(d, 1, dropout))
                self.forward_layernorms.append(nn.LayerNorm(d, eps=1e-8))
                self.forward_layers.append(FeedForward(d, dropout))
            for param in self.parameters():
                if param.dim() > 1:
                    nn.init.xavier_normal_(param.data)

        def log2feats(self, log_seqs):
            seqs = self.item_emb(log_seqs)
            seqs *= self.item_emb.embedding_dim**0.5
            positions = np.tile(np.array(range(log_seqs.shape[1])), [log_seqs.shape[0], 1])
            seqs += self.pos_emb(torch.LongTensor(positions).to(self.device))
            seqs = self.emb_dropout(seqs)
            padded = log_seqs == 0
            seqs *= ~padded.unsqueeze(-1)
            tl = seqs.shape[1]
            attention_mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool, device=self.device))
            for i in range(len(self.attention_layers)):
                seqs = torch.transpose(seqs, 0, 1)
                q = self.attention_layernorms[i](seqs)
                out, _ = self.attention_layers[i](q, seqs, seqs, attn_mask=attention_mask)
                seqs = torch.transpose(q + out, 0, 1)
                seqs = self.forward_layers[i](self.forward_layernorms[i](seqs))
                seqs *= ~padded.unsqueeze(-1)
            return self.last_layernorm(seqs)

        def training_step(self, batch, batch_idx):
            _u, seq, pos, neg = batch
            feats = self.log2feats(seq)
            pos_logits = (feats * self.item_emb(pos)).sum(dim=-1)
            neg_logits = (feats * self.item_emb(neg)).sum(dim=-1)
            ones, zeros = torch.ones_like(pos_logits), torch.zeros_like(neg_logits)
            indices = torch.where(pos != 0)
            loss = self.criterion(pos_logits[indices], ones[indices])
            loss += self.criterion(neg_logits[indices], zeros[indices])
            for param in self.item_emb.parameters():
                loss += self.l2_emb * torch.norm(param)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3, betas=(0.9, 0.98))

    return SasRec(), Histories(), {}


@case("LoRA classifier", "huggingface/peft examples/sequence_classification")
def _():
    config = transformers.RobertaConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=40,
    )  # fmt: skip
    model = transformers.RobertaForSequenceClassification(config)
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=0.1))

    class Lora(Tuned):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(params=self.model.parameters(), lr=3e-4)
            scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 0.06 * 100, 100)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Lora(model), Text(), {"collate_fn": pad}


class Trained(Tuned):
    """Any model of transformers, with the optimizer and the schedule of its Trainer."""

    lr = 5e-5

    def configure_optimizers(self):
        kept = {
            f"{name}.{own}" if name else own
            for name, module in self.model.named_modules()
            for own, _ in module.named_parameters(recurse=False)
            if "norm" not in type(module).__name__.lower() and own != "bias"
        }
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if n in kept], "weight_decay": 0.01},
            {"params": [p for n, p in named if n not in kept], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 0, 100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@case("T5 summarization, label smoothing", "huggingface/transformers run_summarization.py")
def _():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)

    class Smoothed(Trained):
        def training_step(self, batch, batch_idx):
            labels = batch.pop("labels")
            logits = self.model(**batch).logits
            log_probs = -F.log_softmax(logits, dim=-1)
            labels = labels.unsqueeze(-1)
            padding_mask = labels.eq(-100)
            labels = torch.clamp(labels, min=0)
            nll_loss = log_probs.gather(dim=-1, index=labels)
            smoothed_loss = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
            nll_loss.masked_fill_(padding_mask, 0.0)
            smoothed_loss.masked_fill_(padding_mask, 0.0)
            active = padding_mask.numel() - padding_mask.long().sum()
            nll_loss, smoothed_loss = nll_loss.sum() / active, smoothed_loss.sum() / (active * log_probs.shape[-1])
            loss = 0.9 * nll_loss + 0.1 * smoothed_loss
            self.log("train_loss", loss)
            return loss

    def pad_both(items):
        batch = pad(items)
        summaries = [item["input_ids"][: 4 + len(item["input_ids"]) // 3] for item in items]
        batch["labels"] = pad_sequence(summaries, batch_first=True, padding_value=-100)
        batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return batch

    return Smoothed(model), Text(), {"collate_fn": pad_both}


@case("sentence pairs, cosine loss", "UKPLab/sentence-transformers CosineSimilarityLoss")
def _():
    class Pooling(nn.Module):
        def forward(self, features):
            tokens = features["token_embeddings"]
            mask = features["attention_mask"].unsqueeze(-1).expand(tokens.size()).to(tokens.dtype)
            total, count = torch.sum(tokens * mask, 1), torch.clamp(mask.sum(1), min=1e-9)
            features["sentence_embedding"] = torch.cat([total / count], 1)
            return features

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.auto_model = bert().bert

        def forward(self, features):
            out = self.auto_model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
            features["token_embeddings"] = out[0]
            return features

    class Cosine(Trained):
        lr = 2e-5

        def __init__(self):
            super().__init__(nn.Sequential(Transformer(), Pooling()))
            self.loss_fct, self.transformation = nn.MSELoss(), nn.Identity()

        def training_step(self, batch, batch_idx):
            sentences, labels = batch
            embeddings = [self.model(features)["sentence_embedding"] for features in sentences]
            output = self.transformation(torch.cosine_similarity(embeddings[0], embeddings[1]))
            return self.loss_fct(output, labels.float().view(-1))

    def pad_each(items):
        a, b, y = zip(*items, strict=True)
        columns = []
        for ids in (a, b):
            mask = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
            columns.append({"input_ids": pad_sequence(ids, batch_first=True), "attention_mask": mask})
        return columns, torch.stack(y)

    return Cosine(), SentencePairs(), {"collate_fn": pad_each}


@case("Whisper fine-tuning", "huggingface/transformers run_speech_recognition_seq2seq.py")
def _():
    config = transformers.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=32,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip

    class Speech(Rows):
        def __getitem__(self, i):
            words = torch.arange(4 + i % 7) * (i + 1) % (WORDS - 5) + 5
            return {"input_features": self.x[i], "labels": torch.cat([torch.tensor([3]), words, torch.tensor([2])])}

    def pad_speech(items):
        labels = pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=-100)
        if (labels[:, 0] == config.decoder_start_token_id).all().cpu().item():
            labels = labels[:, 1:]
        return {"input_features": torch.stack([item["input_features"] for item in items]), "labels": labels}

    model = transformers.WhisperForConditionalGeneration(config)
    return Trained(model), Speech(16, 64), {"collate_fn": pad_speech}


@case("reward model, pairs", "huggingface/trl RewardTrainer")
def _():
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=64, n_layer=2, n_head=4, num_labels=1, pad_token_id=0,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip

    class Reward(Trained):
        lr = 1e-4

        def training_step(self, batch, batch_idx):
            batch["use_cache"] = False
            outputs = self.model(**batch)
            chosen, rejected = torch.chunk(outputs.logits.squeeze(-1), chunks=2)
            loss = -F.logsigmoid(chosen - rejected).mean()
            with torch.no_grad():
                self.log("num_tokens", float(batch["attention_mask"].sum().item()))
                self.log("min_reward", outputs.logits.min().item())
                self.log("mean_reward", outputs.logits.mean().item())
                self.log("max_reward", outputs.logits.max().item())
                self.log("accuracy", (chosen > rejected).float().mean().item())
                self.log("margin", (chosen - rejected).mean().item())
            return loss

    # The first half of a batch is the chosen answers, the second the rejected ones.
    def pad_preferences(items):
        chosen, rejected, _ = zip(*items, strict=True)
        ids = chosen + rejected
        mask = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
        return {"input_ids": pad_sequence(ids, batch_first=True), "attention_mask": mask}

    model = transformers.GPT2ForSequenceClassification(config)
    return Reward(model), SentencePairs(), {"collate_fn": pad_preferences}


@case("CLIP", "mlfoundations/open_clip")
def _():
    class LayerNorm(nn.LayerNorm):
        def forward(self, x):
            kind = x.dtype
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).to(kind)

    class Block(nn.Module):
        def __init__(self, d, heads):
            super().__init__()
            self.attn, self.ln_1, self.ln_2 = nn.MultiheadAttention(d, heads), LayerNorm(d), LayerNorm(d)
            self.mlp = nn.Sequential()
            self.mlp.add_module("c_fc", nn.Linear(d, 4 * d))
            self.mlp.add_module("gelu", nn.GELU())
            self.mlp.add_module("c_proj", nn.Linear(4 * d, d))

        def forward(self, x, attn_mask=None):
            h = self.ln_1(x)
            x = x + self.attn(h, h, h, need_weights=False, attn_mask=attn_mask)[0]
            return x + self.mlp(self.ln_2(x))

    class Transformer(nn.Module):
        def __init__(self, d, layers, heads):
            super().__init__()
            self.resblocks = nn.ModuleList([Block(d, heads) for _ in range(layers)])

        def forward(self, x, attn_mask=None):
            for r in self.resblocks:
                x = r(x, attn_mask=attn_mask)
            return x

    class Visual(nn.Module):
        def __init__(self, size, patch, d, output):
            super().__init__()
            scale = d**-0.5
            self.conv1 = nn.Conv2d(3, d, kernel_size=patch, stride=patch, bias=False)
            self.class_embedding = nn.Parameter(scale * torch.randn(d))
            self.positional_embedding = nn.Parameter(scale * torch.randn((size // patch) ** 2 + 1, d))
            self.ln_pre, self.transformer, self.ln_post = LayerNorm(d), Transformer(d, 2, 4), LayerNorm(d)
            self.proj = nn.Parameter(scale * torch.randn(d, output))

        def forward(self, x):
            x = self.conv1(x)
            x = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)
            blank = torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device)
            x = torch.cat([self.class_embedding.to(x.dtype) + blank, x], dim=1)
            x = self.ln_pre(x + self.positional_embedding.to(x.dtype))
            x = self.transformer(x.permute(1, 0, 2)).permute(1, 0, 2)
            return self.ln_post(x[:, 0, :]) @ self.proj

    class ClipLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.prev_num_logits, self.labels = 0, {}

        def forward(self, image_features, text_features, logit_scale):
            device = image_features.device
            per_image = logit_scale * image_features @ text_features.T
            per_text = logit_scale * text_features @ image_features.T
            num = per_image.shape[0]
            if self.prev_num_logits != num or device not in self.labels:
                self.labels[device] = torch.arange(num, device=device, dtype=torch.long)
                self.prev_num_logits = num
            labels = self.labels[device]
            return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2

    class Clip(pl.LightningModule):
        def __init__(self, d=32, output=24, context=12):
            super().__init__()
            self.visual, self.transformer = Visual(16, 4, d, output), Transformer(d, 2, 4)
            self.token_embedding, self.ln_final = nn.Embedding(WORDS, d), LayerNorm(d)
            self.positional_embedding = nn.Parameter(torch.empty(context, d))
            self.text_projection = nn.Parameter(torch.empty(d, output))
            self.logit_scale, self.loss = nn.Parameter(torch.ones([]) * np.log(1 / 0.07)), ClipLoss()
            mask = torch.empty(context, context)
            mask.fill_(float("-inf"))
            mask.triu_(1)
            self.register_buffer("attn_mask", mask, persistent=False)
            nn.init.normal_(self.token_embedding.weight, std=0.02)
            nn.init.normal_(self.positional_embedding, std=0.01)
            nn.init.normal_(self.text_projection, std=d**-0.5)
            for block in self.transformer.resblocks:
                nn.init.normal_(block.attn.in_proj_weight, std=d**-0.5)
                nn.init.normal_(block.attn.out_proj.weight, std=d**-0.5 * 4**-0.5)
                nn.init.normal_(block.mlp.c_fc.weight, std=(2 * d) ** -0.5)
                nn.init.normal_(block.mlp.c_proj.weight, std=d**-0.5 * 4**-0.5)

        def encode_text(self, text):
            x = self.token_embedding(text) + self.positional_embedding
            x = self.transformer(x.permute(1, 0, 2), attn_mask=self.attn_mask).permute(1, 0, 2)
            x = self.ln_final(x)
            # The last token of a text has the highest number.
            return x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.text_projection

        def forward(self, image, text):
            image_features = F.normalize(self.visual(image), dim=-1)
            text_features = F.normalize(self.encode_text(text), dim=-1)
            return image_features, text_features, self.logit_scale.exp()

        def training_step(self, batch, batch_idx):
            images, texts = batch
            loss = self.loss(*self(images, texts))
            self.log("loss", loss)
            self.log("logit_scale", self.logit_scale.exp().item())
            return loss

        def configure_optimizers(self):
            def exclude(n, p):
                return p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n

            named = list(self.named_parameters())
            groups = [
                {"params": [p for n, p in named if exclude(n, p) and p.requires_grad], "weight_decay": 0.0},
                {"params": [p for n, p in named if not exclude(n, p) and p.requires_grad], "weight_decay": 0.2},
            ]
            return torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98), eps=1e-6)

        def optimizer_step(self, *args, **kwargs):
            step = self.global_step
            for group in self.optimizers().param_groups:
                warm, rest = (step + 1) / 10, 0.5 * (1 + np.cos(np.pi * (step - 10) / 90))
                group["lr"] = 5e-4 * (warm if step < 10 else rest)
            super().optimizer_step(*args, **kwargs)
            with torch.no_grad():
                self.logit_scale.clamp_(0, math.log(100))

    class Captioned(Rows):
        def __getitem__(self, i):
            text = torch.zeros(12, dtype=torch.long)
            n = 3 + i % 8
            text[:n] = torch.arange(n) * (i + 1) % (WORDS - 3) + 1
            text[n] = WORDS - 1
            return self.x[i], text

    return Clip(), Captioned(3, 16, 16), {}


@case("wav2vec2, CTC", "huggingface/transformers run_speech_recognition_ctc.py")
def _():
    config = transformers.Wav2Vec2Config(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, feat_proj_dropout=0.0, attention_dropout=0.0,
        hidden_dropout=0.0, final_dropout=0.0, activation_dropout=0.0, layerdrop=0.0, mask_time_prob=0.05,
        mask_time_length=10, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()

    class Speech(Rows):
        def __getitem__(self, i):
            labels = torch.arange(3 + i % 3) * (i + 1) % 18 + 1
            return {"input_values": self.x[i, : 600 + 20 * (i % 11)], "labels": labels}

    def pad_speech(items):
        labels = pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=-100)
        return {
            "input_values": pad_sequence([item["input_values"] for item in items], batch_first=True),
            "labels": labels,
        }

    return Trained(model), Speech(800), {"collate_fn": pad_speech}
