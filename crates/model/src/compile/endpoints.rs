//! EDS: the addresses of each outbound cluster, by locality.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
};

use skysail_core::ClusterName;
use skysail_xds::istio;

use super::{
    Scope,
    locality::{self, LocalityGroup},
    networks::{self, ClusterForm, TLS_MATCH},
    pb::{address, core, endpoint, fields, uint32},
    policy::Effective,
};
use crate::{
    Role,
    api::{
        Address, DestinationRule, MtlsMode, Resolution, Service, ServicePort, Typed,
        destination_rule::ClientTlsMode, kube::Locality, workload::WORKLOAD_ENTRY,
    },
    world::Endpoint,
};

/// Returns the assignments of a service port: that of the whole service, then that of each subset.
pub(super) fn assignments(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    port: &ServicePort,
    rule: Option<&Typed<DestinationRule>>,
    form: ClusterForm,
) -> Vec<endpoint::ClusterLoadAssignment> {
    let host = service.fqdn();
    let mut ready: Vec<Endpoint> =
        scope.world.endpoints(service, port).into_iter().filter(|endpoint| endpoint.ready).collect();
    if are_resolved(scope, service) {
        ready = resolve(scope, service, &ready);
    }
    if scope.role == Role::Grpc {
        // Proxyless gRPC clients do not resolve the names of endpoints.
        ready.retain(|endpoint| endpoint.address.ip().is_some());
    }
    let rule = rule.map(|rule| &rule.spec);
    let mut whole = rule.map(|rule| Effective::of_rule(rule, port.port)).unwrap_or_default();
    // As in istiod: EDS does not use the outlier detection of the mesh to prefer near endpoints.
    if service.spec.entry_host.as_ref().is_some_and(|entry_host| entry_host.resolution.is_dns()) {
        whole = whole.or(&scope.world.mesh().default_traffic_policy);
    }
    let name = ClusterName::outbound(port.port, "", &host);
    let of = |name: &ClusterName<'_>, effective: &Effective<'_>, members: Vec<&Endpoint>| {
        assignment(scope, service, &Target { name: form.name(name), form }, effective, members)
    };
    let mut made = vec![of(&name, &whole, ready.iter().collect())];
    if let Some(rule) = rule {
        made.extend(rule.subsets.iter().map(|subset| {
            let effective = whole.of_subset(subset, port.port);
            let members = ready.iter().filter(|endpoint| {
                endpoint.has_labels(&subset.labels, scope.cluster_id, || scope.network_of(endpoint))
            });
            of(&ClusterName::outbound(port.port, &subset.name, &host), &effective, members.collect())
        }));
    }
    made
}

/// Returns whether the control plane resolves the names of a service's endpoints for this scope.
pub(super) fn are_resolved(scope: &Scope<'_>, service: &Typed<Service>) -> bool {
    let entry_host = service.spec.entry_host.as_ref();
    scope.takes_resolved_addresses
        && entry_host.is_some_and(|entry_host| entry_host.resolution.is_dns() && !entry_host.by_proxy)
}

/// Replaces each endpoint with a name by endpoints with the addresses of the name. Only addresses of the
/// client's IP families are used.
fn resolve(scope: &Scope<'_>, service: &Typed<Service>, endpoints: &[Endpoint]) -> Vec<Endpoint> {
    let one = service.spec.entry_host.as_ref().is_some_and(|it| it.resolution == Resolution::DnsRoundRobin);
    let mut made: Vec<Endpoint> = Vec::new();
    for endpoint in endpoints {
        let Address::Name(name) = &endpoint.address else {
            made.push(endpoint.clone());
            continue;
        };
        let at = |ip| Endpoint { address: Address::Ip(ip), name: Some(Arc::clone(name)), ..endpoint.clone() };
        let Some(resolved) = scope.world.resolved(name) else { continue };
        // A proxy without a known address is treated as one with IPv4.
        let reachable = |ip: &&IpAddr| if ip.is_ipv6() { scope.ipv6 } else { scope.ipv4 || !scope.ipv6 };
        let addresses = if one { &resolved.current } else { &resolved.addresses };
        let addresses = addresses.iter().filter(reachable).take(if one { 1 } else { usize::MAX });
        made.extend(addresses.map(|ip| at(*ip)));
    }
    let mut seen = HashSet::new();
    made.retain(|endpoint| {
        endpoint.address == Address::Hidden || seen.insert((endpoint.address.clone(), endpoint.port))
    });
    made
}

/// Returns whether the endpoint comes from a ServiceEntry.
fn is_entry_endpoint(endpoint: &Endpoint) -> bool {
    endpoint.pod.as_ref().is_some_and(|pod| pod.spec.workload.kind == WORKLOAD_ENTRY)
}

/// Returns the sum of the weights. The addresses of one name count once; they are adjacent in the list.
fn weight(members: &[&Endpoint]) -> u32 {
    let same = |one: &&Endpoint, other: &&Endpoint| match (&one.pod, &other.pod) {
        (Some(one_pod), Some(other_pod)) => is_entry_endpoint(one) && Arc::ptr_eq(one_pod, other_pod),
        _ => false,
    };
    members.chunk_by(same).map(|of_name| of_name[0].weight).fold(0, u32::saturating_add)
}

/// Cluster of an assignment.
struct Target {
    name: String,
    form: ClusterForm,
}

fn assignment<'a>(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    target: &Target,
    effective: &Effective<'_>,
    members: Vec<&'a Endpoint>,
) -> endpoint::ClusterLoadAssignment {
    // TLS settings in the DestinationRule apply to all endpoints, unless their mode is ISTIO_MUTUAL.
    // Otherwise each endpoint's metadata selects mutual TLS or plain text.
    let by_rule = effective.tls.is_some_and(|settings| settings.mode != ClientTlsMode::IstioMutual);
    let mut localities: BTreeMap<&Locality, Vec<&Endpoint>> = BTreeMap::new();
    for member in members {
        localities.entry(&member.locality).or_default().push(member);
    }
    let group = |(locality, members): (&'a Locality, Vec<&'a Endpoint>)| LocalityGroup {
        made: endpoint::LocalityLbEndpoints {
            locality: Some(core::Locality {
                region: locality.region.clone(),
                zone: locality.zone.clone(),
                sub_zone: locality.subzone.clone(),
            }),
            load_balancing_weight: uint32(weight(&members)),
            lb_endpoints: members.iter().map(|member| lb_endpoint(scope, member, by_rule)).collect(),
            ..Default::default()
        },
        locality,
        members: members.into_iter().map(Cow::Borrowed).collect(),
    };
    let mut groups = networks::through_gateways(scope, localities.into_iter().map(group).collect());
    if target.form == ClusterForm::Forwarded {
        groups = networks::mutual_only(groups);
    }
    let groups = locality::apply(scope, service, effective, groups);
    endpoint::ClusterLoadAssignment {
        cluster_name: target.name.clone(),
        endpoints: groups.into_iter().map(|group| group.made).collect(),
        ..Default::default()
    }
}

/// Returns the assignment of one address.
pub(super) fn single(cluster: &str, address: core::Address) -> endpoint::ClusterLoadAssignment {
    let host = endpoint::Endpoint { address: Some(address), ..Default::default() };
    let lb_endpoint = endpoint::LbEndpoint {
        host_identifier: Some(endpoint::lb_endpoint::HostIdentifier::Endpoint(host)),
        ..Default::default()
    };
    endpoint::ClusterLoadAssignment {
        cluster_name: cluster.to_owned(),
        endpoints: vec![endpoint::LocalityLbEndpoints {
            lb_endpoints: vec![lb_endpoint],
            ..Default::default()
        }],
        ..Default::default()
    }
}

fn lb_endpoint(scope: &Scope<'_>, member: &Endpoint, by_rule: bool) -> endpoint::LbEndpoint {
    let at = match &member.address {
        Address::Ip(ip) => address(ip.to_string(), member.port),
        Address::Name(name) => address(name.to_string(), member.port),
        Address::Unix(path) => core::Address {
            address: Some(core::address::Address::Pipe(core::Pipe {
                path: path.to_string(),
                ..Default::default()
            })),
        },
        // Replaced by the gateways of its network.
        Address::Hidden => core::Address::default(),
    };
    // Endpoints of a ServiceEntry are not probed.
    let health =
        if is_entry_endpoint(member) { core::HealthStatus::Unknown } else { core::HealthStatus::Healthy };
    endpoint::LbEndpoint {
        health_status: health as i32,
        metadata: Some(metadata(scope, member, by_rule)),
        load_balancing_weight: uint32(member.weight),
        host_identifier: Some(endpoint::lb_endpoint::HostIdentifier::Endpoint(endpoint::Endpoint {
            address: Some(at),
            // Routes may set the host of requests to this name. A proxy that resolves names itself knows it
            // without this field.
            hostname: member.name.as_deref().unwrap_or_default().to_owned(),
            ..Default::default()
        })),
    }
}

/// Returns the metadata of an endpoint: whether it takes mutual TLS, and its workload for metrics.
fn metadata(scope: &Scope<'_>, member: &Endpoint, by_rule: bool) -> core::Metadata {
    let mut filter_metadata =
        HashMap::from([("istio".to_owned(), fields([("workload", istio::string(workload(scope, member)))]))]);
    if !by_rule && takes_mtls(scope, member) {
        filter_metadata.insert(TLS_MATCH.to_owned(), fields([("tlsMode", istio::string("istio"))]));
    }
    core::Metadata { filter_metadata, ..Default::default() }
}

/// Returns whether a service port has endpoints and every one takes mutual TLS.
pub(super) fn all_take_mtls(scope: &Scope<'_>, service: &Typed<Service>, port: &ServicePort) -> bool {
    let endpoints = scope.world.endpoints(service, port);
    !endpoints.is_empty() && endpoints.iter().all(|member| takes_mtls(scope, member))
}

/// Returns whether the endpoint has a sidecar and no policy disables mutual TLS on the port.
fn takes_mtls(scope: &Scope<'_>, member: &Endpoint) -> bool {
    member.has_sidecar()
        && member.pod.as_ref().is_some_and(|pod| {
            let mode = scope.world.peer_mode(&pod.meta.namespace, &pod.meta.labels, member.port);
            mode != MtlsMode::Disable
        })
}

/// Formats `WORKLOAD;NAMESPACE;CANONICAL NAME;CANONICAL REVISION;CLUSTER`; istiod omits the revision `latest`.
fn workload(scope: &Scope<'_>, member: &Endpoint) -> String {
    let Some(pod) = &member.pod else { return format!(";;;;{}", scope.cluster_id) };
    let revision = pod.canonical_revision();
    let revision = if revision == "latest" { "" } else { revision };
    let (name, namespace) = (&pod.spec.workload.name, &pod.meta.namespace);
    format!("{name};{namespace};{};{revision};{}", pod.canonical_name(), scope.cluster_id)
}
