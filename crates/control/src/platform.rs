//! What is known of the platform while somebody proves who they are: never waits for a compile.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use skysail_model::{Change, Kind, api::MeshConfig};

/// So many pods are remembered after their end.
const REMEMBERED: usize = 100_000;

/// What callers are judged by.
#[derive(Default)]
pub(crate) struct Platform {
    domains: RwLock<Arc<Domains>>,
    gone: Mutex<Gone>,
}

/// The mesh's trust domains.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    /// Its own.
    pub(crate) own: String,
    /// Former ones, of which identities are taken as well.
    pub(crate) aliases: Vec<String>,
}

/// Pods that were there and are no more, by namespace and name, with the number of their end.
#[derive(Default)]
struct Gone {
    pods: HashMap<(String, String), u64>,
    order: VecDeque<((String, String), u64)>,
    ends: u64,
}

impl Platform {
    pub(crate) fn domains(&self) -> Arc<Domains> {
        Arc::clone(&self.domains.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes in what the mesh configuration says.
    pub(crate) fn configure(&self, mesh: &MeshConfig) {
        // Another mesh's authority vouches for its identities to workloads, not to us, and ours does not vouch for them.
        let aliases = mesh.trust_domain_aliases.iter().filter(|domain| !mesh.is_foreign(domain));
        let domains = Domains { own: mesh.trust_domain.clone(), aliases: aliases.cloned().collect() };
        *self.domains.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(domains);
    }

    /// Takes in that an object came, changed or went.
    pub(crate) fn note(&self, change: &Change) {
        let (key, is_gone) = match change {
            Change::Apply(object, _) if object.kind() == Kind::Pod => (object.key(), false),
            Change::Delete(key) if key.kind == Kind::Pod => (key.clone(), true),
            _ => return,
        };
        self.gone.lock().unwrap_or_else(PoisonError::into_inner).note((key.namespace, key.name), is_gone);
    }

    /// Whether a pod is known to be no more. One that was never seen is not: its object may be on its way.
    pub(crate) fn is_gone(&self, namespace: &str, pod: &str) -> bool {
        let gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        gone.pods.contains_key(&(namespace.to_owned(), pod.to_owned()))
    }
}

impl Gone {
    fn note(&mut self, pod: (String, String), is_gone: bool) {
        if !is_gone {
            self.pods.remove(&pod);
            return;
        }
        self.ends += 1;
        self.pods.insert(pod.clone(), self.ends);
        self.order.push_back((pod, self.ends));
        if self.order.len() > REMEMBERED
            && let Some((pod, end)) = self.order.pop_front()
            && self.pods.get(&pod) == Some(&end)
        {
            self.pods.remove(&pod);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_gone_until_they_come_back_and_not_remembered_for_ever() {
        let mut gone = Gone::default();
        let pod = |number: usize| ("default".to_owned(), number.to_string());
        gone.note(pod(0), true);
        gone.note(pod(1), true);
        gone.note(pod(1), false);
        assert!(gone.pods.contains_key(&pod(0)) && !gone.pods.contains_key(&pod(1)));
        for number in 2..2 * REMEMBERED {
            gone.note(pod(number), true);
        }
        assert!(!gone.pods.contains_key(&pod(0)));
        assert_eq!((gone.pods.len(), gone.order.len()), (REMEMBERED, REMEMBERED));
    }
}
