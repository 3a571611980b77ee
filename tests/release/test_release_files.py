"""Files for releases and continuous integration: minimum versions, the Dockerfile, workflows, release-check.

Referees: setup.cfg, the commands of README, the Makefile's targets, and existing files. Building and installing are
tested by `make release-check` itself and by tests/launch/test_installed_package.py.
"""

import configparser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.M))
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")


def requirements(text: str) -> dict[str, Requirement]:
    """Parse requirements, one per line; return them by name."""
    found = [Requirement(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in found}


REQUIRED = requirements(CONFIG["options"]["install_requires"])


def only_version(one: Requirement, operator: str) -> Version:
    """The version of a requirement's only specifier with that operator."""
    (specifier,) = (found for found in one.specifier if found.operator == operator)
    return Version(specifier.version)


# ---- versions ----


def test_tested_minimum_versions_equal_the_allowed_ones():
    allowed = {name: only_version(one, ">=") for name, one in REQUIRED.items()}
    tried = requirements((ROOT / "constraints-min.txt").read_text())
    assert {name: only_version(one, "==") for name, one in tried.items()} == allowed


def test_every_version_that_make_installs_is_allowed():
    pinned = requirements((ROOT / "constraints.txt").read_text())
    for name, one in REQUIRED.items():
        if name in pinned:
            assert one.specifier.contains(only_version(pinned[name], "==")), name


def test_everything_names_the_same_oldest_python():
    oldest = CONFIG["options"]["python_requires"].removeprefix(">=")
    listed = [
        line.rpartition(" ")[2]
        for line in CONFIG["metadata"]["classifiers"].splitlines()
        if re.search(r":: 3\.\d+$", line)
    ]
    assert min(listed, key=Version) == oldest
    assert f"({', '.join(oldest.split('.'))}) and 'Python {oldest} or newer is needed" in MAKEFILE
    for page in ("README.md", "docs/index.md"):
        assert set(re.findall(r"Python (3\.\d+) or newer", (ROOT / page).read_text())) == {oldest}, page
    ruff = re.search(r'target-version = "py3(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert f"3.{ruff[1]}" == oldest


# ---- the image ----


def dockerfile() -> list[tuple[str, str]]:
    """Return instruction and argument of each Dockerfile line, after joining continued lines."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", "")
    return [tuple(re.split(r"\s+", line.strip(), maxsplit=1)) for line in text.splitlines() if line.strip()]


def bare(command: str) -> str:
    """Return a pip command without the options that the image adds: no cache, and pinned versions."""
    words = command.replace("--no-cache-dir", "").replace("-c constraints.txt", "").split()
    return " ".join(words)


def test_the_image_installs_by_the_commands_of_the_readme():
    defaults = dict(rest.split("=", 1) for word, rest in dockerfile() if word == "ARG")
    runs = [rest for word, rest in dockerfile() if word == "RUN"]
    commands = [bare(run.replace("${TORCH_INDEX}", defaults["TORCH_INDEX"])) for run in runs if "pip install" in run]
    readme = (ROOT / "README.md").read_text()
    assert commands == ["pip install torch --index-url https://download.pytorch.org/whl/cpu", "pip install ."]
    for command in commands:
        assert re.search(rf"(^|`){re.escape(command)}(`|\s|$)", readme, re.M), command


def test_dockerfile_takes_its_base_as_argument_and_uses_known_instructions():
    words = [word for word, _ in dockerfile()]
    assert words[0] == "ARG" and dockerfile()[1] == ("FROM", "${BASE}")
    assert set(words) <= {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    known = {rest.split("=", 1)[0] for word, rest in dockerfile() if word in ("ARG", "ENV")}
    used = {name for _, rest in dockerfile() for name in re.findall(r"\$\{(\w+)\}", rest)}
    assert used - known == {"PATH"} - known
    (program,) = yaml.safe_load(next(rest for word, rest in dockerfile() if word == "ENTRYPOINT"))
    assert f"{program} = hrm_hf_start:main" in CONFIG["options.entry_points"]["console_scripts"]


def test_image_copies_build_files_and_no_environment():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= set(ignored)
    needed = {line.split("/")[0] for line in re.findall(r'"([\w/]+)/', (ROOT / "setup.py").read_text())}
    assert needed >= {"training", "pretrained"} and not needed & set(ignored)


# ---- workflows ----


def workflow(path: Path) -> dict:
    """A workflow; YAML reads its key `on` as true."""
    read = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in read.items()}


def steps(jobs: dict) -> list[dict]:
    return [one for job in jobs.values() for one in job["steps"]]


def test_there_are_workflows_for_tests_docs_and_a_release():
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "tests"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_existing_commands_with_minimal_permissions(path):
    read = workflow(path)
    assert read["on"] and read["permissions"] == {"contents": "read"}
    jobs = read["jobs"]
    for job in jobs.values():
        assert set([job.get("needs")] if job.get("needs") else []) <= jobs.keys()
    for one in steps(jobs):
        assert ("run" in one) != ("uses" in one), one
        if "uses" in one:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", one["uses"]), one["uses"]
            continue
        program, *rest = one["run"].split()
        if program == "make":
            assert rest[0] in TARGETS, one["run"]
            variables = [word.split("=")[0] for word in rest[1:]]
            assert all(re.search(rf"^{name} \?=", MAKEFILE, re.M) for name in variables), one["run"]
        elif program == "grep":
            assert (ROOT / rest[-1]).is_file(), one["run"]
        else:
            assert (ROOT / program).stat().st_mode & 0o100, one["run"]


def test_push_workflow_runs_the_repositorys_tests():
    assert [one["run"] for one in workflow(ROOT / ".github/workflows/tests.yml")["jobs"]["tests"]["steps"][1:]] == [
        ".ci/run"
    ]


def test_release_publishes_the_checked_files_without_a_token():
    path = ROOT / ".github/workflows/release.yml"
    check, publish = workflow(path)["jobs"].values()
    made = [one["with"] for one in check["steps"] if "upload-artifact" in one.get("uses", "")]
    taken = [one["with"] for one in publish["steps"] if "download-artifact" in one.get("uses", "")]
    assert [one["name"] for one in made] == [one["name"] for one in taken]
    assert made[0]["path"] == taken[0]["path"] == "dist" and "--out dist" in MAKEFILE
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "pypi"
    assert "password" not in path.read_text() and "secrets." not in path.read_text()


def test_the_tag_of_a_release_must_be_the_version():
    (command,) = [
        one["run"]
        for one in steps(workflow(ROOT / ".github/workflows/release.yml")["jobs"])
        if one.get("run", "").startswith("grep")
    ]
    version = re.search(r'__version__ = "(.+)"', (ROOT / "hrm_hf" / "_version.py").read_text())[1]
    for tag, code in ((f"v{version}", 0), (f"v{version}1", 1), ("v9.9.9", 1)):
        tried = subprocess.run(["bash", "-c", command], cwd=ROOT, env={"GITHUB_REF_NAME": tag}, capture_output=True)
        assert tried.returncode == code, tag


# ---- release-check ----


@pytest.fixture
def release_check():
    spec = importlib.util.spec_from_file_location("release_check", ROOT / ".ci" / "release_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_expected_answer_of_the_install_check_solves_its_board(release_check):
    board, answer = release_check.BOARD, release_check.ANSWER
    assert all(given in (".", found) for given, found in zip(board, answer, strict=True))
    rows = [answer[9 * row : 9 * row + 9] for row in range(9)]
    columns = ["".join(column) for column in zip(*rows)]
    boxes = ["".join(row[c : c + 3] for row in rows[r : r + 3]) for r in (0, 3, 6) for c in (0, 3, 6)]
    assert all(sorted(unit) == list("123456789") for unit in (*rows, *columns, *boxes))


def test_a_command_that_fails_ends_the_check_with_its_output(release_check, monkeypatch, capsys, tmp_path):
    def fails(folder, out):
        release_check.run([sys.executable, "-c", "print('half'); raise SystemExit('no wheel')"], tmp_path, {})

    monkeypatch.setattr(release_check, "build", fails)
    monkeypatch.setattr(sys, "argv", ["release_check.py", "--out", str(tmp_path / "dist")])
    assert release_check.main() == 1
    printed = capsys.readouterr().out
    assert "ended with status 1" in printed and "half\nno wheel" in printed


def test_build_keeps_other_files(release_check, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(release_check.FailedCheckError, match="holds other files"):
        release_check.build(tmp_path / "work", tmp_path)
    assert (tmp_path / "thesis.tex").exists()
