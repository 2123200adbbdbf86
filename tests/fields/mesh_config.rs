//! MeshConfig: settings that hold for all proxies, and changes of them while the mesh runs.

use skysail_testkit::eventually;

use crate::{CLIENTS, Case, check, get, mesh_with, wait, wait_logged, with};

const RULES: &str = include_str!("mesh_config.yaml");

#[test]
fn settings_hold_for_all_proxies() {
    let mesh = mesh_with(RULES, &["shop/by-envoy", "shop/api-v2"]).ready();
    for client in CLIENTS {
        for (server, arguments) in [("v1", &["-H", "x-to: v1"]), ("v2", &["-H", "x-to: v2"])] {
            let version = format!("\"version\":\"{server}\"");
            wait(&mesh, client, &with(arguments, "http://api/", 200, &[&version]));
            wait(&mesh, client, &get("http://shown.discovered/", 200, &["guest"]));
            wait(&mesh, client, &get("http://exported/", 200, &[]));
            let headers = [
                "server: own-server",
                "\"x-request-id\":\"",
                "\"x-envoy-attempt-count\":\"1\"",
                "\"x-forwarded-host\":\"api\"",
                ";Cert=",
                ";Chain=",
                "URI=spiffe://cluster.local/ns/shop/sa/buyer",
            ];
            let url = format!("http://api/logged/{client}");
            check(
                &mesh,
                &[client],
                &[Case { url: &url, arguments, status: 200, has: &headers, lacks: &["Subject="] }],
            );
            let cases = [
                with(arguments, "http://api/retried?status=503", 503, &["\"x-envoy-attempt-count\":\"4\""]),
                with(arguments, "http://api/denied/everywhere", 403, &[]),
                with(arguments, "http://api//denied%2Feverywhere", 403, &[]),
            ];
            check(&mesh, &[client], &cases);
            let of_server = format!("api-{server}");
            for of in [client, &of_server] {
                wait_logged(
                    &mesh,
                    &[of, "-c", "proxy"],
                    &[&format!("\"where\":\"/logged/{client}\""), "\"code\":200"],
                );
            }
        }
        let hidden = [
            get("http://unexported.discovered/", 502, &[]),
            get("http://hidden.other/", 502, &[]),
            get("http://exported/", 200, &["\"caller\":\"spiffe://"]),
            with(&["-H", "host: public.example"], "http://exported/", 200, &["guest"]),
            with(&["-H", "host: own.example"], "http://exported/", 200, &["\"version\""]),
            with(&["-H", "host: foreign.example"], "http://exported/", 502, &[]),
            with(&["-H", "host: none.example"], "http://exported/", 502, &[]),
        ];
        check(&mesh, &[client], &hidden);
    }
    changes(&mesh);
}

/// Settings take effect without a restart.
fn changes(mesh: &skysail_testkit::Mesh) {
    mesh.edit("rules.yaml", "requestId: {disabled: false}", "requestId: {disabled: true}");
    mesh.edit("rules.yaml", "attemptCount: {disabled: false}", "attemptCount: {disabled: true}");
    mesh.edit("rules.yaml", "server: {value: own-server}", "server: {disabled: true}");
    mesh.edit("rules.yaml", "forwardedClientCert: SANITIZE_SET", "forwardedClientCert: SANITIZE");
    mesh.edit("rules.yaml", "h2UpgradePolicy: UPGRADE", "enableAutoMtls: false");
    mesh.edit("rules.yaml", "mode: REGISTRY_ONLY", "mode: ALLOW_ANY");
    for client in CLIENTS {
        for arguments in [&["-H", "x-to: v1"], &["-H", "x-to: v2"]] {
            let none = ["x-request-id", "x-envoy-attempt-count", "own-server", "x-forwarded-client-cert"];
            let case =
                Case { url: "http://api/", arguments, status: 200, has: &["\"caller\":null"], lacks: &none };
            eventually("the settings take effect", || crate::ask(mesh, client, &case));
        }
        // No listener refuses unknown hosts any more: the connection passes through to the address of the service.
        wait(mesh, client, &get("http://hidden.other/", 200, &["\"caller\":null"]));
    }
}
