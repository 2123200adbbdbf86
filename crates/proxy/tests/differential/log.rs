//! What both write into their access logs.

use std::fmt::Write as _;

use serde_json::Value;

/// Where two lines about the same request differ.
pub(crate) fn difference(theirs: Option<&Value>, ours: Option<&Value>) -> Option<String> {
    let (Some(theirs), Some(line)) = (theirs, ours) else {
        return (theirs != ours).then(|| format!("Envoy logs {theirs:?} and Skysail {ours:?}"));
    };
    let mut told = String::new();
    for (name, theirs) in theirs.as_object()? {
        let ours = &line[name];
        // How much came of the body of a request that was answered without it is a matter of time.
        let is_late = name == "received" && line["details"] != "via_upstream";
        // We often say more precisely what is wrong with a head.
        let is_malformed = name == "details" && [theirs, ours].iter().all(|details| is_of_codec(details));
        // What the server ends after an upgrade Envoy takes for a reset, and counts otherwise.
        let is_tunnel = line["status"] == 101 && matches!(&**name, "details" | "flags" | "sent");
        if theirs != ours && !is_late && !is_malformed && !is_tunnel {
            _ = writeln!(told, "Envoy logs {name} {theirs} and Skysail {ours}");
        }
    }
    (!told.is_empty()).then(|| format!("{told}of {line}"))
}

fn is_of_codec(details: &Value) -> bool {
    details.as_str().is_some_and(|details| details.starts_with("http1."))
}
