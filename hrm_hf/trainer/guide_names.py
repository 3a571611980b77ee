"""Tables that map the option names in each original project's guide to our names."""

from collections.abc import Collection
from typing import NamedTuple


class Guide(NamedTuple):
    """Mapping from the option names that one training guide uses (with underscores) to the names of our options."""

    page: str  # page in docs/coming_from
    option: str  # an option that only the scripts for this guide's models have
    names: dict[str, str]
    fields: str | None = None  # prefix that the guide uses for fields of the model's config


HRM_LM = Guide(
    "hrm_lm_distributed",
    "tokenizer_name",
    {
        "batch_size": "--per_device_train_batch_size (of one GPU), or --global_batch_size (of all)",
        "dataset_name": "--train_data NAME:CONFIG", "dataset_config": "--train_data NAME:CONFIG",
        "train_samples": "--max_train_samples", "val_samples": "--max_eval_samples", "tokenizer": "--tokenizer_name",
        "epochs": "--num_train_epochs", "fast_mode": "--streaming false", "no_streaming": "--streaming false",
        "wandb": "--report_to wandb", "no_wandb": "--report_to none", "lr": "--learning_rate",
        "model": "--recipe training/recipes/hrm_lm_50m.yaml (or 100m), or --model_name_or_path for saved weights",
        "gpus": "training/launch.py --gpus", "dry_run": "training/launch.py --dry_run",
        "verbose": "training/launch.py --verbose", "master_port": "training/launch.py --master_port",
    },
)  # fmt: skip
RLM_MHC = Guide(
    "rlm_mhc",
    "tokenizer_name",
    {
        "model.gradient_checkpointing": "--activation_checkpointing",
        "model.max_seq_len": "--block_size, and max_position_embeddings in --config_overrides",
        "training.optimizer.type": "--optim", "training.optimizer.lr": "--learning_rate",
        "training.optimizer.betas": "--adam_beta1 and --adam_beta2", "training.optimizer.eps": "--adam_epsilon",
        "training.scheduler.type": "--lr_scheduler_type", "data.num_workers": "--dataloader_num_workers",
        "training.scheduler.min_lr_ratio": "--lr_min_ratio", "training.batch_size": "--per_device_train_batch_size",
        "training.mixed_precision": "--bf16 true or --fp16 true",
        "training.gradient_checkpointing": "--activation_checkpointing", "data.max_length": "--block_size",
        "training.wandb.project": "--report_to wandb, with WANDB_PROJECT set", "data.train_path": "--train_data",
        "training.wandb.entity": "--report_to wandb, with WANDB_ENTITY set", "data.val_path": "--eval_data",
        "resume_from_checkpoint": "--resume_from_checkpoint",
    },
    fields="model.",
)  # fmt: skip
PERLMUTTER = Guide(
    "hrm_perlmutter",
    "puzzle_embeddings",
    {
        "data_path": "--data_path", "epochs": "--num_train_epochs", "eval_interval": "--eval_steps, in steps",
        "checkpoint_every_eval": "--save_strategy steps", "batch_size": "--global_batch_size",
        "lr": "--learning_rate", "lr_warmup_steps": "--warmup_steps", "beta1": "--adam_beta1",
        "beta2": "--adam_beta2", "project_name": "WANDB_PROJECT, with --report_to wandb",
        "checkpoint_path": "--output_dir", "eval_save_outputs": "hrm-hf eval puzzles --out",
        "arch": "--model_type", "arch.name": "--model_type", "arch.loss.name": "--config_overrides loss_type=...",
        "arch.loss.loss_type": "--config_overrides loss_type=...",
        "arch.num_heads": "--config_overrides num_attention_heads=...",
        "arch.rope_theta": "--config_overrides 'rope_parameters={rope_type: default, rope_theta: ...}'",
    },
    fields="arch.",
)  # fmt: skip
COSMOLOGY = Guide(
    "cosmology_hpc",
    "noise_sigma",
    {
        "epochs": "--num_train_epochs", "batch_size": "--per_device_train_batch_size", "lr": "--learning_rate",
        "data_type": "--data_path DIR --build_data 'cosmology --kind ...'", "train_samples": "--max_train_samples",
        "num_workers": "--dataloader_num_workers", "no_compile": "--torch_compile false",
        "wandb_project": "--report_to wandb, with WANDB_PROJECT set", "wandb_run_name": "--run_name",
        "wandb_offline": "--report_to wandb, with WANDB_MODE=offline", "no_wandb": "--report_to none",
        "resume": "--resume_from_checkpoint", "debug": "--recipe training/recipes/cosmo_debug.yaml",
    },
)  # fmt: skip
GO_CODER = Guide(
    "go_coder",
    "plan_budget",
    {
        "batch_size": "--per_device_train_batch_size", "eval_batch_size": "--per_device_eval_batch_size",
        "planner_lr": "--lr_multipliers planner=...", "generator_lr": "--lr_multipliers generator=...",
        "refinement_lr": "--lr_multipliers refinement=...", "tokenizer_file": "--tokenizer_name",
        "n_positions": "--max_length", "n_embd": "--config_overrides n_embd=... (gpt2) or hidden_size=...",
        "n_head": "--config_overrides n_head=... (gpt2) or num_attention_heads=...",
        "n_layer": "--config_overrides n_layer=... (gpt2) or planner_layers=...,generator_layers=...",
    },
)  # fmt: skip
GUIDES = (GO_CODER, HRM_LM, RLM_MHC, PERLMUTTER, COSMOLOGY)
# Values of --model in the guides' launchers.
MODELS = {"50m": "hrm-lm-50m", "100m": "hrm-lm-100m"}


def name_of_guide(key: str, valid: Collection[str]) -> str | None:
    """Return a hint with our name for an option from a guide, or None if no guide for this script lists the option."""
    name = key.lstrip("+-").replace("-", "_")
    for guide in GUIDES:
        if guide.option not in valid:
            continue
        found, last = guide.names.get(name), name.rpartition(".")[2]
        if found is None and guide.fields and name.startswith(guide.fields):
            found = f"--config_overrides {name.removeprefix(guide.fields)}=..."
        elif found is None and guide.fields and last != name and last in valid:
            found = f"--{last}"
        if found:
            return f"use {found}; see docs/coming_from/{guide.page}.md"
    return None
