"""On-policy rounds: failures of the model's own, repairs that are worth learning, and training on them in between.

    held_out/                       failures of the first model on held-out problems, the same for every round
    score-0.json                    what the first model mends of them
    round-1/failures/ fixes/        sampled on training problems; repairs that pass, change little, drop nothing
    round-1/breaker/ broken/        a model that learned the repairs backwards, and the solutions that it damaged
    round-1/fixer/                  the model after the round, trained on all of these beside the first one's data
    score-1.json, round-2/ ...      and so on
    rounds.json, rounds.png         success by class of error after each round

A step is done when its last file is there; a run that was stopped goes on at the step where it was.
"""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ...hub.kinds import LANGUAGE_MODEL, load_config
from ...io.complete_files import write_text
from ...io.evaluation import chosen_device, validate_files
from ...io.usage import UsageError, run_process
from ...resources import resource
from ...trainer.plots import ACCENT, EXTRA, INK, MUTED, new_figure, save_figure
from ..arguments import BUDGETS
from ..data.records import read_records, spread, write_records
from ..evaluation.load import load_writer
from ..validators.categories import ERROR_CLASSES
from ..validators.go_validators import best_validator
from .failures import broken_solutions, sampled_failures, to_be_broken
from .fixes import MAX_CHANGE, collected_fixes, fixer_success
from .shards import Made, read_shards, same_options, shard_files, write_shards


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
    options |= {"model": model, "samples": sampling.samples, "temperature": sampling.temperature}
    options |= {"validator": sampling.validator, "max_code_tokens": sampling.max_code_tokens}
    options |= {"shard_size": sampling.shard_size, "seed": sampling.seed, "rows": len(rows)}
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
    recipe: Path | None = None
    extra: str = ""
    sampling: Sampling = Sampling()
    said: TextIO | None = None

    def run(self) -> dict[str, Any]:
        """Runs what is left to do, and returns what rounds.json holds."""
        validate_files(self.data, "--train-data")
        given = ("model", "steps", "breaker_steps", "limit", "held_out_limit", "fix_samples", "max_change", "extra")
        options = {name: getattr(self, name) for name in given} | vars(self.sampling)
        files = {name: [str(path) for path in getattr(self, name)] for name in ("records", "held_out", "data")}
        same_options(self.out, options | files)
        tell = partial(print, file=self.said, flush=True)
        tell(f"Held-out failures of {self.model}")
        collect_failures(self.model, self.held_out, self.out / "held_out", self.sampling, limit=self.held_out_limit)
        scores, current = [self._score(0, self.model)], self.model
        for number in range(1, self.rounds + 1):
            tell(f"\nRound {number} of {self.rounds}")
            current = self._round(number, current)
            scores.append(self._score(number, current))
            tell(f"mended after round {number}: {_mended(scores[-1])} (before: {_mended(scores[-2])})")
        counts = {
            f"round-{number}": {
                name: json.loads((self.out / f"round-{number}" / name / "report.json").read_text())
                for name in ("failures", "fixes", "broken")
            }
            for number in range(1, self.rounds + 1)
        }
        result = {"out": str(self.out), "model": current, "scores": scores, "counts": counts}
        write_text(self.out / "rounds.json", json.dumps(result, indent=2) + "\n")
        result["plot"] = str(plot_rounds(scores, self.out / "rounds.png"))
        return result

    def _round(self, number: int, current: str) -> str:
        """Failures, fixes, breaker, broken solutions, fixer; the last one's folder."""
        folder = self.out / f"round-{number}"
        asked = Sampling(**{**vars(self.sampling), "seed": self.sampling.seed + number})
        collect_failures(current, self.records, folder / "failures", asked, limit=self.limit)
        tries = Sampling(**{**vars(asked), "samples": self.fix_samples})
        fixes = collect_fixes(current, folder / "failures", folder / "fixes", tries, max_change=self.max_change)
        backwards = folder / "breaker.jsonl"
        if not backwards.exists():
            write_records(backwards, _backwards(read_shards(folder / "fixes"), self.data))
        breaker = folder / "breaker"
        self._train(current, [backwards], breaker, self.breaker_steps)
        collect_failures(str(breaker), self.records, folder / "broken", asked, breaker=True, limit=self.limit)
        print(f"{fixes.get('fixes', 0)} fixes", file=self.said, flush=True)
        learned = [*self.data, *shard_files(folder / "fixes"), *shard_files(folder / "broken")]
        self._train(current, learned, folder / "fixer", self.steps)
        return str(folder / "fixer")

    def _train(self, model: str, data: list[Path], out: Path, steps: int) -> None:
        if (out / "results.json").exists():
            return
        files = [path for path in data if path.stat().st_size]  # shards may be empty
        if not files:
            raise ValueError(
                f"{out.name}: nothing to learn from; of the failures none was mended so that it could be kept. Give a "
                "model that has learned repairs (--repair_mode edits and trajectories), or --train-data with some"
            )
        flags = {
            "recipe": self.recipe or resource("training/recipes/go_nano_cpu.yaml"),
            "model_name_or_path": model, "tokenizer_name": model, "repair_mode": "edits",
            "train_data": ",".join(map(str, files)), "max_steps": steps, "warmup_steps": max(1, steps // 20),
            "lr_scheduler_kwargs": json.dumps({"num_decay_steps": max(1, steps // 2), "min_lr_ratio": 0.05}),
            "refinement_warmup": 0, "refinement_ramp": 0, "eval_strategy": "no", "validation_frequency": 0,
            "seed": self.sampling.seed, "output_dir": out,
            "resume_from_checkpoint": "last" if any(out.glob("checkpoint-*")) else None,
        }  # fmt: skip
        pairs = [part for name, value in flags.items() if value is not None for part in (f"--{name}", value)]
        budgets = load_config(model, LANGUAGE_MODEL).to_dict()  # rows are cut as those that the model has seen
        pairs += [part for name in BUDGETS for part in (f"--{name}", budgets[name])]
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


def plot_rounds(scores: list[dict[str, Any]], path: Path) -> Path:
    """Draws the share of held-out failures that is mended after each round, by class of error."""
    figure, axes = new_figure(1, 1, (6.4, 4.0))
    panel, rounds = axes[0][0], [score["round"] for score in scores]
    panel.plot(rounds, [score["mended"] for score in scores], color=INK, linewidth=2.5, marker="o", label="all")
    styles = [(color, line) for line in ("-", "--", ":") for color in (ACCENT, *EXTRA)]
    for name, (color, line) in zip(ERROR_CLASSES, styles):
        shares = [score["by_class"].get(name) for score in scores]
        if all(shares):
            label = f"{name} ({shares[0]['failures']})"
            values = [share["mended"] for share in shares]
            panel.plot(rounds, values, color=color, linestyle=line, marker="o", markersize=3, label=label)
    panel.set(
        xlabel="round", ylabel="failures mended by one repair", ylim=(0, 1.05), title="The same held-out failures"
    )
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(axis="y", color=MUTED, alpha=0.4)
    panel.legend(frameon=False, fontsize="small")
    return save_figure(figure, path)


def _backwards(fixes: list[dict[str, Any]], data: list[Path]) -> list[dict[str, Any]]:
    """The breaker's lessons: from repaired code to the failure, and from solutions to failures of trajectories.

    The first are realistic and few, the second are many.
    """
    pairs = [(record, record["attempts"][0]["code"]) for record in fixes]
    for record in read_records(data) if data else ():
        failed = [attempt["code"] for attempt in record["attempts"][:-1]]
        pairs += [(record, failed[-1])] if failed else []
    return [{**to_be_broken(record, bad), "id": f"{record['id']}@back"} for record, bad in pairs]


def _mended(score: dict[str, Any]) -> str:
    return f"{score['mended']:.1%} of {score['failures']}"
