//! NDS: the names that a proxy's DNS server answers.

use skysail_xds::istio::{NameInfo, NameTable};

use super::Scope;
use crate::{
    Role,
    api::{Service, Typed},
};

/// Returns the name table of a proxy. Only sidecars have a DNS server.
pub(super) fn compile(scope: &Scope<'_>, services: &[&Typed<Service>]) -> NameTable {
    let table = match scope.role {
        Role::Router | Role::Grpc => Default::default(),
        Role::Sidecar => services
            .iter()
            .map(|service| (service.fqdn(), name_info(scope, service)))
            .filter(|(_, info)| !info.ips.is_empty())
            .collect(),
    };
    NameTable { table }
}

/// Returns a service's virtual addresses, or those of its ready endpoints if it is headless.
fn name_info(scope: &Scope<'_>, service: &Typed<Service>) -> NameInfo {
    let ips = if service.spec.headless {
        let port = service.spec.ports.first();
        let endpoints = port.map(|port| scope.world.endpoints(service, port)).unwrap_or_default();
        let ready = endpoints.iter().filter(|endpoint| endpoint.ready);
        ready.filter_map(|endpoint| endpoint.address.ip()).map(|ip| ip.to_string()).collect()
    } else {
        service.spec.cluster_ips.iter().map(ToString::to_string).collect()
    };
    if service.spec.entry_host.is_some() {
        return NameInfo { ips, registry: "External".into(), ..NameInfo::default() };
    }
    NameInfo {
        ips,
        registry: "Kubernetes".into(),
        shortname: service.meta.name.clone(),
        namespace: service.meta.namespace.clone(),
    }
}
