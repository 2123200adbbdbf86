//! Two network namespaces with a link between them: a pod, and what is outside of it. All sockets belong to one of them,
//! and connections are made by threads with another user or group.

use std::{
    fs::File,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    thread,
    time::Duration,
};

use nix::{
    libc,
    net::if_::if_nametoindex,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, setns, unshare},
    unistd::{getegid, geteuid},
};
use rustix::thread::{Gid, Uid, set_thread_gid, set_thread_uid};
use skysail_intercept::netlink::{self, Message, Socket};
use socket2::{Domain, SockRef, Type};

/// Name of the link in both namespaces.
pub(crate) const LINK: &str = "eth0";
const NEW: i32 = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
/// From linux/veth.h and linux/if_link.h; the libc crate lacks them.
const VETH_INFO_PEER: u16 = 1;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
/// Flag of an IPv6 address that is used at once (linux/if_addr.h).
const NODAD: u8 = 2;
/// Far longer than any connection takes.
const LIMIT: Duration = Duration::from_secs(30);

/// A user and a group.
pub(crate) type Owner = (u32, u32);

/// A network namespace, which ends with its descriptor.
pub(crate) struct Namespace(OwnedFd);

/// A pod, its surroundings, and the listeners in both.
pub(crate) struct World {
    pub(crate) pod: Namespace,
    pub(crate) outside: Namespace,
    listeners: Vec<(&'static str, TcpListener)>,
}

impl Namespace {
    fn create() -> Self {
        let made = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root: they create network namespaces");
            let mut socket = Socket::route().unwrap();
            up(&mut socket, "lo");
            OwnedFd::from(File::open("/proc/thread-self/ns/net").unwrap())
        });
        Self(made.join().unwrap())
    }

    /// Runs a function on a thread in this namespace.
    pub(crate) fn run<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        let root = (geteuid().as_raw(), getegid().as_raw());
        self.run_as(root, run)
    }

    /// Runs a function on a thread in this namespace, as this user and group.
    pub(crate) fn run_as<T: Send>(&self, (user, group): Owner, run: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                setns(self.0.as_fd(), CloneFlags::CLONE_NEWNET).unwrap();
                set_thread_gid(Gid::from_raw(group)).unwrap();
                set_thread_uid(Uid::from_raw(user)).unwrap();
                run()
            });
            thread.join().unwrap()
        })
    }
}

impl World {
    /// Creates the namespaces, connected by a link, on which each has addresses with a prefix of 8 bits.
    pub(crate) fn create(pod: &[&str], outside: &[&str]) -> Self {
        let world = Self { pod: Namespace::create(), outside: Namespace::create(), listeners: Vec::new() };
        let peer = u32::try_from(world.outside.0.as_raw_fd()).unwrap().to_ne_bytes();
        world.pod.run(|| {
            let mut socket = Socket::route().unwrap();
            let data = |data: Message| {
                data.nested(VETH_INFO_PEER, |link| {
                    link.raw(&[0; 16]).text(libc::IFLA_IFNAME, LINK).attribute(libc::IFLA_NET_NS_FD, &peer)
                })
            };
            let message = Message::new(libc::RTM_NEWLINK, NEW)
                .raw(&[0; 16])
                .text(libc::IFLA_IFNAME, LINK)
                .nested(libc::IFLA_LINKINFO, |info| {
                    info.text(IFLA_INFO_KIND, "veth").nested(IFLA_INFO_DATA, data)
                });
            socket.request(vec![message]).unwrap();
        });
        for (namespace, addresses) in [(&world.pod, pod), (&world.outside, outside)] {
            namespace.run(|| {
                let mut socket = Socket::route().unwrap();
                up(&mut socket, LINK);
                for address in addresses {
                    assign(&mut socket, address.parse().unwrap());
                }
            });
        }
        world
    }

    /// Listens on a port in one of the namespaces, for both families.
    pub(crate) fn listen(&mut self, name: &'static str, outside: bool, port: u16) {
        let namespace = if outside { &self.outside } else { &self.pod };
        let listener = namespace.run(|| {
            let socket = socket2::Socket::new(Domain::IPV6, Type::STREAM, None).unwrap();
            socket.set_only_v6(false).unwrap();
            socket.set_reuse_address(true).unwrap();
            socket.bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)).into()).unwrap();
            socket.listen(16).unwrap();
            TcpListener::from(socket)
        });
        self.listeners.push((name, listener));
    }

    /// Connects as an owner, and returns the listener that the connection reaches.
    pub(crate) fn connect(&self, from: &Namespace, owner: Owner, to: &str) -> &'static str {
        self.connect_from(from, owner, None, to)
    }

    /// The same from a source address.
    pub(crate) fn connect_from(
        &self,
        from: &Namespace,
        owner: Owner,
        source: Option<&str>,
        to: &str,
    ) -> &'static str {
        let to: SocketAddr = to.parse().unwrap();
        let connected: io::Result<socket2::Socket> = from.run_as(owner, || {
            let socket = socket2::Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            if let Some(source) = source {
                let source: IpAddr = source.parse().unwrap();
                socket.bind(&SocketAddr::from((source, 0)).into())?;
            }
            socket.connect_timeout(&to.into(), LIMIT)?;
            Ok(socket)
        });
        match connected {
            Ok(_connection) => self.accept(to),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => "refused",
            Err(error) => panic!("connecting to {to}: {error}"),
        }
    }

    /// Accepts the connection that was made last.
    fn accept(&self, to: SocketAddr) -> &'static str {
        let mut descriptors: Vec<_> = self
            .listeners
            .iter()
            .map(|(_, listener)| PollFd::new(listener.as_fd(), PollFlags::POLLIN))
            .collect();
        assert!(poll(&mut descriptors, PollTimeout::try_from(LIMIT).unwrap()).unwrap() > 0, "{to}");
        let at = descriptors.iter().position(|found| found.any().unwrap_or_default()).unwrap();
        let (name, listener) = &self.listeners[at];
        let (stream, _) = listener.accept().unwrap();
        if ["outbound", "inbound"].contains(name) {
            assert_eq!(original_destination(&stream, to), Some(to), "{name}");
        }
        name
    }
}

fn original_destination(stream: &TcpStream, to: SocketAddr) -> Option<SocketAddr> {
    let socket = SockRef::from(stream);
    let found = if to.is_ipv6() { socket.original_dst_v6() } else { socket.original_dst_v4() };
    found.ok()?.as_socket()
}

fn up(socket: &mut Socket, link: &str) {
    let header = header(if_nametoindex(link).unwrap());
    socket.request(vec![Message::new(libc::RTM_NEWLINK, 0).raw(&header)]).unwrap();
}

/// Returns `struct ifinfomsg` of a link that is up.
fn header(index: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&(libc::IFF_UP as u32).to_ne_bytes());
    header[12..16].copy_from_slice(&(libc::IFF_UP as u32).to_ne_bytes());
    header
}

fn assign(socket: &mut Socket, address: IpAddr) {
    let index = if_nametoindex(LINK).unwrap();
    let IpAddr::V6(v6) = address else {
        return netlink::assign(socket, index, address, 8).unwrap();
    };
    let message = Message::new(libc::RTM_NEWADDR, NEW)
        .raw(&[libc::AF_INET6 as u8, 8, NODAD, libc::RT_SCOPE_UNIVERSE])
        .raw(&index.to_ne_bytes())
        .attribute(libc::IFA_LOCAL, &v6.octets());
    socket.request(vec![message]).unwrap();
}
