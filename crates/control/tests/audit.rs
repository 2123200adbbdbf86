//! Records of the audit log of a control plane process.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests may end the test"
)]

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;
use skysail_identity::KeyAndCsr;
use skysail_xds::{
    certificates::create_certificate,
    envoy::pb::envoy::{
        config::core::v3::Node,
        service::discovery::v3::{
            DiscoveryRequest, aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
        },
    },
    istio::IstioCertificateRequest,
};
use support::{Control, Folder, bearer, certificate, connect, endpoint};
use tokio::process::Command;
use tonic::{Code, Request, Status, metadata::MetadataMap};

/// Starts a control plane with an audit log.
async fn start(folder: &Folder, arguments: &[&str]) -> (Control, PathBuf) {
    let log = folder.at("audit.log");
    let all = [&["--audit-log", log.to_str().unwrap()], arguments].concat();
    (folder.start_with("0", &all).await, log)
}

fn records(log: &Path) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole.map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Waits for a record.
async fn until(log: &Path, matches: impl Fn(&Value) -> bool) -> Value {
    let found = async {
        loop {
            if let Some(record) = records(log).into_iter().find(&matches) {
                assert!(record["time"].as_f64().unwrap() > 1.7e9);
                return record;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let found = tokio::time::timeout(Duration::from_secs(60), found).await;
    found.unwrap_or_else(|_| panic!("not in {:?}", records(log)))
}

/// Waits for a record of an event with this text in this field.
async fn record(log: &Path, event: &str, field: &str, text: &str) -> Value {
    let has = |record: &Value| record[field].as_str().is_some_and(|value| value.contains(text));
    until(log, |record| record["event"] == event && has(record)).await
}

async fn ask_for_certificate(
    control: &Control,
    folder: &Folder,
    metadata: MetadataMap,
) -> Result<Vec<String>, Status> {
    let csr = KeyAndCsr::generate(None).unwrap().csr_pem;
    let request = IstioCertificateRequest { csr, ..IstioCertificateRequest::default() };
    create_certificate(connect(control, folder).await, metadata, request).await
}

#[tokio::test]
async fn issued_certificates_are_recorded_with_identity_and_credential() {
    let folder = Folder::new();
    let (control, log) = start(&folder, &["--audit-required"]).await;
    let (tls, identity) = certificate(&control, &folder, "client").await;
    // The record is on disk before the client has the certificate.
    let first = records(&log).into_iter().find(|record| record["event"] == "certificate.issued").unwrap();
    assert_eq!(first["identity"], "spiffe://cluster.local/ns/default/sa/client");
    assert_eq!(first["authentication"], "token");
    assert!(first["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{first}");
    let leaf = &identity.chain()[0];
    let (_, leaf) = x509_parser::parse_x509_certificate(leaf).unwrap();
    assert_eq!(first["serial"], leaf.raw_serial_as_string());
    assert_eq!(first["key_sha256"], sha256(leaf.public_key().raw));
    let validity = leaf.validity();
    assert_eq!(first["not_before"], validity.not_before.timestamp());
    assert_eq!(first["not_after"], validity.not_after.timestamp());

    let csr = KeyAndCsr::generate(None).unwrap().csr_pem;
    let request = IstioCertificateRequest { csr, ..IstioCertificateRequest::default() };
    let channel = endpoint(&control.tls, tls).connect().await.unwrap();
    create_certificate(channel, MetadataMap::new(), request).await.unwrap();
    let second = record(&log, "certificate.issued", "authentication", "certificate").await;
    assert_eq!(second["identity"], first["identity"]);
    assert_ne!(second["serial"], first["serial"]);

    let forged = bearer(&Folder::new().token("client"));
    let refused = ask_for_certificate(&control, &folder, forged).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let refused = record(&log, "certificate.refused", "reason", "").await;
    assert!(refused["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{refused}");
}

fn sha256(bytes: &[u8]) -> String {
    let suite = rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13().unwrap();
    suite.common.hash_provider.hash(bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn refusals_changes_and_actions_are_recorded() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let (control, log) = start(&folder, &[]).await;
    let loaded = until(&log, |record| record["event"] == "configuration.loaded").await;
    assert_eq!((loaded["files"].as_u64(), loaded["changes"].as_u64()), (Some(1), Some(1)));

    let id = format!("sidecar~10.0.0.1~a\n{{\"event\":\"forged\"}}\u{1b}[2J{}~b", "x".repeat(10_000));
    let node = Some(Node { id, ..Node::default() });
    let type_url = "type.googleapis.com/envoy.config.cluster.v3.Cluster".into();
    let request = DiscoveryRequest { node, type_url, ..DiscoveryRequest::default() };
    let mut call = Request::new(tokio_stream::once(request));
    *call.metadata_mut() = bearer(&folder.token("client"));
    let mut client = AggregatedDiscoveryServiceClient::new(connect(&control, &folder).await);
    client.stream_aggregated_resources(call).await.unwrap_err();
    let refused = record(&log, "discovery.refused", "proxy", "sidecar~10.0.0.1~a\n").await;
    assert!(refused["proxy"].as_str().unwrap().len() < 1000, "{refused}");
    assert!(records(&log).iter().all(|record| record["event"] != "forged"));

    folder.service("ratings", 2);
    let changed = record(&log, "configuration.changed", "object", "Service default/ratings").await;
    let file = folder.at("config").join("ratings.yaml");
    assert_eq!((changed["file"].as_str(), changed["action"].as_str()), (file.to_str(), Some("applied")));
    fs::remove_file(file).unwrap();
    record(&log, "configuration.changed", "action", "deleted").await;

    assert_eq!(control.ask("POST", "/ca/rotate").await.0, 200);
    let action = record(&log, "admin.action", "page", "/ca/rotate").await;
    assert_eq!((action["status"].as_u64(), action["address"].as_str()), (Some(200), Some("127.0.0.1")));
    let changed = until(&log, |record| record["event"] == "authority.changed").await;
    assert_eq!(changed["authority"]["step"], "distribute", "{changed}");
    let evil = "host: evil.example";
    assert_eq!(control.ask_with("POST", "/ca/rotate", evil).await.0, 403);
    record(&log, "admin.refused", "page", "/ca/rotate").await;
    assert!(control.page("/metrics").await.contains("skysail_audit_records{result=\"dropped\"} 0\n"));
}

#[tokio::test]
async fn the_log_is_reopened_after_a_rotation() {
    let folder = Folder::new();
    let (control, log) = start(&folder, &[]).await;
    let moved = folder.at("audit.log.1");
    fs::rename(&log, &moved).unwrap();
    let pid = control.child.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-HUP", &pid]).status().await.unwrap().success());
    let opened = async {
        while !log.exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), opened).await.unwrap();
    certificate(&control, &folder, "client").await;
    record(&log, "certificate.issued", "identity", "sa/client").await;
    assert!(records(&moved).iter().all(|record| record["event"] != "certificate.issued"));
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&log).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    // A shutdown writes all records.
    folder.service("last", 9);
    record(&log, "configuration.changed", "object", "last").await;
    control.terminate().await;
}

#[tokio::test]
async fn a_full_disk_stops_certificates_only_with_audit_required() {
    let folder = Folder::new();
    let control = folder.start_with("0", &["--audit-log", "/dev/full"]).await;
    ask_for_certificate(&control, &folder, bearer(&folder.token("client"))).await.unwrap();
    let failed = async {
        while control.page("/metrics").await.contains("skysail_audit_records{result=\"failed\"} 0\n") {}
    };
    tokio::time::timeout(Duration::from_secs(60), failed).await.unwrap();
    control.terminate().await;

    let control = folder.start_with("0", &["--audit-log", "/dev/full", "--audit-required"]).await;
    let refused = ask_for_certificate(&control, &folder, bearer(&folder.token("client"))).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("--audit-required"), "{refused}");

    let error = folder.refused(&["--audit-log", "/nowhere/audit.log"]).await;
    assert!(error.contains("--audit-log /nowhere/audit.log"), "{error}");
}
