//! Confines the process to the system calls it needs, before it reads the first byte from a peer.
//!
//! [`process`] sets `no_new_privs` and installs a seccomp filter. Threads and child processes started later inherit
//! both. The filter is an allow list. The kernel answers any other system call with `ENOSYS`, as a kernel without that
//! call does, so the fallbacks of the C library keep working. No memory becomes both writable and executable.
//!
//! Most calls are allowed with any arguments. The kernel (Linux 5.11 or later) keeps these in a bitmap and does not run
//! the filter for them, for example for reads and writes. It runs the filter for calls with a condition on their
//! arguments (`mmap`, `socket`, …).

use std::collections::BTreeMap;

use nix::libc::{self, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Op, SeccompCondition as Condition,
    SeccompFilter, SeccompRule,
};

/// Child processes that the program starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Children {
    /// None: `execve` is refused, too.
    None,
    /// Programs that run for a short time and that this process waits for.
    Programs,
}

/// Error from confining the process.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// The filter could not be built.
    #[error("cannot build the system call filter: {0}")]
    Filter(#[from] seccompiler::BackendError),
    /// The kernel refused the filter or `no_new_privs`.
    #[error("the kernel refuses the system call filter ({0}); start with --no-seccomp to run without it")]
    Kernel(#[source] seccompiler::Error),
}

/// Confines the calling thread, and all threads and processes that it starts afterwards. Call it first in `main`.
///
/// # Errors
/// Fails if the kernel lacks seccomp filters.
pub fn process(children: Children) -> Result<(), ConfineError> {
    let program = filter(children)?;
    // `apply_filter` sets `no_new_privs` first; without it only a privileged process may install a filter.
    seccompiler::apply_filter(&program).map_err(ConfineError::Kernel)
}

fn filter(children: Children) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let mut allow = |calls: &[c_long]| {
        for call in calls {
            // No conditions: allowed with any arguments.
            rules.insert(*call, Vec::new());
        }
    };
    allow(ALWAYS);
    #[cfg(target_arch = "x86_64")]
    allow(X86_64);
    if children == Children::Programs {
        allow(CHILDREN);
        // A child becomes the leader of a process group of its own, so that it can be ended with all its children.
        let zero = |argument| Condition::new(argument, Length::Dword, Op::Eq, 0);
        rules.insert(libc::SYS_setpgid, vec![SeccompRule::new(vec![zero(0)?, zero(1)?])?]);
    }
    rules.extend(conditional()?);
    let refused = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    SeccompFilter::new(rules, refused, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?.try_into()
}

/// Returns the calls that are allowed with certain arguments only. `clone3` is absent because a filter cannot see its
/// flags; the C library then uses `clone`.
fn conditional() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let bits = |argument: u8, mask: libc::c_int, value: libc::c_int| {
        let mask = u64::from(mask.cast_unsigned());
        Condition::new(argument, Length::Dword, Op::MaskedEq(mask), u64::from(value.cast_unsigned()))
    };
    let is = |argument: u8, value: u64| Condition::new(argument, Length::Dword, Op::Eq, value);
    let one = |condition| SeccompRule::new(vec![condition]);
    let write_and_execute = libc::PROT_WRITE | libc::PROT_EXEC;
    // Type of a socket without its flags.
    let kind = |kind| bits(1, !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC), kind);
    let mut sockets = Vec::new();
    for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6] {
        for of_kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM] {
            sockets.push(SeccompRule::new(vec![is(0, u64::from(family.cast_unsigned()))?, kind(of_kind)?])?);
        }
    }
    // `getaddrinfo` asks the kernel for the addresses of the interfaces. Netlink ignores the socket type.
    sockets.push(SeccompRule::new(vec![
        is(0, u64::from(libc::AF_NETLINK.cast_unsigned()))?,
        is(2, u64::from(libc::NETLINK_ROUTE.cast_unsigned()))?,
    ])?);
    Ok(BTreeMap::from([
        // Memory may be executable or writable, never both.
        (
            libc::SYS_mmap,
            vec![one(bits(2, libc::PROT_EXEC, 0)?)?, one(bits(2, write_and_execute, libc::PROT_EXEC)?)?],
        ),
        (libc::SYS_mprotect, vec![one(bits(1, libc::PROT_EXEC, 0)?)?]),
        (libc::SYS_clone, vec![one(bits(0, NEW_NAMESPACES, 0)?)?]),
        (libc::SYS_socket, sockets),
        (libc::SYS_prctl, vec![one(is(0, u64::from(libc::PR_SET_NAME.cast_unsigned()))?)?]),
        (
            libc::SYS_ioctl,
            [libc::FIONBIO, libc::FIONREAD, libc::FIOCLEX, libc::TCGETS, libc::TIOCGWINSZ]
                .map(|request| one(is(1, request)?))
                .into_iter()
                .collect::<Result<_, _>>()?,
        ),
    ]))
}

/// Flags of `clone` that create a namespace.
const NEW_NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Calls of `skysaild` and `skysail-proxy`, allowed with any arguments.
const ALWAYS: &[c_long] = &[
    // Sockets.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_socketpair,
    // Files and pipes.
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_faccessat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_mkdirat,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pipe2,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_splice,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_umask,
    libc::SYS_unlinkat,
    libc::SYS_write,
    libc::SYS_writev,
    // Waiting and time.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_futex,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mincore,
    libc::SYS_mremap,
    libc::SYS_munmap,
    // Threads, signals and information about the process itself.
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_prlimit64,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_sigaltstack,
    libc::SYS_sysinfo,
    libc::SYS_tgkill,
    libc::SYS_uname,
];

/// Calls of the C library on x86-64. Newer architectures have only the forms above.
#[cfg(target_arch = "x86_64")]
const X86_64: &[c_long] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_chmod,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_getdents,
    libc::SYS_getrlimit,
    libc::SYS_link,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_select,
    libc::SYS_stat,
    libc::SYS_symlink,
    libc::SYS_time,
    libc::SYS_unlink,
];

/// Calls that start a program and wait for it to exit.
const CHILDREN: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_kill,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
    libc::SYS_wait4,
    libc::SYS_waitid,
];

#[cfg(test)]
mod tests;
