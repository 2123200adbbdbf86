//! Checks of PeerAuthentication and AuthorizationPolicy: policies without a workload, and policies without effect
//! because of others.

use std::collections::BTreeSet;

use skysail_core::SpiffeId;
use skysail_yaml::join;

use super::{ObjectReport, Report, label_text};
use crate::{
    analysis::Code,
    api::{
        AuthorizationPolicy, Kind, Labels, PeerAuthentication, RequestAuthentication, ServicePort,
        destination_rule::WorkloadSelector,
        kube::TargetPort,
        security::{Action, DRY_RUN, Rule, is_true},
        selects,
        telemetry::{AccessLogging, ProviderRef, Telemetry},
    },
    clause::Clause,
    spelling::nearest,
    world::policy::is_wide,
};

/// Returns the ports that a policy names, with their fields.
fn ports(spec: &AuthorizationPolicy) -> impl Iterator<Item = (String, u16)> {
    let rules = spec.rules.iter().enumerate();
    let operations = rules.flat_map(|(rule, of)| {
        let to = of.to.iter().enumerate();
        to.map(move |(index, to)| (format!("spec.rules[{rule}].to[{index}].operation"), &to.operation))
    });
    operations.flat_map(|(at, operation)| {
        let lists = [(&operation.ports, "ports"), (&operation.not_ports, "notPorts")];
        lists.into_iter().flat_map(move |(list, name)| {
            let at = at.clone();
            let numbered = list.iter().enumerate();
            numbered
                .filter_map(move |(index, port)| Some((format!("{at}.{name}[{index}]"), port.parse().ok()?)))
        })
    })
}

impl Report<'_> {
    pub(super) fn peer_authentication(&mut self, about: &ObjectReport<'_, PeerAuthentication>) {
        let spec = &about.entry.object.spec;
        let (selector, namespace) = (spec.selector.as_ref(), self.selected_namespace(about));
        if !is_wide(selector) && namespace.is_none() {
            let message = "has no effect: policies of the root namespace cannot select workloads";
            let remedy = "remove the selector, or move the policy into the namespace of the workload";
            self.report(about, Code::RootSelector, "spec.selector", message, remedy);
            return;
        }
        self.duplicate_policy(about);
        self.selects_nothing(about, selector, namespace);
        let ports = spec.port_level_mtls.keys();
        let ports = ports.filter_map(|port| Some((join("spec.portLevelMtls", port), port.parse().ok()?)));
        self.service_ports(about, selector, ports);
    }

    /// Returns the namespace whose workloads a policy selects; `None` for a policy of the root namespace, which selects
    /// those of all.
    pub(super) fn selected_namespace<'b, T>(&self, about: &ObjectReport<'b, T>) -> Option<&'b str> {
        let namespace = about.namespace();
        (namespace != self.world.mesh().root_namespace).then_some(namespace)
    }

    /// Reports all but the oldest of several policies for the same workloads; only the oldest takes effect.
    fn duplicate_policy(&mut self, about: &ObjectReport<'_, PeerAuthentication>) {
        let mine = about.entry.object.spec.selector.as_ref();
        let same = |other: Option<&WorkloadSelector>| match (is_wide(mine), is_wide(other)) {
            (true, true) => true,
            (false, false) => mine == other,
            _ => false,
        };
        let older = self
            .world
            .peer_authentications_in(about.namespace())
            .find(|other| same(other.object.spec.selector.as_ref()) && other.age() < about.entry.age());
        if let Some(older) = older {
            let older = ObjectReport { entry: older, kind: Kind::PeerAuthentication }.name();
            let message = format!("has no effect: {older} is older and applies to the same workloads");
            self.report(about, Code::PolicyConflict, "spec", message, "remove one of them");
        }
    }

    pub(super) fn authorization_policy(&mut self, about: &ObjectReport<'_, AuthorizationPolicy>) {
        let spec = &about.entry.object.spec;
        self.dry_run(about);
        self.authorizer(about);
        // The attachment was reported when the policy was read.
        if spec.target_ref.is_some() || !spec.target_refs.is_empty() {
            return;
        }
        let namespace = self.selected_namespace(about);
        self.selects_nothing(about, spec.selector.as_ref(), namespace);
        self.sources(about, spec);
        self.tokens(about, namespace);
        self.service_ports(about, spec.selector.as_ref(), ports(spec));
    }

    /// Reports an external authorizer that cannot be used.
    fn authorizer(&mut self, about: &ObjectReport<'_, AuthorizationPolicy>) {
        let spec = &about.entry.object.spec;
        let Some(provider) = spec.provider.as_ref().filter(|_| spec.action == Action::Custom) else { return };
        if let Some(reason) = self.world.authorizer_error(&provider.name) {
            let message = format!("{reason}: requests that match the rules are denied");
            let field = "spec.provider.name";
            self.report(about, Code::UnknownProvider, field, message, "correct the name or the provider");
        }
    }

    /// Returns whether a policy of a namespace selects workloads, those of `selected_in` or of all namespaces, and no
    /// RequestAuthentication applies to any of them.
    pub(super) fn verifies_no_tokens(
        &self,
        namespace: &str,
        selector: Option<&WorkloadSelector>,
        selected_in: Option<&str>,
    ) -> bool {
        let empty = Labels::new();
        let selector = selector.map_or(&empty, |selector| &selector.match_labels);
        let mut selected = self.world.workloads(selected_in, selector).peekable();
        let verifies = |labels: &Labels| self.world.verifies_tokens(namespace, labels);
        selected.peek().is_some() && !selected.any(verifies)
    }

    /// Reports rules on tokens where no policy verifies any.
    fn tokens(&mut self, about: &ObjectReport<'_, AuthorizationPolicy>, namespace: Option<&str>) {
        let spec = &about.entry.object.spec;
        let uses_tokens = |rule: &Rule| {
            let sources = rule.from.iter().flat_map(|from| Clause::of_source(&from.source));
            let conditions = rule.when.iter().filter_map(Clause::of_condition);
            sources.chain(conditions).any(|clause| clause.is_of_token())
        };
        let Some(index) = spec.rules.iter().position(uses_tokens) else { return };
        if self.verifies_no_tokens(about.namespace(), spec.selector.as_ref(), namespace) {
            let message =
                "no RequestAuthentication applies to its workloads, so no request has a valid token";
            let field = format!("spec.rules[{index}]");
            self.report(about, Code::NoTokens, field, message, "add a RequestAuthentication");
        }
    }

    pub(super) fn telemetry(&mut self, about: &ObjectReport<'_, Telemetry>) {
        let spec = &about.entry.object.spec;
        let tracing = spec.tracing.iter().map(|of| &of.providers).enumerate();
        let metrics = spec.metrics.iter().map(|of| &of.providers).enumerate();
        let logs = spec.access_logging.iter().map(|of| &of.providers).enumerate();
        let named = |list: &'static str| move |(index, providers)| (list, index, providers);
        let all = tracing.map(named("tracing")).chain(metrics.map(named("metrics")));
        for (list, index, providers) in all.chain(logs.map(named("accessLogging"))) {
            let field = format!("spec.{list}[{index}].providers");
            let removed = providers.iter().find_map(|of| Some((&of.name, self.removed_kind(of)?)));
            if let Some((name, kind)) = removed {
                let message = format!("{name:?} is a provider {kind}, which current proxies do not have");
                self.report(about, Code::Deprecated, &field, message, "use a provider opentelemetry");
            }
            let unknown = |of: &&ProviderRef| !self.world.has_provider(&of.name);
            let Some(provider) = providers.iter().find(unknown) else { continue };
            let message = format!("extensionProviders of the mesh configuration has no {:?}", provider.name);
            self.report(about, Code::UnknownProvider, field, message, "correct the name");
        }
        self.logs_without_provider(about);
    }

    /// Returns the kind of a provider if it was removed from Envoy.
    fn removed_kind(&self, provider: &ProviderRef) -> Option<&'static str> {
        let mut known = self.world.mesh().extension_providers.iter();
        let kind = known.find(|of| of.name == provider.name)?.unsupported_kind()?;
        matches!(kind, "lightstep" | "opencensus").then_some(kind)
    }

    /// Reports access logs for which neither their object, nor another one, nor the mesh configuration names a provider.
    fn logs_without_provider(&mut self, about: &ObjectReport<'_, Telemetry>) {
        let (root, namespace) = (self.world.mesh().root_namespace.as_str(), about.namespace());
        let names_one = |of: &Telemetry| of.access_logging.iter().any(|log| !log.providers.is_empty());
        let applying = [root, namespace].into_iter().flat_map(|of| self.world.telemetries_in(of));
        let is_inherited = applying
            .map(|other| &other.object)
            .any(|other| !std::ptr::eq(&other.spec, &about.entry.object.spec) && names_one(&other.spec));
        if is_inherited || !self.world.mesh().default_providers.access_logging.is_empty() {
            return;
        }
        let logs = &about.entry.object.spec.access_logging;
        let is_nameless = |log: &AccessLogging| log.providers.is_empty() && log.disabled != Some(true);
        let Some(index) = logs.iter().position(is_nameless) else { return };
        let message = "names no provider, and defaultProviders.accessLogging of the mesh configuration is empty, so \
                       it changes nothing";
        let field = format!("spec.accessLogging[{index}]");
        self.report(about, Code::UnknownProvider, field, message, "add providers");
    }

    /// Reports a dry run that has no effect.
    fn dry_run(&mut self, about: &ObjectReport<'_, AuthorizationPolicy>) {
        let Some(value) = about.entry.object.meta.annotations.get(DRY_RUN) else { return };
        let field = join("metadata.annotations", DRY_RUN);
        match about.entry.object.spec.action {
            Action::Audit | Action::Custom => {
                let message = "has no effect: only policies with action ALLOW or DENY can be dry runs";
                self.report(about, Code::DryRunWithoutEffect, field, message, "remove the annotation");
            }
            _ if !is_true(value) && !matches!(&**value, "0" | "f" | "F" | "false" | "False" | "FALSE") => {
                let message = format!("{value:?} is not a boolean, so the policy is enforced");
                self.report(about, Code::DryRunValue, field, message, "write \"true\" or \"false\"");
            }
            _ => {}
        }
    }

    pub(super) fn request_authentication(&mut self, about: &ObjectReport<'_, RequestAuthentication>) {
        let spec = &about.entry.object.spec;
        if spec.target_ref.is_none() && spec.target_refs.is_empty() {
            self.selects_nothing(about, spec.selector.as_ref(), self.selected_namespace(about));
        }
    }

    /// Reports namespaces, service accounts and trust domains that do not exist. An ALLOW rule with one admits no
    /// client, a DENY rule denies none. Reports nothing while no workload is known.
    fn sources(&mut self, about: &ObjectReport<'_, AuthorizationPolicy>, spec: &AuthorizationPolicy) {
        if spec.action == Action::Audit || !self.world.any_workload() {
            return;
        }
        for (rule_index, rule) in spec.rules.iter().enumerate() {
            for (index, from) in rule.from.iter().enumerate() {
                let at = format!("spec.rules[{rule_index}].from[{index}].source");
                let source = &from.source;
                self.principals(about, &source.principals, &format!("{at}.principals"));
                self.principals(about, &source.not_principals, &format!("{at}.notPrincipals"));
                for (list, name) in [
                    (&source.service_accounts, "serviceAccounts"),
                    (&source.not_service_accounts, "notServiceAccounts"),
                ] {
                    for (index, account) in list.iter().enumerate() {
                        let (namespace, name_of) =
                            account.split_once('/').unwrap_or((about.namespace(), account));
                        self.account(about, namespace, name_of, format!("{at}.{name}[{index}]"));
                    }
                }
                for (list, name) in
                    [(&source.namespaces, "namespaces"), (&source.not_namespaces, "notNamespaces")]
                {
                    for (index, namespace) in list.iter().enumerate() {
                        self.namespace(about, namespace, format!("{at}.{name}[{index}]"));
                    }
                }
                for (list, name) in
                    [(&source.trust_domains, "trustDomains"), (&source.not_trust_domains, "notTrustDomains")]
                {
                    for (index, domain) in list.iter().enumerate() {
                        self.trust_domain(about, domain, format!("{at}.{name}[{index}]"));
                    }
                }
            }
        }
    }

    fn principals(&mut self, about: &ObjectReport<'_, AuthorizationPolicy>, list: &[String], at: &str) {
        for (index, principal) in list.iter().enumerate().filter(|(_, principal)| !principal.contains('*')) {
            let Ok(id) = format!("spiffe://{principal}").parse::<SpiffeId>() else { continue };
            let field = format!("{at}[{index}]");
            if self.is_own(&id.trust_domain) {
                self.account(about, &id.namespace, &id.service_account, field);
            } else {
                self.trust_domain(about, &id.trust_domain, field);
            }
        }
    }

    /// Returns whether a trust domain's service accounts are those of this mesh. `cluster.local` always means the
    /// mesh's own.
    fn is_own(&self, trust_domain: &str) -> bool {
        let mesh = self.world.mesh();
        trust_domain == mesh.trust_domain || trust_domain == crate::world::DOMAIN
    }

    fn trust_domain(&mut self, about: &ObjectReport<'_, AuthorizationPolicy>, domain: &str, field: String) {
        let accepted = self.world.mesh().trust_domains().any(|known| known == domain);
        if !accepted && !domain.contains('*') && !self.is_own(domain) {
            let message =
                format!("no client of trust domain {domain:?} is accepted, so no request matches this value");
            let remedy = "correct the name, or add it to trustDomainAliases of the mesh configuration";
            self.report(about, Code::UnknownTrustDomain, field, message, remedy);
        }
    }

    fn account(
        &mut self,
        about: &ObjectReport<'_, AuthorizationPolicy>,
        namespace: &str,
        name: &str,
        field: String,
    ) {
        let declared = self.world.has_service_account(namespace, name);
        let in_use = self.world.pods_in(namespace).any(|pod| pod.spec.service_account == name)
            || self.world.templates_in(namespace).any(|template| template.spec.service_account == name);
        if !declared && !in_use {
            let message = format!("there is no ServiceAccount {namespace}/{name}");
            self.report(about, Code::NoSuchAccount, field, message, "check the name and the namespace");
        }
    }

    fn namespace(&mut self, about: &ObjectReport<'_, AuthorizationPolicy>, name: &str, field: String) {
        let world = &self.world;
        let is_known =
            world.namespace(name).is_some() || world.runs_in(name) || world.any_service_account(name);
        if is_known || name.contains('*') {
            return;
        }
        let pods = world.pods().map(|pod| &pod.meta.namespace);
        let templates = world.templates().map(|template| &template.meta.namespace);
        let known: BTreeSet<&str> = pods.chain(templates).map(String::as_str).collect();
        let known: Vec<&str> = known.into_iter().collect();
        let remedy = nearest(name, &known)
            .map_or_else(|| "check the name".to_owned(), |near| format!("did you mean {near}?"));
        let message = format!("no workload runs in namespace {name}, so no request matches this value");
        self.report(about, Code::NoSuchNamespace, field, message, remedy);
    }

    /// Reports ports of a Service that differ from the workload's: policies match the port of the workload, so such a
    /// port matches no connection.
    fn service_ports<T>(
        &mut self,
        about: &ObjectReport<'_, T>,
        selector: Option<&WorkloadSelector>,
        ports: impl Iterator<Item = (String, u16)>,
    ) {
        let mut ports = ports.peekable();
        if ports.peek().is_none() {
            return;
        }
        let namespace = about.namespace();
        let empty = Labels::new();
        let selector = selector.map_or(&empty, |selector| &selector.match_labels);
        let selected: Vec<&Labels> = self.world.workloads(Some(namespace), selector).collect();
        let services: Vec<_> = self
            .world
            .services_in(namespace)
            .filter(|entry| {
                let of = &entry.object.spec.selector;
                !of.is_empty() && selected.iter().any(|labels| selects(of, labels))
            })
            .collect();
        for (field, number) in ports {
            let all = || {
                services
                    .iter()
                    .flat_map(|entry| entry.object.spec.ports.iter().map(move |port| (entry, port)))
            };
            // A name may resolve to this number.
            let leads_here =
                |port: &ServicePort| !matches!(port.target, TargetPort::Number(target) if target != number);
            if all().any(|(_, port)| leads_here(port)) {
                continue;
            }
            let Some((service, TargetPort::Number(target))) =
                all().find(|(_, port)| port.port == number).map(|(entry, port)| (entry, &port.target))
            else {
                continue;
            };
            let message = format!(
                "{number} is a port of Service {}, not of its workloads, so no connection matches this value",
                service.object.meta.name
            );
            self.report(
                about,
                Code::PolicyServicePort,
                field,
                message,
                format!("write the workload's port, {target}"),
            );
        }
    }

    /// Reports a selector that matches no workload. Reports nothing while no workload is known.
    pub(super) fn selects_nothing<T>(
        &mut self,
        about: &ObjectReport<'_, T>,
        selector: Option<&WorkloadSelector>,
        namespace: Option<&str>,
    ) {
        let empty = Labels::new();
        let labels = selector.map_or(&empty, |selector| &selector.match_labels);
        let any = match namespace {
            Some(namespace) if labels.is_empty() => self.world.runs_in(namespace),
            _ => self.world.workloads(namespace, labels).next().is_some(),
        };
        if any || !self.world.any_workload() {
            return;
        }
        let place =
            namespace.map_or_else(|| "the mesh".to_owned(), |namespace| format!("namespace {namespace}"));
        if labels.is_empty() {
            let message = format!("no workload runs in {place}, so the policy has no effect");
            self.report(about, Code::SelectsNothing, "metadata.namespace", message, "check the namespace");
        } else {
            let message =
                format!("no workload of {place} has {}, so the policy has no effect", label_text(labels));
            let field = "spec.selector.matchLabels";
            self.report(about, Code::SelectsNothing, field, message, "check labels and namespace");
        }
    }
}
