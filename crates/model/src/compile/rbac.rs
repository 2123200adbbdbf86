//! Authorization filters from AuthorizationPolicies: DENY first, then ALLOW, as Istio orders them.
//!
//! On a TCP chain, attributes of HTTP requests cannot be checked. As in Istio the result is strict: an ALLOW rule with
//! such an attribute allows nothing, and a DENY rule denies without regard to it. The same applies to attributes of
//! tokens, which are not supported.

use std::collections::BTreeMap;

use skysail_xds::envoy::pb::envoy::extensions::filters::{
    http::rbac::v3::Rbac as HttpRbac, network::http_connection_manager::v3::HttpFilter,
    network::rbac::v3::Rbac as NetworkRbac,
};

use super::{
    CompileFindings,
    clause::NotCheckable,
    filters,
    packed::{self, Rules},
    pb::{listener, rbac},
};
use crate::{
    api::{
        AuthorizationPolicy, MeshConfig, Typed,
        security::{Action, Rule},
    },
    clause::Clause,
};

use rbac::{Permission, Policy, Principal, permission, principal};

/// Istio's prefix for shadow rules, which is set even without such rules.
const SHADOW_PREFIX: &str = "istio_dry_run_allow_";

/// Authorization of one workload.
pub(super) struct Authorization {
    http: Vec<Rules>,
    tcp: Vec<Rules>,
}

impl Authorization {
    /// Compiles the policies of a workload. `tcp_ports` are its ports that are not HTTP.
    pub(super) fn new<'a>(
        mesh: &MeshConfig,
        policies: impl Iterator<Item = &'a Typed<AuthorizationPolicy>> + Clone,
        tcp_ports: &[u16],
        findings: &mut CompileFindings<'_>,
    ) -> Self {
        policies.clone().for_each(|policy| report(policy, tcp_ports, findings));
        let compile = |tcp: bool| {
            let of = |action: rbac::rbac::Action| {
                let mine = policies.clone().filter(|policy| enforced_as(policy.spec.action) == Some(action));
                rules(mesh, action, tcp, mine)
            };
            [of(rbac::rbac::Action::Deny), of(rbac::rbac::Action::Allow)].into_iter().flatten().collect()
        };
        Self { http: compile(false), tcp: compile(true) }
    }

    /// Returns the filters of an HTTP chain.
    pub(super) fn http_filters(&self) -> Vec<HttpFilter> {
        let rest = HttpRbac { shadow_rules_stat_prefix: SHADOW_PREFIX.into(), ..Default::default() };
        let filter = |rules| filters::http("envoy.filters.http.rbac", packed::with_rules(&rest, rules));
        self.http.iter().map(filter).collect()
    }

    /// Returns the filters of a TCP chain.
    pub(super) fn tcp_filters(&self) -> Vec<listener::Filter> {
        let rest = NetworkRbac {
            shadow_rules_stat_prefix: SHADOW_PREFIX.into(),
            stat_prefix: "tcp.".into(),
            ..Default::default()
        };
        let filter = |rules| filters::network("envoy.filters.network.rbac", packed::with_rules(&rest, rules));
        self.tcp.iter().map(filter).collect()
    }
}

/// Returns Envoy's action. `CUSTOM` denies: without its external authorizer, no request of the policy may pass.
fn enforced_as(action: Action) -> Option<rbac::rbac::Action> {
    match action {
        Action::Allow => Some(rbac::rbac::Action::Allow),
        Action::Deny | Action::Custom => Some(rbac::rbac::Action::Deny),
        Action::Audit => None,
    }
}

/// Returns the rules of all policies with this action; `None` if there are none.
fn rules<'a>(
    mesh: &MeshConfig,
    action: rbac::rbac::Action,
    tcp: bool,
    policies: impl Iterator<Item = &'a Typed<AuthorizationPolicy>>,
) -> Option<Rules> {
    let mut compiled = BTreeMap::new();
    let mut any = false;
    for policy in policies {
        any = true;
        let namespace = &policy.meta.namespace;
        let name = |index: usize| format!("ns[{namespace}]-policy[{}]-rule[{index}]", policy.meta.name);
        for (index, rule) in policy.spec.rules.iter().enumerate() {
            let check = Check { mesh, namespace, tcp, allow: action == rbac::rbac::Action::Allow };
            if let Ok(rule) = check.rule(rule) {
                compiled.insert(name(index), rule);
            }
        }
        if policy.spec.rules.is_empty() {
            compiled.insert(name(0), never_matches());
        }
    }
    any.then_some(Rules { action, policies: compiled })
}

/// Context in which a rule is compiled.
struct Check<'a> {
    mesh: &'a MeshConfig,
    namespace: &'a str,
    tcp: bool,
    allow: bool,
}

impl Check<'_> {
    /// Compiles a rule. An error means that it cannot be checked and must not allow anything.
    fn rule(&self, rule: &Rule) -> Result<Policy, NotCheckable> {
        let conditions = |of_peer: bool| {
            let clauses = rule.when.iter().filter_map(Clause::of_condition);
            clauses.filter(move |clause| clause.is_of_peer() == of_peer)
        };
        let unknown = rule.when.iter().any(|condition| Clause::of_condition(condition).is_none());
        if unknown && self.allow {
            return Err(NotCheckable);
        }
        let mut principals = Vec::new();
        for from in &rule.from {
            principals
                .push(self.principal(Clause::of_source(&from.source).into_iter().chain(conditions(true)))?);
        }
        if rule.from.is_empty() {
            principals.push(self.principal(conditions(true))?);
        }
        let mut permissions = Vec::new();
        for to in &rule.to {
            let clauses = Clause::of_operation(&to.operation).into_iter().chain(conditions(false));
            permissions.push(self.permission(clauses)?);
        }
        if rule.to.is_empty() {
            permissions.push(self.permission(conditions(false))?);
        }
        Ok(Policy { permissions, principals, ..Default::default() })
    }

    fn principal<'c>(&self, clauses: impl Iterator<Item = Clause<'c>>) -> Result<Principal, NotCheckable> {
        let mut all = Vec::new();
        for clause in clauses {
            let any = |values: &[String]| {
                self.each(values, |value| clause.principals(value, self.mesh, self.namespace, self.tcp))
            };
            let (positive, negative) = (any(clause.values)?, any(clause.not_values)?);
            if !positive.is_empty() {
                all.push(identifier(principal::Identifier::OrIds(principal::Set { ids: positive })));
            }
            if !negative.is_empty() {
                let or = identifier(principal::Identifier::OrIds(principal::Set { ids: negative }));
                all.push(identifier(principal::Identifier::NotId(Box::new(or))));
            }
        }
        if all.is_empty() {
            all.push(identifier(principal::Identifier::Any(true)));
        }
        Ok(identifier(principal::Identifier::AndIds(principal::Set { ids: all })))
    }

    fn permission<'c>(&self, clauses: impl Iterator<Item = Clause<'c>>) -> Result<Permission, NotCheckable> {
        let mut all = Vec::new();
        for clause in clauses {
            let any = |values: &[String]| {
                self.each(values, |value| clause.permission(value, self.tcp).map(|made| vec![made]))
            };
            let (positive, negative) = (any(clause.values)?, any(clause.not_values)?);
            if !positive.is_empty() {
                all.push(rule(permission::Rule::OrRules(permission::Set { rules: positive })));
            }
            if !negative.is_empty() {
                let or = rule(permission::Rule::OrRules(permission::Set { rules: negative }));
                all.push(rule(permission::Rule::NotRule(Box::new(or))));
            }
        }
        if all.is_empty() {
            all.push(rule(permission::Rule::Any(true)));
        }
        Ok(rule(permission::Rule::AndRules(permission::Set { rules: all })))
    }

    /// Compiles each value. A DENY rule omits values that cannot be checked, and so denies more.
    fn each<T>(
        &self,
        values: &[String],
        make: impl Fn(&str) -> Result<Vec<T>, NotCheckable>,
    ) -> Result<Vec<T>, NotCheckable> {
        let mut made = Vec::new();
        for value in values {
            match make(value) {
                Ok(more) => made.extend(more),
                Err(NotCheckable) if self.allow => return Err(NotCheckable),
                Err(NotCheckable) => {}
            }
        }
        Ok(made)
    }
}

/// Returns a policy that never matches. Its presence makes the workload deny what no other policy allows.
fn never_matches() -> Policy {
    let (any_permission, any_principal) =
        (rule(permission::Rule::Any(true)), identifier(principal::Identifier::Any(true)));
    Policy {
        permissions: vec![rule(permission::Rule::NotRule(Box::new(any_permission)))],
        principals: vec![identifier(principal::Identifier::NotId(Box::new(any_principal)))],
        ..Default::default()
    }
}

fn identifier(identifier: principal::Identifier) -> Principal {
    Principal { identifier: Some(identifier) }
}

fn rule(rule: permission::Rule) -> Permission {
    Permission { rule: Some(rule) }
}

/// Reports rules that cannot be checked as written on ports that are not HTTP.
fn report(policy: &Typed<AuthorizationPolicy>, tcp_ports: &[u16], findings: &mut CompileFindings<'_>) {
    let Some(action) = enforced_as(policy.spec.action) else { return };
    let Some(port) = tcp_ports.first() else { return };
    let effect = match action {
        rbac::rbac::Action::Allow => "on this port the ALLOW rule matches no connection",
        _ => "on this port the DENY rule matches without them",
    };
    for (index, rule) in policy.spec.rules.iter().enumerate() {
        let of_source = rule.from.iter().flat_map(|from| Clause::of_source(&from.source));
        let of_operation = rule.to.iter().flat_map(|to| Clause::of_operation(&to.operation));
        let conditions = rule.when.iter().filter_map(Clause::of_condition);
        if of_source.chain(of_operation).chain(conditions).any(|clause| clause.needs_http()) {
            findings.warn(
                policy,
                &format!("spec.rules[{index}]"),
                &format!("the rule uses HTTP attributes, and port {port} is not HTTP: {effect}"),
                "write a separate rule for the port, with principals, namespaces, ipBlocks and ports only",
            );
        }
    }
}
