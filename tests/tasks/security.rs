//! Tasks of security: tokens, an external authorizer, mutual TLS, and limits of requests.

use std::fs;

use crate::{app_with, apply, assert_quiet, folder, remove, wait_answer};

const FILMS: &str = "http://films/";

#[test]
fn callers_are_authenticated_and_authorized() {
    let mesh = app_with(&["mutual-tls-migration"]).ready();

    apply(&mesh, "jwt");
    let token = |file: &str| {
        let token = fs::read_to_string(folder("jwt").join(file)).unwrap();
        format!("authorization: Bearer {}", token.trim())
    };
    let (guest, staff) = (token("guest.jwt"), token("staff.jwt"));
    wait_answer(&mesh, FILMS, &[], 403, "RBAC: access denied");
    // The pods of films get the policies at slightly different times.
    for (url, token, status) in [
        (FILMS, "authorization: Bearer forged", 401),
        ("http://films/staff", &guest, 403),
        ("http://films/staff", &staff, 200),
        (FILMS, &guest, 200),
    ] {
        wait_answer(&mesh, url, &["-H", token], status, "");
    }
    remove(&mesh, "jwt");
    wait_answer(&mesh, FILMS, &[], 200, "films");

    apply(&mesh, "external-authorization");
    let reserve = "http://seats/reserve/1";
    wait_answer(&mesh, reserve, &["-H", "x-pass: yes"], 200, r#""name":"seats-"#);
    wait_answer(&mesh, reserve, &["-H", "x-pass: no"], 403, "RBAC: access denied");
    wait_answer(&mesh, "http://seats/", &[], 200, r#""name":"seats-"#);
    remove(&mesh, "external-authorization");
    wait_answer(&mesh, reserve, &[], 200, "seats");

    let plain = "http://films.default/";
    mesh.wait_status("terminal", plain, &[], 200);
    mesh.edit("mutual-tls-migration-mode.yaml", "mode: PERMISSIVE", "mode: STRICT");
    skysail_testkit::eventually("plain text is refused", || match mesh.call("terminal", plain, &[]) {
        answer if answer.status.is_none() => Ok(()),
        answer => Err(format!("{answer:?}")),
    });
    let answer = wait_answer(&mesh, FILMS, &[], 200, "films");
    assert!(answer.contains(r#""caller":"spiffe://cluster.local/ns/default/sa/page""#), "{answer}");
    assert_quiet(&mesh);
}
