//! TLS settings of Envoy that the sidecar does not support are refused by name.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/pki.rs"]
mod pki;
mod support;
#[path = "support/tls_config.rs"]
mod tls_config;

use pki::{Ca, Leaf};
use serde_json::{Value, json};
use support::within;
use tls_config::{bootstrap, inline, listener, own, typed};

/// Unsupported configuration is refused with the name of the field.
#[tokio::test]
async fn unsupported_settings_are_refused_by_name() {
    let west = Ca::root("west");
    let server = west.sign(Leaf::new(1, vec![]));
    let common = |more: Value| {
        let mut common = json!({"tls_certificates": own(&server)});
        common.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"common_tls_context": common})
    };
    let params = |params: Value| common(json!({"tls_params": params}));
    let validation = |more: Value| {
        let mut context = json!({"trusted_ca": inline(&west.pem)});
        context.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        common(json!({"validation_context": context}))
    };
    let also = |field: &str, value: Value| {
        let mut tls = common(json!({}));
        tls[field] = value;
        tls
    };
    let certificate = |field: &str, value: Value| {
        let mut list = own(&server);
        list[0][field] = value;
        json!({"common_tls_context": {"tls_certificates": list}})
    };
    let bundle = json!({"name": "west", "trust_bundle": inline(&west.pem)});
    let custom = |config: Value| {
        let config = typed("transport_sockets.tls.v3.SPIFFECertValidatorConfig", &config);
        validation(json!({"custom_validator_config": config}))
    };
    let mut workload = bundle.clone();
    workload["workload_trust_domain"] = "north".into();
    let name = |name: Value| validation(json!({"match_typed_subject_alt_names": [name]}));
    let cases = [
        (params(json!({"tls_minimum_protocol_version": "TLSv1_1"})), "tls_minimum_protocol_version"),
        (params(json!({"tls_maximum_protocol_version": "TLSv1_1"})), "tls_maximum_protocol_version"),
        (
            params(
                json!({"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_2"}),
            ),
            "minimum version",
        ),
        (params(json!({"cipher_suites": ["ALL"]})), "cipher_suites"),
        (params(json!({"cipher_suites": ["AES128-SHA"]})), "cipher_suites"),
        (params(json!({"ecdh_curves": ["P-512"]})), "ecdh_curves"),
        (params(json!({"ecdh_curves": ["P-521"]})), "ecdh_curves"),
        (params(json!({"signature_algorithms": ["ed25519"]})), "signature_algorithms"),
        (params(json!({"compliance_policies": ["CNSA2_202603"]})), "compliance_policies"),
        (common(json!({"key_log": {"path": "/dev/null"}})), "key_log"),
        (common(json!({"custom_handshaker": {"name": "a"}})), "custom_handshaker"),
        (common(json!({"tls_certificate_sds_secret_configs": [{"name": "a"}]})), "sds_secret_configs"),
        (also("ocsp_staple_policy", json!("MUST_STAPLE")), "ocsp_staple_policy"),
        (also("require_sni", json!(true)), "require_sni"),
        (also("session_ticket_keys", json!({"keys": [{"inline_string": "a"}]})), "session_ticket_keys"),
        (certificate("ocsp_staple", json!({"inline_string": "a"})), "ocsp_staple"),
        (certificate("password", json!({"inline_string": "a"})), "password"),
        (certificate("pkcs12", json!({"inline_string": "a"})), "pkcs12"),
        (certificate("tls_params", json!({})), "tls_params"),
        (validation(json!({"allow_expired_certificate": true})), "allow_expired_certificate"),
        (validation(json!({"require_signed_certificate_timestamp": true})), "require_signed_certificate"),
        (validation(json!({"system_root_certs": {}})), "system_root_certs"),
        (validation(json!({"verify_certificate_hash": ["ab"]})), "verify_certificate_hash[0]"),
        (validation(json!({"verify_certificate_spki": ["ab"]})), "verify_certificate_spki[0]"),
        (validation(json!({"crl": {"inline_string": "a"}})), "crl"),
        (validation(json!({"crl": {"filename": "/nowhere"}})), "/nowhere"),
        (name(json!({"san_type": "OTHER_NAME", "matcher": {"exact": "a"}})), "san_type"),
        (name(json!({"san_type": "URI", "matcher": {"prefix": ""}})), "prefix"),
        (custom(json!({"trust_domains": [bundle, bundle]})), "two bundles"),
        (custom(json!({"trust_domains": []})), "trust_domains"),
        (custom(json!({"trust_domains": [workload]})), "workload_trust_domain"),
        (custom(json!({"trust_bundles": {"inline_string": "{}"}})), "trust_bundles"),
        (common(json!({"validation_context": {"crl": inline(&west.crl(&[]))}})), "trusted_ca"),
        (
            common(
                json!({"validation_context": {"verify_certificate_hash": ["00".repeat(32)], "max_verify_depth": 1}}),
            ),
            "trusted_ca",
        ),
    ];
    for (tls, reason) in cases {
        let folder = tempfile::tempdir().unwrap();
        let text = bootstrap(&[listener("in", Some(&tls), &[])], &[]);
        let file = folder.path().join("bootstrap.json");
        std::fs::write(&file, text).unwrap();
        let program = tokio::process::Command::new(env!("CARGO_BIN_EXE_skysail-proxy"))
            .args(["--concurrency", "1", "--admin-port", "0", "--bootstrap"])
            .arg(file)
            .env("NO_COLOR", "1")
            .kill_on_drop(true)
            .output();
        let output = within(program).await.unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(reason), "{reason}: {stderr}");
    }
}
