//! Registration of machines: WorkloadEntries that the control plane makes from a WorkloadGroup's template while a proxy
//! is connected (node metadata `AUTO_REGISTER_GROUP`). They are kept in memory only, like DNS answers.

use std::sync::Arc;

use super::World;
use crate::{
    Kind, Object, ObjectKey, ProxyNode,
    api::{Meta, Typed, WorkloadEntry},
    origin::Origin,
};

/// Origin of registered WorkloadEntries, in place of a file.
const REGISTERED: &str = "(registered)";
/// Annotation with the name of the group.
const GROUP: &str = "istio.io/autoRegistrationGroup";

/// Reason why a machine is not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistrationError {
    /// No group has this name.
    #[error("there is no WorkloadGroup {0}/{1}; apply it, or correct ISTIO_META_AUTO_REGISTER_GROUP")]
    NoGroup(String, String),
    /// The template has another service account.
    #[error("WorkloadGroup {0} is for service account {1:?}, and the proxy runs as {2:?}")]
    Account(String, String, String),
    /// The proxy declares no address.
    #[error("the proxy declares no address")]
    NoAddress,
}

impl World {
    /// Returns the WorkloadEntry of a proxy that names a group; `None` if it names none. The caller has authenticated
    /// the proxy's namespace and service account.
    ///
    /// # Errors
    /// Fails if the group does not exist or is for another service account, or the proxy declares no address.
    pub fn registration(&self, node: &ProxyNode) -> Result<Option<Typed<WorkloadEntry>>, RegistrationError> {
        if node.group.is_empty() {
            return Ok(None);
        }
        let (namespace, account) = (&node.view.namespace, &node.view.service_account);
        let Some(group) = self.workload_groups.get(namespace, &node.group).map(|entry| &entry.object) else {
            return Err(RegistrationError::NoGroup(namespace.clone(), node.group.clone()));
        };
        let template = &group.spec.template;
        let wanted = if template.service_account.is_empty() { "default" } else { &template.service_account };
        if wanted != account {
            return Err(RegistrationError::Account(node.group.clone(), wanted.to_owned(), account.clone()));
        }
        let ip = node.ips.first().ok_or(RegistrationError::NoAddress)?;
        let mut name = format!("{}-{}", node.group, ip.to_string().replace(':', "-"));
        if !node.network.is_empty() {
            name = format!("{name}-{}", node.network);
        }
        // As in Istio, labels of the node take precedence over those of the group, and those over the template's.
        let mut labels = template.labels.clone();
        labels.extend(group.spec.metadata.labels.clone());
        labels.extend(node.view.labels.iter().map(|(key, value)| (key.clone(), value.clone())));
        let mut annotations = group.spec.metadata.annotations.clone();
        annotations.insert(GROUP.to_owned(), node.group.clone());
        let place = &node.view.locality;
        let declared: Vec<&str> = [&place.region, &place.zone, &place.subzone]
            .into_iter()
            .map(String::as_str)
            .take_while(|part| !part.is_empty())
            .collect();
        let locality = if declared.is_empty() { template.locality.clone() } else { declared.join("/") };
        let network = if node.network.is_empty() { &template.network } else { &node.network };
        let spec = WorkloadEntry {
            address: ip.to_string(),
            labels: labels.clone(),
            locality,
            network: network.clone(),
            ..template.clone()
        };
        let meta = Meta {
            namespace: namespace.clone(),
            name,
            labels: Arc::new(labels),
            annotations,
            ..Meta::default()
        };
        Ok(Some(Typed { meta, spec }))
    }

    /// Returns whether the group of a registered WorkloadEntry has a probe. A group that was deleted counts as one with
    /// a probe, so that the last report of a machine stays in effect.
    pub fn has_probe(&self, entry: &Typed<WorkloadEntry>) -> bool {
        let group = entry.meta.annotations.get(GROUP);
        let group = group.and_then(|group| self.workload_groups.get(&entry.meta.namespace, group));
        group.is_none_or(|group| group.object.spec.probe.is_some())
    }

    /// Adds the WorkloadEntry of a connected proxy. An object of this name that was not registered is kept. Returns
    /// whether anything changed.
    pub fn register(&mut self, entry: Typed<WorkloadEntry>) -> bool {
        let (namespace, name) = (&entry.meta.namespace, &entry.meta.name);
        let known = self.workload_entries.get(namespace, name);
        if known.is_some_and(|known| &*known.origin.file != REGISTERED) {
            return false;
        }
        let origin = Origin { file: REGISTERED.into(), ..Origin::default() };
        self.apply(Object::from(entry), origin)
    }

    /// Removes a registered WorkloadEntry. Returns whether anything changed.
    pub fn unregister(&mut self, namespace: &str, name: &str) -> bool {
        let known = self.workload_entries.get(namespace, name);
        if known.is_none_or(|known| &*known.origin.file != REGISTERED) {
            return false;
        }
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        self.delete(&ObjectKey { kind: Kind::WorkloadEntry, namespace, name })
    }
}
