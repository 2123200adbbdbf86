//! The webhook for validation: the API server asks about each object of Istio's kinds, of Gateway API and of Skysail that is
//! created or changed. The answer is that of `skysail analyze` about the object alone.
//!
//! An error refuses an object. Objects of Gateway API may be for another controller, so their errors are warnings. So are
//! errors that an object had before, and those of an object that is being deleted: its finalizers must be removable.

use serde_json::{Value, json};
use skysail_inject::{ReviewError, answer};
use skysail_model::{Diagnostic, Severity, api::gateway_api::GROUP, parse};

/// Maximum number of warnings, and of bytes of each: the API server cuts longer ones.
const MAX_WARNINGS: usize = 16;
const MAX_WARNING: usize = 240;
/// Maximum length of the reason of a refusal in bytes.
const MAX_REASON: usize = 8 << 10;

/// Answers a request about an object.
///
/// # Errors
/// When the body is no AdmissionReview.
pub(crate) fn review(body: &[u8]) -> Result<Value, ReviewError> {
    answer(body, |request, response| {
        let object = &request["object"];
        // A removal has no object.
        if !object.is_object() {
            return;
        }
        let name = request["name"].as_str().unwrap_or_default();
        let found = parse(&object.to_string(), name).diagnostics;
        let is_changed = request["oldObject"]["spec"] != object["spec"];
        let is_deleted = object["metadata"]["deletionTimestamp"].is_string();
        let refuses = request["kind"]["group"] != GROUP && is_changed && !is_deleted;
        let (errors, warnings): (Vec<_>, Vec<_>) =
            found.iter().partition(|one| refuses && one.severity == Severity::Error);
        let warnings = warnings.into_iter().take(MAX_WARNINGS).map(|one| cut(line(one), MAX_WARNING));
        let warnings: Vec<String> = warnings.collect();
        if !warnings.is_empty() {
            response["warnings"] = warnings.into();
        }
        if !errors.is_empty() {
            let lines: Vec<String> = errors.into_iter().map(line).collect();
            response["allowed"] = false.into();
            response["status"] = json!({ "code": 400, "reason": "Invalid",
                                         "message": cut(lines.join("\n"), MAX_REASON) });
        }
    })
}

/// Returns a finding without file and line: the user may have written YAML, and the API server sends JSON.
fn line(one: &Diagnostic) -> String {
    let Diagnostic { field, message, remedy, code, .. } = one;
    let field = if field.is_empty() { String::new() } else { format!("{field}: ") };
    let remedy = if remedy.is_empty() { String::new() } else { format!("; {remedy}") };
    format!("{field}{message}{remedy} [{code}]")
}

fn cut(mut text: String, length: usize) -> String {
    if text.len() > length {
        text.truncate(text.floor_char_boundary(length));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(group: &str, object: &Value) -> Value {
        let review = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "u", "kind": { "group": group }, "name": "a", "operation": "CREATE", "object": object } });
        review_of(&review)["response"].clone()
    }

    fn review_of(review: &Value) -> Value {
        super::review(review.to_string().as_bytes()).unwrap()
    }

    fn service(spec: &Value) -> Value {
        json!({ "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
                "metadata": { "name": "a", "namespace": "b", "generation": 1, "managedFields": [] }, "spec": spec })
    }

    #[test]
    fn an_object_with_errors_is_refused_with_all_of_them() {
        let good =
            service(&json!({ "hosts": ["a"], "http": [{ "route": [{ "destination": { "host": "a" } }] }] }));
        assert_eq!(response("networking.istio.io", &good), json!({ "uid": "u", "allowed": true }));
        let bad =
            service(&json!({ "hosts": ["a"], "http": [{ "tiemout": "1s", "retries": { "attempts": -1 },
                                    "route": [{ "destination": { "host": "a" } }] }] }));
        let refused = response("networking.istio.io", &bad);
        let message = refused["status"]["message"].as_str().unwrap();
        assert_eq!(refused["allowed"], false);
        assert!(message.contains("spec.http[0].tiemout") && message.contains("attempts"), "{message}");
        assert!(message.lines().all(|line| line.ends_with(']') && line.contains("[SKY")), "{message}");
    }

    #[test]
    fn errors_of_gateway_api_are_warnings() {
        let gateway = json!({ "apiVersion": "gateway.networking.k8s.io/v1", "kind": "Gateway",
                              "metadata": { "name": "a", "namespace": "b" }, "spec": { "listeners": [] } });
        let answer = response(GROUP, &gateway);
        assert_eq!(answer["allowed"], true);
        assert!(answer["warnings"][0].as_str().unwrap().contains("[SKY"), "{answer}");
    }

    #[test]
    fn errors_that_are_there_already_refuse_no_change() {
        let bad = service(&json!({ "hosts": [] }));
        let response = |before: &Value, object: &Value| {
            let review = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
                "uid": "u", "kind": { "group": "networking.istio.io" }, "operation": "UPDATE",
                "object": object, "oldObject": before } });
            review_of(&review)["response"].clone()
        };
        let allowed = response(&bad, &bad);
        assert!(allowed["allowed"] == true && allowed["warnings"][0].is_string(), "{allowed}");
        assert_eq!(response(&service(&json!({ "hosts": ["a"] })), &bad)["allowed"], false);
        let mut deleted = bad;
        deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        assert_eq!(response(&Value::Null, &deleted)["allowed"], true);
    }

    #[test]
    fn a_removal_is_allowed_and_other_bodies_are_errors() {
        assert_eq!(response("networking.istio.io", &Value::Null)["allowed"], true);
        assert!(super::review(b"{}").is_err() && super::review(b"x").is_err());
    }
}
