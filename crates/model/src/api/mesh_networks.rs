//! Networks of the mesh: key `meshNetworks` of ConfigMap `istio` in namespace `istio-system`. Source:
//! `istio.mesh.v1alpha1.MeshNetworks`.

use std::{collections::BTreeMap, net::IpAddr};

use serde::Deserialize;

/// Key in the ConfigMap.
pub const KEY: &str = "meshNetworks";

/// Networks by name. Workloads of one network reach each other directly.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct MeshNetworks {
    /// Networks by name.
    pub networks: BTreeMap<String, MeshNetwork>,
}

/// A network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct MeshNetwork {
    /// Workloads of the network.
    pub endpoints: Vec<NetworkEndpoints>,
    /// Gateways through which other networks reach its workloads.
    pub gateways: Vec<MeshNetworkGateway>,
}

/// Workloads of a network: by address or by cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NetworkEndpoints {
    /// Block of addresses.
    pub from_cidr: String,
    /// Cluster.
    pub from_registry: String,
}

/// Gateway of a network: by address or by Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct MeshNetworkGateway {
    /// Full name of a Service in a cluster of the network, which has external addresses.
    pub registry_service_name: String,
    /// IP address or DNS name.
    pub address: String,
    /// Port; for a Service, the port of the Service.
    pub port: u32,
    /// Locality; no effect, as in Istio.
    pub locality: String,
}

impl MeshNetworks {
    /// Returns whether a Service is a gateway.
    pub(crate) fn names_service(&self, host: &str) -> bool {
        let mut gateways = self.networks.values().flat_map(|network| &network.gateways);
        gateways.any(|gateway| gateway.registry_service_name == host)
    }
}

/// Block of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AddressBlock {
    /// Number of leading bits that the addresses have in common.
    length: u8,
    first: IpAddr,
}

impl AddressBlock {
    /// Parses `ADDRESS/LENGTH`; `None` for another form.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (first, length) = text.split_once('/')?;
        let (first, length): (IpAddr, u8) = (first.parse().ok()?, length.parse().ok()?);
        let longest = if first.is_ipv4() { 32 } else { 128 };
        (length <= longest).then_some(Self { length, first })
    }

    /// Returns whether the block contains an address.
    pub(crate) fn contains(&self, ip: IpAddr) -> bool {
        let length = u32::from(self.length);
        match (self.first, ip) {
            (IpAddr::V4(first), IpAddr::V4(ip)) => (first.to_bits() ^ ip.to_bits()).leading_zeros() >= length,
            (IpAddr::V6(first), IpAddr::V6(ip)) => (first.to_bits() ^ ip.to_bits()).leading_zeros() >= length,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_contains_addresses_with_its_leading_bits() {
        let contains =
            |block: &str, ip: &str| AddressBlock::parse(block).unwrap().contains(ip.parse().unwrap());
        assert!(contains("10.1.0.0/16", "10.1.255.7"));
        assert!(!contains("10.1.0.0/16", "10.2.0.1"));
        assert!(contains("0.0.0.0/0", "192.0.2.1"));
        assert!(contains("10.0.0.1/32", "10.0.0.1") && !contains("10.0.0.1/32", "10.0.0.0"));
        assert!(contains("fd00::/8", "fd12::1") && !contains("fd00::/8", "10.0.0.1"));
        for text in ["10.0.0.0", "10.0.0.0/33", "fd00::/129", "x/8"] {
            assert_eq!(AddressBlock::parse(text), None, "{text}");
        }
    }
}
