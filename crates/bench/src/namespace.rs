//! Network namespaces for the benchmark, without the machine's traffic and firewall rules.

use std::{
    fs, io,
    net::{Ipv4Addr, TcpListener},
    os::fd::{AsFd, AsRawFd as _, OwnedFd},
    thread,
};

use anyhow::Context as _;
use nix::{
    libc,
    sched::{CloneFlags, setns, unshare},
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, socket,
    },
    unistd::{Uid, getgid, getuid},
};

/// Returns free ports. In a network namespace of the benchmark's own, no other program takes them.
pub(crate) fn free_ports<const N: usize>() -> anyhow::Result<[u16; N]> {
    let listeners: Result<Vec<_>, _> = (0..N).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect();
    let ports: Result<Vec<_>, _> =
        listeners.context("no free port")?.iter().map(TcpListener::local_addr).collect();
    let mut free = [0; N];
    free.iter_mut().zip(ports?).for_each(|(port, address)| *port = address.port());
    Ok(free)
}

/// Moves this thread, and the threads and processes that it starts later, into a new network namespace with `lo` up.
/// Without root, also into a new user namespace.
///
/// # Errors
/// The kernel does not permit it.
pub(crate) fn enter() -> io::Result<()> {
    if !(Uid::effective().is_root() && unshare(CloneFlags::CLONE_NEWNET).is_ok()) {
        let (user, group) = (getuid(), getgid());
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET)?;
        fs::write("/proc/self/setgroups", "deny")?;
        // The user's id stays the same. As root, some programs would try to change their user.
        fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    set_up()
}

/// Creates a network namespace with `lo` up. The kernel removes it, with all its links, when the descriptor is closed and
/// no process is in it; so nothing is left behind however the benchmark ends.
///
/// # Errors
/// The kernel does not permit it.
pub(crate) fn create() -> io::Result<OwnedFd> {
    on_own_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        set_up()?;
        Ok(fs::File::open("/proc/thread-self/ns/net")?.into())
    })
}

/// Runs a function on a thread in this namespace. Its child processes are in the namespace too.
///
/// # Errors
/// Those of the function, or the namespace cannot be entered.
pub(crate) fn within<T: Send, E: From<io::Error> + Send>(
    namespace: impl AsFd + Send,
    run: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    on_own_thread(|| {
        setns(namespace, CloneFlags::CLONE_NEWNET).map_err(io::Error::from)?;
        run()
    })
}

fn on_own_thread<T: Send, E: From<io::Error> + Send>(
    run: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    let result = thread::scope(|scope| scope.spawn(run).join());
    result.unwrap_or_else(|_| Err(io::Error::other("a thread in a network namespace panicked").into()))
}

/// Sets up the new namespace of this thread.
fn set_up() -> io::Result<()> {
    loopback_up()?;
    // The machine's congestion control may pace packets by timers (bbr), which only adds latency on loopback. If the
    // namespace may not change it, the machine's remains.
    let _ = fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno");
    Ok(())
}

/// Returns the congestion control in use.
pub(crate) fn congestion_control() -> String {
    fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control")
        .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

/// Sends an rtnetlink(7) message that sets IFF_UP on link 1, which is `lo` in every new namespace.
fn loopback_up() -> io::Result<()> {
    const LENGTH: u32 = 32;
    let mut message = Vec::with_capacity(LENGTH as usize);
    // struct nlmsghdr
    message.extend(LENGTH.to_ne_bytes());
    message.extend(libc::RTM_NEWLINK.to_ne_bytes());
    message.extend(u16::try_from(libc::NLM_F_REQUEST | libc::NLM_F_ACK).unwrap_or_default().to_ne_bytes());
    message.extend([0; 8]);
    // struct ifinfomsg
    let up = u32::try_from(libc::IFF_UP).unwrap_or_default().to_ne_bytes();
    message.extend([0; 4]);
    message.extend(1_i32.to_ne_bytes());
    message.extend(up);
    message.extend(up);

    let kind = SockFlag::SOCK_CLOEXEC;
    let fd: OwnedFd = socket(AddressFamily::Netlink, SockType::Raw, kind, SockProtocol::NetlinkRoute)?;
    bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    send(fd.as_raw_fd(), &message, MsgFlags::empty())?;
    let mut answer = [0; 256];
    let length = recv(fd.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    // struct nlmsgerr follows the header; its first field is 0 or a negative error number.
    match answer.get(16..20).filter(|_| length >= 20).map(|code| [code[0], code[1], code[2], code[3]]) {
        Some([0, 0, 0, 0]) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-i32::from_ne_bytes(code))),
        None => Err(io::Error::other("the kernel's answer about the loopback link is too short")),
    }
}
