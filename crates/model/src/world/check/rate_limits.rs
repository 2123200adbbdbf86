//! Checks of RateLimitPolicies: targets and providers that do not exist, attributes that no request has, and rules of
//! several policies that count the same requests.

use super::{ObjectReport, Report, recorded::RecordedWorld};
use crate::{
    analysis::Code,
    api::{Kind, RateLimitPolicy, RateLimitTarget, rate_limit::RateLimitRule},
    world::store::Entry,
};

impl Report<'_> {
    pub(super) fn rate_limit_policy(&mut self, about: &ObjectReport<'_, RateLimitPolicy>) {
        let spec = &about.entry.object.spec;
        if spec.target_refs.is_empty() {
            let namespace = self.selected_namespace(about);
            self.selects_nothing(about, spec.selector.as_ref(), namespace);
            self.claims(about, namespace);
        }
        for (index, target) in spec.target_refs.iter().enumerate() {
            self.limited_target(about, target, &format!("spec.targetRefs[{index}]"));
        }
        for (index, rule) in spec.rules.iter().enumerate() {
            let field = format!("spec.rules[{index}]");
            self.rate_limit_service(about, rule, &field);
            self.same_limit(about, rule, &field);
        }
    }

    /// Reports a target that does not exist or has no effect.
    fn limited_target(
        &mut self,
        about: &ObjectReport<'_, RateLimitPolicy>,
        target: &RateLimitTarget,
        field: &str,
    ) {
        let Some(sections) = sections(&self.world, about.namespace(), target) else {
            let message = format!(
                "{} {}/{} does not exist, so the policy has no effect on it",
                target.kind,
                about.namespace(),
                target.name
            );
            let remedy = "correct the name; targets are in the policy's namespace";
            self.report(about, Code::PolicyTargetMissing, format!("{field}.name"), message, remedy);
            return;
        };
        let section = &target.section_name;
        if !section.is_empty() && target.is_route() && !sections.contains(&section.as_str()) {
            let message = format!(
                "{} {}/{} has no rule {section:?}, so the policy has no effect on it",
                target.kind,
                about.namespace(),
                target.name
            );
            self.report(
                about,
                Code::PolicyTargetMissing,
                format!("{field}.sectionName"),
                message,
                "correct the name",
            );
        }
        let is_of_gateway = || {
            let rule = self.world.virtual_service(about.namespace(), &target.name);
            rule.is_some_and(|rule| rule.object.spec.gateways.iter().any(|name| name != "mesh"))
        };
        if target.kind == "VirtualService" && !is_of_gateway() {
            let message = format!(
                "VirtualService {}/{} belongs to no gateway, and the policy limits routes at gateways only",
                about.namespace(),
                target.name
            );
            let remedy = "target the Service of its destination";
            self.report(about, Code::PolicyWithoutEffect, format!("{field}.name"), message, remedy);
        }
    }

    /// Reports a rate limit service that cannot be used.
    fn rate_limit_service(
        &mut self,
        about: &ObjectReport<'_, RateLimitPolicy>,
        rule: &RateLimitRule,
        field: &str,
    ) {
        let Some(global) = &rule.global else { return };
        let reason = match self.world.rate_limit_domain(&global.provider.name) {
            Ok(false) if global.domain.is_empty() => {
                format!("neither the rule nor provider {:?} has a domain", global.provider.name)
            }
            Ok(_) => return,
            Err(reason) => reason,
        };
        let message = format!("{reason}: the rule has no effect");
        let field = format!("{field}.global.provider.name");
        self.report(about, Code::UnknownProvider, field, message, "correct the name or the provider");
    }

    /// Reports limits by claims where no policy verifies tokens.
    fn claims(&mut self, about: &ObjectReport<'_, RateLimitPolicy>, namespace: Option<&str>) {
        let spec = &about.entry.object.spec;
        let uses_claims = |rule: &RateLimitRule| rule.by.iter().any(|key| !key.jwt_claim.is_empty());
        let Some(index) = spec.rules.iter().position(uses_claims) else { return };
        if self.verifies_no_tokens(about.namespace(), spec.selector.as_ref(), namespace) {
            let message =
                "no RequestAuthentication applies to its workloads, so all requests share one limit";
            let field = format!("spec.rules[{index}].by");
            self.report(about, Code::NoTokens, field, message, "add a RequestAuthentication");
        }
    }

    /// Reports a rule that counts the same requests as a rule of an older policy for the same workloads.
    fn same_limit(&mut self, about: &ObjectReport<'_, RateLimitPolicy>, rule: &RateLimitRule, field: &str) {
        if rule.shadow {
            return;
        }
        let spec = &about.entry.object.spec;
        let counts_alike = |other: &RateLimitRule| {
            let limits_alike = other.limit.is_some() == rule.limit.is_some() && other.global == rule.global;
            other.matched == rule.matched && other.by == rule.by && limits_alike && !other.shadow
        };
        let is_older = |other: &&Entry<RateLimitPolicy>| {
            let of = &other.object.spec;
            of.selector == spec.selector
                && of.target_refs == spec.target_refs
                && other.age() < about.entry.age()
        };
        let mut older = self.world.rate_limit_policies_in(about.namespace()).filter(is_older);
        let found = older.find_map(|other| {
            let mut rules = other.object.spec.rules.iter().enumerate();
            let (index, known) = rules.find(|(_, other)| counts_alike(other))?;
            Some((ObjectReport { entry: other, kind: Kind::RateLimitPolicy }.name(), known.name_at(index)))
        });
        if let Some((policy, name)) = found {
            let message = format!(
                "rule {name} of {policy} counts the same requests; both limits apply, the lower one decides"
            );
            self.report(about, Code::SameRateLimit, field, message, "remove one of them");
        }
    }
}

/// Returns the names of a target's rules; `None` if the target does not exist.
fn sections<'a>(
    world: &RecordedWorld<'a>,
    namespace: &str,
    target: &RateLimitTarget,
) -> Option<Vec<&'a str>> {
    let name = target.name.as_str();
    if target.is_service() {
        return world.service_named(namespace, name).map(|_| Vec::new());
    }
    if target.is_gateway() {
        return world.has_kubernetes_gateway(namespace, name).then(Vec::new);
    }
    match target.kind.as_str() {
        "HTTPRoute" => {
            let rules = &world.http_route(namespace, name)?.rules;
            Some(rules.iter().filter_map(|rule| rule.name.as_deref()).collect())
        }
        "GRPCRoute" => {
            let rules = &world.grpc_route(namespace, name)?.rules;
            Some(rules.iter().filter_map(|rule| rule.name.as_deref()).collect())
        }
        "VirtualService" => {
            let entry = world.virtual_service(namespace, name);
            let entry = entry.filter(|entry| entry.object.spec.derived.is_none())?;
            Some(entry.object.spec.http.iter().map(|rule| rule.name.as_str()).collect())
        }
        _ => None,
    }
}
