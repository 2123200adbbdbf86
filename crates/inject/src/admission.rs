//! The webhook's messages: an AdmissionReview (`admission.k8s.io/v1`) with a pod, and the answer with a JSON patch
//! (RFC 6902).

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::{
    annotations::text_map,
    decision::{Decision, decide},
    plan::Owner,
    pod::inject,
    settings::Settings,
};

/// Version of the messages.
const API: &str = "admission.k8s.io/v1";
/// Number of digits of the time in the name of a CronJob's Job.
const TIME_DIGITS: std::ops::RangeInclusive<usize> = 8..=10;

/// Error of a body that is no request for admission.
#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    /// The body is not JSON.
    #[error("the body is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The body is no AdmissionReview with a request.
    #[error("the body is no AdmissionReview of {API} with a request and its uid")]
    NoReview,
}

/// Answers a request to create a pod. A pod that cannot be injected is refused with the reason.
///
/// The path of the webhook may end with parameters, as Istio's: `/inject/cluster/NAME/net/NAME`.
///
/// # Errors
/// When the body is no AdmissionReview.
pub fn review(body: &[u8], path: &str, settings: &Settings) -> Result<Value, ReviewError> {
    answer(body, |request, response| review_pod(request, path, settings, response))
}

/// Answers a request for admission. `fill` completes the response, which allows it.
///
/// # Errors
/// When the body is no AdmissionReview.
pub fn answer(body: &[u8], fill: impl FnOnce(&Value, &mut Value)) -> Result<Value, ReviewError> {
    let review: Value = serde_json::from_slice(body)?;
    let request = &review["request"];
    let uid = request["uid"].as_str().filter(|uid| !uid.is_empty()).ok_or(ReviewError::NoReview)?;
    if review["apiVersion"] != API || review["kind"] != "AdmissionReview" {
        return Err(ReviewError::NoReview);
    }
    let mut response = json!({ "uid": uid, "allowed": true });
    fill(request, &mut response);
    Ok(json!({ "apiVersion": API, "kind": "AdmissionReview", "response": response }))
}

fn review_pod(request: &Value, path: &str, settings: &Settings, response: &mut Value) {
    let (settings, mut warnings) = with_parameters(path, settings);
    let pod = &request["object"];
    if request["resource"]["resource"] == "pods" && pod.is_object() {
        let namespace = request["namespace"].as_str().unwrap_or("default");
        let (decision, more) = decide(pod, namespace, None, &settings);
        warnings.extend(more);
        if decision == Decision::Inject {
            match inject(pod, &owner(pod, namespace), &settings) {
                Ok(injected) => {
                    warnings.extend(injected.warnings);
                    let mut patch = Vec::new();
                    difference(pod, &injected.pod, "", &mut patch);
                    response["patchType"] = json!("JSONPatch");
                    response["patch"] = json!(STANDARD.encode(Value::Array(patch).to_string()));
                }
                Err(error) => {
                    response["allowed"] = json!(false);
                    response["status"] = json!({ "code": 400, "reason": "BadRequest",
                                                 "message": format!("sidecar injection: {error}") });
                }
            }
        }
    } else {
        warnings.push("this webhook injects pods only: correct the rules of its configuration".to_owned());
    }
    if !warnings.is_empty() {
        response["warnings"] = json!(warnings);
    }
}

/// Applies the parameters in the path of the webhook.
fn with_parameters(path: &str, settings: &Settings) -> (Settings, Vec<String>) {
    let (mut settings, mut warnings) = (settings.clone(), Vec::new());
    let rest = path.trim_matches('/').strip_prefix("inject").unwrap_or_default().trim_matches('/');
    let parts: Vec<&str> = rest.split('/').filter(|part| !part.is_empty()).collect();
    for pair in parts.chunks(2) {
        match pair {
            ["cluster", name] => settings.cluster_id = name.replace("--slash--", "/"),
            ["net", name] => settings.network = name.replace("--slash--", "/"),
            other => warnings.push(format!("{} in the path of the webhook has no effect", other.join("/"))),
        }
    }
    (settings, warnings)
}

/// Returns the workload of a pod: its controller; for a ReplicaSet of a Deployment and a Job of a CronJob, these. A pod
/// without a controller is its own.
fn owner(pod: &Value, namespace: &str) -> Owner {
    let metadata = &pod["metadata"];
    let of = |api_version: &Value, kind: &Value, name: &Value| Owner {
        api_version: api_version.as_str().unwrap_or_default().to_owned(),
        kind: kind.as_str().unwrap_or_default().to_owned(),
        name: name.as_str().unwrap_or_default().to_owned(),
        namespace: namespace.to_owned(),
    };
    let mut references = metadata["ownerReferences"].as_array().into_iter().flatten();
    let Some(controller) = references.find(|reference| reference["controller"] == true) else {
        return of(&json!("v1"), &json!("Pod"), &metadata["name"]);
    };
    let mut owner = of(&controller["apiVersion"], &controller["kind"], &controller["name"]);
    let labels = text_map(&metadata["labels"]);
    let split = owner.name.rsplit_once('-').map(|(name, last)| (name.to_owned(), last.to_owned()));
    let Some((name, last)) = split else { return owner };
    let is_time = TIME_DIGITS.contains(&last.len()) && last.bytes().all(|byte| byte.is_ascii_digit());
    if owner.kind == "ReplicaSet" && labels.get("pod-template-hash") == Some(&last.as_str()) {
        owner.kind = "Deployment".into();
        owner.name = name;
    } else if owner.kind == "Job" && is_time {
        owner.kind = "CronJob".into();
        owner.name = name;
    }
    owner
}

/// Appends the operations that change a value into another one. Lists are replaced as a whole.
fn difference(from: &Value, to: &Value, path: &str, patch: &mut Vec<Value>) {
    if from == to {
        return;
    }
    let (Value::Object(old), Value::Object(new)) = (from, to) else {
        patch.push(json!({ "op": "replace", "path": path, "value": to }));
        return;
    };
    let below = |key: &str| format!("{path}/{}", key.replace('~', "~0").replace('/', "~1"));
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.push(json!({ "op": "remove", "path": below(key) }));
    }
    for (key, value) in new {
        match old.get(key) {
            Some(known) => difference(known, value, &below(key), patch),
            None => patch.push(json!({ "op": "add", "path": below(key), "value": value })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(pod: &Value) -> Vec<u8> {
        let review = json!({ "apiVersion": API, "kind": "AdmissionReview", "request": { "uid": "1",
            "namespace": "shop", "resource": { "group": "", "version": "v1", "resource": "pods" },
            "object": pod } });
        review.to_string().into_bytes()
    }

    fn answer(pod: &Value, path: &str) -> Value {
        review(&request(pod), path, &Settings::new("image"))
            .map_or(Value::Null, |mut answer| answer["response"].take())
    }

    #[test]
    fn the_patch_adds_a_sidecar() {
        let pod = json!({ "metadata": { "labels": { "pod-template-hash": "abc" },
            "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc",
                "controller": true }] },
            "spec": { "containers": [{ "name": "web" }] } });
        let response = answer(&pod, "/inject/cluster/east/net/a--slash--b/x");
        assert_eq!((&response["uid"], &response["allowed"]), (&json!("1"), &json!(true)));
        assert_eq!(response["warnings"], json!(["x in the path of the webhook has no effect"]));
        let patch = STANDARD.decode(response["patch"].as_str().unwrap_or_default()).unwrap_or_default();
        let patch = String::from_utf8(patch).unwrap_or_default();
        for part in [
            r#"{"op":"add","path":"/spec/initContainers","value":["#,
            r#"{"name":"ISTIO_META_CLUSTER_ID","value":"east"}"#,
            r#"{"name":"ISTIO_META_NETWORK","value":"a/b"}"#,
            "kubernetes://apis/apps/v1/namespaces/shop/deployments/web",
            "/metadata/labels/security.istio.io~1tlsMode",
        ] {
            assert!(patch.contains(part), "{part}: {patch}");
        }
    }

    #[test]
    fn a_job_of_a_cron_job_is_named_after_it() {
        let pod = json!({ "metadata": { "ownerReferences": [{ "apiVersion": "batch/v1", "kind": "Job",
            "name": "night-28800000", "controller": true }] } });
        let owner = owner(&pod, "shop");
        assert_eq!((owner.kind.as_str(), owner.name.as_str()), ("CronJob", "night"));
    }

    #[test]
    fn a_pod_that_cannot_be_injected_is_refused() {
        for (name, value, problem) in [
            ("sidecar.istio.io/proxyCPU", "much", "sidecar.istio.io/proxyCPU: \"much\" is not a quantity"),
            ("sidecar.istio.io/interceptionMode", "TPROXY", "interceptionMode TPROXY is not supported"),
        ] {
            let pod = json!({ "metadata": { "annotations": { name: value } },
                "spec": { "containers": [{ "name": "web" }] } });
            let response = answer(&pod, "/inject");
            assert_eq!(response["allowed"], false);
            let message = response["status"]["message"].as_str().unwrap_or_default();
            assert!(message.contains(problem), "{message}");
        }
    }

    #[test]
    fn long_aliases_are_refused() {
        let (text, aliases) = ("x".repeat(10_000), "*a, ".repeat(1_000));
        let (short, long) = (
            format!("a: &a {text}\nb: [*a, *a, *a, *a, *a, *a]\n"),
            format!("a: &a {text}\nb: [{aliases}]\n"),
        );
        for (config, problem) in [(short, "more than 65536 bytes as JSON"), (long, "more than 1572864 bytes")]
        {
            let pod = json!({ "metadata": { "annotations": { "proxy.istio.io/config": config } },
                "spec": { "containers": [{ "name": "web" }] } });
            let response = answer(&pod, "/inject");
            let message = response["status"]["message"].as_str().unwrap_or_default();
            assert!(message.contains(problem), "{message}");
        }
    }

    #[test]
    fn others_are_admitted_unchanged() {
        for pod in [
            json!({ "metadata": { "labels": { "sidecar.istio.io/inject": "false" } }, "spec": { "containers": [] } }),
            json!({ "metadata": { "annotations": { "sidecar.istio.io/status": "{}" } },
                "spec": { "containers": [{ "name": "istio-proxy" }] } }),
        ] {
            assert_eq!(answer(&pod, "/inject"), json!({ "uid": "1", "allowed": true }));
        }
        for body in [&b"{"[..], b"{}", b"[]", br#"{"request":{"uid":"1"}}"#] {
            assert!(review(body, "/inject", &Settings::new("image")).is_err());
        }
    }

    #[test]
    fn a_difference_changes_one_value_into_the_other() {
        let from = json!({ "a": 1, "b/c": { "d~": [1], "e": 2 }, "f": 3 });
        let to = json!({ "a": 1, "b/c": { "d~": [1, 2], "e": 2 }, "g": {} });
        let mut patch = Vec::new();
        difference(&from, &to, "", &mut patch);
        let expected = json!([
            { "op": "remove", "path": "/f" },
            { "op": "replace", "path": "/b~1c/d~0", "value": [1, 2] },
            { "op": "add", "path": "/g", "value": {} },
        ]);
        assert_eq!(Value::Array(patch), expected);
    }
}
