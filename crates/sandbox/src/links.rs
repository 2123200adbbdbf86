//! Links, addresses and routes: a bridge in the mesh's own network namespace and a veth pair for each pod.
//!
//! Each step is one message of [`skysail_intercept::netlink`]; source: `rtnetlink(7)`. Hardware addresses follow from the IP
//! addresses, so that a neighbour's cache stays valid when an address is used again.

use std::{
    io,
    net::Ipv4Addr,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use nix::{libc, net::if_::if_nametoindex};
use skysail_intercept::netlink::{self, Message, Socket};

/// Name of the bridge in the mesh's namespace.
pub(crate) const BRIDGE: &str = "skysail0";
/// Name of a pod's only link beside `lo`.
pub(crate) const POD_LINK: &str = "eth0";

/// From linux/veth.h; the libc crate lacks it.
const VETH_INFO_PEER: u16 = 1;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const NEW: i32 = libc::NLM_F_CREATE | libc::NLM_F_EXCL;

/// Brings up `lo` in the calling thread's network namespace, which must also be the socket's.
pub(crate) fn loopback(socket: &mut Socket) -> io::Result<()> {
    up(socket, "lo")
}

/// Creates the bridge with its address and brings it up.
pub(crate) fn bridge(socket: &mut Socket, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let message = Message::new(libc::RTM_NEWLINK, NEW)
        .raw(&link_header(0, 0))
        .text(libc::IFLA_IFNAME, BRIDGE)
        .attribute(libc::IFLA_ADDRESS, &hardware_address(address))
        .nested(libc::IFLA_LINKINFO, |info| info.text(IFLA_INFO_KIND, "bridge"));
    socket.request(vec![message])?;
    assign(socket, BRIDGE, address, prefix)?;
    up(socket, BRIDGE)
}

/// Creates a veth pair: one end, `name`, at the bridge in this socket's namespace, the other as `eth0` in the pod's.
pub(crate) fn veth_pair(
    socket: &mut Socket,
    bridge: u32,
    name: &str,
    pod: BorrowedFd<'_>,
    address: Ipv4Addr,
) -> io::Result<()> {
    let pod = u32::try_from(pod.as_raw_fd()).unwrap_or_default();
    let peer = |data: Message| {
        data.nested(VETH_INFO_PEER, |peer| {
            peer.raw(&link_header(0, 0))
                .text(libc::IFLA_IFNAME, POD_LINK)
                .attribute(libc::IFLA_ADDRESS, &hardware_address(address))
                .attribute(libc::IFLA_NET_NS_FD, &pod.to_ne_bytes())
        })
    };
    let message = Message::new(libc::RTM_NEWLINK, NEW)
        .raw(&link_header(0, libc::IFF_UP as u32))
        .text(libc::IFLA_IFNAME, name)
        .attribute(libc::IFLA_MASTER, &bridge.to_ne_bytes())
        .nested(libc::IFLA_LINKINFO, |info| info.text(IFLA_INFO_KIND, "veth").nested(IFLA_INFO_DATA, peer));
    socket.request(vec![message])
}

/// Brings up `lo` and the pod's link, and sets the link's address and default route. The calling thread and the socket
/// must be in the pod's namespace.
pub(crate) fn pod(socket: &mut Socket, address: Ipv4Addr, prefix: u8, gateway: Ipv4Addr) -> io::Result<()> {
    loopback(socket)?;
    assign(socket, POD_LINK, address, prefix)?;
    up(socket, POD_LINK)?;
    let mut header = [0; 12];
    header[0] = libc::AF_INET as u8;
    header[4] = libc::RT_TABLE_MAIN;
    header[5] = libc::RTPROT_BOOT;
    header[6] = libc::RT_SCOPE_UNIVERSE;
    header[7] = libc::RTN_UNICAST;
    let message = Message::new(libc::RTM_NEWROUTE, NEW)
        .raw(&header)
        .attribute(libc::RTA_GATEWAY, &gateway.octets())
        .attribute(libc::RTA_OIF, &if_nametoindex(POD_LINK)?.to_ne_bytes());
    socket.request(vec![message])
}

/// Returns whether packets to an address leave this machine. The kernel delivers or broadcasts all others itself.
///
/// # Errors
/// When there is no route to the address.
pub(crate) fn is_beyond(socket: &mut Socket, address: Ipv4Addr) -> io::Result<bool> {
    let mut header = [0; 12];
    header[..2].copy_from_slice(&[libc::AF_INET as u8, 32]);
    let question =
        Message::unanswered(libc::RTM_GETROUTE).raw(&header).attribute(libc::RTA_DST, &address.octets());
    // The type of the route in `struct rtmsg`.
    Ok(socket.ask(question)?.get(7) == Some(&libc::RTN_UNICAST))
}

fn assign(socket: &mut Socket, link: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    netlink::assign(socket, if_nametoindex(link)?, address.into(), prefix)
}

fn up(socket: &mut Socket, link: &str) -> io::Result<()> {
    let header = link_header(if_nametoindex(link)?, libc::IFF_UP as u32);
    socket.request(vec![Message::new(libc::RTM_NEWLINK, 0).raw(&header)])
}

/// Returns `struct ifinfomsg` that sets these flags and leaves all others.
fn link_header(index: u32, flags: u32) -> [u8; 16] {
    let mut header = [0; 16];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[8..12].copy_from_slice(&flags.to_ne_bytes());
    header[12..16].copy_from_slice(&flags.to_ne_bytes());
    header
}

fn hardware_address(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    // Bit 1 of the first byte means "locally administered" (IEEE 802).
    [0x02, 0x42, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use nix::ifaddrs::getifaddrs;

    use super::*;

    #[test]
    fn addresses_of_this_machine_are_not_beyond_it() {
        let mut socket = Socket::route().unwrap();
        let own = getifaddrs().unwrap().filter_map(|link| Some(link.address?.as_sockaddr_in()?.ip()));
        let own: Vec<Ipv4Addr> = own.collect();
        assert!(own.contains(&Ipv4Addr::LOCALHOST), "{own:?}");
        for address in own.into_iter().chain([[127, 1, 2, 3].into(), Ipv4Addr::BROADCAST]) {
            assert_eq!(is_beyond(&mut socket, address).ok(), Some(false), "{address}");
        }
    }
}
