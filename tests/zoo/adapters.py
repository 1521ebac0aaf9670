"""Parameter-efficient fine-tuning of language models, by PEFT."""

import peft
from torch import nn

from zoo import Model
from zoo.text import GPT2, T5, causal, classified, of, translated

LLAMA = of("LlamaForCausalLM", num_key_value_heads=2)
LAYERS = ["q_proj", "v_proj", "up_proj"]


def with_(base, config, task: str = "CAUSAL_LM", rate: str | None = None, **options):
    """rate: the name of its dropout rate."""

    def build(dropout: bool) -> nn.Module:
        rates = {rate: 0.1 * dropout} if rate else {}
        module = peft.get_peft_model(base(dropout), config(task_type=task, **options, **rates))
        with_noise(module)
        return module

    return build


def with_noise(module: nn.Module) -> None:
    """Adapters are initialized with zeros, where many gradients are zero."""
    for p in module.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.1) if p.dim() > 1 else p.data.add_(0.1)


LORA = {"r": 4, "target_modules": LAYERS}
MODELS = {
    "LoRA on Llama": Model(with_(LLAMA, peft.LoraConfig, rate="lora_dropout", **LORA), causal),
    "rsLoRA on Llama, biases and head": Model(
        with_(LLAMA, peft.LoraConfig, rate="lora_dropout", **LORA, use_rslora=True, modules_to_save=["lm_head"]), causal
    ),
    "LoRA on GPT-2": Model(
        with_(of("GPT2LMHeadModel", **GPT2), peft.LoraConfig, r=4, target_modules=["c_attn"], fan_in_fan_out=True),
        causal,
    ),
    "LoRA on BERT": Model(
        with_(of("BertForSequenceClassification"), peft.LoraConfig, "SEQ_CLS", r=4, target_modules=["query", "value"]),
        classified,
    ),
    "LoRA on an embedding": Model(
        with_(LLAMA, peft.LoraConfig, r=4, target_modules=["embed_tokens", "v_proj"]), causal
    ),
    "DoRA on Llama": Model(with_(LLAMA, peft.LoraConfig, rate="lora_dropout", **LORA, use_dora=True), causal),
    "IA3 on Llama": Model(
        with_(
            LLAMA, peft.IA3Config, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        causal,
    ),
    "LoHa on Llama": Model(
        with_(LLAMA, peft.LoHaConfig, rate="module_dropout", r=4, target_modules=["q_proj"]), causal
    ),
    "LoKr on Llama": Model(
        with_(LLAMA, peft.LoKrConfig, rate="module_dropout", r=4, target_modules=["q_proj"]), causal
    ),
    "OFT on Llama": Model(with_(LLAMA, peft.OFTConfig, oft_block_size=4, r=0, target_modules=["q_proj"]), causal),
    "VeRA on Llama": Model(
        with_(LLAMA, peft.VeraConfig, rate="vera_dropout", r=4, target_modules=["q_proj", "o_proj"]), causal
    ),
    "norms alone of Llama": Model(with_(LLAMA, peft.LNTuningConfig), causal),
    "prompt tuning on Llama": Model(with_(LLAMA, peft.PromptTuningConfig, num_virtual_tokens=3), causal),
    "P-tuning on Llama": Model(
        with_(LLAMA, peft.PromptEncoderConfig, num_virtual_tokens=3, encoder_hidden_size=16), causal
    ),
    "prefix tuning on Llama": Model(with_(LLAMA, peft.PrefixTuningConfig, num_virtual_tokens=3), causal),
    "prefix tuning on GPT-2": Model(
        with_(
            of("GPT2LMHeadModel", **GPT2), peft.PrefixTuningConfig, num_virtual_tokens=3, prefix_projection=True,
            encoder_hidden_size=16,
        ),
        causal,
    ),
    "LoRA on T5": Model(
        with_(of("T5ForConditionalGeneration", **T5), peft.LoraConfig, "SEQ_2_SEQ_LM", r=4, target_modules=["q", "v"]),
        translated,
    ),
}  # fmt: skip
