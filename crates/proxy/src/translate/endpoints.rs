//! Translates endpoints.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use skysail_xds::envoy::pb::{
    envoy::config::{
        core::v3::{Address, HealthStatus, Metadata, address, socket_address},
        endpoint::v3::{
            ClusterLoadAssignment, Endpoint as EndpointProto, LbEndpoint, lb_endpoint::HostIdentifier,
        },
    },
    google::protobuf::value::Kind,
};

use super::{At as _, Reject, Result, cluster::labels, number};
use skysail_http::map::Map;
use skysail_policy::config::{
    Cluster, Endpoint, Endpoints,
    cluster::{DnsName, Health, Locality, TransportMatch, Workload, pipe_address},
    tls::ClientTls,
};
use skysail_policy::state::health::EndpointState;

/// Maximum priority, as in Envoy.
const MAX_PRIORITY: u32 = 128;

/// Translates an assignment. The cluster determines each endpoint's TLS settings.
pub(super) fn translate(proto: &ClusterLoadAssignment, cluster: &Cluster) -> Result<Endpoints> {
    let mut endpoints = empty(proto)?;
    let tracks = cluster.endpoint_states();
    for (index, locality) in proto.endpoints.iter().enumerate() {
        for (number, lb) in locality.lb_endpoints.iter().enumerate() {
            let one = endpoint(lb, index, cluster, &tracks).at(format_args!("lb_endpoints[{number}]"));
            let one = one.at(format_args!("endpoints[{index}]"))?;
            endpoints.priorities[locality.priority as usize].push(Arc::new(one));
        }
    }
    Ok(endpoints)
}

/// Returns the priorities and localities of an assignment, without endpoints.
pub(super) fn empty(proto: &ClusterLoadAssignment) -> Result<Endpoints> {
    let mut endpoints = Endpoints::default();
    if let Some(factor) = proto.policy.as_ref().and_then(|policy| number(policy.overprovisioning_factor)) {
        if factor == 0 {
            return Err(Reject::new("must be greater than 0").at_field("policy.overprovisioning_factor"));
        }
        endpoints.overprovisioning = factor;
    }
    for (index, locality) in proto.endpoints.iter().enumerate() {
        let path = format_args!("endpoints[{index}]").to_string();
        if locality.priority > MAX_PRIORITY {
            return Err(Reject::new(format!("must be at most {MAX_PRIORITY}"))
                .at_field("priority")
                .at_field(path));
        }
        let wanted = locality.priority as usize + 1;
        if endpoints.priorities.len() < wanted {
            endpoints.priorities.resize_with(wanted, Vec::new);
        }
        let place = locality.locality.clone().unwrap_or_default();
        endpoints.localities.push(Locality {
            place: [place.region, place.zone, place.sub_zone].map(String::into_boxed_str),
            weight: number(locality.load_balancing_weight).unwrap_or(0),
        });
    }
    Ok(endpoints)
}

/// Returns the host names of an assignment, for clusters that resolve them.
pub(super) fn names(proto: &ClusterLoadAssignment) -> Result<Vec<DnsName>> {
    let mut names = Vec::new();
    for (locality, group) in (0..).zip(&proto.endpoints) {
        for lb in &group.lb_endpoints {
            let address = plain(lb)?.address.as_ref();
            let (host, port) = host_and_port(address).at("address")?;
            let weight = number(lb.load_balancing_weight).unwrap_or(1).max(1);
            let (priority, health) = (group.priority as usize, health(lb));
            names.push(DnsName { host: host.into(), port, priority, weight, health, locality });
        }
    }
    Ok(names)
}

/// Returns host and port of a TCP address.
pub(super) fn host_and_port(address: Option<&Address>) -> Result<(&str, u16)> {
    let socket = match address.and_then(|address| address.address.as_ref()) {
        Some(address::Address::SocketAddress(socket)) => socket,
        Some(address::Address::Pipe(_)) => {
            return Err(Reject::new(
                "a Unix domain socket is supported only for listeners and for endpoints of STATIC and EDS clusters",
            ));
        }
        Some(address::Address::EnvoyInternalAddress(_)) => {
            return Err(Reject::new("internal listeners are not supported"));
        }
        None => return Err(Reject::new("must contain an address")),
    };
    if socket.protocol() != socket_address::Protocol::Tcp {
        return Err(Reject::new("only TCP is supported").at_field("socket_address.protocol"));
    }
    match socket.port_specifier {
        Some(socket_address::PortSpecifier::PortValue(port)) => match u16::try_from(port) {
            Ok(port) => Ok((&socket.address, port)),
            Err(_) => Err(Reject::new(format!("{port} is not a port")).at_field("socket_address.port_value")),
        },
        _ => Err(Reject::new("must be given").at_field("socket_address.port_value")),
    }
}

/// Returns IP address and port of a TCP address.
pub(super) fn ip_and_port(address: Option<&Address>) -> Result<SocketAddr> {
    let (host, port) = host_and_port(address)?;
    let ip: IpAddr = host.parse().map_err(|_| {
        Reject::new(format!("{host:?} is not an IP address")).at_field("socket_address.address")
    })?;
    Ok(SocketAddr::new(ip, port))
}

/// Maximum path length in bytes: the operating system's address has room for it and a terminating zero.
const MAX_PATH: usize = 107;

/// Returns the path of a Unix domain socket; `None` for any other address.
pub(super) fn pipe(address: Option<&Address>) -> Result<Option<&str>> {
    let Some(address::Address::Pipe(pipe)) = address.and_then(|address| address.address.as_ref()) else {
        return Ok(None);
    };
    match pipe.path.as_str() {
        "" => Err(Reject::new("must be given").at_field("pipe.path")),
        path if path.len() > MAX_PATH => {
            Err(Reject::new(format!("must be at most {MAX_PATH} bytes long")).at_field("pipe.path"))
        }
        path if path.contains('\0') => Err(Reject::new("must not contain a zero byte").at_field("pipe.path")),
        path => Ok(Some(path)),
    }
}

fn health(endpoint: &LbEndpoint) -> Health {
    match endpoint.health_status() {
        HealthStatus::Unknown | HealthStatus::Healthy => Health::Healthy,
        HealthStatus::Degraded => Health::Degraded,
        HealthStatus::Draining => Health::Draining,
        HealthStatus::Unhealthy | HealthStatus::Timeout => Health::Unhealthy,
    }
}

fn plain(lb: &LbEndpoint) -> Result<&EndpointProto> {
    match &lb.host_identifier {
        Some(HostIdentifier::Endpoint(endpoint)) => Ok(endpoint),
        _ => Err(Reject::new("named endpoints are not supported").at_field("endpoint_name")),
    }
}

fn endpoint(
    lb: &LbEndpoint,
    locality: usize,
    cluster: &Cluster,
    tracks: &Map<SocketAddr, Arc<EndpointState>>,
) -> Result<Endpoint> {
    let proto = plain(lb)?;
    let pipe = pipe(proto.address.as_ref()).at("endpoint.address")?;
    let address = match pipe {
        Some(path) => pipe_address(path),
        None => ip_and_port(proto.address.as_ref()).at("endpoint.address")?,
    };
    if pipe.is_some() && !proto.additional_addresses.is_empty() {
        let reason = "a Unix domain socket has no additional addresses: remove them";
        return Err(Reject::new(reason).at_field("endpoint.additional_addresses"));
    }
    let others = proto.additional_addresses.iter().map(|other| ip_and_port(other.address.as_ref()));
    Ok(Endpoint {
        address,
        pipe: pipe.map(Into::into),
        others: others.collect::<Result<_>>().at("endpoint.additional_addresses")?,
        state: cluster.endpoint_state(address, tracks),
        weight: number(lb.load_balancing_weight).unwrap_or(1).max(1),
        health: health(lb),
        locality: u32::try_from(locality).unwrap_or(u32::MAX),
        tls: tls(cluster, lb.metadata.as_ref()),
        workload: lb.metadata.as_ref().and_then(workload),
        hostname: (!proto.hostname.is_empty()).then(|| proto.hostname.as_str().into()),
    })
}

/// Returns the TLS settings of the first match whose labels the endpoint has; otherwise the cluster's.
fn tls(cluster: &Cluster, metadata: Option<&Metadata>) -> Option<Arc<ClientTls>> {
    let labels = metadata
        .and_then(|metadata| metadata.filter_metadata.get("envoy.transport_socket_match"))
        .map(labels)
        .unwrap_or_default();
    let holds = |wanted: &&TransportMatch| wanted.labels.iter().all(|label| labels.contains(label));
    match cluster.transport_matches.iter().find(holds) {
        Some(found) => found.tls.clone(),
        None => cluster.tls.clone(),
    }
}

/// Parses `istio.workload`: `<name>;<namespace>;<canonical name>;<revision>;<cluster>`.
fn workload(metadata: &Metadata) -> Option<Arc<Workload>> {
    let value = metadata.filter_metadata.get("istio")?.fields.get("workload")?;
    let Some(Kind::StringValue(text)) = &value.kind else { return None };
    let mut parts = text.split(';');
    let mut next = || -> Arc<str> { parts.next().unwrap_or_default().into() };
    Some(Arc::new(Workload {
        name: next(),
        namespace: next(),
        canonical_name: next(),
        canonical_revision: next(),
        cluster: next(),
        ..Workload::default()
    }))
}
