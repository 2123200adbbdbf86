//! Networks of two nodes: how the pod of the client reaches that of the server, as plug-ins of clusters connect pods.
//!
//! Client and server have a pod each, on a node each. Nodes and pods are network namespaces. A pair of virtual Ethernet
//! links is the wire between the nodes:
//!
//! ```text
//! client's pod ── client's node ══ wire ══ server's node ── server's pod
//! ```
//!
//! The programs `ip`, `tc` and `wg` make the links. The kernel removes them together with the namespaces.

use std::{
    fs,
    io::{self, Write as _},
    net::Ipv4Addr,
    os::fd::OwnedFd,
    process::{Command, Stdio},
    sync::Arc,
};

use anyhow::{Context as _, ensure};
use rustix::thread::{CapabilitySet, capabilities, configure_capability_in_ambient_set, set_capabilities};
use serde::{Deserialize, Serialize};

use crate::{
    namespace, peers,
    topology::{Host, HostPair},
};

/// Arguments that name the namespace which is the standard input of the command.
const TO: &str = "netns /proc/self/fd/0";
/// Bytes by which VXLAN and WireGuard shorten the packets of pods, as the kernel computes them for IPv4.
const VXLAN_OVERHEAD: u32 = 50;
const WIREGUARD_OVERHEAD: u32 = 80;
const MTU: u32 = 1_500;
/// Parts of the messages of `ip` and `tc` if the kernel does not know a kind of links or queues.
const LACKING: [&str; 4] = [
    "Unknown device type",
    "Operation not supported",
    "Specified qdisc kind is unknown",
    "RTNETLINK answers: No such file or directory",
];

/// How packets get from pod to pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum NetworkKind {
    /// A bridge on each node, to which its pods are connected; routes between the nodes.
    Bridge,
    /// A route to each pod on its node; routes between the nodes.
    Routed,
    /// Pods share the wire's link (ipvlan in mode L2); nodes forward nothing.
    Ipvlan,
    /// A bridge on each node; VXLAN connects the bridges over the wire.
    Vxlan,
    /// As `Routed`, but WireGuard encrypts all packets between the nodes.
    Wireguard,
}

/// A network, and the properties of its wire.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NetworkInput {
    pub(crate) name: String,
    pub(crate) kind: NetworkKind,
    /// Delay of each packet in each direction, in milliseconds. Default: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) delay_ms: f64,
    /// Share of packets lost in each direction, in percent. Default: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) loss_percent: f64,
    /// Bandwidth in each direction in megabits per second. Absent: not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bandwidth_mbit: Option<u32>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

/// This machine lacks a feature that a turn needs. The text names what is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NotAvailable(pub(crate) String);

impl std::fmt::Display for NotAvailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotAvailable {}

/// Fails if networks cannot be built at all.
///
/// # Errors
/// iproute2 is not installed.
pub(crate) fn check() -> anyhow::Result<()> {
    for program in ["ip", "tc"] {
        ensure!(
            peers::in_path(program).is_some(),
            "the program {program} is not installed; install the package iproute2"
        );
    }
    Ok(())
}

impl NetworkInput {
    /// Builds the network. It exists as long as the hosts or a process in them.
    ///
    /// # Errors
    /// A command fails. The error is [`NotAvailable`] if the kernel or the machine lacks the kind or a property.
    pub(crate) fn build(&self) -> anyhow::Result<HostPair> {
        let namespace = || namespace::create().context("cannot create a network namespace");
        let side = |number: u8| -> anyhow::Result<NetworkSide> {
            Ok(NetworkSide { number, pod: namespace()?, node: namespace()? })
        };
        let sides = [side(1)?, side(2)?];
        self.connect(&sides).with_context(|| format!("network {}", self.name))?;
        let [client, server] = sides.map(|side| {
            let address = Ipv4Addr::new(10, 0, side.number, 2);
            (Host { address, namespace: Some(Arc::new(side.pod)) }, Arc::new(side.node))
        });
        Ok(HostPair { client: client.0, server: server.0, _nodes: vec![client.1, server.1] })
    }

    fn connect(&self, sides: &[NetworkSide; 2]) -> anyhow::Result<()> {
        let [client, server] = sides;
        client.on_node_to(&server.node, &format!("ip link add wire type veth peer name wire {TO}"))?;
        for side in sides {
            let (own, other) = (side.number, side.other());
            side.on_node(&[&format!("ip address add 192.168.0.{own}/24 dev wire"), "ip link set wire up"])?;
            self.shape(side)?;
            namespace::within(&side.node, || fs::write("/proc/sys/net/ipv4/ip_forward", "1"))?;
            let via_wire = format!("ip route add 10.0.{other}.0/24 via 192.168.0.{other}");
            match self.kind {
                NetworkKind::Bridge => {
                    side.bridged(MTU)?;
                    side.on_node(&[&format!("ip address add 10.0.{own}.1/24 dev br0"), &via_wire])?;
                    side.on_pod(&[
                        &format!("ip address add 10.0.{own}.2/24 dev eth0"),
                        &format!("ip route add default via 10.0.{own}.1"),
                    ])?;
                }
                NetworkKind::Routed => {
                    side.routed(MTU)?;
                    side.on_node(&[&via_wire])?;
                }
                NetworkKind::Ipvlan => {
                    side.add("ip link add link wire name eth0 type ipvlan mode l2", "CONFIG_IPVLAN")?;
                    side.on_node_to(&side.pod, &format!("ip link set eth0 {TO}"))?;
                    side.on_pod(&[
                        &format!("ip address add 10.0.{own}.2/16 dev eth0"),
                        "ip link set eth0 up",
                    ])?;
                }
                NetworkKind::Vxlan => {
                    let ends = format!("local 192.168.0.{own} remote 192.168.0.{other}");
                    let link = format!("ip link add vxlan0 type vxlan id 1 {ends} dstport 4789 dev wire");
                    side.add(&link, "CONFIG_VXLAN")?;
                    side.bridged(MTU - VXLAN_OVERHEAD)?;
                    side.on_node(&["ip link set vxlan0 master br0", "ip link set vxlan0 up"])?;
                    side.on_pod(&[&format!("ip address add 10.0.{own}.2/16 dev eth0")])?;
                }
                NetworkKind::Wireguard => {
                    side.add("ip link add wg0 type wireguard", "CONFIG_WIREGUARD")?;
                    side.routed(MTU - WIREGUARD_OVERHEAD)?;
                    side.on_node(&[
                        "ip link set wg0 up",
                        &format!("ip route add 10.0.{other}.0/24 dev wg0"),
                    ])?;
                }
            }
        }
        if self.kind == NetworkKind::Wireguard { encrypt(sides) } else { Ok(()) }
    }

    /// Gives the wire its delay, loss and bandwidth, in the direction from this side.
    fn shape(&self, side: &NetworkSide) -> anyhow::Result<()> {
        let Some((queue, option)) = self.queue() else { return Ok(()) };
        side.add(&format!("tc qdisc add dev wire root {queue}"), option)
    }

    /// Returns the arguments of the queue of the wire, and the kernel's option for it.
    fn queue(&self) -> Option<(String, &'static str)> {
        let Self { delay_ms, loss_percent, bandwidth_mbit, .. } = self;
        if *delay_ms > 0.0 || *loss_percent > 0.0 {
            let rate = bandwidth_mbit.map_or_else(String::new, |mbit| format!(" rate {mbit}mbit"));
            let queue = format!("netem limit 100000 delay {delay_ms}ms loss {loss_percent}%{rate}");
            return Some((queue, "CONFIG_NET_SCH_NETEM"));
        }
        let queue = bandwidth_mbit.map(|mbit| {
            // The bucket holds 100 µs, or a packet. A larger one would let requests pass without delay.
            let burst = (u64::from(mbit) * 25 / 2).max(2_048);
            format!("tbf rate {mbit}mbit burst {burst} latency 50ms")
        });
        queue.map(|queue| (queue, "CONFIG_NET_SCH_TBF"))
    }
}

/// Client or server: its pod and its node.
struct NetworkSide {
    /// 1 or 2; part of its addresses.
    number: u8,
    pod: OwnedFd,
    node: OwnedFd,
}

impl NetworkSide {
    fn other(&self) -> u8 {
        3 - self.number
    }

    fn on_node(&self, commands: &[&str]) -> anyhow::Result<()> {
        commands.iter().try_for_each(|command| within(&self.node, command, "").map(|_| ()))
    }

    /// Runs a command that moves a link to another namespace.
    fn on_node_to(&self, to: &OwnedFd, command: &str) -> anyhow::Result<()> {
        let to = to.try_clone().context("cannot hand over a namespace")?;
        execute(&self.node, command, Stdio::from(to), "").map(|_| ())
    }

    fn on_pod(&self, commands: &[&str]) -> anyhow::Result<()> {
        commands.iter().try_for_each(|command| within(&self.pod, command, "").map(|_| ()))
    }

    /// Adds a link or a queue to the node that the kernel may lack. `option` is its option in the kernel.
    fn add(&self, command: &str, option: &str) -> anyhow::Result<()> {
        let Err(error) = self.on_node(&[command]) else { return Ok(()) };
        let text = format!("{error:#}");
        if !LACKING.iter().any(|lacking| text.contains(lacking)) {
            return Err(error);
        }
        Err(NotAvailable(format!("the kernel lacks {option}, or its module is not loaded: {text}")).into())
    }

    /// Connects the pod to its node: `eth0` in the pod, `pod` on the node.
    fn attach(&self, mtu: u32) -> anyhow::Result<()> {
        let peer = format!("peer name eth0 mtu {mtu} {TO}");
        self.on_node_to(&self.pod, &format!("ip link add pod mtu {mtu} type veth {peer}"))?;
        self.on_node(&["ip link set pod up"])?;
        self.on_pod(&["ip link set eth0 up"])
    }

    /// Connects the pod to a bridge on its node.
    fn bridged(&self, mtu: u32) -> anyhow::Result<()> {
        self.add("ip link add name br0 type bridge", "CONFIG_BRIDGE")?;
        self.attach(mtu)?;
        self.on_node(&["ip link set pod master br0", "ip link set br0 up"])
    }

    /// Connects the pod to its node, which has a route to it.
    fn routed(&self, mtu: u32) -> anyhow::Result<()> {
        let own = self.number;
        self.attach(mtu)?;
        self.on_node(&[
            "ip address add 169.254.1.1/32 dev pod",
            &format!("ip route add 10.0.{own}.2 dev pod"),
        ])?;
        self.on_pod(&[
            &format!("ip address add 10.0.{own}.2/32 dev eth0"),
            "ip route add default via 169.254.1.1 dev eth0 onlink",
        ])
    }
}

/// Gives the WireGuard links of the nodes their keys.
fn encrypt(sides: &[NetworkSide; 2]) -> anyhow::Result<()> {
    if peers::in_path("wg").is_none() {
        let reason = "the program wg is not installed; install the package wireguard-tools";
        return Err(NotAvailable(reason.to_owned()).into());
    }
    let [client, server] = sides;
    let keys = [client, server].map(|side| within(&side.node, "wg genkey", ""));
    for (own, other) in [(0, 1), (1, 0)] {
        let key = |of: usize| keys[of].as_deref().map_err(|error| anyhow::anyhow!("{error:#}"));
        let public = within(&sides[own].node, "wg pubkey", key(other)?)?;
        let number = sides[other].number;
        let peer = format!("allowed-ips 10.0.{number}.0/24 endpoint 192.168.0.{number}:51820");
        let command =
            format!("wg set wg0 listen-port 51820 private-key /dev/stdin peer {} {peer}", public.trim());
        within(&sides[own].node, &command, key(own)?)?;
    }
    Ok(())
}

/// Lets the children of this thread administer networks. In a user namespace, a child of another user than root has no
/// capability otherwise.
fn keep_capability() -> io::Result<()> {
    let needed = CapabilitySet::NET_ADMIN;
    let mut own = capabilities(None)?;
    own.inheritable |= needed;
    set_capabilities(None, own)?;
    Ok(configure_capability_in_ambient_set(needed, true)?)
}

/// Runs a command in a namespace with this input, and returns its output.
///
/// # Errors
/// The command fails. The message has the command and its output for errors.
fn within(namespace: &OwnedFd, command: &str, input: &str) -> anyhow::Result<String> {
    execute(namespace, command, Stdio::piped(), input)
}

fn execute(namespace: &OwnedFd, command: &str, stdin: Stdio, input: &str) -> anyhow::Result<String> {
    let run = || -> io::Result<String> {
        keep_capability()?;
        let mut words = command.split(' ');
        let name = words.next().unwrap_or_default();
        let program = peers::in_path(name).ok_or(io::ErrorKind::NotFound)?;
        let mut child = Command::new(program)
            .args(words)
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A command that reads no input may have ended.
            let _ = stdin.write_all(input.as_bytes());
        }
        let output = child.wait_with_output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(io::Error::other(text(&output.stderr)))
        }
    };
    namespace::within(namespace, run).with_context(|| format!("`{command}`"))
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read as _,
        net::{Shutdown, TcpListener, TcpStream},
        thread,
    };

    use super::*;

    fn network(delay_ms: f64, loss_percent: f64, bandwidth_mbit: Option<u32>) -> NetworkInput {
        NetworkInput {
            name: "x".to_owned(),
            kind: NetworkKind::Routed,
            delay_ms,
            loss_percent,
            bandwidth_mbit,
        }
    }

    #[test]
    fn the_wire_has_a_queue_only_for_its_properties() {
        let queue = |network: NetworkInput| network.queue().map(|(queue, _)| queue);
        assert_eq!(queue(network(0.0, 0.0, None)), None);
        let narrow = queue(network(0.0, 0.0, Some(100)));
        assert_eq!(narrow.as_deref(), Some("tbf rate 100mbit burst 2048 latency 50ms"));
        let far = queue(network(0.5, 0.1, Some(10)));
        assert_eq!(far.as_deref(), Some("netem limit 100000 delay 0.5ms loss 0.1% rate 10mbit"));
    }

    /// Builds each kind, and sends bytes from pod to pod.
    #[test]
    fn pods_of_each_network_that_this_kernel_has_reach_each_other() {
        check().unwrap();
        for kind in [
            NetworkKind::Bridge,
            NetworkKind::Routed,
            NetworkKind::Ipvlan,
            NetworkKind::Vxlan,
            NetworkKind::Wireguard,
        ] {
            for (delay_ms, bandwidth_mbit) in [(0.0, None), (0.0, Some(100)), (1.0, Some(100))] {
                let network = NetworkInput { kind, ..network(delay_ms, 0.0, bandwidth_mbit) };
                let hosts = match network.build() {
                    Ok(hosts) => hosts,
                    Err(error) if error.is::<NotAvailable>() => {
                        let is_optional = matches!(kind, NetworkKind::Ipvlan | NetworkKind::Wireguard);
                        assert!(is_optional || delay_ms > 0.0, "{error:#}");
                        continue;
                    }
                    Err(error) => panic!("{kind:?}: {error:#}"),
                };
                reach(&hosts).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            }
        }
    }

    fn reach(hosts: &HostPair) -> io::Result<()> {
        let server = hosts.server.namespace.as_ref().unwrap();
        let listener = namespace::within(server, || TcpListener::bind((hosts.server.address, 0)))?;
        let address = listener.local_addr()?;
        let client = hosts.client.namespace.as_ref().unwrap();
        let mut stream = namespace::within(client, || TcpStream::connect(address))?;
        let (mut accepted, from) = listener.accept()?;
        assert_eq!(from.ip(), hosts.client.address, "no address is translated");
        let sent = vec![7; 300_000];
        thread::scope(|scope| {
            let writer =
                scope.spawn(|| stream.write_all(&sent).and_then(|()| stream.shutdown(Shutdown::Write)));
            let mut got = Vec::new();
            accepted.read_to_end(&mut got)?;
            assert!(got == sent);
            writer.join().unwrap()
        })
    }
}
