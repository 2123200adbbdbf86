//! Telemetry: the interval at which the metrics of open connections are reported. A public Envoy has no filter for
//! Istio's metrics, so `skysail-proxy` alone is tested.

use std::{
    io::Read as _,
    process::{Child, Stdio},
};

use skysail_testkit::{Mesh, eventually};

use crate::mesh_with;

const RULES: &str = include_str!("telemetry_intervals.yaml");
/// Sends a line, prints its echo, and holds the connection until the standard input ends.
const HELD: &str = "exec 3<>/dev/tcp/lines/9000; echo hi >&3; head -1 <&3; cat";

/// A connection of a client that has sent and received a line.
struct Held(Child);

impl Held {
    fn open(mesh: &Mesh, client: &str) -> Self {
        eventually(&format!("{client} is connected"), || {
            let mut command = mesh.command(&["exec", client, "--", "bash", "-c", HELD]);
            let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
            let mut held = Self(command.spawn().unwrap());
            let mut echo = [0; 3];
            let read = held.0.stdout.as_mut().unwrap().read_exact(&mut echo);
            if read.is_ok() && echo == *b"hi\n" { Ok(held) } else { Err(format!("{read:?} {echo:?}")) }
        })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Returns the bytes that a client's sidecar has reported as sent to the server.
fn reported(mesh: &Mesh, client: &str) -> u64 {
    let page = mesh.call(client, "http://127.0.0.1:15090/stats/prometheus", &[]).body;
    let is_sent =
        |line: &&str| line.starts_with("istio_tcp_sent_bytes_total{") && line.contains("\"lines.shop.svc");
    let values = page.lines().filter(is_sent).filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    values.sum()
}

fn wait_reported(mesh: &Mesh, client: &str, before: u64) {
    eventually(&format!("the sidecar of {client} reports"), || match reported(mesh, client) {
        bytes if bytes > before => Ok(()),
        bytes => Err(format!("{bytes} bytes")),
    });
}

#[test]
fn open_connections_are_reported_at_intervals() {
    let mesh = mesh_with(RULES, &[]).ready();
    let slow = Held::open(&mesh, "slow");
    let before = reported(&mesh, "slow");
    let _default = Held::open(&mesh, "by-skysail");
    let _quick = Held::open(&mesh, "quick");
    wait_reported(&mesh, "quick", 0);
    // The default is 5 s.
    wait_reported(&mesh, "by-skysail", 0);
    assert_eq!(reported(&mesh, "slow"), before, "its connection is older than that of by-skysail");
    // The end of a connection is reported at once.
    drop(slow);
    wait_reported(&mesh, "slow", before);
}
