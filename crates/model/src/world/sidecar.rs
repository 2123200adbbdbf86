//! Sidecars: which one applies to a workload, and what its clients see of other objects.

use std::{collections::BTreeSet, sync::Arc};

use super::{World, envoy_filters::SharedFilters, fqdn, host_matches, store::Entry};
use crate::{
    ProxyView, Role,
    api::{
        Gateway, Labels, Sidecar, Typed, VirtualService,
        gateway::{Server, ServerTlsMode},
        proxy_config::HttpSettings,
        selects,
        sidecar::{Egress, EgressListener},
    },
};

/// Properties of the World by which views are assigned to scopes ([`ClientScope::of`](crate::ClientScope::of)).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grouping {
    /// Keys of the labels of clients on which shared resources depend.
    pub(crate) label_keys: BTreeSet<String>,
    /// Sidecars in the order in which they are tried, with their namespaces.
    sidecars: Vec<(String, Selection)>,
    root_namespace: String,
    /// Settings of proxies in the mesh configuration.
    pub(crate) settings: HttpSettings,
    /// EnvoyFilters of shared resources.
    pub(crate) filters: SharedFilters,
    /// Gateways between networks.
    network_gateways: Vec<GatewaySelection>,
    /// Gateways with a certificate for servers, oldest first, and the credential.
    gateway_credentials: Vec<(GatewaySelection, String)>,
}

/// Selector and content of a Sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Selection {
    labels: Labels,
    egress: Option<Arc<Egress>>,
}

/// Proxies that a Gateway selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GatewaySelection {
    pub(super) selector: Labels,
    /// Namespace of the proxies; `None`: all.
    only_in: Option<String>,
}

impl GatewaySelection {
    fn of(gateway: &Gateway) -> Self {
        Self { selector: gateway.selector.clone(), only_in: gateway.only_in.clone() }
    }

    fn has(&self, view: &ProxyView) -> bool {
        view.role == Role::Router
            && selects(&self.selector, &view.labels)
            && self.only_in.as_ref().is_none_or(|only| *only == view.namespace)
    }
}

impl Grouping {
    /// Returns whether two groupings are equal apart from the Sidecars of namespaces other than the root namespace.
    pub fn differs_by_sidecars(&self, other: &Self) -> bool {
        let of_root = |grouping: &Self| {
            let all = grouping.sidecars.iter();
            all.filter(|(of, _)| *of == grouping.root_namespace).cloned().collect::<Vec<_>>()
        };
        let Self {
            label_keys,
            sidecars: _,
            root_namespace,
            settings,
            filters,
            network_gateways,
            gateway_credentials,
        } = self;
        label_keys == &other.label_keys
            && root_namespace == &other.root_namespace
            && settings == &other.settings
            && filters == &other.filters
            && network_gateways == &other.network_gateways
            && gateway_credentials == &other.gateway_credentials
            && of_root(self) == of_root(other)
    }

    /// Returns the grouping of clients by their settings alone.
    pub(crate) fn of_settings(world: &World) -> Self {
        Self { settings: world.mesh().default_config.http(), ..Self::default() }
    }

    /// Returns whether a proxy forwards connections from other networks.
    pub(crate) fn joins_networks(&self, view: &ProxyView) -> bool {
        self.network_gateways.iter().any(|selection| selection.has(view))
    }

    /// Returns the credential that a gateway presents to servers with a BackendTLSPolicy: that of the oldest Gateway.
    pub(crate) fn client_credential(&self, view: &ProxyView) -> Option<String> {
        let mut selections = self.gateway_credentials.iter();
        selections.find_map(|(selection, credential)| selection.has(view).then(|| credential.clone()))
    }

    /// Returns the egress listeners of a proxy's Sidecar; `None` if the proxy may call everything.
    pub(crate) fn egress(&self, view: &ProxyView) -> Option<Arc<Egress>> {
        if view.role == Role::Router || self.sidecars.is_empty() {
            return None;
        }
        let of = |namespace: &str| {
            let first = self.sidecars.partition_point(|(of, _)| of.as_str() < namespace);
            let own = self.sidecars[first..].iter().take_while(|(of, _)| of.as_str() == namespace);
            own.map(|(_, selection)| selection).collect::<Vec<_>>()
        };
        let own = of(&view.namespace).into_iter().find(|one| selects(&one.labels, &view.labels));
        let root = || of(&self.root_namespace).into_iter().find(|one| one.labels.is_empty());
        own.or_else(root).and_then(|selection| selection.egress.clone())
    }
}

impl World {
    /// Returns the properties by which views are assigned to scopes.
    pub fn grouping(&self) -> Grouping {
        let mut entries: Vec<_> = self.sidecars.iter().collect();
        entries.sort_by(|a, b| order(a).cmp(&order(b)));
        let selection = |entry: &&Entry<Sidecar>| {
            let labels = selector(entry).cloned().unwrap_or_default();
            let egress = entry.object.spec.egress().map(Arc::new);
            (entry.object.meta.namespace.clone(), Selection { labels, egress })
        };
        Grouping {
            label_keys: self.label_keys(),
            sidecars: entries.iter().map(selection).collect(),
            root_namespace: self.mesh().root_namespace.clone(),
            settings: self.mesh().default_config.http(),
            filters: self.shared_filters(),
            network_gateways: self.network_gateways(),
            gateway_credentials: self.gateway_credentials(),
        }
    }

    /// Returns the Gateways with a certificate for servers, oldest first, each once for all of its listeners.
    fn gateway_credentials(&self) -> Vec<(GatewaySelection, String)> {
        let has_credential = |entry: &&Entry<Gateway>| entry.object.spec.client_credential.is_some();
        let mut entries: Vec<_> = self.gateways.iter().filter(has_credential).collect();
        entries.sort_by(|a, b| a.age().cmp(&b.age()));
        let specs = entries.into_iter().map(|entry| &entry.object.spec);
        let mut found: Vec<(GatewaySelection, String)> = Vec::new();
        for (selection, credential) in
            specs.filter_map(|spec| Some((GatewaySelection::of(spec), spec.client_credential.clone()?)))
        {
            if found.iter().all(|(known, _)| *known != selection) {
                found.push((selection, credential));
            }
        }
        found
    }

    /// Returns the selectors of the Gateways with a server of mode `AUTO_PASSTHROUGH`.
    pub(super) fn network_gateways(&self) -> Vec<GatewaySelection> {
        let joins = |gateway: &&Gateway| {
            let modes = gateway.servers.iter().filter_map(Server::terminating_or_forwarded_tls);
            modes.into_iter().any(|tls| tls.mode == ServerTlsMode::AutoPassthrough)
        };
        let gateways = self.gateways.iter().map(|entry| &entry.object.spec).filter(joins);
        gateways.map(GatewaySelection::of).collect()
    }

    /// Returns the Sidecar of a workload: the oldest of its namespace that selects it, otherwise the oldest of its
    /// namespace without a selector, otherwise that of the root namespace.
    pub fn sidecar(&self, namespace: &str, labels: &Labels) -> Option<&Arc<Typed<Sidecar>>> {
        let first = |namespace: &str, applies: &dyn Fn(&Entry<Sidecar>) -> bool| {
            let entries = self.sidecars.in_namespace(namespace).filter(|entry| applies(entry));
            entries.min_by(|a, b| order(a).cmp(&order(b)))
        };
        let own = first(namespace, &|entry| selector(entry).is_none_or(|wanted| selects(wanted, labels)));
        let root = || first(&self.mesh().root_namespace, &|entry| selector(entry).is_none());
        own.or_else(root).map(|entry| &entry.object)
    }

    /// Returns whether there are Sidecars. The resources of a client then depend on them.
    pub(super) fn has_sidecars(&self) -> bool {
        self.sidecars.iter().next().is_some()
    }

    /// Returns whether a client sees a VirtualService, by `exportTo` and by the hosts of its Sidecar.
    pub(crate) fn imports_rule(
        egress: &[EgressListener],
        rule: &Typed<VirtualService>,
        client_namespace: &str,
    ) -> bool {
        let owner = &rule.meta.namespace;
        let mut hosts = rule.spec.hosts.iter().map(|host| fqdn(host, owner));
        egress.is_empty()
            || hosts
                .any(|host| egress.iter().any(|listener| listener.imports(client_namespace, owner, &host)))
    }

    /// Returns whether a VirtualService that a client sees sends requests to a host.
    pub(crate) fn is_target_of_rules(
        &self,
        egress: &[EgressListener],
        host: &str,
        client_namespace: &str,
    ) -> bool {
        let rules = self.virtual_service_targets.get(host);
        let mut rules = rules.filter_map(|(namespace, name)| self.virtual_services.get(namespace, name));
        rules.any(|entry| {
            // One without hosts is a delegate of others.
            let is_delegate = entry.object.spec.hosts.is_empty();
            self.virtual_service_visible(entry, client_namespace)
                && (is_delegate || Self::imports_rule(egress, &entry.object, client_namespace))
        })
    }
}

/// Returns the labels of a Sidecar's selector; `None` if it applies to the whole namespace.
fn selector(entry: &Entry<Sidecar>) -> Option<&Labels> {
    let selector = entry.object.spec.workload_selector.as_ref();
    selector.map(|selector| &selector.labels).filter(|labels| !labels.is_empty())
}

/// Returns the sort key: by namespace, those with a selector first, the oldest first.
fn order(entry: &Entry<Sidecar>) -> impl Ord + '_ {
    (entry.object.meta.namespace.as_str(), selector(entry).is_none(), entry.age())
}

/// Returns the full names of the hosts to which a VirtualService of the mesh sends requests.
pub(super) fn targets(rule: &Typed<VirtualService>) -> BTreeSet<String> {
    if rule.spec.is_for_mesh() { destinations(rule).collect() } else { BTreeSet::new() }
}

/// Returns the full names of the hosts to which a VirtualService sends requests or connections.
pub(super) fn destinations(rule: &Typed<VirtualService>) -> impl Iterator<Item = String> {
    let of_http = rule.spec.http.iter().flat_map(|http| {
        let routed = http.route.iter().map(|one| &one.destination.host);
        let mirrors = http.mirrors.iter().map(|one| &one.destination.host);
        routed.chain(mirrors).chain(http.mirror.iter().map(|one| &one.host))
    });
    let of_tls = rule.spec.tls.iter().flat_map(|tls| &tls.route);
    let of_tcp = rule.spec.tcp.iter().flat_map(|tcp| &tcp.route);
    let others = of_tls.chain(of_tcp).map(|one| &one.destination.host);
    of_http.chain(others).map(|host| fqdn(host, &rule.meta.namespace))
}

impl EgressListener {
    /// Returns whether a client may call a host in some namespace.
    pub(crate) fn names(&self, host: &str) -> bool {
        self.hosts.iter().filter_map(|own| own.split_once('/')).any(|(_, pattern)| overlaps(pattern, host))
    }

    /// Returns whether a client of this namespace may call a host of a service or VirtualService of namespace `owner`.
    /// An entry whose namespace begins with `~` excludes hosts, and precedes all others; `~` alone is all namespaces.
    pub fn imports(&self, client: &str, owner: &str, host: &str) -> bool {
        let parts = || self.hosts.iter().filter_map(|host| host.split_once('/'));
        let is_owner = |namespace: &str| match namespace {
            "*" => true,
            "." => owner == client,
            namespace => namespace == owner,
        };
        let is_excluded = parts().any(|(namespace, pattern)| {
            let excluded =
                namespace.strip_prefix('~').filter(|_| pattern == host || host_matches(pattern, host));
            excluded.is_some_and(|namespace| namespace.is_empty() || is_owner(namespace))
        });
        !is_excluded && parts().any(|(namespace, pattern)| is_owner(namespace) && overlaps(pattern, host))
    }
}

/// Returns whether two host patterns have a host in common.
fn overlaps(one: &str, other: &str) -> bool {
    one == other || host_matches(one, other) || (other.starts_with('*') && host_matches(other, one))
}
