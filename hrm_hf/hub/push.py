"""Push a complete checkpoint, or a Space, to the Hub in one commit.

`checkpoint_contents` validates the weights, selects the files of a model, and adds the code of this package with its
license. It also adds a model card, generation config and feature extractor if the folder has none. The folder itself
is not changed. Since there is only one commit, users see either the complete old model or the complete new one.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo, SpaceInfo
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from .._version import __version__
from ..io.model_names import ADAPTER_CONFIG, CONFIG
from ..registry import ARCHITECTURES, ArchitectureSpec
from . import PULL_REQUEST, PushOptions
from .cards import CARD_FILE, LICENSE_NOT_STATED, card_for_repository, new_card_text
from .licenses import UNKNOWN_LICENSE
from .manifests import MANIFEST, STATE_FILES, find_corruption, manifest_of_copy
from .pull import HubError, hub_errors
from .secrets import SECRETS_FILES, validate_no_secrets


WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
WEIGHT_PATTERNS = ("model*.safetensors", INDEX, "pytorch_model*.bin", "pytorch_model.bin.index.json")
CODE_LICENSE, PREPROCESSOR = "LICENSE_CODE", "preprocessor_config.json"
PLACEHOLDER_CARD = "This model card has been automatically generated"  # text in transformers' placeholder card
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
SPACE_IGNORED = ("__pycache__", ".git", ".cache", ".ipynb_checkpoints")


@dataclass
class Contents:
    """Contents of one commit: files by their name in the repository, omitted files with reasons, and notes."""

    files: dict[str, Path | bytes] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, file: Path, problem: str | None) -> None:
        """Add a file unless its name suggests secrets. Raise ValueError if `folder_files` found a `problem`."""
        if problem:
            raise ValueError(f"{file} {problem}; nothing was uploaded. Replace it with a copy, or delete it")
        if any(fnmatch(file.name, pattern) for pattern in SECRETS_FILES):
            self.left_out[name] = "may contain a secret, judging by its name"
        else:
            self.files[name] = file

    @property
    def sizes(self) -> dict[str, int]:
        return {
            name: len(source) if isinstance(source, bytes) else source.stat().st_size
            for name, source in sorted(self.files.items())
        }


class PushResult(NamedTuple):
    """Result of a push: URL of the repository or pull request, commit sha, file names, bytes, notes, revision."""

    url: str
    commit: str
    files: list[str]
    bytes: int
    notes: list[str]
    revision: str = "main"


def push_checkpoint(folder: str | Path, repo_id: str, *, token: str | None = None, **options: Any) -> PushResult:
    """Upload a complete checkpoint in one commit.

    Args:
        folder: folder of a saved model, a finished run or a PEFT adapter.
        repo_id: OWNER/NAME; the repository is created if it does not exist.
        token: Hub token; None for the token of the logged-in user.
        options: other fields of `PushOptions`.

    Raises:
        FileNotFoundError, ValueError: the checkpoint is incomplete, or `repo_id` is invalid; nothing was uploaded.
        HubError: the Hub rejected the push, or could not be reached; the repository is unchanged.
    """
    target = PushOptions(sources=[str(folder)], repo_id=repo_id, **options)
    contents = checkpoint_contents(folder, repo_id, target.license, target.with_training_state, target.include)
    return commit_contents(contents, target, token)


def push_space(folder: str | Path, repo_id: str, *, token: str | None = None, **options: Any) -> PushResult:
    """Upload a Gradio Space from its folder in one commit. Arguments and errors are as in `push_checkpoint`."""
    target = PushOptions(sources=[str(folder)], repo_id=repo_id, space=True, **options)
    return commit_contents(space_contents(folder), target, token)


def space_contents(folder: str | Path) -> Contents:
    """Collect the files of a Space. Raise ValueError unless README.md specifies Gradio and an existing app file."""
    folder = Path(folder)
    if not (folder / CARD_FILE).exists():
        raise FileNotFoundError(f"{folder} has no {CARD_FILE}; expected the folder of a Space")
    card = ModelCard((folder / CARD_FILE).read_text(encoding="utf-8"), ignore_metadata_errors=False).data.to_dict()
    if card.get("sdk") != "gradio":
        raise ValueError(f"{folder / CARD_FILE}: sdk is {card.get('sdk')!r}; expected gradio")
    app_file = card.get("app_file", "app.py")
    if not (folder / app_file).exists():
        raise ValueError(f"{folder} has no {app_file}, which its {CARD_FILE} names as the app file")
    contents = Contents()
    for name, (file, problem) in folder_files(folder).items():
        if set(SPACE_IGNORED) & set(name.split("/")):
            contents.left_out[name.partition("/")[0] + "/"] = "generated files"
        else:
            contents.add(name, file, problem)
    contents.notes += validate_no_secrets(contents.files)
    return contents


def commit_contents(contents: Contents, target: PushOptions, token: str | None = None) -> PushResult:
    """Upload all `contents` in one commit. Also delete old weights that would be loaded instead of the new ones."""
    if not (token or get_token()):
        raise HubError("a push needs a token: run `hf auth login`, or set HF_TOKEN")
    name = "the demo" if target.space else Path(target.sources[0]).resolve().name
    api, message = HfApi(token=token), target.message or f"Upload {name} with hrm_hf"
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(name, source if isinstance(source, bytes) else str(source))
        for name, source in sorted(contents.files.items())
    ]
    with hub_errors("push", target.repo_id, target.revision, token):
        if not (target.create_pr or target.to_pull_request):
            sdk = "gradio" if target.space else None
            api.create_repo(**target.repository, private=target.private, exist_ok=True, space_sdk=sdk)
            if target.revision not in (None, "main"):
                api.create_branch(**target.repository, branch=target.revision, exist_ok=True)
        head = _head(api, target)
        if not target.space and any(map(_is_weights, contents.files)):
            there = {file.rfilename for file in head.siblings or []} - contents.files.keys()
            operations += map(CommitOperationDelete, sorted(filter(_is_weights, there)))
        commit = api.create_commit(
            **target.repository, operations=operations, commit_message=message, revision=target.revision,
            create_pr=target.create_pr, parent_commit=head.sha,
        )  # fmt: skip
    revision = commit.pr_revision or target.revision or "main"
    url = f"{api.endpoint}/{'spaces/' if target.space else ''}{target.repo_id}"
    notes = list(contents.notes)
    if revision.startswith(PULL_REQUEST):
        number, kind = revision.removeprefix(PULL_REQUEST), "--repo-type space " if target.space else ""
        url = f"{url}/discussions/{number}"
        see = f"{'hf download' if target.space else 'hrm-hf pull'} {kind}{target.repo_id} --revision {revision}"
        notes.append(
            f"pull request {number}: main does not change until it is merged. Download it with `{see}`, push more "
            f"with --revision {revision}, merge it with `hf discussions merge {kind}{target.repo_id} {number}`"
        )
    elif target.create_pr:
        notes.append("nothing differs from main, so no pull request was opened")
    return PushResult(url, commit.oid, sorted(contents.files), sum(contents.sizes.values()), notes, revision)


def _head(api: HfApi, target: PushOptions) -> ModelInfo | SpaceInfo:
    """Return the commit that a push is based on. Raise HubError if a pull request cannot be opened or is closed."""
    try:
        head = api.repo_info(**target.repository, revision=target.revision)
    except RepositoryNotFoundError as error:
        if not (target.create_pr or target.to_pull_request):
            raise
        raise HubError(
            f"{target.repo_id} does not exist, or your token cannot read it. A pull request needs a repository: check "
            "the name and the token, or push without --create-pr (create_pr) to create the repository"
        ) from error
    if target.to_pull_request:
        number = int(target.revision.removeprefix(PULL_REQUEST))
        status = api.get_discussion_details(target.repo_id, number, repo_type=target.repository["repo_type"]).status
        if status in ("closed", "merged"):
            raise HubError(f"pull request {number} of {target.repo_id} is {status}; open a new one with --create-pr")
    return head


def _is_weights(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WEIGHT_PATTERNS)


def checkpoint_contents(
    folder: str | Path,
    repo_id: str,
    license: str | None = None,
    with_training_state: bool = False,
    include: Iterable[str] = (),
) -> Contents:
    """Collect the files to push from `folder` to `repo_id`. The other arguments are fields of `PushOptions`.

    Raises:
        FileNotFoundError: `folder` is not a model folder.
        ValueError: weights are missing, truncated or not safetensors; a language model has no tokenizer; there is
            neither a card nor a template for one; a file contains a secret, or is a link to a file outside the folder.
    """
    folder = Path(folder)
    found = own_files(folder, with_training_state, include)
    config = AutoConfig.from_pretrained(folder) if (folder / CONFIG).exists() else None
    row = ARCHITECTURES.get(type(config))
    if config is not None:
        _complete(found, folder, config, row)
    _add_card(found, folder, repo_id, license, ours=row is not None)
    if MANIFEST in found.files:
        found.files[MANIFEST] = manifest_of_copy(folder, found.files)
    found.notes += validate_no_secrets(found.files)
    return found


def own_files(folder: Path, with_training_state: bool = False, include: Iterable[str] = ()) -> Contents:
    """Collect the files to push from a folder, without the files that `checkpoint_contents` creates.

    Arguments and errors are as in `checkpoint_contents`.
    """
    weights = {file.name for file in validate_weights(folder)}
    found, include = Contents(), tuple(include)
    for name, (file, problem) in folder_files(folder).items():
        state = any(fnmatch(name, pattern) for pattern in TRAINING_STATE)
        patterns = [pattern for pattern in MODEL_FILES if name.count("/") == pattern.count("/")]
        wanted = name in weights or any(fnmatch(name, pattern) for pattern in patterns)
        if (with_training_state if state else wanted) or any(fnmatch(name, pattern) for pattern in include):
            found.add(name, file, problem)
        elif problem:
            found.left_out[name] = problem
        else:
            group = name.split("/")[0] + "/" if "/" in name else name
            what = "training state; --with-training-state" if state else "not part of a checkpoint; --include"
            found.left_out[group] = f"{what} adds it"
    return found


def folder_files(folder: Path) -> dict[str, tuple[Path, str | None]]:
    """Map the name of each file in a folder to its path and the reason not to push it (None to push it).

    A link may point to a file in the folder or, in a snapshot of the huggingface_hub cache, to a blob of the cache.
    Links to folders are not followed.
    """
    own, found = Path(os.path.realpath(folder)), {}
    allowed, repository = [own], own.parent.parent
    if own.parent.name == "snapshots" and repository.parent == Path(os.path.realpath(constants.HF_HUB_CACHE)):
        # Links may point to this repository's blobs, or to the blobs that all repositories share.
        allowed += [repository / "blobs", repository.parent / "blobs"]
    for path in sorted(folder.rglob("*")):
        problem = None
        if path.is_symlink():
            target = Path(os.path.realpath(path))
            if target.is_dir():
                problem = "is a link to a folder, which is not followed"
            elif not target.is_file():
                problem = "is a link to a file that does not exist"
            elif not any(target.is_relative_to(place) for place in allowed):
                problem = "is a link to a file outside the folder, which is not followed"
        if path.is_file() or problem:
            found[path.relative_to(folder).as_posix()] = (path, problem)
    return found


def validate_weights(folder: Path) -> list[Path]:
    """Return a checkpoint's weight files. Raise FileNotFoundError or ValueError if files are missing or corrupted."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; expected the folder of a saved model")
    if not (folder / CONFIG).exists():
        if not (folder / ADAPTER_CONFIG).exists():
            raise FileNotFoundError(f"{folder} has no {CONFIG}; expected the folder of a saved model")
        _tensors_of(folder / ADAPTER)
        return [folder / ADAPTER]
    if (folder / MANIFEST).exists() and (found := find_corruption(folder)):
        raise ValueError(f"{folder} is a corrupted checkpoint: {'; '.join(found)}. Push an earlier checkpoint")
    if (folder / WEIGHTS).exists():
        _tensors_of(folder / WEIGHTS)
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}; save the model again with save_pretrained")
    try:
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        shards = sorted({folder / name for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is corrupted ({error}); save the model again") from error
    for file in shards:
        absent = {tensor for tensor, shard in weight_map.items() if shard == file.name} - _tensors_of(file)
        if absent:
            raise ValueError(
                f"{file} lacks {len(absent)} tensors that {INDEX} lists, such as {min(absent)}: "
                "the folder mixes two saves; save the model again into an empty folder"
            )
    return [folder / INDEX, *shards]


def _tensors_of(file: Path) -> set[str]:
    """Return the tensor names in a file. Raise ValueError if it is missing, truncated or not safetensors."""
    try:
        with safe_open(file, "pt") as opened:
            return set(opened.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is missing, truncated or not safetensors ({error}); save the model again") from error


def _complete(contents: Contents, folder: Path, config: PreTrainedConfig, row: ArchitectureSpec | None) -> None:
    """Add the architecture's code with its license, plus a generation config or feature extractor if missing."""
    if row:
        _add_code(contents, folder, config, row)
    if (row and AutoModelForCausalLM in row.heads) or type(config) in AutoModelForCausalLM._model_mapping:
        if not {"tokenizer.json", "tokenizer_config.json"} & contents.files.keys():
            raise ValueError(
                f"{folder} has no tokenizer, but the model needs one; save it with "
                f"tokenizer.save_pretrained({str(folder)!r})"
            )
        if "generation_config.json" not in contents.files:
            text = GenerationConfig.from_model_config(config).to_json_string()
            contents.files["generation_config.json"] = text.encode()
            contents.notes.append("generation_config.json: created from config.json")
    if row and row.feature_extractor:
        with tempfile.TemporaryDirectory() as scratch:
            row.feature_extractor.from_config(config).save_pretrained(scratch)
            made = Path(scratch, PREPROCESSOR).read_bytes()
        if PREPROCESSOR in contents.files:
            _add_fields(contents, folder, PREPROCESSOR, {"auto_map": json.loads(made)["auto_map"]})
        else:
            contents.files[PREPROCESSOR] = made
            contents.notes.append(f"{PREPROCESSOR}: created from config.json")


def _add_code(contents: Contents, folder: Path, config: PreTrainedConfig, row: ArchitectureSpec) -> None:
    """Add the modules of an architecture, their license, and the config.json fields that name their classes."""
    modules: dict[str, Path] = {}
    for cls in filter(None, (type(config), row.base, row.head, row.feature_extractor)):
        file = sys.modules[cls.__module__].__file__
        modules |= {Path(each).name: Path(each) for each in (file, *get_relative_import_files(file))}
    own = [name for name in sorted(modules) if (folder / name).is_file()]
    if edited := [name for name in own if (folder / name).read_bytes() != modules[name].read_bytes()]:
        contents.notes.append(
            f"{', '.join(edited)}: pushed the version from hrm_hf {__version__}, which differs from the one in the "
            "folder; to publish your own version, run `hf upload` after this push"
        )
    contents.files |= modules | {CODE_LICENSE: code_license()}
    for name in modules:
        contents.left_out.pop(name, None)
    fields: dict[str, Any] = {"auto_map": row.head._auto_map}
    if row.head._custom_pipelines and config.architectures == [row.head.__name__]:
        fields["custom_pipelines"] = row.head._custom_pipelines
    _add_fields(contents, folder, CONFIG, fields)


def _add_fields(contents: Contents, folder: Path, name: str, fields: dict[str, Any]) -> None:
    """Add entries to mappings in a JSON file, in case an older version of the package saved the file without them."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        old = {field: dict(content.get(field) or {}) for field in fields}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / name} is corrupted ({error}); save the model again") from error
    if changed := [field for field, value in fields.items() if old[field] | value != old[field]]:
        content |= {field: old[field] | value for field, value in fields.items()}
        contents.files[name] = (json.dumps(content, indent=2) + "\n").encode()
        contents.notes.append(f"{name}: added classes of the pushed code to {' and '.join(changed)}")


def code_license() -> bytes:
    """Return the license of the code in a checkpoint; the license of the weights is in the card."""
    return (
        "The Python files (*.py) in this folder come from the package hrm_hf and are under the license below.\n"
        "It applies to the code only. The license of the weights is stated in the metadata of README.md; if none\n"
        "is stated, none is granted.\n\n" + (files("hrm_hf") / "LICENSE").read_text()
    ).encode()


def _add_card(contents: Contents, folder: Path, repo_id: str, license: str | None, ours: bool) -> None:
    """Add the folder's card (or a new one) with the repository's name and the license of the weights."""
    path = folder / CARD_FILE
    if not path.exists() and not ours:
        raise ValueError(f"{folder} has no {CARD_FILE}, and hrm_hf cannot create one for this kind of model; add one")
    card = ModelCard(card_for_repository(folder, repo_id) if ours else path.read_text(encoding="utf-8"))
    if license:
        card.data.license = license
        card.text = card.text.replace(LICENSE_NOT_STATED, license)
    if card.data.license in (None, UNKNOWN_LICENSE):
        note = f"{CARD_FILE} states no license, so nobody may use the weights; set one, e.g. --license apache-2.0"
        contents.notes.append(note)
    contents.files[CARD_FILE] = str(card).encode()


def complete_push(folder: str, repo_id: str) -> None:
    """Add the code license to the files of `model.push_to_hub`, and replace transformers' placeholder card.

    Existing cards and the caller's tags are kept. Raises ValueError if a file contains a secret.
    """
    path, tags = Path(folder, CARD_FILE), []
    Path(folder, CODE_LICENSE).write_bytes(code_license())
    if path.exists() and PLACEHOLDER_CARD in path.read_text(encoding="utf-8"):
        tags = ModelCard.load(path).data.tags or []
        path.unlink()
    if not path.exists():
        card = ModelCard(new_card_text(folder).replace(Path(folder).resolve().name, repo_id))
        card.data.tags = list(dict.fromkeys([*card.data.tags, *tags]))
        card.save(path)
    validate_no_secrets({file.name: file for file in Path(folder).rglob("*") if file.is_file()})
