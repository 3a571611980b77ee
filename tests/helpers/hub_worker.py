"""Both sides of test_hub_round_trip.py: `push` in the test, and a process that loads without the package.

python hub_worker.py FOLDER                 reads FOLDER/<repository>.pt, what must be reproduced; cannot import hrm_hf
"""

import sys
from pathlib import Path

import torch
import transformers


SHARD = "10KB"
NEW_TOKENS = 8
PROMPT = "a tale"


def outputs(model, inputs):
    """Return the outputs that users need from a model, as tensors by name."""
    with torch.no_grad():
        result = {"logits": model(**inputs).logits}
        if "input_ids" in inputs and model.can_generate():
            prompt = {"input_ids": inputs["input_ids"][:, :6]}
            if model.config.model_type == "hrm_go_coder":
                model.config.plan_budget = NEW_TOKENS  # it writes a plan first, by default of up to 512 tokens
            result["generated"] = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        elif "input_ids" in inputs:
            solution = model.solve(**inputs)
            result |= {"predictions": solution.predictions, "steps": solution.steps, "q_halt": solution.q_halt}
        else:
            torch.manual_seed(5)
            result["posterior"] = model.sample_posterior(model(**inputs), 4)
    return result


def base_output(model, inputs):
    """Return the first output of the model without a head."""
    with torch.no_grad():
        output = model(**inputs)
    return next(value for value in output.to_tuple() if isinstance(value, torch.Tensor))


def beside_output(processor, kind):
    """Return the output of a tokenizer or feature extractor for a fixed input."""
    if kind == "AutoFeatureExtractor":
        shape = (processor.num_map_channels, 16, 16)
        return processor(torch.linspace(0, 1, torch.Size(shape).numel()).reshape(shape))["pixel_values"]
    return processor(PROMPT, return_tensors="pt")["input_ids"]


def names(architectures):
    """Return the repository of each architecture, and one more whose weights are a single file."""
    return [*(f"org/{one}-sharded" for one in architectures), f"org/{architectures[0]}-single"]


def push(folder):
    """Push every architecture in shards and one in one file, with tokenizer or extractor; write what each computes.

    The expected outputs come from models loaded from the pushed files: only then do both processes have the weights at
    the same alignment (see tolerances.py), and outputs are equal bit for bit.
    """
    import every  # unknown to the loading process

    from hrm_hf.hub import push_checkpoint

    for name in names(every.ARCHITECTURES):
        architecture, form = name.removeprefix("org/").split("-")
        auto_class, inputs = every.AUTO_CLASSES[architecture], every.inputs(architecture)
        kind = "AutoFeatureExtractor" if architecture in every.OF_MAPS else "AutoTokenizer"
        beside = every.processor(architecture)
        saved = every.save(
            architecture, folder / "saved" / name, **({"max_shard_size": SHARD} if form == "sharded" else {})
        )
        expected = {
            "auto_class": auto_class,
            "beside": None if beside is None else kind,
            "inputs": inputs,
            "outputs": outputs(getattr(transformers, auto_class).from_pretrained(saved), inputs),
            "base": base_output(transformers.AutoModel.from_pretrained(saved), inputs),
            "beside_output": None if beside is None else beside_output(beside, kind),
            "repository": name,
            "commit": push_checkpoint(saved, name).commit,
        }
        torch.save(expected, folder / f"{name.replace('/', '--')}.pt")


def load(folder):
    """Pull each by name and commit without the package, and compare bit for bit."""
    sys.modules["hrm_hf"] = None
    for file in sorted(folder.glob("*.pt")):
        expected = torch.load(file, weights_only=True)
        pinned = {"revision": expected["commit"], "trust_remote_code": True}
        name, inputs = expected["repository"], expected["inputs"]
        auto_class = getattr(transformers, expected["auto_class"])
        model = auto_class.from_pretrained(name, **pinned)
        assert type(model).__module__.startswith("transformers_modules"), type(model)
        found = outputs(model, inputs)
        for key, value in expected["outputs"].items():
            assert torch.equal(found[key], value), f"{name}: {key} differs"
        base = transformers.AutoModel.from_pretrained(name, **pinned)
        assert torch.equal(base_output(base, inputs), expected["base"]), f"{name}: the base model differs"
        if expected["beside"]:
            beside = getattr(transformers, expected["beside"]).from_pretrained(name, **pinned)
            assert torch.equal(beside_output(beside, expected["beside"]), expected["beside_output"]), name
        print("equal", name, *expected["outputs"])


def library(architecture):
    """Call `push_to_hub` of transformers for tokenizer or extractor, head and base model."""
    import every

    model, beside = every.model(architecture), every.processor(architecture)
    if beside is not None:
        beside.push_to_hub(f"org/{architecture}")
    model.push_to_hub(f"org/{architecture}", tags=["of-the-caller"])
    model.base_model.push_to_hub(f"org/{architecture}-base", max_shard_size=SHARD)
    base = transformers.AutoModel.from_pretrained(f"org/{architecture}-base")
    same = every.model(architecture).base_model
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in base.state_dict().items())
    assert type(base).__name__.endswith("Model")


if __name__ == "__main__":
    load(Path(sys.argv[1]))
