//! A network namespace of the benchmark's own: nothing of the machine's traffic, rules or settings is in it.

use std::{
    fs, io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use nix::{
    libc,
    sched::{CloneFlags, unshare},
    sys::socket::{
        AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, socket,
    },
    unistd::{Uid, getgid, getuid},
};

/// Puts this process, and all that it starts from now on, into a fresh network namespace with `lo` up.
pub(crate) fn enter() -> io::Result<()> {
    if !(Uid::effective().is_root() && unshare(CloneFlags::CLONE_NEWNET).is_ok()) {
        let (user, group) = (getuid(), getgid());
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET)?;
        fs::write("/proc/self/setgroups", "deny")?;
        // Everybody stays who they are: a program that is not root does not try to change its user.
        fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    loopback_up()?;
    // The machine may have a paced one (bbr), which sends by timers that have no place on loopback.
    // Where the namespace may not choose, the machine's own stays.
    let _ = fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno");
    Ok(())
}

/// The congestion control in force.
pub(crate) fn congestion_control() -> String {
    fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control")
        .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

/// One rtnetlink(7) message: set IFF_UP on link 1, which is `lo` in every fresh namespace.
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
