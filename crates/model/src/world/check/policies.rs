//! PeerAuthentication and AuthorizationPolicy: policies that hold for nothing, or that others push aside.

use super::{About, Report, label_text, workloads};
use crate::{
    api::{
        AuthorizationPolicy, Kind, PeerAuthentication, destination_rule::WorkloadSelector, security::Action,
    },
    diagnostic::Severity,
    world::policy::is_wide,
};

impl Report<'_> {
    pub(super) fn peer_authentications(&mut self) {
        let root = self.world.mesh().root_namespace.clone();
        for entry in self.world.peer_authentications.iter() {
            let about = About { entry, kind: Kind::PeerAuthentication };
            let selector = entry.object.spec.selector.as_ref();
            if !is_wide(selector) && about.namespace() == root {
                let message = "has no effect: policies of the root namespace cannot select workloads";
                let remedy = "remove the selector, or put it into the workload's namespace";
                self.say(&about, Severity::Error, "spec.selector", message, remedy);
                continue;
            }
            self.rival(&about);
            self.selects_nothing(&about, selector, Some(about.namespace()));
        }
    }

    /// Of several policies for the same workloads only the oldest counts.
    fn rival(&mut self, about: &About<'_, PeerAuthentication>) {
        let mine = about.entry.object.spec.selector.as_ref();
        let same = |other: Option<&WorkloadSelector>| match (is_wide(mine), is_wide(other)) {
            (true, true) => true,
            (false, false) => mine == other,
            _ => false,
        };
        let older = self
            .world
            .peer_authentications
            .in_namespace(about.namespace())
            .find(|other| same(other.object.spec.selector.as_ref()) && other.age() < about.entry.age());
        if let Some(older) = older {
            let older = About { entry: older, kind: Kind::PeerAuthentication }.name();
            let message = format!("has no effect: {older} is older and holds for the same workloads");
            self.say(about, Severity::Error, "spec", message, "keep one of them");
        }
    }

    pub(super) fn authorization_policies(&mut self) {
        let root = self.world.mesh().root_namespace.clone();
        for entry in self.world.authorization_policies.iter() {
            let about = About { entry, kind: Kind::AuthorizationPolicy };
            let spec = &entry.object.spec;
            // What it is attached to instead was reported when it was read.
            if spec.target_ref.is_some() || !spec.target_refs.is_empty() {
                continue;
            }
            let namespace = (about.namespace() != root).then(|| about.namespace());
            self.selects_nothing(&about, spec.selector.as_ref(), namespace);
            self.accounts(&about, spec);
        }
    }

    /// Names of service accounts that no workload has: in an ALLOW, the one spelled right stays locked out.
    fn accounts(&mut self, about: &About<'_, AuthorizationPolicy>, spec: &AuthorizationPolicy) {
        if spec.action == Action::Audit || self.world.pods.iter().next().is_none() {
            return;
        }
        let trust_domain = &self.world.mesh().trust_domain;
        for (rule_index, rule) in spec.rules.iter().enumerate() {
            for (index, from) in rule.from.iter().enumerate() {
                for (at, principal) in from.source.principals.iter().enumerate() {
                    let whole = format!("spiffe://{principal}");
                    let Ok(id) = whole.parse::<skysail_core::SpiffeId>() else { continue };
                    if principal.contains('*') || id.trust_domain != *trust_domain {
                        continue;
                    }
                    let declared =
                        self.world.service_accounts.get(&id.namespace, &id.service_account).is_some();
                    let used = self.world.pods.in_namespace(&id.namespace);
                    let mut used = used.map(|entry| &entry.object.spec.service_account);
                    if !declared && !used.any(|account| *account == id.service_account) {
                        let field = format!("spec.rules[{rule_index}].from[{index}].source.principals[{at}]");
                        let message =
                            format!("there is no ServiceAccount {}/{}", id.namespace, id.service_account);
                        self.say(
                            about,
                            Severity::Warning,
                            field,
                            message,
                            "check the name and the namespace",
                        );
                    }
                }
            }
        }
    }

    /// A selector that no workload has. Silent while there are no workloads at all.
    fn selects_nothing<T>(
        &mut self,
        about: &About<'_, T>,
        selector: Option<&WorkloadSelector>,
        namespace: Option<&str>,
    ) {
        let Some(selector) = selector.filter(|selector| !selector.match_labels.is_empty()) else { return };
        let any = self.world.pods().next().is_some() || self.world.templates().next().is_some();
        if any && workloads(self.world, namespace, &selector.match_labels).next().is_none() {
            let wanted = label_text(&selector.match_labels);
            let place =
                namespace.map_or_else(|| "the mesh".to_owned(), |namespace| format!("namespace {namespace}"));
            let message = format!("no workload of {place} has {wanted}, so the policy has no effect");
            self.say(
                about,
                Severity::Warning,
                "spec.selector.matchLabels",
                message,
                "check labels and namespace",
            );
        }
    }
}
