"""The data and the base classes of the modules beside."""

import pytorch_lightning as pl
import torch
import transformers
from ordinary import N
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

T, WORDS = 24, 200


class Records:
    """N records, `record(i)` each, drawn from a generator of one seed."""

    def __init__(self, record=None):
        self.record = record

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.record(i)


def seeded():
    return torch.Generator().manual_seed(0)


class Rows(Records):
    """Random numbers of a shape, and classes."""

    def __init__(self, *shape, classes=3, record=lambda x, y: (x, y)):
        g = seeded()
        self.x, self.y = torch.rand(N, *shape, generator=g), torch.randint(classes, (N,), generator=g)
        super().__init__(lambda i: record(self.x[i], self.y[i]))


def images(channels=1, side=28, record=lambda x, y: (x, y)):
    return Rows(channels, side, side, classes=10, record=record)


class Table(Records):
    """Random rows: numbers, categories, a class."""

    def __init__(self, numbers, sizes):
        g = seeded()
        self.numbers = torch.randn(N, numbers, generator=g)
        categories = torch.stack([torch.randint(size, (N,), generator=g) for size in sizes], 1)
        y = torch.randint(2, (N,), generator=g).float()
        super().__init__(lambda i: (self.numbers[i], categories[i], y[i]))


def centred(x):
    return (x - 0.5) / 0.5


class Text(Records):
    """Sentences of 8 to 24 words, not padded."""

    def __init__(self, low=8, high=25):
        g = seeded()
        lengths = torch.randint(low, high, (N,), generator=g).tolist()
        self.ids = [torch.randint(5, WORDS, (t,), generator=g) for t in lengths]
        self.y = torch.randint(2, (N,), generator=g)
        super().__init__(lambda i: {"input_ids": self.ids[i], "labels": self.y[i]})


class SentencePairs(Text):
    """Two sentences each, not padded."""

    def __getitem__(self, i):
        return self.ids[i], self.ids[(i + 1) % N], self.y[i]


def characters(length=T, record=lambda ids: (ids[:-1], ids[1:])):
    """Sequences of symbols, and by default the same shifted by one."""
    ids = torch.randint(1, WORDS, (N, length + 1), generator=seeded())
    return Records(lambda i: record(ids[i]))


def padded(sequences, value=0):
    """[B, T] of sequences [t]."""
    return pad_sequence(sequences, batch_first=True, padding_value=value)


def masked(sequences):
    """The padded sequences, and which of their words are no padding."""
    return {"input_ids": padded(sequences), "attention_mask": padded([torch.ones_like(ids) for ids in sequences])}


def columns(items):
    """Sentences, and their labels."""
    return [item["input_ids"] for item in items], torch.stack([item["labels"] for item in items])


def pad(items):
    sentences, labels = columns(items)
    return masked(sentences) | {"labels": labels}


def pad_fixed(items):
    sentences, labels = columns(items)
    ids = torch.stack([F.pad(sentence, (0, 24 - len(sentence))) for sentence in sentences])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def pad_fixed_causal(items):
    batch = pad_fixed(items)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


class Base(pl.LightningModule):
    """With an ordinary optimizer."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Classifies(Base):
    """A network and its cross entropy."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class Tuned(Base):
    """Any model of transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


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


def sizes(**others):
    """Of a small transformer."""
    return {
        "vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128,
    } | others  # fmt: skip


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes()))


def gpt2():
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)
