"""Build records, tokenizers and prompts: `hrm-hf data go`, `go-tokenizer` and `go-prompts`.

The tokenizer is a byte-level BPE with the tags of the Go coder's stream as ids 0..42, in the order of `SPECIAL_TOKENS`
of `models/processing_hrm_go_coder.py`. It does not normalize, so decoding restores the text exactly. Encoding adds <s>
before a text and nothing after it. A tag in a text is encoded as that tag, so users can type prompts in the training
format; for untrusted text, pass `split_special_tokens=True`, as `encode_text` does. The chat template disarms
tags in messages by inserting a space after "<".
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from tqdm.auto import tqdm

from ...hub.kinds import GO_CODER, load_config
from ...hub.licenses import UNKNOWN_LICENSE
from ...io.files import building, checksums_in, load_json, numbered_lines, one_at_a_time, write_text
from ...io.usage import UsageError
from ...models.processing_hrm_go_coder import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from ...text.sources import read_json_lines
from ..options import SOURCES, BuildGo, BuildGoPrompts, BuildGoTokenizer, is_folder
from ..validators.go_validators import best_validator
from .commits import commit_records
from .functions import function_records
from .hub_sets import hub_records
from .pull_requests import pull_request_records
from .records import REPORT, problem_text, read_records, spread, write_lines, write_records
from .selection import SPLITS, Selection, evaluation_ngrams, split_of, validate_no_evaluation_file
from .sources import Dropped, find_go_source, go_files, go_text, is_utf8
from .streams import GoStreamBuilder
from .trajectories import TrajectoryCounts, build_trajectories


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Regular expressions that split text before BPE merging, keyed by llama.cpp's names; None means GPT-2's regex.
# With 16,384 ids, a token holds 3.15 bytes of held-out standard-library code with qwen2, and 2.81 bytes with gpt-2.
PRE_TOKENIZERS = {
    "gpt-2": None,
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    ),
}

# Inserting a space after `<` breaks a tag and cannot create one, so the tags can be replaced in any order.
CHAT_TEMPLATE = (
    "{%- set tags = [" + ", ".join(f"'{token}'" for token in SPECIAL_TOKENS) + "] -%}"
    "{%- macro harmless(text) -%}"
    "{%- set ns = namespace(text=text) -%}"
    "{%- for tag in tags -%}{%- set ns.text = ns.text | replace(tag, '< ' ~ tag[1:]) -%}{%- endfor -%}"
    "{{- ns.text -}}"
    "{%- endmacro -%}"
    "{%- set ns = namespace(problem=[], code='') -%}"
    "{%- set answered = messages[-1]['role'] == 'assistant' -%}"
    "{%- for message in (messages[:-1] if answered else messages) -%}"
    "{%- if message['content'] is not string -%}"
    "{{- raise_exception('message content must be text; this model reads text only') -}}"
    "{%- elif message['role'] == 'assistant' -%}{%- set ns.code = message['content'] -%}"
    "{%- elif message['role'] in ('system', 'user') -%}{%- set ns.problem = ns.problem + [message['content']] -%}"
    "{%- else -%}{{- raise_exception('role ' ~ message['role'] ~ ': must be system, user or assistant') -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{{- '<s><PROBLEM>' ~ harmless(ns.problem | join('\\n\\n')) ~ '</PROBLEM>' -}}"
    "{%- if ns.code -%}{{- '<CONTEXT>' ~ harmless(ns.code) ~ '</CONTEXT>' -}}{%- endif -%}"
    "{%- if answered -%}{{- '<CODE>' ~ harmless(messages[-1]['content']) ~ '</CODE></s>' -}}"
    "{%- elif add_generation_prompt -%}{{- '<PLAN>' -}}{%- endif -%}"
)


@one_at_a_time
def build_records(options: BuildGo) -> dict[str, Any]:
    """Build records from sources, save them and a report to a folder, and return the report."""
    started = time.perf_counter()
    settings = {name: value for name, value in asdict(options).items() if name not in ("out", "text", "on_bad_line")}
    settings["exclude_eval"] = [path.name for path in options.exclude_eval or ()]
    _validate_same(options.out, options.out / REPORT, settings, "records built with other options")
    read, counts = Dropped(), {}
    selection = Selection(
        options.seed, options.validation_share, options.test_share, options.deduplicate, options.near_threshold,
        evaluation_ngrams(options.exclude_eval or ()),
    )  # fmt: skip
    splits = selection.split(_read_all(options, read, counts))
    if not any(splits.values()):
        raise ValueError(f"no records in {', '.join(options.sources)}; {_why(read, selection.dropped)}")
    report = {"out": str(options.out), "records_read": counts, **_write(options.out, splits)}
    if empty := _empty_splits(splits, options):
        report["note"] = empty
    report["groups"] = {name: len({record["group"] for record in splits[name]}) for name in SPLITS}
    report["licences"] = dict(Counter(record["licence"] for name in SPLITS for record in splits[name]).most_common())
    if options.trajectories:
        report["trajectories"] = _write_trajectories(splits, options)
    if options.text is not None:
        report["text"] = _write_texts(options)
    report |= {"not_read": read.report(), "left_out": selection.dropped.report(), "options": settings}
    report["seconds"] = round(time.perf_counter() - started, 1)
    folders = ("", "trajectories/") if options.trajectories else ("",)
    names = [f"{folder}{name}.jsonl" for folder in folders for name in SPLITS]
    report |= checksums_in(options.out, names)
    write_text(options.out / REPORT, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return report


@one_at_a_time
def build_tokenizer(options: BuildGoTokenizer) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer on Go files, records, or texts in .jsonl files, and save it.

    If the sources cannot fill `vocab_size`, the vocabulary is smaller, and the report has a note.
    """
    started = time.perf_counter()
    dropped = Dropped()
    found = (text for source in options.source for text in _texts(source, dropped))
    texts = list(tqdm(found, desc="Reading", unit=" files"))
    if not texts:
        raise ValueError(f"no Go text in {', '.join(options.source)}; {_why(dropped)}")
    tokenizer = train_on_texts(iter(texts), options.vocab_size, True, options.pre_tokenizer)
    tokenizer.save_pretrained(options.out)
    tokens = sum(len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
    note = f"the sources fill only {len(tokenizer)} of {options.vocab_size} ids; add more sources to fill it"
    return {
        "out": str(options.out),
        "vocab_size": len(tokenizer),
        **({"note": note} if len(tokenizer) < options.vocab_size else {}),
        "files": len(texts),
        "megabytes": _megabytes(texts),
        "bytes_per_token": round(sum(len(text.encode()) for text in texts) / tokens, 3),
        "not_read": dropped.report(),
        "seconds": round(time.perf_counter() - started, 1),
    }


def build_prompts(options: BuildGoPrompts) -> dict[str, Any]:
    """Convert records to prompts for `training/run_grpo.py`, with their solutions as references.

    A prompt is the Go coder's stream with the record's plan, up to and including the code prefix; problems and
    contexts are truncated as in training.

    Returns:
        A report, also saved next to the file: the number of {"prompt", "reference"} rows, and the records dropped
        because they are too long or contain tags that look like the prompt's own. Raises UsageError if the file
        already has prompts for a different model.
    """
    from transformers import AutoTokenizer

    config = load_config(options.model, GO_CODER)
    budgets = {name: getattr(config, name) for name in ("problem_budget", "context_budget")}
    most, longest = options.max_length, options.max_reference
    builder = GoStreamBuilder(AutoTokenizer.from_pretrained(options.model), most, **budgets)
    tokenizer = hashlib.sha256(builder.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    settings = {"model": options.model, "tokenizer": tokenizer, **budgets}
    beside = options.out.with_name(f"{options.out.name}.{REPORT}")
    if options.out.exists():
        _validate_same(options.out, beside, settings, "prompts for another model")
    dropped, rows = Dropped(), []
    records = spread(list(read_records(options.records)), options.limit)
    for record in tqdm(records, desc="prompts", unit=" records", disable=None):
        solution = record["solution"]["code"]
        if longest is not None and len(builder.tokenizer(solution, verbose=False)["input_ids"]) > longest:
            dropped.add(f"solution longer than {longest} tokens", record["id"])
            continue
        ids = [*builder.planned_ids(record), *builder.code_prompt_ids(record)]
        if len(ids) > most:
            dropped.add(f"longer than {most} tokens", record["id"])
            continue
        prompt = builder.tokenizer.decode(ids[1:])  # drop <s>, because the tokenizer adds it again
        if builder.tokenizer(prompt)["input_ids"] != ids:
            dropped.add("tags in the text, or truncated within a character", record["id"])
            continue
        rows.append({"prompt": prompt, "reference": solution})
    with building(options.out.parent):
        if options.out.exists():  # another build may have written the file in the meantime
            _validate_same(options.out, beside, settings, "prompts for another model")
        report = {"out": str(options.out), "rows": write_lines(options.out, rows), "left_out": dropped.report()}
        write_text(beside, json.dumps(report | {"options": settings}, indent=2, ensure_ascii=False) + "\n")
    return report


# ---- sources ----


def _read_all(options: BuildGo, dropped: Dropped, counts: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the records from all sources, and count them by source."""
    for source in options.sources:
        counts[source] = 0
        for record in tqdm(_open(source, options, dropped), desc=source, unit=" records"):
            counts[source] += 1
            if record["licence"].lower() in ("", UNKNOWN_LICENSE, "none", "noassertion"):  # not stated
                record["licence"] = options.license or UNKNOWN_LICENSE
            yield record


def _open(source: str, options: BuildGo, dropped: Dropped) -> Iterable[dict[str, Any]]:
    if is_folder(source):
        return function_records(_folder(source), dropped, options.split_by)
    kind, _, name = source.partition(":")
    if kind == "git":
        return commit_records(name, dropped)
    if kind == "hub":
        name, _, config = name.partition(":")
        validate_no_evaluation_file(name)
        return hub_records(name, config or None, on_bad_line=options.on_bad_line, dropped=dropped)
    validate_no_evaluation_file(name)
    return pull_request_records(name, on_bad_line=options.on_bad_line, dropped=dropped)


def _folder(source: str) -> Path:
    if source == "std":
        return find_go_source()
    folder = Path(source).expanduser()
    validate_no_evaluation_file(folder)
    if not folder.exists():
        raise UsageError(f"source={source!r}: no such folder; expected {SOURCES}")
    if not (is_utf8(str(folder)) and (folder.is_dir() or (folder.is_file() and folder.suffix == ".go"))):
        raise UsageError(f"source={source!r}: must be a folder or a .go file, with a UTF-8 name; expected {SOURCES}")
    return folder


def _texts(source: str, dropped: Dropped) -> Iterator[str]:
    """Yield the texts of a source, to train a tokenizer on them."""
    if not source.endswith((".jsonl", ".jsonl.gz")):
        yield from (file.text for file in go_files(_folder(source), dropped))
        return
    validate_no_evaluation_file(source)
    if not Path(source).is_file():
        raise UsageError(f"source={source!r}: no such file", "--source")
    if b'"solution"' in next(numbered_lines(source), ("", b""))[1]:  # records
        for record in read_records(source, "skip", lambda wrong: dropped.add("unreadable line", wrong)):
            yield "\n\n".join((problem_text(record), record["context"]["before"], record["solution"]["code"]))
        return
    for row in read_json_lines(source, "text", "skip"):
        if row["text"] is None:
            dropped.add("unreadable line", row["error"])
        else:
            yield go_text(row["text"])


# ---- output ----


def _validate_same(out: Path, report: Path, settings: dict[str, Any], other: str) -> None:
    """Raise UsageError if an earlier build used different options, according to its report."""
    found = load_json(report).get("options") if report.is_file() else settings
    if found != settings:
        names = [name for name, value in settings.items() if (found or {}).get(name) != value]
        problem = f"already contains {other} ({', '.join(names)}); choose another --out, or delete it"
        raise UsageError(f"out={str(out)!r}: {problem}", "--out")


def _write(out: Path, splits: dict[str, Iterable[dict]]) -> dict[str, int]:
    return {f"{name}_rows": write_records(out / f"{name}.jsonl", records) for name, records in splits.items()}


def _empty_splits(splits: dict[str, list[dict]], options: BuildGo) -> str | None:
    """Return a note if a split that should have records is empty."""
    held_out = {"validation": options.validation_share, "test": options.test_share}
    shares = {"train": 1 - sum(held_out.values()), **held_out}
    empty = " and ".join(name for name in SPLITS if shares[name] and not splits[name])
    return empty and (
        f"{empty}: no records. Complete groups are assigned to splits at random: use larger --validation-share and "
        "--test-share, another --seed, or more sources"
    )


def _write_trajectories(splits: dict[str, list[dict]], options: BuildGo) -> dict[str, Any]:
    """Write the trajectories of each split; return the share of each refinement decision and the drop counts."""
    counts = {name: TrajectoryCounts() for name in splits}
    how = {"seed": options.seed, "per_record": options.trajectories, "oracle": options.oracle}
    with best_validator(options.validator) as validator:
        made = {name: build_trajectories(splits[name], validator, counts=counts[name], **how) for name in splits}
        report = _write(options.out / "trajectories", made)
    for name, each in counts.items():
        report[f"{name}_decisions"] = {decision: round(share, 3) for decision, share in each.shares().items()}
    return report | {f"{name}_left_out": dict(each.dropped) for name, each in counts.items()}


def _write_texts(options: BuildGo) -> dict[str, Any]:
    """Write the source files as text, split like the records, and drop exact copies of held-out files."""
    found = {name: [] for name in SPLITS}
    for source in filter(is_folder, options.sources):
        for file in go_files(_folder(source), Dropped()):
            group = file.package if options.split_by == "package" else file.module
            split = split_of(group, options.seed, options.validation_share, options.test_share)
            found[split].append({"text": file.text, "path": file.name, "group": group})
    seen: set[str] = set()
    for name in reversed(SPLITS):
        found[name] = [row for row in found[name] if not (row["text"] in seen or seen.add(row["text"]))]
    rows = {f"{name}_rows": write_lines(options.text / f"{name}.jsonl", found[name]) for name in SPLITS}
    megabytes = {f"{name}_megabytes": _megabytes([row["text"] for row in found[name]]) for name in SPLITS}
    return {"out": str(options.text), **rows, **megabytes}


def _megabytes(texts: list[str]) -> float:
    return round(sum(len(text.encode()) for text in texts) / 1e6, 2)


def _why(*dropped: Dropped) -> str:
    reasons = [f"{count} {reason}" for each in dropped for reason, count in each.counts.most_common()]
    wrong = [each.examples[reason][0] for each in dropped for reason in each.examples if reason == "unreadable line"]
    return f"dropped: {', '.join([*reasons, *wrong])}" if reasons else "no Go files found"


# ---- tokenizer ----


def train_on_texts(
    texts: Iterable[str], vocab_size: int, progress: bool = False, pre_tokenizer: str = "gpt-2"
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE tokenizer on Go source text.

    Args:
        texts: contents of Go source files.
        vocab_size: maximum vocabulary size, including tags; the result is smaller if the texts cannot fill it.
        progress: whether to show a progress bar.
        pre_tokenizer: one of `PRE_TOKENIZERS`.

    Raises:
        ValueError: `vocab_size` is smaller than the number of tags and bytes.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = _splitting(PRE_TOKENIZERS[pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    backend.train_from_iterator(texts, trainer)
    if (least := backend.get_vocab_size()) > vocab_size:
        raise ValueError(f"vocab_size={vocab_size}: must be at least {least}, the number of tags and bytes")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B:1", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return wrap_backend(backend)


def _splitting(expression: str | None) -> pre_tokenizers.PreTokenizer:
    if expression is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def wrap_backend(backend: Tokenizer) -> "PreTrainedTokenizerFast":
    """Wrap a trained tokenizer from the `tokenizers` package for use with transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(SPECIAL_TOKENS[4:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        padding_side="left",
    )
