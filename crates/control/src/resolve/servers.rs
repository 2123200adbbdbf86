//! DNS servers to query: those of `--dns-server`, else those of `/etc/resolv.conf`, which is read once at start.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tracing::warn;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The port of DNS.
const PORT: u16 = 53;

/// DNS servers and their timeouts.
#[derive(Clone, Debug)]
pub(crate) struct Servers {
    /// In configuration order.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Index of the server that answered last; shared by all queries.
    pub(super) preferred: Arc<AtomicUsize>,
    /// Timeout of one query to one server.
    pub(crate) timeout: Duration,
    /// Number of rounds over all servers.
    pub(crate) attempts: u32,
}

impl Servers {
    /// Uses the given servers; without any, those of the system.
    pub(crate) fn new(given: &[SocketAddr]) -> Self {
        if !given.is_empty() {
            return Self { addresses: given.to_vec(), ..Self::parse("") };
        }
        match fs::read_to_string(Path::new(RESOLV_CONF)) {
            Ok(text) => Self::parse(&text),
            Err(error) => {
                warn!(%error, "{RESOLV_CONF} cannot be read; using the DNS server on 127.0.0.1; set --dns-server to use others");
                Self::parse("")
            }
        }
    }

    /// Returns the servers with their indexes in the order of queries: the preferred one first, then the others in
    /// rotation.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = (usize, SocketAddr)> + use<> {
        let mut servers: Vec<_> = self.addresses.iter().copied().enumerate().collect();
        let preferred = self.preferred.load(Ordering::Relaxed).min(servers.len());
        servers.rotate_left(preferred);
        servers.into_iter()
    }

    /// Makes the server with this index the first to query.
    pub(crate) fn prefer(&self, index: usize) {
        self.preferred.store(index, Ordering::Relaxed);
    }

    /// Parses `nameserver` lines and the options `timeout` and `attempts` (resolv.conf(5)). Without a server, uses
    /// 127.0.0.1.
    fn parse(text: &str) -> Self {
        let mut servers = Self {
            addresses: Vec::new(),
            preferred: Arc::default(),
            timeout: Duration::from_secs(2),
            attempts: 2,
        };
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => {
                    servers.addresses.extend(words.next().and_then(parse_nameserver));
                }
                Some("options") => words.for_each(|word| servers.set_option(word)),
                _ => {}
            }
        }
        if servers.addresses.is_empty() {
            servers.addresses.push(SocketAddr::from(([127, 0, 0, 1], PORT)));
        }
        servers
    }

    fn set_option(&mut self, word: &str) {
        let Some((name, value)) = word.split_once(':') else { return };
        let Ok(value) = value.parse::<u32>() else { return };
        match name {
            "timeout" => self.timeout = Duration::from_secs(value.clamp(1, 30).into()),
            "attempts" => self.attempts = value.clamp(1, 5),
            _ => {}
        }
    }
}

/// Parses the address of a `nameserver` line. A link-local address needs a zone (`fe80::1%eth0`; RFC 4007, section 11).
/// If the zone is unknown, logs it and returns `None`.
fn parse_nameserver(word: &str) -> Option<SocketAddr> {
    let (address, zone) = word.split_once('%').map_or((word, None), |(address, zone)| (address, Some(zone)));
    let (ip, zone) = match (address.parse().ok()?, zone) {
        (IpAddr::V6(ip), Some(zone)) if ip.is_unicast_link_local() => (ip, zone),
        (ip, _) => return Some(SocketAddr::new(ip, PORT)),
    };
    match interface_index(zone) {
        Ok(index) => Some(SocketAddrV6::new(ip, PORT, 0, index).into()),
        Err(error) => {
            warn!(nameserver = word, %error, "{RESOLV_CONF}: the network interface is unknown; the server is not used");
            None
        }
    }
}

/// Returns the index of a network interface by its name or index.
fn interface_index(zone: &str) -> io::Result<u32> {
    if let Ok(index) = zone.parse() {
        return Ok(index);
    }
    if zone.contains('/') || matches!(zone, "" | "." | "..") {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // The seccomp filter forbids the system call of `if_nametoindex`.
    let text = fs::read_to_string(format!("/sys/class/net/{zone}/ifindex"))?;
    text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Parses the address of a server, with or without a port.
pub(crate) fn parse_server(text: &str) -> Result<SocketAddr, String> {
    let without_port = || text.parse().map(|ip| SocketAddr::new(ip, PORT));
    text.parse()
        .or_else(|_| without_port())
        .map_err(|_| format!("{text:?} is not an address such as 10.96.0.10 or 127.0.0.1:5353"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_is_parsed() {
        let text = "# comment\nsearch a.example\nnameserver 10.0.0.2\nnameserver fd00::1%none\noptions ndots:5 timeout:1 attempts:9\n";
        let servers = Servers::parse(text);
        let expected = [parse_server("10.0.0.2").unwrap(), parse_server("[fd00::1]:53").unwrap()];
        assert_eq!(servers.addresses, expected);
        assert_eq!((servers.timeout, servers.attempts), (Duration::from_secs(1), 5));
        assert_eq!(Servers::parse("").addresses, [parse_server("127.0.0.1").unwrap()]);
    }

    #[test]
    fn a_link_local_address_is_reached_through_its_interface() {
        let index: u32 = fs::read_to_string("/sys/class/net/lo/ifindex").unwrap().trim().parse().unwrap();
        for (word, expected) in [
            ("fe80::1%lo", Some(index)),
            ("fe80::1%7", Some(7)),
            ("fe80::1", Some(0)),
            ("fe80::1%none", None),
            ("fe80::1%", None),
            ("fe80::1%../net/lo", None),
        ] {
            let scope = parse_nameserver(word).map(|address| match address {
                SocketAddr::V6(address) => address.scope_id(),
                SocketAddr::V4(_) => panic!("{word}"),
            });
            assert_eq!(scope, expected, "{word}");
        }
    }

    #[test]
    fn the_default_port_is_53() {
        assert_eq!(parse_server("127.0.0.1:5353").unwrap().port(), 5353);
        assert_eq!(parse_server("::1").unwrap().port(), 53);
        assert!(parse_server("dns.example").unwrap_err().contains("is not an address"));
    }
}
