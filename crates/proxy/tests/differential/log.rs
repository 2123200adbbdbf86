//! Comparison of access logs.

use std::fmt::Write as _;

use serde_json::Value;

/// Returns the difference between two lines about the same request.
pub(crate) fn difference(theirs: Option<&Value>, ours: Option<&Value>) -> Option<String> {
    let (Some(theirs), Some(line)) = (theirs, ours) else {
        return (theirs != ours).then(|| format!("Envoy logs {theirs:?} and Skysail {ours:?}"));
    };
    let mut received = String::new();
    for (name, theirs) in theirs.as_object()? {
        let ours = &line[name];
        // For an early response, the received part of the body depends on timing.
        let is_late = name == "received" && line["details"] != "via_upstream";
        // The sidecar often reports a malformed head more precisely.
        let is_malformed = name == "details" && [theirs, ours].iter().all(|details| is_of_codec(details));
        // Envoy takes the server's end of an upgraded connection for a reset, and counts bytes differently.
        let is_tunnel = line["status"] == 101 && matches!(&**name, "details" | "flags" | "sent");
        if theirs != ours && !is_late && !is_malformed && !is_tunnel {
            _ = writeln!(received, "Envoy logs {name} {theirs} and Skysail {ours}");
        }
    }
    (!received.is_empty()).then(|| format!("{received}of {line}"))
}

fn is_of_codec(details: &Value) -> bool {
    details.as_str().is_some_and(|details| details.starts_with("http1."))
}
