"""Files of tiny models in the layouts of the public checkpoints, and their upload to the loopback Hub."""

import io
import sys
import types
import typing
from collections import defaultdict
from contextlib import contextmanager
from typing import Any

import golden
import torch
import yaml
from huggingface_hub import CommitOperationAdd, HfApi


NAMES = {
    "hrm": "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1",
    "trm": "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1",
    "eqr": "eqr@EqRModel",
    "se_rrm": "recursive_reasoning.trm_equi@SERRM",
}
OF_THE_DATA = ("batch_size", "seq_len", "vocab_size", "num_puzzle_identifiers")  # not in the originals' `arch`
CLASSES = {
    "omegaconf.base": ("Metadata", "ContainerMetadata"),
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.nodes": ("AnyNode",),
}


def publish(repo_id: str, files: dict[str, bytes]) -> str:
    """Publish files as a repository on the Hub that huggingface_hub uses; return the commit's sha."""
    HfApi().create_repo(repo_id)
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    return HfApi().create_commit(repo_id, operations, commit_message="a checkpoint").oid


def saved(content: Any) -> bytes:
    """Return the bytes that torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def run_config(architecture: str, fields: dict[str, Any], **run: Any) -> bytes:
    """Return an all_config.yaml with the golden file's fields as `arch`."""
    return yaml.safe_dump({"arch": arch_section(architecture, fields), "lr": 1e-4, **run}).encode()


def arch_section(architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    loss = {"name": "losses@ACTLossHead", "loss_type": "stablemax_cross_entropy"}
    kept = {name: value for name, value in fields.items() if name not in OF_THE_DATA}
    return {"loss": loss, **kept, "name": NAMES[architecture]}


def compiled(case: golden.Case) -> dict[str, torch.Tensor]:
    """Return the golden weights with the names of a compiled model, and initial states in bfloat16."""
    return {f"_orig_mod.{name}": value for name, value in golden.tensors(case, "state_dict/").items()}


@contextmanager
def omegaconf_classes():
    """Provide classes with OmegaConf's names, which is not installed, while something is pickled."""
    before = {name: sys.modules.get(name) for name in ("omegaconf", *CLASSES)}
    for name in before:
        sys.modules[name] = types.ModuleType(name)
    for module, classes in CLASSES.items():
        for name in classes:
            setattr(sys.modules[module], name, type(name, (), {"__module__": module}))
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def omegaconf_node(value: Any, parent: Any = None, key: Any = None) -> Any:
    """Return objects with the fields that OmegaConf 2.3 pickles, including parents (circular) and metadata."""
    kind = {dict: "dictconfig.DictConfig", list: "listconfig.ListConfig"}.get(type(value), "nodes.AnyNode")
    module, name = f"omegaconf.{kind}".rsplit(".", 1)
    node = getattr(sys.modules[module], name)()
    metadata = getattr(sys.modules["omegaconf.base"], "ContainerMetadata" if "Config" in name else "Metadata")()
    kinds = {"ref_type": typing.Any, "object_type": dict if isinstance(value, dict) else None}
    vars(metadata).update(**kinds, key=key, optional=True, resolver_cache=defaultdict(dict), key_type=typing.Any)
    vars(node).update(_metadata=metadata, _parent=parent, _flags_cache=None)
    if isinstance(value, dict):
        node._content = {each: omegaconf_node(inner, node, each) for each, inner in value.items()}
    elif isinstance(value, list):
        node._content = [omegaconf_node(inner, node, each) for each, inner in enumerate(value)]
    else:
        node._val = value
    return node


def training_state(
    model: dict[str, torch.Tensor], average: dict[str, torch.Tensor], config: dict[str, Any], as_nodes: bool = True
) -> bytes:
    """Return what EqR's runs save; `as_nodes` stores the configuration as OmegaConf objects, like the release."""
    with omegaconf_classes():
        nodes = omegaconf_node(config) if as_nodes else config
        return saved({"step": 5, "model": model, "ema": {"mu": 0.999, "shadow": average}, "config": nodes})
