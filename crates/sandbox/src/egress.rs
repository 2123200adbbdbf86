//! Egress (`skysail up --egress`): connections to hosts outside the mesh, and lookups of their names.
//!
//! The mesh's namespaces have no route to the outside. The [`forwarder`] is a process in the host's network namespace
//! that makes connections for pods. Packet rules in the mesh redirect connections to addresses outside the mesh to a
//! listener. The forwarder holds this listener: it reads the original destination, connects to it and copies both ways.
//! So no socket of the host's network namespace enters the mesh, and the forwarder decides which addresses are closed.
//!
//! The mesh and the forwarder share a Unix socket. The first message on it is the listener. Lines follow: names to look
//! up from the mesh, and [`ForwarderMessage`] as JSON from the forwarder. The forwarder ends when the socket closes.

pub(crate) mod forwarder;

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, Ipv4Addr, TcpListener},
    os::{fd::AsFd as _, unix::net::UnixStream as Channel},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use skysail_intercept::rules::{Network, Rule};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    sync::{Semaphore, mpsc, watch},
    time::timeout,
};

use crate::{
    descriptor,
    error::{Context as _, Error},
    networks::{BRIDGE, POD_NETWORK, SERVICE_NETWORK},
    rules,
};

/// Networks that stay closed, and the reason. Those of the mesh come first: an address there is a pod, a Service or
/// unused.
const CLOSED: [(Network, &str); 10] = [
    (network(POD_NETWORK.0.octets(), POD_NETWORK.1), "an address of the mesh's own pods"),
    (network([SERVICE_NETWORK[0], SERVICE_NETWORK[1], 0, 0], 16), "an address of the mesh's own Services"),
    (network([0, 0, 0, 0], 8), "an address of this machine itself"),
    (network([127, 0, 0, 0], 8), "an address of this machine itself"),
    (network([169, 254, 0, 0], 16), "a link-local address, where clouds serve credentials"),
    // Metadata services of Alibaba Cloud, Oracle Cloud and Azure.
    (network([100, 100, 100, 200], 32), "a cloud's metadata service"),
    (network([192, 0, 0, 192], 32), "a cloud's metadata service"),
    (network([168, 63, 129, 16], 32), "a cloud's metadata service"),
    (network([224, 0, 0, 0], 4), "a multicast address"),
    // Includes the addresses allocated to hosts of ServiceEntries, and the broadcast address.
    (network([240, 0, 0, 0], 4), "a reserved address"),
];
/// Time for which an answer is cached, and timeout of a lookup.
const CACHE_TIME: Duration = Duration::from_secs(5);
/// Maximum number of cached names.
const MAX_NAMES: usize = 1024;
/// Maximum number of lookups that wait for an answer.
const MAX_WAITING: usize = 1024;

const fn network([a, b, c, d]: [u8; 4], prefix: u8) -> Network {
    Network { address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix }
}

/// Returns why workloads may not connect to an address; `None` if they may.
fn closed(address: Ipv4Addr) -> Option<&'static str> {
    CLOSED.iter().find(|(network, _)| network.contains(address.into())).map(|(_, reason)| *reason)
}

/// Message from the forwarder to the mesh.
#[derive(Debug, Serialize, Deserialize)]
enum ForwarderMessage {
    /// Result of a lookup.
    Result(String, LookupResult),
    /// A connection of this pod failed, for this reason. `None` stands for all connections.
    Failed(Option<IpAddr>, String),
}

/// Result of a lookup by the host's resolver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LookupResult {
    /// The name has these addresses.
    Addresses(Vec<Ipv4Addr>),
    /// The name exists and has no address that can be reached, for this reason.
    Unusable(String),
    /// The name does not exist.
    Missing,
    /// The lookup failed, for this reason.
    Failed(String),
}

/// A failed connection.
#[derive(Debug)]
pub(crate) struct FailedConnection {
    /// Address of the pod; `None` if all pods are concerned.
    pub(crate) from: Option<IpAddr>,
    pub(crate) reason: String,
}

/// Lookups by the forwarder. Answers are cached, so that the queries for a name's IPv4 and IPv6 addresses make one
/// lookup.
#[derive(Debug)]
pub(crate) struct Lookups {
    ask: mpsc::Sender<String>,
    cache: Mutex<HashMap<String, CachedLookup>>,
    waiting: Semaphore,
}

#[derive(Debug)]
struct CachedLookup {
    since: Instant,
    found: watch::Sender<Option<LookupResult>>,
}

/// Redirection of connections to the forwarder, and lookups by it.
pub(crate) struct Egress {
    pub(crate) lookups: Arc<Lookups>,
    /// Port of the listener.
    port: u16,
}

/// Creates the listener and sends it to the forwarder at the other end of `channel`. Failed connections are sent to
/// `failures` while it has room.
///
/// # Errors
/// When the forwarder has ended.
pub(crate) fn open(channel: Channel, failures: mpsc::Sender<FailedConnection>) -> Result<Egress, Error> {
    let what = "redirecting connections out of the mesh (--egress)";
    let listener = TcpListener::bind((BRIDGE, 0)).context(what)?;
    listener.set_nonblocking(true).context(what)?;
    let port = listener.local_addr().context(what)?.port();
    let (ask, mut requests) = mpsc::channel::<String>(MAX_NAMES);
    let lookups = Arc::new(Lookups::new(ask));
    let egress = Egress { lookups: Arc::clone(&lookups), port };
    descriptor::send(&channel, listener.as_fd()).context(what)?;
    channel.set_nonblocking(true).context(what)?;
    let (read, mut write) = UnixStream::from_std(channel).context(what)?.into_split();
    tokio::spawn(async move {
        while let Some(name) = requests.recv().await {
            if write.write_all(format!("{name}\n").as_bytes()).await.is_err() {
                // Later lookups find the channel closed.
                return;
            }
        }
    });
    tokio::spawn(async move {
        handle(read, &lookups, &failures).await;
        let reason = "the forwarder of --egress has ended; no connection leaves the mesh".to_owned();
        let _ = failures.send(FailedConnection { from: None, reason }).await;
    });
    Ok(egress)
}

impl Egress {
    /// Returns the rules that redirect connections, except those to networks of the mesh and to the addresses of Services,
    /// which may be in any network. Without a ready pod, nothing else keeps a connection to such an address inside the mesh.
    pub(crate) fn rules<'a>(&self, services: impl Iterator<Item = &'a Ipv4Addr>) -> Vec<Rule> {
        let services: BTreeSet<Ipv4Addr> =
            services.copied().filter(|address| closed(*address).is_none()).collect();
        let services = services.into_iter().map(|address| Network::host(address.into()));
        let closed = CLOSED.iter().map(|(network, _)| *network).chain(services);
        let pods = Network { address: POD_NETWORK.0.into(), prefix: POD_NETWORK.1 };
        rules::egress(closed, pods, self.port)
    }
}

/// Handles the messages of the forwarder until its end.
async fn handle(from: impl AsyncRead + Unpin, lookups: &Lookups, failures: &mpsc::Sender<FailedConnection>) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(ForwarderMessage::Result(name, found)) => lookups.handle(&name, found),
            Ok(ForwarderMessage::Failed(from, reason)) => {
                _ = failures.try_send(FailedConnection { from, reason });
            }
            Err(error) => tracing::warn!(%error, "invalid message from the forwarder of --egress"),
        }
    }
}

impl Lookups {
    fn new(ask: mpsc::Sender<String>) -> Self {
        Self { ask, cache: Mutex::default(), waiting: Semaphore::new(MAX_WAITING) }
    }

    /// Looks up a name that has passed [`is_host`].
    pub(crate) async fn find(&self, name: &str) -> LookupResult {
        let Ok(_place) = self.waiting.try_acquire() else {
            return LookupResult::Failed(format!("{MAX_WAITING} lookups wait for an answer"));
        };
        let mut answer = match self.ask(name) {
            Ok(answer) => answer,
            Err(found) => return found,
        };
        let found = timeout(CACHE_TIME, answer.wait_for(Option::is_some)).await;
        let found = found.ok().and_then(|found| found.ok()?.clone());
        found.unwrap_or_else(|| LookupResult::Failed(format!("no answer within {CACHE_TIME:?}")))
    }

    /// Returns the receiver of the answer, and starts a lookup unless the name is cached.
    fn ask(&self, name: &str) -> Result<watch::Receiver<Option<LookupResult>>, LookupResult> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = cache.get(name).filter(|known| known.since.elapsed() < CACHE_TIME) {
            return Ok(known.found.subscribe());
        }
        cache.retain(|_, known| known.since.elapsed() < CACHE_TIME);
        if cache.len() >= MAX_NAMES {
            return Err(LookupResult::Failed(format!(
                "{MAX_NAMES} names were looked up within {CACHE_TIME:?}"
            )));
        }
        let sent = self.ask.try_send(name.to_owned());
        sent.map_err(|_| LookupResult::Failed("the forwarder of --egress does not answer".to_owned()))?;
        let (found, answer) = watch::channel(None);
        cache.insert(name.to_owned(), CachedLookup { since: Instant::now(), found });
        Ok(answer)
    }

    fn handle(&self, name: &str, found: LookupResult) {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = cache.get(name) {
            known.found.send_replace(Some(found));
        }
    }
}

/// Returns whether a name may be looked up outside: a host name of several labels that is no address. The host's
/// resolver would take `10.1` for an address, and names of one label are Services.
pub(crate) fn is_host(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let last = name.rsplit_once('.').map(|(_, last)| last);
    name.bytes().all(fits)
        && last.is_some_and(|last| last.starts_with(|first: char| first.is_ascii_alphabetic()))
}

/// The forwarder's end of [`Lookups`] in tests.
#[cfg(test)]
pub(crate) struct Answers(Arc<Lookups>, mpsc::Receiver<String>);

#[cfg(test)]
pub(crate) fn lookups() -> (Arc<Lookups>, Answers) {
    let (ask, requests) = mpsc::channel(MAX_NAMES);
    let lookups = Arc::new(Lookups::new(ask));
    (Arc::clone(&lookups), Answers(lookups, requests))
}

#[cfg(test)]
impl Answers {
    /// Answers lookups while `test` runs.
    pub(crate) async fn answer_during(
        mut self,
        found: impl Fn(&str) -> LookupResult,
        test: impl Future<Output = ()>,
    ) {
        let answering = async {
            while let Some(name) = self.1.recv().await {
                self.0.handle(&name, found(&name));
            }
        };
        tokio::select! { () = test => {}, () = answering => {} }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_of_the_mesh_and_of_the_machine_are_closed() {
        for address in [
            [0, 0, 0, 0],
            [10, 96, 0, 1],
            [10, 244, 0, 1],
            [100, 100, 100, 200],
            [127, 0, 0, 1],
            [169, 254, 169, 254],
            [224, 0, 0, 1],
            [240, 240, 0, 1],
            [255, 255, 255, 255],
        ] {
            assert!(closed(address.into()).is_some(), "{address:?}");
        }
        for address in
            [[10, 0, 0, 1], [10, 97, 0, 1], [192, 168, 1, 1], [198, 51, 100, 2], [100, 100, 100, 201]]
        {
            assert_eq!(closed(address.into()), None, "{address:?}");
        }
    }

    #[test]
    fn a_host_has_several_labels_and_is_no_address() {
        for name in ["example.com", "a-b.example.com", "_x.example.com", "xn--bcher-kva.example"] {
            assert!(is_host(name), "{name}");
        }
        for name in
            ["", "db", "localhost", "10.0.0.1", "10.1", "0x7f.1", "a.0x1", "a\\032b.com", "a\n.com", "a."]
        {
            assert!(!is_host(name), "{name}");
        }
    }

    #[tokio::test]
    async fn a_name_is_looked_up_once_for_all_waiting_queries() {
        let (ask, mut requests) = mpsc::channel(2);
        let lookups = Lookups::new(ask);
        let found = LookupResult::Addresses(vec![Ipv4Addr::new(198, 51, 100, 2)]);
        let answering = async {
            let name = requests.recv().await.unwrap();
            lookups.handle("other.example", LookupResult::Missing);
            lookups.handle(&name, found.clone());
        };
        let (one, other, ()) = tokio::join!(lookups.find("a.example"), lookups.find("a.example"), answering);
        assert_eq!((&one, &other), (&found, &found));
        assert_eq!(lookups.find("a.example").await, found);
        assert!(requests.try_recv().is_err());
        // Without a forwarder, a lookup fails at once.
        drop(requests);
        assert!(matches!(lookups.find("b.example").await, LookupResult::Failed(_)));
    }

    #[tokio::test]
    async fn the_number_of_cached_names_is_bounded() {
        let (ask, mut requests) = mpsc::channel(MAX_NAMES + 1);
        let lookups = Lookups::new(ask);
        (0..MAX_NAMES).for_each(|number| drop(lookups.ask(&format!("{number}.example")).unwrap()));
        let refused = lookups.ask("another.example").unwrap_err();
        assert_eq!(refused, LookupResult::Failed("1024 names were looked up within 5s".to_owned()));
        assert_eq!(requests.recv().await.as_deref(), Some("0.example"));
        // A cached name still has its answer.
        lookups.handle("0.example", LookupResult::Missing);
        assert_eq!(lookups.find("0.example").await, LookupResult::Missing);
    }
}
