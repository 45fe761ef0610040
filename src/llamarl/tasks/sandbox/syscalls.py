"""System calls by name, for the two architectures whose numbers we know."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

libc = ctypes.CDLL(None, use_errno=True)


class Architecture(NamedTuple):
    """How the kernel and the table below identify an architecture."""

    audit: int  # its AUDIT_ARCH number, which seccomp uses
    column: int  # its column in the table below


ARCHITECTURES = {"x86_64": Architecture(0xC000003E, 0), "aarch64": Architecture(0xC00000B7, 1)}

# Calls that a program may make (seccomp.py checks the arguments of some), then those that we make to wall it in.
# Each entry is: name, number on x86_64, number on aarch64; - where an architecture lacks the call.
_TABLE = """
read 0 63              write 1 64              readv 19 65             writev 20 66            pread64 17 67
pwrite64 18 68         preadv 295 69           pwritev 296 70          preadv2 327 286         pwritev2 328 287
open 2 -               openat 257 56           creat 85 -              close 3 57              close_range 436 436
lseek 8 62             stat 4 -                fstat 5 80              lstat 6 -               newfstatat 262 79
statx 332 291          access 21 -             faccessat 269 48        faccessat2 439 439      readlink 89 -
readlinkat 267 78      getcwd 79 17            chdir 80 49             fchdir 81 50            getdents 78 -
getdents64 217 61      statfs 137 43           fstatfs 138 44          dup 32 23               dup2 33 -
dup3 292 24            pipe 22 -               pipe2 293 59            select 23 -             pselect6 270 72
poll 7 -               ppoll 271 73            epoll_create 213 -      epoll_create1 291 20    epoll_ctl 233 21
epoll_wait 232 -       epoll_pwait 281 22      epoll_pwait2 441 441    eventfd 284 -           eventfd2 290 19
flock 73 32            fsync 74 82             fdatasync 75 83         ftruncate 77 46         truncate 76 45
fallocate 285 47       fadvise64 221 223       sendfile 40 71          copy_file_range 326 285 splice 275 76
tee 276 77             mkdir 83 -              mkdirat 258 34          rmdir 84 -              unlink 87 -
unlinkat 263 35        rename 82 -             renameat 264 38         renameat2 316 276       link 86 -
linkat 265 37          symlink 88 -            symlinkat 266 36        umask 95 166            readahead 187 213
chmod 90 -             fchmod 91 52            fchmodat 268 53         utime 132 -             utimes 235 -
utimensat 280 88       futimesat 261 -         mmap 9 222              munmap 11 215           mprotect 10 226
mremap 25 216          madvise 28 233          brk 12 214              msync 26 227            mincore 27 232
membarrier 324 283     rt_sigaction 13 134     rt_sigprocmask 14 135   rt_sigreturn 15 139     rt_sigpending 127 136
rt_sigsuspend 130 133  rt_sigtimedwait 128 137 sigaltstack 131 132     restart_syscall 219 128 pause 34 -
alarm 37 -             setitimer 38 103        getitimer 36 102        timerfd_create 283 85   timerfd_settime 286 86
timerfd_gettime 287 87 nanosleep 35 101        clock_nanosleep 230 115 clock_gettime 228 113   clock_getres 229 114
gettimeofday 96 169    time 201 -              times 100 153           getrusage 98 165        sysinfo 99 179
uname 63 160           getcpu 309 168          getrandom 318 278       futex 202 98            futex_waitv 449 449
set_robust_list 273 99 get_robust_list 274 100 rseq 334 293            set_tid_address 218 96  arch_prctl 158 -
sched_yield 24 124     sched_getaffinity 204 123 sched_getparam 143 121 sched_getscheduler 145 120
sched_get_priority_max 146 125 sched_get_priority_min 147 126          getpid 39 172           getppid 110 173
gettid 186 178         getuid 102 174          geteuid 107 175         getgid 104 176          getegid 108 177
getresuid 118 148      getresgid 120 150       getgroups 115 158       getpgid 121 155         getpgrp 111 -
getsid 124 156         getpriority 140 141     capget 125 90           getrlimit 97 163        execve 59 221
exit 60 93             exit_group 231 94       wait4 61 260            waitid 247 95           fork 57 -
vfork 58 -             clone 56 220            clone3 435 435          setsid 112 157          setpgid 109 154
kill 62 129            tkill 200 130           tgkill 234 131          ioctl 16 29             fcntl 72 25
prctl 157 167          prlimit64 302 261       socketpair 53 199       sendto 44 206           recvfrom 45 207
shutdown 48 210        getsockopt 55 209       setsockopt 54 208       getsockname 51 204      getpeername 52 205
seccomp 317 277        pivot_root 155 41       mount_setattr 442 442
landlock_create_ruleset 444 444 landlock_add_rule 445 445 landlock_restrict_self 446 446
"""


@cache
def numbers(machine: str) -> Mapping[str, int]:
    """Maps the name of each call that this architecture has to its number."""
    words, column = _TABLE.split(), 1 + ARCHITECTURES[machine].column
    rows = [words[start : start + 3] for start in range(0, len(words), 3)]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def call(name: str, *args: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call that libc may have no function for. Raises OSError."""
    return checked(libc.syscall(numbers(os.uname().machine)[name], *map(_argument, args)), name)


def _argument(value: int | bytes | ctypes.Array[ctypes.c_char] | None) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else value


def checked(result: int, name: str) -> int:
    """Return the result of a libc call. Raises OSError if it failed."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result
