//! Tasks that route requests and connections of the mesh.

use crate::{app_with, apply, remove, versions, wait_answer, wait_only};

const FILMS: &str = "http://films/";

#[test]
fn requests_are_routed_delayed_and_split() {
    let mesh = app_with(&[]).ready();
    for version in ["v1", "v2", "v3"] {
        wait_answer(&mesh, FILMS, &[], 200, &format!(r#""version":"{version}""#));
    }

    apply(&mesh, "request-routing");
    wait_only(&mesh, FILMS, &[], "v1");
    assert_eq!(versions(&mesh, FILMS, 5, &["-H", "x-user: mia"])["v2"], 5);
    remove(&mesh, "request-routing");
    wait_answer(&mesh, FILMS, &[], 200, r#""version":"v3""#);
}
