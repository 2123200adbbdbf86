//! Handshakes of an [`Acceptor`] with a [`Connector`] in memory, without a network.

use std::time::Duration;

use rustls::unbuffered::{ConnectionState, UnbufferedStatus};
use skysail_core::SpiffeId;

use super::*;
use crate::{Authority, KeyAndCsr, NameMatch, Peer, PeerCheck, check::testing::TestRoot, tls};

const HOUR: Duration = Duration::from_hours(1);

fn identity(authority: &Authority, account: &str, life: Duration) -> Identity {
    let id = SpiffeId::new("cluster.local", "default", account);
    let request = KeyAndCsr::generate(Some(&id)).unwrap();
    let signed = authority.sign(&request.csr_pem, &id, life).unwrap();
    request.finish(signed.pem().as_bytes()).unwrap()
}

fn spec(authority: &Authority, account: &str, accepts: &str) -> TlsSpec {
    let names = vec![NameMatch::uri(SpiffeId::new("cluster.local", "default", accepts).to_string())];
    TlsSpec {
        identities: vec![Live::new(identity(authority, account, HOUR))],
        peer: Some(PeerCheck::spiffe(Live::new(authority.roots().unwrap()), names)),
        ..TlsSpec::default()
    }
}

/// One server and one client of a mesh.
struct Pair {
    authority: Authority,
    server: TlsSpec,
    client: TlsSpec,
    acceptor: Acceptor,
    connector: Connector,
}

impl Pair {
    fn new() -> Self {
        let authority = Authority::ephemeral().unwrap();
        let (server, client) = (spec(&authority, "server", "client"), spec(&authority, "client", "server"));
        let (acceptor, connector) = (Acceptor::new(&server).unwrap(), Connector::new(&client).unwrap());
        Self { authority, server, client, acceptor, connector }
    }

    fn connect(&self) -> Result<bool, Error> {
        connect(&self.acceptor, &self.connector, 1)
    }
}

/// Performs a handshake with the server at this port; returns whether it resumed a session.
fn connect(acceptor: &Acceptor, connector: &Connector, port: u16) -> Result<bool, Error> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut client = connector.connect("reviews.test".try_into().unwrap(), address)?;
    let mut server = acceptor.accept(&[])?;
    finish(&mut server, &mut client)
}

/// Passes one peer's bytes to the other and returns the response.
macro_rules! exchange {
    ($side:expr, $received:expr) => {{
        let (mut sent, received): (Vec<u8>, &mut [u8]) = (Vec::new(), $received);
        let mut start = 0;
        loop {
            let UnbufferedStatus { discard, state } = $side.process_tls_records(&mut received[start..]);
            start += discard;
            match state.map_err(|error| Error::Tls(error.to_string()))? {
                ConnectionState::EncodeTlsData(mut message) => {
                    let mut bytes = [0; 4096];
                    let count = message.encode(&mut bytes).unwrap();
                    sent.extend_from_slice(&bytes[..count]);
                }
                ConnectionState::TransmitTlsData(transmit) => transmit.done(),
                ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_) => break,
                state => panic!("{state:?}"),
            }
        }
        assert_eq!(start, received.len());
        sent
    }};
}

fn finish(
    server: &mut UnbufferedServerConnection,
    client: &mut UnbufferedClientConnection,
) -> Result<bool, Error> {
    let mut sent = exchange!(client, &mut []);
    while !sent.is_empty() {
        let mut answer = exchange!(server, &mut sent);
        sent = exchange!(client, &mut answer);
    }
    assert!(!server.is_handshaking() && !client.is_handshaking());
    for (connection, account) in [(&***server as &CommonState, "client"), (&***client, "server")] {
        let peer = Peer::from_der(&connection.peer_certificates().unwrap()[0]).unwrap();
        assert_eq!(peer.spiffe, Some(SpiffeId::new("cluster.local", "default", account)));
    }
    let (here, there) = (is_resumed(server)?, is_resumed(client)?);
    assert_eq!(here, there);
    Ok(here)
}

#[test]
fn a_returning_client_resumes_its_session() {
    let pair = Pair::new();
    assert!(!pair.connect().unwrap());
    for _ in 0..3 {
        assert!(pair.connect().unwrap());
    }
    // Another server has the same name; the client offers it no session that it could not resume.
    assert!(!connect(&pair.acceptor, &pair.connector, 2).unwrap());
    assert!(connect(&pair.acceptor, &pair.connector, 2).unwrap());
    // Other ALPN protocols have sessions of their own.
    assert!(!connect(&pair.acceptor, &pair.connector.offering(&[b"h2"]).unwrap(), 1).unwrap());
}

#[test]
fn a_session_belongs_to_one_configuration() {
    let pair = Pair::new();
    assert!(!pair.connect().unwrap());
    // Like another filter chain with equal requirements.
    let other = Acceptor::new(&pair.server).unwrap();
    assert!(!connect(&other, &pair.connector, 1).unwrap());
    // The ticket of the other acceptor was the newer one. The first one's was used up by the attempt.
    assert!(!pair.connect().unwrap());
    let mut strict = pair.server.clone();
    strict.peer.as_mut().unwrap().names = vec![NameMatch::uri("spiffe://cluster.local/ns/default/sa/other")];
    let strict = Acceptor::new(&strict).unwrap();
    assert!(connect(&strict, &pair.connector, 1).is_err());
}

#[test]
fn new_roots_end_all_sessions() {
    let pair = Pair::new();
    assert!(!pair.connect().unwrap());
    let stranger = Authority::ephemeral().unwrap();
    let server_roots = &pair.server.peer.as_ref().unwrap().roots;
    server_roots.set(Arc::new(stranger.roots().unwrap()));
    let error = pair.connect().unwrap_err();
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
    server_roots.set(Arc::new(pair.authority.roots().unwrap()));
    assert!(!pair.connect().unwrap());
    assert!(pair.connect().unwrap());

    let client_roots = &pair.client.peer.as_ref().unwrap().roots;
    client_roots.set(Arc::new(stranger.roots().unwrap()));
    let error = pair.connect().unwrap_err();
    assert!(error.to_string().contains("UnknownIssuer"), "{error}");
}

/// Returns an empty revocation list of the mesh's authority, valid for `life`.
fn crl(root: &TestRoot, life: Duration) -> Arc<Crls> {
    Arc::new(Crls::from_pem(root.crl(&[], life).as_bytes()).unwrap())
}

#[test]
fn revocation_lists_end_sessions() {
    let root = TestRoot::new();
    let authority = root.authority();
    let (mut watched, lists) = (spec(&authority, "server", "client"), Live::new(Crls::default()));
    watched.peer.as_mut().unwrap().crls = Some(Arc::clone(&lists));
    let acceptor = Acceptor::new(&watched).unwrap();
    let connector = Connector::new(&spec(&authority, "client", "server")).unwrap();
    let connect = || connect(&acceptor, &connector, 1);
    assert!(!connect().unwrap());
    assert!(connect().unwrap());
    lists.set(crl(&root, HOUR));
    assert!(!connect().unwrap());
    assert!(connect().unwrap());
    // With an expired list no peer is accepted, so no session is resumed either.
    lists.set(crl(&root, Duration::from_secs(3)));
    assert!(!connect().unwrap());
    let until = acceptor.tickets.newest().unwrap().until.unwrap();
    assert!(until <= SystemTime::now() + Duration::from_secs(3));
    while SystemTime::now() < until {
        std::thread::yield_now();
    }
    let error = connect().unwrap_err();
    assert!(error.to_string().contains("revocation list expired"), "{error}");
}

#[test]
fn resumption_can_be_disabled_on_either_side() {
    let pair = Pair::new();
    let none = tls::SessionResumption { lifetime: Duration::ZERO, kept: 0 };
    let acceptor = Acceptor::new(&TlsSpec { sessions: none, ..pair.server.clone() }).unwrap();
    let connector = Connector::new(&TlsSpec { sessions: none, ..pair.client.clone() }).unwrap();
    for (acceptor, connector) in [(&acceptor, &pair.connector), (&pair.acceptor, &connector)] {
        for _ in 0..3 {
            assert!(!connect(acceptor, connector, 1).unwrap());
        }
    }
}

#[test]
fn a_new_certificate_ends_all_sessions() {
    let pair = Pair::new();
    for spec in [&pair.server, &pair.client] {
        assert!(!pair.connect().unwrap());
        assert!(pair.connect().unwrap());
        let account = if std::ptr::eq(spec, &raw const pair.server) { "server" } else { "client" };
        spec.identities[0].set(Arc::new(identity(&pair.authority, account, HOUR)));
    }
    assert!(!pair.connect().unwrap());
    assert!(pair.connect().unwrap());
}

/// Otherwise a ticket with new keys would attest a verification by the old roots.
#[test]
fn a_handshake_during_a_change_leaves_no_session() {
    let pair = Pair::new();
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let name = || ServerName::try_from("reviews.test").unwrap();
    let mut client = pair.connector.connect(name(), address).unwrap();
    let mut server = pair.acceptor.accept(&[]).unwrap();
    for spec in [&pair.server, &pair.client] {
        let roots = pair.authority.roots().unwrap();
        spec.peer.as_ref().unwrap().roots.set(Arc::new(roots));
    }
    assert!(!finish(&mut server, &mut client).unwrap());
    assert!(!pair.connect().unwrap(), "there is a session from before the change");
    assert!(pair.connect().unwrap());

    // A client with an old session, on a connection from before the change.
    let mut server = pair.acceptor.accept(&[]).unwrap();
    let mut client = pair.connector.connect(name(), address).unwrap();
    pair.server.peer.as_ref().unwrap().roots.set(Arc::new(pair.authority.roots().unwrap()));
    assert!(!finish(&mut server, &mut client).unwrap());
}

/// The handshake itself sees a fixed time, so only `is_resumed` can detect the expiry.
#[test]
fn a_peer_whose_certificate_has_expired_is_refused() {
    #[derive(Debug)]
    struct Then(u64);
    impl rustls::time_provider::TimeProvider for Then {
        fn current_time(&self) -> Option<rustls::pki_types::UnixTime> {
            Some(rustls::pki_types::UnixTime::since_unix_epoch(Duration::from_secs(self.0)))
        }
    }
    let mut pair = Pair::new();
    let brief = identity(&pair.authority, "client", Duration::from_secs(1));
    let then = brief.not_after.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() - 1;
    pair.client.identities[0].set(Arc::new(brief));
    pair.acceptor.config.time_provider = Arc::new(Then(then));
    pair.connector.config.time_provider = Arc::new(Then(then));
    while SystemTime::now() <= std::time::UNIX_EPOCH + Duration::from_secs(then + 1) {
        std::thread::yield_now();
    }
    assert!(!pair.connect().unwrap());
    let error = pair.connect().unwrap_err();
    assert!(error.to_string().contains("has expired"), "{error}");
}

#[test]
fn the_end_of_validity_is_read_without_the_rest() {
    let authority = Authority::ephemeral().unwrap();
    let identity = identity(&authority, "client", HOUR);
    assert_eq!(crate::identity::not_after(&identity.chain()[0]).unwrap(), identity.not_after);
    let root = &authority.roots().unwrap().certificates()[0].clone();
    assert_eq!(crate::identity::not_after(root).unwrap(), crate::identity::describe(root).unwrap().2);
    for cut in 0..40 {
        assert!(crate::identity::not_after(&root[..cut].into()).is_err());
    }
}

#[test]
fn the_number_of_sessions_is_bounded() {
    let pair = Pair::new();
    let count = || pair.connector.sessions.newest().unwrap().kept.lock().unwrap().len();
    for port in 1..=70 {
        connect(&pair.acceptor, &pair.connector, port).unwrap();
    }
    assert_eq!(count(), pair.client.sessions.kept);
    // Sessions of one server evict only sessions of that server.
    for _ in 0..3 {
        let address = SocketAddr::from(([127, 0, 0, 1], 70));
        let mut first = pair.connector.connect("reviews.test".try_into().unwrap(), address).unwrap();
        connect(&pair.acceptor, &pair.connector, 70).unwrap();
        let mut server = pair.acceptor.accept(&[]).unwrap();
        finish(&mut server, &mut first).unwrap();
    }
    assert_eq!(count(), pair.client.sessions.kept);
}
