//! Validation of the networks of the mesh.

use super::{Code, Finding, Findings, is_dns_name, port};
use crate::api::mesh_networks::{AddressBlock, MeshNetworkGateway, MeshNetworks, NetworkEndpoints};

/// Checks the networks.
pub(crate) fn mesh_networks(spec: &MeshNetworks) -> Vec<Finding> {
    let mut findings = Findings::default();
    for (name, network) in &spec.networks {
        let field = skysail_yaml::join("networks", name);
        for (index, of) in network.endpoints.iter().enumerate() {
            endpoints(of, &format!("{field}.endpoints[{index}]"), &mut findings);
        }
        for (index, of) in network.gateways.iter().enumerate() {
            gateway(of, &format!("{field}.gateways[{index}]"), &mut findings);
        }
    }
    findings.done()
}

fn endpoints(of: &NetworkEndpoints, field: &str, findings: &mut Findings) {
    if of.from_cidr.is_empty() == of.from_registry.is_empty() {
        let remedy = "set either fromCidr or fromRegistry";
        findings.add(
            Code::ExclusiveFields,
            field,
            "must have exactly one of fromCidr and fromRegistry",
            remedy,
        );
    } else if !of.from_cidr.is_empty() && AddressBlock::parse(&of.from_cidr).is_none() {
        let message = format!("{:?} is not a block of addresses", of.from_cidr);
        let remedy = "write a block such as 10.0.0.0/8";
        findings.add(Code::InvalidAddress, format!("{field}.fromCidr"), message, remedy);
    }
}

fn gateway(of: &MeshNetworkGateway, field: &str, findings: &mut Findings) {
    let (service, address) = (&of.registry_service_name, &of.address);
    if service.is_empty() == address.is_empty() {
        let message = "must have exactly one of registryServiceName and address";
        findings.add(Code::ExclusiveFields, field, message, "set either registryServiceName or address");
    } else if !(service.is_empty() || is_dns_name(service) && service.contains('.')) {
        let message = format!("{service:?} is not the full name of a Service");
        let remedy = "write NAME.NAMESPACE.svc.cluster.local";
        findings.add(Code::InvalidHost, format!("{field}.registryServiceName"), message, remedy);
    } else if !address.is_empty() && address.parse::<std::net::IpAddr>().is_err() && !is_dns_name(address) {
        let message = format!("{address:?} is neither an IP address nor a host name");
        let remedy = "write an IP address or a full host name";
        findings.add(Code::InvalidAddress, format!("{field}.address"), message, remedy);
    }
    port(of.port, &format!("{field}.port"), findings);
    if !of.locality.is_empty() {
        let field = format!("{field}.locality");
        findings.add(Code::NoEffect, field, "has no effect, as in Istio", "remove it");
    }
}
