//! AuthorizationPolicy, RequestAuthentication and PeerAuthentication, enforced by `skysail-proxy` and by a real Envoy.

use skysail_testkit::{Mesh, eventually};

use crate::{Case, ask, check, get, mesh_with, wait, wait_logged, with};

const RULES: &str = include_str!("policies.yaml");
/// Key set of the token. Its private key was deleted after it was signed.
const KEYS: &str = include_str!("keys.json");
/// Token of `alice` for the audience `shop` with the claim `team: blue`, valid until 2100.
const TOKEN: &str = include_str!("alice.jwt");
/// Key set of the next token. Its private key was deleted after it was signed.
const LOGINS: &str = r#"{"keys":[{"kty":"EC","kid":"p","alg":"ES256","use":"sig","crv":"P-256","x":"qPSQYr9hzHJXewsjzNFL9yP0tGDCQ9OiJlvrait83YI","y":"i4bZtVxDKDm99fJ1irOviuX5eApLd6-8HRDxoxLEwb8"}]}"#;
/// Token of `bob` for the presenter `till` with the claim `realm.roles: [editor, reader]`, valid until 2100.
const LOGIN: &str = "eyJhbGciOiJFUzI1NiIsImtpZCI6InAiLCJ0eXAiOiJKV1QifQ.eyJpc3MiOiJodHRwczovL2xvZ2lucy5leGFtcGxlLmNvbSIsInN1YiI6ImJvYiIsImF6cCI6InRpbGwiLCJleHAiOjQxMDI0NDQ4MDAsInJlYWxtIjp7InJvbGVzIjpbImVkaXRvciIsInJlYWRlciJdfX0.pWMUV_YwtuUfUKnvxlYBmEc5eUNi-Ivkcwfi4OEp2KRjzwWzK_72VUfdsMfW4tumxD4p4tQ_yI53lHjsJG_bHg";
/// Values of the header that selects the server.
const SERVERS: [&str; 2] = ["v1", "v2"];

/// Checks the status of each path for a client at both servers.
fn statuses(mesh: &Mesh, client: &str, arguments: &[&str], paths: &[(&str, u16)]) {
    for server in SERVERS {
        let header = format!("x-to: {server}");
        let arguments = [&["-H", &header], arguments].concat();
        let urls: Vec<(String, u16)> =
            paths.iter().map(|(path, status)| (format!("http://api.shop{path}"), *status)).collect();
        let cases: Vec<Case<'_>> =
            urls.iter().map(|(url, status)| with(&arguments, url, *status, &[])).collect();
        check(mesh, &[client], &cases);
    }
}

#[test]
fn requests_are_denied_by_their_attributes() {
    let rules = RULES.replace("KEYS", KEYS.trim()).replace("LOGINS", LOGINS);
    let mesh = mesh_with(&rules, &["shop/api-v2", "shop/modes-envoy"]).ready();
    for client in ["by-skysail", "outsider"] {
        for server in SERVERS {
            let header = format!("x-to: {server}");
            let to = ["-H", header.as_str()];
            let open = with(&to, "http://api.shop/", 200, &[]);
            wait(&mesh, client, &open);
        }
    }
    sources(&mesh);
    operations(&mesh);
    conditions(&mesh);
    tokens(&mesh);
    policies_without_refusals(&mesh);
    modes(&mesh);
}

fn sources(mesh: &Mesh) {
    let buyer = [
        ("/principals", 403),
        ("/not-principals", 200),
        ("/namespaces", 200),
        ("/not-namespaces", 403),
        ("/service-accounts", 403),
        ("/not-service-accounts", 200),
        ("/trust-domains", 403),
        ("/not-trust-domains", 200),
        ("/ip-blocks", 403),
        ("/not-ip-blocks", 200),
        ("/remote-ip-blocks", 200),
        ("/not-remote-ip-blocks", 403),
        ("/request-principals", 200),
        ("/not-request-principals", 403),
        ("/audit", 200),
    ];
    statuses(mesh, "by-skysail", &[], &buyer);
    let outsider = [
        ("/principals", 200),
        ("/not-principals", 403),
        ("/namespaces", 403),
        ("/not-namespaces", 200),
        ("/service-accounts", 200),
        ("/not-service-accounts", 403),
    ];
    statuses(mesh, "outsider", &[], &outsider);
    let forwarded = &["-H", "x-forwarded-for: 192.0.2.7"];
    let remote = [
        ("/remote-ip-blocks", 403),
        ("/not-remote-ip-blocks", 200),
        ("/when/remote-ip", 403),
        ("/ip-blocks", 403),
    ];
    statuses(mesh, "by-skysail", forwarded, &remote);
}

fn operations(mesh: &Mesh) {
    let get = [
        ("/hosts", 403),
        ("/not-hosts", 200),
        ("/ports", 403),
        ("/not-ports", 200),
        ("/methods", 200),
        ("/not-methods", 200),
        ("/exact", 403),
        ("/exact/more", 200),
        ("/prefix/a", 403),
        ("/any/suffix", 403),
        ("/one/a/end", 403),
        ("/one/a/b/end", 200),
        ("/many/a/b/c", 403),
        ("/but/a", 403),
        ("/but/not/a", 200),
    ];
    statuses(mesh, "by-skysail", &[], &get);
    statuses(mesh, "by-skysail", &["-X", "POST"], &[("/methods", 403), ("/not-methods", 403)]);
    for server in SERVERS {
        let header = format!("x-to: {server}");
        let to = ["-H", &header];
        let other = "http://api.shop.svc.cluster.local/hosts";
        check(
            mesh,
            &["by-skysail"],
            &[with(&to, other, 200, &[]), with(&to, "http://api/not-hosts", 403, &[])],
        );
    }
}

fn conditions(mesh: &Mesh) {
    let buyer = [
        ("/when/source-ip", 403),
        ("/when/remote-ip", 200),
        ("/when/source-namespace", 200),
        ("/when/source-principal", 403),
        ("/when/source-account", 403),
        ("/when/trust-domain", 403),
        ("/when/other-trust-domain", 200),
        ("/when/not-trust-domain", 403),
        ("/when/destination-ip", 403),
        ("/when/destination-port", 403),
        ("/when/sni", 403),
        ("/when/header", 200),
        ("/when/not-header", 403),
        ("/when/metadata", 200),
        ("/when/metadata-list", 200),
    ];
    statuses(mesh, "by-skysail", &[], &buyer);
    for (color, status) in [("blue", 403), ("red", 200)] {
        let header = format!("x-color: {color}");
        let paths =
            [("/when/metadata", status), ("/when/metadata-list", status), ("/when/metadata-absent", 200)];
        statuses(mesh, "by-skysail", &["-H", &header], &paths);
    }
    let outsider =
        [("/when/source-namespace", 403), ("/when/source-principal", 200), ("/when/source-account", 200)];
    statuses(mesh, "outsider", &[], &outsider);
    statuses(
        mesh,
        "by-skysail",
        &["-H", "x-deny: once", "-H", "x-pass: yes"],
        &[("/when/header", 403), ("/when/not-header", 200)],
    );
}

fn tokens(mesh: &Mesh) {
    let bearer = format!("x-token: Token {}", TOKEN.trim());
    let paths = [
        ("/request-principals", 403),
        ("/not-request-principals", 200),
        ("/when/token-principal", 403),
        ("/when/token-audiences", 403),
        ("/when/token-presenter", 200),
        ("/when/token-claims", 403),
    ];
    statuses(mesh, "by-skysail", &["-H", &bearer], &paths);
    let without: Vec<(&str, u16)> = paths[2..].iter().map(|(path, _)| (*path, 200)).collect();
    statuses(mesh, "by-skysail", &[], &without);
    let of_login = ["/when/token-presenter", "/when/nested-claims"];
    let others = ["/when/other-presenter", "/when/other-nested-claims"];
    let login = format!("x-login: {LOGIN}");
    let each = |paths: [&'static str; 2], status: u16| paths.map(|path| (path, status));
    statuses(mesh, "by-skysail", &["-H", &login], &each(of_login, 403));
    statuses(mesh, "by-skysail", &["-H", &login], &each(others, 200));
    // The first token has no presenter.
    statuses(mesh, "by-skysail", &["-H", &bearer], &[(of_login[0], 200)]);
    statuses(mesh, "by-skysail", &[], &each(of_login, 200));
    let cookie = format!("cookie: session={}", TOKEN.trim());
    let of_param = format!("/when/token-claims?token={}", TOKEN.trim());
    statuses(mesh, "by-skysail", &["-H", &cookie], &[("/when/token-claims", 403)]);
    statuses(mesh, "by-skysail", &[], &[(&of_param, 403)]);
    statuses(mesh, "by-skysail", &["-H", "x-token: Token no.token.here"], &[("/", 401)]);
    for server in SERVERS {
        let header = format!("x-to: {server}");
        let arguments = ["-H", &header, "-H", &bearer, "-H", "x-team: red"];
        let has = ["\"x-team\":\"blue\"", "\"x-payload\":", "\"x-token\":\"Token "];
        check(mesh, &["by-skysail"], &[with(&arguments, "http://api.shop/", 200, &has)]);
    }
}

/// An audit is in the access log, and a dry run in the metrics. Neither refuses a request.
fn policies_without_refusals(mesh: &Mesh) {
    let paths = [("/audit", 200), ("/no-audit", 200), ("/dry-run", 200)];
    let before = SERVERS.map(|server| refused_by_dry_run(mesh, server));
    statuses(mesh, "by-skysail", &[], &paths);
    for (server, before) in SERVERS.into_iter().zip(before) {
        let workload = format!("api-{server}");
        let log = [workload.as_str(), "-c", "proxy"];
        wait_logged(mesh, &log, &["/audit 200", "hint=true"]);
        wait_logged(mesh, &log, &["/no-audit 200", "hint=false"]);
        eventually(&format!("{server} counts one request"), || match refused_by_dry_run(mesh, server) {
            count if count == before + 1 => Ok(()),
            count => Err(format!("{count} after {before}")),
        });
    }
}

/// Returns how many requests a server would have refused without the dry run.
fn refused_by_dry_run(mesh: &Mesh, server: &str) -> u64 {
    let page = mesh.call(&format!("api-{server}"), "http://127.0.0.1:15090/stats/prometheus", &[]).body;
    let is_it = |line: &&str| {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        name.contains("rbac") && name.ends_with("shadow_denied")
    };
    let values = page.lines().filter(is_it).filter_map(|line| line.rsplit(' ').next());
    values.map(|value| value.parse::<u64>().unwrap()).sum()
}

/// A client outside of the mesh sends plain text, one of the mesh what the port requires.
fn modes(mesh: &Mesh) {
    let caller = "\"caller\":\"spiffe://cluster.local/ns/shop/sa/buyer\"";
    let none = "\"caller\":null";
    for server in ["modes", "modes-envoy"] {
        let url = |port: u16| format!("http://{server}.shop:{port}/");
        for (port, has) in [(80, caller), (81, caller), (82, none)] {
            wait(mesh, "by-skysail", &get(&url(port), 200, &[has]));
        }
        for port in [81, 82] {
            wait(mesh, "plain", &get(&url(port), 200, &[none]));
        }
        let refused = ask(mesh, "plain", &get(&url(80), 200, &[]));
        assert!(refused.is_err_and(|answer| answer.contains("status: None")), "{server}");
    }
    // The mode of the workload holds for its other ports.
    for (from, to, has) in [("STRICT", "PERMISSIVE", caller), ("PERMISSIVE", "DISABLE", none)] {
        for server in ["modes", "modes-envoy"] {
            let selector = |mode: &str| format!("{{app: {server}}}}}\n  mtls: {{mode: {mode}}}");
            mesh.edit("rules.yaml", &selector(from), &selector(to));
            let url = format!("http://{server}.shop/");
            wait(mesh, "plain", &get(&url, 200, &[none]));
            wait(mesh, "by-skysail", &get(&url, 200, &[has]));
        }
    }
}
