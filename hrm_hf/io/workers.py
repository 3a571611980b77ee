"""Worker processes that build the parts of a data set. Each process uses one numpy thread."""

import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_all_start_methods, get_context, parent_process


THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_pool(workers: int, module: str) -> ProcessPoolExecutor:
    """Start worker processes with one numpy thread each. The caller's script needs `if __name__ == "__main__"`.

    Args:
        module: name of the module with the workers' functions; imported once for all workers if possible.
    """
    # "fork" is unsafe, because this process may have threads. A fork server imports the package once for all workers.
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    if context.get_start_method() == "forkserver":
        # A process that loaded torch must not be forked. `hrm_hf_start` keeps `import hrm_hf` from loading torch.
        context.set_forkserver_preload(["hrm_hf_start", "__main__", module])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        pool.submit(int)  # start the processes now, so that they inherit this environment
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return pool


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent process handles Ctrl-C
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """Exit when the parent process ends. Otherwise, the worker would wait for work forever."""
    parent_process().join()
    os._exit(1)
