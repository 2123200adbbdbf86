//! Platform data for authentication: trust domains and pods. Reading it never waits for a compile.

mod pods;

use std::{
    net::IpAddr,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use skysail_identity::BoundPod;
use skysail_model::{Change, Kind, api::MeshConfig, api::Object};
use tokio::sync::Notify;

use self::pods::Pods;

/// Data by which callers are authenticated.
#[derive(Default)]
pub(crate) struct Platform {
    domains: RwLock<Arc<Domains>>,
    pods: Mutex<Pods>,
}

/// The mesh's trust domains.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    /// Its own.
    pub(crate) own: String,
    /// Former ones, of which identities are taken as well.
    pub(crate) aliases: Vec<String>,
}

/// A pod that a caller runs in, as far as that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodOf {
    pub(crate) namespace: String,
    pub(crate) pod: BoundPod,
}

impl Platform {
    pub(crate) fn domains(&self) -> Arc<Domains> {
        Arc::clone(&self.domains.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the trust domains of the mesh configuration.
    pub(crate) fn configure(&self, mesh: &MeshConfig) {
        // Another mesh's authority vouches for its identities to workloads, not to us, and ours does not vouch for them.
        let aliases = mesh.trust_domain_aliases.iter().filter(|domain| !mesh.is_foreign(domain));
        let domains = Domains { own: mesh.trust_domain.clone(), aliases: aliases.cloned().collect() };
        *self.domains.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(domains);
    }

    /// Notes a change of an object.
    pub(crate) fn note(&self, change: &Change) {
        match change {
            Change::Apply(Object::Pod(pod), _) => {
                self.pods().apply(&pod.meta.namespace, &pod.meta.name, &pod.spec);
            }
            Change::Delete(key) if key.kind == Kind::Pod => self.pods().delete(&key.namespace, &key.name),
            _ => {}
        }
    }

    /// Whether a pod is known to be no more. One that was never seen is not: its object may be on its way.
    pub(crate) fn is_gone(&self, of: &PodOf) -> bool {
        self.pods().is_gone(of)
    }

    /// The pod that has an address, or that had it last. Pods in their node's network are not found.
    pub(crate) fn pod_at(&self, address: IpAddr) -> Option<PodOf> {
        self.pods().at(address.to_canonical())
    }

    /// Waits until a pod is known to be no more.
    pub(crate) async fn gone(self: Arc<Self>, of: PodOf) {
        let waiting = Waiting::new(self, of);
        loop {
            let mut left = pin!(waiting.left.notified());
            // From here on no change is missed.
            left.as_mut().enable();
            if waiting.platform.is_gone(&waiting.of) {
                return;
            }
            left.await;
        }
    }

    fn pods(&self) -> MutexGuard<'_, Pods> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A task that waits for the end of a pod.
struct Waiting {
    platform: Arc<Platform>,
    of: PodOf,
    left: Arc<Notify>,
}

impl Waiting {
    fn new(platform: Arc<Platform>, of: PodOf) -> Self {
        let left = platform.pods().watch(&of);
        Self { platform, of, left }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.platform.pods().unwatch(&self.of, &self.left);
    }
}

#[cfg(test)]
mod tests {
    use super::{pods::tests::pod, *};

    #[tokio::test]
    async fn the_end_of_a_pod_is_noticed_by_those_who_wait_for_it() {
        let platform = Arc::<Platform>::default();
        let of = |name: &str, uid: &str| PodOf {
            namespace: "default".into(),
            pod: BoundPod { name: name.into(), uid: uid.into() },
        };
        platform.pods().apply("default", "a", &pod("1", None));
        let ends =
            [of("a", "1"), of("a", ""), of("b", "")].map(|of| tokio::spawn(Arc::clone(&platform).gone(of)));
        while platform.pods().watched() < 2 {
            tokio::task::yield_now().await;
        }
        platform.pods().apply("default", "a", &pod("1", None));
        platform.pods().apply("default", "other", &pod("7", None));
        platform.pods().delete("default", "a");
        let [first, second, third] = ends;
        first.await.unwrap();
        second.await.unwrap();
        assert!(!third.is_finished());
        third.abort();
        let _ = third.await;
        assert_eq!(platform.pods().watched(), 0, "nothing is kept of those who wait no more");
        Arc::clone(&platform).gone(of("a", "1")).await;
    }
}
