//! The task of a machine outside of the cluster that registers itself.

use skysail_testkit::eventually;

use crate::{app_with, assert_quiet, wait_answer};

#[test]
fn a_machine_registers_and_leaves() {
    let mesh = app_with(&["machine"]).ready();
    let url = "http://projector/";
    let answer = wait_answer(&mesh, url, &[], 200, r#""name":"machine-"#);
    assert!(answer.contains(r#""caller":"spiffe://cluster.local/ns/default/sa/page""#), "{answer}");
    let denied = mesh.call("seats", url, &[]);
    assert_eq!(denied.status, Some(403), "{denied:?}");
    assert_quiet(&mesh);

    // The entry is removed 10 seconds after the proxy has left. Until then connections to the machine hang.
    mesh.edit("machine-machine.yaml", "replicas: 1", "replicas: 0");
    eventually("no endpoint is left", || match mesh.call("page", url, &["-m", "1"]) {
        answer if answer.body.contains("no healthy upstream") => Ok(()),
        answer => Err(format!("{answer:?}")),
    });
}
