"""Steps that need special care: adversaries, packed sequences, preferences, compilation."""

import peft
import torch
import transformers
from ordinary import case
from records import WORDS, Base, Classifies, Records, Rows, SentencePairs, Text, Trained, gpt2, masked, pad
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence


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


@case("packed BiLSTM, dynamic padding", "bentrevett/pytorch-sentiment-analysis")
def _():
    class Packed(Base):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(WORDS, 32, padding_idx=0)
            self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
            self.head = nn.Linear(64, 2)

        def training_step(self, batch, batch_idx):
            lengths = batch["attention_mask"].sum(1).cpu()
            packed = pack_padded_sequence(
                self.words(batch["input_ids"]), lengths, batch_first=True, enforce_sorted=False
            )
            _, (h, _) = self.lstm(packed)
            return F.cross_entropy(self.head(torch.cat([h[-2], h[-1]], 1)), batch["labels"])

    return Packed(), Text(), {"collate_fn": pad}


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
        return masked(chosen + rejected)

    model = transformers.GPT2ForSequenceClassification(config)
    return Reward(model), SentencePairs(), {"collate_fn": pad_preferences}


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
