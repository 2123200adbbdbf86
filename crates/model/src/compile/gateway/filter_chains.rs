//! Filter chains of gateways: HTTP, terminated TLS, forwarded TLS and TCP.

use std::{collections::BTreeSet, sync::Arc};

use skysail_core::{ClusterName, names::Direction};
use skysail_xds::envoy::pb::envoy::extensions::filters::network::tcp_proxy::v3::{
    TcpProxy,
    tcp_proxy::{ClusterSpecifier, WeightedCluster, weighted_cluster::ClusterWeight},
};

use super::{
    servers::{GatewayServer, MergedServers, ServerGroup},
    tls,
};
use crate::{
    api::{
        DestinationRule, Labels, Protocol, Service, ServicePort, Typed, VirtualService,
        gateway::ServerTlsMode,
        virtual_service::{L4Destination, L4Match},
    },
    compile::{
        Scope, balance,
        client_match::{ClientFacts, exclusion},
        filters::{self, FilterSettings, Routes},
        listeners::l4_conditions,
        pb::{core, duration, listener, pack, types},
        rate_limit::RateLimits,
        rbac::Authorization,
        stat_names::StatNameVariables,
        tls::ISTIO_ANY,
    },
    world::{fqdn, is_within},
};

/// A filter chain and its match.
pub(super) struct Chain {
    /// Server names; `*` matches every connection, as does an empty list.
    pub(super) server_names: Vec<String>,
    pub(super) alpn: Vec<String>,
    pub(super) filters: Vec<listener::Filter>,
    pub(super) socket: Option<core::TransportSocket>,
}

/// Server names of forwarded TLS that have a chain, by port and address.
pub(super) type TakenNames<'a> = BTreeSet<(u16, &'a str, String)>;

/// Context in which chains are compiled.
struct Compiler<'a, 's> {
    scope: &'a Scope<'s>,
    setting: FilterSettings<'a>,
    authorization: &'a Authorization,
    limits: RateLimits<'s>,
    merged: &'a MergedServers<'a>,
}

/// Returns the filter chains of a group of servers. `listener` is the name of the listener.
pub(super) fn of_group<'a>(
    scope: &Scope<'_>,
    setting: FilterSettings<'_>,
    merged: &MergedServers<'_>,
    group: &ServerGroup<'a>,
    listener: &str,
    authorization: &Authorization,
    names: &mut TakenNames<'a>,
) -> Vec<Chain> {
    let limits = RateLimits::new(scope.world, setting.view);
    let compiler = Compiler { scope, setting, authorization, limits, merged };
    if group.protocol.is_http() {
        return compiler.http(&group.servers, listener, group.protocol).into_iter().collect();
    }
    let mut chains = Vec::new();
    for server in &group.servers {
        match server.tls() {
            Some(tls) if tls.mode == ServerTlsMode::AutoPassthrough => {
                chains.extend(compiler.between_networks(server));
            }
            Some(tls) if tls.mode.is_passthrough() => chains.extend(compiler.forwarded(server, names)),
            _ if server.server.is_http() => {
                chains.extend(compiler.http(std::slice::from_ref(server), listener, group.protocol));
            }
            _ => chains.extend(compiler.tcp(server)),
        }
    }
    chains
}

impl Compiler<'_, '_> {
    /// Returns the chain of HTTP, in plain text or with terminated TLS, for servers with the same routes.
    fn http(&self, servers: &[GatewayServer<'_>], listener: &str, protocol: Protocol) -> Option<Chain> {
        let server = servers.first()?;
        let limits = self.limits.of_rules(servers.iter().flat_map(|server| self.merged.served_rules(server)));
        let policy = limits.after(self.authorization.http_filters());
        let grpc_web = protocol == Protocol::GrpcWeb;
        let setting = FilterSettings { grpc_web, port: server.listener_port, ..self.setting };
        let filters = filters::http_chain(
            setting,
            Direction::Outbound,
            format!("outbound_{listener};"),
            Routes::ByName(server.route_name.clone()),
            policy,
        );
        let socket = server.tls().map(|tls| tls::socket(self.setting, tls, false));
        let server_names = if socket.is_some() { server.server_names() } else { Vec::new() };
        Some(Chain { server_names, alpn: Vec::new(), filters, socket })
    }

    /// Returns the chain of TCP, in plain text or with terminated TLS; `None` if no VirtualService routes it.
    fn tcp(&self, server: &GatewayServer<'_>) -> Option<Chain> {
        let gateway = server.gateway_name();
        let rules = self.merged.served_rules(server);
        let (rule, route) = rules.iter().find_map(|rule| {
            let routes = &mut rule.spec.tcp.iter();
            let route = routes.find(|route| applies(&route.matches, rule, server, &gateway));
            route.map(|route| (*rule, &route.route))
        })?;
        let mutual = server.tls().is_some_and(|tls| tls.mode == ServerTlsMode::IstioMutual);
        let socket = server.tls().map(|tls| tls::socket(self.setting, tls, true));
        let server_names = if socket.is_some() { server.server_names() } else { Vec::new() };
        let filters = self.tcp_filters(rule, route, server, mutual)?;
        Some(Chain { server_names, alpn: Vec::new(), filters, socket })
    }

    /// Returns a chain for each match of forwarded TLS.
    fn forwarded<'a>(&self, server: &GatewayServer<'a>, taken: &mut TakenNames<'a>) -> Vec<Chain> {
        let gateway = server.gateway_name();
        let mut chains = Vec::new();
        for rule in self.merged.served_rules(server) {
            for route in &rule.spec.tls {
                for found in &route.matches {
                    if !applies(std::slice::from_ref(found), rule, server, &gateway) {
                        continue;
                    }
                    let (port, bind) = (server.listener_port, server.server.bind.as_str());
                    let place = |name: &String| (port, bind, name.to_ascii_lowercase());
                    if found.sni_hosts.iter().any(|name| taken.contains(&place(name))) {
                        continue;
                    }
                    let Some(filters) = self.tcp_filters(rule, &route.route, server, false) else { continue };
                    taken.extend(found.sni_hosts.iter().map(place));
                    let server_names = found.sni_hosts.clone();
                    chains.push(Chain { server_names, alpn: Vec::new(), filters, socket: None });
                }
            }
        }
        chains
    }

    /// Returns a chain for each cluster of the mesh's services that the server has. The server name of mutual TLS names
    /// the cluster. As in Istio, extensions apply, but authorization does not: the destination enforces its own.
    fn between_networks(&self, server: &GatewayServer<'_>) -> Vec<Chain> {
        let names = server.server_names();
        let is_served = |service: &&Arc<Typed<Service>>| {
            let (host, entry_host) = (service.fqdn(), service.spec.entry_host.as_ref());
            entry_host.is_none_or(|entry_host| !entry_host.external)
                && names.iter().any(|name| is_within(&host, name))
        };
        let services: Vec<_> = self.scope.services().collect();
        let mut chains = Vec::new();
        for service in services.iter().filter(is_served) {
            let host = service.fqdn();
            let rule = self.scope.world.destination_rule(&host, self.scope.namespace);
            let subsets = rule.iter().flat_map(|rule| &rule.spec.subsets).map(|subset| subset.name.as_str());
            let subsets: Vec<&str> = std::iter::once("").chain(subsets).collect();
            for port in service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp) {
                for subset in &subsets {
                    let cluster = ClusterName::outbound(port.port, subset, &host).sni();
                    let filters =
                        self.between_networks_filters(service, port, rule.as_deref(), subset, &cluster);
                    let alpn = ISTIO_ANY.iter().map(ToString::to_string).collect();
                    chains.push(Chain { server_names: vec![cluster], alpn, filters, socket: None });
                }
            }
        }
        chains
    }

    fn between_networks_filters(
        &self,
        service: &Typed<Service>,
        port: &ServicePort,
        rule: Option<&Typed<DestinationRule>>,
        subset: &str,
        cluster: &str,
    ) -> Vec<listener::Filter> {
        let pattern = &self.setting.mesh.outbound_cluster_stat_name;
        let stat_prefix = match pattern.as_str() {
            "" => cluster.to_owned(),
            pattern => {
                StatNameVariables { subset, target: 0, ..StatNameVariables::of_port(service, port, 0) }
                    .fill(pattern)
            }
        };
        let policy = rule.and_then(|rule| rule.spec.traffic_policy.as_ref());
        let tcp = policy.and_then(|policy| policy.connection_pool.as_ref()?.tcp.as_ref());
        let idle = tcp.and_then(|tcp| tcp.idle_timeout).or(self.setting.view.idle_timeout);
        let mut proxy = TcpProxy {
            access_log: self.setting.telemetry.logs.clone(),
            stat_prefix,
            cluster_specifier: Some(ClusterSpecifier::Cluster(cluster.to_owned())),
            idle_timeout: idle.map(|length| duration(length.0)),
            max_downstream_connection_duration: tcp
                .and_then(|tcp| tcp.max_connection_duration)
                .map(|length| duration(length.0)),
            ..Default::default()
        };
        proxy.hash_policy.extend(balance::hashes_source_ip(rule, subset).then(source_ip));
        let proxy = filters::network("envoy.filters.network.tcp_proxy", pack(&proxy));
        let setting = FilterSettings { port: port.port, ..self.setting };
        let extensions = setting.network_extensions(Direction::Outbound);
        extensions.chain(filters::network_stats(setting)).chain([proxy]).collect()
    }

    fn tcp_filters(
        &self,
        rule: &Typed<VirtualService>,
        to: &[L4Destination],
        server: &GatewayServer<'_>,
        exchange: bool,
    ) -> Option<Vec<listener::Filter>> {
        let cluster = |to: &L4Destination| {
            let host = fqdn(&to.destination.host, &rule.meta.namespace);
            let port = self.scope.destination_port(&to.destination, &host, server.server.number());
            ClusterName::outbound(port, &to.destination.subset, &host).to_string()
        };
        let rule_namespace = rule.meta.namespace.clone();
        let mut proxy = TcpProxy { access_log: self.setting.telemetry.logs.clone(), ..Default::default() };
        match to {
            [] => return None,
            [only] => {
                let name = cluster(only);
                let rule = self.scope.world.destination_rule(
                    &fqdn(&only.destination.host, &rule.meta.namespace),
                    self.scope.namespace,
                );
                if balance::hashes_source_ip(rule.as_deref(), &only.destination.subset) {
                    proxy.hash_policy.push(source_ip());
                }
                proxy.stat_prefix = self.stat_prefix(&name, only, &rule_namespace, server);
                proxy.cluster_specifier = Some(ClusterSpecifier::Cluster(name));
            }
            all => {
                let weighted = all.iter().filter_map(|to| {
                    let weight = u32::try_from(to.weight).ok().filter(|weight| *weight > 0)?;
                    Some(ClusterWeight { name: cluster(to), weight, ..Default::default() })
                });
                let clusters: Vec<_> = weighted.collect();
                if clusters.is_empty() {
                    return None;
                }
                proxy.stat_prefix = format!("{}.{}", rule.meta.name, rule.meta.namespace);
                proxy.cluster_specifier =
                    Some(ClusterSpecifier::WeightedClusters(WeightedCluster { clusters }));
            }
        }
        let proxy = filters::network("envoy.filters.network.tcp_proxy", pack(&proxy));
        let view = self.setting.view;
        let mut list: Vec<_> = exchange.then(|| filters::exchange(view)).flatten().into_iter().collect();
        list.extend(self.authorization.tcp_filters());
        // As in Istio, extensions match the port of the server here, not that of the listener.
        let setting = FilterSettings { port: server.server.number(), ..self.setting };
        list.extend(setting.network_extensions(Direction::Outbound));
        list.extend(filters::network_stats(setting));
        list.push(proxy);
        Some(list)
    }
}

impl Compiler<'_, '_> {
    /// Returns the name of a destination's cluster in statistics of connections. As in Istio, the port is the server's.
    fn stat_prefix(
        &self,
        cluster: &str,
        to: &L4Destination,
        namespace: &str,
        server: &GatewayServer<'_>,
    ) -> String {
        let pattern = &self.setting.mesh.outbound_cluster_stat_name;
        let service = self.scope.world.service(&fqdn(&to.destination.host, namespace));
        let Some(service) = service.filter(|_| !pattern.is_empty()) else { return cluster.to_owned() };
        let named = StatNameVariables {
            host: to.destination.host.clone(),
            subset: &to.destination.subset,
            port: server.server.number(),
            port_name: server.server.port.as_ref().map_or("", |port| port.name.as_str()),
            ..StatNameVariables::of_service(service)
        };
        named.fill(pattern)
    }
}

fn source_ip() -> types::HashPolicy {
    types::HashPolicy {
        policy_specifier: Some(types::hash_policy::PolicySpecifier::SourceIp(Default::default())),
    }
}

/// Returns whether one of these matches applies to a server; an empty list applies to all.
pub(super) fn applies(
    matches: &[L4Match],
    rule: &Typed<VirtualService>,
    server: &GatewayServer<'_>,
    gateway: &str,
) -> bool {
    let client = ClientFacts {
        port: server.server.number(),
        gateway: Some(gateway),
        labels: const { &Labels::new() },
        namespace: "",
    };
    let applies =
        |found: &L4Match| exclusion(&l4_conditions(found, true), &client, &rule.meta.namespace).is_none();
    matches.is_empty() || matches.iter().any(applies)
}
