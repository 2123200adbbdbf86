//! HAProxy as a sidecar.

use std::fmt::Write as _;

use crate::node::{Node, Protocol};

/// Returns the configuration file.
pub(super) fn configuration(node: &Node<'_>) -> String {
    let bundle = node.own().bundle.display();
    let root = node.certificates.root.display();
    let application = match node.protocol {
        Protocol::Http1 => Some("http/1.1"),
        Protocol::Http2 | Protocol::Grpc => Some("h2"),
        Protocol::Tcp | Protocol::Echo => None,
    };
    let alpn = application.map_or_else(String::new, |name| format!(" alpn {name}"));
    let plain = if node.protocol.is_http2() { " proto h2" } else { "" };
    let bind = if node.tls_in() {
        let tickets = if node.resumption { "" } else { " no-tls-tickets" };
        format!(" ssl crt {bundle} ca-file {root} verify required{tickets}{alpn}")
    } else {
        plain.to_owned()
    };
    let server = if node.tls_out() {
        let name = &node.other().dns;
        format!(" ssl crt {bundle} ca-file {root} verify required verifyhost {name} sni str({name}){alpn}")
    } else {
        plain.to_owned()
    };
    let mode = if application.is_some() {
        "mode http\n  http-reuse always\n  option http-keep-alive"
    } else {
        "mode tcp\n  option splice-auto"
    };
    let (workers, listen, upstream) = (node.workers, node.listen, node.upstream);
    let mut text = format!(
        "global\n  nbthread {workers}\n  no strict-limits\n  maxconn {}\n  \
         ssl-default-bind-options ssl-min-ver TLSv1.3\n  \
         ssl-default-bind-ciphersuites TLS_AES_128_GCM_SHA256\n  ssl-default-bind-curves X25519\n  \
         ssl-default-server-options ssl-min-ver TLSv1.3\n  \
         ssl-default-server-ciphersuites TLS_AES_128_GCM_SHA256\n\
         defaults\n  {mode}\n  timeout connect 5s\n  timeout client 300s\n  timeout server 300s\n\
         frontend f\n  bind {listen}{bind}\n  default_backend b\n\
         backend b\n  server s {upstream}{server}\n",
        node.connections.max(4_000)
    );
    for number in 1..node.clusters {
        // Writing to a String cannot fail.
        let _ = write!(text, "backend b{number}\n  server s 127.0.0.1:{number}{server}\n");
    }
    text
}
