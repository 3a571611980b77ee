"""One ACT step is one compiled graph. Referee: the same step uncompiled."""

import pytest
import tiny
import torch


pytestmark = pytest.mark.slow


def step_arguments(model, batch):
    """What the model's forward hands to `act_step` for a batch on a carry of which half the slots are free."""
    handed = {}

    def record(*arguments):
        handed["arguments"] = arguments
        return original(*arguments)

    original, model.act_step = model.act_step, record
    torch.manual_seed(0)
    carry = model(**batch).carry
    carry.halted[::2] = True
    model(**tiny.batch(seed=2), carry=carry)
    del model.act_step
    return handed["arguments"]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_compiled_step_equals_the_eager_one(architecture, mode):
    model = tiny.model(architecture).train(mode == "train")
    arguments = step_arguments(model, tiny.batch())
    torch._dynamo.reset()
    compiled = torch.compile(model.act_step, fullgraph=True)
    results = []
    for step in (model.act_step, compiled):
        model.zero_grad()
        carry, outputs, _ = step(*arguments)
        outputs["loss"].backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((carry.to_tensors(), outputs, gradients))
    (eager_carry, eager, eager_gradients), (carry, outputs, gradients) = results
    assert outputs.keys() == eager.keys() and ("target_q_continue" in outputs) == (
        architecture == "hrm" and mode == "train"
    )
    torch.testing.assert_close(carry, eager_carry, atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs, eager, atol=1e-4, rtol=0)
    torch.testing.assert_close(gradients, eager_gradients, atol=1e-4, rtol=1e-3)
