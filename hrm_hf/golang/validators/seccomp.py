"""Allowlist of system calls for the Go sandbox, as a seccomp filter.

`CALLS` lists what Go's runtime and standard library, the Go tools and a shell need; `_rules` decides some calls by
their arguments. Everything else fails with EPERM: sockets, io_uring, Landlock, further seccomp filters, splice, tee
and sendfile (which pin pages in pipes), calls that access other processes, and unknown calls. clone3 and calls newer
than this list fail with ENOSYS, and naming memory (from Go 1.25 on) with EINVAL, as on an older kernel, so libraries
fall back.
"""

import re
import struct


# Audit numbers.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _numbers(calls: str) -> dict[str, tuple[int, int | None]]:
    """Parse call numbers in the form NAME=X86_64/AARCH64. The second is empty if aarch64 lacks the call."""
    return {name: (int(x), int(a) if a else None) for name, x, a in re.findall(r"(\w+)=(\d+)/(\d*)", calls)}


# System calls for files, memory, signals, time, processes and threads; bubblewrap starts programs with execve.
CALLS = _numbers("""
read=0/63 write=1/64 open=2/ close=3/57 stat=4/ fstat=5/80 lstat=6/ lseek=8/62 access=21/ creat=85/ readv=19/65
writev=20/66 pread64=17/67 pwrite64=18/68 dup=32/23 dup2=33/ dup3=292/24 pipe=22/ pipe2=293/59 getcwd=79/17
chdir=80/49 fchdir=81/50 rename=82/ mkdir=83/ rmdir=84/ link=86/ unlink=87/ symlink=88/ readlink=89/ chmod=90/
fchmod=91/52 chown=92/ fchown=93/55 lchown=94/ umask=95/166 truncate=76/45 ftruncate=77/46 fsync=74/82
fdatasync=75/83 fallocate=285/47 fadvise64=221/223 flock=73/32 getdents=78/ getdents64=217/61 statfs=137/43
fstatfs=138/44 openat=257/56 mkdirat=258/34 fchownat=260/54 newfstatat=262/79 unlinkat=263/35 renameat=264/38
renameat2=316/276 linkat=265/37 symlinkat=266/36 readlinkat=267/78 fchmodat=268/53 fchmodat2=452/452
faccessat=269/48 faccessat2=439/439 utime=132/ utimes=235/ futimesat=261/ utimensat=280/88 statx=332/291
copy_file_range=326/285 poll=7/ ppoll=271/73 select=23/ pselect6=270/72 epoll_create=213/ epoll_create1=291/20
epoll_ctl=233/21 epoll_wait=232/ epoll_pwait=281/22 eventfd2=290/19 munmap=11/215 brk=12/214 madvise=28/233
rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139 rt_sigpending=127/136 rt_sigsuspend=130/133
rt_sigtimedwait=128/137 sigaltstack=131/132 kill=62/129 tkill=200/130 tgkill=234/131 pause=34/
restart_syscall=219/128 nanosleep=35/101 clock_nanosleep=230/115 clock_gettime=228/113 clock_getres=229/114
gettimeofday=96/169 time=201/ times=100/153 getitimer=36/102 setitimer=38/103 alarm=37/ getpid=39/172
getppid=110/173 gettid=186/178 getuid=102/174 geteuid=107/175 getgid=104/176 getegid=108/177 getgroups=115/158
getpgrp=111/ getpgid=121/155 getsid=124/156 uname=63/160 sysinfo=99/179 getcpu=309/168 getrandom=318/278
getrusage=98/165 getrlimit=97/163 setrlimit=160/164 futex=202/98 sched_yield=24/124 sched_getaffinity=204/123
set_tid_address=218/96 set_robust_list=273/99 rseq=334/293 exit=60/93 exit_group=231/94 execve=59/221 wait4=61/260
waitid=247/95
""")
PROCESS_CALLS = _numbers("fork=57/ vfork=58/ setpgid=109/154 setsid=112/157")  # allowed with `processes`
# `_rules` allows or rejects these calls depending on their arguments.
CHECKED_CALLS = _numbers(
    "clone=56/220 mmap=9/222 mprotect=10/226 fcntl=72/25 ioctl=16/29 arch_prctl=158/ prctl=157/167 prlimit64=302/261"
)
CLONE3 = 435
FIRST_UNKNOWN = 471  # number of the last system call in Linux 6.19, plus 1

# CLONE_VM, FS, FILES, SIGHAND, THREAD. A thread with its own file table would escape the limit on open files.
_CLONE_THREAD = 0x10F00
_CLONE_NEW = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_PROT_WRITE = 2
_MAP_SHARED_ANONYMOUS, _MAP_GROWSDOWN, _MAP_HUGETLB = 0x21, 0x100, 0x40000
# F_DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC, but not locks (no limit covers them) or larger pipes.
_FCNTL = (0, 1, 2, 3, 4, 1030)
_IOCTL = (0x5401, 0x5413)  # TCGETS, TIOCGWINSZ, which check for a terminal
_ARCH_SET_FS, _PR_SET_VMA = 0x1002, 0x53564D41

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _GIVE = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _EINVAL, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050016, 0x00050026, 0x80000000


def seccomp_filter(machine: str, processes: bool = False) -> bytes:
    """Return the filter as BPF instructions.

    Args:
        machine: one of ARCHITECTURES.
        processes: whether the program may start processes. If not, it cannot make memory writable with mprotect
            either, which static Go programs never do: the kernel does not count that memory against RLIMIT_DATA when
            RLIMIT_AS would be exceeded, too.
    """
    column = list(ARCHITECTURES).index(machine)
    # Offsets in seccomp_data: 0 is the system call number, 4 the architecture, 16 + 8 i the low half of argument i.
    program = [_step(_LOAD, 4), _step(_EQUAL, ARCHITECTURES[machine], 1), _step(_GIVE, _KILL), _step(_LOAD, 0)]
    if machine == "x86_64":  # reject x32 system calls, which use different numbers
        program += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_GIVE, _EPERM)]
    program += [_step(_AT_LEAST, FIRST_UNKNOWN, 0, 1), _step(_GIVE, _ENOSYS)]
    program += _call(CLONE3, _step(_GIVE, _ENOSYS))  # clone3's flags are in memory, which a filter cannot read
    rules = _rules(processes)
    for name, numbers in (CALLS | CHECKED_CALLS | (PROCESS_CALLS if processes else {})).items():
        if numbers[column] is not None:
            program += _call(numbers[column], *rules.get(name, ()), _step(_GIVE, _ALLOW))
    return b"".join([*program, _step(_GIVE, _EPERM)])


def _rules(processes: bool) -> dict[str, list[bytes]]:
    """Return, for each call in CHECKED_CALLS, the filter steps that reject it because of its arguments."""
    only_threads = [] if processes else [*_argument(0), *_require_bits(_CLONE_THREAD)]
    return {
        "clone": [*_argument(0), *_reject_bits(_CLONE_NEW), *only_threads],
        "mmap": [
            *_argument(3), *_reject_bits(_MAP_GROWSDOWN | _MAP_HUGETLB), _step(_AND, _MAP_SHARED_ANONYMOUS),
            _step(_EQUAL, _MAP_SHARED_ANONYMOUS, 0, 1), _step(_GIVE, _EPERM),
        ],
        "mprotect": [] if processes else [*_argument(2), *_reject_bits(_PROT_WRITE)],
        "fcntl": [*_argument(1), *_only(*_FCNTL)],
        "ioctl": [*_argument(1), *_only(*_IOCTL)],
        "arch_prctl": [*_argument(0), *_only(_ARCH_SET_FS)],
        "prlimit64": [*_argument(0), *_only(0)],  # a process may change only its own limits
        "prctl": [*_argument(0), *_only(_PR_SET_VMA), _step(_GIVE, _EINVAL)],
    }  # fmt: skip


def _step(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
    return struct.pack("<HBBI", code, then, other, value)


def _call(number: int, *steps: bytes) -> list[bytes]:
    """Return the filter's instructions for one system call, which end in a verdict. Other system calls skip them."""
    return [_step(_EQUAL, number, 0, len(steps)), *steps]


def _argument(index: int) -> list[bytes]:
    return [_step(_LOAD, 16 + 8 * index)]


def _reject_bits(bits: int) -> list[bytes]:
    return [_step(_ANY_BIT, bits, 0, 1), _step(_GIVE, _EPERM)]


def _require_bits(bits: int) -> list[bytes]:
    return [_step(_AND, bits), _step(_EQUAL, bits, 1), _step(_GIVE, _EPERM)]


def _only(*values: int) -> list[bytes]:
    """Return filter steps that reject the call unless the loaded argument is one of `values`."""
    last = len(values) - 1
    return [*(_step(_EQUAL, value, last - place + 1) for place, value in enumerate(values)), _step(_GIVE, _EPERM)]
