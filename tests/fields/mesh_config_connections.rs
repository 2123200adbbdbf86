//! MeshConfig: settings of the connections that proxies accept, and those of an annotation, which replace them.

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, Case, check, get, mesh_with, wait, with};

const RULES: &str = include_str!("mesh_config_connections.yaml");
/// Clients whose annotation sets nothing, and a server with a proxy of the same kind.
const OWN: [(&str, &str); 2] = [("own-skysail", "ours"), ("own-envoy", "theirs")];
/// A header whose name has an underscore.
const UNDERSCORE: [&str; 2] = ["-H", "x_name: 1"];

#[test]
fn connections_have_the_settings_of_the_mesh() {
    let mesh = mesh_with(RULES, &["shop/by-envoy", "shop/own-envoy", "shop/api-v2"]).ready();
    for client in CLIENTS {
        wait(&mesh, client, &get("http://server/", 200, &["\"pod\""]));
        requests(&mesh, client);
        timeouts(&mesh, client);
        let dump = mesh.call(client, "http://127.0.0.1:15000/config_dump", &[]).body;
        let dump: String = dump.split_whitespace().collect();
        for text in [
            "\"max_concurrent_streams\":77",
            "\"initial_stream_window_size\":65536",
            "\"initial_connection_window_size\":131072",
        ] {
            assert!(dump.contains(text), "{client} has no {text}: {dump}");
        }
    }
    annotations(&mesh);
    changes(&mesh);
}

fn requests(mesh: &Mesh, client: &str) {
    let cases = [
        get("http://server/a//b", 200, &["\"path\":\"/a/b\""]),
        get("http://server/a%2Fb", 400, &[]),
        with(&UNDERSCORE, "http://server/", 400, &[]),
        get("http://server/?delay=20s", 504, &["duration timeout"]),
    ];
    check(mesh, &[client], &cases);
    // A stream of HTTP/2 is reset.
    let reset = mesh.call(client, "http://server/", &["--http2", "-H", "x_name: 1"]);
    assert_eq!(reset.status, None, "{client}: {reset:?}");
    check(mesh, &[client], &[with(&["--http2"], "http://server/", 200, &["\"pod\""])]);
}

/// Sends bytes on a connection to a service, and returns what arrives until it ends. Fails if it does not end.
fn raw(mesh: &Mesh, client: &str, bytes: &str, seconds: u32) -> Result<String, String> {
    let script =
        format!("exec 3<>/dev/tcp/server/80; printf '{bytes}' >&3; timeout {seconds} cat <&3 || echo lasts");
    let output = mesh.run(&["exec", client, "--", "bash", "-c", &script]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if text.ends_with("lasts\n") { Err(text) } else { Ok(text) }
}

fn timeouts(mesh: &Mesh, client: &str) {
    let head = "GET / HTTP/1.1\\r\\nhost: server\\r\\n";
    let body = "POST / HTTP/1.1\\r\\nhost: server\\r\\ncontent-length: 9\\r\\n\\r\\nhalf";
    for (bytes, text) in [(head, "request header timeout"), (body, "request timeout")] {
        eventually(&format!("{client}: {text}"), || {
            let response = raw(mesh, client, bytes, 30)?;
            if response.starts_with("HTTP/1.1 408 ") && response.contains(text) {
                Ok(())
            } else {
                Err(response)
            }
        });
    }
    // The default is an hour.
    eventually(&format!("an idle connection of {client} ends"), || {
        let response = raw(mesh, client, &format!("{head}\\r\\n"), 30)?;
        if response.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(response) }
    });
}

/// Proxies with an annotation have none of the settings of the mesh. Their servers have.
fn annotations(mesh: &Mesh) {
    for (client, server) in OWN {
        let cases = [
            get("http://server/a//b", 200, &["\"path\":\"/a//b\""]),
            get("http://server/a%2Fb", 200, &["\"path\":\"/a%2Fb\""]),
            with(&UNDERSCORE, "http://server/", 200, &["\"x_name\":\"1\""]),
        ];
        wait(mesh, client, &get("http://server/", 200, &["\"pod\""]));
        check(mesh, &[client], &cases);
        let [root, slashes, escaped] = ["/", "/a//b", "/a%2Fb"].map(|path| format!("http://{server}{path}"));
        wait(mesh, client, &get(&root, 200, &["\"pod\""]));
        let cases = [
            get(&slashes, 200, &["\"path\":\"/a/b\""]),
            get(&escaped, 400, &[]),
            with(&UNDERSCORE, &root, 400, &[]),
        ];
        check(mesh, &[client], &cases);
    }
}

fn changes(mesh: &Mesh) {
    for (from, to) in [
        ("UNDERSCORES_REJECT_REQUEST", "UNDERSCORES_DROP_HEADER"),
        ("Action: REJECT_REQUEST", "Action: UNESCAPE_AND_REDIRECT"),
        ("httpMergeSlashes: true", "httpMergeSlashes: false"),
        ("httpMaxStreamDuration: 5s", "httpStreamIdleTimeout: 1s"),
        ("httpIdleTimeout: 1s", "httpMaxConnectionDuration: 500ms, httpDrainTimeout: 100ms"),
    ] {
        mesh.edit("rules.yaml", from, to);
    }
    for client in CLIENTS {
        let dropped = Case { lacks: &["x_name"], ..with(&UNDERSCORE, "http://server/", 200, &["\"pod\""]) };
        wait(mesh, client, &dropped);
        wait(mesh, client, &get("http://server/a%2Fb", 307, &["location: /a/b"]));
        wait(mesh, client, &get("http://server/a//b", 200, &["\"path\":\"/a//b\""]));
        wait(mesh, client, &get("http://server/?delay=20s", 504, &["stream timeout"]));
        // Without the setting the drain takes 5 s.
        eventually(&format!("an old connection of {client} ends"), || {
            let request = "GET / HTTP/1.1\\r\\nhost: server\\r\\n\\r\\n";
            let response = raw(mesh, client, request, 4)?;
            if response.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(response) }
        });
    }
    mesh.edit("rules.yaml", "UNDERSCORES_DROP_HEADER", "UNDERSCORES_ALLOW");
    mesh.edit("rules.yaml", "Action: UNESCAPE_AND_REDIRECT", "Action: UNESCAPE_AND_FORWARD");
    for client in CLIENTS {
        wait(mesh, client, &with(&UNDERSCORE, "http://server/", 200, &["\"x_name\":\"1\""]));
        wait(mesh, client, &get("http://server/a%2Fb", 200, &["\"path\":\"/a/b\""]));
    }
}
