//! TLS connections with session resumption (RFC 8446, section 2.2), which saves both peers the signatures and
//! certificates.
//!
//! A resumed handshake verifies no certificate. So a session must end when its full handshake would no longer
//! succeed:
//! * A session belongs to one [`Acceptor`] or [`Connector`], that is, to one set of names and roots. No other
//!   has its keys.
//! * All sessions end with the first change of the own certificates, the roots or the revocation lists. They also end
//!   when a revocation list expires, and after one hour. A connection that began before such a change leaves no
//!   session, because its peer may have been verified with the old data. Names and pins belong to the acceptor or
//!   connector.
//! * A resumed connection is refused if the peer's certificate has expired.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Instant, SystemTime},
};

use arc_swap::{ArcSwap, ArcSwapOption};
use rustls::{
    ClientConfig, CommonState, HandshakeKind, NamedGroup, ServerConfig,
    client::{
        ClientSessionStore, Resumption, Tls12ClientSessionValue, Tls12Resumption, Tls13ClientSessionValue,
        UnbufferedClientConnection,
    },
    crypto::aws_lc_rs::Ticketer,
    pki_types::{CertificateDer, ServerName},
    server::{ProducesTickets, UnbufferedServerConnection},
};

use crate::{
    Error,
    check::Role,
    identity::{self, Identity, Live},
    roots::{Crls, Roots},
    tls::TlsSpec,
};

/// Maximum number of sessions that a connector keeps per server.
const MAX_PER_SERVER: usize = 2;

/// Accepts TLS connections with one [`TlsSpec`].
#[derive(Debug)]
pub struct Acceptor {
    config: ServerConfig,
    tickets: SessionStore<Arc<dyn ProducesTickets>>,
    newest: ArcSwapOption<AcceptorState>,
}

/// State shared by connections that begin with the same certificates and roots.
#[derive(Debug)]
struct AcceptorState {
    sessions: Arc<Generation<Arc<dyn ProducesTickets>>>,
    config: Arc<ServerConfig>,
    /// The configuration without ALPN.
    without_alpn: Arc<ServerConfig>,
}

impl Acceptor {
    /// Returns an acceptor with its own session keys.
    ///
    /// # Errors
    /// See [`TlsSpec::server`]; or the system provides no randomness for the ticket keys.
    pub fn new(spec: &TlsSpec) -> Result<Self, Error> {
        let mut config = (*spec.server()?).clone();
        if !spec.sessions.lifetime.is_zero() {
            // One ticket is enough for a client, and each costs encryption and a write.
            config.send_tls13_tickets = 1;
        }
        let tickets = SessionStore::new(Arc::new(spec.clone()), ticketer)?;
        Ok(Self { config, tickets, newest: ArcSwapOption::empty() })
    }

    /// Starts to accept a connection of a client that offers these protocols, as far as known.
    ///
    /// Without a common protocol, Envoy continues without ALPN, whereas rustls would fail the handshake. Istio
    /// relies on Envoy's behaviour: its clients offer `istio` for TCP, which none of its servers lists.
    ///
    /// # Errors
    /// The system provides no randomness for the ticket keys, or rustls refuses the settings.
    pub fn accept(&self, offered: &[Box<[u8]>]) -> Result<UnbufferedServerConnection, Error> {
        let newest = self.newest()?;
        let ours = &self.config.alpn_protocols;
        let common = offered.iter().any(|one| ours.iter().any(|own| **own == **one));
        let config = if offered.is_empty() || common { &newest.config } else { &newest.without_alpn };
        UnbufferedServerConnection::new(Arc::clone(config)).map_err(|error| Error::Tls(error.to_string()))
    }

    /// Returns whether the certificates of an accepted client are valid, and thus identify it. Those of other clients
    /// are ignored. Only an acceptor that [accepts them](crate::PeerCheck::accepts_untrusted) has such clients.
    pub fn identifies(&self, chain: &[CertificateDer<'_>]) -> bool {
        let check = self.tickets.spec.peer.as_ref().filter(|check| check.accepts_untrusted);
        check.is_none_or(|check| check.verify(chain, Role::Client, SystemTime::now()).is_ok())
    }

    /// Verifies the certificates of an accepted client with the current roots. An expired certificate is not an
    /// error.
    ///
    /// # Errors
    /// The current roots do not accept the client.
    pub fn recheck(&self, chain: &[CertificateDer<'_>]) -> Result<(), Error> {
        self.tickets.spec.peer.as_ref().map_or(Ok(()), |check| check.recheck(chain, None))
    }

    fn newest(&self) -> Result<Arc<AcceptorState>, Error> {
        let sessions = self.tickets.newest()?;
        if let Some(newest) = self.newest.load_full()
            && Arc::ptr_eq(&newest.sessions, &sessions)
        {
            return Ok(newest);
        }
        let mut config = self.config.clone();
        let spec = Arc::clone(&self.tickets.spec);
        config.ticketer = Arc::new(Tickets { sessions: Arc::clone(&sessions), spec });
        let mut without_alpn = config.clone();
        without_alpn.alpn_protocols.clear();
        let newest = Arc::new(AcceptorState {
            sessions,
            config: Arc::new(config),
            without_alpn: Arc::new(without_alpn),
        });
        self.newest.store(Some(Arc::clone(&newest)));
        Ok(newest)
    }
}

/// Opens TLS connections with one [`TlsSpec`].
#[derive(Debug)]
pub struct Connector {
    config: ClientConfig,
    sessions: SessionStore<Mutex<VecDeque<Session>>>,
}

impl Connector {
    /// Returns a connector without sessions.
    ///
    /// # Errors
    /// See [`TlsSpec::client`].
    pub fn new(spec: &TlsSpec) -> Result<Self, Error> {
        Ok(Self {
            config: (*spec.client()?).clone(),
            sessions: SessionStore::new(Arc::new(spec.clone()), no_sessions)?,
        })
    }

    /// Returns a connector with other ALPN protocols and its own sessions.
    ///
    /// # Errors
    /// None: creating the session store cannot fail.
    pub fn offering(&self, protocols: &[&[u8]]) -> Result<Self, Error> {
        let sessions = SessionStore::new(Arc::clone(&self.sessions.spec), no_sessions)?;
        Ok(Self { config: self.config(protocols), sessions })
    }

    /// Returns the configuration of [`Self::offering`] for connections that are opened without
    /// [`Self::connect`]. It resumes no sessions.
    pub fn config(&self, protocols: &[&[u8]]) -> ClientConfig {
        let mut config = self.config.clone();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        config
    }

    /// Verifies the certificates of the accepted server `name` with the current roots. An expired certificate
    /// is not an error.
    ///
    /// # Errors
    /// The current roots do not accept the server.
    pub fn recheck(&self, chain: &[CertificateDer<'_>], name: &ServerName<'_>) -> Result<(), Error> {
        self.sessions.spec.peer.as_ref().map_or(Ok(()), |check| check.recheck(chain, Some(name)))
    }

    /// Returns the ALPN protocols that it offers.
    pub fn alpn(&self) -> &[Vec<u8>] {
        &self.config.alpn_protocols
    }

    /// Starts a connection to the server `name` at an address. Sessions are stored by both, because several
    /// servers may share a name.
    ///
    /// # Errors
    /// rustls refuses the settings.
    pub fn connect(
        &self,
        name: ServerName<'static>,
        address: SocketAddr,
    ) -> Result<UnbufferedClientConnection, Error> {
        let mut config = self.config.clone();
        let (sessions, spec) = (self.sessions.newest()?, Arc::clone(&self.sessions.spec));
        config.resumption = Resumption::store(Arc::new(ConnectionSessions { sessions, spec, address }))
            .tls12_resumption(Tls12Resumption::Disabled);
        UnbufferedClientConnection::new(Arc::new(config), name).map_err(|error| Error::Tls(error.to_string()))
    }
}

/// Returns whether a connection was resumed; call it after the handshake.
///
/// # Errors
/// The connection was resumed, and a certificate of the peer has expired since the session began.
pub fn is_resumed(connection: &CommonState) -> Result<bool, Error> {
    if connection.handshake_kind() != Some(HandshakeKind::Resumed) {
        return Ok(false);
    }
    let now = SystemTime::now();
    for certificate in connection.peer_certificates().unwrap_or_default() {
        if identity::not_after(certificate)? < now {
            return Err(Error::Certificate(
                "the one that the resumed session began with has expired; a new session is needed".into(),
            ));
        }
    }
    Ok(true)
}

fn ticketer() -> Result<Arc<dyn ProducesTickets>, Error> {
    Ticketer::new().map_err(|error| Error::Tls(error.to_string()))
}

#[allow(clippy::unnecessary_wraps, reason = "it is made in the same way as a ticketer")]
fn no_sessions() -> Result<Mutex<VecDeque<Session>>, Error> {
    Ok(Mutex::default())
}

/// Session state (`T`), replaced as a whole when it must no longer be used.
#[derive(Debug)]
struct SessionStore<T> {
    spec: Arc<TlsSpec>,
    make: fn() -> Result<T, Error>,
    newest: ArcSwap<Generation<T>>,
}

/// Session state for one set of certificates, roots and revocation lists.
#[derive(Debug)]
struct Generation<T> {
    since: Instant,
    /// Time when a revocation list expires; afterwards no peer is accepted.
    until: Option<SystemTime>,
    roots: Option<Arc<Roots>>,
    crls: Option<Arc<Crls>>,
    identities: Vec<Option<Arc<Identity>>>,
    kept: T,
}

impl<T> SessionStore<T> {
    fn new(spec: Arc<TlsSpec>, make: fn() -> Result<T, Error>) -> Result<Self, Error> {
        let newest = ArcSwap::from_pointee(Generation::new(&spec, make)?);
        Ok(Self { spec, make, newest })
    }

    /// Returns the state for a connection that begins now.
    fn newest(&self) -> Result<Arc<Generation<T>>, Error> {
        let newest = self.newest.load_full();
        if newest.is_good(&self.spec) {
            return Ok(newest);
        }
        let newest = Arc::new(Generation::new(&self.spec, self.make)?);
        self.newest.store(Arc::clone(&newest));
        Ok(newest)
    }
}

impl<T> Generation<T> {
    fn new(spec: &TlsSpec, make: fn() -> Result<T, Error>) -> Result<Self, Error> {
        let (roots, crls) = (roots(spec), crls(spec));
        let ends = [
            roots.as_ref().and_then(|roots| roots.next_update()),
            crls.as_ref().and_then(|crls| crls.next_update()),
        ];
        // A list that has already expired ends no further sessions.
        let until = ends.into_iter().flatten().min().filter(|end| *end > SystemTime::now());
        let identities = spec.identities.iter().map(|live| live.get()).collect();
        Ok(Self { since: Instant::now(), until, roots, crls, identities, kept: make()? })
    }

    fn is_good(&self, spec: &TlsSpec) -> bool {
        let certificates = spec.identities.iter().zip(&self.identities);
        let lifetime = spec.sessions.lifetime;
        (lifetime.is_zero() || self.since.elapsed() < lifetime)
            && self.until.is_none_or(|until| SystemTime::now() < until)
            && same(self.roots.as_ref(), roots(spec).as_ref())
            && same(self.crls.as_ref(), crls(spec).as_ref())
            && certificates.into_iter().all(|(live, then)| same(then.as_ref(), Live::get(live).as_ref()))
    }
}

fn roots(spec: &TlsSpec) -> Option<Arc<Roots>> {
    spec.peer.as_ref().and_then(|check| check.roots.get())
}

fn crls(spec: &TlsSpec) -> Option<Arc<Crls>> {
    spec.peer.as_ref().and_then(|check| check.crls.as_ref()?.get())
}

fn same<T>(a: Option<&Arc<T>>, b: Option<&Arc<T>>) -> bool {
    a.map(Arc::as_ptr) == b.map(Arc::as_ptr)
}

/// Tickets of one connection, with the keys at its beginning. If trust changes during the handshake, a ticket
/// with new keys would attest a verification by the old roots.
#[derive(Debug)]
struct Tickets {
    sessions: Arc<Generation<Arc<dyn ProducesTickets>>>,
    spec: Arc<TlsSpec>,
}

impl ProducesTickets for Tickets {
    fn enabled(&self) -> bool {
        !self.spec.sessions.lifetime.is_zero()
    }

    fn lifetime(&self) -> u32 {
        u32::try_from(self.spec.sessions.lifetime.as_secs()).unwrap_or(u32::MAX)
    }

    fn encrypt(&self, plain: &[u8]) -> Option<Vec<u8>> {
        self.sessions.kept.encrypt(plain)
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        if self.sessions.is_good(&self.spec) { self.sessions.kept.decrypt(ticket) } else { None }
    }
}

/// A session that a connector may resume.
#[derive(Debug)]
struct Session {
    address: SocketAddr,
    name: ServerName<'static>,
    value: Tls13ClientSessionValue,
}

/// Session store of one connection. Like [`Tickets`], it uses the state at the connection's beginning.
#[derive(Debug)]
struct ConnectionSessions {
    sessions: Arc<Generation<Mutex<VecDeque<Session>>>>,
    spec: Arc<TlsSpec>,
    address: SocketAddr,
}

impl ConnectionSessions {
    fn edit<R>(&self, edit: impl FnOnce(&mut VecDeque<Session>) -> R) -> R {
        edit(&mut self.sessions.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn is_ours(&self, session: &Session, name: &ServerName<'_>) -> bool {
        session.address == self.address && session.name == *name
    }
}

impl ClientSessionStore for ConnectionSessions {
    fn insert_tls13_ticket(&self, name: ServerName<'static>, value: Tls13ClientSessionValue) {
        let max = self.spec.sessions.kept;
        if max == 0 {
            return;
        }
        self.edit(|kept| {
            let ours = |session: &Session| self.is_ours(session, &name);
            let oldest = kept.iter().position(ours);
            if kept.iter().filter(|session| ours(session)).count() >= MAX_PER_SERVER
                && let Some(oldest) = oldest
            {
                kept.remove(oldest);
            } else if kept.len() >= max {
                kept.pop_front();
            }
            kept.push_back(Session { address: self.address, name, value });
        });
    }

    fn take_tls13_ticket(&self, name: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        if !self.sessions.is_good(&self.spec) {
            return None;
        }
        self.edit(|kept| {
            let newest = kept.iter().rposition(|session| self.is_ours(session, name))?;
            kept.remove(newest).map(|session| session.value)
        })
    }

    // TLS 1.2 sessions are not resumed, and every server of a mesh accepts the first group.
    fn set_kx_hint(&self, _: ServerName<'static>, _: NamedGroup) {}

    fn kx_hint(&self, _: &ServerName<'_>) -> Option<NamedGroup> {
        None
    }

    fn set_tls12_session(&self, _: ServerName<'static>, _: Tls12ClientSessionValue) {}

    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        None
    }

    fn remove_tls12_session(&self, _: &ServerName<'static>) {}
}

#[cfg(test)]
mod tests;
