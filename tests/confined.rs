//! The control plane and the sidecars are confined while they carry load. They get no new privileges, every thread has
//! the system call filter, and no memory is both writable and executable. The same for an ordinary user.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use nix::unistd::Uid;
use serde_json::Value;
use skysail_testkit::{Mesh, Setup};

const STOCK: &str = "http://stock.shop";

fn shop() -> Setup {
    Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml"))
}

#[test]
fn programs_run_confined_under_load() {
    confined_under_load(&shop().ready());
}

#[test]
fn programs_run_confined_as_an_ordinary_user() {
    let setup = if Uid::effective().is_root() { shop().as_user(65534) } else { shop() };
    confined_under_load(&setup.ready());
}

fn confined_under_load(mesh: &Mesh) {
    mesh.wait_status("front", STOCK, &[], 200);
    let load = mesh.load("front", &[STOCK, "-c", "4", "--rate", "200"]);
    load.wait_more(100);
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let sidecars = pods.iter().flat_map(|pod| pod["programs"].as_array().unwrap());
    let sidecars: Vec<_> = sidecars.filter(|program| program["name"] == "proxy").collect();
    assert!(sidecars.len() >= 2, "{status:#}");
    for sidecar in sidecars {
        assert_confined(mesh, &sidecar["process"]);
    }
    assert_confined(mesh, &status["control"]);
    load.wait_more(100);
    load.finish().assert_all_good();
}

/// Checks that each thread of the process is confined, and that no mapping is both writable and executable.
fn assert_confined(mesh: &Mesh, process: &Value) {
    let script = format!(
        "cat /proc/{process}/task/*/status | grep -E '^(NoNewPrivs|Seccomp):' | sort | uniq -c; \
         ls /proc/{process}/task | wc -l; cut -d' ' -f2 /proc/{process}/maps | sort -u"
    );
    let output = mesh.run(&["exec", "front", "--", "sh", "-c", &script]);
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let (privileges, seccomp) = (lines.next().unwrap(), lines.next().unwrap());
    let threads = lines.next().unwrap()[0];
    assert_eq!(privileges, [threads, "NoNewPrivs:", "1"], "{text}");
    assert_eq!(seccomp, [threads, "Seccomp:", "2"], "{text}");
    let mappings: Vec<_> = lines.map(|line| line[0].to_owned()).collect();
    assert!(mappings.iter().any(|rights| rights == "r-xp"), "{text}");
    assert!(!mappings.iter().any(|rights| rights.contains('w') && rights.contains('x')), "{text}");
}
