//! Fallbacks of refused policies.
//!
//! A policy with an error is refused. If no valid version is known, as at the start, a fallback takes its place. It
//! restricts at least as much as the policy would without the error, as far as the policy can be read:
//!
//! | errors | fallback |
//! |---|---|
//! | in rules of an ALLOW policy | without these rules |
//! | in rules of a DENY policy | the rules without the parts that have errors, so that they match more |
//! | anywhere else in an AuthorizationPolicy | denies every request |
//! | in rules of a RequestAuthentication | refuses the tokens of these rules |
//! | in a PeerAuthentication | STRICT |
//! | in a WasmPlugin or TrafficExtension that decides which requests pass | refuses these requests |
//! | in `metadata` only | the policy as written |
//!
//! If the selector cannot be read, the fallback selects all workloads of the namespace.

use serde::de::DeserializeOwned;
use skysail_yaml::{Entry, Node, Value};
use std::{collections::BTreeSet, sync::Arc};

use super::{IstioObject, decode::decode, key::key_of};
use crate::{
    api::{
        AuthorizationPolicy, Kind, Meta, MtlsMode, Object, PeerAuthentication, RequestAuthentication,
        TrafficExtension, Typed, WasmPlugin,
        destination_rule::WorkloadSelector,
        extension::{Phase, PluginType, TrafficSelector, WasmConfig},
        security::{Action, DRY_RUN, JwtRule, MutualTls, Rule, TargetRef, is_true},
    },
    origin::Origin,
    spelling::nearest,
    validate,
};

/// Names of the fields of specs.
const FIELDS: [&str; 18] = [
    "selector",
    "targetRef",
    "targetRefs",
    "rules",
    "action",
    "provider",
    "mtls",
    "portLevelMtls",
    "jwtRules",
    "url",
    "wasm",
    "lua",
    "phase",
    "priority",
    "match",
    "failStrategy",
    "pluginConfig",
    "type",
];

const AS_WRITTEN: &str = "its spec is enforced as it is written";
const ALLOW: &str = "its rules with errors allow no request: requests that no other rule of an ALLOW policy matches are denied";
const DENY: &str = "its rules with errors deny every request that matches the parts of them without errors";
const CLOSED: &str = "every request to the workloads that it selects is denied";
const CLOSED_WIDE: &str =
    "every request to the workloads of its namespace is denied, as its selector cannot be read";
const TOKENS: &str = "the workloads that it selects refuse the tokens of its rules with errors";
const TOKENS_WIDE: &str = "the workloads of its namespace refuse the tokens of its rules with errors, as its selector cannot be read";
const PLUGIN: &str = "the requests that it matches, to and from the workloads that it selects, are refused";
const PLUGIN_WIDE: &str = "the requests that it matches, to and from the workloads of its namespace, are refused, as its selector cannot be read";
const STRICT: &str = "the workloads that it selects accept connections with mutual TLS only";
const STRICT_WIDE: &str =
    "the workloads of its namespace accept connections with mutual TLS only, as its selector cannot be read";

/// Replacement of a refused policy.
#[derive(Clone, Debug)]
pub struct Fallback {
    /// Policy that is enforced instead.
    pub object: Object,
    /// Where the refused policy was read.
    pub origin: Origin,
    /// Effect until the errors are fixed, as a clause.
    pub effect: &'static str,
}

impl Fallback {
    /// Returns the fallback of an object with errors in these fields, or `None` unless it is a policy that would
    /// restrict requests.
    pub(super) fn of(root: &Node, errors: &[String], file: &Arc<str>) -> Option<Self> {
        let key = key_of(root)?;
        let meta = Meta { namespace: key.namespace, name: key.name, ..Meta::default() };
        let annotations = root.get("metadata").and_then(|meta| meta.get("annotations"));
        let dry_run = annotations.and_then(|annotations| annotations.get(DRY_RUN)).and_then(Node::text);
        let policy =
            RefusedPolicy { spec: root.get("spec"), errors, is_dry_run: dry_run.is_some_and(is_true) };
        let (object, effect) = match key.kind {
            Kind::AuthorizationPolicy => {
                let (spec, effect) = policy.authorization()?;
                (Object::AuthorizationPolicy(Arc::new(Typed { meta, spec })), effect)
            }
            Kind::RequestAuthentication => {
                let (spec, effect) = policy.tokens()?;
                (Object::RequestAuthentication(Arc::new(Typed { meta, spec })), effect)
            }
            Kind::PeerAuthentication => {
                let (spec, effect) = policy.authentication()?;
                (Object::PeerAuthentication(Arc::new(Typed { meta, spec })), effect)
            }
            Kind::WasmPlugin => {
                let (spec, effect) = policy.plugin()?;
                (Object::WasmPlugin(Arc::new(Typed { meta, spec })), effect)
            }
            Kind::TrafficExtension => {
                let (spec, effect) = policy.extension()?;
                (Object::TrafficExtension(Arc::new(Typed { meta, spec })), effect)
            }
            _ => return None,
        };
        let origin = super::lines::origin(file, root, &object, false);
        Some(Self { object, origin, effect })
    }
}

/// A refused policy, as far as it can be read.
struct RefusedPolicy<'a> {
    spec: Option<&'a Node>,
    errors: &'a [String],
    /// Whether the policy would not be enforced.
    is_dry_run: bool,
}

impl RefusedPolicy<'_> {
    /// Returns the policy without the rules that have errors, and with one that refuses the tokens of other issuers.
    fn tokens(&self) -> Option<(RequestAuthentication, &'static str)> {
        let targets = self.targets();
        if targets.as_deref().is_some_and(has_no_effect) {
            return None;
        }
        if let Some(written) = self.as_written(validate::request_authentication) {
            return Some((written, AS_WRITTEN));
        }
        let mut jwt_rules = self.readable_rules();
        jwt_rules.push(JwtRule::default());
        let refused = RequestAuthentication { jwt_rules, ..Default::default() };
        if let Some(target_refs) = targets.filter(|targets| !targets.is_empty()) {
            return Some((RequestAuthentication { target_refs, ..refused }, TOKENS));
        }
        let (selector, effect) = self.selector().map_or((None, TOKENS_WIDE), |selector| (selector, TOKENS));
        Some((RequestAuthentication { selector, ..refused }, effect))
    }

    /// Returns the rules for tokens that have no errors.
    fn readable_rules(&self) -> Vec<JwtRule> {
        let Some(Node { value: Value::List(rules), .. }) = self.spec.and_then(|spec| spec.get("jwtRules"))
        else {
            return Vec::new();
        };
        let single = |(index, rule): (usize, &Node)| {
            let field = format!("spec.jwtRules[{index}]");
            if self.errors.iter().any(|error| error.starts_with(&field)) {
                return None;
            }
            let list = Node { line: rule.line, value: Value::List(vec![rule.clone()]) };
            read(mapping("jwtRules", list), validate::request_authentication)?.jwt_rules.pop()
        };
        rules.iter().enumerate().filter_map(single).collect()
    }

    fn authorization(&self) -> Option<(AuthorizationPolicy, &'static str)> {
        let text = |field: &str| self.spec.and_then(|spec| spec.get(field)).and_then(Node::text);
        let targets = self.targets();
        let has_no_effect = targets.as_deref().is_some_and(has_no_effect);
        if text("action") == Some("AUDIT") || has_no_effect || self.is_dry_run {
            return None;
        }
        if let Some(written) = self.as_written(validate::authorization_policy) {
            return Some((written, AS_WRITTEN));
        }
        let repaired = self.with_repaired_rules(text("action").is_none_or(|action| action == "ALLOW"));
        if let Some(repaired) = repaired {
            let effect = if repaired.action == Action::Allow { ALLOW } else { DENY };
            return Some((repaired, effect));
        }
        let rules = vec![Rule::default()];
        let closed = AuthorizationPolicy { action: Action::Deny, rules, ..Default::default() };
        if let Some(target_refs) = targets.filter(|targets| !targets.is_empty()) {
            return Some((AuthorizationPolicy { target_refs, ..closed }, CLOSED));
        }
        let (selector, effect) = self.selector().map_or((None, CLOSED_WIDE), |selector| (selector, CLOSED));
        Some((AuthorizationPolicy { selector, ..closed }, effect))
    }

    fn authentication(&self) -> Option<(PeerAuthentication, &'static str)> {
        if let Some(written) = self.as_written(validate::peer_authentication) {
            return Some((written, AS_WRITTEN));
        }
        let mut modes = BTreeSet::new();
        self.spec.iter().for_each(|spec| texts_of(spec, "mode", &mut modes));
        if !modes.is_empty() && modes.iter().all(|mode| matches!(*mode, "PERMISSIVE" | "DISABLE")) {
            return None;
        }
        let (selector, effect) = self.selector().map_or((None, STRICT_WIDE), |selector| (selector, STRICT));
        let mtls = Some(MutualTls { mode: MtlsMode::Strict });
        Some((PeerAuthentication { selector, mtls, ..Default::default() }, effect))
    }

    /// Returns a plugin that refuses the requests that the refused one matches.
    fn plugin(&self) -> Option<(WasmPlugin, &'static str)> {
        if let Some(written) = self.as_written(validate::wasm_plugin) {
            return Some((written, AS_WRITTEN));
        }
        let phase = self.phase()?;
        if self.text("failStrategy") == Some("FAIL_OPEN") {
            return None;
        }
        let filter_type = self.filter_type(self.spec);
        let matches = self.matches(validate::wasm_plugin, |plugin: WasmPlugin| plugin.matches);
        let refused = WasmPlugin { phase, filter_type, matches, ..Default::default() };
        if let Some(target_refs) = self.targets().filter(|targets| !targets.is_empty()) {
            return Some((WasmPlugin { target_refs, ..refused }, PLUGIN));
        }
        let (selector, effect) = self.selector().map_or((None, PLUGIN_WIDE), |selector| (selector, PLUGIN));
        Some((WasmPlugin { selector, ..refused }, effect))
    }

    /// Returns an extension that refuses the requests that the refused one matches.
    fn extension(&self) -> Option<(TrafficExtension, &'static str)> {
        if let Some(written) = self.as_written(validate::traffic_extension) {
            return Some((written, AS_WRITTEN));
        }
        let phase = self.phase()?;
        let wasm = self.spec.and_then(|spec| spec.get("wasm"));
        if wasm.and_then(|wasm| wasm.get("failStrategy")).and_then(Node::text) == Some("FAIL_OPEN") {
            return None;
        }
        let module = WasmConfig { filter_type: self.filter_type(wasm), ..WasmConfig::default() };
        let matches = self.matches(validate::traffic_extension, |spec: TrafficExtension| spec.matches);
        let refused = TrafficExtension { phase, wasm: Some(module), matches, ..Default::default() };
        if let Some(target_refs) = self.targets().filter(|targets| !targets.is_empty()) {
            return Some((TrafficExtension { target_refs, ..refused }, PLUGIN));
        }
        let (selector, effect) = self.selector().map_or((None, PLUGIN_WIDE), |selector| (selector, PLUGIN));
        Some((TrafficExtension { selector, ..refused }, effect))
    }

    /// Returns the phase of an extension; `None` if it does not decide which requests pass. An unknown phase decides.
    fn phase(&self) -> Option<Phase> {
        let written = self.spec.and_then(|spec| spec.get("phase")).filter(|phase| phase.value != Value::Null);
        let is_unreadable = |error: &String| match error.strip_prefix("spec.").map(first_name) {
            Some("phase") => true,
            // An unknown field may have been meant for the phase.
            Some(field) => written.is_none() && nearest(field, &FIELDS) == Some("phase"),
            None => written.is_none() && error == "spec",
        };
        match written.map(Node::text) {
            Some(Some("AUTHN")) => Some(Phase::Authn),
            _ if self.errors.iter().any(is_unreadable) => Some(Phase::Authz),
            None | Some(Some("STATS" | "UNSPECIFIED" | "UNSPECIFIED_PHASE")) => None,
            _ => Some(Phase::Authz),
        }
    }

    fn filter_type(&self, module: Option<&Node>) -> PluginType {
        match module.and_then(|module| module.get("type")).and_then(Node::text) {
            Some("NETWORK") => PluginType::Network,
            _ => PluginType::Http,
        }
    }

    /// Returns the traffic that passes an extension; all of it if that has errors or cannot be read.
    fn matches<S: DeserializeOwned + Default>(
        &self,
        check: impl FnOnce(&S) -> Vec<validate::Finding>,
        of: impl FnOnce(S) -> Vec<TrafficSelector>,
    ) -> Vec<TrafficSelector> {
        let check = |spec: &S| {
            let mut findings = check(spec);
            findings.retain(|finding| finding.field.starts_with("spec.match"));
            findings
        };
        let matches = self.spec.and_then(|spec| spec.get("match"));
        let read = matches.and_then(|node| read(mapping("match", node.clone()), check));
        read.map(of).unwrap_or_default()
    }

    fn text(&self, field: &str) -> Option<&str> {
        self.spec.and_then(|spec| spec.get(field)).and_then(Node::text)
    }

    /// Returns the objects that the policy is attached to; `None` if it selects workloads instead.
    fn targets(&self) -> Option<Vec<TargetRef>> {
        let spec = self.spec?;
        let (single, list) = (spec.get("targetRef"), spec.get("targetRefs"));
        if single.is_none() && list.is_none() || spec.get("selector").is_some() {
            return None;
        }
        let list = list.and_then(|list| match &list.value {
            Value::List(targets) => Some(targets),
            _ => None,
        });
        let of = |node: &Node| {
            let text =
                |field: &str| node.get(field).and_then(Node::text).map(str::to_owned).unwrap_or_default();
            let (group, kind, name) = (text("group"), text("kind"), text("name"));
            (!kind.is_empty() && !name.is_empty()).then_some(TargetRef {
                group,
                kind,
                name,
                namespace: String::new(),
            })
        };
        Some(single.into_iter().chain(list.into_iter().flatten()).filter_map(of).collect())
    }

    /// Returns the policy as written if all errors are in its metadata.
    fn as_written<S: DeserializeOwned + Default>(
        &self,
        check: impl FnOnce(&S) -> Vec<validate::Finding>,
    ) -> Option<S> {
        let of_metadata = |field: &String| field == "metadata" || field.starts_with("metadata.");
        if !self.errors.iter().all(of_metadata) {
            return None;
        }
        read(self.spec?.clone(), check)
    }

    /// Returns the policy without the rules (ALLOW) or the parts of rules (other actions) that have errors. `None` if
    /// it has other errors.
    fn with_repaired_rules(&self, allow: bool) -> Option<AuthorizationPolicy> {
        let mut spec = self.spec?.clone();
        let Value::Map(entries) = &mut spec.value else { return None };
        let rules = &mut entries.iter_mut().find(|entry| entry.key == "rules")?.value;
        for field in self.errors.iter().filter(|field| !field.starts_with("metadata")) {
            let rest = field.strip_prefix("spec.rules")?;
            if !rest.is_empty() && !rest.starts_with('[') {
                return None;
            }
            let index = rest.strip_prefix('[').and_then(|rest| rest.split_once(']'));
            let index = index.and_then(|(index, rest)| Some((index.parse::<usize>().ok()?, rest)));
            match (index, &mut rules.value) {
                (Some((index, _)), Value::List(all)) if allow => all.get_mut(index)?.value = Value::Null,
                (Some((index, rest)), Value::List(all)) => {
                    let rule = &mut all.get_mut(index)?.value;
                    let part = rest.strip_prefix('.').and_then(|part| part.split(['.', '[']).next());
                    match (part, rule) {
                        (Some(part), Value::Map(parts)) => parts.retain(|entry| entry.key != part),
                        (_, rule) => *rule = Value::Map(Vec::new()),
                    }
                }
                (_, rules) => {
                    let all = Node { line: 0, value: Value::Map(Vec::new()) };
                    *rules = Value::List(if allow { Vec::new() } else { vec![all] });
                }
            }
        }
        if let Value::List(all) = &mut rules.value {
            all.retain(|rule| rule.value != Value::Null);
        }
        read(spec, validate::authorization_policy)
    }

    /// Returns the selector, or `None` if it cannot be read. Without a selector the inner value is `None`.
    fn selector(&self) -> Option<Option<WorkloadSelector>> {
        let spec = self.spec?;
        let has = |field: &str| spec.get(field).is_some();
        let is_unreadable = |field: &String| match field.strip_prefix("spec.") {
            // The selector may be right, and the attachment wrong.
            Some("selector") => !has("targetRef") && !has("targetRefs"),
            Some(rest) if rest.starts_with("selector") => true,
            // An unknown field may have been meant for the selector.
            Some(rest) => {
                !has("selector") && nearest(first_name(rest), &FIELDS).is_none_or(|near| near == "selector")
            }
            None => field == "spec",
        };
        if self.errors.iter().any(is_unreadable) {
            return None;
        }
        let Some(selector) = spec.get("selector") else { return Some(None) };
        let spec = mapping("selector", selector.clone());
        read(spec, validate::authorization_policy).map(|policy| policy.selector)
    }
}

/// Returns the first name of a path.
fn first_name(path: &str) -> &str {
    path.split(['.', '[']).next().unwrap_or_default()
}

/// Returns whether no proxy applies a policy that is attached to these objects.
fn has_no_effect(targets: &[TargetRef]) -> bool {
    !targets.is_empty() && targets.iter().all(|target| target.kind != "Gateway")
}

/// Decodes a spec. `None` if it has an error.
fn read<S: DeserializeOwned + Default>(
    spec: Node,
    check: impl FnOnce(&S) -> Vec<validate::Finding>,
) -> Option<S> {
    let root = mapping("spec", spec);
    let decoded = decode::<IstioObject<S>>(&root);
    let is_whole = decoded.errors.is_empty() && decoded.unknown.is_empty();
    let spec = decoded.value.filter(|_| is_whole)?.spec;
    let mut findings = check(&spec);
    findings.extend(validate::empty_fields(Kind::AuthorizationPolicy, &root));
    (!findings.iter().any(validate::Finding::is_error)).then_some(spec)
}

fn mapping(key: &str, value: Node) -> Node {
    let line = value.line;
    Node { line, value: Value::Map(vec![Entry { key: key.to_owned(), line, value }]) }
}

/// Collects the texts of a field at any depth.
fn texts_of<'a>(node: &'a Node, field: &str, texts: &mut BTreeSet<&'a str>) {
    let Value::Map(entries) = &node.value else { return };
    for entry in entries {
        texts.extend((entry.key == field).then(|| entry.value.text().unwrap_or_default()));
        texts_of(&entry.value, field, texts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Files, World, api::Labels, parse::parse};

    /// Returns the fallback of a policy with this spec, and its effect.
    fn fallback(kind: &str, spec: &str) -> Option<(Object, &'static str)> {
        let version = match kind {
            "WasmPlugin" | "TrafficExtension" => "extensions.istio.io/v1alpha1",
            _ => "security.istio.io/v1",
        };
        let text = format!(
            "apiVersion: {version}\nkind: {kind}\nmetadata: {{name: p, namespace: shop}}\nspec: {spec}\n"
        );
        let parsed = parse(&text, "file");
        assert!(parsed.objects.is_empty() && parsed.refused.len() == 1, "{text} {parsed:?}");
        let fallback = parsed.refused.into_values().next()?.fallback?;
        Some((fallback.object, fallback.effect))
    }

    fn authorization(spec: &str) -> Option<(AuthorizationPolicy, &'static str)> {
        match fallback("AuthorizationPolicy", spec)? {
            (Object::AuthorizationPolicy(policy), effect) => Some((policy.spec.clone(), effect)),
            other => panic!("{other:?}"),
        }
    }

    fn valid(spec: &str) -> AuthorizationPolicy {
        let text = format!(
            "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: p}}\nspec: {spec}\n"
        );
        match &parse(&text, "file").objects[0].0 {
            Object::AuthorizationPolicy(policy) => policy.spec.clone(),
            other => panic!("{other:?}"),
        }
    }

    const WEB: &str = "selector: {matchLabels: {app: web}}";
    const GOOD: &str = "{to: [{operation: {paths: [/admin]}}]}";
    const BAD: &str = "{from: [{source: {ipBlocks: [10.0.0.0/99]}}], to: [{operation: {paths: [/x]}}]}";

    #[test]
    fn the_fallback_of_an_allow_policy_omits_rules_with_errors() {
        let policy = authorization(&format!("{{{WEB}, rules: [{BAD}, {GOOD}]}}"));
        assert_eq!(policy, Some((valid(&format!("{{{WEB}, rules: [{GOOD}]}}")), ALLOW)));
        let policy = authorization(&format!("{{{WEB}, action: ALLOW, rules: {{a: b}}}}"));
        assert_eq!(policy, Some((valid(&format!("{{{WEB}, rules: []}}")), ALLOW)));
    }

    #[test]
    fn the_fallback_of_a_deny_policy_omits_parts_with_errors() {
        let policy = authorization(&format!("{{{WEB}, action: DENY, rules: [{GOOD}, {BAD}]}}"));
        let wider = "{to: [{operation: {paths: [/x]}}]}";
        assert_eq!(
            policy,
            Some((valid(&format!("{{{WEB}, action: DENY, rules: [{GOOD}, {wider}]}}")), DENY))
        );
        for rules in ["[{source: {namespaces: [a]}}]", "[text]", "text", "[{from: [{source: {}}]}]"] {
            let policy = authorization(&format!("{{{WEB}, action: DENY, rules: {rules}}}"));
            assert_eq!(
                policy,
                Some((valid(&format!("{{{WEB}, action: DENY, rules: [{{}}]}}")), DENY)),
                "{rules}"
            );
        }
    }

    #[test]
    fn the_fallback_of_any_other_error_denies_every_request() {
        let closed = |selector: &str| valid(&format!("{{{selector}action: DENY, rules: [{{}}]}}"));
        for error in ["action: deny", "actoin: DENY", "action: CUSTOM", "provider: {name: x}"] {
            let policy = authorization(&format!("{{{WEB}, {error}, rules: [{GOOD}]}}"));
            assert_eq!(policy, Some((closed(&format!("{WEB}, ")), CLOSED)), "{error}");
        }
        assert_eq!(authorization("{acton: DENY}"), Some((closed(""), CLOSED)));
        for selector in ["selector: {app: web}", "selectr: {matchLabels: {app: web}}", "selector: "] {
            let policy = authorization(&format!("{{{selector}, rules: [{GOOD}]}}"));
            assert_eq!(policy, Some((closed(""), CLOSED_WIDE)), "{selector}");
        }
        let policy = authorization(&format!("{{{WEB}, targetRef: {{kind: Service, name: web}}, rules: []}}"));
        assert_eq!(policy, Some((closed(&format!("{WEB}, ")), CLOSED)));
    }

    #[test]
    fn a_policy_that_restricts_nothing_has_no_fallback() {
        assert_eq!(authorization("{action: AUDIT, typo: x}"), None);
        assert_eq!(authorization("{targetRef: {kind: Service, name: web}, typo: x}"), None);
        let dry = "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: p, annotations: {istio.io/dry-run: 'true'}}\nspec: {typo: x}\n";
        assert!(parse(dry, "file").refused.into_values().all(|refused| refused.fallback.is_none()));
        assert_eq!(fallback("PeerAuthentication", "{mtls: {mode: PERMISSIVE}, typo: x}"), None);
        assert_eq!(fallback("PeerAuthentication", "{portLevelMtls: {8080: {mode: DISABLE}}}"), None);
    }

    #[test]
    fn the_fallback_of_a_policy_of_a_gateway_applies_to_the_gateway() {
        let target = "{group: gateway.networking.k8s.io, kind: Gateway, name: web}";
        let (policy, effect) = authorization(&format!("{{targetRefs: [{target}], typo: x}}")).unwrap();
        assert_eq!((policy.action, effect, policy.target_refs.len()), (Action::Deny, CLOSED, 1));
        assert_eq!(policy.target_refs[0].name, "web");
    }

    #[test]
    fn the_fallback_of_a_request_authentication_refuses_tokens() {
        let spec =
            format!("{{{WEB}, jwtRules: [{{issuer: 'https://a'}}, {{issuer: 'https://b', jwks: x}}]}}");
        let Some((Object::RequestAuthentication(policy), effect)) = fallback("RequestAuthentication", &spec)
        else {
            panic!("no fallback")
        };
        let issuers: Vec<&str> = policy.spec.jwt_rules.iter().map(|rule| rule.issuer.as_str()).collect();
        assert_eq!((issuers, effect, policy.spec.selector.is_some()), (vec!["https://a", ""], TOKENS, true));
        assert!(policy.spec.jwt_rules[1].jwks.is_empty(), "no key verifies a token");
    }

    #[test]
    fn the_fallback_of_a_peer_authentication_is_strict() {
        for (spec, selects, effect) in [
            (format!("{{{WEB}, mtls: {{mode: STRIKT}}}}"), true, STRICT),
            (format!("{{{WEB}, mtls: STRICT}}"), true, STRICT),
            (format!("{{{WEB}, portLevelMtls: {{http: {{mode: STRICT}}}}}}"), true, STRICT),
            ("{mtls: {mode: strict}}".to_owned(), false, STRICT),
            ("{selector: {app: web}, mtls: {mode: STRICT}}".to_owned(), false, STRICT_WIDE),
        ] {
            let Some((Object::PeerAuthentication(policy), found)) = fallback("PeerAuthentication", &spec)
            else {
                panic!("{spec}")
            };
            let mode = policy.spec.mtls.map(|mtls| mtls.mode);
            assert_eq!((mode, found), (Some(MtlsMode::Strict), effect), "{spec}");
            assert_eq!(policy.spec.selector.is_some(), selects, "{spec}");
        }
    }

    /// Returns the phase and the matches of the fallback of an extension.
    fn extension(kind: &str, spec: &str) -> Option<(Phase, usize)> {
        match fallback(kind, spec)?.0 {
            Object::WasmPlugin(plugin) => Some((plugin.spec.phase, plugin.spec.matches.len())),
            Object::TrafficExtension(of) => Some((of.spec.phase, of.spec.matches.len())),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_fallback_of_an_extension_refuses_what_it_may_decide_about() {
        let match_port =
            |port: u32| format!("phase: AUTHN, typo: x, match: [{{ports: [{{number: {port}}}]}}]");
        for (fields, expected) in [
            ("phse: AUTHN", Some((Phase::Authz, 0))),
            ("phase: [AUTHN]", Some((Phase::Authz, 0))),
            ("phase: authn", Some((Phase::Authz, 0))),
            ("phase: STATS, phase: AUTHN", Some((Phase::Authz, 0))),
            ("phase: STATS, typo: x", None),
            ("typo: x", None),
            (match_port(8080).as_str(), Some((Phase::Authn, 1))),
            (match_port(80_800).as_str(), Some((Phase::Authn, 0))),
        ] {
            let plugin = extension("WasmPlugin", &format!("{{url: a, {fields}}}"));
            assert_eq!(plugin, expected, "{fields}");
            let other = extension("TrafficExtension", &format!("{{wasm: {{url: a}}, {fields}}}"));
            assert_eq!(other, expected, "{fields}");
        }
    }

    #[test]
    fn errors_in_the_metadata_leave_the_spec_in_force() {
        let text = "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: A_b, namespace: shop}\nspec: {mtls: {mode: STRICT}}\n";
        let (mut world, mut files) = (World::new(), Files::new());
        for change in files.set(0, "file", text) {
            change.apply_to(&mut world);
        }
        assert_eq!(world.workload_mode("shop", &Labels::new()), MtlsMode::Strict);
        let findings = files.diagnostics();
        assert!(findings.iter().any(|finding| finding.message.ends_with(AS_WRITTEN)), "{findings:?}");
    }
}
