"""A seccomp filter (classic BPF) for bubblewrap that rejects system calls of a program in the sandbox.

Three kinds: what reaches into another process (ptrace, process_vm_writev, ...), what makes a namespace or, on request,
a process, and what takes memory that no limit of the sandbox counts. Refused calls fail with EPERM; clone3, whose
flags a filter cannot see, with ENOSYS, so that libraries use clone instead.
"""

import struct


# audit number, clone, mmap, mprotect
ARCHITECTURES = {"x86_64": (0xC000003E, 56, 9, 10), "aarch64": (0xC00000B7, 220, 222, 226)}
_CLONE3 = 435
# name: (number on x86_64, on aarch64); None where there is no such call.
_REFUSED = {
    # other processes, PID 1 of the sandbox above all
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    # namespaces
    "unshare": (272, 97), "setns": (308, 268),
    # memory that neither RLIMIT_DATA nor the size of /tmp counts: SysV and POSIX queues, files without a file system,
    # pages and huge pages held by a pipe, attributes of inodes (an access list has up to 64 KiB)
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "vmsplice": (278, 75), "io_setup": (206, 0),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    # parts of the kernel that Go programs have no use for, and that had many faults
    "bpf": (321, 280), "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
}  # fmt: skip
_REFUSED_ALONE = {"fork": (57, None), "vfork": (58, None), "pkey_mprotect": (329, 288)}  # without `processes`

_CLONE_THREAD = 0x10000
_CLONE_NEW = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_PROT_WRITE = 2
_MAP_SHARED_ANONYMOUS, _MAP_GROWSDOWN = 0x21, 0x100

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _GIVE = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def seccomp_filter(machine: str, processes: bool = False) -> bytes:
    """Return the filter.

    Args:
        machine: of ARCHITECTURES.
        processes: the program may start processes. Without them it may also not make memory writable by mprotect,
            which static Go programs never do: the kernel does not hold that against RLIMIT_DATA when RLIMIT_AS, too,
            would be passed.
    """
    column = list(ARCHITECTURES).index(machine)
    audit, clone, mmap, mprotect = ARCHITECTURES[machine]
    # seccomp_data: number at 0, architecture at 4, low half of argument i at 16 + 8 i.
    program = [_step(_LOAD, 4), _step(_EQUAL, audit, 1), _step(_GIVE, _KILL), _step(_LOAD, 0)]
    if machine == "x86_64":  # the x32 calls have other numbers
        program += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_GIVE, _EPERM)]
    for numbers in (_REFUSED if processes else _REFUSED | _REFUSED_ALONE).values():
        if numbers[column] is not None:
            program += _call(numbers[column], _step(_GIVE, _EPERM))
    program += _call(_CLONE3, _step(_GIVE, _ENOSYS))
    only_threads = () if processes else (_step(_ANY_BIT, _CLONE_THREAD, 1), _step(_GIVE, _EPERM))
    program += _call(clone, _argument(0), *_refuse_bits(_CLONE_NEW), *only_threads, _step(_GIVE, _ALLOW))
    if not processes:
        program += _call(mprotect, _argument(2), *_refuse_bits(_PROT_WRITE), _step(_GIVE, _ALLOW))
    program += _call(
        mmap, _argument(3), *_refuse_bits(_MAP_GROWSDOWN), _step(_AND, _MAP_SHARED_ANONYMOUS),
        _step(_EQUAL, _MAP_SHARED_ANONYMOUS, 0, 1), _step(_GIVE, _EPERM), _step(_GIVE, _ALLOW),
    )  # fmt: skip
    return b"".join([*program, _step(_GIVE, _ALLOW)])


def _step(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
    return struct.pack("<HBBI", code, then, other, value)


def _call(number: int, *steps: bytes) -> list[bytes]:
    """Steps for one call, the last of which gives a verdict; other calls pass over them."""
    return [_step(_EQUAL, number, 0, len(steps)), *steps]


def _argument(index: int) -> bytes:
    return _step(_LOAD, 16 + 8 * index)


def _refuse_bits(bits: int) -> tuple[bytes, bytes]:
    return _step(_ANY_BIT, bits, 0, 1), _step(_GIVE, _EPERM)
