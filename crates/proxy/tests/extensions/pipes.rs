//! Endpoints on Unix domain sockets.

use std::{net::SocketAddr, path::Path};

use serde_json::{Value, json};
use tokio::{
    io::copy_bidirectional,
    net::{TcpStream, UnixListener},
};

use crate::{ask, bootstrap, either::Either, files, support::echo};

/// Serves a Unix domain socket by a TCP server.
fn serve(path: &Path, server: SocketAddr) {
    let listener = UnixListener::bind(path).unwrap();
    tokio::spawn(async move {
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut far = TcpStream::connect(server).await.unwrap();
                let _ = copy_bidirectional(&mut near, &mut far).await;
            });
        }
    });
}

fn cluster(name: &str, path: &Path, http2: bool) -> Value {
    let mut cluster = files::cluster(name, SocketAddr::from(([127, 0, 0, 1], 1)), http2);
    let endpoint = &mut cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"];
    endpoint["address"] = json!({"pipe": {"path": path}});
    cluster
}

fn http(to: &str) -> Value {
    let upstream = |name: &str, value: &str| {
        let header = json!({"key": name, "value": value});
        json!({"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"})
    };
    let added = json!([
        upstream("x-host", "%UPSTREAM_HOST%"),
        upstream("x-remote", "%UPSTREAM_REMOTE_ADDRESS%"),
        upstream("x-no-port", "%UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%"),
    ]);
    let routes =
        json!([{"match": {"prefix": "/"}, "route": {"cluster": to}, "response_headers_to_add": added}]);
    files::http(&[], &routes, &json!({}))
}

fn tcp(to: &str) -> Value {
    files::filter("network.tcp_proxy.v3.TcpProxy", &json!({"stat_prefix": "t", "cluster": to}))
}

#[tokio::test]
async fn requests_and_connections_reach_unix_domain_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    let missing = folder.path().join("missing");
    serve(&one, echo().await);
    // The server of `two` speaks HTTP/2: it is a proxy in front of `one`.
    let behind = bootstrap(
        &[files::listener("h2", &[files::http(&[], &files::to("one"), &json!({"codec_type": "HTTP2"}))])],
        &[cluster("one", &one, false)],
    );
    let [_, behind] = Either::both(&behind).await;
    serve(&two, behind.listener("h2").await);
    let listeners = [
        files::listener("http1", &[http("one")]),
        files::listener("http2", &[http("two")]),
        files::listener("tcp", &[tcp("one")]),
        files::listener("missing", &[http("missing")]),
    ];
    let clusters =
        [cluster("one", &one, false), cluster("two", &two, true), cluster("missing", &missing, false)];
    for proxy in Either::both(&bootstrap(&listeners, &clusters)).await {
        for (listener, path) in [("http1", &one), ("http2", &two)] {
            for _ in 0..2 {
                let (head, body) =
                    ask(proxy.listener(listener).await, "GET /x HTTP/1.1\r\nhost: a\r\n\r\n").await;
                assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
                assert!(body.contains("GET /x HTTP/1.1"), "{body}");
                for header in ["x-host", "x-remote", "x-no-port"] {
                    let expected = format!("\r\n{header}: {}\r\n", path.display());
                    assert!(head.contains(&expected), "{expected:?} in {head}");
                }
            }
        }
        let (head, body) = ask(proxy.listener("tcp").await, "GET /y HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 200 ") && body.contains("GET /y HTTP/1.1"), "{head}{body}");
        let (head, _) = ask(proxy.listener("missing").await, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
        let page = proxy.page("/clusters").await;
        for (name, path, total) in [("one", &one, 2), ("two", &two, 1)] {
            let connections = format!("{name}::{}::cx_total::{total}", path.display());
            assert!(page.contains(&connections), "{connections} in {page}");
        }
        let failed = format!("missing::{}::cx_connect_fail::1", missing.display());
        assert!(page.contains(&failed), "{failed} in {page}");
        let page = proxy.page("/clusters?format=json").await;
        let pipe = page.split_once("\r\n\r\n").unwrap().1.replace(char::is_whitespace, "");
        assert!(pipe.contains(&format!("\"pipe\":{{\"path\":\"{}\"", one.display())), "{page}");
    }
}
