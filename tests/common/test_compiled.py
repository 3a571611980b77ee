"""The repeated part of a training step gives equal outputs and gradients when compiled.

For a puzzle, this is one ACT step as one graph, with half the slots of the carry free; for a language model or
regressor, the forward, as `--torch_compile` compiles it. Referee: the uncompiled step.

The forward is traced and differentiated as for a compiler, but torch's own kernels run the graphs: a C++ compiler
would take minutes for unrolled cycles; tests/models compiles models with fewer of them.
"""

import every
import pytest
import torch


pytestmark = pytest.mark.slow  # up to half a minute each


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_a_compiled_step_gives_what_the_eager_one_gives(architecture):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = every.model(architecture).train()
        arguments = {**every.inputs(architecture), **every.targets(architecture)}
        torch.manual_seed(0)
        if architecture in every.PUZZLES:
            arguments["carry"] = model(**arguments).carry
            arguments["carry"].halted[::2] = True
            if compiled:
                model.compile_act_step()
        elif compiled:
            model.forward = torch.compile(model.forward, backend="aot_eager")
        torch.manual_seed(0)
        output = model(**arguments)
        output.loss.backward()
        found = {name: value.detach() for name, value in output.items() if isinstance(value, torch.Tensor)}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((found, gradients))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-3)
