//! RateLimitPolicies of a workload and of a route.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    AffectedWorkloads, ChangeSet, World,
    policy::{self, affected_workloads},
    store::Entry,
};
use crate::{
    ProxyView, Role,
    api::{
        Labels, RateLimitPolicy, RateLimitTarget, Typed, VirtualService,
        extension_provider::RateLimitService,
        virtual_service::{IstioHttpRoute, RouteSource},
    },
};

/// A policy that applies to a proxy, and the requests that it limits there.
#[derive(Clone, Debug)]
pub(crate) struct AppliedLimit<'a> {
    pub(crate) policy: &'a Typed<RateLimitPolicy>,
    /// Services of the policy's namespace to whose ports it applies; `None`: all ports.
    pub(crate) services: Option<BTreeSet<&'a str>>,
}

impl World {
    /// Returns the policies that apply to a proxy: those of the root namespace, then those of its own, oldest first.
    pub(crate) fn rate_limits(&self, view: &ProxyView) -> Vec<AppliedLimit<'_>> {
        let root = self.mesh().root_namespace.as_str();
        let mut applied = Vec::new();
        for of in [root, &view.namespace] {
            let own = of == view.namespace;
            let entries = sorted(self.rate_limit_policies.in_namespace(of));
            applied.extend(entries.into_iter().filter_map(|entry| application(&entry.object, view, own)));
            if own {
                break;
            }
        }
        applied
    }

    /// Returns the policies that are attached to a rule of a VirtualService or of a route of Gateway API, oldest first.
    pub(crate) fn rate_limits_of_route(
        &self,
        rule: &Typed<VirtualService>,
        http: &IstioHttpRoute,
    ) -> Vec<&Arc<Typed<RateLimitPolicy>>> {
        let entries = self.rate_limit_policies.in_namespace(&rule.meta.namespace);
        let attached = entries.filter(|entry| {
            let mut targets = entry.object.spec.target_refs.iter();
            targets.any(|target| is_target(target, rule, http))
        });
        sorted(attached).into_iter().map(|entry| &entry.object).collect()
    }

    /// Returns whether any policy of a namespace is attached to a route.
    pub(crate) fn limits_routes(&self, namespace: &str) -> bool {
        let entries = self.rate_limit_policies.in_namespace(namespace);
        entries.flat_map(|entry| &entry.object.spec.target_refs).any(RateLimitTarget::is_route)
    }

    /// Returns the resources that depend on a policy.
    pub(super) fn changes_of_rate_limits(&self, namespace: &str, name: &str) -> ChangeSet {
        let Some(entry) = self.rate_limit_policies.get(namespace, name) else { return ChangeSet::default() };
        let targets = &entry.object.spec.target_refs;
        let only_routes = !targets.is_empty() && targets.iter().all(RateLimitTarget::is_route);
        let wide = targets.is_empty() && namespace == self.mesh().root_namespace;
        let own = (!wide && !only_routes).then(|| match targets.is_empty() {
            true => affected_workloads(entry.object.spec.selector.as_ref(), [].into_iter()),
            false => BTreeSet::from([AffectedWorkloads::ALL]),
        });
        // A route may be at gateways of any namespace. The empty selector selects all of them.
        let at_gateways = targets.iter().any(RateLimitTarget::is_route).then(Labels::new);
        ChangeSet {
            workloads: wide,
            gateways: at_gateways.into_iter().collect(),
            ..ChangeSet::of_workloads(namespace, own.unwrap_or_default())
        }
    }

    /// Returns the settings of a rate limit service, its host and its cluster. An error says why there is none.
    pub(crate) fn rate_limit_service(
        &self,
        name: &str,
    ) -> Result<(&RateLimitService, String, String), String> {
        let mut providers = self.mesh().extension_providers.iter().filter(|provider| provider.name == name);
        let provider = providers.next().ok_or_else(|| {
            format!("extensionProviders of the mesh configuration has no rate limit service {name:?}")
        })?;
        let service = provider.envoy_rate_limit.as_ref();
        let service = service.ok_or_else(|| format!("provider {name:?} has no envoyRateLimit"))?;
        let (host, cluster) = self.provider_cluster(&service.service, service.port)?;
        Ok((service, host, cluster))
    }
}

fn sorted<'a>(entries: impl Iterator<Item = &'a Entry<RateLimitPolicy>>) -> Vec<&'a Entry<RateLimitPolicy>> {
    let mut entries: Vec<_> = entries.collect();
    entries.sort_by(|a, b| a.age().cmp(&b.age()));
    entries
}

/// Returns how a policy applies to a proxy; `None` if it does not. `own` is whether the proxy is in its namespace.
pub(super) fn application<'a>(
    policy: &'a Typed<RateLimitPolicy>,
    view: &ProxyView,
    own: bool,
) -> Option<AppliedLimit<'a>> {
    let spec = &policy.spec;
    if spec.target_refs.is_empty() {
        let selector = spec.selector.as_ref();
        return policy::selected(selector, &view.labels).then_some(AppliedLimit { policy, services: None });
    }
    let gateway = view.labels.get(policy::GATEWAY_LABEL);
    let is_gateway = |target: &RateLimitTarget| target.is_gateway() && gateway == Some(&target.name);
    match view.role {
        _ if !own => None,
        Role::Router => {
            spec.target_refs.iter().any(is_gateway).then_some(AppliedLimit { policy, services: None })
        }
        Role::Sidecar => {
            let services = spec.target_refs.iter().filter(|target| target.is_service());
            let services: BTreeSet<&str> = services.map(|target| target.name.as_str()).collect();
            (!services.is_empty()).then_some(AppliedLimit { policy, services: Some(services) })
        }
        Role::Grpc => None,
    }
}

/// Returns whether a target is this rule of a VirtualService, or the rule of Gateway API from which it is made.
fn is_target(target: &RateLimitTarget, rule: &Typed<VirtualService>, http: &IstioHttpRoute) -> bool {
    if !target.is_route() {
        return false;
    }
    let is_section = |name: &str| target.section_name.is_empty() || target.section_name == name;
    match &http.source {
        Some(RouteSource { kind, route, rule }) => {
            target.kind == kind.as_str() && target.name == **route && is_section(rule)
        }
        None => target.kind == "VirtualService" && target.name == rule.meta.name && is_section(&http.name),
    }
}
