"""On-policy rounds: failures of the model's own, repairs that are worth learning, and training on them in between.

    held_out/                       failures of the first model on held-out problems, the same for every round
    score-0.json                    what the first model mends of them
    round-1/failures/ fixes/        sampled on training problems; repairs that pass, change little, drop nothing
    round-1/breaker.jsonl breaker/  a model that learned the repairs backwards, and what it learned from
    round-1/broken/                 the solutions that it damaged
    round-1/fixer.jsonl fixer/      the model after the round, trained on the pairs of all rounds and on older records
    score-1.json, round-2/ ...      and so on
    rounds.json, rounds.png         success by class of error after each round

A step is done when its last file is there; a run that was stopped goes on at the step where it was.
"""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ...hub.kinds import LANGUAGE_MODEL, load_config
from ...io.complete_files import write_text
from ...io.evaluation import chosen_device, validate_files
from ...io.usage import UsageError, run_process
from ...resources import resource
from ..arguments import BUDGETS
from ..data.records import read_records, spread, write_records
from ..evaluation.load import load_writer
from ..validators.go_validators import best_validator
from .failures import broken_solutions, sampled_failures
from .fixes import MAX_CHANGE, collected_fixes, fixer_success
from .learned import breaker_pairs, fixer_pairs
from .scores import compared, described, plot_rounds
from .shards import REPORT, Made, digest, read_shards, same_options, write_shards


@dataclass(frozen=True)
class Sampling:
    """How models are asked.

    Attributes:
        samples: codes of each record, or repairs of each failure.
        temperature: of all of them.
        validator: what judges them: auto, tree-sitter, parser, types.
        batch_size: sequences at a time.
        max_code_tokens: most new tokens of a code.
        shard_size: records of a shard.
        seed: of all chance.
        device: cpu, cuda, ...; the best there is if None.
    """

    samples: int = 1
    temperature: float = 0.8
    validator: str = "auto"
    batch_size: int = 8
    max_code_tokens: int = 256
    shard_size: int = 64
    seed: int = 0
    device: str | None = None

    def settings(self) -> dict[str, Any]:
        """The options that records depend on: all but the device."""
        return {name: value for name, value in vars(self).items() if name != "device"}


def collect_failures(
    model: str,
    records: list[Path],
    out: Path,
    sampling: Sampling = Sampling(),
    *,
    breaker: bool = False,
    limit: int | None = None,
) -> dict[str, Any]:
    """Writes failures of a model's own, or solutions that a breaker has damaged, in shards.

    Args:
        records: JSON Lines of `hrm-hf data go`.
        breaker: the model is one that breaks good code, and damages the solutions.
        limit: so many records, from all over the files.

    Returns:
        counts of what was written and left out, and the folder.

    Raises:
        UsageError: no such file or device, or a folder that was begun with other options.
        ModelError: a model that is nowhere, or of another kind.
    """
    validate_files(records, "--records")
    rows = spread(list(read_records(records)), limit)
    options = {"breaker": breaker, "limit": limit, "records": [path.name for path in records]}
    return _in_shards(broken_solutions if breaker else sampled_failures, model, rows, out, sampling, options)


def collect_fixes(
    model: str, failures: Path, out: Path, sampling: Sampling = Sampling(), *, max_change: float = MAX_CHANGE
) -> dict[str, Any]:
    """Writes the repairs of failures that are worth learning, in shards; as `collect_failures`.

    Args:
        failures: folder of `collect_failures`, or a file of trajectories.
        max_change: largest share of the tokens that a repair may change.
    """
    rows = read_shards(failures)
    options = {"max_change": max_change, "failures": str(failures)}
    make = partial(collected_fixes, max_change=max_change)
    return _in_shards(make, model, rows, out, sampling, options)


def _in_shards(
    make: Callable[..., Made], model: str, rows: list, out: Path, sampling: Sampling, options: dict[str, Any]
) -> dict[str, Any]:
    load_config(model, LANGUAGE_MODEL)
    options |= {"model": model, **sampling.settings(), "rows": len(rows), "digest of the rows": digest(rows)}
    writer, builder = open_writer(model, sampling)
    with best_validator(sampling.validator) as judge:
        asked = {"samples": sampling.samples, "temperature": sampling.temperature}
        return write_shards(
            out, options, rows, lambda shard: make(writer, builder, shard, judge, **asked),
            seed=sampling.seed, size=sampling.shard_size, what=out.name,
        )  # fmt: skip


def open_writer(model: str, sampling: Sampling):
    """A writer that shows no bars of its own, and the builder."""
    writer, builder = load_writer(
        model, chosen_device(sampling.device), batch_size=sampling.batch_size,
        max_code_tokens=sampling.max_code_tokens, progress=False,
    )  # fmt: skip
    if builder.repairs != "edits":
        raise UsageError(
            f"{model} repairs by rewriting (repair_mode={builder.repairs!r}); rounds are of edits: train it with "
            "--repair_mode edits"
        )
    return writer, builder


@dataclass
class Rounds:
    """A run of rounds; see the module.

    Attributes:
        model: the first model, which repairs by edits.
        records, held_out: plain records of `hrm-hf data go`: to learn from, and to judge on.
        data: more files to train on, such as those that the model was trained on.
        out: folder of everything.
        steps, breaker_steps: of training in a round.
        limit, held_out_limit: so many records, from all over the files.
        fix_samples: repairs tried for each failure.
        max_change: largest share of the tokens that a repair may change to be kept.
        replay: records of `data` for each new pair; see `fixer_pairs`.
        recipe: of `training/run_go_coder.py`.
        extra: more flags of it.
        said: where it and the trainings tell how it goes; standard output if None.
    """

    model: str
    records: list[Path]
    held_out: list[Path]
    out: Path
    data: list[Path] = field(default_factory=list)
    rounds: int = 2
    steps: int = 200
    breaker_steps: int = 100
    limit: int | None = None
    held_out_limit: int | None = None
    fix_samples: int = 4
    max_change: float = MAX_CHANGE
    replay: float = 1.0
    recipe: Path | None = None
    extra: str = ""
    sampling: Sampling = Sampling()
    said: TextIO | None = None

    def run(self) -> dict[str, Any]:
        """Runs what is left to do, and returns what rounds.json holds.

        Raises:
            UsageError: no such file or device, held-out problems that are also learned from, a model that repairs by
                rewriting, or a folder that was begun with other options.
            ValueError: no held-out failure, or nothing to learn from.
        """
        for name, files in (("records", self.records), ("held-out", self.held_out), ("train-data", self.data)):
            validate_files(files, f"--{name}")
        self._validate_held_out()
        same_options(self.out, self._options())
        self._tell(f"Held-out failures of {self.model}")
        collect_failures(self.model, self.held_out, self.out / "held_out", self.sampling, limit=self.held_out_limit)
        scores, current = [self._score(0, self.model)], self.model
        for number in range(1, self.rounds + 1):
            self._tell(f"\nRound {number} of {self.rounds}")
            current = self._round(number, current)
            scores.append(self._score(number, current))
            self._tell(f"mended after round {number}: {described(compared(scores, self.sampling.seed)[-1])}")
        shown = compared(scores, self.sampling.seed)
        counts = {f"round-{number}": self._counts(number) for number in range(1, self.rounds + 1)}
        result = {"out": str(self.out), "model": current, "scores": shown, "counts": counts}
        write_text(self.out / "rounds.json", json.dumps(result, indent=2) + "\n")
        result["plot"] = str(plot_rounds(shown, self.out / "rounds.png"))
        return result

    def _tell(self, line: str) -> None:
        print(line, file=self.said, flush=True)

    def _options(self) -> dict[str, Any]:
        """The options of the folder: all but the number of rounds, of which there may be more the next time."""
        given = ("model", "steps", "breaker_steps", "limit", "held_out_limit", "fix_samples", "max_change", "replay")
        options = {name: getattr(self, name) for name in (*given, "extra")} | self.sampling.settings()
        options["recipe"] = str(self.recipe) if self.recipe else None
        files = {"records": self.records, "held_out": self.held_out, "data": self.data}
        return options | {name: [str(path) for path in paths] for name, paths in files.items()}

    def _validate_held_out(self) -> None:
        """Raises UsageError if a problem to judge on has a solution that is learned from."""
        judged = {record["solution"]["code"].strip(): record["id"] for record in read_records(self.held_out)}
        for record in read_records([*self.records, *self.data]):
            if same := judged.get(record["solution"]["code"].strip()):
                raise UsageError(
                    f"held-out record {same!r} has the solution of {record['id']!r}, which is learned from; give "
                    "files of different splits, as hrm-hf data go writes them",
                    "--held-out",
                )

    def _counts(self, number: int) -> dict[str, Any]:
        """Counts of a round: what it wrote and dropped, and the records that its models learned from."""
        folder = self.out / f"round-{number}"
        counts = {name: json.loads((folder / name / REPORT).read_text()) for name in ("failures", "fixes", "broken")}
        for name in ("breaker", "fixer"):
            counts[name] = json.loads((folder / name / "results.json").read_text())["data"]["train"]
        return counts

    def _round(self, number: int, current: str) -> str:
        """Failures, fixes, breaker, broken solutions, fixer; the last one's folder."""
        folder = self.out / f"round-{number}"
        asked = replace(self.sampling, seed=self.sampling.seed + number)
        collect_failures(current, self.records, folder / "failures", asked, limit=self.limit)
        tries = replace(asked, samples=self.fix_samples)
        fixes = collect_fixes(current, folder / "failures", folder / "fixes", tries, max_change=self.max_change)
        self._tell(f"{fixes['fixes']} fixes of {fixes['failures']} failures")
        mix = (self.replay, asked.seed)
        breaker, fixer = folder / "breaker", folder / "fixer"
        self._train(
            current, breaker, self.breaker_steps,
            lambda: breaker_pairs(self._so_far("fixes", number), self._old(), *mix),
        )  # fmt: skip
        collect_failures(str(breaker), self.records, folder / "broken", asked, breaker=True, limit=self.limit)
        self._train(
            current, fixer, self.steps,
            lambda: fixer_pairs(
                self._so_far("fixes", number), self._so_far("broken", number), self._old(), *mix
            ),
        )  # fmt: skip
        return str(fixer)

    def _so_far(self, name: str, number: int) -> list[dict[str, Any]]:
        """Records of a step, of all rounds up to this one."""
        folders = [self.out / f"round-{earlier}" / name for earlier in range(1, number + 1)]
        return [record for folder in folders for record in read_shards(folder)]

    def _old(self) -> list[dict[str, Any]]:
        return list(read_records(self.data))

    def _train(self, model: str, out: Path, steps: int, learned: Callable[[], list[dict[str, Any]]]) -> None:
        """Trains a model on `learned` records, which are written beside its folder."""
        if (out / "results.json").exists():
            return
        data = out.with_suffix(".jsonl")
        if not data.exists() and not write_records(data, learned()):
            data.unlink()
            raise ValueError(
                f"{out.name}: nothing to learn from; of the failures none was mended so that it could be kept. Give a "
                "model that has learned repairs (--repair_mode edits and trajectories), or --train-data with some"
            )
        flags = {
            "recipe": self.recipe or resource("training/recipes/go_nano_cpu.yaml"),
            "model_name_or_path": model, "tokenizer_name": model, "repair_mode": "edits",
            "train_data": data, "max_steps": steps, "warmup_steps": max(1, steps // 20),
            "lr_scheduler_kwargs": json.dumps({"num_decay_steps": max(1, steps // 2), "min_lr_ratio": 0.05}),
            "refinement_warmup": 0, "refinement_ramp": 0, "eval_strategy": "no", "validation_frequency": 0,
            "seed": self.sampling.seed, "use_cpu": chosen_device(self.sampling.device) == "cpu", "output_dir": out,
            "resume_from_checkpoint": "last-complete",
        }  # fmt: skip
        budgets = load_config(model, LANGUAGE_MODEL).to_dict()  # rows are cut as those that the model has seen
        flags |= {name: budgets[name] for name in BUDGETS}
        pairs = [part for name, value in flags.items() for part in (f"--{name}", value)]
        script = resource("training/run_go_coder.py")
        run_process(sys.executable, script, *pairs, *shlex.split(self.extra), out=self.said)

    def _score(self, number: int, model: str) -> dict[str, Any]:
        file = self.out / f"score-{number}.json"
        if not file.exists():
            writer, builder = open_writer(model, self.sampling)
            failures = read_shards(self.out / "held_out")
            if not failures:
                raise ValueError(
                    f"{self.out / 'held_out'}: no failure; give more --held-out records to write code for"
                )
            with best_validator(self.sampling.validator) as judge:
                figures = fixer_success(writer, builder, failures, judge)
            write_text(file, json.dumps({"round": number, "model": model, **figures}, indent=2) + "\n")
        return json.loads(file.read_text())
