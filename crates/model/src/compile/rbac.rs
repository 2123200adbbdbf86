//! Filters that verify tokens and authorize requests, in Istio's order: external authorizers, tokens, AUDIT, DENY,
//! ALLOW.
//!
//! On a TCP chain, attributes of HTTP requests cannot be checked. As in Istio the result is strict: an ALLOW rule with
//! such an attribute allows nothing, and a DENY rule denies without regard to it.

use std::collections::BTreeMap;

use skysail_xds::envoy::pb::envoy::extensions::filters::{
    http::rbac::v3::Rbac as HttpRbac, network::http_connection_manager::v3::HttpFilter,
    network::rbac::v3::Rbac as NetworkRbac,
};

use super::{
    CompileFindings,
    authorizer::{self, Authorizer},
    clause::NotCheckable,
    filters::{self, HttpPolicy},
    jwt,
    packed::{self, RbacRules},
    pb::{listener, pack, rbac},
};
use crate::{
    ProxyView, World,
    analysis::Code,
    api::{
        AuthorizationPolicy, MeshConfig, Typed,
        security::{Action, Rule},
    },
    clause::Clause,
};

use rbac::{Permission, Policy, Principal, permission, principal, rbac::Action as Effect};

/// Prefix for the results of shadow rules that allow. It is set even without such rules.
const SHADOW_ALLOW: &str = "istio_dry_run_allow_";
/// Prefix for the results of shadow rules that deny.
const SHADOW_DENY: &str = "istio_dry_run_deny_";
/// End of the names of rules that deny because their authorizer cannot be used.
const NO_AUTHORIZER: &str = "-deny-due-to-bad-CUSTOM-action";

/// Authentication of requests and authorization for one workload.
pub(super) struct Authorization {
    http: HttpPolicy,
    tcp: Vec<listener::Filter>,
}

impl Authorization {
    /// Compiles the policies of a workload. `tcp_ports` are its ports that are not HTTP.
    pub(super) fn new(
        world: &World,
        view: &ProxyView,
        tcp_ports: &[u16],
        findings: &mut CompileFindings<'_>,
    ) -> Self {
        let policies = world.authorization_policies(&view.namespace, &view.labels);
        let policies: Vec<&Typed<AuthorizationPolicy>> =
            policies.iter().map(|policy| policy.as_ref()).collect();
        policies.iter().for_each(|policy| report(policy, tcp_ports, findings));
        let mut made = Self { http: HttpPolicy::default(), tcp: Vec::new() };
        made.add_custom(world, &policies, tcp_ports, findings);
        made.http.tokens.extend(jwt::filter(world, view));
        for (action, effect) in
            [(Action::Audit, Effect::Log), (Action::Deny, Effect::Deny), (Action::Allow, Effect::Allow)]
        {
            let mine = policies.iter().copied().filter(|policy| policy.spec.action == action);
            let (dry, enforced): (Vec<_>, Vec<_>) =
                mine.partition(|policy| action != Action::Audit && policy.meta.is_dry_run());
            let of = |tcp: bool| {
                [&enforced, &dry].map(|policies| {
                    let compiled = rules(world.mesh(), effect, tcp, policies, "");
                    (!policies.is_empty()).then_some(compiled)
                })
            };
            if !enforced.is_empty() || !dry.is_empty() {
                let prefix =
                    if effect == Effect::Deny && !dry.is_empty() { SHADOW_DENY } else { SHADOW_ALLOW };
                made.http.rules.push(http_rbac(&of(false), prefix));
                made.tcp.push(tcp_rbac(&of(true), prefix));
            }
        }
        made
    }

    /// Adds a pair of filters for each external authorizer: one evaluates the rules, the other asks the authorizer. If
    /// the authorizer cannot be used, requests that match its rules are denied.
    fn add_custom(
        &mut self,
        world: &World,
        policies: &[&Typed<AuthorizationPolicy>],
        tcp_ports: &[u16],
        findings: &mut CompileFindings<'_>,
    ) {
        let mut by_provider: BTreeMap<&str, Vec<&Typed<AuthorizationPolicy>>> = BTreeMap::new();
        for policy in policies.iter().filter(|policy| policy.spec.action == Action::Custom) {
            let provider = policy.spec.provider.as_ref().map_or("", |provider| provider.name.as_str());
            by_provider.entry(provider).or_default().push(policy);
        }
        for (provider, policies) in by_provider {
            let prefix = format!("{}-{provider}-", authorizer::PREFIX);
            let of = |tcp: bool| rules(world.mesh(), Effect::Deny, tcp, &policies, &prefix);
            match Authorizer::named(world, provider) {
                Ok(authorizer) => {
                    let shadow = |tcp| [None, Some(of(tcp))];
                    self.http.authorizers.push(http_rbac(&shadow(false), authorizer::SHADOW_PREFIX));
                    self.http
                        .authorizers
                        .push(filters::http("envoy.filters.http.ext_authz", pack(&authorizer.http)));
                    if let Some(tcp) = &authorizer.tcp {
                        self.tcp.push(tcp_rbac(&shadow(true), authorizer::SHADOW_PREFIX));
                        self.tcp.push(filters::network("envoy.filters.network.ext_authz", pack(tcp)));
                    } else if let Some(port) = tcp_ports.first() {
                        for policy in policies {
                            let message = format!(
                                "the authorizer speaks HTTP and cannot decide about connections to port {port}, which pass without it"
                            );
                            let remedy =
                                "use an authorizer with envoyExtAuthzGrpc, or a DENY policy for the port";
                            findings.warn(
                                Code::HttpRuleOnTcp,
                                policy,
                                "spec.provider.name",
                                &message,
                                remedy,
                            );
                        }
                    }
                }
                // Reported by the checks of the World.
                Err(_) => {
                    let denied = |tcp| [Some(with_suffix(of(tcp), NO_AUTHORIZER)), None];
                    self.http.authorizers.push(http_rbac(&denied(false), ""));
                    self.tcp.push(tcp_rbac(&denied(true), ""));
                }
            }
        }
    }

    /// Returns the policies of an HTTP chain.
    pub(super) fn http_filters(&self) -> HttpPolicy {
        self.http.clone()
    }

    /// Returns the filters of a TCP chain.
    pub(super) fn tcp_filters(&self) -> Vec<listener::Filter> {
        self.tcp.clone()
    }
}

/// Returns the filter of an HTTP chain with these rules and shadow rules.
fn http_rbac([rules, shadow]: &[Option<RbacRules>; 2], prefix: &str) -> HttpFilter {
    let rest = HttpRbac { shadow_rules_stat_prefix: prefix.into(), ..Default::default() };
    filters::http("envoy.filters.http.rbac", packed::with_rules(&rest, rules.as_ref(), shadow.as_ref()))
}

/// Returns the filter of a TCP chain with these rules and shadow rules.
fn tcp_rbac([rules, shadow]: &[Option<RbacRules>; 2], prefix: &str) -> listener::Filter {
    let rest = NetworkRbac {
        shadow_rules_stat_prefix: prefix.into(),
        stat_prefix: "tcp.".into(),
        ..Default::default()
    };
    filters::network("envoy.filters.network.rbac", packed::with_rules(&rest, rules.as_ref(), shadow.as_ref()))
}

fn with_suffix(rules: RbacRules, suffix: &str) -> RbacRules {
    let policies = rules.policies.into_iter().map(|(name, policy)| (format!("{name}{suffix}"), policy));
    RbacRules { action: rules.action, policies: policies.collect() }
}

/// Returns the rules of policies with one action. `prefix` begins their names.
fn rules(
    mesh: &MeshConfig,
    action: Effect,
    tcp: bool,
    policies: &[&Typed<AuthorizationPolicy>],
    prefix: &str,
) -> RbacRules {
    let mut compiled = BTreeMap::new();
    for policy in policies {
        let namespace = &policy.meta.namespace;
        let name =
            |index: usize| format!("{prefix}ns[{namespace}]-policy[{}]-rule[{index}]", policy.meta.name);
        for (index, rule) in policy.spec.rules.iter().enumerate() {
            let check = Check { mesh, namespace, tcp, allow: action == Effect::Allow };
            if let Ok(rule) = check.rule(rule) {
                compiled.insert(name(index), rule);
            }
        }
        if policy.spec.rules.is_empty() {
            compiled.insert(name(0), never_matches());
        }
    }
    RbacRules { action, policies: compiled }
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
            if self.add_principal_of_all(&clause, &mut all)? {
                continue;
            }
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

    /// Adds the principals of a clause whose values are compiled together. Returns false for other clauses.
    fn add_principal_of_all(
        &self,
        clause: &Clause<'_>,
        all: &mut Vec<Principal>,
    ) -> Result<bool, NotCheckable> {
        for (values, negated) in [(clause.values, false), (clause.not_values, true)] {
            let made = match clause.principal_of_all(values, self.tcp) {
                None => return Ok(false),
                Some(_) if values.is_empty() => continue,
                Some(Ok(made)) => made,
                Some(Err(NotCheckable)) if self.allow => return Err(NotCheckable),
                Some(Err(NotCheckable)) => continue,
            };
            all.push(match negated {
                false => made,
                true => identifier(principal::Identifier::NotId(Box::new(made))),
            });
        }
        Ok(true)
    }

    fn permission<'c>(&self, clauses: impl Iterator<Item = Clause<'c>>) -> Result<Permission, NotCheckable> {
        let mut all = Vec::new();
        for clause in clauses {
            if clause.permission_of_all(&[]).is_some() {
                let of = |values: &[String]| {
                    (!values.is_empty()).then(|| clause.permission_of_all(values)).flatten()
                };
                all.extend(of(clause.values));
                let negated = of(clause.not_values);
                all.extend(negated.map(|made| rule(permission::Rule::NotRule(Box::new(made)))));
                continue;
            }
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
    let Some(port) = tcp_ports.first() else { return };
    let effect = match policy.spec.action {
        Action::Allow => "on this port the ALLOW rule matches no connection",
        Action::Deny => "on this port the DENY rule matches without them",
        Action::Custom => "on this port the authorizer is asked without regard to them",
        Action::Audit => return,
    };
    for (index, rule) in policy.spec.rules.iter().enumerate() {
        let of_source = rule.from.iter().flat_map(|from| Clause::of_source(&from.source));
        let of_operation = rule.to.iter().flat_map(|to| Clause::of_operation(&to.operation));
        let conditions = rule.when.iter().filter_map(Clause::of_condition);
        if of_source.chain(of_operation).chain(conditions).any(|clause| clause.needs_http()) {
            findings.warn(
                Code::HttpRuleOnTcp,
                policy,
                &format!("spec.rules[{index}]"),
                &format!("the rule uses HTTP attributes, and port {port} is not HTTP: {effect}"),
                "write a separate rule for the port, with principals, namespaces, ipBlocks and ports only",
            );
        }
    }
}
