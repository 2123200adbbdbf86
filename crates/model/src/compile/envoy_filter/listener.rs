//! Patches of listeners, their filter chains and their filters.

use std::sync::Arc;

use prost_reflect::{DynamicMessage, ReflectMessage as _, Value};
use skysail_xds::{Kind, Resource};

use super::{ApplicablePatch, Patches, Warnings, decode, edit::edit, encode, merge_config, route};
use crate::{
    api::envoy_filter::{ApplyTo, Context, PatchOperation},
    reflect::{self, child, child_mut, number, set_list, take_list, text, texts},
};

/// Name of the network filter that holds HTTP filters.
const HTTP_MANAGER: &str = "envoy.filters.network.http_connection_manager";
/// Listeners for redirected connections. A port of a match is the destination port of a chain in them.
const VIRTUAL: [&str; 2] = ["virtualInbound", "virtualOutbound"];
/// Value of `traffic_direction` of inbound listeners.
const INBOUND: i32 = 1;

/// Parts of listeners, and those of the routes that inbound listeners contain.
const PARTS: &[ApplyTo] = &[
    ApplyTo::Listener,
    ApplyTo::FilterChain,
    ApplyTo::NetworkFilter,
    ApplyTo::HttpFilter,
    ApplyTo::ListenerFilter,
    ApplyTo::RouteConfiguration,
    ApplyTo::VirtualHost,
    ApplyTo::HttpRoute,
];

/// Patches the listeners among resources, and adds those that patches add.
pub(super) fn patch_all(
    patches: &Patches<'_>,
    outbound: Context,
    made: Vec<Arc<Resource>>,
    warnings: &mut Warnings,
) -> Vec<Arc<Resource>> {
    if !patches.has(PARTS) {
        return made;
    }
    let mut patched = Vec::with_capacity(made.len());
    for resource in made {
        let message = (resource.kind == Kind::Listener).then(|| decode(&resource)).flatten();
        let Some(mut listener) = message else {
            patched.push(resource);
            continue;
        };
        let direction = listener.get_field_by_name("traffic_direction");
        let is_inbound = direction.is_some_and(|value| value.as_enum_number() == Some(INBOUND));
        let context = match outbound {
            Context::Gateway => outbound,
            _ if is_inbound => Context::SidecarInbound,
            _ => outbound,
        };
        let mut patching = Patching { patches, context, warnings, listener: Facts::of(&listener) };
        if patching.listener(&mut listener) {
            patched.push(encode(Kind::Listener, &listener));
        }
    }
    let contexts: &[Context] = match outbound {
        Context::Gateway => &[Context::Gateway],
        _ => &[Context::SidecarInbound, Context::SidecarOutbound],
    };
    for patch in &patches.0 {
        let adds = patch.config.apply_to == ApplyTo::Listener
            && patch.operation == PatchOperation::Add
            && contexts.iter().any(|context| patch.adds_in(*context));
        patched.extend(patch.value().filter(|_| adds).map(|value| encode(Kind::Listener, value)));
    }
    patched
}

/// Properties of a listener that conditions compare.
struct Facts {
    name: String,
    port: u32,
}

impl Facts {
    fn of(listener: &DynamicMessage) -> Self {
        let address = child(listener, "address").and_then(|address| child(address, "socket_address"));
        let port = address.and_then(|address| number(address, "port_value")).unwrap_or_default();
        Self { name: text(listener, "name"), port }
    }

    fn is_virtual(&self) -> bool {
        VIRTUAL.contains(&self.name.as_str())
    }

    /// Returns whether the listener meets the condition of a patch.
    fn meet(&self, patch: &ApplicablePatch<'_>) -> bool {
        let Some(condition) = &patch.config.matched.listener else { return true };
        if !condition.name.is_empty() && condition.name != self.name {
            return false;
        }
        if patch.config.apply_to != ApplyTo::Listener && self.is_virtual() {
            return true;
        }
        condition.port_number == 0 || condition.port_number == self.port
    }

    /// Returns whether a filter chain of the listener meets the condition of a patch.
    fn chain_meets(&self, chain: &DynamicMessage, patch: &ApplicablePatch<'_>) -> bool {
        let Some(condition) = &patch.config.matched.listener else { return true };
        let matched = child(chain, "filter_chain_match");
        let port = matched.and_then(|matched| number(matched, "destination_port"));
        if self.is_virtual() && condition.port_number > 0 && port.unwrap_or_default() != condition.port_number
        {
            return false;
        }
        let Some(condition) = &condition.filter_chain else { return true };
        let list = |field: &str| matched.map(|matched| texts(matched, field)).unwrap_or_default();
        let transport = || matched.map(|matched| text(matched, "transport_protocol")).unwrap_or_default();
        let protocols = || {
            let known = list("application_protocols");
            condition.application_protocols.split(',').all(|name| known.iter().any(|known| known == name))
        };
        (condition.name.is_empty() || condition.name == text(chain, "name"))
            && (condition.sni.is_empty() || list("server_names").contains(&condition.sni))
            && (condition.transport_protocol.is_empty() || condition.transport_protocol == transport())
            && (condition.application_protocols.is_empty() || protocols())
            && (condition.destination_port == 0 || port == Some(condition.destination_port))
    }
}

/// Patches of one listener.
struct Patching<'a, 'b> {
    patches: &'a Patches<'b>,
    context: Context,
    warnings: &'a mut Warnings,
    listener: Facts,
}

impl<'b> Patching<'_, 'b> {
    /// Returns the patches of a part whose conditions the listener meets.
    fn of(&self, apply_to: ApplyTo) -> Vec<ApplicablePatch<'b>> {
        let patches = self.patches.of(apply_to, self.context);
        patches.filter(|patch| self.listener.meet(patch)).copied().collect()
    }

    /// Returns those whose conditions a filter chain meets too.
    fn of_chain(&self, apply_to: ApplyTo, chain: &DynamicMessage) -> Vec<ApplicablePatch<'b>> {
        let mut patches = self.of(apply_to);
        patches.retain(|patch| self.listener.chain_meets(chain, patch));
        patches
    }

    /// Patches the listener. Returns false if a patch removes it.
    fn listener(&mut self, listener: &mut DynamicMessage) -> bool {
        if self.context == Context::SidecarInbound {
            self.inline_routes(listener);
        }
        for patch in self.of(ApplyTo::Listener) {
            match (patch.operation, patch.merges(), patch.value()) {
                (PatchOperation::Remove, ..) => return false,
                (_, Some(lists), Some(value)) => reflect::merge(listener, value, lists),
                _ => {}
            }
        }
        self.listener_filters(listener);
        self.filter_chains(listener);
        true
    }

    /// Patches the routes that an inbound listener contains.
    fn inline_routes(&mut self, listener: &mut DynamicMessage) {
        if !self.patches.has(&[ApplyTo::RouteConfiguration, ApplyTo::VirtualHost, ApplyTo::HttpRoute]) {
            return;
        }
        let (patches, context) = (self.patches, self.context);
        each_chain(listener, |chain| {
            let mut filters = take_list(chain, "filters");
            for filter in filters.iter_mut().filter(|filter| text(filter, "name") == HTTP_MANAGER) {
                with_config(filter, |manager| {
                    if let Some(routes) = child_mut(manager, "route_config") {
                        route::patch_configuration(patches, context, routes);
                    }
                });
            }
            set_list(chain, "filters", filters);
            true
        });
    }

    fn listener_filters(&mut self, listener: &mut DynamicMessage) {
        let patches = self.of(ApplyTo::ListenerFilter);
        if patches.is_empty() {
            return;
        }
        let mut filters = take_list(listener, "listener_filters");
        for patch in patches {
            let names = patch.config.has_listener_filter_match();
            let takes = |filter: &DynamicMessage| patch.config.takes_listener_filter(&text(filter, "name"));
            if patch.operation == PatchOperation::Merge {
                for filter in filters.iter_mut().filter(|filter| names && takes(filter)) {
                    merge_config(filter, &patch, self.warnings);
                }
            } else {
                edit(&mut filters, &patch, names, takes);
            }
        }
        set_list(listener, "listener_filters", filters);
    }

    fn filter_chains(&mut self, listener: &mut DynamicMessage) {
        let parts = [ApplyTo::FilterChain, ApplyTo::NetworkFilter, ApplyTo::HttpFilter];
        if !self.patches.has(&parts) {
            return;
        }
        each_chain(listener, |chain| self.filter_chain(chain));
        let mut chains = take_list(listener, "filter_chains");
        for patch in self.of(ApplyTo::FilterChain) {
            if patch.operation == PatchOperation::Add {
                chains.extend(patch.value().cloned());
            }
        }
        set_list(listener, "filter_chains", chains);
    }

    /// Patches a filter chain. Returns false if a patch removes it.
    fn filter_chain(&mut self, chain: &mut DynamicMessage) -> bool {
        for patch in self.of_chain(ApplyTo::FilterChain, chain) {
            match (patch.operation, patch.merges(), patch.value()) {
                (PatchOperation::Remove, ..) => return false,
                (_, Some(lists), Some(value)) if !self.merge_socket(chain, &patch, value) => {
                    reflect::merge(chain, value, lists);
                }
                _ => {}
            }
        }
        self.network_filters(chain);
        true
    }

    /// Merges a transport socket into that of the same name. As in Istio, the rest of the patch has no effect then.
    fn merge_socket(
        &mut self,
        chain: &mut DynamicMessage,
        patch: &ApplicablePatch<'_>,
        value: &DynamicMessage,
    ) -> bool {
        let Some(from) = child(value, "transport_socket") else { return false };
        let Some(to) = child_mut(chain, "transport_socket") else { return false };
        if text(to, "name") != text(from, "name") {
            return false;
        }
        if let (Some(to), Some(from)) = (child_mut(to, "typed_config"), child(from, "typed_config"))
            && let Err(reason) = reflect::merge_any(to, from)
        {
            self.warnings.add(patch, format!("the patch is not applied: {reason}"));
        }
        true
    }

    fn network_filters(&mut self, chain: &mut DynamicMessage) {
        let patches = self.of_chain(ApplyTo::NetworkFilter, chain);
        let within = self.of_chain(ApplyTo::HttpFilter, chain);
        if patches.is_empty() && within.is_empty() {
            return;
        }
        let mut filters = take_list(chain, "filters");
        for patch in patches.iter().filter(|patch| patch.operation != PatchOperation::Merge) {
            let takes = |filter: &DynamicMessage| patch.config.takes_filter(&text(filter, "name"));
            edit(&mut filters, patch, patch.config.has_filter_match(), takes);
        }
        for filter in &mut filters {
            for patch in patches.iter().filter(|patch| patch.operation == PatchOperation::Merge) {
                if patch.config.takes_filter(&text(filter, "name")) {
                    self.merge_filter(filter, patch);
                }
            }
            let name = text(filter, "name");
            let within: Vec<_> = within.iter().filter(|patch| patch.config.takes_filter(&name)).collect();
            if name == HTTP_MANAGER && !within.is_empty() {
                with_config(filter, |manager| self.http_filters(manager, &within));
            }
        }
        set_list(chain, "filters", filters);
    }

    fn http_filters(&mut self, manager: &mut DynamicMessage, patches: &[&ApplicablePatch<'_>]) {
        let mut filters = take_list(manager, "http_filters");
        for patch in patches.iter().filter(|patch| patch.operation != PatchOperation::Merge) {
            let takes = |filter: &DynamicMessage| patch.config.takes_sub_filter(&text(filter, "name"));
            edit(&mut filters, patch, patch.config.has_sub_filter_match(), takes);
        }
        for filter in &mut filters {
            for patch in patches.iter().filter(|patch| patch.operation == PatchOperation::Merge) {
                if patch.config.takes_sub_filter(&text(filter, "name")) {
                    self.merge_filter(filter, patch);
                }
            }
        }
        set_list(manager, "http_filters", filters);
    }

    /// Merges name and configuration of a network or HTTP filter.
    fn merge_filter(&mut self, filter: &mut DynamicMessage, patch: &ApplicablePatch<'_>) {
        if child(filter, "typed_config").is_none() {
            return;
        }
        merge_config(filter, patch, self.warnings);
        let name = patch.value().map(|value| text(value, "name")).unwrap_or_default();
        if !name.is_empty() {
            _ = filter.try_set_field_by_name("name", Value::String(name));
        }
    }
}

/// Changes each filter chain that has filters, and removes those for which the result is false.
fn each_chain(listener: &mut DynamicMessage, mut change: impl FnMut(&mut DynamicMessage) -> bool) {
    let mut chains = take_list(listener, "filter_chains");
    chains.retain_mut(|chain| chain.has_field_by_name("filters") && change(chain));
    set_list(listener, "filter_chains", chains);
    if let Some(chain) = child_mut(listener, "default_filter_chain")
        && chain.has_field_by_name("filters")
        && !change(chain)
    {
        listener.clear_field_by_name("default_filter_chain");
    }
}

/// Changes the configuration of an HTTP connection manager, which is packed in a filter.
fn with_config(filter: &mut DynamicMessage, change: impl FnOnce(&mut DynamicMessage)) {
    let Some(any) = child_mut(filter, "typed_config") else { return };
    let Some(mut config) = reflect::unpack(any) else { return };
    if config.descriptor().get_field_by_name("http_filters").is_none() {
        return;
    }
    change(&mut config);
    let url = text(any, "type_url");
    if let Some(packed) = reflect::pack(&url, &config) {
        *any = packed;
    }
}
