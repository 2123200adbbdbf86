//! Pods: running ones, ended ones, and their addresses.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use skysail_identity::BoundPod;
use skysail_model::api::kube::Pod;
use tokio::sync::Notify;

use super::PodRef;

/// Maximum number of ended pods in memory; above it, the oldest no longer counts as ended.
const MAX_ENDED: usize = 100_000;

/// Namespace and name.
type PodKey = (String, String);

#[derive(Default)]
pub(super) struct Pods {
    records: HashMap<PodKey, PodRecord>,
    /// The last pod at each address.
    addresses: HashMap<IpAddr, PodKey>,
    /// Ended pods in the order of their ends, with the number of each end.
    ended: VecDeque<(PodKey, u64)>,
    /// Number of ends so far.
    ends: u64,
    /// Wakes the tasks that wait for a change of a pod.
    watches: HashMap<PodKey, Arc<Notify>>,
}

/// A pod that runs or has ended.
struct PodRecord {
    /// Empty if unknown.
    uid: String,
    addresses: Vec<IpAddr>,
    /// Number of its end; `None` while it runs.
    end: Option<u64>,
}

impl Pods {
    pub(super) fn apply(&mut self, namespace: &str, name: &str, pod: &Pod) {
        let key = (namespace.to_owned(), name.to_owned());
        let addresses = if pod.host_network { Vec::new() } else { pod.ips.clone() };
        for address in &addresses {
            // The object of an ended pod may still have an address that another pod has now.
            if !pod.ended || !self.addresses.contains_key(address) {
                self.addresses.insert(*address, key.clone());
            }
        }
        let before =
            self.records.insert(key.clone(), PodRecord { uid: pod.uid.clone(), addresses, end: None });
        if let Some(before) = before {
            self.release(&key, &before.addresses);
        }
        if pod.ended {
            self.end(&key);
        }
        self.notify(&key);
    }

    pub(super) fn delete(&mut self, namespace: &str, name: &str) {
        let key = (namespace.to_owned(), name.to_owned());
        self.records.entry(key.clone()).or_insert_with(|| PodRecord {
            uid: String::new(),
            addresses: Vec::new(),
            end: None,
        });
        self.end(&key);
        self.notify(&key);
    }

    /// Records the end of a pod. Removes the oldest record if there are more than [`MAX_ENDED`].
    fn end(&mut self, key: &PodKey) {
        self.ends += 1;
        if let Some(known) = self.records.get_mut(key) {
            known.end = Some(self.ends);
        }
        self.ended.push_back((key.clone(), self.ends));
        if self.ended.len() > MAX_ENDED
            && let Some((key, end)) = self.ended.pop_front()
            && self.records.get(&key).is_some_and(|known| known.end == Some(end))
            && let Some(known) = self.records.remove(&key)
        {
            self.release(&key, &known.addresses);
        }
    }

    /// Removes addresses that a pod no longer has.
    fn release(&mut self, key: &PodKey, addresses: &[IpAddr]) {
        let now = self.records.get(key).map(|known| known.addresses.clone()).unwrap_or_default();
        for address in addresses.iter().filter(|address| !now.contains(address)) {
            if self.addresses.get(address) == Some(key) {
                self.addresses.remove(address);
            }
        }
    }

    pub(super) fn has_ended(&self, of: &PodRef) -> bool {
        let key = (of.namespace.clone(), of.pod.name.clone());
        let Some(known) = self.records.get(&key) else { return false };
        let uids = [&known.uid, &of.pod.uid];
        // A pod with the same name and another uid has replaced the pod. After the end of the last pod with a name, a
        // new one is accepted once its object arrives.
        known.end.is_some() || uids.iter().all(|uid| !uid.is_empty()) && uids[0] != uids[1]
    }

    pub(super) fn pod_at(&self, address: IpAddr) -> Option<PodRef> {
        let key = self.addresses.get(&address)?;
        let uid = self.records.get(key)?.uid.clone();
        Some(PodRef { namespace: key.0.clone(), pod: BoundPod { name: key.1.clone(), uid } })
    }

    /// Registers for changes of a pod.
    pub(super) fn watch(&mut self, of: &PodRef) -> Arc<Notify> {
        Arc::clone(self.watches.entry((of.namespace.clone(), of.pod.name.clone())).or_default())
    }

    /// Ends a registration of [`Self::watch`].
    pub(super) fn unwatch(&mut self, of: &PodRef, changed: &Arc<Notify>) {
        // The table holds one reference and the caller the other; more belong to other registrations.
        if Arc::strong_count(changed) <= 2 {
            self.watches.remove(&(of.namespace.clone(), of.pod.name.clone()));
        }
    }

    #[cfg(test)]
    pub(super) fn watched(&self) -> usize {
        self.watches.len()
    }

    fn notify(&self, key: &PodKey) {
        if let Some(changed) = self.watches.get(key) {
            changed.notify_waiters();
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

    fn of(name: &str, uid: &str) -> PodRef {
        PodRef { namespace: "default".into(), pod: BoundPod { name: name.into(), uid: uid.into() } }
    }

    #[test]
    fn a_pod_with_another_uid_replaces_the_pod_of_its_name() {
        let mut pods = Pods::default();
        assert!(!pods.has_ended(&of("a", "1")), "never seen");
        pods.apply("default", "a", &pod("1", None));
        let ended = |pods: &Pods| ["1", "2", ""].map(|uid| pods.has_ended(&of("a", uid)));
        assert_eq!(ended(&pods), [false, true, false]);
        pods.delete("default", "a");
        assert_eq!(ended(&pods), [true, true, true]);
        pods.apply("default", "a", &pod("2", None));
        assert_eq!(ended(&pods), [true, false, false]);
        pods.apply("default", "a", &pod("", None));
        assert_eq!(ended(&pods), [false, false, false], "the uid is unknown");
        pods.apply("default", "a", &Pod { ended: true, ..pod("2", None) });
        assert_eq!(ended(&pods), [true, true, true], "the pod has ended; its object still exists");
        pods.delete("default", "b");
        assert!(pods.has_ended(&of("b", "1")));
        assert!(!pods.has_ended(&PodRef { namespace: "other".into(), ..of("b", "1") }));
    }

    #[test]
    fn an_address_belongs_to_its_last_pod() {
        let mut pods = Pods::default();
        let at = |pods: &Pods| pods.pod_at([10, 0, 0, 1].into()).map(|of| of.pod.name);
        assert_eq!(at(&pods), None);
        pods.apply("default", "a", &pod("1", Some([10, 0, 0, 1])));
        pods.delete("default", "a");
        assert_eq!(at(&pods).as_deref(), Some("a"), "the last pod of the address");
        pods.apply("default", "b", &pod("2", Some([10, 0, 0, 1])));
        pods.apply("default", "a", &Pod { ended: true, ..pod("1", Some([10, 0, 0, 1])) });
        assert_eq!(at(&pods).as_deref(), Some("b"));
        pods.apply("default", "node", &Pod { host_network: true, ..pod("3", Some([10, 0, 0, 1])) });
        assert_eq!(at(&pods).as_deref(), Some("b"), "the address of a node belongs to no pod");
        pods.apply("default", "b", &pod("2", Some([10, 0, 0, 2])));
        assert_eq!(at(&pods), None);
    }

    #[test]
    fn the_number_of_ended_pods_in_memory_is_bounded() {
        let mut pods = Pods::default();
        pods.apply("default", "0", &pod("", Some([10, 0, 0, 1])));
        for number in 0..2 * MAX_ENDED {
            pods.delete("default", &number.to_string());
        }
        assert!(!pods.has_ended(&of("0", "")) && pods.has_ended(&of(&MAX_ENDED.to_string(), "")));
        assert_eq!((pods.records.len(), pods.ended.len()), (MAX_ENDED, MAX_ENDED));
        assert!(pods.addresses.is_empty());
        for _ in 0..2 * MAX_ENDED {
            pods.apply("default", "flaps", &pod("", None));
            pods.delete("default", "flaps");
        }
        assert!(pods.ended.len() <= MAX_ENDED);
    }
}
