//! Use of scopes by identities, limits of scopes, and limits of views of proxies without a known pod.
//!
//! A scope is kept for [`IDLE_TIMEOUT`] after its last proxy has left, so that it is not compiled again for proxies
//! that reconnect. Idle scopes count towards the limits: an identity causes at most its limit of first compilations in
//! that time.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use skysail_model::ClientScope;

use crate::metrics::Limit;

/// Time for which a scope without proxies is kept.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Limits of scopes and declared views.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScopeLimits {
    /// Maximum number of scopes.
    pub(crate) scopes: usize,
    /// Maximum number of scopes that one identity uses.
    pub(crate) scopes_per_identity: usize,
    /// Maximum number of declared views.
    pub(crate) views: usize,
    /// Maximum number of declared views of one identity.
    pub(crate) views_per_identity: usize,
}

/// Number of declared views by identity. A declared view belongs to a proxy whose pod is not in the configuration, so
/// that labels, names and ports are the proxy's own claims. Views of known pods need no limit: a pod has one view for
/// each of its scopes.
#[derive(Default)]
pub(super) struct DeclaredViews {
    total: usize,
    by_identity: HashMap<Arc<str>, usize>,
}

impl DeclaredViews {
    /// Fails if the limits do not allow an identity one more view.
    pub(super) fn check(&self, identity: &str, limits: &ScopeLimits) -> Result<(), Limit> {
        if self.by_identity.get(identity).is_some_and(|count| *count >= limits.views_per_identity) {
            return Err(Limit::IdentityViews);
        }
        if self.total >= limits.views { Err(Limit::Views) } else { Ok(()) }
    }

    pub(super) fn add(&mut self, identity: &Arc<str>) {
        self.total += 1;
        *self.by_identity.entry(Arc::clone(identity)).or_default() += 1;
    }

    pub(super) fn remove(&mut self, identity: &str) {
        let Some(count) = self.by_identity.get_mut(identity) else { return };
        (*count, self.total) = (*count - 1, self.total - 1);
        if *count == 0 {
            self.by_identity.remove(identity);
        }
    }
}

/// The scopes that each identity uses.
#[derive(Default)]
pub(super) struct IdentityUsage(HashMap<Arc<str>, IdentityScopes>);

/// The scopes of one identity.
#[derive(Default)]
struct IdentityScopes {
    uses: HashMap<Arc<ClientScope>, ScopeUse>,
    /// Held during a first compilation for the identity, so that each identity has at most one in the compiler's queue.
    compile_lock: Arc<tokio::sync::Mutex<()>>,
}

/// Use of a scope by an identity.
struct ScopeUse {
    /// Number of connected proxies.
    clients: usize,
    /// Time when the last of them left, or when a proxy last requested the scope.
    idle_since: Instant,
}

impl IdentityUsage {
    /// Records that a proxy requests a scope. Returns false if its identity does not use the scope yet.
    pub(super) fn renew(&mut self, identity: &str, scope: &ClientScope, now: Instant) -> bool {
        let used = self.0.get_mut(identity).and_then(|identity| identity.uses.get_mut(scope));
        used.map(|used| used.idle_since = now).is_some()
    }

    /// Returns the number of scopes that an identity uses.
    pub(super) fn scopes_of(&self, identity: &str) -> usize {
        self.0.get(identity).map_or(0, |identity| identity.uses.len())
    }

    /// Records the first use of a scope by an identity.
    pub(super) fn add(&mut self, identity: &Arc<str>, scope: &Arc<ClientScope>, now: Instant) {
        let identity = self.0.entry(Arc::clone(identity)).or_default();
        identity.uses.insert(Arc::clone(scope), ScopeUse { clients: 0, idle_since: now });
    }

    /// Records that a proxy uses a scope. Returns the shared copy of its identity.
    pub(super) fn client_entered(&mut self, identity: &str, scope: &ClientScope) -> Option<Arc<str>> {
        self.0.get_mut(identity)?.uses.get_mut(scope)?.clients += 1;
        self.0.get_key_value(identity).map(|(identity, _)| Arc::clone(identity))
    }

    /// Records that a proxy no longer uses a scope.
    pub(super) fn client_left(&mut self, identity: &str, scope: &ClientScope, now: Instant) {
        let used = self.0.get_mut(identity).and_then(|identity| identity.uses.get_mut(scope));
        if let Some(used) = used {
            used.clients = used.clients.saturating_sub(1);
            used.idle_since = now;
        }
    }

    /// Returns the lock that an identity holds during a first compilation.
    pub(super) fn compile_lock(&self, identity: &str) -> Arc<tokio::sync::Mutex<()>> {
        self.0.get(identity).map(|identity| Arc::clone(&identity.compile_lock)).unwrap_or_default()
    }

    /// Removes uses without proxies for [`IDLE_TIMEOUT`], unless `keep` returns true for their scope. Calls `removed`
    /// for each removed use.
    pub(super) fn drop_idle(
        &mut self,
        now: Instant,
        keep: impl Fn(&ClientScope) -> bool,
        mut removed: impl FnMut(&Arc<ClientScope>),
    ) {
        self.0.retain(|_, identity| {
            identity.uses.retain(|scope, used| {
                let idle = now.saturating_duration_since(used.idle_since);
                let is_idle = used.clients == 0 && idle >= IDLE_TIMEOUT;
                let is_kept = !is_idle || keep(scope);
                if !is_kept {
                    removed(scope);
                }
                is_kept
            });
            !identity.uses.is_empty()
        });
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
