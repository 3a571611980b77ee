"""The tiny models that other tests share run, and their checkpoints load."""

import every
import pytest
import torch
import transformers
from tolerances import assert_copied, assert_equal_but_for_rounding


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_a_saved_tiny_model_loads_by_its_auto_class_and_gives_the_same(architecture, tmp_path):
    built = every.model(architecture)
    every.save(architecture, tmp_path)
    loaded = getattr(transformers, every.AUTO_CLASSES[architecture]).from_pretrained(tmp_path)
    assert type(loaded) is type(built)
    with torch.no_grad():
        before, after = (one.eval()(**every.inputs(architecture)) for one in (built, loaded))
    assert_copied(loaded.state_dict(), built.state_dict())
    assert_equal_but_for_rounding(after.logits, before.logits)


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_the_labels_give_a_loss_with_a_gradient(architecture):
    model = every.model(architecture).train()
    loss = model(**every.inputs(architecture), labels=every.labels(architecture)).loss
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
