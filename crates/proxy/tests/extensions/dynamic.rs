//! Dynamic forward proxies: clusters whose hosts are resolved for each request or connection.

use std::{net::SocketAddr, sync::Arc};

use rustls::{ClientConfig, ClientConnection, RootCertStore, crypto::aws_lc_rs};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{
    ask, bootstrap,
    either::Either,
    files,
    support::{echo, server, within},
};

fn cache(name: &str) -> Value {
    json!({"name": name, "dns_lookup_family": "V4_ONLY", "max_hosts": 2, "host_ttl": "300s"})
}

fn cluster(name: &str, cache_name: &str) -> Value {
    let config = "type.googleapis.com/envoy.extensions.clusters.dynamic_forward_proxy.v3.ClusterConfig";
    json!({
        "name": name, "lb_policy": "CLUSTER_PROVIDED", "connect_timeout": "5s",
        "cluster_type": {"name": "envoy.clusters.dynamic_forward_proxy",
            "typed_config": {"@type": config, "dns_cache_config": cache(cache_name)}}
    })
}

fn http(to: &str, cache_name: Option<&str>) -> Value {
    let filter = |name| {
        let config = json!({"dns_cache_config": cache(name)});
        files::filter("http.dynamic_forward_proxy.v3.FilterConfig", &config)
    };
    files::http(&cache_name.map(filter).into_iter().collect::<Vec<_>>(), &files::to(to), &json!({}))
}

#[tokio::test]
async fn the_host_of_a_request_is_resolved() {
    let (one, two) = (echo().await, echo().await);
    let listeners =
        [files::listener("dynamic", &[http("d", Some("c"))]), files::listener("without", &[http("d", None)])];
    for proxy in Either::both(&bootstrap(&listeners, &[cluster("d", "c")])).await {
        let address = proxy.listener("dynamic").await;
        let request = |host: String| format!("GET /x HTTP/1.1\r\nhost: {host}\r\n\r\n");
        for server in [one, two, one] {
            let (head, body) = ask(address, &request(format!("localhost:{}", server.port()))).await;
            assert!(head.starts_with("HTTP/1.1 200 "), "{head}{body}");
            assert!(body.contains(&format!("localhost:{}", server.port())), "{body}");
        }
        // The cache has two hosts already.
        let (head, body) = ask(address, &request("localhost:1".to_owned())).await;
        assert!(head.starts_with("HTTP/1.1 503 ") && body == "DNS cache overflow", "{head}{body}");
    }
    let [_, proxy] = Either::both(&bootstrap(&listeners, &[cluster("d", "other")])).await;
    // Only the filter lets the host be resolved.
    let request = format!("GET / HTTP/1.1\r\nhost: localhost:{}\r\n\r\n", one.port());
    let (head, body) = ask(proxy.listener("without").await, &request).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && body == "no healthy upstream", "{head}{body}");
    let request = "GET / HTTP/1.1\r\nhost: nothing.invalid\r\n\r\n";
    let (head, body) = ask(proxy.listener("dynamic").await, request).await;
    assert!(head.starts_with("HTTP/1.1 503 ") && body == "DNS resolution failure", "{head}{body}");
}

/// Returns a client hello for a server name.
fn hello(name: &str) -> Vec<u8> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    let mut connection =
        ClientConnection::new(Arc::new(config), name.to_owned().try_into().unwrap()).unwrap();
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn the_server_name_of_a_connection_is_resolved() {
    let server: SocketAddr = server(|_, mut client| async move {
        client.exactly(1).await;
        client.send("reached").await;
    })
    .await;
    let config = json!({"dns_cache_config": cache("s"), "port_value": server.port()});
    let sni = files::filter("network.sni_dynamic_forward_proxy.v3.FilterConfig", &config);
    let tcp = files::filter("network.tcp_proxy.v3.TcpProxy", &json!({"stat_prefix": "t", "cluster": "d"}));
    let mut listener = files::listener("sni", &[sni, tcp]);
    let inspector = "type.googleapis.com/envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector";
    listener["listener_filters"] = json!([{"name": "i", "typed_config": {"@type": inspector}}]);
    for proxy in Either::both(&bootstrap(&[listener], &[cluster("d", "s")])).await {
        for (name, expected) in [("localhost", "reached"), ("nothing.invalid", "")] {
            let mut client = TcpStream::connect(proxy.listener("sni").await).await.unwrap();
            client.write_all(&hello(name)).await.unwrap();
            let mut answer = [0; 7];
            let reached = within(client.read_exact(&mut answer)).await;
            assert_eq!(reached.is_ok(), !expected.is_empty(), "{name}");
            if reached.is_ok() {
                assert_eq!(answer, expected.as_bytes());
            }
        }
    }
}
