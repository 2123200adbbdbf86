//! Clusters and endpoints that a request may reach, and the head that they receive.

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use skysail_http::head::{RequestHead, Version};
use skysail_policy::{
    config::{
        Cluster, Endpoints,
        cluster::{Balancer, Discovery, Endpoint, Health, UpstreamProtocol},
        listener::Direction,
        route::{Forward, HeaderOp, HostRewrite, RetryOn, RetryPolicy, Target as Weighted},
        tls::ClientTls,
    },
    headers,
    peer::greeting,
    record::Record,
    route::{self, Found},
};

use super::{
    origins::{ClusterOrigin, Origins, Presented},
    report::{ClusterReport, EndpointReport, RetryReport, TlsReport},
    shares,
};
use crate::{
    request::routing::rewrite_path,
    translate::{ISTIO_H2, ISTIO_HTTP1},
};

/// Name of the TLS settings between sidecars.
const MESH_TLS: &str = "tlsMode-istio";

/// Changes of a head by a route.
#[derive(Debug, Default)]
pub(super) struct HeadChanges {
    pub(super) head: RequestHead,
    pub(super) path: Option<String>,
    pub(super) host: Option<String>,
    pub(super) headers: Vec<String>,
}

/// Returns the head that an endpoint receives, with the changes that the sidecar makes before it forwards a request.
pub(super) fn forwarded(found: &Found<'_>, forward: &Forward, head: &RequestHead) -> HeadChanges {
    let mut now = head.copy();
    let target = found.target.map(|target| &target.headers);
    let record = record(&found.route.name);
    let mut written = Vec::new();
    let ops = [target, Some(&found.route.headers), Some(&found.host.headers), Some(&found.table.headers)];
    for ops in ops.into_iter().flatten() {
        headers::apply_request(&ops.request, &mut now, &record);
        written.extend(ops.request.iter().map(|op| header_words(op, &now)));
    }
    let host = found.target.and_then(|target| target.host.as_ref()).or(forward.host.as_ref());
    let literal = match host {
        Some(HostRewrite::Literal(host)) => Some(host.as_bytes().to_vec()),
        Some(HostRewrite::Header(name)) => now.header(name).map(<[u8]>::to_vec),
        Some(HostRewrite::Auto) | None => None,
    };
    if let Some(host) = literal.as_deref().and_then(skysail_http::head::as_authority) {
        now.set_authority(host);
    }
    if let Some(rewrite) = &forward.rewrite {
        rewrite_path(&mut now, rewrite, &found.route.matches);
    }
    let changed = |before: &str, after: &str| (before != after).then(|| after.to_owned());
    let host = match host {
        Some(HostRewrite::Auto) => Some("host name of the endpoint".to_owned()),
        _ => changed(head.authority(), now.authority()),
    };
    HeadChanges { path: changed(head.path(), now.path()), host, headers: written, head: now }
}

fn header_words(op: &HeaderOp, head: &RequestHead) -> String {
    match op {
        HeaderOp::Remove(name) => format!("-{name}"),
        HeaderOp::Add { name, .. } => {
            let value = head.header(name).unwrap_or_default();
            format!("{name}: {}", String::from_utf8_lossy(value))
        }
    }
}

/// Returns the choices of weighted clusters with their shares.
pub(super) fn weighted(total: u32, targets: &[Weighted]) -> impl Iterator<Item = (&Weighted, f64)> {
    let total = f64::from(total.max(1));
    targets.iter().map(move |target| (target, f64::from(target.weight) / total))
}

/// Protocol of a connection to an endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) enum EndpointProtocol<'a> {
    /// Bytes of a connection, which a tunnel may carry.
    Bytes { is_tunnel: bool },
    /// A request; `istio` selects Istio's ALPN protocols.
    Http { head: &'a RequestHead, istio: bool },
}

/// Describes a cluster. `destination` is the address that the client dialled.
pub(super) fn describe(
    cluster: &Cluster,
    destination: SocketAddr,
    sends: EndpointProtocol<'_>,
    origins: &Origins,
) -> ClusterReport {
    let current: Arc<Endpoints> = cluster.endpoints.load_full();
    let origin = origins.cluster(&cluster.name).cloned().unwrap_or_default();
    let shares = shares::of(cluster, &current);
    let mut endpoints: Vec<EndpointReport> = Vec::new();
    for (priority, (list, shares)) in current.priorities.iter().zip(shares).enumerate() {
        let is_used = shares.iter().any(|share| *share > 0.0);
        endpoints.extend(list.iter().zip(shares).map(|(endpoint, share)| EndpointReport {
            address: endpoint.pipe.as_ref().map_or_else(|| endpoint.address.to_string(), ToString::to_string),
            locality: locality(&current, endpoint),
            priority,
            weight: endpoint.weight,
            health: health(endpoint),
            is_healthy: endpoint.health == Health::Healthy,
            is_ejected: shares::is_ejected(endpoint),
            share,
            is_candidate: share > 0.0,
            unused: match share > 0.0 {
                true => String::new(),
                false => unused(endpoint, priority, is_used),
            },
            tls: tls(cluster, endpoint, sends, origin.presents),
        }));
    }
    let dialled = match cluster.discovery {
        Discovery::OriginalDst(port) => {
            Some(SocketAddr::new(destination.ip(), port.unwrap_or(destination.port())))
        }
        _ => None,
    };
    endpoints.extend(dialled.map(|address| EndpointReport {
        address: address.to_string(),
        locality: String::new(),
        priority: 0,
        weight: 1,
        health: "healthy",
        is_healthy: true,
        is_ejected: false,
        share: 1.0,
        is_candidate: true,
        unused: String::new(),
        tls: tls_report(cluster, cluster.tls.as_deref(), origin.presents, sends),
    }));
    let resolves = match &cluster.discovery {
        Discovery::Dns { names, .. } => {
            names.iter().map(|name| format!("{}:{}", name.host, name.port)).collect()
        }
        Discovery::Dynamic(_) => vec!["the host of the request".to_owned()],
        _ => Vec::new(),
    };
    let ClusterOrigin { config, services, subset, .. } = origin;
    ClusterReport {
        origin: config,
        services,
        subset,
        balancer: balancer(&cluster.balancer),
        is_original_destination: dialled.is_some(),
        resolves,
        connect_timeout: cluster.connect_timeout.as_secs_f64(),
        has_outlier_detection: cluster.outlier.is_some(),
        knows_ejections: false,
        endpoints,
    }
}

fn health(endpoint: &Endpoint) -> &'static str {
    match endpoint.health {
        Health::Draining => "draining",
        _ if shares::is_ejected(endpoint) => "ejected",
        Health::Healthy => "healthy",
        Health::Degraded => "degraded",
        Health::Unhealthy => "unhealthy",
    }
}

/// Returns why no request reaches an endpoint. `is_used`: requests reach other endpoints of its priority.
fn unused(endpoint: &Endpoint, priority: usize, is_used: bool) -> String {
    match shares::health(endpoint) {
        Health::Unhealthy if shares::is_ejected(endpoint) => "ejected by outlier detection".to_owned(),
        Health::Unhealthy => "unhealthy".to_owned(),
        Health::Draining => "draining".to_owned(),
        Health::Healthy | Health::Degraded if !is_used => format!("priority {priority} is not used"),
        Health::Degraded => "degraded, and not used because enough endpoints are healthy".to_owned(),
        Health::Healthy => "its locality has no weight".to_owned(),
    }
}

fn locality(endpoints: &Endpoints, endpoint: &Endpoint) -> String {
    let place = endpoints.localities.get(endpoint.locality as usize).map(|locality| &locality.place);
    let parts = place.into_iter().flatten().map(|part| &**part).filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("/")
}

fn tls(
    cluster: &Cluster,
    endpoint: &Endpoint,
    sends: EndpointProtocol<'_>,
    presents: Presented,
) -> Option<TlsReport> {
    let settings = endpoint.tls.as_ref()?;
    let is = |tls: Option<&Arc<ClientTls>>| tls.is_some_and(|tls| Arc::ptr_eq(tls, settings));
    let is_mesh =
        cluster.transport_matches.iter().any(|found| &*found.name == MESH_TLS && is(found.tls.as_ref()));
    let presents = match is_mesh {
        true => Presented::Workload,
        false if is(cluster.tls.as_ref()) => presents,
        false => Presented::Nothing,
    };
    tls_report(cluster, Some(settings), presents, sends)
}

fn tls_report(
    cluster: &Cluster,
    settings: Option<&ClientTls>,
    presents: Presented,
    sends: EndpointProtocol<'_>,
) -> Option<TlsReport> {
    let settings = settings?;
    let text = |protocol: &[u8]| String::from_utf8_lossy(protocol).into_owned();
    let own = || settings.alpn.iter().map(|protocol| text(protocol)).collect::<Vec<_>>();
    let alpn = match sends {
        EndpointProtocol::Http { head, istio } => {
            let http2 = match cluster.protocol {
                UpstreamProtocol::Http2 => true,
                UpstreamProtocol::AsDownstream => head.version == Version::Http2,
                UpstreamProtocol::Http1 | UpstreamProtocol::Auto => false,
            };
            match (istio, http2) {
                (true, true) => ISTIO_H2.iter().map(|protocol| text(protocol)).collect(),
                (true, false) => ISTIO_HTTP1.iter().map(|protocol| text(protocol)).collect(),
                (false, true) if settings.alpn.is_empty() => vec!["h2".to_owned()],
                _ => own(),
            }
        }
        EndpointProtocol::Bytes { is_tunnel } => {
            let mut alpn = own();
            alpn.retain(|protocol| !is_tunnel || protocol.as_bytes() != greeting::ALPN);
            alpn
        }
    };
    let server_name = match (&settings.sni, sends) {
        (Some(name), _) => name.to_str().into_owned(),
        (None, EndpointProtocol::Http { head, .. }) if cluster.auto_sni.is_some() => {
            route::without_port(head.authority()).to_owned()
        }
        _ => String::new(),
    };
    let (is_mesh, has_certificate) = (presents == Presented::Workload, presents == Presented::Other);
    Some(TlsReport { server_name, alpn, is_mesh, has_certificate })
}

fn balancer(balancer: &Balancer) -> &'static str {
    match balancer {
        Balancer::RoundRobin => "round robin",
        Balancer::LeastRequest { .. } => "least request",
        Balancer::PeakEwma { .. } => "peak EWMA",
        Balancer::Random => "random",
        Balancer::RingHash { .. } => "ring hash",
        Balancer::Maglev(_) => "Maglev",
        Balancer::OriginalDst => "original destination",
    }
}

/// Describes a retry policy.
pub(super) fn retries(policy: &RetryPolicy) -> RetryReport {
    RetryReport {
        retries: policy.retries,
        on: conditions(&policy.on),
        per_try_timeout: policy.per_try_timeout.map(|timeout| timeout.as_secs_f64()),
    }
}

fn conditions(on: &RetryOn) -> Vec<&'static str> {
    let all = [
        (on.server_error, "5xx"),
        (on.gateway_error, "gateway-error"),
        (on.reset, "reset"),
        (on.reset_before_request, "reset-before-request"),
        (on.connect_failure, "connect-failure"),
        (on.retriable_4xx, "retriable-4xx"),
        (on.refused_stream, "refused-stream"),
        (on.retriable_status_codes, "retriable-status-codes"),
        (on.retriable_headers, "retriable-headers"),
        (on.envoy_ratelimited, "envoy-ratelimited"),
        (on.grpc_cancelled, "cancelled"),
        (on.grpc_deadline_exceeded, "deadline-exceeded"),
        (on.grpc_internal, "internal"),
        (on.grpc_resource_exhausted, "resource-exhausted"),
        (on.grpc_unavailable, "unavailable"),
    ];
    all.into_iter().filter(|(set, _)| *set).map(|(_, name)| name).collect()
}

/// Returns a record with nothing but the route's name, for header operations.
fn record(route_name: &str) -> Record<'_> {
    Record { attempts: 1, route_name, ..Record::new(Direction::Outbound, SystemTime::UNIX_EPOCH) }
}
