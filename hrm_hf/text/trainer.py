"""`CausalLMTrainer`: train causal language models from this package or transformers.

It adds logging of the loss components and metrics that a model returns, weighted by the tokens they average over;
learning rates for parameter groups; and batches of rows with similar length.
"""

import math
import random
from functools import partial
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import unwrap_peft_model

from ..models.early_exit import EXIT_CRITERIA
from ..models.hrm_lm_layers import run_layer
from ..models.retrofit_hrm_lm import NEW_WEIGHTS
from ..models.segment_plan import SegmentSchedule
from ..registry import has_ability
from ..trainer.base import HrmTrainer
from .arguments import LmTrainingArguments


# Loss components and metrics that are means over only some targets, each with the key of its count in `metrics`. The
# components with token counts add up to the language-model loss.
PART_COUNTS = {
    "plan_loss": "plan_tokens",
    "code_loss": "code_tokens",
    "refinement_loss": "decisions",
    "refinement_accuracy": "decisions",
}
# Inputs that determine which tokens the metrics count. Each maps to the value that excludes a token; the rows that
# Accelerate adds to fill the last batch get this value.
COUNTED_ONCE = dict.fromkeys(("labels", "shift_labels", "decision_labels", "scored_labels"), -100) | {
    "scored_bytes": 0
}
COUNTS = tuple(dict.fromkeys(PART_COUNTS.values()))
LM_LOG_FORMAT = {
    "loss": "loss {:7.4f}",
    "perplexity": "perplexity {:9.2f}",
    "plan_loss": "plan {:7.4f}",
    "code_loss": "code {:7.4f}",
    "refinement_loss": "refinement {:6.4f}",
    "avg_steps": "segments {:4.2f}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:9,.0f} tokens/s",
    "nonfinite_steps": "skipped {}",
    "mhc/amax_pre": "Amax pre {:.4f}",
    "mhc/amax_post": "post {:.4f}",
    "mhc/amax_composite": "composite {:.4f}",
    "eval_lm_loss": "held-out loss {:7.4f}",
    "eval_perplexity": "perplexity {:9.2f}",
    "eval_bits_per_byte": "bits per byte {:.4f}",
    "eval_avg_steps": "segments {:4.2f}",
    "eval_plan_loss": "plan {:7.4f}",
    "eval_code_loss": "code {:7.4f}",
    "eval_refinement_loss": "refinement {:6.4f}",
    "eval_refinement_accuracy": "decisions {:6.1%}",
}


class CausalLMTrainer(HrmTrainer):
    """Trainer for any causal language model from transformers or this package.

    Forward, loss, accumulation and clipping are as in transformers. Evaluations add `PREFIX_bits_per_byte`: for the
    text if `eval_bytes_per_token` is set, or only for the code if rows have `scored_labels` and `scored_bytes`.

    Args:
        model: causal LM; `ABILITIES` of the registry tells whether it has recurrent depth and parameter groups.
        args: see `LmTrainingArguments`.
        eval_bytes_per_token: average number of UTF-8 bytes per token of the evaluation data.
        kwargs: passed to `transformers.Trainer`.
    """

    arguments_class = LmTrainingArguments
    pipeline = "text-generation"
    log_format = LM_LOG_FORMAT
    _length_sampler: "LengthGroupedBatches | None" = None

    def __init__(
        self,
        model: Any = None,
        args: LmTrainingArguments | None = None,
        eval_bytes_per_token: float | None = None,
        **kwargs: Any,
    ):
        self.eval_bytes_per_token = eval_bytes_per_token
        super().__init__(model, args, **kwargs)
        if self.args.train_gate_only:
            freeze_all_but_gate(unwrap_peft_model(self.model))
        if self.args.train_adapters_only:
            freeze_all_but_adapters(self.model)

    def prepare_model(self, model: Any, args: LmTrainingArguments) -> None:
        """Compile a recurrent model one layer at a time, because the number of segments may vary from step to step."""
        super().prepare_model(model, args)
        if args.torch_compile and has_ability(model, "recurrent_depth"):
            self.compile_part(partial(compile_layers, unwrap_peft_model(model)), args)

    def validate_arguments(self) -> None:
        """Raise ValueError for label smoothing and other options that the model does not support."""
        super().validate_arguments()
        args, name = self.args, type(unwrap_peft_model(self.model)).__name__
        # With label smoothing, Trainer withholds labels from the model, and shifts them only for models that it knows.
        own_losses = has_ability(self.model, "recurrent_depth") or has_ability(self.model, "refinement")
        if args.label_smoothing_factor and (own_losses or name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor}: Trainer would replace the losses of "
                f"{name}; remove it, or use --config_overrides label_smoothing=... if the model has this field"
            )
        options = ("depth_warmup_ratio", "depth_ramp_ratio", "keep_one_pass", "train_gate_only", "train_adapters_only")
        given = [option for option in options if getattr(args, option)]
        if given and not has_ability(self.model, "recurrent_depth"):
            raise ValueError(f"{given[0]}: {name} has no segments and no halting gate; remove the option")
        if given and self.model.config.halt_max_steps == 1:
            raise ValueError(f"{given[0]}: a model with halt_max_steps=1 has no halting gate; remove the option")
        if args.lr_multipliers is not None and not has_ability(self.model, "parameter_groups"):
            raise ValueError(f"lr_multipliers={args.lr_multipliers}: {name} has no parameter groups; remove it")

    # ---- optimizer ----

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """Create the optimizer, with separate learning rates for the model's parameter groups."""
        if self.optimizer is None and has_ability(self.model, "parameter_groups"):
            self.optimizer = self.new_optimizer(self._named_groups(model or self.model))
        return super().create_optimizer(model)

    def _named_groups(self, model) -> list[dict[str, Any]]:
        """Return the model's parameter groups with their learning rates, each split by weight decay.

        "shared" comes first, because Trainer logs the learning rate of the first group.
        """
        decayed = set(self.get_decay_parameter_names(model))
        multipliers = self.args.group_multipliers()
        groups: dict[tuple[str, bool], list[torch.nn.Parameter]] = {}
        owner: dict[torch.nn.Parameter, tuple[str, str]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            group = self.model.parameter_group(name)
            if group not in multipliers:
                raise ValueError(f"{name}: group {group!r} must be one of {', '.join(multipliers)}")
            first, of = owner.setdefault(p, (group, name))
            if first != group:
                raise ValueError(f"{of} (group {first!r}) and {name} (group {group!r}) share a tensor; use one group")
            if of == name and p.requires_grad:
                groups.setdefault((group, name in decayed), []).append(p)
        if not groups:
            raise ValueError("nothing to train: all weights are frozen")
        return [
            {
                "name": group,
                "params": params,
                "lr": self.args.learning_rate * multipliers[group],
                "weight_decay": self.args.weight_decay if decay else 0.0,
            }
            for (group, decay), params in sorted(groups.items(), key=lambda item: (item[0][0] != "shared", item[0]))
        ]

    # ---- one step ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Compute the loss, and record each `*_loss` and 0-d tensor of `metrics` that the model returns.

        `scored_labels` and `scored_bytes` of evaluation rows are not passed to the model: see `_scored_terms`.
        """
        scored = {name: inputs[name] for name in ("scored_labels", "scored_bytes") if name in inputs}
        inputs = {name: value for name, value in inputs.items() if name not in scored}
        labels = inputs.get("shift_labels")
        if labels is None and inputs.get("labels") is not None:
            labels = inputs["labels"][..., 1:]
        if has_ability(self.model, "recurrent_depth"):
            state = self.state
            schedule = segment_schedule(self.args, self.model.config, state.global_step, state.max_steps)
            inputs["schedule"] = schedule
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        meter = self.train_metrics if model.training else self._eval_metrics
        if meter is not None and labels is not None:
            tokens = labels.ne(-100).sum().to(loss.device)
            terms = self._terms(loss.detach(), outputs, tokens, num_items_in_batch)
            if model.training and self.args.depth_ramp_ratio and not self.args.train_gate_only:
                terms["mean_segments"] = schedule.mean_segments * tokens.double()
            if "decision_labels" in inputs and outputs.get("refinement_logits") is not None:
                right = outputs["refinement_logits"].argmax(dim=-1) == inputs["decision_labels"]
                terms["refinement_accuracy"] = right.sum().double()  # an ignored label (-100) never matches
            meter.add(terms | (_scored_terms(outputs["logits"], **scored) if scored else {}))
        return (loss, outputs) if return_outputs else loss

    def _terms(self, loss, outputs, tokens, num_items_in_batch) -> dict[str, torch.Tensor]:
        """Convert the means that a model returns into sums over the tokens of this call.

        Terms in `PART_COUNTS` become sums over their own counts.
        """
        divided_by = tokens  # the model divided its loss by the token count of this call or of the complete step
        scale = 1  # the factor by which Trainer multiplied the loss; averaging in DDP cancels it
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            divided_by = num_items_in_batch
            scale = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        metrics = outputs.get("metrics") or {}
        counts = {name: metrics[name].double() for name in COUNTS if name in metrics}
        terms = {"loss": loss.double() * divided_by / scale}
        for name, value in outputs.items():
            if name.endswith("_loss") and torch.is_tensor(value) and value.dim() == 0:
                terms[name] = value.detach().double() * counts.get(PART_COUNTS.get(name), divided_by)
        for name, value in metrics.items():
            if value.dim() == 0 and name not in counts:
                terms[name] = value.detach().double() * counts.get(PART_COUNTS.get(name), tokens)
        # A mean over zero tokens is NaN. Count it as 0.
        terms = {name: torch.where(tokens > 0, value, 0.0) for name, value in terms.items()}
        return terms | counts | {"tokens": tokens.double()}

    # ---- data ----

    def _get_train_sampler(self, train_dataset=None):
        """Create the sampler: `LengthGroupedBatches` to group by length, else Trainer's."""
        train_dataset = self.train_dataset if train_dataset is None else train_dataset
        grouped = self.args.train_sampling_strategy == "group_by_length"
        if not grouped or self.args.length_column_name not in (train_dataset.column_names or ()):
            return super()._get_train_sampler(train_dataset)
        args = self.args
        self._length_sampler = LengthGroupedBatches(
            train_dataset[args.length_column_name],
            args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            args.seed if args.data_seed is None else args.data_seed,
        )
        return self._length_sampler

    def _run_epoch(self, *args: Any, epoch: int, **kwargs: Any):
        """Set the epoch of our sampler, which Trainer does not do on resuming, and run the epoch."""
        if self._length_sampler is not None:
            self._length_sampler.epoch = epoch
        return super()._run_epoch(*args, epoch=epoch, **kwargs)

    # ---- logging ----

    def _training_logs(self, sums: dict[str, float], steps: int, seconds: float) -> dict[str, float]:
        """Return tokens per second, and the metrics since the last log, averaged over the tokens of all processes."""
        tokens = sums.pop("tokens", 0.0)
        logs = {"tokens_per_second": tokens / seconds}
        if tokens:
            logs |= self._token_means(sums, tokens, smoothed=self.label_smoother is not None)
            del logs["loss"]  # Trainer already logs the loss, as a mean over steps
        return logs

    @staticmethod
    def _token_means(sums: dict[str, float], tokens: float, smoothed: bool) -> dict[str, float]:
        """Convert sums to means, and add `lm_loss` and `perplexity` if they can be computed from the terms.

        `lm_loss` is the model's own if it returns one, else the mean over all components with token counts, else (for
        a model without components) the loss.
        """
        counts = {name: sums.pop(name) for name in COUNTS if name in sums}
        count_of = {name: counts[PART_COUNTS[name]] for name in sums if PART_COUNTS.get(name) in counts}
        means = {name: value / count_of.get(name, tokens) for name, value in sums.items() if count_of.get(name, 1)}
        over_tokens = [name for name in count_of if PART_COUNTS[name].endswith("_tokens")]
        if over_tokens:
            means["lm_loss"] = sum(sums[name] for name in over_tokens) / max(1, sum(map(count_of.get, over_tokens)))
        elif not smoothed and not any(name.endswith("_loss") for name in means):
            means["lm_loss"] = means["loss"]
        if "lm_loss" in means:
            means["perplexity"] = math.exp(means["lm_loss"]) if means["lm_loss"] < 700 else math.inf
        return means

    # ---- evaluation ----

    def _evaluation_means(self, sums: dict[str, float], prefix: str) -> dict[str, float]:
        tokens = sums.pop("tokens")
        if not tokens:
            raise ValueError("the evaluation data have no targets: every label is -100; check the data")
        nats, size_of_scored = sums.pop("scored_nats", None), sums.pop("scored_bytes", None)
        counts = {name: int(sums[name]) for name in COUNTS if name in sums}
        means = self._token_means(sums, tokens, smoothed=False)
        if self.eval_bytes_per_token is not None and "lm_loss" in means:
            means["bits_per_byte"] = means["lm_loss"] / math.log(2) / self.eval_bytes_per_token
        if size_of_scored:
            means |= {"bits_per_byte": nats / math.log(2) / size_of_scored, "scored_bytes": int(size_of_scored)}
        return {f"{prefix}_{name}": value for name, value in {**means, **counts, "tokens": int(tokens)}.items()}

    def prediction_step(self, model, inputs, *args: Any, **kwargs: Any):
        """Run Trainer's prediction step, ignoring rows that accelerate repeats to fill the last batch."""
        labelled = {name: inputs[name] for name in COUNTED_ONCE if name in inputs}
        for name, labels in labelled.items():
            counting = self._rows_that_count(len(labels))
            if counting < len(labels):
                labels = labels.clone()
                labels[counting:] = COUNTED_ONCE[name]
                inputs = {**inputs, name: labels}
        return super().prediction_step(model, inputs, *args, **kwargs)


def segment_schedule(args: LmTrainingArguments, config: Any, step: int, max_steps: int) -> SegmentSchedule:
    """Return a step's segment schedule. It depends only on the step, so a resumed run repeats it.

    The backpropagation depth grows linearly from its minimum to the config's `bp_steps` ("warm-up deep credit
    assignment" of HRM-Text). Steps with one segment cost as much as a plain model with the same weights.
    """
    if args.train_gate_only:
        return SegmentSchedule(segments=config.halt_max_steps, halting=False, gate_only=True)
    first, final, warmup = (1 if config.flat_loop else 2), config.bp_steps, args.bp_warmup_ratio * max_steps
    begin = args.depth_warmup_ratio * max_steps
    one_pass = step < begin or random.Random(f"{args.seed} {step}").random() < args.keep_one_pass
    return SegmentSchedule(
        bp_steps=final if step >= warmup else first + int((final - first) * step / warmup),
        segments=1 if one_pass else None,
        mean_segments=mean_segments(args, config.halt_max_steps, (step - begin) / max(max_steps, 1)),
        halting=step >= args.halt_warmup_ratio * max_steps,
    )


def mean_segments(args: LmTrainingArguments, most: int, progress: float) -> int:
    """Return the scheduled mean number of segments, rounded up (McLeish et al., arXiv 2511.07384).

    It ramps up from 1 to `most`. `progress` is the fraction of the run since the ramp began.
    """
    t = min(max(progress, 0) / args.depth_ramp_ratio, 1) if args.depth_ramp_ratio else 1
    grown = (most - 1) * (t if args.depth_ramp == "linear" else 1 - math.sqrt(1 - t))
    return math.ceil(1 + round(grown, 9))  # floating-point error must not add a segment


def freeze_all_but_gate(model: Any) -> None:
    """Freeze all but the halting gate, and set exit criterion q unless the config has a learned criterion."""
    model.requires_grad_(False)
    model.base_model.q_head.requires_grad_(True)
    if not EXIT_CRITERIA[model.config.exit_criterion].learned:
        model.config.exit_criterion = "q"


def freeze_all_but_adapters(model: Any) -> None:
    """Freeze all but the weights that a loop adds to a decoder. Raise ValueError if there are none."""
    added = [name for name, _ in model.named_parameters() if NEW_WEIGHTS.fullmatch(name) and ".q_head." not in name]
    if not added:
        raise ValueError(
            "train_adapters_only=True: the model adds no weights to its decoder; set input_injection, loop_step or "
            "pass_lora_rank in --config_overrides"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in added)


def compile_layers(model: Any, **options: Any) -> None:
    """Compile a recurrent model's layers for training with `torch.compile(**options)`. Inference is not compiled."""
    model.base_model.compiled_layer = torch.compile(run_layer, **options)


def _scored_terms(logits: torch.Tensor, scored_labels: torch.Tensor, scored_bytes: torch.Tensor) -> dict:
    """Return summed cross-entropy (nats) and bytes of the scored text, for bits per byte."""
    targets = scored_labels[:, 1:]
    scored = targets != -100
    nats = torch.nn.functional.cross_entropy(logits[:, :-1][scored].float(), targets[scored], reduction="sum")
    return {"scored_nats": nats.double(), "scored_bytes": scored_bytes.sum().double()}


class LengthGroupedBatches(Sampler):
    """Sampler that groups rows of similar length into batches and shuffles the batches.

    Trainer's own sampler uses the random state of the process, which is lost when a run is resumed. Here the order
    depends only on seed and epoch.

    Args:
        lengths: lengths of the rows.
        batch_size: rows of an optimizer step, over all processes.
        seed: random seed of the order.
    """

    GROUP = 50  # number of batches sorted together; a larger number means less padding, but also less mixing

    def __init__(self, lengths, batch_size: int, seed: int):
        self.lengths = torch.as_tensor(lengths)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        full = len(order) // self.batch_size * self.batch_size  # number of rows in full steps; the rest come last
        groups = [group[self.lengths[group].argsort()] for group in order[:full].split(self.GROUP * self.batch_size)]
        batches = torch.cat([*groups, order[:0]]).view(-1, self.batch_size)
        batches = batches[torch.randperm(len(batches), generator=generator)]
        return iter([*batches.flatten().tolist(), *order[full:].tolist()])
