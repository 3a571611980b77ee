"""`hrm-hf data reasoning`: questions that take many steps to answer, for any causal language model."""

from ..text.options import BuildReasoning
from .options import takes
from .report import report, usage_errors


@takes(BuildReasoning)
def reasoning(options: BuildReasoning, as_json: bool):
    """Build a data set of questions that take as many steps as their difficulty says, read in one forward pass.

    The rows depend only on the options and the seed. A tokenizer lies beside them, which AutoTokenizer reads.

    Example: hrm-hf data reasoning pointers --out data/pointers

    Example: hrm-hf data reasoning automaton --size 20 --difficulty 8 --answers last --out data/rule110
    """
    from ..text.reasoning.build import build_reasoning

    with usage_errors():
        result = build_reasoning(options)
    report(result, as_json)
