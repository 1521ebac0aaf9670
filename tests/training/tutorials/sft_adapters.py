"""As https://huggingface.co/docs/trl/sft_trainer has it: prompts, completions and adapters of peft."""

import sys

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

model_name, data, output = sys.argv[1:]
dataset = load_dataset(data, split="train")

trainer = SFTTrainer(
    model_name,
    args=SFTConfig(output_dir=output, learning_rate=1.0e-4, use_cpu=True),
    train_dataset=dataset,
    peft_config=LoraConfig(),
)

trainer.train()
trainer.save_model()
