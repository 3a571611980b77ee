"""Code run where this package cannot be imported, without paying for torch and transformers every time.

One server a test process, started at its first snippet, imports both and forks a child for every snippet. A child has
a folder, arguments and a home of the Hub's files of its own, and ends with its process group: nothing reaches the
next. Environment variables that libraries read at their import are those of the test process; but for HF_HOME and
those of a Hub on loopback, whose constants a child sets. A snippet that needs others is for a process of its own.
"""

import atexit
import functools
import json
import os
import selectors
import subprocess
import sys
import tempfile


SECONDS = 300
STARTING_SECONDS = 200

SERVER = r"""
import gc, importlib.util, json, os, signal, sys, threading, time, traceback

gc.disable()  # until everything is imported
sys.modules["hrm_hf"] = None  # an installed one is not to be found either
try:
    importlib.import_module("hrm_hf")
except ImportError:
    pass
else:
    raise AssertionError("this process can import hrm_hf")
import huggingface_hub.constants, huggingface_hub.hf_api, torch, transformers
import transformers.dynamic_module_utils, transformers.utils.hub, safetensors.torch
# transformers imports its own modules when a name of theirs is used first.
from transformers import AutoConfig, AutoModel, AutoTokenizer, GenerationMixin, PreTrainedModel, pipeline

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


running = None


def stop(*_):  # the session has ended, in the middle of a snippet perhaps
    if running:
        try:
            os.killpg(running, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os._exit(1)


def turn_to(variables):  # sets what huggingface_hub makes of these variables at its import
    os.environ.clear()
    os.environ.update(variables)
    url, constants = variables["HF_ENDPOINT"], huggingface_hub.constants
    assert variables["HF_HUB_OFFLINE"] == "0" and variables["HF_HUB_DISABLE_XET"] == "1"
    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET, constants.ENDPOINT = False, True, url
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    huggingface_hub.hf_api.api.endpoint = url
    assert transformers.utils.hub._hf_api is None


def unblock(folder):  # lets the package be found in a folder, and there only
    del sys.modules["hrm_hf"]
    sys.path.insert(0, folder)
    assert importlib.util.find_spec("hrm_hf").origin == os.path.join(folder, "hrm_hf", "__init__.py")


def child(task):
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.devnull) as nothing, open(task["out"], "wb") as out, open(task["err"], "wb") as err:
        for source, target in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(source.fileno(), target)
    os.chdir(task["cwd"])
    if task["hub"]:
        turn_to(task["hub"])
    home = task["home"]
    os.environ["HF_HOME"] = home
    huggingface_hub.constants.HF_HOME = home
    huggingface_hub.constants.HF_HUB_CACHE = os.path.join(home, "hub")
    for module in (transformers.dynamic_module_utils, transformers.utils.hub):
        assert os.path.basename(module.HF_MODULES_CACHE) == "modules"
        module.HF_MODULES_CACHE = os.path.join(home, "modules")
    if task["package"]:
        unblock(task["package"])
    sys.argv = ["-c", *task["arguments"]]
    code = 1
    try:
        exec(compile(task["code"], "<snippet>", "exec"), vars(sys.modules["__main__"]))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


assert threading.active_count() == 1 and not any(name.startswith("hrm_hf.") for name in sys.modules)
signal.signal(signal.SIGTERM, stop)
gc.freeze()
gc.enable()
print("ready", file=answers, flush=True)
for line in sys.stdin:
    task = json.loads(line)
    running = pid = os.fork()
    if not pid:
        child(task)
    limit = time.monotonic() + task["seconds"]
    ended, status = 0, 0
    while not ended and time.monotonic() < limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    try:
        os.killpg(pid, signal.SIGKILL)  # what the child has left behind, or the child itself
    except ProcessLookupError:
        pass
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    running = None
    print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), file=answers, flush=True)
"""


class _Server:
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="clean-process-")
        empty = os.path.join(self.folder.name, "empty")
        os.mkdir(empty)
        environment = {**os.environ, "HF_HOME": os.path.join(self.folder.name, "hf_home"), "HF_HUB_OFFLINE": "1"}
        for name in ("PYTHONPATH", "HF_MODULES_CACHE", "HF_HUB_CACHE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=empty, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self.end)
        assert self.answer(STARTING_SECONDS) == "ready"

    def answer(self, seconds: float) -> str:
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(seconds), f"no answer in {seconds} s"
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.terminate()
        self.process.communicate()
        self.folder.cleanup()


_server = functools.cache(_Server)


def run(
    code: str, *arguments, cwd, home, hub: dict[str, str] | None = None, package=None, seconds: float = SECONDS
) -> subprocess.CompletedProcess:
    """What `python -c code arguments` gives in the folder `cwd`, with HF_HOME `home`, where `import hrm_hf` fails.

    With `hub`, the variables of `HubServer.environment`, it uses that Hub. With `package`, a folder, the copy of
    hrm_hf in there can be imported after all.
    """
    server = _server()
    out, err = (os.path.join(server.folder.name, name) for name in ("out", "err"))
    task = {
        "code": code, "arguments": list(map(str, arguments)), "cwd": str(cwd), "home": str(home), "hub": hub,
        "package": package and str(package), "seconds": seconds, "out": out, "err": err,
    }  # fmt: skip
    server.process.stdin.write(json.dumps(task) + "\n")
    server.process.stdin.flush()
    code = json.loads(server.answer(seconds + 30))
    if code is None:
        raise subprocess.TimeoutExpired("a snippet", seconds)
    with open(out, encoding="utf-8") as stdout, open(err, encoding="utf-8") as stderr:
        return subprocess.CompletedProcess("a snippet", code, stdout.read(), stderr.read())
