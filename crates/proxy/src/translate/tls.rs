//! Certificates and trusted roots of TLS contexts.
//!
//! A context names certificates and roots. Each is a handle, shared by all contexts that name the same secret,
//! and filled when the secret arrives. A context is usable once all of its handles are filled. Afterwards it
//! need not be rebuilt, because rustls reads the handles in every handshake.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use skysail_identity::{Acceptor, Connector, Crls, Identity, Live, PeerCheck, Roots, TlsSpec};

use super::{Reject, Result};
use skysail_policy::{
    config::tls::{ClientConfigs, ClientTls, ServerTls},
    state::PublishedOption,
};

/// Source of a secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum SecretSource {
    /// The ADS stream.
    Ads,
    /// SDS server behind this cluster. In a mesh it is the source of the sidecar's own certificate.
    Cluster(Box<str>),
    /// A file, read again after a change in its directory or in `watched`.
    File { path: PathBuf, watched: Option<PathBuf> },
    /// A file of certificate revocation lists that a TLS context names.
    CrlFile { path: PathBuf, watched: Option<PathBuf> },
    /// `static_resources.secrets`.
    Static,
}

/// A secret's name and source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SecretName {
    pub(crate) source: SecretSource,
    pub(crate) name: Box<str>,
}

/// All TLS contexts and the secrets they name.
#[derive(Debug, Default)]
pub(crate) struct TlsContexts {
    inner: Mutex<Inner>,
    /// Counts changes of trust: roots removed or added back, revocation lists replaced.
    distrusted: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    identities: HashMap<SecretName, Arc<Live<Identity>>>,
    roots: HashMap<SecretName, Arc<Live<Roots>>>,
    crls: HashMap<SecretName, Arc<Live<Crls>>>,
    /// Keyed by the encoded context, so that equal contexts are shared.
    servers: HashMap<Vec<u8>, (Weak<ServerTls>, TlsSpec)>,
    clients: HashMap<Vec<u8>, (Weak<PublishedOption<ClientConfigs>>, TlsSpec)>,
}

impl Inner {
    /// Returns the settings of the contexts in use.
    fn specs_in_use(&self) -> impl Iterator<Item = &TlsSpec> {
        let servers = self.servers.values().filter(|(context, _)| context.strong_count() > 0);
        let clients = self.clients.values().filter(|(context, _)| context.strong_count() > 0);
        servers.map(|(_, spec)| spec).chain(clients.map(|(_, spec)| spec))
    }
}

/// ALPN protocols that filter `istio.alpn` offers to a sidecar, for HTTP/1 and for HTTP/2.
pub(crate) const ISTIO_HTTP1: &[&[u8]] = &[b"istio-http/1.1", b"istio", b"http/1.1"];
pub(crate) const ISTIO_H2: &[&[u8]] = &[b"istio-h2", b"istio", b"h2"];

impl TlsContexts {
    /// Returns the handle of a certificate.
    pub(crate) fn identity(&self, name: &SecretName) -> Arc<Live<Identity>> {
        Arc::clone(self.lock().identities.entry(name.clone()).or_insert_with(Live::empty))
    }

    /// Returns the handle of trusted roots.
    pub(crate) fn roots(&self, name: &SecretName) -> Arc<Live<Roots>> {
        Arc::clone(self.lock().roots.entry(name.clone()).or_insert_with(Live::empty))
    }

    /// Stores trusted roots in their handle.
    pub(crate) fn set_roots(&self, name: &SecretName, roots: Roots) {
        let live = self.roots(name);
        let before = live.get();
        let has_removed = before.as_ref().is_some_and(|before| !roots.include(before));
        let gained = before.as_ref().is_none_or(|before| !before.include(&roots));
        live.set(Arc::new(roots));
        if has_removed {
            self.distrust(|check| Arc::ptr_eq(&check.roots, &live));
        } else if gained && self.distrusted() > 0 {
            // A root that was added back makes certificates valid again that were refused without it.
            self.distrusted.fetch_add(1, Ordering::Release);
        }
    }

    /// Stores revocation lists in their handle.
    pub(crate) fn set_crls(&self, name: &SecretName, crls: Crls) {
        let live = self.crls(name);
        let changed = live.get().is_some();
        live.set(Arc::new(crls));
        if changed {
            self.distrust(|check| check.crls.as_ref().is_some_and(|crls| Arc::ptr_eq(crls, &live)));
        }
    }

    /// Rebuilds the client contexts of which peers may no longer be trusted, so that no idle connection to such
    /// a server is reused.
    fn distrust(&self, is_concerned: impl Fn(&PeerCheck) -> bool) {
        self.distrusted.fetch_add(1, Ordering::Release);
        for (context, spec) in self.lock().clients.values() {
            let uses = spec.peer.as_ref().is_some_and(&is_concerned);
            if uses && let Some(context) = context.upgrade().filter(|context| context.load().is_some()) {
                match client_configs(spec) {
                    Ok(configs) => context.store(Some(Arc::new(configs))),
                    Err(reject) => {
                        tracing::error!(%reject, "cannot rebuild a TLS context; its idle connections stay in use");
                    }
                }
            }
        }
    }

    /// Returns the number of changes of trust since the start.
    pub(crate) fn distrusted(&self) -> u64 {
        self.distrusted.load(Ordering::Acquire)
    }

    /// Returns the handle of revocation lists.
    pub(crate) fn crls(&self, name: &SecretName) -> Arc<Live<Crls>> {
        Arc::clone(self.lock().crls.entry(name.clone()).or_insert_with(Live::empty))
    }

    /// Returns every secret that contexts name, once each.
    pub(crate) fn names(&self) -> Vec<SecretName> {
        let inner = self.lock();
        let mut names: Vec<_> =
            inner.identities.keys().chain(inner.roots.keys()).chain(inner.crls.keys()).cloned().collect();
        names.sort();
        names.dedup();
        names
    }

    /// Returns the secrets that an upstream context needs and that have not arrived.
    pub(crate) fn missing<'a>(&self, tls: &'a ClientTls) -> Vec<&'a str> {
        let inner = self.lock();
        let lacks_identity =
            |name: &str| inner.identities.iter().any(|(of, live)| *of.name == *name && live.get().is_none());
        let lacks_roots =
            |name: &str| inner.roots.iter().any(|(of, live)| *of.name == *name && live.get().is_none());
        let names = tls.secrets.iter().map(|name| &**name);
        names.filter(|name| lacks_identity(name) || lacks_roots(name)).collect()
    }

    /// Returns the certificates of contexts in use that are inline in the configuration.
    pub(crate) fn unnamed_identities(&self) -> Vec<Arc<Identity>> {
        let inner = self.lock();
        let all = inner.specs_in_use().flat_map(|spec| &spec.identities);
        let named =
            |live: &&Arc<Live<Identity>>| inner.identities.values().any(|named| Arc::ptr_eq(named, live));
        all.filter(|live| !named(live)).filter_map(|live| live.get()).collect()
    }

    /// Returns the trusted roots of contexts in use that are inline in the configuration.
    pub(crate) fn unnamed_roots(&self) -> Vec<Arc<Roots>> {
        let inner = self.lock();
        let all = inner.specs_in_use().filter_map(|spec| spec.peer.as_ref()).map(|check| &check.roots);
        let named = |live: &&Arc<Live<Roots>>| inner.roots.values().any(|named| Arc::ptr_eq(named, live));
        all.filter(|live| !named(live)).filter_map(|live| live.get()).collect()
    }

    /// Returns the certificates by name.
    pub(crate) fn identities(&self) -> Vec<(SecretName, Option<Arc<Identity>>)> {
        self.lock().identities.iter().map(|(name, live)| (name.clone(), live.get())).collect()
    }

    /// Returns the trusted roots by name.
    pub(crate) fn all_roots(&self) -> Vec<(SecretName, Option<Arc<Roots>>)> {
        self.lock().roots.iter().map(|(name, live)| (name.clone(), live.get())).collect()
    }

    /// Makes contexts usable whose secrets have all arrived, and drops unused contexts. The cost grows with the number
    /// of contexts, so it is called once for all secrets of an update.
    ///
    /// # Errors
    /// The first context that cannot be built. The others are usable nevertheless.
    pub(crate) fn refresh(&self) -> Result<()> {
        let mut inner = self.lock();
        inner.servers.retain(|_, (context, _)| context.strong_count() > 0);
        inner.clients.retain(|_, (context, _)| context.strong_count() > 0);
        let mut result = Ok(());
        for (context, spec) in inner.servers.values() {
            if let Some(context) = context.upgrade() {
                result = result.and(fill_server(&context.config, spec));
            }
        }
        for (context, spec) in inner.clients.values() {
            if let Some(context) = context.upgrade() {
                result = result.and(fill_client(&context, spec));
            }
        }
        result
    }

    /// Returns the downstream context of `key`, its encoded form.
    pub(super) fn server(
        &self,
        key: Vec<u8>,
        spec: impl FnOnce() -> Result<TlsSpec>,
    ) -> Result<Arc<ServerTls>> {
        if let Some((context, _)) = self.lock().servers.get(&key)
            && let Some(context) = context.upgrade()
        {
            return Ok(context);
        }
        let spec = spec()?;
        let context = Arc::new(ServerTls { config: Arc::default() });
        fill_server(&context.config, &spec)?;
        self.lock().servers.insert(key, (Arc::downgrade(&context), spec));
        Ok(context)
    }

    /// Returns the configurations of the upstream context of `key`, its encoded form.
    pub(super) fn client(
        &self,
        key: Vec<u8>,
        spec: impl FnOnce() -> Result<TlsSpec>,
    ) -> Result<Arc<PublishedOption<ClientConfigs>>> {
        if let Some((context, _)) = self.lock().clients.get(&key)
            && let Some(context) = context.upgrade()
        {
            return Ok(context);
        }
        let spec = spec()?;
        let context = Arc::default();
        fill_client(&context, &spec)?;
        self.lock().clients.insert(key, (Arc::downgrade(&context), spec));
        Ok(context)
    }

    /// Returns the verification of a downstream context's clients, and the name of the secret with its trusted roots
    /// (empty for roots in the configuration); `None` if it requests no certificate. For explanations.
    pub(crate) fn client_check(&self, context: &Arc<ServerTls>) -> Option<(PeerCheck, String)> {
        let inner = self.lock();
        let is_it = |known: &Weak<ServerTls>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(context));
        let (_, spec) = inner.servers.values().find(|(known, _)| is_it(known))?;
        let check = spec.peer.clone()?;
        let named = inner.roots.iter().find(|(_, live)| Arc::ptr_eq(live, &check.roots));
        let name = named.map(|(name, _)| name.name.to_string()).unwrap_or_default();
        Some((check, name))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // No code that can panic half-way through a change runs under the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn fill_server(config: &PublishedOption<Acceptor>, spec: &TlsSpec) -> Result<()> {
    if config.load().is_none() && has_secrets(spec) {
        config.store(Some(Arc::new(Acceptor::new(spec).map_err(reject)?)));
    }
    Ok(())
}

fn fill_client(configs: &PublishedOption<ClientConfigs>, spec: &TlsSpec) -> Result<()> {
    if configs.load().is_none() && has_secrets(spec) {
        configs.store(Some(Arc::new(client_configs(spec)?)));
    }
    Ok(())
}

fn client_configs(spec: &TlsSpec) -> Result<ClientConfigs> {
    let own = Arc::new(Connector::new(spec).map_err(reject)?);
    let offering = |protocols: &[&[u8]]| own.offering(protocols).map(Arc::new).map_err(reject);
    let (istio_http1, istio_h2) = (offering(ISTIO_HTTP1)?, offering(ISTIO_H2)?);
    let http2 = if own.alpn().is_empty() { offering(&[b"h2"])? } else { Arc::clone(&own) };
    Ok(ClientConfigs { own, http2, istio_http1, istio_h2 })
}

fn has_secrets(spec: &TlsSpec) -> bool {
    spec.identities.iter().all(|identity| identity.get().is_some())
        && spec.peer.as_ref().is_none_or(PeerCheck::is_ready)
}

pub(super) fn reject(error: skysail_identity::Error) -> Reject {
    Reject::new(error.to_string())
}

/// Returns whether a downstream context is usable; warming waits for it.
pub(crate) fn server_ready(tls: &ServerTls) -> bool {
    tls.config.load().is_some()
}

/// Returns whether an upstream context is usable.
pub(crate) fn client_ready(tls: &ClientTls) -> bool {
    tls.config.load().is_some()
}

#[cfg(test)]
mod tests {
    use skysail_identity::Authority;

    use super::*;

    #[test]
    fn removing_and_adding_back_roots_changes_trust() {
        let (contexts, name) =
            (TlsContexts::default(), SecretName { source: SecretSource::Static, name: "a".into() });
        let [first, second] = [(); 2].map(|()| Authority::ephemeral().unwrap().roots_pem().to_owned());
        let set = |pem: &str| {
            contexts.set_roots(&name, Roots::from_pem(pem.as_bytes()).unwrap());
            contexts.distrusted()
        };
        let both = first.clone() + &second;
        // No trusted root is removed.
        assert_eq!([set(&first), set(&both), set(&both)], [0, 0, 0]);
        assert_eq!([set(&second), set(&second)], [1, 1]);
        // A certificate that was refused without the first root may be valid again.
        assert_eq!([set(&both), set(&both)], [2, 2]);
    }
}
