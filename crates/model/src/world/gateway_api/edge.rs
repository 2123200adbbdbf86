//! Routes of gateways: parents are Gateways and ListenerSets.

use std::collections::{BTreeMap, BTreeSet};

use super::{DerivedObjects, Route, RouteRules, listeners::GatewayListener, rules};
use crate::{
    api::{
        Kind, VirtualService,
        gateway_api::{INTERNAL, ListenerProtocol},
        virtual_service::{Derived, IstioTcpRoute, IstioTlsRoute, L4Match},
    },
    world::gateways::is_within,
};

/// Routes of requests by their namespace, internal Gateway (namespace and name) and host. Routes of one namespace for
/// one host are merged.
#[derive(Default)]
pub(super) struct Edge<'a> {
    merged: BTreeMap<(&'a str, &'a str, String, String), Vec<&'a Route<'a>>>,
    single: Vec<(&'a Route<'a>, &'a GatewayListener<'a>, Vec<String>)>,
}

impl<'a> Edge<'a> {
    /// Adds the attachment of a route to a listener. Routes are added oldest first.
    pub(super) fn add(
        &mut self,
        route: &'a Route<'a>,
        listener: &'a GatewayListener<'a>,
        hosts: Vec<String>,
    ) {
        if !matches!(route.rules, RouteRules::Http(_)) {
            self.single.push((route, listener, hosts));
            return;
        }
        let namespace = route.meta.namespace.as_str();
        for host in hosts {
            let key = (namespace, listener.meta.namespace.as_str(), listener.internal(), host);
            self.merged.entry(key).or_default().push(route);
        }
    }

    /// Makes the VirtualServices.
    pub(super) fn finish(self, made: &mut DerivedObjects) {
        for ((namespace, of, gateway, host), routes) in self.merged {
            let mut spec = bound(of, &gateway, vec![host.clone()]);
            for route in &routes {
                if let RouteRules::Http(rules) = &route.rules {
                    spec.http.extend(rules.iter().cloned());
                }
            }
            rules::sort(&mut spec.http);
            let Some(first) = routes.first() else { continue };
            made.add(namespace, format!("{of}~{gateway}~{host}"), (first.meta, first.origin), spec);
        }
        let mut numbers: BTreeMap<(Kind, &str, &str), usize> = BTreeMap::new();
        for (route, listener, hosts) in self.single {
            let (of, gateway) = (&listener.meta.namespace, listener.internal());
            let kind = if route.kind == Kind::TlsRoute { "tls" } else { "tcp" };
            let number = numbers.entry((route.kind, &route.meta.namespace, &route.meta.name)).or_insert(0);
            let name = format!("{}~{kind}~{number}~{INTERNAL}", route.meta.name);
            *number += 1;
            let forwards =
                listener.protocol() == Some(ListenerProtocol::Tls) && !listener.listener.terminates();
            // A connection without such a server name is for another listener or none.
            let hosts: BTreeSet<String> = hosts.iter().map(|host| narrower(host, listener.host())).collect();
            let hosts: Vec<String> = hosts.into_iter().collect();
            let mut spec = bound(of, &gateway, hosts.clone());
            match &route.rules {
                RouteRules::Tls(to) if forwards => {
                    let matched = L4Match { sni_hosts: hosts, ..L4Match::default() };
                    spec.tls.push(IstioTlsRoute { matches: vec![matched], route: to.clone() });
                }
                RouteRules::Tls(to) | RouteRules::Tcp(to) => {
                    spec.tcp.push(IstioTcpRoute { matches: Vec::new(), route: to.clone() });
                }
                RouteRules::Http(_) => continue,
            }
            made.add(&route.meta.namespace, name, (route.meta, route.origin), spec);
        }
    }
}

/// Returns the hosts that a route and a listener have in common. One of them has those of the other.
fn narrower(of_route: &str, of_listener: &str) -> String {
    if is_within(of_listener, of_route) { of_listener } else { of_route }.to_owned()
}

fn bound(namespace: &str, gateway: &str, hosts: Vec<String>) -> VirtualService {
    VirtualService {
        hosts,
        gateways: vec![format!("{namespace}/{gateway}")],
        export_to: vec!["*".to_owned()],
        derived: Some(Derived::default()),
        ..VirtualService::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_and_a_listener_have_the_narrower_host_in_common() {
        for (route, listener, common) in [
            ("*.com", "*.example.com", "*.example.com"),
            ("*.com", "abc.example.com", "abc.example.com"),
            ("abc.example.com", "*.com", "abc.example.com"),
            ("*.example.com", "*", "*.example.com"),
            ("*", "*.example.com", "*.example.com"),
            ("*", "*", "*"),
        ] {
            assert_eq!(narrower(route, listener), common, "{route} {listener}");
        }
    }
}
