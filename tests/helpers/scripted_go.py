"""A stand-in for a Go coder with known plans, code, decisions and probabilities."""

from types import SimpleNamespace

import tiny_go
import torch
from transformers.utils import ModelOutput

from hrm_hf.models.processing_hrm_go_coder import TOKEN_IDS, encode_text, plan_segment
from hrm_hf.models.refinement_hrm_go_coder import Attempt, RefinementOutput


def ids_of_plan(plan):
    return plan_segment(tiny_go.tokenizer(), plan["intent"], plan["targets"], [step["text"] for step in plan["steps"]])


def generated(input_ids, written, pad, criteria):
    """Return the output of a `generate` that appends these ids to each row; stopping criteria stop nothing."""
    longest = max(map(len, written))
    new = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in written])
    sequences = torch.cat([input_ids, new], dim=1)
    for width in range(input_ids.shape[1] + 1, sequences.shape[1] + 1):
        for criterion in criteria:
            criterion(sequences[:, :width], None)
    return ModelOutput(sequences=sequences, past_key_values=None)


class Scripted:
    """A "model" that writes a scripted answer for each record, with any probabilities.

    script: for each record {"plan", "body", "repair": a body, "attempts": bodies of one loop,
        "samples": of the control}.
    boost: (ids, position) -> logit of the right next token; the others are 0.
    """

    device = torch.device("cpu")

    def __init__(self, records=(), script=(), default_plan="ADD", default_body=" }", boost=None, kind="hrm_go_coder"):
        self.config = SimpleNamespace(model_type=kind, max_position_embeddings=512, decision_temperature=1.0)
        self.script = list(zip(records, script))
        self.default = {"plan": {"intent": default_plan, "targets": [], "steps": []}, "body": default_body}
        self.boost, self.calls, self.code_prompts, self.drawn = boost, 0, [], {}

    def entry(self, ids):
        prompts = [(tiny_go.builder().prompt_ids(record), entry) for record, entry in self.script]
        return next((entry for prompt, entry in prompts if ids[: len(prompt)] == prompt), self.default)

    def generate(self, input_ids, attention_mask, max_new_tokens, eos_token_id, pad_token_id, **how):
        self.calls += 1
        rows = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask)]
        written = [self.written(ids)[:max_new_tokens] for ids in rows]
        return generated(input_ids, written, pad_token_id, how.get("stopping_criteria", ()))

    def written(self, ids):
        entry = self.entry(ids)
        if ids[-1] == TOKEN_IDS["<PLAN>"]:
            return ids_of_plan(entry["plan"])[1:]
        self.code_prompts.append(ids)
        body = entry["repair"] if TOKEN_IDS["</VALIDATE>"] in ids and "repair" in entry else entry["body"]
        return [*encode_text(tiny_go.tokenizer(), body), TOKEN_IDS["</CODE>"]]

    def __call__(self, input_ids, attention_mask, use_cache, decision_positions=None, feedback_ids=None):
        logits = torch.zeros(*input_ids.shape, tiny_go.VOCAB_SIZE)
        for row, ids in enumerate(input_ids.tolist()):
            for position in range(len(ids) - 1):
                logits[row, position, ids[position + 1]] = self.boost(ids, position) if self.boost else 0.0
        head = None
        if decision_positions is not None:  # always DONE
            head = torch.tensor([0.0, 0.0, 1.0]).expand(*decision_positions.shape, 3)
        return ModelOutput(logits=logits, refinement_logits=head)

    def generate_with_refinement(
        self, prompts, tokenizer, code_prefixes, contexts, validator, max_refinement_iterations, **_
    ):
        by_title = {record["problem"]["title"]: (index, entry) for index, (record, entry) in enumerate(self.script)}
        rows = []
        for prompt, prefix in zip(prompts, code_prefixes):
            index, entry = by_title[prompt]
            bodies = entry["attempts"]
            if validator is None:  # the control requests first attempts, one at a time
                bodies = [entry["samples"][self.drawn.get(index, 0)]]
                self.drawn[index] = self.drawn.get(index, 0) + 1
            rows.append([Attempt(prefix + body, {}, None, "CONTINUE", 0.0, 10) for body in bodies])
        plans = [["x"] * len(row) for row in rows]
        return RefinementOutput([], plans, rows, [len(row) for row in rows], [])
