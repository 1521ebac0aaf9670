"""Models and steps that need special care: checkpointing, padding, adversaries, experts, preferences."""

import pytorch_lightning as pl
import torch
from ordinary import N, case
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    ElectraConfig,
    ElectraForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)  # fmt: skip

WORDS = 200


class Text:
    """Sentences of 8 to 24 words, not padded."""

    def __init__(self, labels: str = "class", low=8, high=25) -> None:
        g = torch.Generator().manual_seed(0)
        lengths = torch.randint(low, high, (N,), generator=g).tolist()
        self.ids = [torch.randint(5, WORDS, (t,), generator=g) for t in lengths]
        self.y = torch.randint(2, (N,), generator=g)
        self.labels = labels

    def __len__(self):
        return N

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.y[i]}


def pad(items):
    ids = pad_sequence([item["input_ids"] for item in items], batch_first=True)
    mask = pad_sequence([torch.ones_like(item["input_ids"]) for item in items], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack([item["labels"] for item in items])}


def pad_causal(items):
    batch = pad(items)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def pad_fixed(items):
    ids = torch.stack([F.pad(item["input_ids"], (0, 24 - len(item["input_ids"]))) for item in items])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.stack([i["labels"] for i in items])}


def pad_fixed_causal(items):
    batch = pad_fixed(items)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


class Tuned(pl.LightningModule):
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


def bert(**options):
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            **options,
        )
    )


def gpt2(**options):
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=64, n_layer=2, n_head=4, **options))


def llama():
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )


@case("GPT-2, gradient checkpointing", "huggingface/transformers examples/pytorch/language-modeling")
def _():
    model = gpt2()
    model.gradient_checkpointing_enable()
    return Tuned(model), Text(), {"collate_fn": pad_fixed_causal}


@case("Llama, gradient checkpointing", "huggingface/trl sft")
def _():
    model = llama()
    model.gradient_checkpointing_enable()
    return Tuned(model), Text(), {"collate_fn": pad_fixed_causal}


@case("BERT, gradient checkpointing", "huggingface/transformers examples/pytorch/text-classification")
def _():
    model = bert()
    model.gradient_checkpointing_enable()
    return Tuned(model), Text(), {"collate_fn": pad_fixed}


@case("BERT, dynamic padding", "huggingface/notebooks text_classification")
def _():
    return Tuned(bert()), Text(), {"collate_fn": pad}


@case("GPT-2, dynamic padding", "huggingface/transformers run_clm")
def _():
    return Tuned(gpt2()), Text(), {"collate_fn": pad_causal}


class Rows:
    def __init__(self, *shape, classes=3):
        g = torch.Generator().manual_seed(0)
        self.x = torch.rand(N, *shape, generator=g)
        self.y = torch.randint(classes, (N,), generator=g)

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Base(pl.LightningModule):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


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


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 3)
    )


@case("FGSM adversarial training", "locuslab/fast_adversarial")
def _():
    class Fgsm(Base):
        def __init__(self):
            super().__init__()
            self.net = cnn()

        def training_step(self, batch, batch_idx):
            x, y = batch
            x = x.clone().requires_grad_(True)
            loss = F.cross_entropy(self.net(x), y)
            grad = torch.autograd.grad(loss, x)[0]
            adv = (x + 0.1 * grad.sign()).clamp(0, 1).detach()
            return F.cross_entropy(self.net(adv), y)

    return Fgsm(), Rows(1, 28, 28), {}


@case("PGD adversarial training", "MadryLab/robustness")
def _():
    class Pgd(Base):
        def __init__(self):
            super().__init__()
            self.net = cnn()

        def training_step(self, batch, batch_idx):
            x, y = batch
            delta = torch.zeros_like(x).uniform_(-0.1, 0.1)
            for _ in range(3):
                delta.requires_grad_()
                loss = F.cross_entropy(self.net(x + delta), y)
                (grad,) = torch.autograd.grad(loss, [delta])
                delta = (delta.detach() + 0.03 * grad.sign()).clamp(-0.1, 0.1)
            return F.cross_entropy(self.net(x + delta.detach()), y)

    return Pgd(), Rows(1, 28, 28), {}


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


class Packed(Base):
    def __init__(self, total=None):
        super().__init__()
        self.words = nn.Embedding(WORDS, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 2)

    def training_step(self, batch, batch_idx):
        lengths = batch["attention_mask"].sum(1).cpu()
        packed = pack_padded_sequence(self.words(batch["input_ids"]), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return F.cross_entropy(self.head(torch.cat([h[-2], h[-1]], 1)), batch["labels"])


@case("packed BiLSTM, padded text", "bentrevett/pytorch-sentiment-analysis")
def _():
    return Packed(), Text(), {"collate_fn": pad_fixed}


@case("packed BiLSTM, dynamic padding", "bentrevett/pytorch-sentiment-analysis")
def _():
    return Packed(), Text(), {"collate_fn": pad}


@case("BiLSTM tagger, pad_packed", "allanj/pytorch_neural_crf")
def _():
    class Tagger(Packed):
        def training_step(self, batch, batch_idx):
            lengths = batch["attention_mask"].sum(1).cpu()
            packed = pack_padded_sequence(
                self.words(batch["input_ids"]), lengths, batch_first=True, enforce_sorted=False
            )
            h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=batch["input_ids"].shape[1])
            tags = batch["input_ids"] % 2
            tags = tags.masked_fill(batch["attention_mask"] == 0, -100)
            return F.cross_entropy(self.head(h).transpose(1, 2), tags, ignore_index=-100)

    return Tagger(), Text(), {"collate_fn": pad_fixed}


@case("DPO with disable_adapter", "huggingface/trl DPOTrainer")
def _():
    import peft

    class Dpo(Base):
        def __init__(self):
            super().__init__()
            self.model = peft.get_peft_model(
                gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
            )

        def logps(self, ids):
            logits = self.model(ids).logits[:, :-1]
            return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2).sum(1)

        def training_step(self, batch, batch_idx):
            chosen, rejected = batch["chosen"], batch["rejected"]
            with torch.no_grad(), self.model.disable_adapter():
                ref_c, ref_r = self.logps(chosen), self.logps(rejected)
            margin = 0.1 * ((self.logps(chosen) - ref_c) - (self.logps(rejected) - ref_r))
            return -F.logsigmoid(margin).mean()

    class Pairs(Rows):
        def __getitem__(self, i):
            g = torch.Generator().manual_seed(i)
            return {k: torch.randint(5, WORDS, (24,), generator=g) for k in ("chosen", "rejected")}

    return Dpo(), Pairs(1), {}


@case("MoE by index_add_", "huggingface/transformers Mixtral (older)")
def _():
    class Experts(Base):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(16, 4)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)
            )
            self.head = nn.Linear(16, 3)

        def training_step(self, batch, batch_idx):
            x, y = batch
            h = x.reshape(-1, 16)
            weights, chosen = self.router(h).softmax(-1).topk(2)
            weights = weights / weights.sum(-1, keepdim=True)
            out = torch.zeros_like(h)
            mask = F.one_hot(chosen, 4).permute(2, 1, 0)
            for e, expert in enumerate(self.experts):
                k, rows = torch.where(mask[e])
                out.index_add_(0, rows, expert(h[rows]) * weights[rows, k, None])
            return F.cross_entropy(self.head(out.view(x.shape).mean(1)), y)

    return Experts(), Rows(8, 16), {}


@case("Mixtral", "huggingface/transformers")
def _():
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return Tuned(MixtralForCausalLM(config)), Text(), {"collate_fn": pad_fixed_causal}


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


for name, cls in {"Falcon-H1": "FalconH1", "LFM2": "Lfm2", "Qwen3-Next": "Qwen3Next", "Mamba": "Mamba"}.items():

    def hybrid(name=name, cls=cls):
        import transformers

        options = {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        own = {
            "FalconH1": {
                "mamba_d_ssm": 32,
                "mamba_n_heads": 4,
                "mamba_d_head": 8,
                "mamba_d_state": 8,
                "mamba_chunk_size": 8,
                "head_dim": 8,
            },
            "Lfm2": {"layer_types": ["conv", "full_attention"]},
            "Qwen3Next": {
                "layer_types": ["linear_attention", "full_attention"],
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "head_dim": 8,
            },
            "Mamba": {"state_size": 8},
        }[cls]
        config = getattr(transformers, cls + "Config")(**options | own)
        return Tuned(getattr(transformers, cls + "ForCausalLM")(config)), Text(), {"collate_fn": pad_fixed_causal}

    case(name, "huggingface/transformers")(hybrid)


@case("DeBERTa", "huggingface/transformers")
def _():
    config = DebertaV2Config(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
    )
    return Tuned(DebertaV2ForSequenceClassification(config)), Text(), {"collate_fn": pad_fixed}


@case("ELECTRA discriminator", "huggingface/transformers")
def _():
    def collate(items):
        batch = pad_fixed(items)
        return batch | {"labels": batch["input_ids"] % 2}

    config = ElectraConfig(
        vocab_size=WORDS,
        embedding_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    return Tuned(ElectraForPreTraining(config)), Text(), {"collate_fn": collate}


@case("CTC speech recognition", "SeanNaren/deepspeech.pytorch")
def _():
    class Ctc(Base):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(8, 32, 3, padding=1)
            self.rnn = nn.GRU(32, 32, batch_first=True)
            self.head = nn.Linear(32, 10)

        def training_step(self, batch, batch_idx):
            x, y, length = batch
            h = self.rnn(self.conv(x).relu().transpose(1, 2))[0]
            scores = self.head(h).log_softmax(-1).transpose(0, 1)
            sizes = torch.full((x.shape[0],), scores.shape[0], dtype=torch.long)
            return F.ctc_loss(scores, y, sizes, length, zero_infinity=True)

    class Speech(Rows):
        def __getitem__(self, i):
            g = torch.Generator().manual_seed(i)
            return (
                torch.rand(8, 40, generator=g),
                torch.randint(1, 10, (8,), generator=g),
                torch.randint(3, 9, (), generator=g),
            )

    return Ctc(), Speech(1), {}


@case("compiled by the user: module.compile()", "")
def _():
    class Compiled(Base):
        def __init__(self):
            super().__init__()
            self.net = cnn()
            self.net.compile()

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

    return Compiled(), Rows(1, 28, 28), {}


@case("compiled by the user: configure_model", "")
def _():
    class Compiled(Base):
        def __init__(self):
            super().__init__()
            self.net = cnn()

        def setup(self, stage):
            self.net = torch.compile(self.net)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self.net(x), y)

    return Compiled(), Rows(1, 28, 28), {}
