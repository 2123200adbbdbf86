//! DNS servers to query: those of `--dns-server`, else those of `/etc/resolv.conf`, which is read once at start.

use std::{
    fs,
    net::SocketAddr,
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
                    // Drops the zone of an address (`fe80::1%eth0`), which the standard library does not parse.
                    let address = words.next().and_then(|word| word.split('%').next()?.parse().ok());
                    servers.addresses.extend(address.map(|ip| SocketAddr::new(ip, PORT)));
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
        let text = "# comment\nsearch a.example\nnameserver 10.0.0.2\nnameserver fe80::1%eth0\noptions ndots:5 timeout:1 attempts:9\n";
        let servers = Servers::parse(text);
        let expected = [parse_server("10.0.0.2").unwrap(), parse_server("[fe80::1]:53").unwrap()];
        assert_eq!(servers.addresses, expected);
        assert_eq!((servers.timeout, servers.attempts), (Duration::from_secs(1), 5));
        assert_eq!(Servers::parse("").addresses, [parse_server("127.0.0.1").unwrap()]);
    }

    #[test]
    fn the_default_port_is_53() {
        assert_eq!(parse_server("127.0.0.1:5353").unwrap().port(), 5353);
        assert_eq!(parse_server("::1").unwrap().port(), 53);
        assert!(parse_server("dns.example").unwrap_err().contains("is not an address"));
    }
}
