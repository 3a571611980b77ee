"""Decides what of a folder goes to the Hub: a complete checkpoint that loads by itself, and nothing else.

`checkpoint_contents` checks the weights, picks the files that belong to a model, and adds what makes it complete: the
code of the architecture as it is in this package, every head in `auto_map`, a model card, generation config, feature
extractor, the license of the code. Nothing is written into the folder. Uploading is in `push.py`.
"""

import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from filecmp import cmp
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path

from huggingface_hub import ModelCard, constants
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.dynamic_module_utils import get_relative_import_files

from ..io.model_names import ADAPTER_CONFIG, CONFIG
from ..registry import ARCHITECTURES
from .cards import CARD_FILE, LICENSE_NOT_STATED, card_for_repository, new_card_text
from .errors import printable
from .escaping import in_markdown
from .licenses import UNKNOWN_LICENSE
from .listing import name_problem
from .manifests import MANIFEST, STATE_FILES, find_corruption
from .paths import short_path, without_local_paths
from .secrets import SECRETS_FILES, texts_in, validate_no_secrets


WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
WEIGHT_PATTERNS = ("model*.safetensors", INDEX, "pytorch_model*.bin", "pytorch_model.bin.index.json")
CODE_LICENSE = "LICENSE_CODE"
LIBRARYS_CARD = "This model card has been automatically generated"  # in that which push_to_hub makes of nothing
MODEL_FILES = (
    CONFIG, "generation_config.json", "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "*.jinja", "additional_chat_templates/*.jinja",
    "preprocessor_config.json", "processor_config.json", ADAPTER_CONFIG, ADAPTER, "identifiers.json",
    "test_puzzles.json", "recipe.yaml", "results.json", "trainer_state.json", "README.md", "LICENSE*", "NOTICE*",
    "CITATION*", "*.png", "*.gif", "*.jpg", "*.svg", ".eval_results/*.yaml", "eval_*/*.json", "eval_*/*.png",
)  # fmt: skip
TRAINING_STATE = (
    "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*.pth", "training_args.bin", "checkpoint-*/*",
    "*events.out.tfevents.*", *STATE_FILES,
)  # fmt: skip
ONLY_WITH_STATE = "training state; --with-training-state adds it"
NO_PART = "no part of a checkpoint; --include adds it"


@dataclass
class Contents:
    """Files of one commit: name in the repository -> file or bytes; what stays behind and why; what was added."""

    files: dict[str, Path | bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> dict[str, int]:
        return {
            name: len(source) if isinstance(source, bytes) else source.stat().st_size
            for name, source in sorted(self.files.items())
        }


def checkpoint_contents(
    folder: str | Path,
    repo_id: str,
    license: str | None = None,
    with_training_state: bool = False,
    include: Iterable[str] = (),
) -> Contents:
    """The files that a push of `folder` to `repo_id` consists of.

    Args:
        folder: of a saved model, a finished run, or a PEFT adapter.
        repo_id: OWNER/NAME; a card of the folder that speaks of it by the folder's name is changed to this one.
        license: of the weights, as the Hub names it (apache-2.0, mit, other, ...); the card's if None.
        with_training_state: optimizer, carry, raw weights, event files and checkpoint-N folders as well.
        include: patterns of further files, relative to the folder.

    Raises:
        FileNotFoundError: no folder, or none of a model.
        ValueError: weights are missing, cut short or not safetensors; a language model has no tokenizer; there is
            neither a card nor a template for one; a file holds a token or key; a file that would go is a link to
            another place.
    """
    folder = Path(folder)
    found = own_files(folder, with_training_state, include)
    if (folder / CONFIG).exists():
        _complete(found, folder)
    _add_card(found, folder, repo_id, license)
    _shorten_paths(found, folder)
    validate_no_secrets(found.files)
    return found


def stale_weights(there: Iterable[str], new: Iterable[str]) -> list[str]:
    """Weight files of a repository that would be read with, or instead of, the new ones."""
    new = set(new)
    if not any(fnmatch(name, p) for name in new for p in WEIGHT_PATTERNS):
        return []
    return [name for name in there if name not in new and any(fnmatch(name, p) for p in WEIGHT_PATTERNS)]


# ---- weights ----


def validate_weights(folder: str | Path) -> list[Path]:
    """The weight files of a checkpoint folder, after a look at the header and length of each.

    Raises:
        FileNotFoundError, ValueError: as in `checkpoint_contents`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; expected that of a saved model")
    if not (folder / CONFIG).exists():
        if not (folder / ADAPTER_CONFIG).exists():
            raise FileNotFoundError(f"{folder} has no {CONFIG}; expected the folder of a saved model")
        return [_complete_file(folder / ADAPTER)[0]]
    if (folder / MANIFEST).exists() and (found := find_corruption(folder)):
        raise ValueError(f"{folder} is a corrupted checkpoint: {'; '.join(found)}. Push an earlier one")
    if (folder / WEIGHTS).exists():
        return [_complete_file(folder / WEIGHTS)[0]]
    if not (folder / INDEX).exists():
        others = sorted(file.name for pattern in WEIGHT_PATTERNS for file in folder.glob(pattern))
        raise ValueError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}"
            + (f", only {', '.join(others)}" if others else "")
            + ": it was not saved to the end, or not as safetensors. Save the model again with save_pretrained"
        )
    return [folder / INDEX, *_shards(folder)]


def _shards(folder: Path) -> list[Path]:
    """The shards that the index names. Raises ValueError unless each is complete and holds what the index says."""
    try:
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is broken ({error}); save the model again with save_pretrained") from error
    shards = []
    for name in sorted(set(weight_map.values())):
        file, tensors = _complete_file(folder / name)
        absent = {tensor for tensor, shard in weight_map.items() if shard == name} - tensors
        if absent:
            raise ValueError(
                f"{file} lacks {len(absent)} tensors that {INDEX} says it holds, such as {min(absent)}: shards of two "
                "saves are mixed. Save the model again into an empty folder"
            )
        shards.append(file)
    return shards


def _complete_file(file: Path) -> tuple[Path, set[str]]:
    """The file and the names of its tensors. Raises ValueError if it is missing or not as long as its header says."""
    if not file.exists():
        raise ValueError(f"{file} is missing, so the checkpoint is incomplete; save the model again")
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        try:
            header = json.loads(stream.read(min(length, size)))
            tensors = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
            expected = 8 + length + max((end for _, end in tensors.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{file} ({size:,} bytes) does not begin with the header of a safetensors file: it was cut short or "
                "is of another kind. Save the model again"
            ) from error
    if size != expected:
        raise ValueError(
            f"{file} has {size:,} bytes, {expected:,} expected by its header: it was not written to the end. Save "
            "the model again, or copy the file anew"
        )
    return file, set(tensors)


# ---- which files ----


def own_files(folder: Path, with_training_state: bool = False, include: Iterable[str] = ()) -> Contents:
    """The folder's files without anything added, taken or left; arguments and errors as in `checkpoint_contents`.

    Files below the folder that are left are one entry for each folder.
    """
    weights = {file.name for file in validate_weights(folder)}
    found, include = Contents(), tuple(include)
    for name, (file, problem) in folder_files(folder).items():
        group = name.split("/")[0] + "/" if "/" in name else name
        state = any(map(fnmatch, [name] * len(TRAINING_STATE), TRAINING_STATE))
        wanted = name in weights or any(_fits(name, pattern) for pattern in MODEL_FILES)
        if (wanted and not state) or (state and with_training_state) or any(fnmatch(name, p) for p in include):
            if problem:
                raise ValueError(
                    f"{printable(file)} {problem}; nothing was uploaded. Copy the file there, or delete it"
                )
            if file.name in SECRETS_FILES:
                found.left_out[name] = "may hold a secret, by its name"
                continue
            found.files[name] = file
            continue
        if problem:
            found.left_out[name] = problem
        elif not name.endswith(".py"):  # the package's own code travels; see `_add_code`
            found.left_out[group] = ONLY_WITH_STATE if state else NO_PART
    return found


def folder_files(folder: Path) -> dict[str, tuple[Path, str | None]]:
    """Name -> path of each file below a folder, and why it must not go to a Hub, None if it may.

    What a link leads to may go if it lies in the folder too, or where the cache of huggingface_hub keeps the content
    of a snapshot. Links to folders are not entered.
    """
    allowed, found = _own_places(folder), {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            target = Path(os.path.realpath(path))
            if target.is_dir():
                found[name] = (path, "is a link to a folder, which is not followed")
            elif not target.is_file():
                found[name] = (path, "is a link to nothing")
            elif not any(target.is_relative_to(place) for place in allowed):
                found[name] = (path, "is a link to a file outside of the folder, which is not followed")
            else:
                found[name] = (path, None)
        elif path.is_file():
            found[name] = (path, None)
        if name in found and (why := name_problem(name)):
            found[name] = (path, f"has a name that is not pulled again: {why}")
    return found


def _own_places(folder: Path) -> list[Path]:
    """The folders in which the content of a folder's files may lie."""
    own = Path(os.path.realpath(folder))
    repository = own.parent.parent
    if own.parent.name != "snapshots" or repository.parent != Path(os.path.realpath(constants.HF_HUB_CACHE)):
        return [own]
    # A snapshot in the cache: its files are links to blobs of the repository, or to those that repositories share.
    return [own, repository / "blobs", repository.parent / "blobs"]


def _fits(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch(name, pattern)


# ---- what makes a checkpoint complete ----


def _complete(contents: Contents, folder: Path) -> None:
    """Adds code, heads, generation config and feature extractor of an architecture of this package."""
    config = AutoConfig.from_pretrained(folder)
    row = ARCHITECTURES.get(type(config))
    if row:
        _add_code(contents, folder, config)
    if (row and AutoModelForCausalLM in row.heads) or type(config) in AutoModelForCausalLM._model_mapping:
        if not {"tokenizer.json", "tokenizer_config.json"} & contents.files.keys():
            raise ValueError(
                f"{folder} has no tokenizer, and nobody could use the model without one: "
                f"tokenizer.save_pretrained({str(folder)!r})"
            )
        if "generation_config.json" not in contents.files:
            text = GenerationConfig.from_model_config(config).to_json_string()
            contents.files["generation_config.json"] = text.encode()
            contents.notes.append("generation_config.json: made from config.json")
    if row and row.feature_extractor and "preprocessor_config.json" not in contents.files:
        with tempfile.TemporaryDirectory() as scratch:
            row.feature_extractor.from_config(config).save_pretrained(scratch)
            contents.files["preprocessor_config.json"] = Path(scratch, "preprocessor_config.json").read_bytes()
        contents.notes.append("preprocessor_config.json: made from config.json")


def _add_code(contents: Contents, folder: Path, config) -> None:
    """The modules of the architecture as this package has them, what config.json says of them, the code's license."""
    modules = code_files(type(config))
    contents.files |= modules
    other = [
        name for name, file in modules.items() if (folder / name).exists() and not cmp(folder / name, file, False)
    ]
    if other:
        contents.notes.append(f"{', '.join(other)}: as in this version of the package, not as in the folder")
    others = [file.name for file in sorted(folder.glob("*.py")) if file.name not in contents.files]
    contents.left_out |= dict.fromkeys(others, "no code of this architecture; --include adds it")
    head = ARCHITECTURES[type(config)].head
    content = json.loads((folder / CONFIG).read_text())
    said = {"auto_map": head._auto_map}
    if head._custom_pipelines and content.get("architectures") == [head.__name__]:
        said["custom_pipelines"] = head._custom_pipelines
    if content != content | said:
        contents.files[CONFIG] = (json.dumps(content | said, indent=2) + "\n").encode()
        contents.notes.append(f"{CONFIG}: names every head and the pipeline of the code ({', '.join(said)})")
    contents.files[CODE_LICENSE] = code_license()


def _card_without_paths(card: ModelCard, folder: Path) -> str:
    """The card, where paths that its metadata name are shortened, in the metadata and in the text: of a base model."""
    text = str(card)
    for value in texts_in(card.data.to_dict()):
        text = text.replace(value, short_path(value, folder))
    return text


def code_files(config_class: type) -> dict[str, Path]:
    """Name and path of each module that a checkpoint of the architecture carries."""
    row = ARCHITECTURES[config_class]
    classes = filter(None, (config_class, row.base, row.head, row.feature_extractor))
    found = set()
    for cls in classes:
        file = sys.modules[cls.__module__].__file__
        found |= {file, *get_relative_import_files(file)}
    return {Path(file).name: Path(file) for file in sorted(found)}


def code_license() -> bytes:
    """Returns the license of the code in a checkpoint; that of the weights is named in the card."""
    return (
        "The Python files (*.py) beside this file come from the package hrm_hf and are under the license below.\n"
        "It is the license of the code alone. That of the weights is named in the metadata of README.md; where none\n"
        "is named, none is granted.\n\n" + (files("hrm_hf") / "LICENSE").read_text()
    ).encode()


def complete_push(folder: str, repo_id: str) -> None:
    """Adds the code's license to what `model.push_to_hub` has saved, and our card where it has the library's.

    A card that the repository had before stays; tags that the caller gave go over to the new one. Paths of this
    machine are shortened in the saved files. Raises ValueError for a token or a key in one of them.
    """
    _complete_saved(folder, repo_id)
    saved = Contents({path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()})
    _shorten_paths(saved, Path(folder))
    for name, source in saved.files.items():
        if isinstance(source, bytes):
            Path(folder, name).write_bytes(source)
    validate_no_secrets(saved.files)


def _complete_saved(folder: str, repo_id: str) -> None:
    path = Path(folder, CARD_FILE)
    Path(folder, CODE_LICENSE).write_bytes(code_license())
    tags: list[str] = []
    if path.exists():
        if LIBRARYS_CARD not in path.read_text(encoding="utf-8"):
            return
        tags = ModelCard.load(path).data.tags or []
        path.unlink()
    card = ModelCard(new_card_text(folder).replace(Path(folder).resolve().name, repo_id))
    card.data.tags = list(dict.fromkeys([*card.data.tags, *tags]))
    card.save(path)


def _shorten_paths(contents: Contents, folder: Path) -> None:
    """Takes paths of this machine out of what a run noted, except where a manifest that goes too counts its bytes."""
    if MANIFEST in contents.files:
        return
    for name, source in list(contents.files.items()):
        content, changed = without_local_paths(name, source, folder)
        if changed:
            contents.files[name] = content
            contents.notes.append(f"{name}: without the place of files on this machine ({', '.join(changed)})")


def _add_card(contents: Contents, folder: Path, repo_id: str, license: str | None) -> None:
    """The folder's card under the repository's name, or a new one, with the license of the weights."""
    path = folder / CARD_FILE
    ours = (folder / CONFIG).exists() and type(AutoConfig.from_pretrained(folder)) in ARCHITECTURES
    if not path.exists() and not ours:
        raise ValueError(f"{folder} has no {CARD_FILE}, and there is no template for its kind of model; write one")
    card = ModelCard(card_for_repository(folder, repo_id) if ours else path.read_text(encoding="utf-8"))
    if license:
        card.data.license = license
        card.text = card.text.replace(LICENSE_NOT_STATED, in_markdown(license))
    if card.data.license in (None, UNKNOWN_LICENSE):
        contents.notes.append(
            f"{CARD_FILE} names no license, so nobody may use the weights; --license apache-2.0, say, names one"
        )
    contents.files[CARD_FILE] = _card_without_paths(card, folder).encode()
