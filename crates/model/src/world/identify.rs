//! Identification of a proxy: data of its pod replace the properties that it declared.
//!
//! The table "What a proxy is" in `docs/control-plane.md` has a row for each field.

use std::{net::IpAddr, sync::Arc};

use super::World;
use crate::{
    ProxyNode, ProxyView,
    api::{
        Pod, Typed,
        kube::Locality,
        proxy_config::{self, HttpSettings, ProxySettings},
    },
};

/// Error for a proxy that names a pod with another service account.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "pod {namespace}/{pod} runs as {namespace}/{known}, not as {namespace}/{declared}; a proxy may take the configuration of its own pod only"
)]
pub struct AccountMismatch {
    /// Namespace.
    pub namespace: String,
    /// Name of the pod.
    pub pod: String,
    /// Service account of the pod.
    pub known: String,
    /// Service account of the proxy.
    pub declared: String,
}

impl World {
    /// Replaces the properties that a proxy declared by those of its pod, which runs in the cluster `home`. If the pod
    /// is unknown, only the locality is replaced, by that of the Kubernetes node. Returns whether the pod is known.
    ///
    /// # Errors
    /// Fails if the pod runs under another service account.
    pub fn identify(&self, node: &mut ProxyNode, home: &str) -> Result<bool, AccountMismatch> {
        let known = self.identify_pod(&node.pod, &node.ips, home, &mut node.view)?;
        if !known {
            set_locality(self.locality(&node.node_name), &mut node.view);
        } else if let Some(of_pod) = self.node_of_pod(&node.view.namespace, &node.pod) {
            of_pod.clone_into(&mut node.node_name);
        }
        Ok(known)
    }

    /// Returns the name of the Kubernetes node of a pod, if it is known.
    pub fn node_of_pod(&self, namespace: &str, pod: &str) -> Option<&str> {
        self.pod(namespace, pod).map(|pod| pod.spec.node.as_str()).filter(|node| !node.is_empty())
    }

    /// Replaces the fields of a view by those of the pod of this name, and sets the services that lead to its
    /// addresses. `ips` are the addresses of an unknown pod. Returns false if the pod is unknown.
    ///
    /// # Errors
    /// Fails if the pod runs under another service account.
    pub fn identify_pod(
        &self,
        pod: &str,
        ips: &[IpAddr],
        home: &str,
        view: &mut ProxyView,
    ) -> Result<bool, AccountMismatch> {
        self.reduce_metadata(view);
        let Some(pod) = self.pod(&view.namespace, pod) else {
            view.addressed = self.services_at(&view.namespace, ips);
            return Ok(false);
        };
        if pod.spec.service_account != view.service_account {
            return Err(AccountMismatch {
                namespace: view.namespace.clone(),
                pod: pod.meta.name.clone(),
                known: pod.spec.service_account.clone(),
                declared: view.service_account.clone(),
            });
        }
        self.apply_pod(pod, home, view);
        Ok(true)
    }

    fn apply_pod(&self, pod: &Typed<Pod>, home: &str, view: &mut ProxyView) {
        view.labels = Arc::clone(&pod.meta.labels);
        view.addressed = self.services_at(&view.namespace, &pod.spec.ips);
        pod.canonical_name().clone_into(&mut view.canonical_service);
        home.clone_into(&mut view.cluster_id);
        let ports = pod.spec.ports.iter().filter(|port| port.tcp && !port.name.is_empty());
        view.named_ports = ports.map(|port| (port.name.clone(), port.port)).collect();
        // A pod has no address before its network is ready.
        if !pod.spec.ips.is_empty() {
            view.ipv4 = pod.spec.ips.iter().any(IpAddr::is_ipv4);
            view.ipv6 = pod.spec.ips.iter().any(IpAddr::is_ipv6);
        }
        let sidecar = self.sidecar(&view.namespace, &view.labels);
        let has_ingress = sidecar.is_some_and(|sidecar| !sidecar.spec.ingress.is_empty());
        let preferred = pod.spec.ips.iter().find(|ip| ip.is_ipv4() == view.ipv4);
        view.address = preferred.filter(|_| has_ingress).copied();
        set_locality(self.pod_locality(pod), view);
        let network = self.topology().network_of(&pod.meta.labels, pod.spec.ips.first().copied(), home);
        network.clone_into(&mut view.network);
        let settings = pod.meta.annotations.get(proxy_config::ANNOTATION);
        view.settings = settings.map(|text| Arc::new(annotated(text))).unwrap_or_default();
    }
}

/// Sets the locality of a proxy, if it is known.
fn set_locality(locality: Locality, view: &mut ProxyView) {
    if locality != Locality::default() {
        view.locality = locality;
    }
}

/// Returns the settings of an annotation; none if it cannot be read, about which validation warns.
fn annotated(text: &str) -> HttpSettings {
    let mut settings = ProxySettings::read(text).map(|(settings, _)| settings.http()).unwrap_or_default();
    settings.remove_bad_values();
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_locality_of_a_workload_is_that_of_its_label() {
        let of = |labels: &[(&str, &str)]| {
            let labels =
                labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            Locality::of_workload(&labels).map(|of| [of.region, of.zone, of.subzone].join("|"))
        };
        assert_eq!(of(&[("istio-locality", "eu.a.1")]).as_deref(), Some("eu|a|1"));
        assert_eq!(of(&[("istio-locality", "eu/a.b")]).as_deref(), Some("eu|a.b|"));
        let both = [("istio-locality", "eu.a"), ("topology.istio.io/locality", "us")];
        assert_eq!(of(&both).as_deref(), Some("us||"));
        let empty = [("istio-locality", "eu.a"), ("topology.istio.io/locality", "")];
        assert_eq!(of(&empty).as_deref(), Some("eu|a|"));
        assert_eq!(of(&[("app", "a")]), None);
    }
}
