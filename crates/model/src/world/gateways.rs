//! Gateways of a proxy, and the VirtualServices that are bound to them.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use super::{World, host_matches, hosts, store::Entry};
use crate::api::{Gateway, Labels, Secret, Typed, VirtualService, selects};

/// Prefix of the names of secrets that the control plane sends from Secrets of the proxy's namespace.
pub(crate) const SECRET: &str = "kubernetes://";

impl World {
    /// Returns the Gateways that select a proxy of this namespace, oldest first.
    pub fn gateways(&self, namespace: &str, labels: &Labels) -> Vec<&Arc<Typed<Gateway>>> {
        let selected = |entry: &&Entry<Gateway>| {
            let spec = &entry.object.spec;
            selects(&spec.selector, labels) && spec.only_in.as_ref().is_none_or(|only| only == namespace)
        };
        let mut entries: Vec<_> = self.gateways.iter().filter(selected).collect();
        entries.sort_by(|a, b| a.age().cmp(&b.age()));
        entries.into_iter().map(|entry| &entry.object).collect()
    }

    /// Returns the Secret of this name, if it has anything for TLS.
    pub(crate) fn secret(&self, namespace: &str, name: &str) -> Option<&Secret> {
        self.secrets.get(namespace, name).map(|entry| &entry.object.spec)
    }

    /// Returns the selectors of the Gateways to which a VirtualService is bound.
    pub(super) fn selectors_of(&self, rule: &Typed<VirtualService>) -> BTreeSet<Labels> {
        let names = rule.spec.gateways.iter().map(|name| gateway_name(name, &rule.meta.namespace));
        let gateways = names.filter_map(|name| {
            let (namespace, name) = name.split_once('/')?;
            Some(self.gateways.get(namespace, name)?.object.spec.selector.clone())
        });
        gateways.collect()
    }

    /// Returns the VirtualServices that are bound to a Gateway (`NAMESPACE/NAME`) and visible to a proxy of this
    /// namespace. As in Istio, those with a narrower `exportTo` come first, then the older ones.
    pub(crate) fn gateway_rules(&self, gateway: &str, client_namespace: &str) -> Vec<BoundRule<'_>> {
        let bound = |entry: &&Entry<VirtualService>| {
            let (spec, namespace) = (&entry.object.spec, &entry.object.meta.namespace);
            spec.gateways.iter().any(|name| gateway_name(name, namespace) == gateway)
                && self.virtual_service_visible(entry, client_namespace)
        };
        let mut entries: Vec<_> = self.virtual_services.iter().filter(bound).collect();
        self.sort_by_precedence(&mut entries, client_namespace);
        entries.into_iter().map(|entry| BoundRule::new(&entry.object)).collect()
    }
}

/// Returns the Gateway (`NAMESPACE/NAME`) that a VirtualService of this namespace names, or `mesh`. Forms are
/// `NAMESPACE/NAME`, `./NAME`, `NAME`, and the old `NAME.NAMESPACE` and `NAME.NAMESPACE.svc.cluster.local`.
pub(crate) fn gateway_name(name: &str, namespace: &str) -> String {
    if name == "mesh" {
        return name.to_owned();
    }
    if let Some((of, bare)) = name.split_once('/') {
        return format!("{}/{bare}", if of == "." { namespace } else { of });
    }
    match name.split_once('.') {
        Some((bare, rest)) => {
            let of = rest.split_once('.').map_or(rest, |(of, _)| of);
            format!("{of}/{bare}")
        }
        None => format!("{namespace}/{name}"),
    }
}

/// A VirtualService that is bound to a Gateway, with its full host names.
pub(crate) struct BoundRule<'a> {
    pub(crate) rule: &'a Typed<VirtualService>,
    hosts: Vec<String>,
}

impl<'a> BoundRule<'a> {
    pub(crate) fn new(rule: &'a Typed<VirtualService>) -> Self {
        let hosts = rule.spec.hosts.iter().map(|host| hosts::fqdn(host, &rule.meta.namespace));
        Self { rule, hosts: hosts.collect() }
    }

    /// Returns the hosts that it has in common with a server: of two that overlap, the narrower one. The hosts of a
    /// server may name the namespaces of the VirtualServices that may use them.
    pub(crate) fn common_hosts(&self, server: &[String]) -> Vec<String> {
        let (wild, exact): (Vec<&str>, Vec<&str>) =
            self.hosts.iter().map(String::as_str).partition(|host| host.starts_with('*'));
        let exact: HashSet<&str> = exact.into_iter().collect();
        let (mut common, mut known): (Vec<String>, HashSet<&str>) = (Vec::new(), HashSet::new());
        let mut add = |host| {
            if known.insert(host) {
                common.push(host.to_owned());
            }
        };
        for of_server in server {
            let Some(of_server) = host_for(of_server, &self.rule.meta.namespace) else { continue };
            if of_server.starts_with('*') {
                for of_rule in &self.hosts {
                    if is_within(of_server, of_rule) {
                        add(of_server);
                    } else if is_within(of_rule, of_server) {
                        add(of_rule);
                    }
                }
            } else if exact.contains(of_server) || wild.iter().any(|of_rule| is_within(of_server, of_rule)) {
                add(of_server);
            }
        }
        common
    }
}

/// Hosts of the servers of a Gateway.
pub(crate) struct GatewayHosts<'a> {
    /// Those without a wildcard that all VirtualServices may use.
    open: HashSet<&'a str>,
    /// The others, each with the namespace of the VirtualServices that may use it, or `*`.
    others: Vec<(&'a str, &'a str)>,
}

impl<'a> GatewayHosts<'a> {
    pub(crate) fn new(gateway: &'a Typed<Gateway>) -> Self {
        let (mut open, mut others) = (HashSet::new(), Vec::new());
        for host in gateway.spec.servers.iter().flat_map(|server| &server.hosts) {
            let (namespace, host) = host.split_once('/').unwrap_or(("*", host));
            let namespace = if namespace == "." { gateway.meta.namespace.as_str() } else { namespace };
            if namespace == "*" && !host.starts_with('*') {
                open.insert(host);
            } else {
                others.push((namespace, host));
            }
        }
        Self { open, others }
    }

    /// Returns whether a VirtualService may use one of its hosts, or a part of it.
    pub(crate) fn admit(&self, rule: &Typed<VirtualService>) -> bool {
        let namespace = &rule.meta.namespace;
        rule.spec.hosts.iter().any(|host| self.admits(&hosts::fqdn(host, namespace), namespace))
    }

    /// Returns whether a VirtualService of a namespace may use a host, or a part of it.
    fn admits(&self, host: &str, namespace: &str) -> bool {
        let is_common = |own: &str| is_within(own, host) || is_within(host, own);
        let mut others = self.others.iter();
        self.open.contains(host)
            || others.any(|(of, own)| (*of == "*" || *of == namespace) && is_common(own))
            || host.starts_with('*') && self.open.iter().any(|own| is_common(own))
    }
}

/// Returns the host of a server without its namespace; `None` if VirtualServices of `namespace` may not use it.
fn host_for<'a>(host: &'a str, namespace: &str) -> Option<&'a str> {
    match host.split_once('/') {
        Some((of, host)) => (of == "*" || of == namespace).then_some(host),
        None => Some(host),
    }
}

/// Returns whether every name of `inner` is a name of `outer`; both may be wildcards.
pub(crate) fn is_within(inner: &str, outer: &str) -> bool {
    match inner.strip_prefix('*') {
        Some(end) => outer.strip_prefix('*').is_some_and(|outer| end.ends_with(outer)),
        None => host_matches(outer, inner),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::gateway::Server;

    #[test]
    fn gateways_are_named_in_four_forms() {
        for (written, meant) in [
            ("mesh", "mesh"),
            ("a", "shop/a"),
            ("./a", "shop/a"),
            ("other/a", "other/a"),
            ("a.other", "other/a"),
            ("a.other.svc.cluster.local", "other/a"),
        ] {
            assert_eq!(gateway_name(written, "shop"), meant);
        }
    }

    #[test]
    fn the_narrower_of_two_overlapping_hosts_is_common() {
        let common = |server: &str, rule: &str| {
            let spec = VirtualService { hosts: vec![rule.to_owned()], ..Default::default() };
            let mut rule = Typed { spec, ..Default::default() };
            rule.meta.namespace = "shop".into();
            BoundRule::new(&rule).common_hosts(&[server.to_owned()]).join(" ")
        };
        assert_eq!(common("*", "a.example.com"), "a.example.com");
        assert_eq!(common("a.example.com", "*"), "a.example.com");
        assert_eq!(common("*.example.com", "*.b.example.com"), "*.b.example.com");
        assert_eq!(common("shop/*.example.com", "a.example.com"), "a.example.com");
        assert_eq!(common("other/*.example.com", "a.example.com"), "");
        assert_eq!(common("b.example.com", "a.example.com"), "");
        let spec = VirtualService { hosts: vec!["*.b.c".into(), "a.c".into()], ..Default::default() };
        let rule = Typed { spec, ..Default::default() };
        let server = ["x.b.c", "*.c", "a.c", "x.b.c", "d.c"].map(str::to_owned);
        assert_eq!(BoundRule::new(&rule).common_hosts(&server), ["x.b.c", "*.b.c", "a.c"]);
    }

    #[test]
    fn a_rule_has_a_host_in_common_with_a_gateway_if_one_is_within_the_other() {
        let servers = |hosts: &[&str]| {
            let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
            let mut gateway = Typed { spec: Gateway::default(), ..Typed::default() };
            gateway.meta.namespace = "edge".into();
            gateway.spec.servers = vec![Server { hosts, ..Server::default() }];
            gateway
        };
        let gateway = servers(&["a.example.com", "*.b.example.com", "shop/c.example.com", "./d.example.com"]);
        let hosts = GatewayHosts::new(&gateway);
        for (host, namespaces) in [
            ("a.example.com", "edge shop"),
            ("x.a.example.com", ""),
            ("x.b.example.com", "edge shop"),
            ("*.x.b.example.com", "edge shop"),
            ("*.example.com", "edge shop"),
            ("*", "edge shop"),
            ("*.example.net", ""),
            ("c.example.com", "shop"),
            ("*.c.example.com", ""),
            ("d.example.com", "edge"),
        ] {
            let admitted = ["edge", "shop"].into_iter().filter(|namespace| hosts.admits(host, namespace));
            assert_eq!(admitted.collect::<Vec<_>>().join(" "), namespaces, "{host}");
        }
    }
}
