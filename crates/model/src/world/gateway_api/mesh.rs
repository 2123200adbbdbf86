//! Routes of the mesh (GAMMA): parents are Services and ServiceEntries.

use std::collections::{BTreeMap, BTreeSet};

use super::{Made, Route, Rules, rules};
use crate::api::{
    VirtualService,
    virtual_service::{Derived, L4Match, TcpRoute, TlsRoute},
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

    /// Makes a VirtualService for each host, and one for each port that routes name.
    pub(super) fn finish(self, made: &mut Made) {
        for ((namespace, host), list) in self.0 {
            let ports: BTreeSet<Option<u16>> = list.iter().map(|attachment| attachment.port).collect();
            for port in ports {
                // Routes without a port apply to each port.
                let applies = |of: &&Attachment<'_>| of.port.is_none() || of.port == port;
                let attachments: Vec<&Attachment<'_>> = list.iter().filter(applies).collect();
                let Some(first) = attachments.first() else { continue };
                let name = match port {
                    Some(port) => format!("{namespace}~{port}~{host}"),
                    None => format!("{namespace}~{host}"),
                };
                let of = (first.route.meta, first.route.origin);
                made.add(namespace, name, of, merged(&host, port, &attachments));
            }
        }
    }
}

fn merged(host: &str, port: Option<u16>, attachments: &[&Attachment<'_>]) -> VirtualService {
    let consumer = attachments.iter().any(|attachment| attachment.consumer);
    let mut spec = VirtualService {
        hosts: vec![host.to_owned()],
        export_to: vec![if consumer { "." } else { "*" }.to_owned()],
        derived: Some(Derived { port, consumer }),
        ..Default::default()
    };
    for attachment in attachments {
        let matched = L4Match { port: port.map(u32::from), ..L4Match::default() };
        match &attachment.route.rules {
            Rules::Http(rules) => spec.http.extend(rules.iter().cloned()),
            // The oldest route of connections is used, as they have no conditions.
            Rules::Tcp(to) if spec.tcp.is_empty() && !to.is_empty() => {
                let matches = if port.is_some() { vec![matched] } else { Vec::new() };
                spec.tcp.push(TcpRoute { matches, route: to.clone() });
            }
            Rules::Tls(to) if !to.is_empty() => {
                let sni_hosts = attachment.route.hostnames.to_vec();
                spec.tls
                    .push(TlsRoute { matches: vec![L4Match { sni_hosts, ..matched }], route: to.clone() });
            }
            Rules::Tcp(_) | Rules::Tls(_) => {}
        }
    }
    rules::sort(&mut spec.http);
    spec
}
