"""Fine-tuning of transformers' models, and losses of pairs."""

import copy

import numpy as np
import pytorch_lightning as pl
import torch
import transformers
from ordinary import N, case
from peft import LoraConfig, get_peft_model
from steps import WORDS, Base, Rows, Text, Tuned, bert, gpt2, pad, pad_fixed
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence


@case("LoRA classifier", "huggingface/peft examples/sequence_classification")
def _():
    config = transformers.RobertaConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=40,
    )  # fmt: skip
    model = transformers.RobertaForSequenceClassification(config)
    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, lora_dropout=0.1))

    class Module(Tuned):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(params=self.model.parameters(), lr=3e-4)
            scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 6, 100)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Module(model), Text(), {"collate_fn": pad_fixed}


def pad_labels(items):
    batch = pad([{"input_ids": item["input_ids"], "labels": item["labels"]} for item in items])
    batch["labels"] = pad_sequence([item["input_ids"] % 5 for item in items], True, padding_value=-100)
    return batch


@case("token classification", "huggingface/transformers run_ner.py")
def _():
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=64, n_layers=2, n_heads=4, hidden_dim=128, num_labels=5
    )

    class Module(Tuned):
        def configure_optimizers(self):
            no_decay = ["bias", "LayerNorm.weight"]
            rest = [p for n, p in self.model.named_parameters() if not any(nd in n for nd in no_decay)]
            zero = [p for n, p in self.model.named_parameters() if any(nd in n for nd in no_decay)]
            groups = [{"params": rest, "weight_decay": 0.01}, {"params": zero, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=5e-5)

    return Module(transformers.DistilBertForTokenClassification(config)), Text(), {"collate_fn": pad_labels}


@case("T5 summarization, label smoothing", "huggingface/transformers run_summarization.py")
def _():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)

    class Smoothed(Tuned):
        def training_step(self, batch, batch_idx):
            labels = batch["labels"]
            outputs = self.model(**batch)
            log_probs = -F.log_softmax(outputs.logits, dim=-1)
            labels = labels.unsqueeze(-1)
            padding_mask = labels.eq(-100)
            labels = torch.clamp(labels, min=0)
            nll_loss = log_probs.gather(dim=-1, index=labels)
            smoothed_loss = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float32)
            nll_loss.masked_fill_(padding_mask, 0.0)
            smoothed_loss.masked_fill_(padding_mask, 0.0)
            num_active = padding_mask.numel() - padding_mask.long().sum()
            smoothed = smoothed_loss.sum() / (num_active * log_probs.shape[-1])
            return 0.9 * nll_loss.sum() / num_active + 0.1 * smoothed

        def configure_optimizers(self):
            return transformers.Adafactor(self.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)

    def pad_pairs(items):
        batch = pad_fixed(items)
        batch["labels"] = F.pad(batch["input_ids"][:, :10], (0, 2)).masked_fill(
            F.pad(batch["input_ids"][:, :10], (0, 2)) == 0, -100
        )
        return batch

    return Smoothed(model), Text(), {"collate_fn": pad_pairs}


class Pairs(Text):
    """Two sentences each, padded to 24 words."""

    def __getitem__(self, i):
        a, b = self.ids[i], self.ids[(i + 1) % N]
        return {"a": F.pad(a, (0, 24 - len(a))), "b": F.pad(b, (0, 24 - len(b))), "labels": self.y[i]}


@case("sentence pairs, cosine loss", "UKPLab/sentence-transformers CosineSimilarityLoss")
def _():
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = bert().bert
            self.loss_fct = nn.MSELoss()

        def mean_pooling(self, ids):
            attention_mask = (ids > 0).long()
            token_embeddings = self.model(ids, attention_mask).last_hidden_state
            input_mask_expanded = (
                attention_mask.unsqueeze(-1).expand(token_embeddings.size()).to(token_embeddings.dtype)
            )
            total = torch.sum(token_embeddings * input_mask_expanded, 1)
            return total / torch.clamp(input_mask_expanded.sum(1), min=1e-9)

        def training_step(self, batch, batch_idx):
            embeddings = [self.mean_pooling(ids) for ids in (batch["a"], batch["b"])]
            output = torch.cosine_similarity(embeddings[0], embeddings[1])
            return self.loss_fct(output, batch["labels"].float().view(-1))

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=2e-5)

    return Module(), Pairs(), {}


@case("Whisper fine-tuning", "huggingface/transformers run_speech_recognition_seq2seq.py")
def _():
    config = transformers.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=32,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip

    class Speech(Rows):
        def __getitem__(self, i):
            labels = torch.arange(12) * (i + 1) % (WORDS - 5) + 5
            labels[6 + i % 6 :] = -100
            return {"input_features": self.x[i], "labels": labels}

    return Tuned(transformers.WhisperForConditionalGeneration(config)), Speech(16, 64), {}


@case("reward model, pairs", "huggingface/trl RewardTrainer")
def _():
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=64, n_layer=2, n_head=4, num_labels=1, pad_token_id=0
    )
    model = transformers.GPT2ForSequenceClassification(config)

    class Reward(Base):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, batch_idx):
            ids = torch.cat((batch["a"], batch["b"]), dim=0)
            rewards = self.model(input_ids=ids, attention_mask=(ids > 0).long(), return_dict=True).logits.squeeze(-1)
            rewards_chosen, rewards_rejected = torch.chunk(rewards, chunks=2)
            loss = -F.logsigmoid(rewards_chosen - rewards_rejected).mean()
            loss += 0.01 * torch.mean((rewards_chosen + rewards_rejected) ** 2)
            return loss

    return Reward(), Pairs(), {}


@case("CLIP", "mlfoundations/open_clip")
def _():
    class Clip(pl.LightningModule):
        def __init__(self, d=32):
            super().__init__()
            self.visual = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(128, d))
            self.token_embedding, self.text = nn.Embedding(WORDS, d), nn.GRU(d, d, batch_first=True)
            self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

        def training_step(self, batch, batch_idx):
            images, texts = batch
            image_features = F.normalize(self.visual(images), dim=-1)
            text_features = F.normalize(self.text(self.token_embedding(texts))[0][:, -1], dim=-1)
            logits_per_image = self.logit_scale.exp() * image_features @ text_features.T
            labels = torch.arange(logits_per_image.shape[0], device=images.device, dtype=torch.long)
            return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_image.T, labels)) / 2

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6)

        def on_before_zero_grad(self, optimizer):
            with torch.no_grad():
                self.logit_scale.clamp_(0, np.log(100))

    class Captioned(Rows):
        def __getitem__(self, i):
            return self.x[i], torch.arange(8) * (i + 1) % WORDS

    return Clip(), Captioned(3, 16, 16), {}


@case("masked language model", "huggingface/transformers run_mlm.py")
def _():
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )

    def mask_tokens(items):
        batch = pad_fixed(items)
        inputs, labels = batch["input_ids"], batch["input_ids"].clone()
        probability_matrix = torch.full(labels.shape, 0.15).masked_fill_(labels == 0, value=0.0)
        masked_indices = torch.bernoulli(probability_matrix).bool()
        labels[~masked_indices] = -100
        indices_replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & masked_indices
        inputs[indices_replaced] = 4
        indices_random = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & masked_indices & ~indices_replaced
        inputs[indices_random] = torch.randint(WORDS, labels.shape, dtype=torch.long)[indices_random]
        return batch | {"labels": labels}

    return Tuned(transformers.BertForMaskedLM(config)), Text(), {"collate_fn": mask_tokens}


@case("wav2vec2, CTC", "huggingface/transformers run_speech_recognition_ctc.py")
def _():
    config = transformers.Wav2Vec2Config(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16, 16), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, ctc_loss_reduction="mean",
        pad_token_id=0, ctc_zero_infinity=True,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()

    class Speech(Rows):
        def __getitem__(self, i):
            labels = torch.arange(6) * (i + 1) % 18 + 1
            labels[3 + i % 3 :] = -100
            return {"input_values": self.x[i], "labels": labels}

    return Tuned(model), Speech(800), {}


@case("instruction tuning, Qwen2", "huggingface/trl SFTTrainer (completion only)")
def _():
    config = transformers.Qwen2Config(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]))

    def completion_only(items):
        batch = pad_fixed(items)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :4] = -100
        return batch | {"labels": labels}

    return Tuned(model), Text(), {"collate_fn": completion_only}


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
