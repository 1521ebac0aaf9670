"""As https://huggingface.co/docs/trl/sft_trainer has it: conversations, and settings that save memory."""

import sys

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

model_name, data, output = sys.argv[1:]
dataset = load_dataset(data)

training_args = SFTConfig(
    output_dir=output,
    max_length=64,
    bf16=True,
    use_cpu=True,
    gradient_checkpointing=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=8,
    learning_rate=2.0e-5,
    eval_strategy="steps",
    eval_steps=2,
    logging_steps=1,
    save_steps=1,
    save_total_limit=2,
)

trainer = SFTTrainer(
    model=model_name,
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
)

trainer.train()
trainer.save_model()
