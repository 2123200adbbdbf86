//! Pods: running ones, those that are gone, and their addresses.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use skysail_identity::BoundPod;
use skysail_model::api::kube::Pod;
use tokio::sync::Notify;

use super::PodOf;

/// Pods that are remembered after their end.
const REMEMBERED: usize = 100_000;

/// Namespace and name.
type Key = (String, String);

#[derive(Default)]
pub(super) struct Pods {
    known: HashMap<Key, Known>,
    /// The last pod at each address that has had one.
    addresses: HashMap<IpAddr, Key>,
    /// Ends in their order, with their numbers.
    order: VecDeque<(Key, u64)>,
    ends: u64,
    /// Notified of each change of a pod.
    watched: HashMap<Key, Arc<Notify>>,
}

/// A pod that is or was there.
struct Known {
    /// Empty if unknown.
    uid: String,
    addresses: Vec<IpAddr>,
    /// The number of its end.
    end: Option<u64>,
}

impl Pods {
    pub(super) fn apply(&mut self, namespace: &str, name: &str, pod: &Pod) {
        let key = (namespace.to_owned(), name.to_owned());
        let addresses = if pod.host_network { Vec::new() } else { pod.ips.clone() };
        for address in &addresses {
            // A pod that has ended may be listed with an address that another has by now.
            if !pod.ended || !self.addresses.contains_key(address) {
                self.addresses.insert(*address, key.clone());
            }
        }
        let before = self.known.insert(key.clone(), Known { uid: pod.uid.clone(), addresses, end: None });
        if let Some(before) = before {
            self.release(&key, &before.addresses);
        }
        if pod.ended {
            self.end(&key);
        }
        self.tell(&key);
    }

    pub(super) fn delete(&mut self, namespace: &str, name: &str) {
        let key = (namespace.to_owned(), name.to_owned());
        self.known.entry(key.clone()).or_insert_with(|| Known {
            uid: String::new(),
            addresses: Vec::new(),
            end: None,
        });
        self.end(&key);
        self.tell(&key);
    }

    /// Remembers the end of a pod, and forgets the oldest if there are too many.
    fn end(&mut self, key: &Key) {
        self.ends += 1;
        if let Some(known) = self.known.get_mut(key) {
            known.end = Some(self.ends);
        }
        self.order.push_back((key.clone(), self.ends));
        if self.order.len() > REMEMBERED
            && let Some((key, end)) = self.order.pop_front()
            && self.known.get(&key).is_some_and(|known| known.end == Some(end))
            && let Some(known) = self.known.remove(&key)
        {
            self.release(&key, &known.addresses);
        }
    }

    /// Forgets addresses that a pod had and no longer has.
    fn release(&mut self, key: &Key, addresses: &[IpAddr]) {
        let now = self.known.get(key).map(|known| known.addresses.clone()).unwrap_or_default();
        for address in addresses.iter().filter(|address| !now.contains(address)) {
            if self.addresses.get(address) == Some(key) {
                self.addresses.remove(address);
            }
        }
    }

    pub(super) fn is_gone(&self, of: &PodOf) -> bool {
        let key = (of.namespace.clone(), of.pod.name.clone());
        let Some(known) = self.known.get(&key) else { return false };
        let uids = [&known.uid, &of.pod.uid];
        // A pod that has taken another's name ends that. Where the name has ended, the next pod is let in once its object is there.
        known.end.is_some() || uids.iter().all(|uid| !uid.is_empty()) && uids[0] != uids[1]
    }

    pub(super) fn at(&self, address: IpAddr) -> Option<PodOf> {
        let key = self.addresses.get(&address)?;
        let uid = self.known.get(key)?.uid.clone();
        Some(PodOf { namespace: key.0.clone(), pod: BoundPod { name: key.1.clone(), uid } })
    }

    pub(super) fn watch(&mut self, of: &PodOf) -> Arc<Notify> {
        Arc::clone(self.watched.entry((of.namespace.clone(), of.pod.name.clone())).or_default())
    }

    /// Gives back what [`Self::watch`] gave.
    pub(super) fn unwatch(&mut self, of: &PodOf, left: &Arc<Notify>) {
        // One reference is the table's, the other the caller's.
        if Arc::strong_count(left) <= 2 {
            self.watched.remove(&(of.namespace.clone(), of.pod.name.clone()));
        }
    }

    #[cfg(test)]
    pub(super) fn watched(&self) -> usize {
        self.watched.len()
    }

    fn tell(&self, key: &Key) {
        if let Some(left) = self.watched.get(key) {
            left.notify_waiters();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn pod(uid: &str, address: Option<[u8; 4]>) -> Pod {
        let ips = address.map(IpAddr::from).into_iter().collect();
        Pod { uid: uid.into(), ips, ..Pod::default() }
    }

    fn of(name: &str, uid: &str) -> PodOf {
        PodOf { namespace: "default".into(), pod: BoundPod { name: name.into(), uid: uid.into() } }
    }

    #[test]
    fn a_pod_is_known_by_its_uid_where_there_is_one() {
        let mut pods = Pods::default();
        assert!(!pods.is_gone(&of("a", "1")), "never seen");
        pods.apply("default", "a", &pod("1", None));
        let gone = |pods: &Pods| ["1", "2", ""].map(|uid| pods.is_gone(&of("a", uid)));
        assert_eq!(gone(&pods), [false, true, false]);
        pods.delete("default", "a");
        assert_eq!(gone(&pods), [true, true, true]);
        pods.apply("default", "a", &pod("2", None));
        assert_eq!(gone(&pods), [true, false, false]);
        pods.apply("default", "a", &pod("", None));
        assert_eq!(gone(&pods), [false, false, false], "nothing is known");
        pods.apply("default", "a", &Pod { ended: true, ..pod("2", None) });
        assert_eq!(gone(&pods), [true, true, true], "it has ended, and is still listed");
        pods.delete("default", "b");
        assert!(pods.is_gone(&of("b", "1")));
        assert!(!pods.is_gone(&PodOf { namespace: "other".into(), ..of("b", "1") }));
    }

    #[test]
    fn an_address_is_its_last_pods() {
        let mut pods = Pods::default();
        let at = |pods: &Pods| pods.at([10, 0, 0, 1].into()).map(|of| of.pod.name);
        assert_eq!(at(&pods), None);
        pods.apply("default", "a", &pod("1", Some([10, 0, 0, 1])));
        pods.delete("default", "a");
        assert_eq!(at(&pods).as_deref(), Some("a"), "it was the last");
        pods.apply("default", "b", &pod("2", Some([10, 0, 0, 1])));
        pods.apply("default", "a", &Pod { ended: true, ..pod("1", Some([10, 0, 0, 1])) });
        assert_eq!(at(&pods).as_deref(), Some("b"));
        pods.apply("default", "node", &Pod { host_network: true, ..pod("3", Some([10, 0, 0, 1])) });
        assert_eq!(at(&pods).as_deref(), Some("b"), "a node's address is not one pod's");
        pods.apply("default", "b", &pod("2", Some([10, 0, 0, 2])));
        assert_eq!(at(&pods), None);
    }

    #[test]
    fn pods_are_not_remembered_for_ever() {
        let mut pods = Pods::default();
        pods.apply("default", "0", &pod("", Some([10, 0, 0, 1])));
        for number in 0..2 * REMEMBERED {
            pods.delete("default", &number.to_string());
        }
        assert!(!pods.is_gone(&of("0", "")) && pods.is_gone(&of(&REMEMBERED.to_string(), "")));
        assert_eq!((pods.known.len(), pods.order.len()), (REMEMBERED, REMEMBERED));
        assert!(pods.addresses.is_empty());
        for _ in 0..2 * REMEMBERED {
            pods.apply("default", "flaps", &pod("", None));
            pods.delete("default", "flaps");
        }
        assert!(pods.order.len() <= REMEMBERED);
    }
}
