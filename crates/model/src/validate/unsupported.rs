//! Fields of Istio that are not supported yet.
//!
//! The list has each field that is parsed and that `skysail-proxy` does not implement. The object is applied without
//! it. The effect text says so where the field is still sent, for workloads with an Envoy as their sidecar.

use super::{Finding, Findings};
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
    (Kind::DestinationRule, "outlierDetection.outlierDetectionHttpErrorCodes", None, NO_EFFECT),
    (
        Kind::DestinationRule,
        "trafficPolicy.tunnel.protocol",
        Some("POST"),
        "skysail-proxy refuses the listener",
    ),
    (Kind::DestinationRule, "trafficPolicy.retryBudget.budgetInterval", None, BUDGET),
    (Kind::ServiceEntry, "spec.endpoints.network", None, "connections to the endpoint are direct"),
    (
        Kind::RequestAuthentication,
        "jwtRules.presence",
        None,
        "it has no effect, as in Istio; an AuthorizationPolicy with notRequestPrincipals requires a token",
    ),
];

/// Reports the unsupported fields of an object.
pub(crate) fn unsupported(kind: Kind, root: &Node) -> Vec<Finding> {
    let mut findings = Findings::default();
    let rows: Vec<&Row> = TABLE.iter().filter(|row| row.0 == kind).collect();
    if let (Some(spec), false) = (root.get("spec"), rows.is_empty()) {
        search(spec, "spec", "spec", &rows, &mut findings);
    }
    findings.done()
}

/// Searches a node. `field` is the path with list positions, `bare` without.
fn search(node: &Node, field: &str, bare: &str, rows: &[&Row], findings: &mut Findings) {
    for (_, path, value, effect) in rows {
        let here = bare.strip_suffix(path).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        if here && value.is_none_or(|value| node.text() == Some(value)) && node.value != Value::Null {
            let what = value.map_or(String::new(), |value| format!("{value} "));
            findings.warning(field, format!("{what}is not supported yet: {effect}"), "");
            return;
        }
    }
    match &node.value {
        Value::Map(entries) => {
            for entry in entries {
                let (field, bare) = (join(field, &entry.key), join(bare, &entry.key));
                search(&entry.value, &field, &bare, rows, findings);
            }
        }
        Value::List(nodes) => {
            for (index, node) in nodes.iter().enumerate() {
                search(node, &format!("{field}[{index}]"), bare, rows, findings);
            }
        }
        _ => {}
    }
}
