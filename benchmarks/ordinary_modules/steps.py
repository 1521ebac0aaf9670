"""Steps that need special care: adversaries, packed sequences, experts, preferences, a teacher, compilation."""

import copy

import peft
import torch
import transformers
from ordinary import case
from records import WORDS, Base, Classifies, Records, Rows, SentencePairs, Text, Trained, gpt2, pad, pad_fixed
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 49, 3)
    )


@case("PGD adversarial training", "MadryLab/robustness")
def _():
    class Pgd(Classifies):
        def training_step(self, batch, batch_idx):
            x, y = batch
            delta = torch.zeros_like(x).uniform_(-0.1, 0.1)
            for _ in range(3):
                delta.requires_grad_()
                loss = F.cross_entropy(self.net(x + delta), y)
                (grad,) = torch.autograd.grad(loss, [delta])
                delta = (delta.detach() + 0.03 * grad.sign()).clamp(-0.1, 0.1)
            return F.cross_entropy(self.net(x + delta.detach()), y)

    return Pgd(cnn()), Rows(1, 28, 28), {}


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

    def speech(i):
        g = torch.Generator().manual_seed(i)
        words, length = torch.randint(1, 10, (8,), generator=g), torch.randint(3, 9, (), generator=g)
        return torch.rand(8, 40, generator=g), words, length

    return Ctc(), Records(speech), {}


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


@case("DPO with disable_adapter", "huggingface/trl DPOTrainer")
def _():
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

    def pair(i):
        g = torch.Generator().manual_seed(i)
        return {k: torch.randint(5, WORDS, (24,), generator=g) for k in ("chosen", "rejected")}

    return Dpo(), Records(pair), {}


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


@case("knowledge distillation, DistilGPT-2", "huggingface/transformers research_projects/distillation")
def _():
    class Distiller(Base):
        def __init__(self, temperature=2.0):
            super().__init__()
            self.student, self.temperature = gpt2(), temperature
            self.teacher = copy.deepcopy(self.student).eval()
            for parameter in self.teacher.parameters():
                parameter.requires_grad = False
            self.ce_loss_fct = nn.KLDivLoss(reduction="batchmean")

        def training_step(self, batch, batch_idx):
            input_ids, attention_mask = batch["input_ids"], batch["attention_mask"]
            labels = input_ids.masked_fill(attention_mask == 0, -100)
            student = self.student(input_ids, attention_mask=attention_mask, labels=labels)
            with torch.no_grad():
                teacher_logits = self.teacher(input_ids, attention_mask=attention_mask).logits
            mask = attention_mask.bool().unsqueeze(-1).expand_as(student.logits)
            s_logits_slct = torch.masked_select(student.logits, mask).view(-1, student.logits.size(-1))
            t_logits_slct = torch.masked_select(teacher_logits, mask).view(-1, student.logits.size(-1))
            loss_ce = self.ce_loss_fct(
                F.log_softmax(s_logits_slct / self.temperature, dim=-1),
                F.softmax(t_logits_slct / self.temperature, dim=-1),
            )
            return 5.0 * loss_ce * self.temperature**2 + 2.0 * student.loss

    return Distiller(), Text(), {"collate_fn": pad_fixed}


@case("compiled by the user: module.compile()", "")
def _():
    module = Classifies(cnn())
    module.net.compile()
    return module, Rows(1, 28, 28), {}


@case("compiled by the user: configure_model", "")
def _():
    class Compiled(Classifies):
        def setup(self, stage):
            self.net = torch.compile(self.net)

    return Compiled(cnn()), Rows(1, 28, 28), {}
