//! Request authentication of a workload, and the key sets that the control plane fetched.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use super::{
    ChangeSet, World,
    policy::{self, affected_workloads},
};
use crate::api::{Labels, RequestAuthentication, Typed, security::JwtRule};

/// Timeout of a fetch if no rule sets one. Source: Istio's default.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);

/// Source from which a key set is fetched.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KeySource {
    /// URL of the key set.
    Uri(Arc<str>),
    /// Issuer whose OpenID Connect Discovery document names the URL.
    Issuer(Arc<str>),
}

impl KeySource {
    /// Returns the source of a rule's key set; `None` if the rule contains it or names none.
    pub fn of(rule: &JwtRule) -> Option<Self> {
        match (&*rule.jwks, &*rule.jwks_uri, &*rule.issuer) {
            ("", "", issuer) if is_url(issuer) => Some(Self::Issuer(issuer.into())),
            ("", uri, _) if !uri.is_empty() => Some(Self::Uri(uri.into())),
            _ => None,
        }
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uri(uri) => to.write_str(uri),
            Self::Issuer(issuer) => write!(to, "issuer {issuer}"),
        }
    }
}

/// Returns whether a text is a URL from which a key set can be fetched.
pub(crate) fn is_url(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_graphic()))
}

/// Key set to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFetch {
    /// Timeout: the longest of the rules that use the key set.
    pub timeout: Duration,
    /// Policies that use the key set, `NAMESPACE/NAME`.
    pub used_by: BTreeSet<String>,
}

impl World {
    /// Returns the policies for tokens that apply to a workload: those of the root namespace, then those of its own,
    /// oldest first.
    pub fn request_authentications(
        &self,
        namespace: &str,
        labels: &Labels,
    ) -> Vec<&Arc<Typed<RequestAuthentication>>> {
        let root = self.mesh().root_namespace.as_str();
        let mut policies = Vec::new();
        for of in [root, namespace] {
            let mut entries: Vec<_> = self
                .request_authentications
                .in_namespace(of)
                .filter(|entry| {
                    let spec = &entry.object.spec;
                    let targets = spec.target_ref.iter().chain(&spec.target_refs);
                    policy::applies(spec.selector.as_ref(), targets, of == namespace, labels)
                })
                .collect();
            entries.sort_by(|a, b| a.age().cmp(&b.age()));
            policies.extend(entries.into_iter().map(|entry| &entry.object));
            if root == namespace {
                break;
            }
        }
        policies
    }

    /// Returns the key sets to fetch.
    pub fn key_fetches(&self) -> BTreeMap<KeySource, KeyFetch> {
        let mut fetches: BTreeMap<KeySource, KeyFetch> = BTreeMap::new();
        for entry in self.request_authentications.iter() {
            let meta = &entry.object.meta;
            for rule in &entry.object.spec.jwt_rules {
                let Some(source) = KeySource::of(rule) else { continue };
                let timeout = rule.timeout.map_or(FETCH_TIMEOUT, |timeout| timeout.0);
                let fetch =
                    fetches.entry(source).or_insert_with(|| KeyFetch { timeout, used_by: BTreeSet::new() });
                fetch.timeout = fetch.timeout.max(timeout);
                fetch.used_by.insert(format!("{}/{}", meta.namespace, meta.name));
            }
        }
        fetches
    }

    /// Sets the key set of a source (JSON); `None` removes it. Returns false if it did not change.
    pub fn set_key_set(&mut self, source: &KeySource, now: Option<Arc<str>>) -> bool {
        if self.key_sets.get(source) == now.as_ref() {
            return false;
        }
        let key_sets = Arc::make_mut(&mut self.key_sets);
        match now {
            Some(now) => key_sets.insert(source.clone(), now),
            None => key_sets.remove(source),
        };
        let root = &self.mesh().root_namespace;
        let mut changes = ChangeSet::default();
        for entry in self.request_authentications.iter() {
            if entry.object.spec.jwt_rules.iter().any(|rule| KeySource::of(rule).as_ref() == Some(source)) {
                let (namespace, spec) = (&entry.object.meta.namespace, &entry.object.spec);
                changes.workloads |= namespace == root;
                let targets = spec.target_ref.iter().chain(&spec.target_refs);
                let selected = affected_workloads(spec.selector.as_ref(), targets);
                changes.add(ChangeSet::of_workloads(namespace, selected));
            }
        }
        self.add_changes(changes);
        true
    }

    /// Returns a fetched key set.
    pub fn key_set(&self, source: &KeySource) -> Option<&Arc<str>> {
        self.key_sets.get(source)
    }
}
