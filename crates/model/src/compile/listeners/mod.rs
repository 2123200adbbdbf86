//! LDS: the listeners of a sidecar. `outbound` holds those for its workload's requests, `inbound` those for requests to
//! it.

mod inbound;
mod l4;
mod outbound;

use std::collections::{BTreeMap, BTreeSet};

use super::{
    filters::FilterSettings,
    pb::{self, listener},
};
use crate::{
    ProxyView, World,
    api::{
        MtlsMode, Protocol, Service, ServicePort, Sidecar, Typed,
        destination_rule::ConnectionPool,
        kube::TargetPort,
        sidecar::{CaptureMode, IngressListener},
    },
};

pub(super) use inbound::{compile as inbound, with_socket as inbound_with_socket};
pub use l4::sidecar_l4_field;
pub(super) use l4::{conditions as l4_conditions, has_names, tls_field};
pub use outbound::Outline;
pub(super) use outbound::{compile as outbound, is_everywhere, named, outline};

/// A port of the workload with the services that lead to it.
pub(super) struct InboundPort<'a> {
    /// Container port.
    pub(super) port: u16,
    /// Protocol.
    pub(super) protocol: Protocol,
    /// Mode of mutual TLS.
    pub(super) mode: MtlsMode,
    /// Services and their ports; at least one, unless a Sidecar defines the port.
    pub(super) services: Vec<(&'a Typed<Service>, &'a ServicePort)>,
    /// Sidecar that defines the port, with the definition.
    pub(super) ingress: Option<(&'a Typed<Sidecar>, &'a IngressListener)>,
    /// Limits of connections to the workload by a Sidecar.
    pub(super) pool: Option<&'a ConnectionPool>,
}

impl InboundPort<'_> {
    /// Returns the port of the first service, or that of the Sidecar.
    pub(super) fn service_port(&self) -> u16 {
        match (self.ingress, self.services.first()) {
            (None, Some((_, port))) => port.port,
            _ => self.port,
        }
    }

    /// Returns the full name of the first service, or the name of the Sidecar.
    pub(super) fn host(&self) -> String {
        match (self.ingress, self.services.first()) {
            (Some((sidecar, _)), _) => format!("{}.{}", sidecar.meta.name, sidecar.meta.namespace),
            (None, Some((service, _))) => service.fqdn(),
            (None, None) => String::new(),
        }
    }

    /// Returns whether the port has a listener with a socket of its own.
    pub(super) fn has_socket(&self) -> bool {
        self.ingress.is_some_and(|(_, ingress)| ingress.capture_mode == CaptureMode::None)
    }
}

/// Returns the ports of a workload: those of its Sidecar, otherwise those that services lead to, by number. The first
/// service defines the protocol.
pub(super) fn inbound_ports<'a>(world: &'a World, view: &ProxyView) -> Vec<InboundPort<'a>> {
    let sidecar = world.sidecar(&view.namespace, &view.labels);
    let pool = sidecar.and_then(|sidecar| sidecar.spec.inbound_connection_pool.as_ref());
    let of_services = service_ports(world, view, pool);
    match sidecar {
        Some(sidecar) if !sidecar.spec.ingress.is_empty() => {
            ingress_ports(world, view, sidecar, &of_services)
        }
        // The workload itself listens on these ports.
        _ if !view.intercepts => Vec::new(),
        _ => of_services,
    }
}

/// Returns the ports that a Sidecar defines, the first of each number.
fn ingress_ports<'a>(
    world: &World,
    view: &ProxyView,
    sidecar: &'a Typed<Sidecar>,
    of_services: &[InboundPort<'a>],
) -> Vec<InboundPort<'a>> {
    let mut ports: Vec<InboundPort<'a>> = Vec::new();
    for ingress in &sidecar.spec.ingress {
        let Some(number) = ingress.port.port() else { continue };
        if ports.iter().any(|known| known.port == number) {
            continue;
        }
        let same = of_services.iter().find(|port| port.port == number);
        let own_pool = ingress.connection_pool.as_ref();
        ports.push(InboundPort {
            port: number,
            protocol: ingress.port.parsed_protocol().unwrap_or(Protocol::Tcp),
            mode: world.peer_mode(&view.namespace, &view.labels, number),
            services: same.map(|port| port.services.clone()).unwrap_or_default(),
            ingress: Some((sidecar, ingress)),
            pool: own_pool.or(sidecar.spec.inbound_connection_pool.as_ref()),
        });
    }
    ports
}

fn service_ports<'a>(
    world: &'a World,
    view: &ProxyView,
    pool: Option<&'a ConnectionPool>,
) -> Vec<InboundPort<'a>> {
    let mut found: Vec<(u16, &'a Typed<Service>, &'a ServicePort)> = Vec::new();
    for (name, port, target) in &view.addressed {
        if let Some(service) = world.service_named(&view.namespace, name)
            && let Some(port) = service.spec.port(*port)
        {
            found.push((*target, service, port));
        }
    }
    let by_address: BTreeSet<&str> = view.addressed.iter().map(|(name, ..)| name.as_str()).collect();
    let by_label = world.services_selecting(&view.namespace, &view.labels).into_iter();
    for service in by_label.filter(|service| !by_address.contains(service.meta.name.as_str())) {
        for port in &service.spec.ports {
            let number = match &port.target {
                TargetPort::Number(number) => Some(*number),
                TargetPort::Name(name) => view.named_ports.get(name).copied(),
            };
            found.extend(number.map(|number| (number, &**service, port)));
        }
    }
    // As in Istio, the oldest service names the port.
    found.sort_by_key(|(_, service, _)| (service.meta.created.unwrap_or(i64::MAX), &service.meta.name));
    let mut ports: BTreeMap<u16, InboundPort<'a>> = BTreeMap::new();
    for (number, service, port) in found {
        if port.protocol == Protocol::Udp {
            continue;
        }
        let entry = ports.entry(number).or_insert_with(|| InboundPort {
            port: number,
            protocol: port.protocol,
            mode: world.peer_mode(&view.namespace, &view.labels, number),
            services: Vec::new(),
            ingress: None,
            pool,
        });
        if entry.services.iter().all(|(known, _)| known.meta != service.meta) {
            entry.services.push((service, port));
        }
    }
    ports.into_values().collect()
}

/// Returns the unspecified address of the proxy's family.
pub(super) fn any_address(view: &ProxyView) -> &'static str {
    if view.ipv4 || !view.ipv6 { "0.0.0.0" } else { "::" }
}

/// Returns a listener for redirected connections.
pub(super) fn virtual_listener(
    setting: FilterSettings<'_>,
    name: &str,
    port: u16,
    chains: Vec<listener::FilterChain>,
) -> listener::Listener {
    listener::Listener {
        name: name.to_owned(),
        address: Some(pb::address(any_address(setting.view), port)),
        filter_chains: chains,
        access_log: setting.telemetry.listener_logs.clone(),
        // Spreads new connections over the workers.
        max_connections_to_accept_per_socket_event: pb::uint32(1),
        ..Default::default()
    }
}

/// Returns the time limit for the first bytes of a connection. 0 waits for ever, as the client may not send first.
fn detection_timeout(world: &World) -> pb::Duration {
    world.mesh().protocol_detection_timeout.map_or(pb::seconds(0), |length| pb::duration(length.0))
}

pub(super) fn inspector(name: &str, config: pb::Any) -> listener::ListenerFilter {
    listener::ListenerFilter {
        name: name.to_owned(),
        config_type: Some(listener::listener_filter::ConfigType::TypedConfig(config)),
        ..Default::default()
    }
}
