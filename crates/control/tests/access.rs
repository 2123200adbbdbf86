//! Access to the admin pages from this machine: every caller except web pages of another origin. `tests/admin.rs` has
//! callers from other machines.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests may end the test")]

mod support;

use std::fs;

use serde_json::Value;
use support::Folder;

#[tokio::test]
async fn web_pages_of_another_origin_have_no_access() {
    let folder = Folder::new();
    let control = folder.start("0").await;
    let own = format!("host: {}\r\norigin: http://{0}\r\nsec-fetch-site: same-origin", control.admin);
    assert_eq!(control.ask_with("GET", "/debug/ca", &own).await.0, 200);
    for (query, status) in [("", 400), ("?proxyID=none.default", 404)] {
        let page = format!("/debug/config_dump{query}");
        assert_eq!(control.ask_with("GET", &page, &own).await.0, status, "{page}");
    }
    for (fields, message) in [
        ("host: evil.example", "DNS rebinding"),
        ("host: localhost\r\nhost: evil.example", "DNS rebinding"),
        ("host: localhost\r\norigin: http://evil.example", "another origin"),
        ("host: localhost\r\norigin: null", "another origin"),
        ("host: localhost\r\nsec-fetch-site: cross-site", "another origin"),
    ] {
        for (method, path) in [
            ("GET", "/"),
            ("GET", "/debug/syncz"),
            ("GET", "/debug/config_dump?proxyID=a.b"),
            ("POST", "/ca/rotate"),
            ("GET", "/none"),
        ] {
            let (status, body) = control.ask_with(method, path, fields).await;
            assert!(
                status == 403 && body.contains(message),
                "{method} {path} with {fields}: {status} {body}"
            );
        }
        for path in ["/ready", "/metrics"] {
            assert_eq!(control.ask_with("GET", path, fields).await.0, 200, "{path} with {fields}");
        }
    }
    assert_eq!(control.ask("GET", "/ca/rotate").await.0, 405, "only POST starts a rotation");
    let authority: serde_json::Value = serde_json::from_str(&control.page("/debug/ca").await).unwrap();
    assert_eq!(authority["step"], "settled");
}

/// The query names the proxy whose configuration was requested.
#[tokio::test]
async fn the_audit_log_has_the_page_with_its_query() {
    let folder = Folder::new();
    let log = folder.at("audit.log");
    let control = folder.start_with("0", &["--audit-log", log.to_str().unwrap()]).await;
    let page = "/debug/config_dump?proxyID=reviews-1.default&%0a=%22";
    assert_eq!(control.ask_with("GET", page, "host: evil.example").await.0, 403);
    // The shutdown waits until all records are written.
    control.terminate().await;
    let records = fs::read_to_string(log).unwrap();
    let records = records.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let refused: Vec<Value> = records.filter(|record| record["event"] == "admin.refused").collect();
    assert!(refused.len() == 1 && refused[0]["page"] == page, "{refused:?}");
}

#[tokio::test]
async fn an_invalid_account_is_refused_at_start() {
    let error = Folder::new().refused(&["--admin-allow", "kiali"]).await;
    assert!(error.contains("--admin-allow") && error.contains("write NAMESPACE/SERVICEACCOUNT"), "{error}");
}
