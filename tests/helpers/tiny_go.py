"""A tokenizer, records, and a Go coder with a few thousand weights."""

import functools
import json
from pathlib import Path

import torch

from hrm_hf.golang.data.build import train_on_texts
from hrm_hf.golang.data.streams import GoStreamBuilder
from hrm_hf.models.configuration_hrm_go_coder import HrmGoCoderConfig
from hrm_hf.models.modeling_hrm_go_coder import HrmGoCoderForCausalLM
from hrm_hf.models.processing_hrm_go_coder import PAD, SPECIAL_TOKENS, TOKEN_IDS, context_segment, problem_segment


VOCAB_SIZE = 400
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
BUDGETS = {"plan_budget": 32, "code_budget": 64}  # tokens; a random model rarely ends a plan


@functools.cache
def tokenizer():
    """Return a byte-level tokenizer with the stream's tags and a hundred merges."""
    texts = [
        solution(number) + f" Add{number} returns the sum of a and b. unexpected token, line 2" for number in range(60)
    ]
    return train_on_texts(iter(texts * 3), VOCAB_SIZE)


def solution(number: int) -> str:
    return f"func Add{number}(a, b int) int {{\n\treturn a + b + {number}\n}}\n"


def record(number: int, attempts: str = "") -> dict:
    """Return a record with one attempt per letter of `attempts`: c CONTINUE, r REFINE, d DONE."""
    code, prefix = solution(number), f"func Add{number}(a, b int) int {{"
    made = []
    for letter in attempts:
        wrong = {"c": "\n\treturn a + \n}\n", "r": "\n\treturn a - b\n}\n"}.get(letter)
        feedback = {
            "syntax_ok": letter != "c",
            "types_ok": None,
            "tests_pass": None,
            "category": "none",
            "line": None,
            "message": "",
        }
        if letter == "c":
            feedback |= {"category": "unexpected token", "line": 3, "message": "expected operand"}
        decision = {"c": "CONTINUE", "r": "REFINE", "d": "DONE"}[letter]
        made.append({"code": code if wrong is None else prefix + wrong, "feedback": feedback, "decision": decision})
    return {
        "id": f"sum.go:{number}", "source": "made up", "licence": "Apache-2.0", "group": "sum",
        "problem": {"title": f"Add{number} returns the sum", "body": ""},
        "context": {"path": "sum.go", "before": "package sum\n"},
        "plan": {
            "intent": "ADD", "targets": [f"func:Add{number}"],
            "steps": [{"intent": "ADD", "target": f"func:Add{number}", "text": "return the sum"}],
        },
        "attempts": made, "code_prefix": prefix, "solution": {"code": code},
    }  # fmt: skip


def records(count: int) -> list[dict]:
    """Return records without attempts, with one, and with a repair, in turn."""
    kinds = ["", "d", "cd", "rcd"]
    return [record(number, kinds[number % len(kinds)]) for number in range(count)]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def builder(**budgets) -> GoStreamBuilder:
    return GoStreamBuilder(tokenizer(), **{"max_length": 512, **budgets})


def model(seed: int = 0, awake: bool = False, **overrides) -> HrmGoCoderForCausalLM:
    """Return a seeded model in eval mode; `awake` uses large weights, so that every token matters."""
    torch.manual_seed(seed)
    built = HrmGoCoderForCausalLM(
        HrmGoCoderConfig(
            **{"vocab_size": VOCAB_SIZE, "planner_layers": 1, "generator_layers": 1, **SIZES, **BUDGETS, **overrides}
        )
    ).eval()
    if awake:
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if not name.endswith(("norm.weight", "layernorm.weight")):
                    parameter.normal_(std=0.2)
    return built


# Variants of the model, and a stream with three attempts under two plans.
VARIANTS = {
    "two stacks": {"planner_layers": 2, "generator_layers": 2},
    "cycles": {"planner_cycles": 2, "generator_cycles": 3, "num_key_value_heads": 1},
    "unified": {"unified": True, "planner_layers": 2, "generator_layers": 0},
    "unified cycles": {"unified": True, "planner_layers": 2, "planner_cycles": 2, "generator_layers": 0},
    "untagged": {"tagged": False, "planner_layers": 2},
}
ONE_ATTEMPT = "<s> <PROBLEM> 4 </PROBLEM> <PLAN> <INTENT:ADD> <STEP> 3 </PLAN> <CODE> 7 </CODE> </s>"
REPAIRED = (
    "<s> <PROBLEM> 3 </PROBLEM> <CONTEXT> <FILE> 2 </FILE> 3 </CONTEXT> <PLAN> <INTENT:FIX> 2 </PLAN> <CODE> 5 "
    "</CODE> <VALIDATE> <SYNTAX_ERR> 2 </VALIDATE> <RETRY> <CODE> 4 </CODE> <VALIDATE> <SYNTAX_OK> <TEST_FAIL> "
    "</VALIDATE> <REFINE> <PLAN> <INTENT:ADD> 2 </PLAN> <CODE> 4 </CODE> <VALIDATE> <SYNTAX_OK> </VALIDATE> <DONE> "
    "</s>"
)
WITH_RESERVED_TAGS = (
    "<s> <PROBLEM> 3 </PROBLEM> <PLAN> <INTENT:ADD> 2 </PLAN> <CODE> 5 </CODE> <VALIDATE> <SYNTAX_ERR> 2 </VALIDATE> "
    "<RETRY> <CODE> <BEFORE> 2 <AFTER> 3 <BEFORE> 1 <AFTER> </CODE> </s>"
)
PLAIN = "9 9 9"


def stream(pattern: str, seed: int = 0) -> list[int]:
    """Return the ids of a pattern of tags and numbers; a number stands for that many random text tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = []
    for word in pattern.split():
        if word.isdigit():
            ids += torch.randint(len(SPECIAL_TOKENS), VOCAB_SIZE, (int(word),), generator=generator).tolist()
        else:
            ids.append(TOKEN_IDS[word])
    return ids


def batch(*patterns: str, side: str = "left") -> dict[str, torch.Tensor]:
    """Return padded streams: `input_ids` and `attention_mask`."""
    rows = [stream(pattern, seed) for seed, pattern in enumerate(patterns)]
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), TOKEN_IDS[PAD]), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, place], mask[index, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def task(problem: str, context: str = "") -> list[int]:
    """Return a prompt that ends in </PROBLEM> or </CONTEXT>."""
    ids = [TOKEN_IDS["<s>"], *problem_segment(tokenizer(), problem)]
    return [*ids, *context_segment(tokenizer(), "", context)]


SHORT = {"plan_budget": 16, "code_budget": 24}  # tokens
ENDS = {"</PLAN>": 1.5, "</CODE>": 1.5}


def writer(seed: int = 5, bias: dict[str, float] | None = None, **overrides) -> HrmGoCoderForCausalLM:
    """Return a model that writes short random text; `bias` is added to the logits of tags."""
    built = model(seed, awake=True, **{**SHORT, **overrides})
    added = torch.zeros(VOCAB_SIZE)
    for tag, value in (ENDS if bias is None else bias).items():
        added[TOKEN_IDS[tag]] = value
    built.lm_head.register_forward_hook(lambda module, args, logits: logits + added)
    return built
