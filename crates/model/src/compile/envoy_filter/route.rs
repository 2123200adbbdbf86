//! Patches of route configurations, virtual hosts and routes.

use std::{collections::BTreeMap, sync::Arc};

use prost_reflect::{DynamicMessage, Value};
use skysail_core::ClusterName;
use skysail_xds::{Kind, Resource};

use super::{ApplicablePatch, Patches, decode, edit::edit, encode};
use crate::{
    api::envoy_filter::{ApplyTo, Context, PatchOperation, RouteActionMatch},
    reflect::{self, child, set_list, take_list, text, texts},
};

const PARTS: &[ApplyTo] = &[ApplyTo::RouteConfiguration, ApplyTo::VirtualHost, ApplyTo::HttpRoute];

/// Patches the route configurations and virtual hosts among resources. `ports` are those of a gateway, each with a port
/// of a service that leads to it.
pub(super) fn patch_all(
    patches: &Patches<'_>,
    context: Context,
    ports: &[(u32, u32)],
    made: Vec<Arc<Resource>>,
) -> Vec<Arc<Resource>> {
    if !patches.has(PARTS) {
        return made;
    }
    let mut patched = Vec::with_capacity(made.len());
    // Route configurations whose virtual hosts are resources of their own.
    let mut apart: BTreeMap<String, RouteProperties> = BTreeMap::new();
    for resource in made {
        let message = match resource.kind {
            Kind::Route => decode(&resource),
            Kind::VirtualHost => decode(&resource),
            _ => None,
        };
        match message {
            Some(mut configuration) if resource.kind == Kind::Route => {
                let routes = RouteProperties::of(&configuration, context, ports);
                if configuration.has_field_by_name("vhds") {
                    routes.merge(patches, &mut configuration);
                    let mut hosts = take_list(&mut configuration, "virtual_hosts");
                    routes.virtual_hosts(patches, &mut hosts);
                    set_list(&mut configuration, "virtual_hosts", hosts);
                    apart.insert(routes.name.clone(), routes);
                } else {
                    routes.configuration(patches, &mut configuration);
                }
                patched.push(encode(Kind::Route, &configuration));
            }
            Some(host) => patched.extend(patch_virtual_host(patches, context, host)),
            None => patched.push(resource),
        }
    }
    for routes in apart.into_values() {
        let added = routes.added(patches).filter_map(|host| encode_host(&routes.name, host));
        patched.extend(added.collect::<Vec<_>>());
    }
    patched
}

/// Patches a route configuration within a listener.
pub(super) fn patch_configuration(
    patches: &Patches<'_>,
    context: Context,
    configuration: &mut DynamicMessage,
) {
    RouteProperties::of(configuration, context, &[]).configuration(patches, configuration);
}

/// Patches a virtual host that is a resource of its own, named `ROUTE CONFIGURATION/NAME`.
fn patch_virtual_host(
    patches: &Patches<'_>,
    context: Context,
    mut host: DynamicMessage,
) -> Option<Arc<Resource>> {
    let full = text(&host, "name");
    let (name, short) = full.split_once('/').unwrap_or(("", &full));
    set_name(&mut host, short);
    let routes = RouteProperties { name: name.to_owned(), context, ports: Vec::new() };
    routes.virtual_host(patches, &mut host).then(|| encode_host(name, host)).flatten()
}

fn set_name(host: &mut DynamicMessage, name: &str) {
    _ = host.try_set_field_by_name("name", Value::String(name.to_owned()));
}

/// Encodes a virtual host as a resource of its own.
fn encode_host(routes: &str, mut host: DynamicMessage) -> Option<Arc<Resource>> {
    let name = format!("{routes}/{}", text(&host, "name"));
    set_name(&mut host, &name);
    let domains = texts(&host, "domains");
    let aliases: Vec<String> =
        domains.iter().map(|domain| format!("{routes}/{}", domain.to_ascii_lowercase())).collect();
    let body = reflect::encode(&host).into();
    let aliases = aliases.iter().map(String::as_str);
    (!domains.is_empty()).then(|| Resource::with_aliases(Kind::VirtualHost, &name, body, aliases))
}

/// Properties of a route configuration that conditions compare.
struct RouteProperties {
    name: String,
    context: Context,
    /// Ports of services that lead to the port of the gateway.
    ports: Vec<u32>,
}

impl RouteProperties {
    fn of(configuration: &DynamicMessage, context: Context, ports: &[(u32, u32)]) -> Self {
        let name = text(configuration, "name");
        let number = gateway_route(&name).0;
        let leading = ports.iter().filter(|(target, _)| *target == number);
        Self { context, ports: leading.map(|(_, port)| *port).collect(), name }
    }

    /// Returns the patches of a part whose conditions the route configuration meets.
    fn of_part<'a, 'b>(
        &'a self,
        patches: &'a Patches<'b>,
        apply_to: ApplyTo,
    ) -> impl Iterator<Item = &'a ApplicablePatch<'b>> {
        patches.of(apply_to, self.context).filter(|patch| self.meet(patch))
    }

    fn meet(&self, patch: &ApplicablePatch<'_>) -> bool {
        let Some(condition) = &patch.config.matched.route_configuration else { return true };
        if !condition.name.is_empty() && condition.name != self.name {
            return false;
        }
        let wanted = condition.port_number;
        if self.context != Context::Gateway {
            return wanted == 0 || wanted == port_of(&self.name);
        }
        let (number, port_name, gateway) = gateway_route(&self.name);
        (condition.port_name.is_empty() || condition.port_name == port_name)
            && (condition.gateway.is_empty() || condition.gateway == gateway)
            && (wanted == 0
                || if self.ports.is_empty() { wanted == number } else { self.ports.contains(&wanted) })
    }

    /// Patches a route configuration with its virtual hosts.
    fn configuration(&self, patches: &Patches<'_>, configuration: &mut DynamicMessage) {
        self.merge(patches, configuration);
        let mut hosts = take_list(configuration, "virtual_hosts");
        self.virtual_hosts(patches, &mut hosts);
        hosts.extend(self.added(patches));
        set_list(configuration, "virtual_hosts", hosts);
    }

    fn merge(&self, patches: &Patches<'_>, configuration: &mut DynamicMessage) {
        for patch in self.of_part(patches, ApplyTo::RouteConfiguration) {
            if let (Some(lists), Some(value)) = (patch.merges(), patch.value()) {
                reflect::merge(configuration, value, lists);
            }
        }
    }

    fn virtual_hosts(&self, patches: &Patches<'_>, hosts: &mut Vec<DynamicMessage>) {
        hosts.retain_mut(|host| self.virtual_host(patches, host));
    }

    /// Returns the virtual hosts that patches add.
    fn added<'a>(&'a self, patches: &'a Patches<'_>) -> impl Iterator<Item = DynamicMessage> {
        let adding = self.of_part(patches, ApplyTo::VirtualHost);
        adding
            .filter(|patch| patch.operation == PatchOperation::Add)
            .filter_map(|patch| patch.value().cloned())
    }

    /// Patches a virtual host. Returns false if a patch removes it.
    fn virtual_host(&self, patches: &Patches<'_>, host: &mut DynamicMessage) -> bool {
        for patch in self.of_part(patches, ApplyTo::VirtualHost) {
            if !host_meets(host, patch) {
                continue;
            }
            match (patch.operation, patch.merges(), patch.value()) {
                (PatchOperation::Remove, ..) => return false,
                (_, Some(lists), Some(value)) => reflect::merge(host, value, lists),
                (PatchOperation::Replace, _, Some(value)) => *host = value.clone(),
                _ => {}
            }
        }
        self.routes(patches, host);
        true
    }

    fn routes(&self, patches: &Patches<'_>, host: &mut DynamicMessage) {
        let patches: Vec<&ApplicablePatch<'_>> =
            self.of_part(patches, ApplyTo::HttpRoute).filter(|patch| host_meets(host, patch)).collect();
        if patches.is_empty() {
            return;
        }
        let mut routes = take_list(host, "routes");
        routes.retain_mut(|route| {
            for patch in &patches {
                if !route_meets(route, patch) {
                    continue;
                }
                match (patch.operation, patch.merges(), patch.value()) {
                    (PatchOperation::Remove, ..) => return false,
                    (_, Some(lists), Some(value)) => reflect::merge(route, value, lists),
                    _ => {}
                }
            }
            true
        });
        for patch in patches {
            let names = names_route(patch);
            match patch.operation {
                PatchOperation::InsertFirst
                    if names && !routes.iter().any(|route| route_meets(route, patch)) => {}
                PatchOperation::Add
                | PatchOperation::InsertFirst
                | PatchOperation::InsertAfter
                | PatchOperation::InsertBefore => {
                    edit(&mut routes, patch, names, |route| route_meets(route, patch));
                }
                _ => {}
            }
        }
        set_list(host, "routes", routes);
    }
}

/// Returns the port of the route configuration of a sidecar; 0 if its name has none.
fn port_of(name: &str) -> u32 {
    if name.starts_with("inbound|") {
        return ClusterName::parse(name).map_or(0, |name| name.port.into());
    }
    name.parse().unwrap_or_default()
}

/// Returns port, name of the port, and `namespace/name` of the gateway, from the name of a gateway's routes:
/// `http.PORT` or `https.PORT.NAME.GATEWAY.NAMESPACE`.
fn gateway_route(name: &str) -> (u32, String, String) {
    let parts: Vec<&str> = name.split('.').collect();
    let number = |text: &str| text.parse().unwrap_or_default();
    match parts[..] {
        ["http", port, ..] => (number(port), String::new(), String::new()),
        ["https", port, name, gateway, namespace] => {
            (number(port), name.to_owned(), format!("{namespace}/{gateway}"))
        }
        _ => (0, String::new(), String::new()),
    }
}

fn host_meets(host: &DynamicMessage, patch: &ApplicablePatch<'_>) -> bool {
    let condition = patch.config.matched.route_configuration.as_ref();
    let Some(condition) = condition.and_then(|condition| condition.vhost.as_ref()) else { return true };
    (condition.name.is_empty() || condition.name == text(host, "name"))
        && (condition.domain_name.is_empty() || texts(host, "domains").contains(&condition.domain_name))
}

fn names_route(patch: &ApplicablePatch<'_>) -> bool {
    let condition = patch.config.matched.route_configuration.as_ref();
    condition.and_then(|condition| condition.vhost.as_ref()).is_some_and(|host| host.route.is_some())
}

fn route_meets(route: &DynamicMessage, patch: &ApplicablePatch<'_>) -> bool {
    let condition = patch.config.matched.route_configuration.as_ref();
    let condition = condition.and_then(|condition| condition.vhost.as_ref()?.route.as_ref());
    let Some(condition) = condition else { return true };
    if !condition.name.is_empty() && condition.name != text(route, "name") {
        return false;
    }
    let actions = [
        ("route", RouteActionMatch::Route),
        ("redirect", RouteActionMatch::Redirect),
        ("direct_response", RouteActionMatch::DirectResponse),
    ];
    let action = actions.into_iter().find(|(field, _)| child(route, field).is_some());
    condition.action == RouteActionMatch::Any || action.is_none_or(|(_, action)| action == condition.action)
}
