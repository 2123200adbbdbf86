//! Which identities use which scopes, how many scopes there may be, and how many views of proxies without a known pod.
//!
//! A scope is kept for [`IDLE`] after its last proxy left: proxies that come and go do not have it compiled again. Because idle
//! scopes count too, an identity has at most its limit of new scopes compiled in that time.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use skysail_model::ClientScope;

use crate::metrics::Limit;

/// How long a scope without proxies is kept.
pub(crate) const IDLE: Duration = Duration::from_secs(30);

/// How many scopes and declared views there may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Scopes in all.
    pub(crate) scopes: usize,
    /// Scopes used by one identity.
    pub(crate) of_identity: usize,
    /// Declared views in all.
    pub(crate) views: usize,
    /// Declared views of one identity.
    pub(crate) views_of_identity: usize,
}

/// Declared views by identity: those made for a proxy whose pod is not known, so that labels, names and ports are the proxy's own
/// claims. Views of known pods are not counted: a pod has one for each of its scopes, which are bounded.
#[derive(Default)]
pub(super) struct DeclaredViews {
    all: usize,
    by_identity: HashMap<Arc<str>, usize>,
}

impl DeclaredViews {
    /// Fails if the limits do not allow one more for an identity.
    pub(super) fn check(&self, who: &str, limits: &Limits) -> Result<(), Limit> {
        if self.by_identity.get(who).is_some_and(|count| *count >= limits.views_of_identity) {
            return Err(Limit::IdentityViews);
        }
        if self.all >= limits.views { Err(Limit::Views) } else { Ok(()) }
    }

    pub(super) fn add(&mut self, who: &Arc<str>) {
        self.all += 1;
        *self.by_identity.entry(Arc::clone(who)).or_default() += 1;
    }

    pub(super) fn remove(&mut self, who: &str) {
        let Some(count) = self.by_identity.get_mut(who) else { return };
        (*count, self.all) = (*count - 1, self.all - 1);
        if *count == 0 {
            self.by_identity.remove(who);
        }
    }
}

/// All identities that use a scope.
#[derive(Default)]
pub(super) struct Identities(HashMap<Arc<str>, Identity>);

#[derive(Default)]
struct Identity {
    uses: HashMap<Arc<ClientScope>, Use>,
    /// Held while a scope is compiled for the identity, so that of each identity one waits for the compiler.
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// An identity's use of a scope.
struct Use {
    /// Connected proxies.
    clients: usize,
    /// When the last of them left, or the first asked for the scope.
    idle_since: Instant,
}

impl Identities {
    /// Notes that a proxy asks for a scope. False if the identity did not use it so far.
    pub(super) fn renew(&mut self, who: &str, surroundings: &ClientScope, now: Instant) -> bool {
        let used = self.0.get_mut(who).and_then(|identity| identity.uses.get_mut(surroundings));
        used.map(|used| used.idle_since = now).is_some()
    }

    /// How many scopes an identity uses.
    pub(super) fn used_by(&self, who: &str) -> usize {
        self.0.get(who).map_or(0, |identity| identity.uses.len())
    }

    /// Notes that an identity uses a scope that it did not use.
    pub(super) fn add(&mut self, who: &Arc<str>, surroundings: &Arc<ClientScope>, now: Instant) {
        let identity = self.0.entry(Arc::clone(who)).or_default();
        identity.uses.insert(Arc::clone(surroundings), Use { clients: 0, idle_since: now });
    }

    /// Notes that a proxy uses a scope from now on. Gives the identity as it is kept here.
    pub(super) fn enter(&mut self, who: &str, surroundings: &ClientScope) -> Option<Arc<str>> {
        let identity = self.0.get_mut(who)?;
        identity.uses.get_mut(surroundings)?.clients += 1;
        self.0.get_key_value(who).map(|(who, _)| Arc::clone(who))
    }

    /// Notes that a proxy no longer uses a scope.
    pub(super) fn leave(&mut self, who: &str, surroundings: &ClientScope, now: Instant) {
        let used = self.0.get_mut(who).and_then(|identity| identity.uses.get_mut(surroundings));
        if let Some(used) = used {
            used.clients = used.clients.saturating_sub(1);
            used.idle_since = now;
        }
    }

    /// Whose turn it is to have a scope compiled.
    pub(super) fn turn(&self, who: &str) -> Arc<tokio::sync::Mutex<()>> {
        self.0.get(who).map(|identity| Arc::clone(&identity.turn)).unwrap_or_default()
    }

    /// Forgets uses without proxies for [`IDLE`] unless `keeps` says otherwise, and calls `gone` with each scope.
    pub(super) fn drop_idle(
        &mut self,
        now: Instant,
        keeps: impl Fn(&ClientScope) -> bool,
        mut gone: impl FnMut(&Arc<ClientScope>),
    ) {
        self.0.retain(|_, identity| {
            identity.uses.retain(|surroundings, used| {
                let idle = used.clients == 0 && now.saturating_duration_since(used.idle_since) >= IDLE;
                let kept = !idle || keeps(surroundings);
                if !kept {
                    gone(surroundings);
                }
                kept
            });
            !identity.uses.is_empty()
        });
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
