//! Locality of an endpoint, and the labels by which rules name it.

use super::Labels;

/// Label with the name of a Kubernetes node.
pub const HOSTNAME: &str = "kubernetes.io/hostname";
/// Label with the network of a workload, and of the workloads of a namespace.
pub const NETWORK: &str = "topology.istio.io/network";
/// Label with the Kubernetes cluster of a workload.
pub(crate) const CLUSTER: &str = "topology.istio.io/cluster";
/// Label with the region of a node.
pub(crate) const REGION: &str = "topology.kubernetes.io/region";
/// Label with the zone of a node.
pub(crate) const ZONE: &str = "topology.kubernetes.io/zone";
/// Label with a part of the zone of a node.
pub(crate) const SUBZONE: &str = "topology.istio.io/subzone";

/// Region, zone and sub-zone of a node, a workload or a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Locality {
    /// Region.
    pub region: String,
    /// Zone.
    pub zone: String,
    /// Sub-zone.
    pub subzone: String,
}

/// Returns whether endpoints have a label in addition to those of their pods. Source: Istio's `AugmentLabels`.
pub(crate) fn is_added(label: &str) -> bool {
    matches!(label, REGION | ZONE | SUBZONE | HOSTNAME | CLUSTER | NETWORK)
}

impl Locality {
    /// Parses `REGION/ZONE/SUBZONE`; further parts may be missing.
    pub fn parse(text: &str) -> Self {
        let mut parts = text.splitn(3, '/').map(str::to_owned);
        let mut part = || parts.next().unwrap_or_default();
        Self { region: part(), zone: part(), subzone: part() }
    }

    /// Returns the locality in the label of a workload, where dots may separate its parts. Source: Istio.
    pub fn of_workload(labels: &Labels) -> Option<Self> {
        let names = ["topology.istio.io/locality", "istio-locality"];
        let mut texts = names.iter().filter_map(|name| labels.get(*name)).filter(|text| !text.is_empty());
        let text = texts.next()?;
        let text = if text.contains('/') { text.clone() } else { text.replace('.', "/") };
        Some(Self::parse(&text))
    }

    /// Returns the value of a label of a locality; `None` for other labels and unknown parts.
    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        let part = match name {
            REGION => &self.region,
            ZONE => &self.zone,
            SUBZONE => &self.subzone,
            _ => return None,
        };
        Some(part.as_str()).filter(|part| !part.is_empty())
    }

    /// Returns the locality in the labels of a Node.
    pub(super) fn from_labels(labels: &Labels) -> Self {
        let label =
            |names: &[&str]| names.iter().find_map(|name| labels.get(*name)).cloned().unwrap_or_default();
        Self {
            region: label(&[REGION, "failure-domain.beta.kubernetes.io/region"]),
            zone: label(&[ZONE, "failure-domain.beta.kubernetes.io/zone"]),
            subzone: label(&[SUBZONE]),
        }
    }
}
