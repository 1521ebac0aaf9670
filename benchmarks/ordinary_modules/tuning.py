"""Fine-tuning of transformers' models."""

import torch
import transformers
from ordinary import case
from peft import LoraConfig, get_peft_model
from records import (
    WORDS,
    Records,
    Rows,
    SentencePairs,
    Text,
    Trained,
    Tuned,
    bert,
    masked,
    pad,
    pad_fixed,
    pad_fixed_causal,
    padded,
    sizes,
)
from torch import nn
from torch.nn import functional as F


@case("Llama, gradient checkpointing", "huggingface/trl sft")
def _():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes()))
    model.gradient_checkpointing_enable()
    return Tuned(model), Text(), {"collate_fn": pad_fixed_causal}


@case("BERT, dynamic padding", "huggingface/notebooks text_classification")
def _():
    return Tuned(bert()), Text(), {"collate_fn": pad}


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
        batch["labels"] = padded(summaries, -100)
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
        return [masked(a), masked(b)], torch.stack(y)

    return Cosine(), SentencePairs(), {"collate_fn": pad_each}


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
    x = Rows(800).x

    def record(i):
        return {"input_values": x[i, : 600 + 20 * (i % 11)], "labels": torch.arange(3 + i % 3) * (i + 1) % 18 + 1}

    def pad_speech(items):
        values, labels = ([item[key] for item in items] for key in ("input_values", "labels"))
        return {"input_values": padded(values), "labels": padded(labels, -100)}

    return Trained(model), Records(record), {"collate_fn": pad_speech}


@case("masked language model", "huggingface/transformers run_mlm.py")
def _():
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

    return Tuned(transformers.BertForMaskedLM(transformers.BertConfig(**sizes()))), Text(), {"collate_fn": mask_tokens}


@case("instruction tuning, Qwen2", "huggingface/trl SFTTrainer (completion only)")
def _():
    config = transformers.Qwen2Config(**sizes(num_key_value_heads=2, max_position_embeddings=64))
    model = transformers.Qwen2ForCausalLM(config)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]))

    def completion_only(items):
        batch = pad_fixed(items)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :4] = -100
        return batch | {"labels": labels}

    return Tuned(model), Text(), {"collate_fn": completion_only}


HYBRIDS = {
    "Falcon-H1": ("FalconH1", {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8,
        "head_dim": 8,
    }),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "Qwen3-Next": ("Qwen3Next", {
        "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8,
    }),
}  # fmt: skip
for name, (of, own) in HYBRIDS.items():

    def hybrid(of=of, own=own):
        config = getattr(transformers, f"{of}Config")(
            **sizes(hidden_size=32, intermediate_size=64, num_key_value_heads=2, **own)
        )
        model = getattr(transformers, f"{of}ForCausalLM")(config)
        return Tuned(model), Text(), {"collate_fn": pad_fixed_causal}

    case(name, "huggingface/transformers")(hybrid)
