//! Fields of Istio that are not supported yet, and deprecated ones.
//!
//! The list has each field that is parsed and that `skysail-proxy` does not implement. The object is applied without
//! it. The effect text says so where the field is still sent, for workloads with an Envoy as their sidecar.

use super::{Code, Finding, Findings};
use crate::api::Kind;
use skysail_yaml::{Node, Value, join};

/// Kind, end of the field's path (without list positions), value if only that one is unsupported, and effect.
type Row = (Kind, &'static str, Option<&'static str>, &'static str);

const NO_EFFECT: &str = "it has no effect";
const BUDGET: &str = "skysail-proxy counts the active requests only";

/// Unsupported fields.
const TABLE: &[Row] = &[
    (Kind::VirtualService, "spec.http.match.statPrefix", None, "only an Envoy keeps statistics by route"),
    (Kind::VirtualService, "spec.http.fault.delay.exponentialDelay", None, NO_EFFECT),
    (Kind::VirtualService, "spec.http.fault.abort.http2Error", None, NO_EFFECT),
    (
        Kind::DestinationRule,
        "trafficPolicy.tunnel.protocol",
        Some("POST"),
        "skysail-proxy refuses the listener",
    ),
    (Kind::DestinationRule, "trafficPolicy.retryBudget.budgetInterval", None, BUDGET),
    (
        Kind::RequestAuthentication,
        "jwtRules.presence",
        None,
        "it has no effect, as in Istio; an AuthorizationPolicy with notRequestPrincipals requires a token",
    ),
];

/// Fields and values that Istio's reference calls deprecated; the last column is the remedy.
const DEPRECATED: &[Row] = &[
    (Kind::VirtualService, "spec.http.mirrorPercent", None, "use mirrorPercentage"),
    (Kind::VirtualService, "spec.http.fault.delay.percent", None, "use percentage"),
    (Kind::DestinationRule, "loadBalancer.simple", Some("LEAST_CONN"), "use LEAST_REQUEST"),
];

/// Reports the unsupported and the deprecated fields of an object.
pub(crate) fn unsupported(kind: Kind, root: &Node) -> Vec<Finding> {
    let mut findings = Findings::default();
    for (table, code) in [(TABLE, Code::UnsupportedField), (DEPRECATED, Code::Deprecated)] {
        let rows: Vec<&Row> = table.iter().filter(|row| row.0 == kind).collect();
        if let (Some(spec), false) = (root.get("spec"), rows.is_empty()) {
            search(spec, "spec", "spec", (&rows, code), &mut findings);
        }
    }
    findings.done()
}

/// Searches a node. `field` is the path with list positions, `bare` without.
fn search(node: &Node, field: &str, bare: &str, wanted: (&[&Row], Code), findings: &mut Findings) {
    let (rows, code) = wanted;
    for (_, path, value, effect) in rows {
        let here = bare.strip_suffix(path).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        if here && value.is_none_or(|value| node.text() == Some(value)) && node.value != Value::Null {
            let what = value.map_or(String::new(), |value| format!("{value} "));
            if code == Code::Deprecated {
                findings.add(code, field, format!("{what}is deprecated"), *effect);
            } else {
                findings.add(code, field, format!("{what}is not supported yet: {effect}"), "");
            }
            return;
        }
    }
    match &node.value {
        Value::Map(entries) => {
            for entry in entries {
                let (field, bare) = (join(field, &entry.key), join(bare, &entry.key));
                search(&entry.value, &field, &bare, wanted, findings);
            }
        }
        Value::List(nodes) => {
            for (index, node) in nodes.iter().enumerate() {
                search(node, &format!("{field}[{index}]"), bare, wanted, findings);
            }
        }
        _ => {}
    }
}
