"""Fine-tuning of transformers' models, and losses of pairs."""

import copy

import torch
import transformers
from ordinary import case
from peft import LoraConfig, get_peft_model
from steps import WORDS, Base, Text, Tuned, gpt2, pad, pad_fixed
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence


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
