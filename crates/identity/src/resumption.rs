//! Making and taking TLS connections that go on from an earlier one (RFC 8446, section 2.2), which saves both sides the
//! signatures and certificates.
//!
//! A resumed handshake checks no certificate, so a session must end when the full handshake it came from could not be
//! had again:
//! * It belongs to one [`Acceptor`] or [`Connector`], that is, to one set of names and roots: no other has its keys.
//! * All sessions end with the first change of our certificates, of the roots or of the revocation lists, when a revocation list
//!   expires, and after an hour. A connection that began before that leaves no session behind, because it may have been
//!   checked by what was trusted before. Names and pins belong to the acceptor or connector.
//! * A connection resumed after the peer's certificate has run out is refused.

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
    identity::{self, Identity, Live},
    roots::{Crls, Roots},
    tls::TlsSpec,
};

/// SessionStore that a connector keeps for one server.
const KEPT_OF_ONE: usize = 2;

/// Takes TLS connections by one [`TlsSpec`].
#[derive(Debug)]
pub struct Acceptor {
    config: ServerConfig,
    tickets: SessionStore<Arc<dyn ProducesTickets>>,
    newest: ArcSwapOption<Accepting>,
}

/// What connections share that begin under the same certificates and roots.
#[derive(Debug)]
struct Accepting {
    sessions: Arc<Generation<Arc<dyn ProducesTickets>>>,
    config: Arc<ServerConfig>,
    /// The same without ALPN.
    without: Arc<ServerConfig>,
}

impl Acceptor {
    /// An acceptor whose sessions nobody else knows.
    ///
    /// # Errors
    /// See [`TlsSpec::server`]; or without randomness for the keys of tickets.
    pub fn new(spec: &TlsSpec) -> Result<Self, Error> {
        let mut config = (*spec.server()?).clone();
        if !spec.sessions.lifetime.is_zero() {
            // One is enough for a client that comes back, and each costs encryption and a write.
            config.send_tls13_tickets = 1;
        }
        let tickets = SessionStore::new(Arc::new(spec.clone()), ticketer)?;
        Ok(Self { config, tickets, newest: ArcSwapOption::empty() })
    }

    /// Begins to take a connection of a client that offers these protocols, as far as is known.
    ///
    /// Where client and configuration have no protocol in common, Envoy goes on without one, while rustls would end
    /// the handshake. Istio relies on it: its clients offer `istio` for bytes, which none of its servers lists.
    ///
    /// # Errors
    /// Without randomness for the keys of tickets, or with settings that rustls refuses.
    pub fn accept(&self, offered: &[Box<[u8]>]) -> Result<UnbufferedServerConnection, Error> {
        let newest = self.newest()?;
        let ours = &self.config.alpn_protocols;
        let common = offered.iter().any(|one| ours.iter().any(|own| **own == **one));
        let config = if offered.is_empty() || common { &newest.config } else { &newest.without };
        UnbufferedServerConnection::new(Arc::clone(config)).map_err(|error| Error::Tls(error.to_string()))
    }

    /// Checks the certificates of a client that was accepted before by the roots of now. That its certificate has
    /// run out since is no error.
    ///
    /// # Errors
    /// The roots do not accept it.
    pub fn recheck(&self, chain: &[CertificateDer<'_>]) -> Result<(), Error> {
        self.tickets.spec.peer.as_ref().map_or(Ok(()), |check| check.recheck(chain, None))
    }

    fn newest(&self) -> Result<Arc<Accepting>, Error> {
        let sessions = self.tickets.newest()?;
        if let Some(newest) = self.newest.load_full()
            && Arc::ptr_eq(&newest.sessions, &sessions)
        {
            return Ok(newest);
        }
        let mut config = self.config.clone();
        let spec = Arc::clone(&self.tickets.spec);
        config.ticketer = Arc::new(Tickets { sessions: Arc::clone(&sessions), spec });
        let mut without = config.clone();
        without.alpn_protocols.clear();
        let newest = Arc::new(Accepting { sessions, config: Arc::new(config), without: Arc::new(without) });
        self.newest.store(Some(Arc::clone(&newest)));
        Ok(newest)
    }
}

/// Makes TLS connections by one [`TlsSpec`].
#[derive(Debug)]
pub struct Connector {
    config: ClientConfig,
    sessions: SessionStore<Mutex<VecDeque<Session>>>,
}

impl Connector {
    /// A connector without sessions yet.
    ///
    /// # Errors
    /// See [`TlsSpec::client`].
    pub fn new(spec: &TlsSpec) -> Result<Self, Error> {
        Ok(Self {
            config: (*spec.client()?).clone(),
            sessions: SessionStore::new(Arc::new(spec.clone()), no_sessions)?,
        })
    }

    /// The same but for the protocols it offers, with sessions of its own.
    ///
    /// # Errors
    /// None: keeping sessions needs nothing that could fail.
    pub fn offering(&self, protocols: &[&[u8]]) -> Result<Self, Error> {
        let sessions = SessionStore::new(Arc::clone(&self.sessions.spec), no_sessions)?;
        Ok(Self { config: self.config(protocols), sessions })
    }

    /// The configuration of [`Self::offering`] for those who connect by other means; it resumes nothing.
    pub fn config(&self, protocols: &[&[u8]]) -> ClientConfig {
        let mut config = self.config.clone();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        config
    }

    /// Checks the certificates of the server `name` that was accepted before by the roots of now. That its certificate
    /// has run out since is no error.
    ///
    /// # Errors
    /// The roots do not accept it.
    pub fn recheck(&self, chain: &[CertificateDer<'_>], name: &ServerName<'_>) -> Result<(), Error> {
        self.sessions.spec.peer.as_ref().map_or(Ok(()), |check| check.recheck(chain, Some(name)))
    }

    /// The protocols that it offers.
    pub fn alpn(&self) -> &[Vec<u8>] {
        &self.config.alpn_protocols
    }

    /// Begins a connection to the server `name` at an address. SessionStore are kept by both, as several servers may share a name.
    ///
    /// # Errors
    /// With settings that rustls refuses.
    pub fn connect(
        &self,
        name: ServerName<'static>,
        address: SocketAddr,
    ) -> Result<UnbufferedClientConnection, Error> {
        let mut config = self.config.clone();
        let (sessions, spec) = (self.sessions.newest()?, Arc::clone(&self.sessions.spec));
        config.resumption = Resumption::store(Arc::new(Kept { sessions, spec, address }))
            .tls12_resumption(Tls12Resumption::Disabled);
        UnbufferedClientConnection::new(Arc::new(config), name).map_err(|error| Error::Tls(error.to_string()))
    }
}

/// Whether a connection was resumed; to be asked once its handshake is done.
///
/// # Errors
/// When it was, and a certificate of the peer has run out since the session began.
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

/// What is kept of sessions (`T`), thrown away as a whole when it must not be used any more.
#[derive(Debug)]
struct SessionStore<T> {
    spec: Arc<TlsSpec>,
    make: fn() -> Result<T, Error>,
    newest: ArcSwap<Generation<T>>,
}

/// What is kept of the sessions that rest on the same certificates, roots and revocation lists.
#[derive(Debug)]
struct Generation<T> {
    since: Instant,
    /// When a revocation list expires, after which no peer is accepted.
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

    /// What a connection that begins now may use.
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
        // After the end there is nothing more to lose.
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

/// The tickets that one connection gives and takes. It keeps to the keys it began with: were what is trusted replaced
/// half-way, a ticket under the new keys could vouch for a check by the old roots.
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

/// The sessions as one connection sees them. Like [`Tickets`], it keeps to those it began with.
#[derive(Debug)]
struct Kept {
    sessions: Arc<Generation<Mutex<VecDeque<Session>>>>,
    spec: Arc<TlsSpec>,
    address: SocketAddr,
}

impl Kept {
    fn edit<R>(&self, edit: impl FnOnce(&mut VecDeque<Session>) -> R) -> R {
        edit(&mut self.sessions.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn is_ours(&self, session: &Session, name: &ServerName<'_>) -> bool {
        session.address == self.address && session.name == *name
    }
}

impl ClientSessionStore for Kept {
    fn insert_tls13_ticket(&self, name: ServerName<'static>, value: Tls13ClientSessionValue) {
        let most = self.spec.sessions.kept;
        if most == 0 {
            return;
        }
        self.edit(|kept| {
            let ours = |session: &Session| self.is_ours(session, &name);
            let oldest = kept.iter().position(ours);
            if kept.iter().filter(|session| ours(session)).count() >= KEPT_OF_ONE
                && let Some(oldest) = oldest
            {
                kept.remove(oldest);
            } else if kept.len() >= most {
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

    // SessionStore of TLS 1.2 are not resumed, and every server of a mesh takes the first group.
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
