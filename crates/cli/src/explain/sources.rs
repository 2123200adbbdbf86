//! Sources of decisions: objects, files and lines.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use skysail_model::{
    Kind, Object, ObjectKey, Origin, Role, ServerSource, World,
    api::{Service, Typed, VirtualService, kube::TargetPort},
    gateway_route_fields, route_sources, sidecar_l4_field,
};
use skysail_proxy::explain::{ClusterReport, RouteReport};
use skysail_sandbox::OfflinePod;

use super::{proxies::Proxy, report::Source};

/// Finds the objects of a mesh.
#[derive(Clone, Copy)]
pub(super) struct Sources<'a> {
    pub(super) world: &'a World,
}

/// Sources of the routes of a virtual host.
#[derive(Default)]
pub(super) struct RouteSources {
    /// Source of each route.
    pub(super) routes: Vec<Option<Source>>,
    /// VirtualService and field of each route.
    rules: Vec<Option<(Arc<Typed<VirtualService>>, String)>>,
}

/// A VirtualService with its field for each route.
type Rule = (Arc<Typed<VirtualService>>, Vec<String>);

impl Sources<'_> {
    /// Returns the source of an object; for an internal one, that of the object from which it is made.
    pub(super) fn of(&self, key: &ObjectKey, field: &str) -> Source {
        if let Some((key, field)) = self.world.made_from(key) {
            return self.of(&key, &field);
        }
        let origin = self.world.origin(key);
        Source {
            object: key.to_string(),
            field: field.to_owned(),
            file: origin.map(|origin| origin.file.to_string()).unwrap_or_default(),
            line: origin.map_or(0, |origin: &Origin| origin.line_of(field)),
        }
    }

    fn named(&self, kind: Kind, namespace: &str, name: &str, field: &str) -> Source {
        let key = ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() };
        self.of(&key, field)
    }

    /// Returns the source of a path in metadata: `/apis/networking.istio.io/v1/namespaces/NAMESPACE/KIND/NAME`.
    pub(super) fn path(&self, path: &str, field: &str) -> Option<Source> {
        let rest = path.split_once("/namespaces/")?.1;
        let mut parts = rest.splitn(3, '/');
        let (namespace, kind, name) = (parts.next()?, parts.next()?, parts.next()?);
        let kind = match kind {
            "virtual-service" => Kind::VirtualService,
            "destination-rule" => Kind::DestinationRule,
            "sidecar" => Kind::Sidecar,
            "gateway" => Kind::Gateway,
            "service-entry" => Kind::ServiceEntry,
            _ => return None,
        };
        Some(self.named(kind, namespace, name, field))
    }

    /// Returns the source of a server of a Gateway.
    pub(super) fn server(&self, server: &ServerSource) -> Source {
        self.of(&server.gateway, &format!("spec.servers[{}]", server.index))
    }

    /// Returns the field of a VirtualService from which a sidecar's filter chain for TCP or TLS is compiled. `path` is
    /// that of the VirtualService in metadata.
    pub(super) fn l4_field(
        &self,
        proxy: &Proxy,
        path: &str,
        port: u16,
        server_names: &[String],
    ) -> Option<String> {
        let source = self.path(path, "")?;
        let (namespace, name) = source.object.strip_prefix("VirtualService ")?.split_once('/')?;
        let key =
            ObjectKey { kind: Kind::VirtualService, namespace: namespace.to_owned(), name: name.to_owned() };
        let Some((Object::VirtualService(rule), _)) = self.world.effective(&key) else { return None };
        sidecar_l4_field(&rule, &proxy.view, port, server_names)
    }

    /// Returns the source of a rule name such as `ns[shop]-policy[deny]-rule[0]`.
    pub(super) fn policy_rule(&self, rule: &str) -> Option<Source> {
        let (_, rest) = rule.split_once("ns[")?;
        let (namespace, rest) = rest.split_once("]-policy[")?;
        let (name, rest) = rest.split_once("]-rule[")?;
        let (index, _) = rest.split_once(']')?;
        let mut source =
            self.named(Kind::AuthorizationPolicy, namespace, name, &format!("spec.rules[{index}]"));
        let is_unknown = source.line == 0;
        // A policy without rules has an artificial one that never matches.
        let origin = self.world.origin(&ObjectKey {
            kind: Kind::AuthorizationPolicy,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        });
        let has_field = origin
            .and_then(|origin| origin.lines.as_ref())
            .is_some_and(|lines| lines.contains_key(&source.field));
        if !is_unknown && !has_field {
            source.field = "spec".to_owned();
        }
        Some(source)
    }

    /// Returns the source of the filter of a rate limit: its name ends with `NAMESPACE/POLICY/RULE`.
    pub(super) fn limit(&self, filter: &str) -> Option<Source> {
        let mut parts = filter.strip_prefix("skysail.rate_limit/")?.splitn(3, '/');
        let (namespace, name, rule) = (parts.next()?, parts.next()?, parts.next()?);
        let key =
            ObjectKey { kind: Kind::RateLimitPolicy, namespace: namespace.to_owned(), name: name.to_owned() };
        let field = self.world.limit_rule(&key, rule).unwrap_or_default();
        Some(self.of(&key, &field))
    }

    /// Returns the source of the filter of an extension, `extensions.istio.io/KIND/NAMESPACE.NAME`.
    pub(super) fn extension(&self, filter: &str) -> Option<Source> {
        let (kind, name) = filter.strip_prefix("extensions.istio.io/")?.split_once('/')?;
        let (namespace, name) = name.split_once('.')?;
        let kinds = [Kind::WasmPlugin, Kind::TrafficExtension];
        let kind = kinds.into_iter().find(|of| of.as_str().eq_ignore_ascii_case(kind))?;
        Some(self.of(&ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() }, ""))
    }

    /// Returns the policies of rules, once each.
    pub(super) fn policies(&self, rules: &[String]) -> Vec<Source> {
        let mut found: Vec<Source> = Vec::new();
        for mut source in rules.iter().filter_map(|rule| self.policy_rule(rule)) {
            if !found.iter().any(|known| known.object == source.object) {
                source.field = String::new();
                source.line = self.first_line(&source);
                found.push(source);
            }
        }
        found
    }

    fn first_line(&self, source: &Source) -> u32 {
        let key = source.object.strip_prefix("AuthorizationPolicy ").and_then(|name| name.split_once('/'));
        let Some((namespace, name)) = key else { return source.line };
        self.named(Kind::AuthorizationPolicy, namespace, name, "").line
    }

    /// Returns the service port at a virtual address, which causes an outbound listener.
    pub(super) fn service_at(&self, address: IpAddr, port: u16) -> Option<Source> {
        let has = |service: &&Arc<Typed<Service>>| service.spec.cluster_ips.contains(&address);
        let mut services = self.world.services().filter(has);
        services.find_map(|service| self.service_port(service, |of| of.port == port))
    }

    /// Returns the full name of the service at a virtual address and port.
    pub(super) fn service_host(&self, address: IpAddr, port: u16) -> Option<String> {
        let is_it = |service: &&Arc<Typed<Service>>| {
            service.spec.cluster_ips.contains(&address) && service.spec.port(port).is_some()
        };
        self.world.services().find(is_it).map(|service| service.fqdn())
    }

    /// Returns the service port that leads to a port of a pod, which causes an inbound filter chain.
    pub(super) fn service_of_port(&self, pod: &OfflinePod, proxy: &Proxy, port: u16) -> Option<Source> {
        let services = self.world.services_selecting(&pod.namespace, &pod.labels);
        services.into_iter().find_map(|service| {
            self.service_port(service, |of| match &of.target {
                TargetPort::Number(number) => *number == port,
                TargetPort::Name(name) => proxy.view.named_ports.get(name) == Some(&port),
            })
        })
    }

    fn service_port(
        &self,
        service: &Typed<Service>,
        is_it: impl Fn(&skysail_model::api::ServicePort) -> bool,
    ) -> Option<Source> {
        let index = service.spec.ports.iter().position(is_it)?;
        Some(self.service(service, &format!("spec.ports[{index}]")))
    }

    fn service(&self, service: &Typed<Service>, field: &str) -> Source {
        let (kind, name) = match &service.spec.entry_host {
            Some(host) => (Kind::ServiceEntry, &host.entry),
            None => (Kind::Service, &service.meta.name),
        };
        self.named(kind, &service.meta.namespace, name, field)
    }

    /// Returns the services of a cluster.
    pub(super) fn services(&self, cluster: &ClusterReport) -> Vec<Source> {
        let named = cluster.services.iter().filter_map(|service| service.split_once('/'));
        let found = named.filter_map(|(namespace, name)| self.world.service_named(namespace, name));
        found.map(|service| self.service(service, "")).collect()
    }

    /// Returns the DestinationRule of a cluster, with the field of its subset, or with `spec.trafficPolicy`.
    pub(super) fn rule(&self, cluster: &ClusterReport) -> Option<Source> {
        let path = cluster.origin.as_deref()?;
        let key = self.path(path, "")?;
        let (namespace, name) = key.object.strip_prefix("DestinationRule ")?.split_once('/')?;
        let rule =
            ObjectKey { kind: Kind::DestinationRule, namespace: namespace.to_owned(), name: name.to_owned() };
        let found = self.world.effective(&rule);
        let subsets = match &found {
            Some((Object::DestinationRule(rule), _)) => rule.spec.subsets.as_slice(),
            _ => &[],
        };
        let subset = subsets.iter().position(|subset| subset.name == cluster.subset);
        let field = match subset {
            Some(index) => format!("spec.subsets[{index}]"),
            None => "spec.trafficPolicy".to_owned(),
        };
        Some(self.of(&rule, &field))
    }

    /// Returns the sources of the routes of a virtual host at a proxy.
    pub(super) fn routes(&self, proxy: &Proxy, virtual_host: &str, routes: &[RouteReport]) -> RouteSources {
        // With on-demand virtual hosts, the name begins with that of the route table.
        let name = virtual_host.rsplit('/').next().unwrap_or(virtual_host);
        let place = name.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let mut found = RouteSources::default();
        // Rules by path, with the number of their routes so far.
        let mut rules: BTreeMap<&str, (Option<Rule>, usize)> = BTreeMap::new();
        for route in routes {
            let Some(path) = route.origin.as_deref() else {
                found.routes.push(self.default_route(place.map(|(host, _)| host)));
                found.rules.push(None);
                continue;
            };
            let (rule, number) =
                rules.entry(path).or_insert_with(|| (place.and_then(|at| self.rule_of(proxy, path, at)), 0));
            let field = rule.as_ref().and_then(|(rule, fields)| Some((rule, fields.get(*number)?)));
            *number += 1;
            let field = field.map(|(rule, field)| self.within_delegate(rule, field));
            let of_rule = field.as_ref().map(|(rule, field)| self.of_rule(rule, field));
            found.rules.push(field);
            let of_api = self.gateway_api_route(path, &route.name);
            found.routes.push(of_api.or(of_rule).or_else(|| self.path(path, "")));
        }
        found
    }

    /// Returns the VirtualService that has a rule, and the field of the rule in it, for the field of a compiled route: with
    /// delegates, rules of several objects are merged.
    fn within_delegate(
        &self,
        root: &Arc<Typed<VirtualService>>,
        field: &str,
    ) -> (Arc<Typed<VirtualService>>, String) {
        let merged = || {
            let (index, rest) = field.strip_prefix("spec.http[")?.split_once(']')?;
            let (rule, own) = self.world.http_rule_origins(root).into_iter().nth(index.parse().ok()?)?;
            // Matches of a delegate are merged with those of its root.
            let rest = if Arc::ptr_eq(&rule, root) { rest } else { "" };
            Some((rule, format!("spec.http[{own}]{rest}")))
        };
        let has_delegates = root.spec.http.iter().any(|http| http.delegate.is_some());
        has_delegates.then(merged).flatten().unwrap_or_else(|| (Arc::clone(root), field.to_owned()))
    }

    fn of_rule(&self, rule: &Typed<VirtualService>, field: &str) -> Source {
        self.named(Kind::VirtualService, &rule.meta.namespace, &rule.meta.name, field)
    }

    /// Returns the VirtualService of a path with its field for each route; `None` for routes of Gateway API.
    fn rule_of(&self, proxy: &Proxy, path: &str, (host, port): (&str, u16)) -> Option<Rule> {
        let source = self.path(path, "")?;
        let (namespace, name) = source.object.strip_prefix("VirtualService ")?.split_once('/')?;
        let (rule, fields) = match proxy.view.role {
            Role::Router => {
                let key = ObjectKey {
                    kind: Kind::VirtualService,
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                };
                let Some((Object::VirtualService(rule), _)) = self.world.effective(&key) else { return None };
                let fields = gateway_route_fields(self.world, &proxy.view, &rule, port);
                (rule, fields)
            }
            Role::Sidecar | Role::Grpc => route_sources(self.world, &proxy.scope, host, port)?,
        };
        let is_it = (rule.meta.namespace.as_str(), rule.meta.name.as_str()) == (namespace, name);
        (is_it && rule.spec.derived.is_none()).then_some((rule, fields))
    }

    /// Returns the service whose default route forwards its requests.
    fn default_route(&self, host: Option<&str>) -> Option<Source> {
        self.world.service(host?).map(|service| self.service(service, ""))
    }

    /// Returns the route of the Gateway API that a rule was made from: its name is `NAMESPACE.NAME.INDEX`.
    fn gateway_api_route(&self, path: &str, route: &str) -> Option<Source> {
        if !path.rsplit('/').next().is_some_and(|name| name.contains('~')) {
            return None;
        }
        let (rest, index) = route.rsplit_once('.')?;
        let (namespace, name) = rest.split_once('.')?;
        let index: usize = index.parse().ok()?;
        [Kind::HttpRoute, Kind::GrpcRoute].into_iter().find_map(|kind| {
            let key = ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() };
            self.world.origin(&key)?;
            Some(self.of(&key, &format!("spec.rules[{index}]")))
        })
    }

    /// Returns the policy that decides the mode of mutual TLS at a port of a workload.
    pub(super) fn peer_mode(&self, proxy: &Proxy, port: u16) -> Option<Source> {
        let view = &proxy.view;
        let (policy, field) = self.world.peer_mode_source(&view.namespace, &view.labels, port)?;
        Some(self.named(Kind::PeerAuthentication, &policy.meta.namespace, &policy.meta.name, &field))
    }
}

impl RouteSources {
    /// Returns the source of a field of the rule of a route, if the rule sets it.
    pub(super) fn setting(&self, sources: &Sources<'_>, route: usize, setting: &str) -> Option<Source> {
        let (rule, field) = self.rules.get(route)?.as_ref()?;
        let field = field.split(".match[").next()?;
        let index: usize = field.strip_prefix("spec.http[")?.strip_suffix(']')?.parse().ok()?;
        let http = rule.spec.http.get(index)?;
        let is_set = match setting {
            "timeout" => http.timeout.is_some(),
            "retries" => http.retries.is_some(),
            "fault" => http.fault.is_some(),
            "corsPolicy" => http.cors_policy.is_some(),
            _ => false,
        };
        is_set.then(|| sources.of_rule(rule, &format!("{field}.{setting}")))
    }
}
