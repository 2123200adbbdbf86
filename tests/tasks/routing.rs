//! Tasks that route requests and connections of the mesh.

use std::time::{Duration, Instant};

use skysail_testkit::{Mesh, eventually};

use crate::{app_with, apply, assert_quiet, logged, remove, versions, wait_answer, wait_only};

const FILMS: &str = "http://films/";
const SEATS: &str = "http://seats/";

#[test]
fn requests_and_connections_are_routed() {
    let mesh = app_with(&[]).ready();
    wait_all_versions(&mesh);

    apply(&mesh, "request-routing");
    wait_only(&mesh, FILMS, &[], "v1");
    assert_eq!(versions(&mesh, FILMS, 5, &["-H", "x-user: mia"])["v2"], 5);
    remove(&mesh, "request-routing");
    wait_all_versions(&mesh);

    apply(&mesh, "traffic-shifting");
    wait_shares(&mesh, FILMS, 200, &[("v1", 100), ("v3", 100)]);
    mesh.edit("traffic-shifting-weights.yaml", "weight: 50", "weight: 0");
    mesh.edit("traffic-shifting-weights.yaml", "weight: 50", "weight: 100");
    wait_only(&mesh, FILMS, &[], "v3");
    remove(&mesh, "traffic-shifting");
    wait_all_versions(&mesh);

    apply(&mesh, "tcp-traffic-shifting");
    let ticker = "http://ticker:9000/";
    wait_answer(&mesh, ticker, &[], 200, "pod");
    wait_shares(&mesh, ticker, 100, &[("v1", 80), ("v2", 20)]);
    mesh.edit("tcp-traffic-shifting-weights.yaml", "weight: 80", "weight: 0");
    mesh.edit("tcp-traffic-shifting-weights.yaml", "weight: 20", "weight: 100");
    wait_only(&mesh, ticker, &[], "v2");
    remove(&mesh, "tcp-traffic-shifting");

    apply(&mesh, "mirroring");
    wait_only(&mesh, FILMS, &[], "v1");
    wait_answer(&mesh, "http://films/mirrored", &[], 200, r#""version":"v1""#);
    for workload in ["films-v1", "films-v2"] {
        eventually(&format!("{workload} received the request"), || {
            logged(&mesh, &[workload], &["path=/mirrored"])
        });
    }
    remove(&mesh, "mirroring");
    wait_all_versions(&mesh);
    assert_quiet(&mesh);
}

#[test]
fn faults_timeouts_and_limits_take_effect() {
    let mesh = app_with(&[]).ready();
    wait_answer(&mesh, SEATS, &[], 200, "seats");
    wait_all_versions(&mesh);

    apply(&mesh, "request-timeouts");
    wait_answer(&mesh, "http://films/delay/20s", &[], 504, "upstream request timeout");
    wait_answer(&mesh, "http://films/delay/20ms", &[], 200, r#""version":"v1""#);

    apply(&mesh, "fault-injection");
    let abort = wait_answer(&mesh, SEATS, &["-H", "x-user: leo"], 500, "fault filter abort");
    assert!(!abort.contains("pod"), "{abort}");
    wait_answer(&mesh, SEATS, &[], 200, "seats");
    let begin = Instant::now();
    wait_answer(&mesh, SEATS, &["-H", "x-user: mia"], 200, "seats");
    assert!(begin.elapsed() >= Duration::from_secs(2), "{:?}", begin.elapsed());
    remove(&mesh, "fault-injection");
    wait_answer(&mesh, SEATS, &["-H", "x-user: leo"], 200, "seats");

    apply(&mesh, "circuit-breaking");
    // Of four requests at once, one is sent and one waits.
    eventually("the limit refuses requests", || {
        let load = mesh.load(
            "page",
            &["http://seats/delay/200ms", "-n", "8", "-c", "4", "--count", "x-envoy-overloaded"],
        );
        let report = load.finish();
        let refused = report.status.get(&503).copied().unwrap_or_default();
        let is_it = refused > 0 && refused < 8 && report.count("true") == refused;
        if is_it { Ok(()) } else { Err(format!("{report:?}")) }
    });
    eventually("the log has the reason", || logged(&mesh, &["page", "-c", "proxy"], &["503 UO"]));
    eventually("the server is ejected", || {
        mesh.call("page", "http://seats/status/500", &[]);
        logged(&mesh, &["page", "-c", "proxy"], &["503 UH"])
    });
    wait_answer(&mesh, SEATS, &[], 200, "seats");
    assert_quiet(&mesh);
}

/// Waits until each version of films gets requests, as without any route.
fn wait_all_versions(mesh: &Mesh) {
    eventually("all versions answer", || {
        let found = versions(mesh, FILMS, 30, &[]);
        if found.len() == 3 { Ok(()) } else { Err(format!("{found:?}")) }
    });
}

/// Waits until these versions answer in these numbers, give or take four standard deviations.
fn wait_shares(mesh: &Mesh, url: &str, requests: u32, shares: &[(&str, u32)]) {
    eventually(&format!("{shares:?} answer {url}"), || {
        let found = versions(mesh, url, requests as usize, &[]);
        let is_near = |(version, share): &(&str, u32)| {
            let (count, share) = (found.get(*version).copied().unwrap_or_default() as f64, f64::from(*share));
            let deviation = (share * (1.0 - share / f64::from(requests))).sqrt();
            (count - share).abs() <= 4.0 * deviation
        };
        match found.len() == shares.len() && shares.iter().all(is_near) {
            true => Ok(()),
            false => Err(format!("{found:?}")),
        }
    });
}
