"""Train a tiny Llama for two steps, and write what each process saw; for trainer/test_accelerate_configs.py.

torchrun --nproc_per_node 2 launched_training.py OUTPUT_DIR
"""

import json
import os
import sys

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def main(out: str) -> None:
    torch.set_num_threads(1)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    ids = [[(i * 7 + j * 3) % 32 for j in range(8)] for i in range(8)]
    share = 8 // int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        output_dir=out, use_cpu=True, max_steps=2, per_device_train_batch_size=share,
        train_sampling_strategy="sequential", learning_rate=1e-2, lr_scheduler_type="constant", save_strategy="no",
        report_to="none", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows)
    trainer.train()
    trainer.save_model(out)
    seen = {
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    with open(os.path.join(out, f"seen-{os.environ.get('RANK', '0')}.json"), "w") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    main(sys.argv[1])
