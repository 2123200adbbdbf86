//! Which DNS servers to ask: those of `--dns-server`, else the system's (`/etc/resolv.conf`, read at start).

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

/// The servers, and how long to wait for them.
#[derive(Clone, Debug)]
pub(crate) struct Servers {
    /// In the order they are named.
    pub(crate) addresses: Vec<SocketAddr>,
    /// The one that answered last, for all who ask.
    pub(super) good: Arc<AtomicUsize>,
    /// For each answer.
    pub(crate) timeout: Duration,
    /// How often to ask all of them.
    pub(crate) attempts: u32,
}

impl Servers {
    /// These, else the system's.
    pub(crate) fn new(given: &[SocketAddr]) -> Self {
        if !given.is_empty() {
            return Self { addresses: given.to_vec(), ..Self::read("") };
        }
        match fs::read_to_string(Path::new(RESOLV_CONF)) {
            Ok(text) => Self::read(&text),
            Err(error) => {
                warn!(%error, "{RESOLV_CONF} cannot be read: the DNS server of this host is asked; name others with --dns-server");
                Self::read("")
            }
        }
    }

    /// The servers in the order to ask them, each with its place: from the one that answered last around.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = (usize, SocketAddr)> + use<> {
        let mut servers: Vec<_> = self.addresses.iter().copied().enumerate().collect();
        let good = self.good.load(Ordering::Relaxed).min(servers.len());
        servers.rotate_left(good);
        servers.into_iter()
    }

    /// The server in this place has answered.
    pub(crate) fn answered(&self, place: usize) {
        self.good.store(place, Ordering::Relaxed);
    }

    /// Reads `nameserver`, and `timeout` and `attempts` of `options`; without a server it is this host's (resolv.conf(5)).
    fn read(text: &str) -> Self {
        let mut servers = Self {
            addresses: Vec::new(),
            good: Arc::default(),
            timeout: Duration::from_secs(2),
            attempts: 2,
        };
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => {
                    // An address may name its interface, which the standard library does not read.
                    let address = words.next().and_then(|word| word.split('%').next()?.parse().ok());
                    servers.addresses.extend(address.map(|ip| SocketAddr::new(ip, PORT)));
                }
                Some("options") => words.for_each(|word| servers.option(word)),
                _ => {}
            }
        }
        if servers.addresses.is_empty() {
            servers.addresses.push(SocketAddr::from(([127, 0, 0, 1], PORT)));
        }
        servers
    }

    fn option(&mut self, word: &str) {
        let Some((name, value)) = word.split_once(':') else { return };
        let Ok(value) = value.parse::<u32>() else { return };
        match name {
            "timeout" => self.timeout = Duration::from_secs(value.clamp(1, 30).into()),
            "attempts" => self.attempts = value.clamp(1, 5),
            _ => {}
        }
    }
}

/// Reads a server's address with or without port.
pub(crate) fn server(text: &str) -> Result<SocketAddr, String> {
    let bare = || text.parse().map(|ip| SocketAddr::new(ip, PORT));
    text.parse()
        .or_else(|_| bare())
        .map_err(|_| format!("{text:?} is not an address such as 10.96.0.10 or 127.0.0.1:5353"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_settings_are_read() {
        let text = "# comment\nsearch a.example\nnameserver 10.0.0.2\nnameserver fe80::1%eth0\noptions ndots:5 timeout:1 attempts:9\n";
        let servers = Servers::read(text);
        assert_eq!(servers.addresses, [server("10.0.0.2").unwrap(), server("[fe80::1]:53").unwrap()]);
        assert_eq!((servers.timeout, servers.attempts), (Duration::from_secs(1), 5));
        assert_eq!(Servers::read("").addresses, [server("127.0.0.1").unwrap()]);
    }

    #[test]
    fn servers_have_a_port_or_the_usual_one() {
        assert_eq!(server("127.0.0.1:5353").unwrap().port(), 5353);
        assert_eq!(server("::1").unwrap().port(), 53);
        assert!(server("dns.example").unwrap_err().contains("is not an address"));
    }
}
