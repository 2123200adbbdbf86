//! Delegation: HTTP rules of a VirtualService that continue in another one (`delegate`).
//!
//! A delegate is a VirtualService without hosts. Each of its rules is merged with the rule of the root that names it.
//! The rules of merging, and what counts as a conflict, are those of Istio's `mergeVirtualServicesIfNeeded`.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use super::{
    World,
    gateways::gateway_name,
    hosts::{exported, fqdn},
    store::Entry,
};
use crate::api::{
    StringMatch, Typed, VirtualService,
    virtual_service::{Delegate, HttpMatchRequest, IstioHttpRoute},
};

/// Reason why a delegate has no effect on a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DelegateError {
    /// There is no VirtualService of this name.
    Missing,
    /// The VirtualService has hosts.
    HasHosts,
    /// `exportTo` hides the delegate from the root's namespace.
    Hidden,
}

impl World {
    /// Returns the HTTP rules of a VirtualService, with delegates replaced by their merged rules. Rules whose delegate
    /// is missing, and rules of delegates that conflict with the root, are left out.
    pub fn http_rules<'a>(&'a self, root: &'a Typed<VirtualService>) -> Cow<'a, [IstioHttpRoute]> {
        if root.spec.http.iter().all(|rule| rule.delegate.is_none()) {
            return Cow::Borrowed(&root.spec.http);
        }
        Cow::Owned(self.merged_rules(root).into_iter().map(|(_, _, rule)| rule).collect())
    }

    /// Returns the VirtualService of each of the [`http_rules`](Self::http_rules), and the position of the rule in it. For
    /// explanations.
    pub fn http_rule_origins(
        &self,
        root: &Arc<Typed<VirtualService>>,
    ) -> Vec<(Arc<Typed<VirtualService>>, usize)> {
        let of = |delegate: Option<&Entry<VirtualService>>| {
            Arc::clone(delegate.map_or(root, |delegate| &delegate.object))
        };
        self.merged_rules(root).into_iter().map(|(delegate, index, _)| (of(delegate), index)).collect()
    }

    /// Returns the rules of a root after the merge, each with its delegate, and its position in the delegate or in the
    /// root.
    fn merged_rules(
        &self,
        root: &Typed<VirtualService>,
    ) -> Vec<(Option<&Entry<VirtualService>>, usize, IstioHttpRoute)> {
        let mut rules = Vec::new();
        for (index, rule) in root.spec.http.iter().enumerate() {
            match &rule.delegate {
                None => rules.push((None, index, rule.clone())),
                Some(delegate) => {
                    if let Ok(entry) = self.delegate(root, delegate) {
                        let merged =
                            merged(rule, &root.meta.namespace, &entry.object).into_iter().enumerate();
                        rules.extend(merged.filter_map(|(index, rule)| Some((Some(entry), index, rule?))));
                    }
                }
            }
        }
        rules
    }

    /// Returns the delegate that a rule names.
    pub(super) fn delegate(
        &self,
        root: &Typed<VirtualService>,
        delegate: &Delegate,
    ) -> Result<&Entry<VirtualService>, DelegateError> {
        let (namespace, name) = delegate.key(&root.meta.namespace);
        let entry = self.virtual_services.get(namespace, name).ok_or(DelegateError::Missing)?;
        if !entry.object.spec.hosts.is_empty() {
            return Err(DelegateError::HasHosts);
        }
        let default = &self.mesh().default_virtual_service_export_to;
        let own = &entry.object.spec.export_to;
        let list = if own.is_empty() { default } else { own };
        let is_visible = exported(list.iter().map(String::as_str), namespace, &root.meta.namespace);
        is_visible.then_some(entry).ok_or(DelegateError::Hidden)
    }

    /// Returns the VirtualServices with a rule that names this delegate.
    pub(super) fn roots_of<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> impl Iterator<Item = &'a Entry<VirtualService>> {
        self.virtual_services.iter().filter(move |entry| {
            let of = &entry.object.meta.namespace;
            let mut delegates = entry.object.spec.http.iter().filter_map(|rule| rule.delegate.as_ref());
            delegates.any(|delegate| delegate.key(of) == (namespace, name))
        })
    }
}

/// Returns each rule of a delegate merged with the rule of its root; `None` in place of those that conflict with it.
pub(super) fn merged(
    root: &IstioHttpRoute,
    root_namespace: &str,
    delegate: &Typed<VirtualService>,
) -> Vec<Option<IstioHttpRoute>> {
    let root = with_full_names(root, root_namespace);
    let parts = delegate.spec.http.iter();
    parts.map(|part| merge(&root, &with_full_names(part, &delegate.meta.namespace))).collect()
}

/// Returns a rule whose hosts and gateways are completed with the namespace of its own object.
fn with_full_names(rule: &IstioHttpRoute, namespace: &str) -> IstioHttpRoute {
    let mut rule = rule.clone();
    let targets = rule.route.iter_mut().map(|to| &mut to.destination);
    let mirrors = rule.mirrors.iter_mut().map(|mirror| &mut mirror.destination);
    for to in targets.chain(mirrors).chain(&mut rule.mirror) {
        to.host = fqdn(&to.host, namespace);
    }
    for gateway in rule.matches.iter_mut().flat_map(|found| &mut found.gateways) {
        *gateway = gateway_name(gateway, namespace);
    }
    rule
}

/// Merges a delegate's rule with the root's; `None` if their matches conflict.
fn merge(root: &IstioHttpRoute, part: &IstioHttpRoute) -> Option<IstioHttpRoute> {
    let mut made = part.clone();
    made.matches = merge_matches(&root.matches, &part.matches)?;
    made.name = joined(&root.name, &part.name);
    macro_rules! inherit {
        ($($field:ident),*) => { $(if made.$field.is_none() { made.$field.clone_from(&root.$field); })* };
    }
    inherit!(
        rewrite,
        direct_response,
        timeout,
        retries,
        fault,
        mirror,
        mirror_percent,
        mirror_percentage,
        cors_policy,
        headers
    );
    if made.mirrors.is_empty() {
        made.mirrors.clone_from(&root.mirrors);
    }
    // Delegates have no delegates.
    made.delegate = None;
    Some(made)
}

/// Merges each match of the delegate with each match of the root that it refines; `None` if one refines none.
fn merge_matches(root: &[HttpMatchRequest], part: &[HttpMatchRequest]) -> Option<Vec<HttpMatchRequest>> {
    if root.is_empty() || part.is_empty() {
        return Some(if root.is_empty() { part.to_vec() } else { root.to_vec() });
    }
    let mut made = Vec::new();
    for part in part {
        let before = made.len();
        made.extend(root.iter().filter(|root| !conflicts(root, part)).map(|root| merge_match(root, part)));
        if made.len() == before {
            return None;
        }
    }
    Some(made)
}

fn merge_match(root: &HttpMatchRequest, part: &HttpMatchRequest) -> HttpMatchRequest {
    let mut made = part.clone();
    made.name = joined(&root.name, &part.name);
    macro_rules! inherit {
        ($($field:ident),*) => { $(if made.$field.is_none() { made.$field.clone_from(&root.$field); })* };
    }
    inherit!(uri, scheme, method, authority, port, source_namespace);
    inherit_entries(&mut made.headers, &root.headers);
    inherit_entries(&mut made.without_headers, &root.without_headers);
    inherit_entries(&mut made.query_params, &root.query_params);
    inherit_entries(&mut made.source_labels, &root.source_labels);
    if made.gateways.is_empty() {
        made.gateways.clone_from(&root.gateways);
    }
    if made.stat_prefix.is_empty() {
        made.stat_prefix.clone_from(&root.stat_prefix);
    }
    made
}

fn inherit_entries<V: Clone>(to: &mut BTreeMap<String, V>, from: &BTreeMap<String, V>) {
    for (key, value) in from {
        to.entry(key.clone()).or_insert_with(|| value.clone());
    }
}

fn joined(root: &str, part: &str) -> String {
    match (root, part) {
        ("", name) | (name, "") => name.to_owned(),
        _ => format!("{root}-{part}"),
    }
}

/// Returns whether a match of a delegate does not refine a match of its root.
fn conflicts(root: &HttpMatchRequest, part: &HttpMatchRequest) -> bool {
    let texts = [
        (&root.uri, &part.uri),
        (&root.scheme, &part.scheme),
        (&root.method, &part.method),
        (&root.authority, &part.authority),
    ];
    let maps = [
        (&root.headers, &part.headers),
        (&root.without_headers, &part.without_headers),
        (&root.query_params, &part.query_params),
    ];
    let given = |namespace: &Option<String>| namespace.clone().unwrap_or_default();
    let of_root = given(&root.source_namespace);
    let gateways = !root.gateways.is_empty()
        && !part.gateways.is_empty()
        && (root.gateways.len() < part.gateways.len()
            || part.gateways.iter().any(|gateway| !root.gateways.contains(gateway)));
    texts.iter().any(|(root, part)| text_conflicts(root.as_ref(), part.as_ref()))
        || maps
            .iter()
            .any(|(root, part)| part.iter().any(|(key, value)| text_conflicts(root.get(key), Some(value))))
        || root.ignore_uri_case != part.ignore_uri_case
        || matches!((root.port, part.port), (Some(root), Some(part)) if root != part)
        || !of_root.is_empty() && of_root != given(&part.source_namespace)
        || part
            .source_labels
            .iter()
            .any(|(key, value)| root.source_labels.get(key).is_some_and(|known| known != value))
        || gateways
}

/// Returns whether a text of a delegate may match where the root's does not. Two regular expressions always conflict.
fn text_conflicts(root: Option<&StringMatch>, part: Option<&StringMatch>) -> bool {
    let (Some(root), Some(part)) = (root, part) else { return false };
    match (root, part) {
        (StringMatch::Exact(root), StringMatch::Exact(part)) => root != part,
        (StringMatch::Prefix(root), StringMatch::Exact(part) | StringMatch::Prefix(part)) => {
            !part.starts_with(root.as_str())
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> IstioHttpRoute {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn settings_of_the_delegate_precede_those_of_the_root() {
        let root =
            rule(r#"{"name": "r", "timeout": "1s", "rewrite": {"uri": "/r"}, "delegate": {"name": "d"}}"#);
        let part = rule(r#"{"name": "d", "timeout": "2s", "route": [{"destination": {"host": "a"}}]}"#);
        let made = merge(&root, &part).unwrap();
        assert_eq!(made.name, "r-d");
        assert_eq!(made.timeout, part.timeout);
        assert_eq!(made.rewrite, root.rewrite);
        assert_eq!(made.delegate, None);
    }

    #[test]
    fn short_names_belong_to_the_namespace_of_their_object() {
        let root = rule(
            r#"{"match": [{"gateways": ["mesh", "g"]}], "mirror": {"host": "m"}, "delegate": {"name": "d"}}"#,
        );
        let part = rule(r#"{"match": [{"gateways": ["r/g"]}], "route": [{"destination": {"host": "a"}}]}"#);
        let meta = crate::api::Meta { namespace: "d".into(), ..Default::default() };
        let delegate = Typed { meta, spec: VirtualService { http: vec![part], ..Default::default() } };
        let made = merged(&root, "r", &delegate).remove(0).unwrap();
        assert_eq!(made.route[0].destination.host, "a.d.svc.cluster.local");
        assert_eq!(made.mirror.unwrap().host, "m.r.svc.cluster.local");
        assert_eq!(made.matches[0].gateways, ["r/g"]);
    }

    #[test]
    fn matches_of_the_delegate_refine_those_of_the_root() {
        let merged = |root: &str, part: &str| {
            let found = |text: &str| format!(r#"{{"match": [{text}]}}"#);
            merge(&rule(&found(root)), &rule(&found(part))).map(|made| made.matches)
        };
        let prefix = r#"{"uri": {"prefix": "/a"}, "headers": {"x": {"exact": "1"}}}"#;
        let made = merged(prefix, r#"{"uri": {"exact": "/a/b"}, "port": 80}"#).unwrap();
        assert_eq!(made[0].uri, Some(StringMatch::Exact("/a/b".into())));
        assert_eq!((made[0].port, made[0].headers.len()), (Some(80), 1));
        for (root, part) in [
            (prefix, r#"{"uri": {"prefix": "/b"}}"#),
            (prefix, r#"{"headers": {"x": {"exact": "2"}}}"#),
            (r#"{"uri": {"exact": "/a"}}"#, r#"{"uri": {"prefix": "/a"}}"#),
            (r#"{"uri": {"regex": "/a.*"}}"#, r#"{"uri": {"regex": "/a.*"}}"#),
            (r#"{"port": 80}"#, r#"{"port": 81}"#),
            (r#"{"sourceNamespace": "a"}"#, "{}"),
            (r#"{"sourceLabels": {"a": "b"}}"#, r#"{"sourceLabels": {"a": "c"}}"#),
            (r#"{"gateways": ["mesh"]}"#, r#"{"gateways": ["mesh", "g"]}"#),
            (r#"{"ignoreUriCase": true}"#, "{}"),
        ] {
            assert_eq!(merged(root, part), None, "{root} {part}");
        }
        // Each match of one side is combined with each of the other that it does not conflict with.
        let both =
            merged(r#"{"port": 80}, {"port": 81}"#, r#"{"port": 81}, {"uri": {"exact": "/"}}"#).unwrap();
        let ports: Vec<_> = both.iter().map(|found| found.port).collect();
        assert_eq!(ports, [Some(81), Some(80), Some(81)]);
    }
}
