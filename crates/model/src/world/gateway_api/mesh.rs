//! Routes of the mesh (GAMMA): parents are Services and ServiceEntries.

use std::collections::{BTreeMap, BTreeSet};

use super::{DerivedObjects, Route, RouteRules, rules};
use crate::api::{
    Kind, VirtualService,
    gateway_api::INTERNAL,
    virtual_service::{Derived, IstioTcpRoute, IstioTlsRoute, L4Match},
};

/// Attachments by the namespace of the routes and the host. Routes of one namespace for one host are merged; those of
/// several namespaces never are.
#[derive(Default)]
pub(super) struct Mesh<'a>(BTreeMap<(&'a str, String), Vec<Attachment<'a>>>);

struct Attachment<'a> {
    route: &'a Route<'a>,
    port: Option<u16>,
    consumer: bool,
}

impl<'a> Mesh<'a> {
    /// Adds the attachment of a route to a service. Routes are added oldest first.
    pub(super) fn add(&mut self, route: &'a Route<'a>, host: &str, port: Option<u16>, consumer: bool) {
        let list = self.0.entry((&route.meta.namespace, host.to_owned())).or_default();
        list.push(Attachment { route, port, consumer });
    }

    /// Makes a VirtualService for each host, one for each port that routes name, and one for each route of connections.
    pub(super) fn finish(self, made: &mut DerivedObjects) {
        let mut numbers: BTreeMap<(Kind, &str, &str), usize> = BTreeMap::new();
        for ((namespace, host), list) in self.0 {
            let (http, connections): (Vec<_>, Vec<_>) =
                list.into_iter().partition(|of| matches!(of.route.mesh_rules, RouteRules::Http(_)));
            let ports: BTreeSet<Option<u16>> = http.iter().map(|attachment| attachment.port).collect();
            for port in ports {
                // Routes without a port apply to each port.
                let applies = |of: &&Attachment<'_>| of.port.is_none() || of.port == port;
                let attachments: Vec<&Attachment<'_>> = http.iter().filter(applies).collect();
                let Some(first) = attachments.first() else { continue };
                let name = match port {
                    Some(port) => format!("{namespace}~{port}~{host}"),
                    None => format!("{namespace}~{host}"),
                };
                let of = (first.route.meta, first.route.origin);
                made.add(namespace, name, of, merged(&host, port, &attachments));
            }
            for of in connections {
                let (kind, meta) = (of.route.kind, of.route.meta);
                let number = numbers.entry((kind, &meta.namespace, &meta.name)).or_insert(0);
                let protocol = if kind == Kind::TlsRoute { "tls" } else { "tcp" };
                let name = format!("{}~{protocol}~{number}~{INTERNAL}", meta.name);
                *number += 1;
                made.add(namespace, name, (meta, of.route.origin), single(&host, &of));
            }
        }
    }
}

fn of_host(host: &str, port: Option<u16>, consumer: bool) -> VirtualService {
    VirtualService {
        hosts: vec![host.to_owned()],
        // As in istiod, the default of the mesh applies to routes.
        export_to: consumer.then(|| ".".to_owned()).into_iter().collect(),
        derived: Some(Derived { port, ..Derived::default() }),
        ..VirtualService::default()
    }
}

fn merged(host: &str, port: Option<u16>, attachments: &[&Attachment<'_>]) -> VirtualService {
    let mut spec = of_host(host, port, attachments.iter().any(|attachment| attachment.consumer));
    for attachment in attachments {
        if let RouteRules::Http(rules) = &attachment.route.mesh_rules {
            spec.http.extend(rules.iter().cloned());
        }
    }
    rules::sort(&mut spec.http);
    spec
}

/// Returns the rules of a route of connections.
fn single(host: &str, of: &Attachment<'_>) -> VirtualService {
    let mut spec = of_host(host, of.port, of.consumer);
    let matched = L4Match { port: of.port.map(u32::from), ..L4Match::default() };
    match &of.route.mesh_rules {
        RouteRules::Tcp(to) => {
            let matches = if of.port.is_some() { vec![matched] } else { Vec::new() };
            spec.tcp.push(IstioTcpRoute { matches, route: to.clone() });
        }
        RouteRules::Tls(to) => {
            let sni_hosts = of.route.hostnames.to_vec();
            spec.tls
                .push(IstioTlsRoute { matches: vec![L4Match { sni_hosts, ..matched }], route: to.clone() });
        }
        RouteRules::Http(_) => {}
    }
    spec
}
