//! Platform data for authentication: trust domains and pods. It has its own locks, so that authentication never waits
//! for a compile.

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

/// Data for the authentication of callers.
#[derive(Default)]
pub(crate) struct Platform {
    trust_domains: RwLock<Arc<TrustDomains>>,
    pods: Mutex<Pods>,
}

/// Trust domains of the mesh.
#[derive(Debug, Default)]
pub(crate) struct TrustDomains {
    /// The trust domain of the mesh (`trustDomain`).
    pub(crate) own: String,
    /// Former trust domains, whose identities are accepted too (`trustDomainAliases`).
    pub(crate) aliases: Vec<String>,
}

/// Reference to a pod, by namespace, name and uid; the uid may be unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodRef {
    pub(crate) namespace: String,
    pub(crate) pod: BoundPod,
}

impl Platform {
    pub(crate) fn trust_domains(&self) -> Arc<TrustDomains> {
        Arc::clone(&self.trust_domains.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies the trust domains of the mesh configuration.
    pub(crate) fn configure(&self, mesh: &MeshConfig) {
        // A foreign trust domain has its own authority. The control plane neither accepts its certificates nor issues
        // certificates for it.
        let aliases = mesh.trust_domain_aliases.iter().filter(|domain| !mesh.is_foreign(domain));
        let trust_domains =
            TrustDomains { own: mesh.trust_domain.clone(), aliases: aliases.cloned().collect() };
        *self.trust_domains.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(trust_domains);
    }

    /// Applies a change of an object; only pods matter.
    pub(crate) fn apply(&self, change: &Change) {
        match change {
            Change::Apply(Object::Pod(pod), _) => {
                self.pods().apply(&pod.meta.namespace, &pod.meta.name, &pod.spec);
            }
            Change::Delete(key) if key.kind == Kind::Pod => self.pods().delete(&key.namespace, &key.name),
            _ => {}
        }
    }

    /// Returns whether a pod is known to have ended. False for a pod that was never seen: its object may arrive later.
    pub(crate) fn has_ended(&self, pod: &PodRef) -> bool {
        self.pods().has_ended(pod)
    }

    /// Returns the pod that has an address, or had it last. Ignores pods in the network of their node (`hostNetwork`).
    pub(crate) fn pod_at(&self, address: IpAddr) -> Option<PodRef> {
        self.pods().pod_at(address.to_canonical())
    }

    /// Waits until a pod is known to have ended.
    pub(crate) async fn wait_for_end(self: Arc<Self>, pod: PodRef) {
        let watch = PodWatch::new(self, pod);
        loop {
            let mut changed = pin!(watch.changed.notified());
            // Enabled before the check, so that a change in between is not missed.
            changed.as_mut().enable();
            if watch.platform.has_ended(&watch.pod) {
                return;
            }
            changed.await;
        }
    }

    fn pods(&self) -> MutexGuard<'_, Pods> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A registration for changes of a pod; removed when dropped.
struct PodWatch {
    platform: Arc<Platform>,
    pod: PodRef,
    changed: Arc<Notify>,
}

impl PodWatch {
    fn new(platform: Arc<Platform>, pod: PodRef) -> Self {
        let changed = platform.pods().watch(&pod);
        Self { platform, pod, changed }
    }
}

impl Drop for PodWatch {
    fn drop(&mut self) {
        self.platform.pods().unwatch(&self.pod, &self.changed);
    }
}

#[cfg(test)]
mod tests {
    use super::{pods::tests::pod, *};

    #[tokio::test]
    async fn the_end_of_a_pod_wakes_the_tasks_that_wait_for_it() {
        let platform = Arc::<Platform>::default();
        let pod_ref = |name: &str, uid: &str| PodRef {
            namespace: "default".into(),
            pod: BoundPod { name: name.into(), uid: uid.into() },
        };
        platform.pods().apply("default", "a", &pod("1", None));
        let ends = [pod_ref("a", "1"), pod_ref("a", ""), pod_ref("b", "")]
            .map(|pod| tokio::spawn(Arc::clone(&platform).wait_for_end(pod)));
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
        assert_eq!(platform.pods().watched(), 0, "an ended task leaves no watch");
        Arc::clone(&platform).wait_for_end(pod_ref("a", "1")).await;
    }
}
