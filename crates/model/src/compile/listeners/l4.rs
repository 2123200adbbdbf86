//! Filter chains of TCP and TLS that is passed through: the `tcp` and `tls` rules of VirtualServices, and the services
//! themselves.
//!
//! Conditions on the client (its labels, its namespace, the port) are evaluated here. Conditions on the connection (its
//! destination address, its server name) become the match of a filter chain.

use std::sync::Arc;

use skysail_core::{ClusterName, names::Direction};
use skysail_xds::envoy::pb::envoy::extensions::filters::network::{
    mongo_proxy::v3::MongoProxy,
    tcp_proxy::v3::{
        TcpProxy,
        tcp_proxy::{ClusterSpecifier, TunnelingConfig, WeightedCluster, weighted_cluster::ClusterWeight},
    },
};

use crate::{
    ProxyView, World,
    api::{
        DestinationRule, Labels, Protocol, Resolution, Service, ServicePort, Typed, VirtualService,
        virtual_service::{Destination, L4Destination, L4Match},
    },
    compile::{
        balance,
        client_match::{ClientConditions, ClientFacts, exclusion},
        clusters,
        dynamic_dns::{self, Families},
        filters::{self, FilterSettings},
        pb::{cidr, config_path, core, duration, fields, listener, metadata, pack, seconds},
        stat_names::StatNameVariables,
    },
    world::fqdn,
};

/// Timeout of a TLS handshake with the client in seconds.
pub(super) const HANDSHAKE_SECONDS: i64 = 15;

/// A port of a service for which filter chains are compiled.
#[derive(Clone, Copy)]
pub(super) struct L4Target<'a> {
    pub(super) world: &'a World,
    pub(super) setting: FilterSettings<'a>,
    pub(super) service: &'a Typed<Service>,
    pub(super) port: &'a ServicePort,
    /// Block of addresses; `None` if the listener has the service's addresses, or all.
    pub(super) block: Option<&'a str>,
    /// Server names of the service, if only they tell its connections from others.
    pub(super) server_names: &'a [String],
    /// VirtualServices with TCP or TLS rules for the service, oldest first.
    pub(super) rules: &'a [Arc<Typed<VirtualService>>],
}

impl L4Target<'_> {
    /// Returns the filter chains, the first match first.
    pub(super) fn chains(&self) -> Vec<listener::FilterChain> {
        if self.port.protocol.is_tls() { self.tls() } else { self.tcp() }
    }

    fn tls(&self) -> Vec<listener::FilterChain> {
        let mut made = Vec::new();
        for rule in self.rules {
            for tls in &rule.spec.tls {
                for found in tls.matches.iter().filter(|found| self.applies(found)) {
                    let subnets: Vec<&str> = match self.block {
                        _ if !found.destination_subnets.is_empty() => texts(&found.destination_subnets),
                        block => block.into_iter().collect(),
                    };
                    let chain = self.chain(&found.sni_hosts, &subnets, self.to(rule, &tls.route));
                    made.push(listener::FilterChain { metadata: Some(origin(rule)), ..chain });
                }
            }
        }
        if made.is_empty() {
            made.push(self.chain(self.server_names, self.block.as_slice(), self.forward_to_service()));
        }
        made
    }

    fn tcp(&self) -> Vec<listener::FilterChain> {
        let mut made = Vec::new();
        for rule in self.rules {
            for tcp in &rule.spec.tcp {
                let applying = || tcp.matches.iter().filter(|found| self.applies(found));
                let every =
                    tcp.matches.is_empty() || applying().any(|found| found.destination_subnets.is_empty());
                if every {
                    let chain = self.chain(&[], self.block.as_slice(), self.to(rule, &tcp.route));
                    made.push(listener::FilterChain { metadata: Some(origin(rule)), ..chain });
                    // Later rules could never be reached.
                    return made;
                }
                let subnets: Vec<&str> =
                    applying().flat_map(|found| texts(&found.destination_subnets)).collect();
                if !subnets.is_empty() {
                    made.push(self.chain(&[], &subnets, self.to(rule, &tcp.route)));
                }
            }
        }
        made.push(self.chain(&[], self.block.as_slice(), self.forward_to_service()));
        made
    }

    fn applies(&self, found: &L4Match) -> bool {
        applies(found, self.setting.view, self.port.port)
    }

    fn chain(
        &self,
        server_names: &[String],
        subnets: &[&str],
        filters: Vec<listener::Filter>,
    ) -> listener::FilterChain {
        let mut names: Vec<String> = server_names.iter().map(|name| name.to_ascii_lowercase()).collect();
        names.sort_unstable();
        names.dedup();
        let ranges: Vec<core::CidrRange> = subnets.iter().filter_map(|subnet| cidr(subnet)).collect();
        let every = names.is_empty() && ranges.is_empty();
        listener::FilterChain {
            filter_chain_match: (!every).then(|| listener::FilterChainMatch {
                prefix_ranges: ranges,
                server_names: names,
                ..Default::default()
            }),
            filters,
            transport_socket_connect_timeout: Some(seconds(HANDSHAKE_SECONDS)),
            ..Default::default()
        }
    }

    /// Returns the filters that forward to the service itself.
    fn forward_to_service(&self) -> Vec<listener::Filter> {
        let host = self.service.fqdn();
        let cluster = ClusterName::outbound(self.port.port, "", &host).to_string();
        // As in Istio, the port has no name here.
        let named = StatNameVariables { port: self.port.port, ..StatNameVariables::of_service(self.service) };
        let stat_prefix = self.stat_prefix(&cluster, &named);
        self.forward_to(cluster, stat_prefix, self.rule(&host).as_deref(), "")
    }

    /// Returns the filters that forward to the destinations of a rule.
    fn to(&self, rule: &Typed<VirtualService>, route: &[L4Destination]) -> Vec<listener::Filter> {
        let Some(first) = route.first() else {
            // Validation requires a destination.
            let name = clusters::BLACK_HOLE;
            return self.forward_to(name.to_owned(), name.to_owned(), None, "");
        };
        // As in Istio, the settings of the first destination's service apply to all.
        let settings = self.rule(&fqdn(&first.destination.host, &rule.meta.namespace));
        if let [only] = route {
            let cluster = self.cluster(rule, &only.destination);
            let subset = &only.destination.subset;
            let service = self.world.service(&fqdn(&only.destination.host, &rule.meta.namespace));
            let stat_prefix = match service {
                Some(service) => {
                    let named = StatNameVariables {
                        host: only.destination.host.clone(),
                        subset,
                        port: self.port.port,
                        port_name: &self.port.name,
                        ..StatNameVariables::of_service(service)
                    };
                    self.stat_prefix(&cluster, &named)
                }
                None => cluster.clone(),
            };
            return self.forward_to(cluster, stat_prefix, settings.as_deref(), subset);
        }
        let weighted = route.iter().filter_map(|to| {
            let weight = u32::try_from(to.weight).ok().filter(|weight| *weight > 0)?;
            Some(ClusterWeight { name: self.cluster(rule, &to.destination), weight, ..Default::default() })
        });
        let weighted = WeightedCluster { clusters: weighted.collect() };
        let prefix = format!("{}.{}", rule.meta.name, rule.meta.namespace);
        let proxy = self.proxy(prefix, ClusterSpecifier::WeightedClusters(weighted), settings.as_deref(), "");
        self.filters(proxy)
    }

    /// Returns the name of a cluster in statistics of connections.
    fn stat_prefix(&self, cluster: &str, named: &StatNameVariables<'_>) -> String {
        match self.world.mesh().outbound_cluster_stat_name.as_str() {
            "" => cluster.to_owned(),
            pattern => named.fill(pattern),
        }
    }

    fn forward_to(
        &self,
        cluster: String,
        stat_prefix: String,
        settings: Option<&Typed<DestinationRule>>,
        subset: &str,
    ) -> Vec<listener::Filter> {
        let mut proxy = self.proxy(stat_prefix, ClusterSpecifier::Cluster(cluster), settings, subset);
        let tunnel = settings.and_then(|settings| settings.spec.tunnel(subset));
        proxy.tunneling_config = tunnel.map(|tunnel| TunnelingConfig {
            hostname: match tunnel.target_host.contains(':') {
                true => format!("[{}]:{}", tunnel.target_host, tunnel.target_port),
                false => format!("{}:{}", tunnel.target_host, tunnel.target_port),
            },
            use_post: tunnel.protocol == "POST",
            ..Default::default()
        });
        self.filters(proxy)
    }

    fn proxy(
        &self,
        stat_prefix: String,
        to: ClusterSpecifier,
        settings: Option<&Typed<DestinationRule>>,
        subset: &str,
    ) -> TcpProxy {
        let policy = settings.and_then(|settings| settings.spec.traffic_policy.as_ref());
        let pool = policy.and_then(|policy| policy.connection_pool.as_ref());
        let tcp = pool.and_then(|pool| pool.tcp.as_ref());
        let hashes = balance::hashes_source_ip(settings, subset);
        let idle = tcp.and_then(|tcp| tcp.idle_timeout).or(self.setting.view.idle_timeout);
        TcpProxy {
            idle_timeout: idle.map(|length| duration(length.0)),
            max_downstream_connection_duration: tcp
                .and_then(|tcp| tcp.max_connection_duration)
                .map(|length| duration(length.0)),
            ..filters::tcp_proxy(FilterSettings { hash_source_ip: hashes, ..self.setting }, stat_prefix, to)
        }
    }

    fn filters(&self, proxy: TcpProxy) -> Vec<listener::Filter> {
        let mut before = Vec::new();
        if self.port.protocol == Protocol::Mongo {
            let mongo = MongoProxy { stat_prefix: proxy.stat_prefix.clone(), ..Default::default() };
            before.push(filters::network("envoy.filters.network.mongo_proxy", pack(&mongo)));
        }
        let view = self.setting.view;
        let entry_host = self.service.spec.entry_host.as_ref();
        if entry_host.is_some_and(|it| it.resolution == Resolution::DynamicDns) && self.port.protocol.is_tls()
        {
            let families = Families { ipv4: view.ipv4, ipv6: view.ipv6 };
            before.push(dynamic_dns::of_server_name(&self.service.fqdn(), self.port.port, families));
        }
        filters::tcp_chain_of(self.setting, Direction::Outbound, before, &proxy)
    }

    /// Returns the name of a destination's cluster. A destination without a port gets the only port of its service, or
    /// the port of the listener.
    fn cluster(&self, rule: &Typed<VirtualService>, to: &Destination) -> String {
        let host = fqdn(&to.host, &rule.meta.namespace);
        let service = self.world.service(&host);
        let configured = to.port.and_then(|port| u16::try_from(port.number).ok()).filter(|port| *port > 0);
        let only = || match service.map(|service| &service.spec.ports[..]) {
            Some([only]) => Some(only.port),
            _ => None,
        };
        let port = configured.or_else(only).unwrap_or(self.port.port);
        ClusterName::outbound(port, &to.subset, self.world.aliased(&host)).to_string()
    }

    fn rule(&self, host: &str) -> Option<Arc<Typed<DestinationRule>>> {
        let view = self.setting.view;
        self.world.destination_rule_for(host, &view.namespace, Some(&view.labels))
    }
}

/// Returns whether a match applies to a client and a port.
fn applies(found: &L4Match, view: &ProxyView, port: u16) -> bool {
    let client = ClientFacts { port, gateway: None, labels: &view.labels, namespace: &view.namespace };
    exclusion(&conditions(found, false), &client, "").is_none()
}

/// Returns the conditions of a match on the client. As in Istio, labels and namespaces do not matter at a gateway.
pub(in crate::compile) fn conditions(found: &L4Match, at_gateway: bool) -> ClientConditions<'_> {
    let (labels, namespace) = match at_gateway {
        true => (const { &Labels::new() }, ""),
        false => (&found.source_labels, found.source_namespace.as_deref().unwrap_or_default()),
    };
    let port = found.port.filter(|port| at_gateway || *port > 0);
    ClientConditions { port, gateways: &found.gateways, labels, namespace }
}

/// Returns the field of a VirtualService that makes a sidecar's filter chain of TCP or TLS: of connections to this port
/// of a service, with these server names. For explanations.
pub fn sidecar_l4_field(
    rule: &Typed<VirtualService>,
    view: &ProxyView,
    port: u16,
    server_names: &[String],
) -> Option<String> {
    let by_name = tls_field(rule, server_names, |found| applies(found, view, port));
    by_name.or_else(|| {
        let position = rule.spec.tcp.iter().position(|tcp| {
            tcp.matches.is_empty()
                || tcp
                    .matches
                    .iter()
                    .any(|found| found.destination_subnets.is_empty() && applies(found, view, port))
        });
        position.map(|index| format!("spec.tcp[{index}]"))
    })
}

/// Returns the field of the first TLS match with these server names that applies.
pub(in crate::compile) fn tls_field(
    rule: &Typed<VirtualService>,
    server_names: &[String],
    applies: impl Fn(&L4Match) -> bool,
) -> Option<String> {
    rule.spec.tls.iter().enumerate().find_map(|(index, tls)| {
        let is_it = |found: &L4Match| applies(found) && has_names(&found.sni_hosts, server_names);
        let position = tls.matches.iter().position(is_it)?;
        Some(format!("spec.tls[{index}].match[{position}]"))
    })
}

/// Returns whether two lists have the same server names. The name `*` is every connection, as is an empty list.
pub(in crate::compile) fn has_names(one: &[String], other: &[String]) -> bool {
    let names = |list: &[String]| {
        let mut names: Vec<String> = list.iter().map(|name| name.to_ascii_lowercase()).collect();
        if names.iter().any(|name| name == "*") {
            names.clear();
        }
        names.sort_unstable();
        names.dedup();
        names
    };
    names(one) == names(other)
}

fn texts(list: &[String]) -> Vec<&str> {
    list.iter().map(String::as_str).collect()
}

/// Returns the metadata that name the VirtualService of a filter chain.
fn origin(rule: &Typed<VirtualService>) -> core::Metadata {
    let path = config_path("virtual-service", &rule.meta.namespace, &rule.meta.name);
    metadata("istio", fields([("config", path)]))
}
